"""Poison among good records: it goes to a topic of its own, and with its epoch or not at all."""

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from confluent_kafka import IsolationLevel, Producer
from pyspark.sql import DataFrame, SparkSession

import tallystick as ts
from tallystick.pipeline.listeners import PIPELINES
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Facts, Flow
from tests.spark.topics import (
    WAIT_S,
    Record,
    by_key,
    ends,
    read_committed,
    wait_until_nothing_is_pending,
)

pytestmark = [pytest.mark.broker, pytest.mark.spark]

NUMBERS = ts.Json("k string, n bigint", mode="deadletter")
BEGUN_MS = 1_700_000_000_000
KEYS = 7
REASON = b"it is not one JSON object, from { to }"


class Poisoned:
    """A flow whose input holds good records, poison and tombstones, and a dead-letter topic."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.topic = f"{flow.name}-dead"
        flow.kafka.create_topic(self.topic, 2)

    def feed(self, first: int, stop: int) -> None:
        """One record per number; what it is follows from the number."""
        producer = Producer({**self.flow.confluent, "partitioner": "murmur2_random"})
        for n in range(first, stop):
            producer.produce(
                self.flow.topic_in,
                key=key(n),
                value=value(n),
                headers=[("n", str(n).encode()), ("n", b"")],
                timestamp=BEGUN_MS + n,
            )
        assert producer.flush(WAIT_S) == 0

    def pipeline(self, *functions: Any, frames: Any = None, **settings: Any) -> ts.Pipeline:
        """From the input to output and dead letters."""
        pipeline = ts.Pipeline(self.flow.name).read(self.flow.source(value=NUMBERS, **settings))
        for function in functions:
            pipeline = pipeline.map_batches(function)
        if frames is not None:
            pipeline = pipeline.transform(frames)
        return pipeline.write(
            self.flow.sink(key="k", value=ts.Json(), dead_letter_topic=self.topic)
        )

    def assert_exact(self, stop: int) -> None:
        """Every record below `stop` is where it belongs, once, and in order."""
        for topic in (self.flow.topic_out, self.topic):
            wait_until_nothing_is_pending(self.flow.confluent, topic)
        out = read_committed(self.flow.confluent, self.flow.topic_out)
        dead = read_committed(self.flow.confluent, self.topic)
        numbers = range(stop)

        assert sorted(r.value or "" for r in out) == sorted(
            f'{{"k":"{key(n)}","n":{n}}}' for n in numbers if kind(n) == "good"
        )
        assert by_key((r.key, r.value) for r in dead) == by_key(
            (key(n), (value(n) or b"").decode()) for n in numbers if kind(n) == "poison"
        )
        places = [self.check_letter(letter) for letter in dead]
        assert len(set(places)) == len(places)

    def check_letter(self, letter: Record) -> tuple[bytes, ...]:
        """The place that a dead letter names, after a look at all that it carries."""
        n = int((letter.value or "").removeprefix("poison "))
        assert letter.timestamp == BEGUN_MS + n
        assert letter.headers[:2] == (("n", str(n).encode()), ("n", b""))
        own = dict(letter.headers[2:])
        assert list(own) == [f"tallystick.{x}" for x in ("error", "topic", "partition", "offset")]
        reason, topic, *place = own.values()
        assert (reason, topic) == (REASON, self.flow.topic_in.encode())
        return tuple(place)


def kind(n: int) -> str:
    return "poison" if n % 5 == 3 else "tombstone" if n % 11 == 6 else "good"


def key(n: int) -> str:
    return f"k{n % KEYS}"


def value(n: int) -> bytes | None:
    if kind(n) == "tombstone":
        return None
    return (
        b"poison %d" % n
        if kind(n) == "poison"
        else b'{"k": "%s", "n": %d}'
        % (
            key(n).encode(),
            n,
        )
    )


def numbers_only() -> Any:
    """A function of a pipeline; what it is given are no poison, but tombstones."""

    def without_tombstones(rows: pa.RecordBatch) -> pa.RecordBatch:
        assert "headers" not in rows.schema.names
        return rows.filter(pc.is_valid(rows["n"])).select(["k", "n"])

    return without_tombstones


def test_poison_and_good_records_of_an_epoch_become_visible_together(flow: Flow) -> None:
    """Written, both of them, when the first try of the epoch fails; and none of them twice."""
    poisoned = Poisoned(flow)
    poisoned.feed(0, 200)
    pipeline = poisoned.pipeline(numbers_only(), min_partitions=5)
    outputs = (flow.topic_out, poisoned.topic)

    def die(_: object) -> None:
        for topic in outputs:
            written = ends(flow.confluent, topic, IsolationLevel.READ_UNCOMMITTED)
            assert sum(written.values()) > 0, f"nothing was written to {topic}"
            assert not read_committed(flow.confluent, topic), f"{topic} shows what may be aborted"
        raise RuntimeError("fails after all was written")

    with pytest.raises(RuntimeError, match="fails after all was written"):
        flow.run(pipeline, listener=Facts("EpochRan", die))
    flow.run(pipeline)  # fences the first, which aborts what it wrote

    poisoned.assert_exact(200)
    assert_in_order(flow)
    counts = PIPELINES[flow.name]
    assert counts.dead_letters == len(read_committed(flow.confluent, poisoned.topic)) > 0
    assert counts.rows_written == len(read_committed(flow.confluent, flow.topic_out))


@pytest.mark.parametrize("partitions", [1, 3])
def test_poison_before_dataframe_code_is_found_by_a_second_look(
    kafka: EmbeddedKafka, spark: SparkSession, tmp_path: Path, partitions: int
) -> None:
    """With one partition, Spark runs both looks as one task."""
    flow = Flow(kafka, spark, tmp_path, partitions=partitions)
    poisoned = Poisoned(flow)
    poisoned.feed(0, 120)

    def good(rows: DataFrame) -> DataFrame:
        return rows.where("n IS NOT NULL").select("k", "n")

    flow.run(poisoned.pipeline(frames=good, max_offsets_per_trigger=70))

    poisoned.assert_exact(120)


def test_mode_and_topic_come_together(flow: Flow) -> None:
    dead = f"{flow.name}-dead"
    flow.kafka.create_topic(dead, 1)
    plain = ts.Json("k string, n bigint")
    loop = {"topics": [flow.topic_in, dead]}
    for value_read, topic, settings, message in (
        (NUMBERS, None, {}, r"no topic for malformed.*dead_letter_topic="),
        (plain, dead, {}, r"'failfast': set mode='deadletter'"),
        (None, dead, {}, r"'failfast': set mode='deadletter'"),
        (None, dead, {"options": {"value.mode": "deadletter"}}, r"raw takes any bytes"),
        (NUMBERS, flow.topic_out, {}, r"is the output topic itself"),
        (NUMBERS, "no-such-topic", {}, r"'no-such-topic'"),
        (NUMBERS, dead, loop, r"is read by this very pipeline"),
    ):
        sink = {"dead_letter_topic": topic}
        with pytest.raises(ts.OptionError, match=message):
            flow.run(flow.pipeline(value=value_read, sink=sink, **settings))
    assert not flow.checkpoint.exists()


def assert_in_order(flow: Flow) -> None:
    """The rows of each key are in the order of the input, though its partitions were cut."""
    out = read_committed(flow.confluent, flow.topic_out)
    for partition_read, records in itertools.groupby(
        sorted(out, key=lambda r: r.key or ""), lambda r: r.key
    ):
        numbers = [int((r.value or "").partition('"n":')[2].rstrip("}")) for r in records]
        assert numbers == sorted(numbers), partition_read
