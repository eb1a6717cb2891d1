"""The benchmark: the same jobs in Tallystick and its peers, on one broker and input.

    .venv/bin/python benchmarks/run.py [--job stateless,count] [--mode record,epoch] [--records N]
        [--keys N] [--only ours,flink,spark] [--rounds N] [--spread-input] [--pad BYTES]
        [--input-compression zstd]

Prints a line per run and tables with ratios at the end; appends each run to `results.jsonl`.
Exit code 1 when a run failed, or an output was not exactly right. `README.md` says what each system
and column means.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from harness import results
from harness.broker import start_broker
from harness.count_check import MODES
from harness.count_systems import COUNT_SYSTEMS
from harness.dataset import Dataset, DatasetError
from harness.judges import Judges
from harness.measure import Bench, Input, Result, RunError
from harness.systems import JOBS, STATELESS, STATELESS_SYSTEMS, System
from harness.topics import Topics, TopicsError
from harness.workspace import SetupError, Workspace, build_tools

from tallystick.errors import TallystickError

HERE = Path(__file__).resolve().parent
RECORDS = 5_000_000
KEYS = 100_000
EPOCH_RECORDS = 1_000_000
ROUNDS = 2
TIMEOUT_S = 600.0
CUT_OFF_S = 120.0
SYSTEMS = (*STATELESS_SYSTEMS, *COUNT_SYSTEMS)
COMPRESSIONS = ("producer", "zstd", "lz4")
ON_REQUEST = {("stateless", "kstreams"), ("count", "pyflink")}
"""Not run unless `--only` names them."""


def main() -> int:
    """Set everything up, run all systems in each round, print the comparison."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, _leave)
    systems = chosen(arguments)
    workspace = Workspace(arguments.work.resolve(), arguments.peers.resolve(), HERE)
    try:
        build(workspace, systems)
        all_results, failed = run_all(workspace, systems, arguments)
    except (SetupError, DatasetError, TopicsError, TallystickError) as error:
        print(f"benchmark stopped: {error}", file=sys.stderr)
        return 1
    print_tables(all_results)
    for error in failed:
        print(f"\nfailed: {error}", file=sys.stderr)
    return 1 if failed or not all(result.verdict.exact for result in all_results) else 0


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    names = sorted({system.name for system in SYSTEMS})
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--job", type=_among(JOBS), default=list(JOBS))
    parser.add_argument("--mode", type=_among(MODES), default=list(MODES), help="of the job count")
    parser.add_argument("--records", type=_positive, default=RECORDS)
    parser.add_argument("--keys", type=_positive, default=KEYS, help="users in the records")
    parser.add_argument(
        "--epoch-records", type=_positive, default=EPOCH_RECORDS, help="of ours and Spark's"
    )
    parser.add_argument(
        "--spread-input",
        action="store_true",
        help="put each user's records into another partition than the output has for that key",
    )
    parser.add_argument("--pad", type=int, default=0, help="bytes that make each value longer")
    parser.add_argument(
        "--input-compression", choices=COMPRESSIONS, default="producer", help="producer: none"
    )
    parser.add_argument("--rounds", type=_positive, default=ROUNDS)
    parser.add_argument("--only", type=_among(names), help=f"out of {', '.join(names)}")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="of one run, in seconds")
    parser.add_argument(
        "--cut-off", type=float, default=CUT_OFF_S, help="of a slow system's run, in seconds"
    )
    parser.add_argument("--peers", type=Path, default=HERE.parent.parent / "shared" / "peers")
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> list[System]:
    """The systems that the command line asks for."""
    return [
        system
        for system in SYSTEMS
        if system.job in arguments.job
        # The stateless job has but one mode.
        and (system.job == STATELESS or system.mode in arguments.mode)
        and (
            system.name in arguments.only
            if arguments.only
            else (system.job, system.name) not in ON_REQUEST
        )
    ]


def build(workspace: Workspace, systems: Sequence[System]) -> None:
    """Get ready what the chosen systems need; minutes the first time, nothing afterwards."""
    print("building the loader and the chosen systems ...", flush=True)
    workspace.directory.mkdir(parents=True, exist_ok=True)
    build_tools(workspace)
    for system in systems:
        system.build(workspace)


def run_all(
    workspace: Workspace, systems: Sequence[System], arguments: argparse.Namespace
) -> tuple[list[Result], list[RunError]]:
    """Start a broker, load it, and run every system in every round; what came of it, what failed.

    A job that fails does not stop those of the others.
    """
    all_results, failed = [], []
    config = {
        **results.environment(HERE),
        "keys": arguments.keys,
        "epoch_records_max": arguments.epoch_records,
        "input": "spread" if arguments.spread_input else "co-partitioned",
        "input_compression": arguments.input_compression,
        "pad_bytes": arguments.pad,
    }
    with (
        start_broker(workspace.directory / "broker") as broker,
        Topics(broker.bootstrap) as topics,
    ):
        dataset = Dataset(
            workspace,
            broker.bootstrap,
            arguments.keys,
            is_spread=arguments.spread_input,
            pad_bytes=arguments.pad,
        )
        judges = Judges(dataset, broker.bootstrap, arguments.keys)
        bench = Bench(
            workspace,
            broker,
            topics,
            judges,
            epoch_records_max=arguments.epoch_records,
            timeout_s=arguments.timeout,
            cut_off_s=arguments.cut_off,
        )
        inputs = load(systems, arguments, topics, dataset)
        for round_number, system in schedule(systems, arguments.rounds):
            name = f"{system.job}-{system.name}-{round_number}"
            print(f"round {round_number}: {system.job}, {system.name} ...", flush=True)
            records = inputs[records_for(system, arguments.records)]
            try:
                result = bench.run(system, records, name)
            except RunError as error:
                print(f"  failed: {error}", flush=True)
                failed.append(error)
                continue
            results.append(arguments.results, result, config={**config, "round": round_number})
            print(f"  {result.figures}\n  {result.verdict}", flush=True)
            all_results.append(result)
    return all_results, failed


def load(
    systems: Sequence[System], arguments: argparse.Namespace, topics: Topics, dataset: Dataset
) -> dict[int, Input]:
    """Load a topic for each number of records that systems are given."""
    inputs = {}
    for count in sorted({records_for(system, arguments.records) for system in systems}):
        print(f"loading {count:,} records ...", flush=True)
        topic = f"events-{count}"
        topics.create(topic, compression=arguments.input_compression)
        dataset.load(topic, count)
        inputs[count] = Input(topic, count)
    return inputs


def records_for(system: System, records: int) -> int:
    """How many records a system is given."""
    return min(records, system.records_max or records)


def schedule(systems: Sequence[System], rounds: int) -> Iterator[tuple[int, System]]:
    """Who runs when: each round the other way round, so that no system always follows the same."""
    for round_number in range(1, rounds + 1):
        for system in systems if round_number % 2 else reversed(systems):
            yield round_number, system


def print_tables(all_results: Sequence[Result]) -> None:
    """A table and its ratios for each job and mode."""
    for job, mode in dict.fromkeys((system.job, system.mode) for system in SYSTEMS):
        compared = [
            result
            for system in SYSTEMS
            for result in all_results
            if result.system is system and (system.job, system.mode) == (job, mode)
        ]
        if compared:
            print(f"\n{job}, mode {mode}\n\n{results.table(compared)}\n")
            print(results.ratios(compared))


def _among(known: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        chosen_names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in chosen_names if name not in known]
        if unknown or not chosen_names or len(set(chosen_names)) < len(chosen_names):
            raise argparse.ArgumentTypeError(f"{text!r}: name each once, out of {', '.join(known)}")
        return chosen_names

    return names


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return value


def _leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    # An exception, so that the jobs and the broker are ended on the way out.
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
