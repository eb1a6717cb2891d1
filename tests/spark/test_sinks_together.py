"""Several sinks of one pipeline, with Kafka's transaction in charge and without."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyspark import TaskContext

import tallystick as ts
from tests.spark.flow import Flow, pass_on
from tests.spark.topics import assert_exact, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]


def pipeline(flow: Flow, *sinks: Any, **settings: Any) -> ts.Pipeline:
    """From the input through nothing, to the sinks."""
    source = flow.source(max_offsets_per_trigger=100, **settings)
    return ts.Pipeline(flow.name).read(source).map_batches(pass_on()).write(*sinks)


def rows_in(folder: Path) -> list[tuple[str, str]]:
    """What the visible files hold."""
    table = ds.dataset(folder, format="parquet").to_table()
    pairs = zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)
    return sorted((key.decode(), value.decode()) for key, value in pairs)


@pytest.mark.parametrize("transactions", ["epoch", "task"])
def test_files_and_kafka_hold_the_same(flow: Flow, tmp_path: Path, transactions: str) -> None:
    flow.feed(300)
    folder = tmp_path / "files"
    run = pipeline(flow, flow.sink(transactions=transactions), ts.FileSink(str(folder)))

    flow.run(run)
    flow.feed(120)
    flow.run(run)

    flow.assert_exact()
    assert rows_in(folder) == sorted(flow.input)


def test_a_start_with_another_decider_is_refused_and_changes_nothing(flow: Flow) -> None:
    flow.feed(150)
    flow.run(pipeline(flow, flow.sink(transactions="epoch")))
    flow.assert_exact()
    seen = len(flow.input)
    flow.feed(150)
    for transactions, prefix in (
        ("task", "tallystick-"),
        ("epoch", "team-a-"),
        ("task", "team-b-"),
    ):
        other = flow.sink(transactions=transactions, transactional_id_prefix=prefix)
        with pytest.raises(ts.OptionError, match="its epochs are decided by Kafka transactions of"):
            flow.run(pipeline(flow, other))
        assert len(read_committed(flow.confluent, flow.topic_out)) == seen
    flow.run(pipeline(flow, flow.sink(transactions="epoch")))
    flow.assert_exact()


def test_the_prefix_of_a_sink_that_does_not_decide_may_change_with_every_start(flow: Flow) -> None:
    for prefix in ("tallystick-", "team-a-", "team-b-"):
        flow.feed(150)
        sink = flow.sink(transactions="task", transactional_id_prefix=prefix)
        flow.run(pipeline(flow, sink))
        flow.assert_exact()


def slow_at_first(folder: Path) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """A function that is slow with the front of a partition, and notes which readers there are."""
    folder.mkdir()

    def looked_at(rows: pa.RecordBatch) -> pa.RecordBatch:
        (folder / f"reader {TaskContext.get().partitionId()}").touch()
        if rows["offset"][0].as_py() == 0:
            time.sleep(3)  # pieces that are read beside this one are written before it
        return rows.select(["key", "value"])

    return looked_at


def test_pieces_of_a_partition_stay_in_order_whoever_writes_them(
    flow: Flow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flow.partitions = 1
    flow.topic_in = flow.kafka.create_topic(f"{flow.name}-one", 1)
    flow.feed(2000)
    by_task = {
        "task": flow.sink(transactions="task"),
        "at_least_once": flow.sink(topic=f"{flow.name}-b", guarantee="at_least_once"),
        "none": flow.sink(topic=f"{flow.name}-c", guarantee="none"),
    }
    for sink in by_task.values():
        if sink.topic != flow.topic_out:
            flow.kafka.create_topic(sink.topic, 3)
    both = "key binary, value binary"
    source = ts.Pipeline(flow.name).read(flow.source(min_partitions=2))

    with caplog.at_level(logging.WARNING, "tallystick"):
        read = source.map_batches(slow_at_first(tmp_path / "task"), schema=both)
        flow.run(read.write(*by_task.values()))
    for sink in by_task.values():
        assert_exact(flow.confluent, sink.topic, flow.input)
    assert "min_partitions=2 has no effect" in caplog.text
    assert len(list((tmp_path / "task").iterdir())) == 1

    for way in ("epoch", "transform"):
        topic = flow.kafka.create_topic(f"{flow.name}-{way}", 3)
        sink = flow.sink(topic=topic, transactions="epoch" if way == "epoch" else "task")
        rows = source.map_batches(slow_at_first(tmp_path / way), schema=both)
        rows = rows if way == "epoch" else rows.transform(lambda batch: batch)
        flow.run(rows.write(sink), checkpoint=tmp_path / f"checkpoint-{way}")
        assert_exact(flow.confluent, topic, flow.input)
    assert len(list((tmp_path / "epoch").iterdir())) == 2
    assert len(list((tmp_path / "transform").iterdir())) == 1
