"""Nexmark: the same queries in Tallystick and in Flink SQL, on one broker and input.

    .venv/bin/python benchmarks/nexmark.py [--query q0,q5] [--only ours,flink,sql] [--records N]
        [--rounds N]

Prints a line per run, at the end a table with the ratio for each query, and one of all; appends
each run to `results.jsonl`. Exit code 1 when a run failed, or an output was not right. `README.md`
says how the queries are run and compared.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from harness import results
from harness.broker import start_broker
from harness.dataset import DatasetError
from harness.measure import Bench, Broker, Input, Result, RunError
from harness.nexmark_events import BIDS, BLOCK, EVENTS_PER_MS, count_of
from harness.nexmark_sql import MINI_BATCHED, UNBOUNDED, script
from harness.nexmark_topics import NexmarkJudges, Positions, load
from harness.nexmark_truth import QUERIES
from harness.systems import (
    FLINK_CHECKPOINT_MS,
    FLINK_VERSION,
    NEXMARK,
    OPEN_FLAGS,
    Job,
    System,
    java,
)
from harness.topics import Topics, TopicsError
from harness.workspace import SetupError, Workspace, build_nexmark_peer

from tallystick.errors import TallystickError

HERE = Path(__file__).resolve().parent
RECORDS = 4_000_000
EPOCH_RECORDS = 500_000
REFUSED = {("sql", query) for query in UNBOUNDED}
RARE_TIMES = 5
"""Queries without bids get so many times the events, and so 0.4 times the records."""
ROUNDS = 1
TIMEOUT_S = 300.0
SYSTEMS = ("ours", "flink", "sql")
"""In `sql`, ours runs the texts of Flink."""


def main() -> int:
    """Load the topics, run the queries in both systems, print the comparison."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, _leave)
    workspace = Workspace(arguments.work.resolve(), HERE, HERE)
    try:
        workspace.directory.mkdir(parents=True, exist_ok=True)
        if "flink" in arguments.only:
            build_nexmark_peer(workspace)
        all_results, failed = run_all(workspace, arguments)
    except (SetupError, DatasetError, TopicsError, TallystickError) as error:
        print(f"benchmark stopped: {error}", file=sys.stderr)
        return 1
    for query in arguments.query:
        compared = [result for result in all_results if result.system.job == query]
        if compared:
            print(f"\n{query}\n\n{results.table(compared)}\n\n{results.ratios(compared)}")
    print(f"\n{results.by_job(all_results)}")
    for error in failed:
        print(f"\nfailed: {error}", file=sys.stderr)
    return 1 if failed or not all(result.verdict.exact for result in all_results) else 0


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--query", type=_among(NEXMARK), default=list(NEXMARK))
    parser.add_argument("--only", type=_among(SYSTEMS), default=["ours", "flink"])
    parser.add_argument("--records", type=int, default=RECORDS, help="events; nearly all are bids")
    parser.add_argument("--epoch-records", type=int, default=EPOCH_RECORDS, help="of ours")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="of one run, in seconds")
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    return parser.parse_args()


def system_of(name: str, query: str) -> System:
    """A query in one of the systems."""
    is_ours = name != "flink"
    return System(
        name=name,
        job=query,
        guarantee="exactly once",
        config={"transactions": "epoch"}
        if is_ours
        else {"version": FLINK_VERSION, "checkpoint_ms": FLINK_CHECKPOINT_MS, "api": "sql"},
        build=lambda _: None,
        command=ours(query, *(["--sql"] if name == "sql" else [])) if is_ours else flink(query),
        ends=True,
    )


def ours(query: str, *flags: str) -> Callable[[Workspace, Job], Sequence[str]]:
    """The command of our side."""

    def command(workspace: Workspace, job: Job) -> Sequence[str]:
        program = workspace.benchmarks / "tallystick_nexmark.py"
        return [
            *(sys.executable, str(program), job.bootstrap, job.input_topic, job.output_topic),
            *("--query", query, "--checkpoint", str(job.directory / "checkpoint")),
            *("--epoch-records", str(job.epoch_records_max), *flags),
        ]

    return command


def flink(query: str) -> Callable[[Workspace, Job], Sequence[str]]:
    """The command of Flink's side."""

    def command(workspace: Workspace, job: Job) -> Sequence[str]:
        statements = job.directory / "query.sql"
        statements.write_text(script(query, job.bootstrap, job.input_topic, job.output_topic))
        flags = java(workspace, "nexmark-flink", *OPEN_FLAGS)
        mini_batches = str(query in MINI_BATCHED).lower()
        settings = [str(FLINK_CHECKPOINT_MS), mini_batches]
        return [*flags, "peers.NexmarkFlink", str(statements), *settings]

    return command


def run_all(
    workspace: Workspace, arguments: argparse.Namespace
) -> tuple[list[Result], list[RunError]]:
    """Run every query in every system and round; what came of it, what failed."""
    all_results, failed = [], []
    config = {**results.environment(HERE), "epoch_records_max": arguments.epoch_records}
    with (
        start_broker(workspace.directory / "broker") as broker,
        Topics(broker.bootstrap) as topics,
    ):
        event_counts = load_all(broker, topics, arguments)
        for round_number in range(1, arguments.rounds + 1):
            for query in arguments.query:
                # Each round the other way round, so that no system always follows the same.
                order = arguments.only[:: 1 if round_number % 2 else -1]
                order = [name for name in order if (name, query) not in REFUSED]
                for system in [system_of(name, query) for name in order]:
                    print(f"round {round_number}: {query}, {system.name} ...", flush=True)
                    bench, records = bench_of(
                        workspace, broker, topics, query, event_counts, arguments
                    )
                    try:
                        result = bench.run(system, records, f"{query}-{system.name}-{round_number}")
                    except RunError as error:
                        print(f"  failed: {error}", flush=True)
                        failed.append(error)
                        continue
                    row = {**config, "round": round_number, "benchmark": "nexmark"}
                    results.append(arguments.results, result, config=row)
                    print(f"  {result.figures}\n  {result.verdict}", flush=True)
                    all_results.append(result)
    return all_results, failed


def prefix_of(query: str) -> str:
    """Return the prefix of a query's topic names."""
    return "nexmark-" if BIDS in QUERIES[query].inputs else "nexmark-rare-"


def load_all(broker: Broker, topics: Topics, arguments: argparse.Namespace) -> dict[str, int]:
    """Load the inputs of the chosen queries; of how many events they are, by their prefix."""
    whole = arguments.records // BLOCK * BLOCK
    event_counts = {"nexmark-": whole, "nexmark-rare-": whole * RARE_TIMES}
    wanted = {
        (prefix_of(query), kind) for query in arguments.query for kind in QUERIES[query].inputs
    }
    for prefix, kind in sorted(wanted):
        topics.create(f"{prefix}{kind}")
        loaded = load(broker.bootstrap, prefix, kind, event_counts[prefix])
        assert loaded == count_of(kind, event_counts[prefix]), (kind, loaded)
        print(f"loaded {loaded:,} {kind} as {prefix}{kind}", flush=True)
    return event_counts


def bench_of(
    workspace: Workspace,
    broker: Broker,
    topics: Topics,
    query: str,
    event_counts: dict[str, int],
    arguments: argparse.Namespace,
) -> tuple[Bench, Input]:
    """Return the bench that runs a query, and its input."""
    inputs, prefix = QUERIES[query].inputs, prefix_of(query)
    records = sum(count_of(kind, event_counts[prefix]) for kind in inputs)
    # As many epochs for the queries that have fewer records.
    epoch_records = arguments.epoch_records * records // arguments.records
    events_an_epoch = arguments.epoch_records * event_counts[prefix] // arguments.records
    # Two epochs: the watermark follows from the epoch before; and a session and the delay.
    open_ms = 2 * events_an_epoch // EVENTS_PER_MS + 30_000
    bench = Bench(
        workspace,
        broker,
        Positions(topics, broker.bootstrap, prefix, inputs),
        NexmarkJudges(broker.bootstrap, event_counts, open_ms),
        epoch_records_max=epoch_records,
        timeout_s=arguments.timeout,
        cut_off_s=arguments.timeout,
    )
    return bench, Input(prefix, records)


def _among(known: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        chosen_names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in chosen_names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown}: choose out of {', '.join(known)}")
        return chosen_names

    return names


def _leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    # An exception, so that the jobs and the broker are ended on the way out.
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
