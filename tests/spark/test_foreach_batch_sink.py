"""`KafkaSink` behind a streaming query of the user's own: one transaction per micro-batch."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from tallystick.errors import StorageError
from tallystick.spark.query import active_runs, current_run_id
from tallystick.storage import FileStorage
from tests.spark.flow import Flow, finish
from tests.spark.topics import by_key, produce, read_committed, wait_until_nothing_is_pending

pytestmark = [pytest.mark.broker, pytest.mark.spark]

NewTopic = Callable[..., str]


def write(flow: Flow, rows: DataFrame, sink: Any, *, mode: str = "append") -> None:
    """Run the query over what is there."""
    finish(
        rows.writeStream.queryName(flow.name)
        .option("checkpointLocation", str(flow.checkpoint))
        .outputMode(mode)
        .trigger(availableNow=True)
        .foreachBatch(sink)
        .start
    )


def stream(flow: Flow, **options: str) -> DataFrame:
    """The input of the flow."""
    assert flow.spark is not None
    settings = {
        **flow.kafka.kafka_options,
        "subscribe": flow.topic_in,
        "startingOffsets": "earliest",
        **options,
    }
    return flow.spark.readStream.format("tallystick").options(**settings).load()


def test_counts_of_a_stateful_query_are_written_once_per_change(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """groupBy().count() in update mode: Spark's own state keeps up with ours.

    Over an epoch that is aborted and runs again, and over a death after its commit.
    """
    counts = (
        stream(flow, maxOffsetsPerTrigger="60")
        .groupBy("key")
        .count()
        .select("key", f.col("count").cast("string").alias("value"))
    )
    sink = flow.sink()
    flow.feed(140)
    refusals = [StorageError("no room for the first manifest")]
    put = FileStorage.put

    def put_later(storage: FileStorage, path: str, data: bytes) -> None:
        if refusals:
            raise refusals.pop()
        put(storage, path, data)

    monkeypatch.setattr(FileStorage, "put", put_later)

    def dies_after_the_commit(rows: DataFrame, batch_id: int) -> None:
        sink(rows, batch_id)
        assert current_run_id(rows.sparkSession) in active_runs(rows.sparkSession)
        if batch_id == 1:
            raise RuntimeError("between our commit and Spark's")

    with pytest.raises(StreamingQueryException, match="between our commit"):
        write(flow, counts, dies_after_the_commit, mode="update")
    flow.feed(70)
    write(flow, counts, sink, mode="update")
    deadline = time.monotonic() + 20
    while sink._runner._runners:  # Spark tells of the end a little later
        assert time.monotonic() < deadline, "runs that are over are not let go of"
        time.sleep(0.05)

    found = by_key((r.key, r.value) for r in read_committed(flow.confluent, flow.topic_out))
    changes = {key: [int(value or "") for value in told] for key, told in found.items()}
    assert {key: told[-1] for key, told in changes.items()} == dict.fromkeys(changes, 30)
    assert len(changes) == 7
    assert all(told == sorted(set(told)) for told in changes.values()), "a change was told twice"
    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)


def test_rows_choose_topic_partition_headers_and_timestamp(
    flow: Flow, tallystick_topic: NewTopic
) -> None:
    other = tallystick_topic("chosen", partitions=2)
    flow.feed(20)
    number = f.col("value").cast("string").cast("int")
    rows = stream(flow).select(
        f.concat(f.lit("key-"), number).alias("key"),
        f.col("value").cast("string").alias("value"),
        f.when(number < 10, flow.topic_out).otherwise(other).alias("topic"),
        f.when(number >= 10, f.lit(1)).alias("partition"),  # null: by key
        f.array(f.struct(f.lit("n").alias("key"), f.col("value").alias("value"))).alias("headers"),
        f.timestamp_millis(number.cast("long") * 1000 + 7).alias("timestamp"),
        f.lit("left out").alias("another"),
    )

    write(flow, rows, flow.sink(topic=None, token_topic=flow.topic_out))

    by_hash = read_committed(flow.confluent, flow.topic_out)
    chosen = read_committed(flow.confluent, other)
    assert sorted(int(r.value or "") for r in by_hash) == list(range(10))
    assert sorted(int(r.value or "") for r in chosen) == list(range(10, 20))
    assert {r.partition for r in chosen} == {1}
    for record in (*by_hash, *chosen):
        assert record.key == f"key-{record.value}"
        assert record.timestamp == int(record.value or "") * 1000 + 7
        assert record.headers == (("n", (record.value or "").encode()),)
    java = tallystick_topic("java", partitions=flow.partitions)
    produce(flow.confluent, java, [(r.key, r.value) for r in by_hash])
    assert {(r.key, r.partition) for r in by_hash} == {
        (r.key, r.partition) for r in read_committed(flow.confluent, java)
    }, "murmur2 as the Java client has it"


@pytest.mark.parametrize(
    ("column", "told"),
    [
        ("3 AS partition", "RecordError: .* do not exist .the first is 3; it has 3."),
        ("'no-such' AS topic", "RecordError: a row names topic 'no-such'"),
    ],
    ids=["partition", "topic"],
)
def test_a_row_that_cannot_be_written_fails_the_query_and_nothing_of_its_batch_is_visible(
    flow: Flow, column: str, told: str
) -> None:
    flow.feed(20)
    topic = None if "topic" in column else flow.topic_out
    sink = flow.sink(topic=topic, token_topic=flow.topic_out)
    rows = stream(flow).selectExpr("key", "value", column)

    with pytest.raises(StreamingQueryException, match=told):
        write(flow, rows, sink)

    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
    assert read_committed(flow.confluent, flow.topic_out) == []
    if topic is not None:
        write(flow, stream(flow).select("key", "value"), flow.sink())
        flow.assert_exact()
