"""The runs of `proof/runs.ndjson` as tables."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tallystick_tools.chaos.schedule import KINDS
from tests.campaign.jobs import WORKLOADS

RUNS = Path(__file__).parents[2] / "proof" / "runs.ndjson"


def runs() -> list[dict[str, Any]]:
    """All runs that were noted."""
    return [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.exists() else []


def faults() -> str:
    """A table of the kinds of faults."""
    rows = [f"| `{kind}` | {what} |" for kind, what in KINDS.items()]
    return "\n".join(["| fault | what happens |", "| --- | --- |", *rows])


def campaign() -> str:
    """Tables of the runs: by program, and by kind of fault."""
    noted = runs()
    hit: Counter[str] = Counter()
    for entry in noted:
        hit.update(entry["hit"])
    exact = sum(entry["exact"] for entry in noted)
    days = sorted({entry["at"][:10] for entry in noted})
    versions = Counter(entry["transaction_version"] for entry in noted)
    lines = [
        f"{len(noted)} runs so far ({', '.join(days)}; two cores that also ran tests), {exact} of "
        f"them exact: {sum(hit.values()):,} faults that hit, "
        f"{sum(entry['starts'] for entry in noted):,} starts of programs, "
        f"{sum(entry['rows'] for entry in noted):,} rows compared; "
        f"{sum(entry['brokers'] == 3 for entry in noted)} on three brokers, "
        f"{sum(entry.get('in_object_store', False) for entry in noted)} with the checkpoint in an "
        f"object store; with "
        + ", ".join(f"`transaction.version={v}` {n}" for v, n in sorted(versions.items()))
        + ".",
        "",
        "| program | asks about | runs | exact | faults that hit |",
        "| --- | --- | --- | --- | --- |",
    ]
    removed = sorted({entry["workload"] for entry in noted} - WORKLOADS.keys())
    for name in [*WORKLOADS, *removed]:
        asks = WORKLOADS[name].asks if name in WORKLOADS else "a program that is gone"
        own = [entry for entry in noted if entry["workload"] == name]
        faults_hit = sum(sum(entry["hit"].values()) for entry in own)
        good = sum(entry["exact"] for entry in own)
        lines.append(f"| {name} | {asks} | {len(own)} | {good} | {faults_hit} |")
    lines += ["", "Hits: " + ", ".join(f"{kind} {hit[kind]}" for kind in KINDS if hit[kind]) + "."]
    return "\n".join(lines)
