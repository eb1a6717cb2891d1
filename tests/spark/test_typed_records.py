"""Values and keys in Confluent's wire formats, through real pipelines."""

import io
import json
from collections.abc import Iterator
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

import tallystick as ts
from tests.json_validator import Draft202012Validator
from tests.kafka.registry import WritableRegistry
from tests.protobuf_schemas import add_field, classes_of, shop, text_of
from tests.spark.flow import Flow
from tests.spark.topics import committed_bytes, produce

pytestmark = [pytest.mark.broker, pytest.mark.spark]

KEY = {"type": "record", "name": "Key", "fields": [{"name": "k", "type": "string"}]}
VALUE = {
    "type": "record",
    "name": "Event",
    "fields": [
        {"name": "k", "type": "string"},
        {"name": "n", "type": ["null", "long"]},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
    ],
}


@pytest.fixture
def registry() -> Iterator[WritableRegistry]:
    with WritableRegistry().serving() as known:
        yield known


def avro_of(schema: dict[str, Any], schema_id: int, framed: bytes) -> Any:
    assert framed[:5] == b"\0" + schema_id.to_bytes(4, "big")
    return fastavro.schemaless_reader(io.BytesIO(framed[5:]), fastavro.parse_schema(schema), None)


def chosen_by_librdkafka(flow: Flow, records: list[tuple[int, bytes, bytes]]) -> dict[bytes, int]:
    """The partition of each key, by Kafka's default partitioner."""
    witness = f"{flow.topic_out}-witness"
    flow.kafka.create_topic(witness, flow.partitions)
    produce(flow.confluent, witness, [(key, b"") for _, key, _ in records])
    return {key: partition for partition, key, _ in committed_bytes(flow.confluent, witness)}


def test_avro_values_and_keys_are_what_the_registry_says(
    flow: Flow, registry: WritableRegistry
) -> None:
    records = [(None, json.dumps({"k": f"k{n % 5}", "n": n})) for n in range(200)]
    produce(flow.confluent, flow.topic_in, records)
    key_id = registry.add(f"{flow.topic_out}-key", json.dumps(KEY))
    sink = flow.sink(
        key=["k"],
        key_format=ts.Avro(registry=registry.url),
        value=ts.Avro(json.dumps(VALUE), registry=registry.url, register=True),
    )

    def tagged(rows: pa.RecordBatch) -> pa.RecordBatch:
        tags = [[f"t{n % 3}"] * (n % 3) for n in rows["n"].to_pylist()]
        return pa.RecordBatch.from_pydict(
            {"tags": pa.array(tags, pa.list_(pa.string())), "k": rows["k"], "n": rows["n"]}
        )

    pipeline = (
        ts.Pipeline(flow.name)
        .read(flow.source(value=ts.Json("k string, n bigint"), max_offsets_per_trigger=60))
        .map_batches(tagged)
        .write(sink)
    )

    flow.run(pipeline)

    (value_id,) = registry.subjects[f"{flow.topic_out}-value"]
    records_out = committed_bytes(flow.confluent, flow.topic_out)
    values = [avro_of(VALUE, value_id, value) for _, _, value in records_out]
    assert sorted(values, key=lambda value: value["n"]) == [
        {"k": f"k{n % 5}", "n": n, "tags": [f"t{n % 3}"] * (n % 3)} for n in range(200)
    ]
    assert [avro_of(KEY, key_id, key)["k"] for _, key, _ in records_out] == [v["k"] for v in values]
    assert {key: partition for partition, key, _ in records_out} == chosen_by_librdkafka(
        flow, records_out
    )
    assert sum(request.startswith("POST") for request in registry.requests) == 1


def test_keys_are_read_as_columns_and_a_malformed_one_goes_to_the_dead_letters(
    flow: Flow, registry: WritableRegistry
) -> None:
    """The keys of Avro that a pipeline counts by are those that fastavro wrote."""
    key_id = registry.add(f"{flow.topic_in}-key", json.dumps(KEY))
    schema = fastavro.parse_schema(KEY)
    records: list[tuple[bytes, str]] = [(b"no key", '{"n": 0}')]
    for n in range(60):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, schema, {"k": f"k{n % 4}"})
        framed = b"\0" + key_id.to_bytes(4, "big") + out.getvalue()
        records.append((framed, json.dumps({"k": "of the value", "n": n})))
    produce(flow.confluent, flow.topic_in, records)
    letters = f"{flow.topic_in}-letters"
    flow.kafka.create_topic(letters, 1)

    def doubled(rows: pa.RecordBatch) -> pa.RecordBatch:
        twice = pc.multiply(rows["n"], 2)
        return pa.RecordBatch.from_pydict({"key_k": rows["key_k"], "twice": twice})

    pipeline = (
        ts.Pipeline(flow.name)
        .read(
            flow.source(
                value=ts.Json("k string, n bigint", mode="deadletter"),
                key=ts.Avro("k string", registry=registry.url, mode="deadletter"),
            )
        )
        .map_batches(doubled)
        .write(
            flow.sink(
                key=["key_k"],
                key_format=ts.Json(),
                value=ts.Json(),
                dead_letter_topic=letters,
            )
        )
    )
    flow.run(pipeline)

    records_out = committed_bytes(flow.confluent, flow.topic_out)
    assert sorted(json.loads(value)["twice"] for _, _, value in records_out) == [
        2 * n for n in range(60)
    ]
    for _, key, value in records_out:
        row = json.loads(value)
        assert row["key_k"] == f"k{row['twice'] // 2 % 4}"
        assert key == b'{"key_k":"%b"}' % row["key_k"].encode()
    assert {key: partition for partition, key, _ in records_out} == chosen_by_librdkafka(
        flow, records_out
    )
    assert committed_bytes(flow.confluent, letters) == [(0, b"no key", b'{"n": 0}')]


def test_records_of_several_types_in_one_topic_are_told_by_their_name(
    flow: Flow, registry: WritableRegistry
) -> None:
    """A union of null and two records; a record of a branch that is none is a dead letter."""
    union: list[Any] = ["null", VALUE, KEY]
    frame = b"\0" + registry.add("all", json.dumps(union)).to_bytes(4, "big")
    schema = fastavro.parse_schema(union)
    records = [("bad", frame + b"\x06")]
    for n in range(60):
        event, key = ("Event", {"k": f"k{n}", "n": n, "tags": []}), ("Key", {"k": f"k{n}"})
        out = io.BytesIO()
        fastavro.schemaless_writer(out, schema, [event, key, None][n % 3])
        records.append((f"k{n}", frame + out.getvalue()))
    produce(flow.confluent, flow.topic_in, records)
    letters = f"{flow.topic_in}-letters"
    flow.kafka.create_topic(letters, 1)
    form = ts.Avro(
        "k string, n bigint", registry=registry.url, mode="deadletter", name_column="type"
    )

    def shown(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(["k", "n", "type"])

    pipeline = (
        ts.Pipeline(flow.name)
        .read(flow.source(value=form))
        .map_batches(shown)
        .write(
            flow.sink(value=ts.Json(), key=["k"], key_format=ts.Json(), dead_letter_topic=letters)
        )
    )
    flow.run(pipeline)

    rows = [json.loads(value) for _, _, value in committed_bytes(flow.confluent, flow.topic_out)]
    whole = [
        [
            {"k": f"k{n}", "n": n, "type": "Event"},
            {"k": f"k{n}", "n": None, "type": "Key"},
            {"k": None, "n": None, "type": None},
        ][n % 3]
        for n in range(60)
    ]
    assert sorted(map(repr, rows)) == sorted(map(repr, whole))
    assert committed_bytes(flow.confluent, letters) == [(0, b"bad", frame + b"\x06")]


ORDER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["k"],
    "properties": {
        "k": {"type": "string"},
        "n": {"oneOf": [{"type": "null"}, {"type": "integer"}]},
        "day": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
}


def test_json_schema_is_read_by_the_registrys_columns_and_written_in_its_frame(
    flow: Flow, registry: WritableRegistry
) -> None:
    schema_id = registry.add(f"{flow.topic_in}-value", json.dumps(ORDER), kind="JSON")
    orders = [
        {"k": f"k{n % 3}", "n": n if n % 2 else None, "day": "2024-02-29", "tags": ["a"] * (n % 3)}
        for n in range(50)
    ]
    frame = b"\0" + schema_id.to_bytes(4, "big")
    good = [(order["k"], frame + json.dumps(order).encode()) for order in orders]
    produce(flow.confluent, flow.topic_in, [*good, ("k0", b"{}"), ("k1", frame + b"[1]")])
    letters = f"{flow.topic_in}-letters"
    flow.kafka.create_topic(letters, 1)
    source = flow.source(
        value=ts.JsonSchema(
            registry=registry.url, subject=f"{flow.topic_in}-value", mode="deadletter"
        ),
        options={"metadata.columns": "none"},
    )
    sink = flow.sink(
        key="k",
        value=ts.JsonSchema(json.dumps(ORDER), registry=registry.url, register=True),
        dead_letter_topic=letters,
    )

    flow.run(ts.Pipeline(flow.name).read(source).write(sink))

    records = committed_bytes(flow.confluent, flow.topic_out)
    assert all(value[:5] == frame for _, _, value in records)  # one schema, one id, two subjects
    written = [json.loads(value[5:]) for _, _, value in records]
    validator = Draft202012Validator(ORDER)
    assert all(validator.is_valid(value) for value in written)
    assert sorted(map(json.dumps, written)) == sorted(map(json.dumps, orders))
    dead = {value for _, _, value in committed_bytes(flow.confluent, letters)}
    assert dead == {b"{}", frame + b"[1]"}


def test_protobuf_is_read_and_written_as_others_do(flow: Flow, registry: WritableRegistry) -> None:
    file = shop()
    order = classes_of(file)["Order"]
    schema_id = registry.add(f"{flow.topic_in}-value", text_of(file)[1:], "PROTOBUF")
    frame = b"\0" + schema_id.to_bytes(4, "big") + b"\0"
    records = []
    for n in range(80):
        message = order(a_string=f"k{n % 4}", a_int64=n, color=7 if n % 2 else 1, cash=n)
        message.lines.add(item=f"item {n}", tags=["t"] * (n % 3))
        records.append((f"k{n % 4}", frame + message.SerializeToString()))
    produce(flow.confluent, flow.topic_in, [*records, ("k0", frame + b"\xff"), ("k1", b"{}")])
    letters = f"{flow.topic_in}-letters"
    flow.kafka.create_topic(letters, 1)
    out = FileDescriptorProto(name="out.proto", package="out", syntax="proto3")
    add_field(out.message_type.add(name="Head"), "x", "int32")
    sold = out.message_type.add(name="Sold")
    for name, kind in (("k", "string"), ("n", "int64"), ("color", "string")):
        add_field(sold, name, kind)
    add_field(sold, "items", "string", repeated=True)
    out_id = registry.add(f"{flow.topic_out}-value", text_of(out)[1:], "PROTOBUF")

    def items(rows: pa.RecordBatch) -> pa.RecordBatch:
        lines = rows["lines"]
        names = pa.ListArray.from_arrays(lines.offsets, pc.struct_field(lines.values, "item"))
        columns = {"k": rows["a_string"], "n": rows["a_int64"], "color": rows["color"]}
        return pa.RecordBatch.from_pydict({**columns, "items": names})

    columns = "a_string string, a_int64 bigint, color string, lines array<struct<item:string>>"
    source = flow.source(value=ts.Protobuf(columns, registry.url, mode="deadletter"))
    sink = flow.sink(
        key="k",
        value=ts.Protobuf(registry=registry.url, message="Sold"),
        dead_letter_topic=letters,
    )
    flow.run(ts.Pipeline(flow.name).read(source).map_batches(items).write(sink))

    records_out = committed_bytes(flow.confluent, flow.topic_out)
    head = b"\0" + out_id.to_bytes(4, "big") + b"\2\2"
    assert all(value[:7] == head for _, _, value in records_out)
    read = [classes_of(out)["Sold"].FromString(value[7:]) for _, _, value in records_out]
    assert sorted(
        (sold_record.n, sold_record.k, sold_record.color, list(sold_record.items))
        for sold_record in read
    ) == [(n, f"k{n % 4}", "BLUE" if n % 2 else "RED", [f"item {n}"]) for n in range(80)]
    dead = {value for _, _, value in committed_bytes(flow.confluent, letters)}
    assert dead == {frame + b"\xff", b"{}"}
