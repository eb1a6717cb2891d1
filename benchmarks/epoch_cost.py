"""The fixed cost of an epoch: one that finds no record, and one of ten records.

    .venv/bin/python benchmarks/epoch_cost.py [--epochs N] [--warm-up N] [--execution jobs]

The query of the `stateless` job stays up, and is given one transaction at a time: aborted, so that
offsets move and no record is there, or committed with ten records. Each becomes visible at once and
so makes exactly one epoch. Printed, in ms: the time of these epochs and of its parts, from
`query.lastProgress`, and how long a user waits.
"""

import argparse
import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tallystick_stateless
from confluent_kafka import Producer
from harness import results
from harness.broker import start_broker
from harness.measure import Broker
from harness.topics import PARTITION_COUNT, Topics

from tallystick.run.part_times import PARTS
from tallystick.run.query import Query

HERE = Path(__file__).resolve().parent
INPUT_TOPIC, OUTPUT_TOPIC = "events", "epoch-cost"
EPOCH_TIMEOUT_S = 60.0
DELIVERY_TIMEOUT_S = 30.0
RECORDS_OF_TEN = 10
EMPTY, TEN = "empty", "10 records"
POLL_S = 0.001
WHOLE = "the whole epoch"
REACTION = "input visible to epoch reported"


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch: the time that it took, that of its parts, and that from its input to its end."""

    took_ms: float
    parts_ms: Mapping[str, float]
    reaction_ms: float


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
    parser.add_argument("--execution", choices=["resident", "jobs"], default="resident")
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    arguments = parser.parse_args()
    directory = arguments.work.resolve() / "epoch-cost"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with start_broker(directory / "broker") as broker:
        measured = measure(broker, directory / "checkpoint", arguments)
    lines = summary(measured)
    print(results.markdown(["ms", *_columns(measured)], lines))
    row = {
        "epochs": arguments.epochs,
        "execution": arguments.execution,
        "ms": {line[0]: line[1:] for line in lines},
    }
    results.append_row(arguments.results, "epoch_cost", row, config=results.environment(HERE))


def measure(
    broker: Broker, checkpoint: Path, arguments: argparse.Namespace
) -> dict[str, list[Epoch]]:
    """Run the query, and return its epochs of each kind, those that warm it up left out."""
    with Topics(broker.bootstrap) as topics:
        topics.create(INPUT_TOPIC)
        topics.create(OUTPUT_TOPIC)
    spark = tallystick_stateless.session()
    # The job's function is pickled by reference to its module, which the workers do not have.
    spark.sparkContext.addPyFile(tallystick_stateless.__file__)
    job = tallystick_stateless.pipeline(broker.bootstrap, INPUT_TOPIC, OUTPUT_TOPIC, 1_000_000)
    given = Input(broker.bootstrap)
    query = job.start(spark, checkpoint=str(checkpoint), execution=arguments.execution)
    try:
        count = arguments.warm_up + arguments.epochs
        measured: dict[str, list[Epoch]] = {EMPTY: [], TEN: []}
        for _ in range(count):  # in turn: a broker grows quicker for longer than the warm-up
            for kind, epochs in measured.items():
                epochs.append(_run_epoch(given, query, kind))
        return {kind: epochs[arguments.warm_up :] for kind, epochs in measured.items()}
    finally:
        query.stop()
        spark.stop()


def summary(measured: dict[str, list[Epoch]]) -> list[list[str]]:
    """One line per part, with p50 and p90 of each kind."""
    kinds = list(measured.values())
    lines = [[WHOLE, *_percentiles([[epoch.took_ms for epoch in kind] for kind in kinds])]]
    for part in PARTS:
        times = [[epoch.parts_ms.get(part, 0) for epoch in kind] for kind in kinds]
        lines.append([part, *_percentiles(times)])
    reactions = [[epoch.reaction_ms for epoch in kind] for kind in kinds]
    lines.append([REACTION, *_percentiles(reactions)])
    return lines


def _run_epoch(given: Input, query: Query, kind: str) -> Epoch:
    """Give the query an epoch's input, and wait for its end."""
    before = query.lastProgress
    given.give(kind)
    visible_s = time.monotonic()
    while (progress := query.lastProgress) is before or progress is None:
        if (error := query.exception()) is not None:
            raise error
        if time.monotonic() - visible_s > EPOCH_TIMEOUT_S:
            raise TimeoutError(
                f"no epoch was reported within {EPOCH_TIMEOUT_S:.0f} s after its input was there"
            )
        time.sleep(POLL_S)
    reaction_ms = (time.monotonic() - visible_s) * 1000
    spent = progress["durationMs"]
    return Epoch(spent["triggerExecution"], spent, reaction_ms)


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
