"""Schemas to write are found in a registry over real HTTP, by the driver alone, or registered."""

import io
import json
import pickle
from collections.abc import Iterator

import fastavro
import pyarrow as pa
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

import tallystick as ts
from tallystick.errors import RegistryUnavailableError
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.registry import columns_to_read
from tallystick.pipeline.topics import columns_ddl, layout_of
from tallystick.state.schema import schema_of
from tallystick.values import TopicPartition
from tests.kafka.registry import WritableRegistry
from tests.protobuf_schemas import add_field, classes_of, text_of

SCHEMA = json.dumps(
    {"type": "record", "name": "Count", "fields": [{"name": "n", "type": ["null", "long"]}]}
)
KEY = '{"type": "record", "name": "K", "fields": [{"name": "k", "type": "string"}]}'
COLUMNS = pa.schema([("n", pa.int64())])


@pytest.fixture
def registry() -> Iterator[WritableRegistry]:
    with WritableRegistry().serving() as known:
        yield known


def output(value: ts.Avro, **settings: object) -> KafkaOutput:
    return ts.KafkaSink("host:9092", topic="out", value=value, **settings).output


def test_the_newest_schema_of_the_topics_subject_is_written(registry):
    registry.add("out-value", '{"type": "record", "name": "Old", "fields": []}')
    newest = registry.add("out-value", SCHEMA)
    rows = output(ts.Avro(registry=registry.url)).rows({"out": 1})
    requests = list(registry.requests)
    travelled = pickle.loads(pickle.dumps(rows))  # noqa: S301  our own bytes

    batch = pa.RecordBatch.from_pydict({"n": [1, None]}, schema=COLUMNS)
    ((_, records),) = travelled.split(batch, spread=0)

    first, second = records.column("value").to_pylist()
    assert first == b"\0" + newest.to_bytes(4, "big") + b"\2\2"
    body = io.BytesIO(second[5:])
    assert fastavro.schemaless_reader(body, fastavro.parse_schema(json.loads(SCHEMA)), None) == {
        "n": None
    }
    assert requests == ["GET /subjects/out-value/versions/latest"]
    assert registry.requests == requests, "a task asked the registry"


def test_a_given_schema_must_be_one_of_the_subject_and_nothing_is_registered(registry):
    first = registry.add("counts", SCHEMA)
    registry.add("counts", '{"type": "record", "name": "Newer", "fields": []}')

    rows = output(ts.Avro(SCHEMA, registry=registry.url, subject="counts")).rows({"out": 1})
    assert rows.value.schema_id == first

    unknown = output(ts.Avro(SCHEMA, registry=registry.url, subject="others"))
    with pytest.raises(ts.OptionError, match="does not have that schema under subject 'others'"):
        unknown.rows({"out": 1})
    assert "others" not in registry.subjects


def test_a_schema_is_registered_if_asked_for_but_not_by_a_look_at_the_columns(registry):
    sink = ts.KafkaSink(
        "host:9092", topic="out", value=ts.Avro(SCHEMA, registry=registry.url, register=True)
    )
    sink.check_columns(COLUMNS)
    assert registry.requests == []

    with pytest.raises(ts.OptionError, match=r"topic='out'\): column 'n' is of type string"):
        sink.check_columns(pa.schema([("n", pa.string())]))
    rows = sink.output.rows({"out": 1})
    sink.output.rows({"out": 1})

    assert registry.subjects == {"out-value": [rows.value.schema_id]}
    assert registry.requests == ["POST /subjects/out-value/versions"]


def test_a_registry_that_was_busy_is_asked_again_and_registers_once(registry):
    registry.faults = [503, 500]
    rows = output(ts.Avro(SCHEMA, registry=registry.url, register=True)).rows({"out": 1})

    assert registry.subjects == {"out-value": [rows.value.schema_id]}
    assert len(registry.requests) == 3


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (409, ts.OptionError, "refuses the schema: .*a fault"),
        (422, ts.OptionError, "refuses the schema"),
        (403, ts.AuthorizationError, "may register schemas"),
        (404, RegistryUnavailableError, "POST .* answers 404"),
    ],
)
def test_a_registry_that_refuses_is_quoted(registry, status, error, message):
    registry.faults = [status]

    with pytest.raises(error, match=message):
        output(ts.Avro(SCHEMA, registry=registry.url, register=True)).rows({"out": 1})


def test_a_subject_of_another_format_and_a_schema_that_is_none_are_refused(registry):
    registry.add("out-value", "{}", kind="JSON")
    with pytest.raises(ts.OptionError, match=r"subject 'out-value'.*of type JSON, not AVRO"):
        output(ts.Avro(registry=registry.url)).rows({"out": 1})
    with pytest.raises(ts.OptionError, match="no valid Avro schema"):
        output(ts.Avro('{"type": "record"}', registry=registry.url, register=True)).rows({})
    with pytest.raises(ts.OptionError, match="does not have a schema under subject 'none'"):
        output(ts.Avro(registry=registry.url, subject="none")).rows({})


ORDER = """{"type": "object", "properties": {
    "n": {"type": "integer"}, "at": {"type": "string", "format": "date-time"}}}"""


def test_json_has_a_frame_and_the_schema_that_the_subject_has(registry):
    known = registry.add("out-value", ORDER, kind="JSON")
    for form in (
        ts.JsonSchema(registry=registry.url),
        ts.JsonSchema(ORDER.replace("\n", " "), registry=registry.url),
        ts.JsonSchema(ORDER, registry=registry.url, register=True),
    ):
        rows = output(form).rows({"out": 1})
        ((_, records),) = rows.split(pa.RecordBatch.from_pydict({"n": [1]}), spread=0)
        assert records.column("value").to_pylist() == [
            b"\0" + known.to_bytes(4, "big") + b'{"n":1}'
        ]
    sink = ts.KafkaSink("h:9092", topic="out", value=ts.JsonSchema(registry=registry.url))
    with pytest.raises(ts.OptionError, match=r"column 'n' is of type string.*as integer"):
        sink.check_columns(pa.schema([("n", pa.string())]))


def test_the_columns_to_read_are_those_of_the_newest_schema(registry):
    registry.add("orders", ORDER, kind="JSON")
    registry.add("odd", '{"type": "object", "properties": {"x": {"type": "null"}}}', kind="JSON")
    registry.add("records", SCHEMA)

    assert columns_to_read(ts.JsonSchema(registry=registry.url, subject="orders")) == pa.schema(
        [("n", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))]
    )
    for subject, message in (
        ("odd", "subject 'odd': property 'x' of the JSON Schema cannot be a column"),
        ("records", "of type AVRO, not JSON"),
        ("none", "does not have a schema under subject 'none'"),
    ):
        with pytest.raises(ts.OptionError, match=message):
            columns_to_read(ts.JsonSchema(registry=registry.url, subject=subject))


@pytest.mark.parametrize("kind", ["AVRO", "JSON"])
def test_the_topic_of_a_row_is_where_it_goes_and_no_part_of_its_value(registry, kind):
    closed = '{"type": "object", "properties": {"n": {}}, "additionalProperties": false}'
    registry.add("all", SCHEMA if kind == "AVRO" else closed, kind=kind)
    form = ts.Avro if kind == "AVRO" else ts.JsonSchema
    sink = ts.KafkaSink(
        "host:9092", token_topic="t", value=form(registry=registry.url, subject="all")
    )
    sink.check_columns(pa.schema([("n", pa.int64()), ("topic", pa.string())]))

    batch = pa.RecordBatch.from_pydict({"n": [1, 2], "topic": ["a", "b"]})
    parts = list(sink.output.rows({"a": 1, "b": 1}).split(batch, spread=0))

    assert [partition for partition, _ in parts] == [TopicPartition("a", 0), TopicPartition("b", 0)]
    value = b"\2\2" if kind == "AVRO" else b'{"n":1}'
    assert parts[0][1].column("value").to_pylist() == [b"\0\0\0\0\1" + value]


def test_a_key_of_columns_has_a_schema_of_its_own(registry):
    value_id, key_id = registry.add("out-value", SCHEMA), registry.add("out-key", KEY)
    avro = ts.Avro(registry=registry.url)
    rows = ts.KafkaSink(
        "host:9092", topic="out", key=["k"], key_format=avro, value=ts.Json()
    ).output.rows({"out": 1})
    batch = pa.RecordBatch.from_pydict({"k": ["a", None], "n": [1, 2]})

    ((partition, records),) = rows.split(batch, spread=0)

    assert partition == TopicPartition("out", 0)
    assert value_id != key_id
    assert records.column("key").to_pylist() == [b"\0" + key_id.to_bytes(4, "big") + b"\2a", None]
    assert records.column("value").to_pylist() == [b'{"k":"a","n":1}', b'{"k":null,"n":2}']


def test_a_union_of_schemas_that_the_registry_refers_to_is_read(registry):
    """As Confluent's documentation has it for several types of events in one topic."""
    names = [("orders-value", "shop.Order", "id"), ("payments-value", "shop.Payment", "payer")]
    for subject, name, field in names:
        fields = [{"name": field, "type": "string"}]
        registry.add(subject, json.dumps({"type": "record", "name": name, "fields": fields}))
    references = [{"name": name, "subject": subject, "version": 1} for subject, name, _ in names]
    union = registry.add("all-value", '["shop.Order", "shop.Payment"]', references=references)
    form = ts.Avro("id string, payer string", registry=registry.url, name_column="type")
    source = ts.KafkaSource("host:9092", topics=["all"], value=form)
    options = source.read_options("p")
    layout = layout_of(options, schema_of(columns_ddl(options), "columns"))

    assert layout.value is not None
    frame = b"\0" + union.to_bytes(4, "big")
    values = pa.array([frame + b"\0\2a", frame + b"\2\2b"], pa.binary())
    parsed = layout.value.parse(values, "failfast", str)
    assert parsed.columns.to_pylist() == [
        {"id": "a", "payer": None, "type": "shop.Order"},
        {"id": None, "payer": "b", "type": "shop.Payment"},
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"value": ts.Avro(schemas="f.json")}, "writing needs a registry="),
        ({"value": ts.Avro(registry="http://r", name_column="t")}, "name_column=...\\) is for a s"),
        ({"value": ts.Avro("n long", registry="http://r")}, "Avro's JSON text"),
        (
            {"value": ts.Avro(registry="http://r"), "topic": None, "token_topic": "t"},
            "subject=...\\) must name",
        ),
        ({"value": ts.JsonSchema("n int", registry="http://r")}, "as JSON Schema"),
        ({"value": ts.Text()}, "value=Text.*expected ts.Json"),
        ({"value": ts.Json(), "key": "k", "key_format": "jason"}, "key_format=.*expected ts.Json"),
        ({"value": ts.JsonSchema("{}")}, "in a sink needs a registry="),
        ({"value": ts.Json(), "key": ["a", "b"]}, "set key_format="),
        ({"value": ts.Json(), "key_format": ts.Json()}, "it is None: name them"),
        ({"value": ts.Json(), "key": [], "key_format": ts.Json()}, "it is \\[\\]: name them"),
        ({"key": "a", "key_format": ts.Json()}, "for value="),
    ],
)
def test_a_sink_that_cannot_work_is_refused_at_once(settings, message):
    with pytest.raises(ts.OptionError, match=message):
        ts.KafkaSink("host:9092", **{"topic": "out", **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"registry": "http://r"}, "reading needs a schema"),
        ({"schema": "a int", "registry": "http://r", "subject": "s"}, "are for a sink"),
        ({"schema": "a int", "registry": "http://r", "register": True}, "are for a sink"),
    ],
)
def test_what_is_for_writing_is_refused_in_a_source(settings, message):
    with pytest.raises(ts.OptionError, match=message):
        ts.KafkaSource("host:9092", topics=["t"], value=ts.Avro(**settings))
    with pytest.raises(ts.OptionError, match="needs the schema= to register"):
        ts.Avro(registry="http://r", register=True)


def counts(name: str, *references: str) -> FileDescriptorProto:
    file = FileDescriptorProto(name=name, package="c", syntax="proto3")
    file.dependency.extend(references)
    file.message_type.add(name="Other")
    add_field(file.message_type.add(name="Count"), "n", "int64", optional=True)
    return file


def test_the_newest_protobuf_schema_is_written_as_the_message_that_was_named(registry):
    base = FileDescriptorProto(name="base.proto", package="b", syntax="proto3")
    file = counts("c.proto", "b/base.proto")
    registry.add("base", text_of(base)[1:], "PROTOBUF")
    newest = registry.add(
        "out-value",
        text_of(file)[1:],
        "PROTOBUF",
        [{"name": "b/base.proto", "subject": "base", "version": 1}],
    )
    form = ts.Protobuf(registry=registry.url, message="Count")
    rows = output(form).rows({"out": 1})
    assert registry.requests == [
        "GET /subjects/out-value/versions/latest?format=serialized",
        "GET /subjects/base/versions/1?format=serialized",
    ]
    batch = pa.RecordBatch.from_pydict({"n": [7, None]}, schema=COLUMNS)
    ((_, records),) = rows.split(batch, spread=0)
    first, second = records.column("value").to_pylist()
    assert first == b"\0" + newest.to_bytes(4, "big") + b"\2\2" + b"\x08\7"
    assert second == b"\0" + newest.to_bytes(4, "big") + b"\2\2"
    reference = counts("c.proto")
    assert classes_of(reference)["Count"].FromString(first[7:]).n == 7


@pytest.mark.parametrize(
    ("kind", "message", "says"),
    [
        ("PROTOBUF", "Nobody", "no message 'Nobody'"),
        ("PROTOBUF", None, "column 'n' would be lost, message c.Other"),
        ("JSON", None, "its newest schema is of type JSON, not PROTOBUF"),
        (None, None, "does not have a schema under subject 'out-value': register it there"),
    ],
)
def test_a_protobuf_schema_that_does_not_fit_is_refused_at_the_start(registry, kind, message, says):
    if kind is not None:
        registry.add("out-value", text_of(counts("c.proto"))[1:], kind)
    sink = ts.KafkaSink(
        "host:9092", topic="out", value=ts.Protobuf(registry=registry.url, message=message)
    )
    with pytest.raises(ts.OptionError, match=says):
        sink.check_columns(COLUMNS)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "needs the registry="),
        ({"registry": "nothing"}, "URL cannot be used"),
        ({"registry": "http://r:1", "mode": "other"}, "expected .failfast"),
        ({"registry": "http://r:1", "schema": " "}, "schema=''. is empty"),
    ],
)
def test_protobuf_settings_that_make_no_sense_are_refused(settings, says):
    with pytest.raises(ts.OptionError, match=says):
        ts.Protobuf(**settings)


def test_protobuf_is_asked_for_differently_in_a_source_and_a_sink():
    form = ts.Protobuf("n bigint", "http://r:1")
    source = ts.KafkaSource("host:9092", topics=["t"], value=form)
    assert "value.format" in repr(source.options) or source.value == form
    with pytest.raises(ts.OptionError, match="is for a source"):
        ts.KafkaSink("host:9092", topic="out", value=form)
    for wrong, says in (
        (ts.Protobuf(registry="http://r:1"), "reading needs a schema"),
        (ts.Protobuf("n bigint", "http://r:1", message="M"), "are for a sink"),
    ):
        with pytest.raises(ts.OptionError, match=says):
            ts.KafkaSource("host:9092", topics=["t"], value=wrong)
