"""A campaign: programs of ours under random schedules of faults, run after run.

    python -m tests.campaign --hours 1 --seed 1

Each run draws a program, a cluster and a schedule from its seed, and is judged by what an
independent reader sees against an undisturbed run of the same program and input. A line for each
run is added to `proof/runs.ndjson`; the exit code is 0 if all are exact.
"""

import argparse
import json
import os
import pickle
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tallystick.errors import BrokerUnavailableError
from tallystick_tools.chaos.clock import find_compiler
from tallystick_tools.chaos.cluster import InputRecord
from tallystick_tools.chaos.compare import differences
from tallystick_tools.chaos.report import as_text
from tallystick_tools.chaos.run import Job, Run, run
from tallystick_tools.chaos.schedule import kinds_for, plan
from tallystick_tools.chaos.verify import Question, Verdict, drop_unlike_state, judged
from tests.campaign.answers import start_lookups
from tests.campaign.jobs import ODDS_TOPIC, WORKLOADS, Workload
from tests.campaign.oracles import UNEVEN_TOPIC, expected_records, found_records
from tests.campaign.stores import (
    BUCKET,
    STORES,
    start_object_store,
    start_postgres,
)
from tests.campaign.summary import RUNS

ROOT = Path(__file__).parents[2]
SHARED = Path(tempfile.gettempdir()) / "tallystick-campaigns"
"""The folder that campaigns of the same commit share if their trees are clean."""
RECORDS = 12_000
PLAYERS = 40
PARTITIONS = 4
BEGAN_MS = 1_700_000_000_000
BEHIND_MS = 4_000
KILLS = (3, 9)
SHARE_OF_THREE_BROKERS = 0.3
SHARE_IN_OBJECT_STORE = 0.15
ON_LOCAL_DISKS = {"moved", "foreach-batch"}
"""Programs whose checkpoint is Spark's own, or that look into it with `pathlib`."""
VERSIONS = (0, 1, 2)


def records(topic: str) -> tuple[InputRecord, ...]:
    """The input of a topic, the same in every run: in order in each partition, by player."""
    chance = random.Random(topic)
    plays = []
    for number in range(RECORDS // 4 if topic == ODDS_TOPIC else RECORDS):
        player = chance.randrange(PLAYERS)
        at = BEGAN_MS + number * (20 if topic == ODDS_TOPIC else 5)
        value = {"player": f"p{player}", "at": at}
        if topic == ODDS_TOPIC:
            value |= {"odds": chance.randrange(10)}
        else:
            value |= {"id": number, "amount": chance.randrange(100)}
        text = json.dumps(value).encode()
        plays.append(InputRecord(player % PARTITIONS, value["player"].encode(), text, at))
    if topic == UNEVEN_TOPIC:  # each partition in order still, and some seconds behind the last
        plays.sort(key=lambda record: record.timestamp_ms + record.partition * BEHIND_MS)
    return tuple(plays)


def question(seed: int, names: list[str], fault_names: Sequence[str] = ()) -> tuple[str, Question]:
    """Draw a run: the name of its workload, and the question that it answers."""
    chance = random.Random(seed)
    # Each name draws for itself: what a seed means outlives a change of the list.
    name = max(names, key=lambda candidate: random.Random(f"{seed} {candidate}").random())
    workload = WORKLOADS[name]
    brokers = 3 if chance.random() < SHARE_OF_THREE_BROKERS else 1
    command = [sys.executable, "-m", "tests.campaign.jobs", name]
    version = chance.choice(VERSIONS)
    kills = chance.randint(*KILLS)
    in_store = name not in ON_LOCAL_DISKS and chance.random() < SHARE_IN_OBJECT_STORE
    job = Job(
        (*command, "{servers}", "{checkpoint}", "{parallelism}"),
        {topic: records(topic) for topic in workload.inputs},
        workload.outputs,
        PARTITIONS,
        brokers,
        version,
        checkpoint=BUCKET if in_store else "",
        stores=tuple(STORES[store] for store in [workload.store] if store),
    )
    kinds = kinds_for(
        brokers,
        fault_names,
        uses_parallelism=True,
        has_object_store=in_store,
        has_clock=find_compiler() is not None,
    )
    faults = plan(kills, seed, kinds)
    again = f"--seed {seed} --once" + f" --faults {','.join(fault_names)}" * bool(fault_names)
    return name, Question(job, faults, again, workload.compare)


def by_input(workload: Workload, posed: Question, disturbed: Run) -> Verdict:
    """Compare a run with what the input says; state is compared with nothing."""
    assert workload.oracle is not None
    expected = Run(
        records=expected_records(
            workload.oracle(posed.job.inputs), (*workload.outputs, *workload.copies)
        )
    )
    records, problems = found_records(disturbed.records, workload.own)
    run_as_rows = replace(disturbed, records=records, problems=disturbed.problems + problems)
    verdict = judged(posed, expected, run_as_rows)
    if problems and not disturbed.problems:
        verdict.differences = differences(expected.records, records, posed.comparison)
    return verdict


class Campaign:
    """Runs, each noted as soon as it is over."""

    def __init__(self, names: list[str], folder: Path, kinds: Sequence[str]) -> None:
        self.failures = 0
        self.runs = 0
        self._names, self._kinds = names, kinds
        self._folder = folder
        self._versions = {
            "commit": _output("git", "rev-parse", "--short", "HEAD"),
            "kafka": "4.3.0",
            "pyspark": version("pyspark"),
            "python": platform.python_version(),
        }
        is_changed = _output("git", "status", "--porcelain", "--", ":!proof")
        self._kept = folder if is_changed else SHARED / self._versions["commit"]
        self._kept /= "undisturbed"

    def go(self, seed: int) -> None:
        """Do one run."""
        name, posed = question(seed, self._names, self._kinds)
        workload = WORKLOADS[name]
        expected = None if workload.oracle else self._expected(name, posed)
        folder = self._folder / f"{seed}-{name}"
        disturbed = run(
            posed.job, posed.faults, folder, lambda text: print(f"  {text}", flush=True)
        )
        verdict = (
            by_input(workload, posed, disturbed)
            if expected is None
            else judged(posed, expected, disturbed)
        )
        self.runs += 1
        self.failures += not verdict.is_exact
        self._note(seed, name, posed, verdict)
        print(as_text(verdict), flush=True)
        if verdict.is_exact:
            shutil.rmtree(folder, ignore_errors=True)

    def _expected(self, name: str, posed: Question) -> Run:
        """Return the undisturbed run of a program, which is the same on every cluster."""
        kept = self._kept / name
        if not kept.exists():
            print(f"undisturbed: {name}", flush=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            new = kept.with_name(f"{name}.{os.getpid()}")
            new.write_bytes(pickle.dumps(self._undisturbed(name, posed)))
            new.rename(kept)
        undisturbed: Run = pickle.loads(kept.read_bytes())  # noqa: S301  ours
        return undisturbed

    def _undisturbed(self, name: str, posed: Question) -> Run:
        job = replace(posed.job, checkpoint="")
        undisturbed = run(job, (), self._folder / name, lambda text: None)
        assert not undisturbed.problems, undisturbed.problems
        assert undisturbed.records, f"{name} writes nothing"
        again = run(job, (), self._folder / f"{name}-again", lambda text: None, parts=5)
        assert not again.problems, again.problems
        assert not differences(undisturbed.records, again.records, posed.comparison), name
        drop_unlike_state(undisturbed, again)
        return undisturbed

    def _note(self, seed: int, name: str, posed: Question, verdict: Verdict) -> None:
        disturbed = verdict.disturbed
        line = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "seed": seed,
            "workload": name,
            "brokers": posed.job.brokers,
            "transaction_version": posed.job.transaction_version,
            "in_object_store": bool(posed.job.checkpoint),
            "exact": verdict.is_exact,
            "hit": dict(Counter(hit.fault.kind for hit in verdict.hits)),
            "missed": dict(
                Counter(fault.fault.kind for fault in disturbed.injected if not fault.hit)
            ),
            "starts": disturbed.starts,
            "rows": len(disturbed.records),
            "seconds": round(disturbed.seconds, 1),
            "differences": [str(difference) for difference in verdict.differences[:5]],
            "problems": [_short(problem) for problem in verdict.problems[:5]],
            **self._versions,
        }
        RUNS.parent.mkdir(exist_ok=True)
        with RUNS.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _short(text: str) -> str:
    """Return the beginning and the end, where a log has its error."""
    return text if len(text) <= 1000 else f"{text[:400]} … {text[-600:]}"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def main() -> None:
    """Run for some hours, or one seed again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the others follow")
    parser.add_argument("--only", help="names of workloads, with commas")
    parser.add_argument("--faults", help="kinds of faults, with commas; without it: all that fit")
    parser.add_argument("--once", action="store_true", help="only the run of this seed")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(WORKLOADS)
    folder = Path(tempfile.mkdtemp(prefix="tallystick-campaign-"))
    postgres, object_store = start_postgres(), start_object_store(folder)
    lookups = start_lookups()
    kinds = arguments.faults.split(",") if arguments.faults else []
    campaign = Campaign(names, folder, kinds)
    end = time.monotonic() + 3600 * arguments.hours
    seed = arguments.seed
    try:
        while True:
            try:
                campaign.go(seed)
            except BrokerUnavailableError as error:  # the machine is too busy to start a cluster
                print(f"seed {seed} was not run: {error}", flush=True)
            seed += 1
            if arguments.once or time.monotonic() >= end:
                break
    finally:
        postgres.stop()
        object_store.stop()
        lookups.shutdown()
    print(f"{campaign.runs} runs, {campaign.failures} of them not exact")
    raise SystemExit(campaign.failures > 0)


if __name__ == "__main__":
    main()
