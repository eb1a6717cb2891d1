"""Maps of Avro at every depth, in blocks as any encoder may write them, judged by fastavro."""

import io
import random
import struct
from typing import Any

import fastavro
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.test_avro_reader import framed, parse, record, schemas
from tests.examples import drawn

LEAVES = {
    "int": pa.int32(),
    "long": pa.int64(),
    "string": pa.string(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "boolean": pa.bool_(),
}
ROWS = 6


def number(value: int) -> bytes:
    value = (value << 1 ^ value >> 63) & (2**64 - 1)
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def sized(data: bytes) -> bytes:
    return number(len(data)) + data


def kind_at_random(draw: random.Random, depth: int) -> tuple[Any, pa.DataType]:
    """Return a type of Avro's, and that of its column."""
    shape = draw.choice(["map", "map", "array", "record", "null", "leaf"] if depth else ["leaf"])
    if shape == "leaf":
        name = draw.choice(list(LEAVES))
        return name, LEAVES[name]
    if shape == "record":
        parts = [kind_at_random(draw, depth - 1) for _ in range(draw.randrange(1, 4))]
        columns = [(f"x{at}", column) for at, (_, column) in enumerate(parts)]
        draw.shuffle(columns)
        fields = ((f"x{at}", kind) for at, (kind, _) in enumerate(parts))
        kind = record(*fields, name=f"r{draw.getrandbits(60)}")
        return kind, pa.struct(columns[: draw.randrange(1, len(columns) + 1)])
    kind, column = kind_at_random(draw, depth - 1)
    if shape == "map":
        return {"type": "map", "values": kind}, pa.map_(pa.string(), column)
    if shape == "array":
        return {"type": "array", "items": kind}, pa.list_(column)
    return (
        kind if isinstance(kind, list) else draw.choice([["null", kind], [kind, "null"]])
    ), column


def encoded(draw: random.Random, kind: Any) -> bytes:
    if isinstance(kind, list):
        branch = draw.randrange(2)
        return number(branch) + (b"" if kind[branch] == "null" else encoded(draw, kind[branch]))
    if isinstance(kind, dict):
        if kind["type"] == "record":
            return b"".join(encoded(draw, field["type"]) for field in kind["fields"])
        return b"".join(block(draw, kind) for _ in range(draw.randrange(3))) + b"\0"
    if kind in ("int", "long"):
        bits = 31 if kind == "int" else 63
        return number(draw.choice([0, -1, 300, 2**bits - 1, -(2**bits)]))
    if kind == "double":
        return struct.pack("<d", draw.choice([0.0, -0.0, 1.5]))
    if kind == "boolean":
        return draw.choice([b"\0", b"\1"])
    return sized(draw.choice([b"", b"x", "ü€".encode() * 20]))


def block(draw: random.Random, kind: Any) -> bytes:
    """Return some items, of a map also with equal keys; half of the blocks tell their size."""
    count = draw.choice([1, 2, 5, 20])
    items = b""
    for _ in range(count):
        if kind["type"] == "map":
            items += sized(draw.choice(["", "a", "ü", f"key{draw.randrange(9)}"]).encode())
        items += encoded(draw, kind["values" if kind["type"] == "map" else "items"])
    return draw.choice([number(count) + items, number(-count) + sized(items)])


def plain(value: Any, kind: pa.DataType) -> Any:
    """Return a value with the fields of its column alone, and the pairs of maps in order."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        pairs = dict(value).items()
        return sorted((key, plain(item, kind.item_type)) for key, item in pairs)
    if pa.types.is_list(kind):
        return [plain(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: plain(value[field.name], field.type) for field in kind}
    return value


@drawn(60)
@given(seed=st.integers(0, 2**40))
def test_maps_are_what_fastavro_reads(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [kind_at_random(draw, draw.randrange(4)) for _ in range(draw.randrange(1, 4))]
    schema = record(*((f"f{at}", kind) for at, (kind, _) in enumerate(kinds)), ("z", "int"))
    columns = [(f"f{at}", column) for at, (_, column) in enumerate(kinds)]
    draw.shuffle(columns)
    wanted = pa.schema([*columns[: draw.randrange(1, len(columns) + 1)], ("z", pa.int32())])
    judge = fastavro.parse_schema(schema)
    bodies = [encoded(draw, schema) for _ in range(ROWS)]
    values: list[bytes | None] = [framed(body) for body in bodies]
    parsed = parse(values, wanted, schemas(_1=schema)).columns.to_pylist()
    kind = pa.struct(list(wanted))
    for body, row in zip(bodies, parsed, strict=True):
        whole = fastavro.schemaless_reader(io.BytesIO(body), judge)
        assert repr(plain(row, kind)) == repr(plain(whole, kind)), (seed, body.hex())
