"""From rows to the columns that Kafka stores."""

import pyarrow as pa
import pytest

from tallystick.codec.json.write import JsonWriter
from tallystick.codec.rows import RowLayout, partition_of
from tallystick.errors import OptionError, RecordError
from tallystick.values import TopicPartition


def rows(**columns):
    return pa.RecordBatch.from_pydict(columns)


def written(layout, batch, spread=0):
    return {
        partition: records.to_pylist() for partition, records in layout.split(batch, spread=spread)
    }


def test_rows_go_where_kafkas_java_client_would_put_them():
    layout = RowLayout({"t": 3}, "t")
    batch = rows(key=["a", "b", "c", "a"], value=["1", "2", "3", "4"])
    partitions = partition_of(batch.column("key"), 3, 0)

    records = written(layout, batch)
    for row, partition in enumerate(partitions):
        values = [r["value"] for r in records[TopicPartition("t", int(partition))]]
        assert batch.column("value")[row].as_py().encode() in values


def test_the_order_of_rows_is_kept_in_each_partition():
    records = written(RowLayout({"t": 1}, "t"), rows(value=[str(i) for i in range(50)]))

    assert [r["value"] for r in records[TopicPartition("t", 0)]] == [b"%d" % i for i in range(50)]


def test_rows_without_key_go_together():
    records = written(RowLayout({"t": 4}, "t"), rows(value=["1", "2"]), spread=6)

    assert list(records) == [TopicPartition("t", 2)]


def test_rows_choose_their_topic_and_partition_as_in_sparks_sink():
    batch = rows(topic=["a", "b", "a"], partition=[1, None, 0], value=["1", "2", "3"])
    records = written(RowLayout({"a": 2, "b": 1}, None), batch)

    assert {p: [r["value"] for r in rs] for p, rs in records.items()} == {
        TopicPartition("a", 0): [b"3"],
        TopicPartition("a", 1): [b"1"],
        TopicPartition("b", 0): [b"2"],
    }


def test_the_topic_of_the_sink_wins_over_the_column():
    records = written(RowLayout({"t": 1}, "t"), rows(topic=["x"], value=["1"]))

    assert list(records) == [TopicPartition("t", 0)]


def test_a_topic_that_is_an_address_is_no_part_of_a_json_value():
    both = rows(topic=["a", "b"], delay=[3, 4])
    records = written(RowLayout({"a": 1, "b": 1}, None, value=JsonWriter(), key="topic"), both)
    assert records == {
        TopicPartition("a", 0): [{"key": b"a", "value": b'{"delay":3}'}],
        TopicPartition("b", 0): [{"key": b"b", "value": b'{"delay":4}'}],
    }

    records = written(RowLayout({"t": 1}, "t", value=JsonWriter()), both.slice(1))
    assert records[TopicPartition("t", 0)] == [
        {"key": None, "value": b'{"topic":"b","delay":4}'},
    ]
    with pytest.raises(OptionError, match="no columns"):
        written(RowLayout({"a": 1}, None, value=JsonWriter()), both.select(["topic"]))


def test_all_columns_become_one_json_value_and_one_of_them_the_key():
    layout = RowLayout({"t": 1}, "t", value=JsonWriter(), key="carrier")
    records = written(layout, rows(carrier=["UA", None], delay=[3, None]))

    assert records[TopicPartition("t", 0)] == [
        {"key": b"UA", "value": b'{"carrier":"UA","delay":3}'},
        {"key": None, "value": b'{"carrier":null,"delay":null}'},
    ]


def test_a_timestamp_column_becomes_milliseconds():
    at = pa.array([1_700_000_000_123_456], pa.timestamp("us", tz="UTC"))
    records = written(RowLayout({"t": 1}, "t"), rows(value=["x"], timestamp=at))

    assert records[TopicPartition("t", 0)][0]["timestamp"] == 1_700_000_000_123


@pytest.mark.parametrize(
    ("layout", "batch", "error", "message"),
    [
        (RowLayout({"t": 1}, "t"), rows(text=["x"]), OptionError, "no column 'value'"),
        (RowLayout({"t": 1}, "t"), rows(value=[1]), OptionError, "of type int64"),
        (RowLayout({"t": 1}, None), rows(value=["x"]), OptionError, "no topic to write to"),
        (
            RowLayout({"t": 1}, None),
            rows(value=["x"], topic=pa.array([None], pa.string())),
            RecordError,
            "name no topic",
        ),
        (RowLayout({"t": 1}, None), rows(value=["x"], topic=["u"]), RecordError, "topic 'u'"),
        (
            RowLayout({"t": 2}, "t"),
            rows(value=["x"], partition=[2]),
            RecordError,
            "do not exist (the first is 2; it has 2)",
        ),
        (
            RowLayout({"t": 1}, "t", value=JsonWriter(), key="k"),
            rows(value=["x"]),
            OptionError,
            "key='k': there is no column 'k'",
        ),
        (
            RowLayout({"t": 1}, "t"),
            rows(value=["x"], headers=[{"a": b"1"}]),
            OptionError,
            "column 'headers' to write is of type struct<a: binary>: expected list<",
        ),
        (
            RowLayout({"t": 1}, "t"),
            rows(value=["x"], partition=[[0]]),
            OptionError,
            "column 'partition' to write is of type list<item: int64>: expected int32",
        ),
        (
            RowLayout({"t": 1}, "t"),
            rows(value=["x"], partition=["first"]),
            RecordError,
            "column 'partition' to write, of type string, holds what is no int32",
        ),
        (
            RowLayout({"t": 1}, "t"),
            rows(value=["x"], partition=[0.5]),
            RecordError,
            "column 'partition' to write, of type double, holds what is no int32",
        ),
        (
            RowLayout({"t": 1}, None),
            rows(value=["x"], topic=[{"name": "t"}]),
            OptionError,
            "column 'topic' to write is of type struct<name: string>: expected string",
        ),
        (
            RowLayout({"t": 1}, "t"),
            rows(value=["x"], timestamp=pa.array([1 << 63], pa.uint64())),
            RecordError,
            "column 'timestamp' to write, of type uint64, holds what is no int64",
        ),
        (
            RowLayout({"t": 1}, "t", value=JsonWriter(), key="k"),
            rows(value=["x"], k=[{"a": 1}]),
            OptionError,
            "column 'k' to write is of type struct<a: int64>: expected string",
        ),
    ],
)
def test_what_kafka_cannot_store_is_named(layout, batch, error, message):
    with pytest.raises(error) as raised:
        written(layout, batch)
    assert message in str(raised.value)
