"""The benchmark: the same stateless job in Tallystick and its peers, on one broker and input.

    .venv/bin/python benchmarks/run.py [--records N] [--only ours,flink,spark] [--rounds N]

Prints a line per run and a table with ratios at the end; appends each run to `results.jsonl`.
Exit code 1 when an output was not exactly right. `README.md` says what each column means.
"""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from harness import results
from harness.broker import start_broker
from harness.dataset import Dataset, DatasetError
from harness.measure import Bench, Result, RunError
from harness.systems import SYSTEMS
from harness.topics import Topics, TopicsError
from harness.workspace import SetupError, Workspace, build_tools

from tallystick.errors import TallystickError

HERE = Path(__file__).resolve().parent
INPUT_TOPIC = "events"
RECORDS = 5_000_000
ROUNDS = 2
TIMEOUT_S = 600.0
DEFAULT_SYSTEMS = "ours,flink,spark"


def main() -> int:
    """Set everything up, run all systems in each round, print the comparison."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, _leave)
    workspace = Workspace(arguments.work.resolve(), arguments.peers.resolve(), HERE)
    try:
        build(workspace, arguments.only)
        found = run_all(workspace, arguments)
    except (SetupError, RunError, DatasetError, TopicsError, TallystickError) as error:
        print(f"benchmark stopped: {error}", file=sys.stderr)
        return 1
    print(f"\n{results.table(found)}\n\n{results.ratios(found)}")
    return 0 if all(result.verdict.exact for result in found) else 1


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--records", type=_positive, default=RECORDS)
    parser.add_argument("--rounds", type=_positive, default=ROUNDS)
    parser.add_argument("--only", type=_systems, default=_systems(DEFAULT_SYSTEMS))
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="of one run, in seconds")
    parser.add_argument("--peers", type=Path, default=HERE.parent.parent / "shared" / "peers")
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    return parser.parse_args()


def build(workspace: Workspace, names: Sequence[str]) -> None:
    """Get ready what the chosen systems need; minutes the first time, nothing afterwards."""
    print("building the loader and the chosen systems ...", flush=True)
    workspace.directory.mkdir(parents=True, exist_ok=True)
    build_tools(workspace)
    for name in names:
        SYSTEMS[name].build(workspace)


def run_all(workspace: Workspace, arguments: argparse.Namespace) -> list[Result]:
    """Start a broker, load it, and run every system in every round."""
    found = []
    config = {**results.environment(HERE), "records": arguments.records}
    with (
        start_broker(workspace.directory / "broker") as broker,
        Topics(broker.bootstrap) as topics,
    ):
        print(f"loading {arguments.records:,} records ...", flush=True)
        topics.create(INPUT_TOPIC)
        Dataset(workspace, broker.bootstrap).load(INPUT_TOPIC, arguments.records)
        bench = Bench(
            workspace,
            broker,
            topics,
            input_topic=INPUT_TOPIC,
            records=arguments.records,
            timeout_s=arguments.timeout,
        )
        for round_number, name in schedule(arguments.only, arguments.rounds):
            print(f"round {round_number}: {name} ...", flush=True)
            result = bench.run(SYSTEMS[name], f"bench-{name}-{round_number}")
            results.append(arguments.results, result, config={**config, "round": round_number})
            print(f"  {result.figures}\n  {result.verdict}", flush=True)
            found.append(result)
    return found


def schedule(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Who runs when: each round the other way round, so that no system always follows the same."""
    for round_number in range(1, rounds + 1):
        for name in names if round_number % 2 else reversed(names):
            yield round_number, name


def _systems(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown or not names or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r}: name each once, out of {', '.join(SYSTEMS)}")
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
