"""Values in Confluent's wire format to typed columns, whole batches at a time.

A value is a zero byte, the id of its writer's schema (int32, big-endian), and a body. Records of
one id are decoded together; those of several ids are put back in order. Every record is read inside
its own bytes, so a malformed record cannot take a neighbour along.

A schema that cannot be read as the columns asked for is no malformed record but a mistake in
`value.schema`, or an incompatible change of the writer: it is an error in every mode.

Source: https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.codec import bytes_kernels as kernels
from tallystick.codec.formats import FAILFAST, MODES
from tallystick.codec.spans import Int64Array, Spans, spans_of
from tallystick.codec.values import ParsedValues, Where, by_mode, malformed_error, nulls
from tallystick.errors import RecordError

BATCH_BYTES_MAX = 1 << 30
"""The bytes that are decoded at once: Arrow's offsets have 31 bits."""

SchemaTexts = tuple[str, ...]
"""A schema as text, after the schemas of other subjects that it refers to by name."""


class SchemaError(RecordError):
    """A schema cannot be read, or not as the columns asked for."""


def json_value(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is no JSON; or it escapes half of a character, which UTF-8 cannot hold.
        RecursionError: the text is nested too deep.
    """
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


class SchemaSource(Protocol):
    """A registry of schemas; a plain value that connects to nothing before the first look-up."""

    def schema(self, schema_id: int) -> SchemaTexts | None:
        """Return the schema with an id; None: the registry has no such id.

        Raises:
            RetriableError: the schema cannot be looked up now.
        """
        ...


class DecodedBodies(NamedTuple):
    """Columns decoded from records of a single schema.

    Args:
        arrays: one per column asked for; a malformed record is a row of nulls.
        reasons: the reason of each malformed record, by its place among the bodies.
    """

    arrays: list[pa.Array]
    reasons: dict[int, str]


class BodyFormat(Protocol):
    """A format of bodies with schemas in a registry."""

    name: ClassVar[str]
    """The format's name in messages."""

    @property
    def schema(self) -> pa.Schema:
        """The columns asked for."""
        ...

    @property
    def schemas(self) -> SchemaSource:
        """The registry of the schema ids."""
        ...

    def decode(self, texts: SchemaTexts, schema_id: int, bodies: Int64Array) -> DecodedBodies:
        """Decode records of one schema.

        Args:
            texts: the schema.
            schema_id: its id, for messages.
            bodies: rows 0 and 1: the addresses where each body begins and ends; the caller keeps
                that memory alive.

        Raises:
            SchemaError: the schema cannot be read as the columns asked for.
        """
        ...


def parse_bodies(form: BodyFormat, values: pa.Array, mode: str, where: Where) -> ParsedValues:
    """Parse one value per record, see `ValueReader`.

    Raises:
        RecordError: a record is malformed, in mode failfast; the first one is named. Or, in every
            mode, a writer's schema cannot be read as the columns asked for.
        RetriableError: the registry cannot be asked now.
    """
    assert mode in MODES, mode
    spans = spans_of(values, "value")
    columns, reasons = [], dict[int, str]()
    expected = f"{form.name} in Confluent's wire format (byte 0, four bytes of schema id, body)"
    for first, last in spans.runs(BATCH_BYTES_MAX):
        batch = _Batch(form, spans, first, last, where)
        columns.append(batch.columns())
        batch_reasons = batch.reasons()
        if mode == FAILFAST and batch_reasons:
            row = next(iter(batch_reasons))
            raise malformed_error(values, row, expected, batch_reasons[row], where(row))
        reasons.update(batch_reasons)
    table = pa.concat_batches(columns) if columns else nulls(form.schema, 0)
    return by_mode(values, table, reasons, mode, expected, where)


class _Batch:
    """A run of records, decoded schema by schema."""

    def __init__(self, form: BodyFormat, spans: Spans, first: int, last: int, where: Where) -> None:
        self._form = form
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
        self._wrong: dict[int, str] = {}

    def columns(self) -> pa.RecordBatch:
        """Return all rows; the rows of tombstones and malformed records are null."""
        parts, order = [], []
        for schema_id, rows in self._groups():
            which = slice(None) if self._is_one_schema else rows
            bodies = np.empty((2, len(rows)), np.int64)
            np.add(self._starts[which], self._address, out=bodies[0])
            np.add(bodies[0], self._lengths[which], out=bodies[1])
            bodies[0] += kernels.ENVELOPE_SIZE
            decoded = self._decoded(schema_id, rows, bodies)
            if decoded is None:
                continue
            arrays = pa.RecordBatch.from_arrays(decoded.arrays, schema=self._form.schema)
            parts.append(arrays)
            order.append(rows)
            self._wrong |= {int(rows[index]): why for index, why in decoded.reasons.items()}
        return in_order(parts, order, self._form.schema, len(self._verdicts))

    def reasons(self) -> dict[int, str]:
        """Return the reason of each malformed row, in the order of rows; after `columns`."""
        without_id = (self._verdicts == kernels.TOO_SHORT) | (self._verdicts == kernels.WRONG_MAGIC)
        for index in np.flatnonzero(without_id).tolist():
            if self._verdicts[index] == kernels.TOO_SHORT:
                self._wrong[index] = (
                    f"it has {self._lengths[index]} bytes, and the zero byte and the schema id "
                    f"alone take {kernels.ENVELOPE_SIZE}"
                )
            else:
                first_byte = self._data[self._starts[index]]
                self._wrong[index] = (
                    f"it begins with byte {first_byte:#04x}, not with the zero byte of the wire "
                    f"format"
                )
        return {self._first + index: self._wrong[index] for index in sorted(self._wrong)}

    def _groups(self) -> Iterator[tuple[int, Int64Array]]:
        """Yield each schema id, and its rows in order."""
        if self._is_one_schema:
            yield int(self._ids[0]), np.arange(len(self._ids))
            return
        rows = np.flatnonzero(self._verdicts == kernels.GOOD)
        for schema_id, group in groups_of(self._ids[rows]):
            yield schema_id, rows[group]

    def _decoded(
        self, schema_id: int, rows: Int64Array, bodies: Int64Array
    ) -> DecodedBodies | None:
        # No registry gives a negative id: asking for one would be asking for trouble.
        texts = self._form.schemas.schema(schema_id) if schema_id >= 0 else None
        if texts is None:
            why = f"its schema id is {schema_id}, which is unknown where schemas are looked up"
            self._wrong |= dict.fromkeys(rows.tolist(), why)
            return None
        try:
            return self._form.decode(texts, schema_id, bodies)
        except SchemaError as error:
            raise SchemaError(
                f"{self._where(self._first + int(rows[0]))}: the value was written with the "
                f"{self._form.name} schema of id {schema_id}, which cannot be read as the columns "
                f"asked for: {error}"
            ) from error


def groups_of(numbers: NDArray[np.integer]) -> Iterator[tuple[int, Int64Array]]:
    """Yield every distinct number of an array, and the places of the number in order."""
    by_number = np.argsort(numbers, kind="stable")
    cuts = np.flatnonzero(np.diff(numbers[by_number])) + 1
    for group in np.split(by_number, cuts):
        if len(group):  # of no numbers, numpy makes one empty group
            yield int(numbers[group[0]]), group


def in_order(
    parts: Sequence[pa.RecordBatch], order: Sequence[Int64Array], schema: pa.Schema, count: int
) -> pa.RecordBatch:
    """Return rows that were decoded in parts, each in its place; a place without a row is null.

    Args:
        parts: the rows.
        order: the places of each part's rows.
        schema: the columns.
        count: how many places there are.
    """
    if not parts:
        return nulls(schema, count)
    if len(order) == 1 and len(order[0]) == count:
        return parts[0]
    places = np.zeros(count, np.int64)
    absent = np.ones(count, np.bool_)
    rows = np.concatenate(order)
    places[rows] = np.arange(len(rows))
    absent[rows] = False
    return pa.concat_batches(parts).take(pa.array(places, mask=absent))
