"""Tallystick, Flink and Kafka Streams under the same schedule of kills, on one machine.

    python -m benchmarks.kills --seed 1 --seeds 3 --kills 6

A line for each run of a system is added to `proof/peers.ndjson`. The exit code is 0 if all faults
hit and Tallystick's output was exact.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness.workspace import Workspace
from tallystick_tools.chaos.cluster import running

from .course import Run, run
from .schedule import KINDS, OUTAGE, Fault, plan
from .summary import RUNS
from .systems import FLINK_TIMEOUT_MS, SYSTEMS, TIMEOUT_MS, System

BENCHMARKS = Path(__file__).parents[1]
OURS = "tallystick"
BROKERS = 3


def line(
    system: System, seed: int, faults: tuple[Fault, ...], outcome: Run, flink_timeout_ms: int
) -> dict[str, object]:
    """Return what is noted of a run."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True).stdout.strip()
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": system.name,
        "schedule": OUTAGE if faults[0].kind == OUTAGE else "kills",
        "seed": seed,
        "transaction_timeout_ms": flink_timeout_ms if system.name == "flink" else TIMEOUT_MS,
        **asdict(outcome.audit),
        "exact": outcome.audit.is_exact,
        "faults": [asdict(hit) for hit in outcome.hits],
        "problems": outcome.problems,
        "starts": outcome.starts,
        "own_ends": outcome.own_ends,
        "seconds": round(outcome.seconds, 1),
        "load_before": round(outcome.load, 2),
        "cores": os.cpu_count(),
        "versions": system.versions,
        "kafka": "4.3.0",
        "python": platform.python_version(),
        "commit": commit,
    }


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule")
    parser.add_argument("--seeds", type=int, default=1, help="how many; the others follow")
    parser.add_argument("--kills", type=int, default=len(KINDS), help="faults of a schedule")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of faults; {OUTAGE} is one more")
    parser.add_argument("--only", default=",".join(system.name for system in SYSTEMS))
    parser.add_argument("--flink-timeout-ms", type=int, default=FLINK_TIMEOUT_MS)
    parser.add_argument("--results", type=Path, default=RUNS)
    return parser.parse_args()


def report_outcome(system: System, outcome: Run) -> bool:
    """Print what came of a run; return whether all is as it should be."""
    print(f"  {outcome.audit}", flush=True)
    for hit in outcome.hits:
        print(f"  {hit.kind}: output after {hit.first_s} s, all of it after {hit.every_s} s")
    for text in [*outcome.problems, *outcome.own_ends]:
        print(f"  {text}", flush=True)
    if outcome.audit.is_exact and not outcome.problems:
        shutil.rmtree(outcome.log_folder, ignore_errors=True)
    else:
        print(f"  its files: {outcome.log_folder}", flush=True)
    return not outcome.problems and (system.name != OURS or outcome.audit.is_exact)


def main() -> None:
    """Run each system under each schedule."""
    options = arguments()
    workspace = Workspace(BENCHMARKS / "work", BENCHMARKS, BENCHMARKS)
    systems = [system for system in SYSTEMS if system.name in options.only.split(",")]
    for system in systems:
        system.build(workspace)
    is_good = True
    with running(BROKERS, (), (), 0) as cluster:
        for seed in range(options.seed, options.seed + options.seeds):
            faults = plan(seed, options.kills, tuple(options.kinds.split(",")))
            for system in systems:
                cluster.kafka.wait_until_in_sync()
                print(f"seed {seed}: {system.title}", flush=True)
                outcome = run(
                    cluster,
                    system,
                    seed,
                    faults,
                    workspace,
                    lambda text: print(text, flush=True),
                    flink_timeout_ms=options.flink_timeout_ms,
                )
                with options.results.open("a") as file:
                    noted = line(system, seed, faults, outcome, options.flink_timeout_ms)
                    file.write(json.dumps(noted) + "\n")
                is_good &= report_outcome(system, outcome)
    raise SystemExit(not is_good)


if __name__ == "__main__":
    main()
