"""The fixed cost of an epoch: one that finds no record, and one of ten records.

    .venv/bin/python benchmarks/epoch_cost.py [--epochs N] [--warm-up N]

The query of the `stateless` job stays up, and is given one transaction at a time: aborted, so that
offsets move and no record is there, or committed with ten records. Each becomes visible at once and
so makes exactly one epoch. Spark's own times of these epochs are printed in ms, taken from
`query.recentProgress` and, to cross-check, from a streaming query listener.
"""

import argparse
import math
import queue
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tallystick_stateless
from confluent_kafka import Producer
from harness import results
from harness.broker import start_broker
from harness.measure import Broker
from harness.topics import PARTITION_COUNT, Topics
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)
from pyspark.sql.streaming.query import StreamingQuery

HERE = Path(__file__).resolve().parent
INPUT_TOPIC, OUTPUT_TOPIC = "events", "epoch-cost"
EPOCH_TIMEOUT_S = 60.0
DELIVERY_TIMEOUT_S = 30.0
RECORDS_OF_TEN = 10
EMPTY, TEN = "empty", "10 records"
PHASES = (
    "triggerExecution",
    "latestOffset",
    "queryPlanning",
    "walCommit",
    "addBatch",
    "commitOffsets",
)
"""Spark's names; the first holds all others."""
REACTION = "input visible to epoch reported"


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch: its number, Spark's times, and the time from its input to its report."""

    batch_id: int
    duration_ms: dict[str, int]
    reaction_ms: float


class Reports(StreamingQueryListener):
    """Hands on the progress of each epoch that ran."""

    def __init__(self) -> None:
        self._progress: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def next(self) -> dict[str, Any]:
        """The next epoch's progress; waits for it."""
        try:
            return self._progress.get(timeout=EPOCH_TIMEOUT_S)
        except queue.Empty:
            raise TimeoutError(
                f"no epoch was reported within {EPOCH_TIMEOUT_S:.0f} s after its input was there"
            ) from None

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Nothing to hand on."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """Hand on the epochs that ran; a trigger that found nothing has no `addBatch`."""
        if "addBatch" in event.progress["durationMs"]:
            self._progress.put(event.progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        """Nothing to hand on."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Nothing to hand on."""


class Input:
    """Writes one transaction at a time, all of it to one partition."""

    def __init__(self, bootstrap: str) -> None:
        config = {"bootstrap.servers": bootstrap, "transactional.id": "epoch-cost-input"}
        self._producer = Producer({**config, "log_level": 0})
        self._producer.init_transactions(DELIVERY_TIMEOUT_S)
        self._count = 0

    def give(self, kind: str) -> None:
        """Make one epoch's input visible: ten records, or offsets that hold none."""
        self._producer.begin_transaction()
        partition = self._count % PARTITION_COUNT
        for number in range(RECORDS_OF_TEN):
            user, value = _event(self._count * RECORDS_OF_TEN + number)
            self._producer.produce(INPUT_TOPIC, value, user, partition)
        # Before an abort too: what was not sent moves no offset.
        self._producer.flush(DELIVERY_TIMEOUT_S)
        if kind == EMPTY:
            self._producer.abort_transaction(DELIVERY_TIMEOUT_S)
        else:
            self._producer.commit_transaction(DELIVERY_TIMEOUT_S)
        self._count += 1


def main() -> None:
    """Measure both kinds of epoch on a broker of our own, and print them side by side."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=15, help="epochs of each kind, not counted")
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    arguments = parser.parse_args()
    directory = arguments.work.resolve() / "epoch-cost"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with start_broker(directory / "broker") as broker:
        measured = measure(broker, directory / "checkpoint", arguments.epochs, arguments.warm_up)
    lines = summary(measured)
    print(results.markdown(["ms", *_columns(measured)], lines))
    row = {"epochs": arguments.epochs, "ms": {line[0]: line[1:] for line in lines}}
    results.append_row(arguments.results, "epoch_cost", row, config=results.environment(HERE))


def measure(
    broker: Broker, checkpoint: Path, epochs: int, warm_up: int
) -> dict[str, tuple[list[Epoch], list[Epoch]]]:
    """Run the query and give it `epochs` epochs of each kind.

    Returns:
        per kind the epochs as the listener saw them, and as `query.recentProgress` has them.
    """
    with Topics(broker.bootstrap) as topics:
        topics.create(INPUT_TOPIC)
        topics.create(OUTPUT_TOPIC)
    spark = tallystick_stateless.session()
    # The job's function is pickled by reference to its module, which the workers do not have.
    spark.sparkContext.addPyFile(tallystick_stateless.__file__)
    reports = Reports()
    spark.streams.addListener(reports)
    job = tallystick_stateless.pipeline(broker.bootstrap, INPUT_TOPIC, OUTPUT_TOPIC, 1_000_000)
    given = Input(broker.bootstrap)
    query = job.start(spark, checkpoint=str(checkpoint), trigger={"processingTime": "0 seconds"})
    try:
        measured = {}
        for kind in (EMPTY, TEN):
            heard = [_run_epoch(given, reports, kind) for _ in range(warm_up + epochs)][warm_up:]
            measured[kind] = (heard, _from_recent_progress(query, heard))
        return measured
    finally:
        query.stop()
        spark.stop()


def summary(measured: dict[str, tuple[list[Epoch], list[Epoch]]]) -> list[list[str]]:
    """One line per phase, with p50 and p90 of each kind."""
    lines = []
    for phase in PHASES:
        recent = [
            [epoch.duration_ms.get(phase, 0) for epoch in each[1]] for each in measured.values()
        ]
        lines.append([phase, *_percentiles(recent)])
    heard = [[epoch.duration_ms[PHASES[0]] for epoch in each[0]] for each in measured.values()]
    lines.append([f"{PHASES[0]} (listener)", *_percentiles(heard)])
    reactions = [[epoch.reaction_ms for epoch in each[0]] for each in measured.values()]
    lines.append([REACTION, *_percentiles(reactions)])
    return lines


def _run_epoch(given: Input, reports: Reports, kind: str) -> Epoch:
    given.give(kind)
    visible_s = time.monotonic()
    progress = reports.next()
    reaction_ms = (time.monotonic() - visible_s) * 1000
    return Epoch(progress["batchId"], dict(progress["durationMs"]), reaction_ms)


def _from_recent_progress(query: StreamingQuery, heard: Sequence[Epoch]) -> list[Epoch]:
    durations = {each["batchId"]: each["durationMs"] for each in query.recentProgress}
    return [Epoch(each.batch_id, durations[each.batch_id], each.reaction_ms) for each in heard]


def _event(number: int) -> tuple[str, str]:
    user = f"u{number * 7919 % 100_000}"
    value = (
        f'{{"user":"{user}","item":"i{number % 5000}","ts":{1_700_000_000_000 + number},'
        f'"amount":{1 + number % 99}.25,"country":"de","session":"s1e034b51"}}'
    )
    return user, value


def _columns(kinds: Iterable[str]) -> list[str]:
    return [f"{kind}, {percentile}" for kind in kinds for percentile in ("p50", "p90")]


def _percentiles(columns: Sequence[Sequence[float]]) -> list[str]:
    return [f"{_quantile(values, share):.0f}" for values in columns for share in (0.5, 0.9)]


def _quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * share) - 1]


if __name__ == "__main__":
    main()
