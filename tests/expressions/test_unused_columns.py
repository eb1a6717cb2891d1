"""Kafka's columns that no expression names are not made, and no record is refused otherwise."""

from typing import Any

import pyarrow as pa
import pytest

import tallystick as ts
from tallystick.errors import RecordError
from tallystick.spark.cluster import Cluster
from tallystick.testing import Driver

NOWHERE = "127.0.0.1:9"
RECORDS = [
    {"key": b"a", "value": b'{"dest": "BER", "delay": 7}', "timestamp": 1_000},
    {"key": b"b", "value": b'{"dest": "JFK", "delay": 99}', "timestamp": 2_000},
    {"key": None, "value": b'{"dest": null, "delay": 20}', "timestamp": 3_000},
]
MALFORMED = {"key": b"a", "value": b'{"dest": "BER", "delay": "late"}', "timestamp": 4_000}
LATE_BEYOND = {"key": b"a", "value": b'{"dest": "BER", "delay": 1}', "timestamp": 1 << 60}


def same(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows


def flights(mode: str = "failfast") -> ts.Pipeline:
    value = ts.Json("dest string, delay bigint", mode=mode)
    source = ts.KafkaSource(NOWHERE, topics=["flights"], value=value, headers=True)
    return ts.Pipeline("p").read(source)


def written(pipeline: Any) -> ts.Pipeline:
    return pipeline.write(ts.KafkaSink(NOWHERE, topic="out", value=ts.Json()))


def columns_made(pipeline: Any) -> set[str]:
    run = written(pipeline)._run(Cluster.at_hand(None), None)
    return {*run.inputs[0].read.layout.schema.names}


def outputs(pipeline: Any, records: list[dict[str, Any]]) -> list[bytes]:
    driver = Driver(written(pipeline))
    driver.feed("flights", records)
    driver.epoch()
    return list(driver.records("out")["value"].to_pylist())


ALL = {"dest", "delay", "key", "topic", "partition", "offset", "timestamp", "timestampType"}
ALL |= {"headers"}
VALUE = {"dest", "delay", "timestamp"}
STEPS = [
    pytest.param(lambda rows: rows.select("dest"), VALUE, id="select"),
    pytest.param(
        lambda rows: rows.filter("OFFSET >= 1 AND delay > 9").select("dest"),
        VALUE | {"offset"},
        id="filter, in other capitals",
    ),
    pytest.param(
        lambda rows: rows.with_columns(at="topic || dest").select("at AS place"),
        VALUE | {"topic"},
        id="with_columns",
    ),
    pytest.param(
        lambda rows: rows.rename({"partition": "shard"}).drop("headers").select("shard", "delay"),
        VALUE | {"partition", "headers"},
        id="rename and drop",
    ),
    pytest.param(
        lambda rows: rows.select("dest", "headers[0] AS first").map_batches(same),
        VALUE | {"headers"},
        id="a function behind a select",
    ),
    pytest.param(lambda rows: rows.map_batches(same).select("dest"), ALL, id="a function before"),
    pytest.param(lambda rows: rows.filter("delay > 9"), ALL, id="all are written"),
    pytest.param(lambda rows: rows.with_columns(late="delay > 9"), ALL, id="all and one more"),
]


@pytest.mark.parametrize(("steps", "expected"), STEPS)
def test_columns_of_kafkas_that_nobody_names_are_not_made(steps: Any, expected: set[str]) -> None:
    assert columns_made(steps(flights())) == expected


@pytest.mark.parametrize("steps", [step.values[0] for step in STEPS[:4]])
def test_the_rows_are_those_of_all_columns(steps: Any) -> None:
    rows = outputs(steps(flights()), RECORDS)
    assert len(rows) > 0
    assert rows == outputs(steps(flights().map_batches(same, schema=ddl_of_all())), RECORDS)


def ddl_of_all() -> pa.Schema:
    schema = written(flights())._run(Cluster.at_hand(None), None).inputs[0].read.layout.schema
    assert {*schema.names} == ALL
    return schema


@pytest.mark.parametrize(
    ("record", "reason"), [(MALFORMED, "delay: declared bigint"), (LATE_BEYOND, "its timestamp")]
)
def test_a_record_is_refused_for_what_nobody_names(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        outputs(flights().select("dest"), [*RECORDS, record])
    others = outputs(flights("dropmalformed").select("dest"), [*RECORDS, record])
    assert others == outputs(flights().select("dest"), RECORDS)
