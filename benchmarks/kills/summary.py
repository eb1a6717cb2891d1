"""The runs of `proof/peers.ndjson` as tables."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .schedule import KINDS, OUTAGE
from .systems import SYSTEMS

RUNS = Path(__file__).parents[2] / "proof" / "peers.ndjson"
WRONGS = ("lost", "duplicated", "out_of_order", "wrong")


def runs(schedule: str) -> list[dict[str, Any]]:
    """Return the noted runs of a kind of schedule."""
    lines = RUNS.read_text().splitlines() if RUNS.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["schedule"] == schedule]


def kinds() -> str:
    """Return a table of the kinds of faults."""
    rows = [f"| `{kind}` | {what} |" for kind, what in KINDS.items()]
    return "\n".join(["| fault | what happens |", "| --- | --- |", *rows])


def comparison() -> str:
    """Return the main comparison: what was lost, and how long each system was away."""
    noted = runs("kills")
    return "\n\n".join(
        [_basis(noted), _correctness(noted), _seconds(noted), *_notes(noted)] if noted else []
    )


def outages() -> str:
    """Return the runs in which the job was away for longer than transactions live."""
    rows = ["| system | transaction timeout | seed | " + " | ".join(_headings()) + " |"]
    rows.append("| --- " * (3 + len(_headings())) + "|")
    for entry in runs(OUTAGE):
        title = next(system.title for system in SYSTEMS if system.name == entry["system"])
        timeout = f"{entry['transaction_timeout_ms'] // 1000} s"
        figures = " | ".join(f"{entry[name]:,}" for name in ("expected", *WRONGS))
        rows.append(f"| {title} | {timeout} | {entry['seed']} | {figures} |")
    return "\n".join(rows)


def _basis(noted: Sequence[dict[str, Any]]) -> str:
    days = sorted({entry["at"][:10] for entry in noted})
    seeds = sorted({entry["seed"] for entry in noted})
    return (
        f"Measured on {', '.join(days)} with the seeds {', '.join(map(str, seeds))}, Kafka "
        f"{noted[0]['kafka']}, on {noted[0]['cores']} cores that other programs used too: the "
        f"load is the average number of threads that wanted to run in the minute before a run."
    )


def _correctness(noted: Sequence[dict[str, Any]]) -> str:
    rows = ["| system | runs | load before each | faults | " + " | ".join(_headings()) + " |"]
    rows.append("| --- " * (4 + len(_headings())) + "|")
    for system in SYSTEMS:
        own = [entry for entry in noted if entry["system"] == system.name]
        if own:
            figures = [f"{sum(entry[name] for entry in own):,}" for name in ("expected", *WRONGS)]
            faults = sum(bool(fault["hit"]) for entry in own for fault in entry["faults"])
            loads = ", ".join(f"{entry['load_before']:.0f}" for entry in own)
            rows.append(
                f"| {system.title}, {own[-1]['versions']} | {len(own)} | {loads} | {faults} | "
                + " | ".join(figures)
                + " |"
            )
    return "\n".join(rows)


def _headings() -> list[str]:
    return ["updates expected", "lost", "duplicated", "out of order", "wrong"]


def _seconds(noted: Sequence[dict[str, Any]]) -> str:
    titles = [system.title for system in SYSTEMS]
    rows = ["| seconds to recover, median and longest | " + " | ".join(titles) + " |"]
    rows.append("| --- " * (1 + len(titles)) + "|")
    for kind in (*KINDS, None):
        cells = []
        for system in SYSTEMS:
            own = [
                fault["first_s"]
                for entry in noted
                if entry["system"] == system.name
                for fault in entry["faults"]
                if fault["hit"] and kind in (fault["kind"], None)
            ]
            cells.append(_median_and_longest(own))
        rows.append(f"| {'all' if kind is None else f'`{kind}`'} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _median_and_longest(seconds: Iterable[float | None]) -> str:
    known = [second_count for second_count in seconds if second_count is not None]
    if not known:
        return ""
    return f"{statistics.median(known):.1f}, {max(known):.1f}"


def _notes(noted: Sequence[dict[str, Any]]) -> list[str]:
    """Return what else is to be said: faults that hit nothing, ends that nobody caused."""
    notes = []
    for system in SYSTEMS:
        own = [entry for entry in noted if entry["system"] == system.name]
        missed = [fault["kind"] for entry in own for fault in entry["faults"] if not fault["hit"]]
        problems = [text for entry in own for text in entry["problems"] if "was hit" not in text]
        never = sum(fault["first_s"] is None for entry in own for fault in entry["faults"])
        ends = sum(len(entry["own_ends"]) for entry in own)
        remarks = [
            f"faults that hit nothing: {', '.join(missed)}" if missed else "",
            f"faults with no later output: {never}" if never else "",
            f"processes that ended by themselves and were started again: {ends}" if ends else "",
            *dict.fromkeys(problems),
        ]
        if any(remarks):
            notes.append(f"{system.title}: {'; '.join(filter(None, remarks))}.")
    return notes
