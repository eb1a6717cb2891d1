"""Avro records in Confluent's wire format to typed columns, whole batches at a time.

A value is a zero byte, the id of its writer's schema (int32, big-endian), and the Avro binary body.
Records of one id are decoded together, by a program made for their schema (`plan`); records of
several ids are put back in order. Every record is read inside its own bytes, so a malformed one
cannot take a neighbour along.

A schema that cannot be read as the columns asked for is no malformed record but a mistake in
`value.schema`, or an incompatible change of the writer: it is an error in every mode.

Source: https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from tallystick.codec.avro import kernels
from tallystick.codec.avro.columns import Int64Array, decode
from tallystick.codec.avro.plan import Plan, make_plan
from tallystick.codec.avro.schema import SchemaError, SchemaSource, SchemaTexts, parse_schema
from tallystick.codec.formats import FAILFAST, MODES, PERMISSIVE
from tallystick.codec.spans import Spans, spans_of
from tallystick.codec.value_reader import ParsedValues, Where, check_names, malformed_error, nulls
from tallystick.errors import OptionError

BATCH_BYTES_MAX = 1 << 30
"""The bytes that are decoded at once: Arrow's offsets have 31 bits."""
PLANS_KEPT_MAX = 256
EXPECTED = "Avro in Confluent's wire format (byte 0, four bytes of schema id, body)"

_UNKNOWN_SCHEMA = 1 << 32
"""In the place of a problem's code: the record names an unknown schema id."""

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
        schema: the columns asked for, found by name in the writer's record; a field that it lacks
            is null.
        schemas: where a schema id is looked up.

    Raises:
        OptionError: no column, one named twice, a type that Avro has no form for, or NOT NULL.
    """

    schema: pa.Schema
    schemas: SchemaSource

    def __post_init__(self) -> None:
        _check_fields(list(self.schema), "the Avro schema")

    def parse(self, values: pa.Array, mode: str, where: Where) -> ParsedValues:
        """Parse one value per record, see `ValueReader`.

        Raises:
            RecordError: a record is malformed, in mode failfast; the first one is named. Or, in
                every mode, a writer's schema cannot be read as the columns asked for.
            RetriableError: the schemas cannot be asked now.
        """
        assert mode in MODES, mode
        spans = spans_of(values, "value")
        columns, reasons = [], {}
        for first, last in spans.runs(BATCH_BYTES_MAX):
            batch = _Batch(self, spans, first, last, where)
            columns.append(batch.columns())
            problems = batch.problems()
            if mode == FAILFAST and problems.size:
                row = int(problems[0])
                raise malformed_error(values, row, EXPECTED, batch.reason(row), where(row))
            reasons.update({int(row): batch.reason(row) for row in problems})
        table = pa.concat_batches(columns) if columns else nulls(self.schema, 0)
        if not reasons or mode == PERMISSIVE:
            return ParsedValues(table, None, reasons)
        kept = np.ones(len(values), np.bool_)
        kept[list(reasons)] = False
        return ParsedValues(table.filter(pa.array(kept)), np.flatnonzero(kept), reasons)


class _Batch:
    """A run of records, decoded schema by schema."""

    def __init__(
        self, reader: AvroReader, spans: Spans, first: int, last: int, where: Where
    ) -> None:
        self._reader = reader
        self._first = first
        self._where = where
        self._data = spans.data
        self._address = spans.address
        self._starts = spans.starts[first:last]
        self._lengths = spans.lengths[first:last]
        count = last - first
        self._ids = np.zeros(count, np.int32)
        self._verdicts = np.zeros(count, np.uint8)
        self._is_one_schema = kernels.read_envelopes(
            self._address, self._starts, self._lengths, self._ids, self._verdicts
        )
        self._codes = np.zeros(count, np.int64)
        self._details: dict[int, tuple[Plan, int, int]] = {}

    def columns(self) -> pa.RecordBatch:
        """Return all rows; those of tombstones and malformed records are null."""
        parts, order = [], []
        for schema_id, rows in self._groups():
            plan = self._plan(schema_id, int(rows[0]))
            if plan is None:
                self._codes[rows] = _UNKNOWN_SCHEMA
                continue
            which = slice(None) if self._is_one_schema else rows
            bodies = np.empty((2, len(rows)), np.int64)
            np.add(self._starts[which], self._address, out=bodies[0])
            np.add(bodies[0], self._lengths[which], out=bodies[1])
            bodies[0] += kernels.ENVELOPE_SIZE
            decoded = decode(plan, bodies)
            arrays = pa.RecordBatch.from_arrays(decoded.arrays, schema=self._reader.schema)
            parts.append(arrays)
            order.append(rows)
            self._codes[rows] = decoded.problems[0]
            for index in np.flatnonzero(decoded.problems[0]):
                _, pc, found = decoded.problems[:, index].tolist()
                self._details[int(rows[index])] = (plan, pc, found)
        return self._in_order(parts, order)

    def problems(self) -> Int64Array:
        """Return the malformed rows."""
        without_id = (self._verdicts == kernels.TOO_SHORT) | (self._verdicts == kernels.WRONG_MAGIC)
        return np.flatnonzero(without_id | (self._codes != 0)) + self._first

    def reason(self, row: int) -> str:
        """Return the reason why a row is malformed."""
        index = int(row) - self._first
        verdict, code, schema_id = self._verdicts[index], self._codes[index], self._ids[index]
        if verdict == kernels.TOO_SHORT:
            return (
                f"it has {self._lengths[index]} bytes, and the zero byte and the schema id alone "
                f"take {kernels.ENVELOPE_SIZE}"
            )
        if verdict == kernels.WRONG_MAGIC:
            found = self._data[self._starts[index]]
            return f"it begins with byte {found:#04x}, not with the zero byte of the wire format"
        if code == _UNKNOWN_SCHEMA:
            return f"its schema id is {schema_id}, which is unknown where schemas are looked up"
        plan, pc, found = self._details[index]
        return _body_reason(int(code), int(schema_id), plan, pc, found)

    def _groups(self) -> Iterator[tuple[int, Int64Array]]:
        """Yield each schema id, and its rows in order."""
        if self._is_one_schema:
            yield int(self._ids[0]), np.arange(len(self._ids))
            return
        rows = np.flatnonzero(self._verdicts == kernels.GOOD)
        ids = self._ids[rows]
        if not len(rows):
            return
        by_id = np.argsort(ids, kind="stable")
        cuts = np.flatnonzero(np.diff(ids[by_id])) + 1
        for group in np.split(by_id, cuts):
            yield int(ids[group[0]]), rows[group]

    def _plan(self, schema_id: int, index: int) -> Plan | None:
        # No registry gives a negative id: asking for one would be asking for trouble.
        texts = self._reader.schemas.schema(schema_id) if schema_id >= 0 else None
        if texts is None:
            return None
        try:
            return _plan(texts, self._reader.schema)
        except SchemaError as error:
            raise SchemaError(
                f"{self._where(self._first + index)}: the value was written with the Avro schema "
                f"of id {schema_id}, which cannot be read as the columns asked for: {error}"
            ) from error

    def _in_order(
        self, parts: Sequence[pa.RecordBatch], order: Sequence[Int64Array]
    ) -> pa.RecordBatch:
        count = len(self._verdicts)
        if not parts:
            return nulls(self._reader.schema, count)
        if len(order) == 1 and len(order[0]) == count:
            return parts[0]
        places = np.zeros(count, np.int64)
        absent = np.ones(count, np.bool_)
        rows = np.concatenate(order)
        places[rows] = np.arange(len(rows))
        absent[rows] = False
        return pa.concat_batches(parts).take(pa.array(places, mask=absent))


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


_BODY_REASONS: dict[int, Callable[[int], str]] = {
    kernels.TRUNCATED: lambda _: "the value ends inside of it",
    kernels.VARINT_TOO_LONG: lambda _: "a number goes on beyond 64 bits",
    kernels.INT_RANGE: lambda found: f"{found} is no 32-bit int",
    kernels.NOT_BOOLEAN: lambda found: f"byte {found} is no boolean, which is 0 or 1",
    kernels.NEGATIVE_LENGTH: lambda found: f"a length is {found}",
    kernels.NOT_UTF8: lambda _: "the string is not valid UTF-8",
    kernels.ENUM_RANGE: lambda found: f"the enum has no symbol of index {found}",
    kernels.UNION_RANGE: lambda found: f"the union has no branch of index {found}",
    kernels.MILLIS_RANGE: lambda found: f"{found} ms is beyond a timestamp in microseconds",
    kernels.DECIMAL_RANGE: lambda _: "the number has more digits than the decimal type",
    kernels.DECIMAL_EMPTY: lambda _: "a decimal of no bytes is no number",
    kernels.TOO_MANY_ITEMS: lambda found: (
        f"a block says it has {found} items, more than bytes are left"
    ),
    kernels.TOO_DEEP: lambda _: (
        f"records are nested in themselves more than {kernels.FRAMES_MAX} deep"
    ),
}


def _body_reason(code: int, schema_id: int, plan: Plan, pc: int, found: int) -> str:
    if code == kernels.LEFT_OVER:
        return f"{found} bytes are left over after the last field of schema {schema_id}"
    what = _BODY_REASONS[code](found)
    return f"field {plan.paths[pc]!r} of schema {schema_id}: {what}"


def _check_fields(fields: Sequence[pa.Field], path: str) -> None:
    check_names(fields, path, "Avro")
    for each in fields:
        _check_field(each, f"field {each.name!r} of {path}")


def _check_field(each: pa.Field, path: str) -> None:
    if not each.nullable:
        raise OptionError(
            f"{path} is NOT NULL, but a writer's schema may lack it, and a tombstone is a row of "
            f"nulls: declare it nullable and filter"
        )
    _check_type(each.type, path)


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
