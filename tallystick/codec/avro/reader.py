"""Avro bodies to typed columns, by a program made for their writer's schema (`plan`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tallystick.codec.avro import kernels
from tallystick.codec.avro.columns import Int64Array, decode
from tallystick.codec.avro.kernels import may_repeat
from tallystick.codec.avro.plan import Plan, make_plan
from tallystick.codec.avro.schema import parse_schema
from tallystick.codec.spans import spans_of
from tallystick.codec.values import ParsedValues, Where, check_names
from tallystick.codec.wire_format import DecodedBodies, SchemaSource, SchemaTexts, parse_bodies
from tallystick.errors import OptionError

PLANS_KEPT_MAX = 256

_SCALAR_TYPES = (
    pa.types.is_boolean,
    pa.types.is_int32,
    pa.types.is_int64,
    pa.types.is_float32,
    pa.types.is_float64,
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_date32,
    pa.types.is_decimal128,
)


@dataclass(frozen=True, slots=True)
class AvroReader:
    """A `ValueReader` for Avro; a plain value, pickled to tasks.

    Args:
        schema: the columns asked for, found by name in the writer's record; a column without a
            field there is null.
        schemas: the registry of the schema ids.

    Raises:
        OptionError: no column, one named twice, a type that Avro has no form for, or NOT NULL.
    """

    schema: pa.Schema
    schemas: SchemaSource

    def __post_init__(self) -> None:
        _check_fields(list(self.schema), "the Avro schema")

    name: ClassVar[str] = "Avro"

    def parse(self, values: pa.Array, mode: str, where: Where) -> ParsedValues:
        """See `ValueReader.parse` and `wire_format.parse_bodies`."""
        return parse_bodies(self, values, mode, where)

    def decode(self, texts: SchemaTexts, schema_id: int, bodies: Int64Array) -> DecodedBodies:
        """See `wire_format.BodyFormat.decode`."""
        plan = _plan(texts, self.schema)
        decoded = decode(plan, bodies)
        reasons = {}
        for index in np.flatnonzero(decoded.problems[0]).tolist():
            code, pc, value = decoded.problems[:, index].tolist()
            reasons[index] = _body_reason(code, schema_id, plan, pc, value)
        return DecodedBodies(decoded.arrays, reasons)


@lru_cache(maxsize=PLANS_KEPT_MAX)
def _plan(texts: SchemaTexts, schema: pa.Schema) -> Plan:
    return make_plan(parse_schema(texts), schema)


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    text = '{"type":"record","name":"r","fields":[{"name":"s","type":"string"}]}'
    plan = _plan((text,), pa.schema([("s", pa.string())]))
    spans = spans_of(pa.array([b"\x00\x00\x00\x00\x01\x02a"], pa.binary()), "value")
    ids, verdicts = np.zeros(1, np.int32), np.zeros(1, np.uint8)
    kernels.read_envelopes(spans.address, spans.starts, spans.lengths, ids, verdicts)
    body = spans.address + kernels.ENVELOPE_SIZE
    decode(plan, np.array([[body], [body + 2]], np.int64))
    none = np.zeros(0, np.int64)
    may_repeat(none, none, none)


_BODY_REASONS: dict[int, Callable[[int], str]] = {
    kernels.TRUNCATED: lambda _: "the value ends inside of it",
    kernels.VARINT_TOO_LONG: lambda _: "a number goes on beyond 64 bits",
    kernels.INT_RANGE: lambda value: f"{value} is no 32-bit int",
    kernels.NOT_BOOLEAN: lambda value: f"byte {value} is no boolean, which is 0 or 1",
    kernels.NEGATIVE_LENGTH: lambda value: f"a length is {value}",
    kernels.NOT_UTF8: lambda _: "the string is not valid UTF-8",
    kernels.ENUM_RANGE: lambda value: f"the enum has no symbol of index {value}",
    kernels.UNION_RANGE: lambda value: f"the union has no branch of index {value}",
    kernels.MILLIS_RANGE: lambda value: f"{value} ms is beyond a timestamp in microseconds",
    kernels.DECIMAL_RANGE: lambda _: "the number has more digits than the decimal type",
    kernels.DECIMAL_EMPTY: lambda _: "a decimal of no bytes is no number",
    kernels.TOO_MANY_ITEMS: lambda value: (
        f"a block says it has {value} items, more than bytes are left"
    ),
    kernels.TOO_DEEP: lambda _: (
        f"records are nested in themselves more than {kernels.FRAMES_MAX} deep"
    ),
}


def _body_reason(code: int, schema_id: int, plan: Plan, pc: int, value: int) -> str:
    if code == kernels.LEFT_OVER:
        return f"{value} bytes are left over after the last field of schema {schema_id}"
    what = _BODY_REASONS[code](value)
    return f"field {plan.paths[pc]!r} of schema {schema_id}: {what}"


def _check_fields(fields: Sequence[pa.Field], path: str) -> None:
    check_names(fields, path, "Avro")
    for field in fields:
        _check_field(field, f"field {field.name!r} of {path}")


def _check_field(field: pa.Field, path: str) -> None:
    if not field.nullable:
        raise OptionError(
            f"{path} is NOT NULL, but a writer's schema may lack it, and a tombstone is a row of "
            f"nulls: declare it nullable and filter"
        )
    _check_type(field.type, path)


def _check_type(kind: pa.DataType, path: str) -> None:
    if pa.types.is_struct(kind):
        _check_fields(list(kind), path)
    elif pa.types.is_list(kind):
        _check_field(kind.value_field, f"the element of {path}")
    elif pa.types.is_map(kind):
        if not pa.types.is_string(kind.key_type):
            raise OptionError(f"the key of {path} is {kind.key_type}: Avro's maps have string keys")
        _check_field(kind.item_field, f"the value of {path}")
    elif not (
        (pa.types.is_timestamp(kind) and kind.unit == "us")
        or any(is_type(kind) for is_type in _SCALAR_TYPES)
    ):
        raise OptionError(
            f"{path} has type {kind}, which Avro has no form for: use boolean, int, bigint, float, "
            f"double, decimal, string, binary, date, timestamp, timestamp_ntz, struct, array or "
            f"map<string, ...>"
        )
