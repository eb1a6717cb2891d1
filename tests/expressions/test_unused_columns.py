"""Columns that nothing names are not made, and no record is malformed by a field of these."""

from typing import Any

import pyarrow as pa
import pytest

import tallystick as ts
from tallystick.errors import RecordError
from tallystick.spark.cluster import Cluster
from tallystick.testing import Driver

NOWHERE = "127.0.0.1:9"
RECORDS = [
    {"key": b"a", "value": b'{"dest": "BER", "delay": 7, "note": "x"}', "timestamp": 1_000},
    {"key": b"b", "value": b'{"dest": "JFK", "delay": 99}', "timestamp": 2_000},
    {"key": None, "value": b'{"dest": null, "delay": 20}', "timestamp": 3_000},
]
MALFORMED = {"key": b"a", "value": b'{"dest": "BER", "delay": "late"}', "timestamp": 4_000}
LATE_BEYOND = {"key": b"a", "value": b'{"dest": "BER", "delay": 1}', "timestamp": 1 << 60}


def same(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows


def flights(mode: str = "failfast") -> ts.Pipeline:
    value = ts.Json("dest string, delay bigint, note string", mode=mode)
    source = ts.KafkaSource(NOWHERE, topics=["flights"], value=value, headers=True)
    return ts.Pipeline("p").read(source)


def written(pipeline: Any) -> ts.Pipeline:
    return pipeline.write(ts.KafkaSink(NOWHERE, topic="out", value=ts.Json()))


def columns_made(pipeline: Any) -> set[str]:
    run = written(pipeline)._run(Cluster.at_hand(None), None)
    return {*run.inputs[0].read.layout.schema.names}


def fields_decoded(pipeline: Any) -> list[str]:
    """The fields that the decoder of the first input's values is asked for."""
    value = written(pipeline)._run(Cluster.at_hand(None), None).inputs[0].read.layout.value
    assert value is not None
    return list(value.schema.names)


def outputs(pipeline: Any, records: list[dict[str, Any]]) -> list[bytes]:
    driver = Driver(written(pipeline))
    driver.feed("flights", records)
    driver.epoch()
    return list(driver.records("out")["value"].to_pylist())


ALL = {"dest", "delay", "note", "key", "topic", "partition", "offset", "timestamp", "timestampType"}
ALL |= {"headers"}
KAFKAS = ALL - {"dest", "delay", "note"}
STEPS = [
    pytest.param(lambda rows: rows.select("dest"), {"dest"}, id="select"),
    pytest.param(
        lambda rows: rows.filter("OFFSET >= 1 AND delay > 9").select("dest"),
        {"dest", "delay", "offset"},
        id="filter, in other capitals",
    ),
    pytest.param(
        lambda rows: rows.with_columns(at="topic || dest").select("at AS place"),
        {"dest", "topic"},
        id="with_columns",
    ),
    pytest.param(
        lambda rows: rows.rename({"partition": "shard"}).drop("headers").select("shard", "delay"),
        {"delay", "partition", "headers"},
        id="rename and drop",
    ),
    pytest.param(
        lambda rows: rows.select("dest", "headers[0] AS first").map_batches(same),
        {"dest", "headers"},
        id="a function behind a select",
    ),
    pytest.param(lambda rows: rows.select("topic"), ALL - KAFKAS | {"topic"}, id="no field"),
    pytest.param(
        lambda rows: (
            rows.filter("delay > 9")
            .with_columns(place="upper(dest)")
            .key_by("place")
            .process(ts.aggregate({"n": ts.count()}))
        ),
        {"dest", "delay"},
        id="a keyed step",
    ),
    pytest.param(
        lambda rows: rows.key_by("dest").process(ts.deduplicate()), ALL, id="it keeps whole rows"
    ),
    pytest.param(lambda rows: rows.map_batches(same).select("dest"), ALL, id="a function before"),
    pytest.param(lambda rows: rows.filter("delay > 9"), ALL, id="all are written"),
    pytest.param(lambda rows: rows.with_columns(late="delay > 9"), ALL, id="all and one more"),
]


@pytest.mark.parametrize(("steps", "expected"), STEPS)
def test_columns_that_nobody_names_are_not_made(steps: Any, expected: set[str]) -> None:
    assert columns_made(steps(flights())) == expected


@pytest.mark.parametrize("steps", [step.values[0] for step in STEPS[:5]])
def test_the_rows_are_those_of_all_columns(steps: Any) -> None:
    rows = outputs(steps(flights()), RECORDS)
    assert len(rows) > 0
    assert rows == outputs(steps(flights().map_batches(same, schema=ddl_of_all())), RECORDS)


def ddl_of_all() -> pa.Schema:
    schema = written(flights())._run(Cluster.at_hand(None), None).inputs[0].read.layout.schema
    assert {*schema.names} == ALL
    return schema


@pytest.mark.parametrize("record", [MALFORMED, LATE_BEYOND])
def test_what_nobody_names_makes_no_record_malformed(record: dict[str, Any]) -> None:
    rows = outputs(flights().select("dest"), [*RECORDS, record])
    assert rows == [*outputs(flights().select("dest"), RECORDS), b'{"dest":"BER"}']


@pytest.mark.parametrize(
    ("record", "column", "reason"),
    [(MALFORMED, "delay", "delay: declared bigint"), (LATE_BEYOND, "timestamp", "its timestamp")],
)
def test_a_record_is_refused_for_what_a_step_names(
    record: dict[str, Any], column: str, reason: str
) -> None:
    with pytest.raises(RecordError, match=reason):
        outputs(flights().select("dest", column), [*RECORDS, record])
    others = outputs(flights("dropmalformed").select("dest", column), [*RECORDS, record])
    assert others == outputs(flights().select("dest", column), RECORDS)


@pytest.mark.parametrize("value", [b"[1]", b'{"dest": "BER"', b"\xff"])
def test_a_value_that_is_no_object_is_malformed_whatever_is_named(value: bytes) -> None:
    with pytest.raises(RecordError):
        outputs(flights().select("dest"), [{"key": b"a", "value": value, "timestamp": 1}])


def test_who_asks_for_the_corrupt_record_asks_for_all_fields() -> None:
    asked = flights("permissive").select("dest", "_corrupt_record IS NULL AS whole")
    assert fields_decoded(asked) == ["dest", "delay", "note"]
    rows = outputs(asked, [RECORDS[0], MALFORMED])
    assert rows == [b'{"dest":"BER","whole":true}', b'{"dest":null,"whole":false}']
    assert fields_decoded(flights("permissive").select("dest")) == ["dest"]


def test_a_malformed_field_goes_to_the_dead_letters_where_it_is_named() -> None:
    for columns, letters in ((["dest"], 0), (["dest", "delay"], 1)):
        sink = ts.KafkaSink(NOWHERE, topic="out", value=ts.Json(), dead_letter_topic="dead")
        driver = Driver(flights("deadletter").select(*columns).write(sink))
        driver.feed("flights", [*RECORDS, MALFORMED])
        driver.epoch()
        assert len(driver.dead_letters()) == letters
        assert driver.records("out").num_rows == 4 - letters


def test_a_misspelt_column_is_answered_with_all_that_there_are() -> None:
    with pytest.raises(ts.OptionError, match="dest, delay, note"):
        columns_made(flights().select("dest", "nota"))


FIELDS = "dest string, delay bigint, n int"


@pytest.mark.parametrize(
    "value",
    [
        ts.Avro(FIELDS, registry="http://127.0.0.1:9"),
        ts.Protobuf(FIELDS, registry="http://127.0.0.1:9"),
        ts.JsonSchema(FIELDS),
    ],
)
def test_other_formats_are_asked_for_fewer_fields_too(value: Any) -> None:
    rows = ts.Pipeline("p").read(ts.KafkaSource(NOWHERE, topics=["t"], value=value))
    assert fields_decoded(rows.filter("n > 1").select("delay")) == ["delay", "n"]
    assert fields_decoded(rows.map_batches(same).select("delay")) == ["dest", "delay", "n"]


def test_the_name_of_an_avro_record_stays_where_its_reader_expects_it() -> None:
    value = ts.Avro(registry="http://127.0.0.1:9", schema="dest string, n int", name_column="type")
    rows = ts.Pipeline("p").read(ts.KafkaSource(NOWHERE, topics=["t"], value=value))
    for columns in (["n"], ["type", "n"]):
        assert fields_decoded(rows.select(*columns)) == ["n", "type"]


def test_sql_decodes_what_its_text_names() -> None:
    value = ts.Json("id bigint, user string, amount double, at timestamp, note string")
    orders = ts.KafkaSource(NOWHERE, topics=["orders"], value=value)
    for text, fields in {
        "SELECT user FROM orders WHERE amount > 1": ["user", "amount"],
        "SELECT user, count(*) AS n FROM orders GROUP BY user": ["user"],
        "SELECT user, sum(amount) AS n FROM orders GROUP BY user, window(at, '1 hour')": [
            *("user", "amount", "at")
        ],
        "SELECT DISTINCT user FROM orders": ["user"],
        "SELECT * FROM orders": ["id", "user", "amount", "at", "note"],
        "SELECT o.user FROM orders o JOIN orders p ON o.id = p.id "
        "AND p.at BETWEEN o.at AND o.at + INTERVAL 1 HOUR": ["id", "user", "at"],
    }.items():
        assert fields_decoded(ts.sql(text, orders=orders, watermark={"orders": "at"})) == fields
