"""Pipelines end to end: functions, DataFrame steps, failures, and what Kafka's tools see."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from confluent_kafka import IsolationLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

import tallystick as ts
from tallystick.pipeline import sizing
from tests.spark.flow import Facts, Flow, finish
from tests.spark.topics import (
    by_key,
    ends,
    group_positions,
    produce,
    read_committed,
    wait_until_nothing_is_pending,
)

pytestmark = [pytest.mark.broker, pytest.mark.spark]

NUMBERS = ts.Json("k string, n bigint")


def feed_json(flow: Flow, first: int, stop: int) -> None:
    """JSON records with a key and a number."""
    records = [(f"k{n % 5}", json.dumps({"k": f"k{n % 5}", "n": n})) for n in range(first, stop)]
    produce(flow.confluent, flow.topic_in, records)


def found_json(flow: Flow) -> dict[str | None, list[dict[str, Any]]]:
    """The values of each key, in order."""
    texts_by_key = by_key((r.key, r.value) for r in read_committed(flow.confluent, flow.topic_out))
    return {key: [json.loads(text or "") for text in texts] for key, texts in texts_by_key.items()}


def test_functions_are_chained_may_drop_rows_and_the_group_shows_how_far_they_got(
    flow: Flow,
) -> None:
    feed_json(flow, 0, 300)

    def even(rows: pa.RecordBatch) -> pa.RecordBatch | None:
        kept = rows.filter(pc.equal(pc.bit_wise_and(rows["n"], 1), 0))
        return kept if kept.num_rows else None

    def halved(rows: pa.RecordBatch) -> pa.Table:
        half = pc.divide(rows["n"], 2)
        return pa.table({"k": rows["k"], "half": half})

    sink = flow.sink(key="k", value=ts.Json(), compression="zstd")
    pipeline = (
        ts.Pipeline(flow.name)
        .read(flow.source(value=NUMBERS, max_offsets_per_trigger=100))
        .map_batches(even)
        .map_batches(halved)
        .write(sink)
    )
    flow.run(pipeline)
    produce(flow.confluent, flow.topic_in, [("k1", '{"k": "k1", "n": 1}')])
    flow.run(pipeline)  # an epoch without output

    expected = {
        f"k{k}": [{"k": f"k{k}", "half": n // 2} for n in range(0, 300, 2) if n % 5 == k]
        for k in range(5)
    }
    assert found_json(flow) == expected
    last = ends(flow.confluent, flow.topic_in, IsolationLevel.READ_COMMITTED)
    assert group_positions(flow.confluent, f"tallystick-{flow.name}") == last
    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)


def test_a_backlog_becomes_several_epochs_also_where_spark_is_asked_for_one(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "START_COUNT", 10)  # it grows eightfold at a time
    flow.feed(200)
    facts = Facts()
    run = flow.pipeline()
    finish(
        lambda: run.start(
            flow.spark, checkpoint=str(flow.checkpoint), trigger={"once": True}, listener=facts
        )
    )

    flow.assert_exact()
    assert facts.names.count("EpochRan") >= 3


def test_dataframe_code_may_stand_between_functions(flow: Flow) -> None:
    feed_json(flow, 0, 60)

    def small(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.filter(pc.less(rows["n"], 40)).select(["k", "n"])

    def doubled(rows: DataFrame) -> DataFrame:
        return rows.withColumn("n", f.col("n") * 2)

    def filtered(rows: DataFrame) -> DataFrame:
        return rows.where("k != 'k0'")

    def named(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.rename_columns(["k", "double"])

    pipeline = (
        ts.Pipeline(flow.name)
        .read(flow.source(value=NUMBERS))
        .map_batches(small, schema="k string, n bigint")
        .transform(doubled)
        .transform(filtered)
        .map_batches(named)
        .write(flow.sink(key="k", value=ts.Json()))
    )
    flow.run(pipeline)

    assert found_json(flow) == {
        f"k{k}": [{"k": f"k{k}", "double": 2 * n} for n in range(40) if n % 5 == k]
        for k in range(1, 5)
    }


def test_a_function_that_raises_fails_the_query_in_its_own_words_and_its_epoch_is_invisible(
    flow: Flow,
) -> None:
    flow.feed(60)
    flow.run()
    flow.feed(60)

    def raising(rows: pa.RecordBatch) -> pa.RecordBatch:
        if pc.any(pc.equal(rows["value"], b"119")).as_py():
            raise ValueError("flight 119 has no wings")
        return rows.select(["key", "value"])

    facts = Facts()
    with pytest.raises(ValueError, match="flight 119 has no wings"):
        flow.run(flow.pipeline(raising), listener=facts)

    assert facts.names[-1] == "TransactionAborted", "readers need not wait for the timeout"
    assert "EpochRan" not in facts.names
    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
    assert len(read_committed(flow.confluent, flow.topic_out)) == 60
    flow.run()
    flow.assert_exact()


def test_a_pipeline_that_dies_in_its_first_epoch_begins_where_latest_was_then(flow: Flow) -> None:
    flow.feed(20)
    flow.input.clear()  # before the start at "latest": not ours
    pipeline = flow.pipeline(starting_offsets="latest")

    def die(_: object) -> None:
        raise RuntimeError("dies before its first epoch")

    with pytest.raises(RuntimeError, match="dies before its first epoch"):
        flow.run(pipeline, listener=Facts("TransactionCommitted", die))
    flow.feed(30)
    flow.run(pipeline)

    flow.assert_exact()


def test_what_cannot_work_is_told_before_anything_starts(flow: Flow) -> None:
    with pytest.raises(ts.OptionError, match="'no-such-topic'"):
        flow.run(flow.pipeline(topics=["no-such-topic"]))
    with pytest.raises(ts.OptionError, match="'no-such-output'"):
        flow.run(flow.pipeline(sink={"topic": "no-such-output"}))
    with pytest.raises(ts.OptionError, match=r"transaction_timeout_ms is 9000000.*900000"):
        flow.run(flow.pipeline(sink={"transaction_timeout_ms": 9_000_000}))
    own = {"transaction_timeout_ms": 60_000, "options": {"kafka.delivery.timeout.ms": "120000"}}
    with pytest.raises(ts.OptionError, match=r"kafka.delivery.timeout.ms is 120000"):
        flow.run(flow.pipeline(sink=own))
    absent = [flow.sink(topic=f"absent-{n}", transactions="task", uid=f"s{n}") for n in (1, 2)]
    with pytest.raises(ts.OptionError, match=r"'absent-1'.*'absent-2'"):
        flow.run(ts.Pipeline(flow.name).read(flow.source()).write(*absent))
    with pytest.raises(ts.OptionError, match=r"offsets.retention.minutes"):
        flow.pipeline().start(
            flow.spark, checkpoint=str(flow.checkpoint), trigger={"processingTime": "8 days"}
        )
    assert not flow.checkpoint.exists()


def test_a_short_transaction_timeout_works_with_nothing_else_set(flow: Flow) -> None:
    flow.feed(20)

    flow.run(flow.pipeline(sink={"transaction_timeout_ms": 15_000}))

    flow.assert_exact()
