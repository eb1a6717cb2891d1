"""Columns that `map_batches(schema=…)` declares, on real engines: by name, wherever the rows go."""

import json
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame

import tallystick as ts
from tallystick.errors import OptionError
from tests.spark.flow import Flow
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

VALUE = ts.Json("payer string, payee string, note string")
PAID = {"payer": "alice", "payee": "bob"}


def feed(flow: Flow) -> None:
    record = json.dumps({**PAID, "note": "rent"})
    produce(flow.confluent, flow.topic_in, [("k", record)])


def written(flow: Flow) -> list[Any]:
    return [json.loads(record.value) for record in read_committed(flow.confluent, flow.topic_out)]


def unchanged() -> Any:
    def same(rows: DataFrame) -> DataFrame:
        return rows

    return same


def chosen(*names: str) -> Any:
    def choice(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(names)

    return choice


def in_a_struct() -> Any:
    def struct(rows: pa.RecordBatch) -> pa.RecordBatch:
        fields = [rows["payee"], rows["payer"]]
        paid = pa.StructArray.from_arrays(fields, names=["payee", "payer"])
        return pa.record_batch({"paid": paid})

    return struct


def test_they_go_by_name_before_a_dataframe(flow: Flow) -> None:
    feed(flow)
    swapped = (
        ts.Pipeline(flow.name)
        .read(flow.source(value=VALUE))
        .map_batches(chosen("payee", "payer"), schema="payer string, payee string")
        .transform(unchanged())
        .map_batches(in_a_struct(), schema="paid struct<payer: string, payee: string>")
        .write(flow.sink(value=ts.Json()))
    )
    flow.run(swapped)

    assert written(flow) == [{"paid": PAID}]


def test_what_was_not_declared_is_refused_before_a_sink_and_nothing_is_written(flow: Flow) -> None:
    feed(flow)
    pipeline = (
        ts.Pipeline(flow.name)
        .read(flow.source(value=VALUE))
        .map_batches(chosen("payer"), schema="payer string, payee string")
        .write(flow.sink(value=ts.Json()))
    )
    with pytest.raises(OptionError, match="map_batches choice, schema=: column 'payee' is not the"):
        flow.run(pipeline)

    assert written(flow) == []


def test_a_transform_without_return_is_said_to_have_none(flow: Flow) -> None:
    feed(flow)

    def forgotten(rows: DataFrame) -> Any:
        if not rows.columns:
            return rows
        rows.where("payer = 'alice'")

    rows = ts.Pipeline(flow.name).read(flow.source(value=VALUE)).transform(forgotten)
    with pytest.raises(OptionError, match=r"forgotten: .* returned None, .*no `return`"):
        flow.run(rows.write(flow.sink(value=ts.Json())))
    keyed = rows.key_by("payer").process(ts.aggregate({"n": ts.count()}), uid="n")
    with pytest.raises(OptionError, match=r"forgotten: .* returned None, .*no `return`"):
        flow.run(keyed.write(flow.sink(value=ts.Json())))


def test_a_relative_checkpoint_is_one_folder_whatever_the_driver_changed_to(
    flow: Flow, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's workers, and its tasks, are in the folder that it was started in."""
    feed(flow)
    monkeypatch.chdir(tmp_path)
    pipeline = (
        ts.Pipeline(flow.name)
        .read(flow.source(value=VALUE))
        .key_by("payer")
        .process(ts.aggregate({"n": ts.count()}), uid="n")
        .write(flow.sink(value=ts.Json()))
    )
    query = pipeline.start(flow.spark, checkpoint="job", trigger={"availableNow": True})
    monkeypatch.chdir("/")
    query.awaitTermination()

    assert written(flow) == [{"payer": "alice", "n": 1}]
    assert {path.name for path in (tmp_path / "job").iterdir()} >= {"tallystick", "keyed-state"}
    assert list((tmp_path / "job" / "keyed-state" / "n").iterdir())
