"""Values of records: text, JSON, Avro, Protobuf, and the schemas that a registry gives of them."""

import base64
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from tallystick.codec.avro.reader import AvroReader
from tallystick.codec.json import flat as json_flat
from tallystick.codec.json import schema as json_schema
from tallystick.codec.json.read import FramedJsonReader, JsonReader
from tallystick.codec.protobuf.reader import ProtobufReader
from tallystick.codec.values import TextReader, ValueReader
from tests.codec import test_avro_reader as avro
from tests.codec import test_avro_unions as unions
from tests.codec import test_protobuf as protobuf
from tests.codec.test_json_flat import SCHEMA as FLAT
from tests.fuzz.decoder import Decoder
from tests.fuzz.guarded import GuardedMemory
from tests.fuzz.mutations import mutated_json
from tests.protobuf_schemas import SCALARS, text_of

MEMORY = GuardedMemory()


def where(row: int) -> str:
    """Name a row."""
    return f"topic t, partition 0, offset {row}"


def beside(good: bytes, data: bytes) -> pa.Array:
    """Return a column of a good value, a tombstone and the data, whose last byte is the last."""
    offsets = np.array([0, len(good), len(good), len(good) + len(data)], np.int32)
    data_buffer = pa.py_buffer(MEMORY.holding(good + data))
    bitmap = pa.py_buffer(np.packbits([True, False, True], bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), 3, [bitmap, pa.py_buffer(offsets), data_buffer])


def read_value(reader: ValueReader, data: bytes, original: bytes) -> bool:
    """Read a value beside its good sample, which must be read as ever."""
    parsed = reader.parse(beside(original, data), "permissive", where)
    parsed.columns.validate(full=True)
    assert 0 not in parsed.reasons
    assert 1 not in parsed.reasons, "a tombstone is no malformed value"
    good = reader.parse(pa.array([original], pa.binary()), "failfast", where)
    assert str(parsed.columns.slice(0, 1).to_pylist()) == str(good.columns.to_pylist())
    if data == original:
        assert not parsed.reasons
    kept = reader.parse(beside(original, data), "deadletter", where)
    assert kept.columns.num_rows == 3 - len(parsed.reasons)
    return not parsed.reasons


@cache
def framed_json() -> list[bytes]:
    """Return JSON texts in Confluent's frame."""
    return [b"\0\0\0\0\1" + text for text in (*flat_texts(), *nested_texts())]


@cache
def flat_texts() -> list[bytes]:
    """Return objects of scalars only, which a kernel reads."""
    json_flat.warm_up()  # else Arrow's parser would read them
    kinds: dict[Any, Any] = {
        pa.bool_(): True,
        pa.float32(): -1.5e-3,
        pa.float64(): 1.7976931348623157e308,
        pa.string(): 'a"\\é\u2028\U0001f600',
        pa.date32(): "2024-02-29",
    }
    row = {}
    for field in FLAT:
        if pa.types.is_timestamp(field.type):
            row[field.name] = "2024-02-29T12:30:15.123456" + ("Z" if field.type.tz else "")
        elif pa.types.is_decimal(field.type):
            row[field.name] = 7
        elif pa.types.is_integer(field.type):
            row[field.name] = -(2 ** (field.type.bit_width - 1))
        else:
            row[field.name] = kinds[field.type]
    texts = [json.dumps(row), json.dumps(row, ensure_ascii=False), "{}", json.dumps(row, indent=1)]
    return [text.encode() for text in texts]


NESTED = pa.schema(
    [
        ("id", pa.int64()),
        ("lines", pa.list_(pa.struct([("item", pa.string()), ("price", pa.decimal128(9, 2))]))),
        ("at", pa.timestamp("us", "UTC")),
    ]
)


@cache
def nested_texts() -> list[bytes]:
    """Return objects that Arrow reads."""
    line = {"item": "screw", "price": 1.25, "more": [1, {"x": None}]}
    row = {"id": 5, "lines": [line, None, line], "at": "2024-02-29T12:30:15Z", "other": {}}
    return [json.dumps(row).encode(), b'{"id":1,"lines":[]}']


def mutated_document(data: bytes, chance: Random, others: Sequence[bytes]) -> bytes:
    """Damage a JSON document at its values."""
    return mutated_json(data.decode(), chance).encode()


# ---- Avro ----


@cache
def avro_values() -> list[bytes]:
    """Return Avro values."""
    large = {**avro.ROW, "skipped": b"x" * 300, "l": list(range(100)), "s": "é" * 70, "u": None}
    return [avro.GOOD, avro.framed(avro.body(avro.SCHEMA, large))]


@cache
def avro_schemas() -> list[bytes]:
    """Return Avro schemas: a flat one, and one of all that nests."""
    line = avro.record(("item", "string"), ("next", ["null", "line"]), name="line")
    nested = avro.record(
        ("lines", {"type": "array", "items": line}),
        ("stock", {"type": "map", "values": ["line", "null"]}),
        ("f", avro.FIXED_DECIMAL),
        ("s", ["string", "null"]),
        ("many", ["null", "line", "int", avro.ENUM]),
    )
    return [json.dumps(avro.SCHEMA).encode(), json.dumps(nested).encode()]


AVRO_ANY = pa.schema(
    [
        *avro.COLUMNS,
        ("lines", pa.list_(pa.struct([("item", pa.string())]))),
        ("stock", pa.map_(pa.string(), pa.struct([("item", pa.string())]))),
        ("f", pa.decimal128(38, 4)),
    ]
)


def read_avro_schema(data: bytes, original: bytes) -> bool:
    """Read values by a schema from a registry."""
    source = avro.Schemas(((1, (data.decode(),)),))
    values = pa.array([avro.GOOD, avro.framed(b"\2\2a" * 90), avro.framed(b"\0" * 90)], pa.binary())
    columns = AVRO_ANY if original == avro_schemas()[1] else avro.COLUMNS
    parsed = AvroReader(columns, source).parse(values, "permissive", where)
    parsed.columns.validate(full=True)
    return True


# ---- Protobuf ----


@cache
def protobuf_values() -> list[bytes]:
    """Return Protobuf messages: an empty one, and one of all that there is."""
    sub = {"item": "b", "count": 1, "tags": []}
    row: dict[str, Any] = {
        **{f"a_{kind}": _scalar(kind) for kind in SCALARS},
        **{f"maybe_{kind}": _scalar(kind) for kind in SCALARS},
        **{f"many_{kind}": [_scalar(kind)] * 3 for kind in SCALARS},
        "color": "RED",
        "colors": ["BLUE", "DARK"],
        "line": {"item": "a", "count": 3, "tags": ["x"], "sub": sub},
        "lines": [{"item": "c", "count": None, "tags": ["y", "z"]}] * 2,
        "prices": {"a": 1.5},
        "stock": {7: {"item": "d", "count": 4, "tags": []}},
        "at": protobuf.EPOCH,
        "times": [protobuf.EPOCH],
        "boxed": "é",
        "paid": ("card", "visa"),
    }  # fmt: skip
    whole = protobuf.order_of(row).SerializeToString(deterministic=True)
    return [protobuf.HEADER + b"\0" + whole, protobuf.HEADER + b"\0"]


def _scalar(kind: str) -> Any:
    known = {"bool": True, "string": "é", "bytes": b"\xff", "double": 1.5, "float": -0.5}
    return known.get(kind, 7)


@cache
def protobuf_schemas() -> list[bytes]:
    """Return a schema as a registry gives it: descriptors as bytes."""
    return [protobuf.SHOP.SerializeToString()]


def read_protobuf_schema(data: bytes, original: bytes) -> bool:
    """Read values by a descriptor from a registry; and by a text that is no base64."""
    text = text_of(FileDescriptorProto.FromString(data)) if data == original else _text(data)
    reader = ProtobufReader(protobuf.ALL, protobuf.Schemas((text,)))
    values = pa.array([*protobuf_values(), protobuf.HEADER + b"\2\0"], pa.binary())
    parsed = reader.parse(values, "permissive", where)
    parsed.columns.validate(full=True)
    return True


def _text(data: bytes) -> str:
    if len(data) % 17 == 0:
        return data.decode("latin-1")
    return ":" + base64.b64encode(data).decode()


# ---- JSON Schema ----


@cache
def json_schemas() -> list[bytes]:
    """Return a schema of all that is read of one."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "name": {"oneOf": [{"type": "null"}, {"type": "string"}]},
            "at": {"type": ["string", "null"], "format": "date-time"},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
            "more": {"type": "object", "properties": {"x": {"type": "number"}}},
        },
        "required": ["id"],
        "additionalProperties": False,
        "$defs": {"line": {"type": "object", "properties": {"item": {"type": "boolean"}}}},
    }
    return [json.dumps(schema).encode()]


def read_json_schema(data: bytes, original: bytes) -> bool:
    """Make columns of a schema from a registry, and check that rows can be written as it says."""
    text = data.decode()
    json_schema.JsonSchemaWriter(1, text).check(pa.schema([("id", pa.int64())]))
    json_schema.columns_of(json_schema.parse_shape(text))
    return True


def _values(samples: Callable[[], list[bytes]], reader: ValueReader, **more: Any) -> Decoder:
    return Decoder(samples, partial(read_value, reader), **more)


DECODERS = {
    "text": _values(lambda: ["aé\u2028\U0001f600".encode() * 9, b""], TextReader()),
    "JSON, flat": _values(flat_texts, JsonReader(FLAT)),
    "JSON, nested": _values(nested_texts, JsonReader(NESTED)),
    "JSON, values": _values(nested_texts, JsonReader(NESTED), mutate=mutated_document),
    "JSON, framed": _values(framed_json, FramedJsonReader(JsonReader(NESTED))),
    "Avro": _values(avro_values, AvroReader(avro.COLUMNS, avro.SOURCE)),
    "Avro schema": Decoder(avro_schemas, read_avro_schema, mutated_document),
    "Protobuf": _values(protobuf_values, ProtobufReader(protobuf.ALL, protobuf.Schemas())),
    "Protobuf descriptor": Decoder(protobuf_schemas, read_protobuf_schema),
    "JSON Schema": Decoder(json_schemas, read_json_schema, mutated_document),
    "Avro union": _values(
        lambda: [unions.GOOD, unions.PAID],
        AvroReader(unions.COLUMNS, avro.schemas(_1=unions.UNION), has_name=True),
    ),
}
