"""What exactly once costs: each mode against at-least-once and none, on the same input.

    .venv/bin/python benchmarks/sink_cost.py [--megabytes N] [--triggers 0.1,1] [--sizes 100,1024]

A pipeline copies a topic, with nothing in between. Its epochs hold as many records as at-least-once
copies in the trigger's time (measured first), so a trigger of 1 s stands for epochs of about a
second, one after the other. The modes take turns in one Spark session; each round begins with
another one. Printed: records per second from the median epoch of each mode, and the cost of it
against at-least-once of the same rounds.
"""

import argparse
import itertools
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import tallystick_stateless
from confluent_kafka import Producer
from harness import results
from harness.broker import start_broker
from harness.measure import Broker
from harness.topics import Topics
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.pipeline import loop as pipeline_loop
from tallystick.pipeline.sizing import EpochSizes, Reason, SizeBound
from tallystick.run.query import Query

HERE = Path(__file__).resolve().parent
KEY_BYTES = 10
CALIBRATION_RECORDS = 200_000
EPOCHS_MAX = 12
"""Epochs of one run: enough for a median, with short triggers."""
FLUSH_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 240.0
MODES = {
    "none": {"guarantee": "none"},
    "at least once": {"guarantee": "at_least_once"},
    "epoch": {"transactions": "epoch"},
    "task": {"transactions": "task"},
}
BASE = "at least once"


class FullSize(EpochSizes):
    """Epochs as large as they may be from the first one on, so that all modes have the same."""

    def bound(self) -> SizeBound:
        """The option."""
        assert self._limits.offset_count_max is not None
        return SizeBound(self._limits.offset_count_max, Reason.OPTION)


def fill(bootstrap: str, topic: str, count: int, size: int) -> None:
    """Records of `size` bytes of value that lz4 cannot make small, through librdkafka."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 50, "batch.size": 500_000})
    body = bytes((i * 7919 + i // 13) % 251 for i in range(size + 256))
    for number in range(count):
        value = body[number % 256 : number % 256 + size]
        while True:
            try:
                producer.produce(topic, value, f"{number % 100_000:010d}")
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(FLUSH_TIMEOUT_S) == 0, "all records are delivered"


def copier() -> object:
    """Key and value, as they are."""

    def copy(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(["key", "value"])

    return copy


class Copies:
    """Runs of the pipeline, each with an output topic and a checkpoint of its own."""

    def __init__(self, spark: SparkSession, broker: Broker, work: Path) -> None:
        self._spark = spark
        self._broker = broker
        self._work = work
        self._numbers = itertools.count()

    def run(self, topic: str, mode: str, epoch_records: int, count: int) -> list[float]:
        """The seconds that each whole epoch took, but the first one."""
        name = f"{topic}-{mode.replace(' ', '-')}-{next(self._numbers)}"
        with Topics(self._broker.bootstrap) as topics:
            topics.create(name)
            source = ts.KafkaSource(
                self._broker.bootstrap,
                topics=[topic],
                starting_offsets="earliest",
                max_offsets_per_trigger=epoch_records,
            )
            sink = ts.KafkaSink(
                self._broker.bootstrap, topic=name, compression="none", **MODES[mode]
            )
            pipeline = ts.Pipeline(name).read(source).map_batches(copier()).write(sink)
            checkpoint = self._work / name
            query = pipeline.start(
                self._spark, checkpoint=str(checkpoint), trigger={"processingTime": "0 seconds"}
            )
            try:
                epochs = list(self._epochs(query, min(EPOCHS_MAX, count // epoch_records)))
            finally:
                query.stop()
            topics.delete(name)
        shutil.rmtree(checkpoint, ignore_errors=True)
        return epochs[1:]

    def _epochs(self, query: Query, wanted: int) -> Iterator[float]:
        """The times of the first whole epochs."""
        seen, until = 0, time.monotonic() + RUN_TIMEOUT_S
        while seen < wanted:
            for progress in query.recentProgress:
                if seen < progress["batchId"] <= wanted:
                    seen = progress["batchId"]
                    yield progress["durationMs"]["triggerExecution"] / 1000
            if query.exception() is not None:
                raise RuntimeError(str(query.exception()))
            if time.monotonic() > until:
                raise TimeoutError(f"{seen} of {wanted} epochs in {RUN_TIMEOUT_S:.0f} s")
            time.sleep(0.05)


def main() -> None:
    """Measure all modes at all triggers and sizes, on a broker of our own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--megabytes", type=int, default=1200, help="of input, for each size")
    parser.add_argument("--triggers", default="0.1,1,10", help="seconds")
    parser.add_argument("--sizes", default="100,1024", help="bytes of a value")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    arguments = parser.parse_args()
    directory = arguments.work.resolve() / "sink-cost"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    pipeline_loop.EpochSizes = FullSize  # type: ignore[misc]
    spark = tallystick_stateless.session()
    rows: list[list[str]] = []
    with start_broker(directory / "broker") as broker:
        copies = Copies(spark, broker, directory)
        for size in map(int, arguments.sizes.split(",")):
            rows += measure(copies, broker, size, arguments)
    print(results.markdown(HEADINGS, rows))
    config = {"rounds": arguments.rounds, "rows": rows}
    results.append_row(arguments.results, "sink_cost", config, config=results.environment(HERE))
    spark.stop()


HEADINGS = ["bytes", "trigger", "records an epoch", "mode", "records/s", "cost"]


def measure(
    copies: Copies, broker: Broker, size: int, arguments: argparse.Namespace
) -> list[list[str]]:
    """One size of records: all triggers and modes."""
    topic, count = f"in-{size}", arguments.megabytes * 1_000_000 // (size + KEY_BYTES)
    with Topics(broker.bootstrap) as topics:
        topics.create(topic)
    fill(broker.bootstrap, topic, count, size)
    copies.run(topic, BASE, min(CALIBRATION_RECORDS, count // 4), count)  # warms up
    rows = []
    for trigger in map(float, arguments.triggers.split(",")):
        # What at-least-once copies in that time; at most a third of the input.
        epoch_records = min(CALIBRATION_RECORDS, count // 4)
        for _ in range(2):
            took = statistics.median(copies.run(topic, BASE, epoch_records, count))
            epoch_records = max(1000, min(count // 3, round(epoch_records / took * trigger)))
        times: dict[str, list[float]] = defaultdict(list)
        names: Sequence[str] = list(MODES)
        for turn in range(arguments.rounds):
            for mode in (*names[turn % 4 :], *names[: turn % 4]):
                times[mode] += copies.run(topic, mode, epoch_records, count)
        rates = {
            mode: epoch_records / statistics.median(seconds) for mode, seconds in times.items()
        }
        rows += [
            [
                str(size),
                f"{trigger:g} s",
                f"{epoch_records:,}",
                mode,
                f"{rates[mode]:,.0f}",
                f"{1 - rates[mode] / rates[BASE]:+.1%}",
            ]
            for mode in MODES
        ]
        print(results.markdown(HEADINGS, rows[-4:]), flush=True)
    return rows


if __name__ == "__main__":
    main()
