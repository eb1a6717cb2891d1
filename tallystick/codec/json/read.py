r"""JSON records to typed columns, whole blocks at a time, exact for every single record.

Where all fields are scalars, a kernel reads every record that is surely well-formed (see
`flat_kernels`). Arrow's parser reads all other records and schemas, and it alone refuses
records: acceptance does not depend on the reader. Until the kernel is compiled on this machine,
Arrow's parser reads all.

Arrow takes a text of many documents and, if one is malformed, refuses the whole text. So:

- Every record becomes one line. Lines that cannot be an object are sorted out before parsing: not
  from `{` to `}`, a control character (NUL would end the text), not UTF-8.
- The others begin with `{` and end with `}`. In a text that parses, a `}` before a line break
  before a `{` can only end a document (inside a string the line break is an error), so no document
  spans two lines and every line holds at least one. As many documents as lines: one each.
- A block that fails is halved until the malformed records stand alone. A record is called malformed
  only after it failed alone, so it never takes a good neighbour along.

Accepted beyond RFC 8259: NaN and ±Infinity for float and double, as in Spark. A float or double
that is too large is infinite. Undeclared fields need only be JSON, see `token_kernels`.
Malformed: a declared field twice in an object (Spark takes the last); 1.0 or "1" for an integer (as
in Spark); a number for a string (Spark takes its text); an integer beyond its type; a decimal that
would need rounding; in a string that is a column, a `\ud800` without its partner; a byte order
mark. A timestamp is text as in `flat_kernels`, in UTC unless it names an offset; a date is
YYYY-MM-DD. docs/json-beside-from-json.md compares all of this with Spark.

JSON in Confluent's wire format (`FramedJsonReader`) is a zero byte, a schema's id (int32), and the
text. The text names its fields itself, so the id is not looked up: columns are found by name, as in
JSON without a frame.

Source: https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.json

from tallystick.codec import bytes_kernels as kernels
from tallystick.codec.formats import FAILFAST, MODES, PERMISSIVE
from tallystick.codec.json.flat import FlatColumns, flat_of, is_kernel_ready, pruned
from tallystick.codec.json.flat_kernels import read_times
from tallystick.codec.json.kernels import (
    CONTROL_CHARACTER,
    EMPTY,
    GOOD,
    NOT_AN_OBJECT,
    NOT_UTF8,
    RECORD_OVERHEAD,
    has_odd_word,
    join_records,
)
from tallystick.codec.json.reasons import misfit, no_object
from tallystick.codec.json.token_kernels import NO_NUMBER, SUSPECT, UNSURE
from tallystick.codec.spans import Spans, spans_of, text_array, validity
from tallystick.codec.values import (
    DECIMAL_DIGITS_MAX,
    ParsedValues,
    Where,
    by_mode,
    check_names,
    malformed_error,
    nulls,
)
from tallystick.errors import OptionError

BLOCK_BYTES_MAX = 64 << 20
"""Parsed at once, in bytes; Arrow's own limit is 2 GiB, and a smaller block costs nothing."""
BLOCK_ROWS_MAX = 1 << 16
"""Bounds the rows that are parsed again where a record is malformed."""

EXPECTED = "a JSON object of the schema asked for"

_NO_NUMBER_REASON = "it holds Inf or -NaN, which are no numbers: only NaN and ±Infinity are read"
_REASONS = {
    EMPTY: "it is empty",
    NOT_AN_OBJECT: "it is not one JSON object, from { to }",
    CONTROL_CHARACTER: "it holds a raw control character",
    NOT_UTF8: "it is not valid UTF-8",
}
_SCALAR_TYPES = (
    pa.types.is_boolean,
    pa.types.is_signed_integer,
    pa.types.is_float32,
    pa.types.is_float64,
    pa.types.is_string,
    pa.types.is_date32,
    pa.types.is_decimal128,
)


@dataclass(frozen=True)
class JsonReader:
    """Values that are JSON objects; a `ValueReader`.

    Raises:
        OptionError: the schema has no field, a field twice, a type that JSON has no form for, or a
            field that is NOT NULL.
    """

    schema: pa.Schema

    def __post_init__(self) -> None:
        check_schema(self.schema)

    def parse(self, values: pa.Array, mode: str, where: Where) -> ParsedValues:
        """See `ValueReader.parse`."""
        return parse_json(values, self.schema, mode, where)


def check_schema(schema: pa.Schema) -> None:
    """Check that records can be read with a schema.

    Raises:
        OptionError: no field, a field named twice, a type that JSON has no form for, or NOT NULL.
    """
    _check_fields(list(schema), "the JSON schema")


def parse_json(values: pa.Array, schema: pa.Schema, mode: str, where: Where) -> ParsedValues:
    """Parse one JSON object per record.

    Args:
        values: binary; a null (tombstone) is a row of nulls in every mode.
        schema: passed by `check_schema`. Other fields of a record are ignored.
        mode: one of `formats.MODES`; see `ValueReader.parse`.
        where: names the topic, partition and offset of an input row.

    Raises:
        RecordError: a record is malformed, in mode failfast; the first one is named.
    """
    assert mode in MODES, mode
    spans = spans_of(values, "value")
    reasons: dict[int, str] = {}
    batches = []
    for first, last in spans.runs(BLOCK_BYTES_MAX, BLOCK_ROWS_MAX, RECORD_OVERHEAD):
        run = Spans(spans.data, spans.starts[first:last], spans.lengths[first:last])
        batch, wrong = _read(run, schema, first_only=mode == FAILFAST)
        if wrong and mode == FAILFAST:
            row = min(wrong)
            at = where(first + row)
            reason = _in_words(values[first + row], schema, wrong[row])
            raise malformed_error(values, first + row, EXPECTED, reason, at)
        reasons.update(
            (first + row, _in_words(values[first + row], schema, wrong[row]))
            for row in sorted(wrong)
        )
        batches.append(batch)
    columns = _concatenated(batches) if batches else nulls(schema, 0)
    return by_mode(values, columns, reasons, mode, EXPECTED, where)


def warm_up() -> None:
    """Compile the kernel before Arrow's parser, or load it from the cache; see `flat` too."""
    schema = pa.schema([("a", pa.string())])
    _Block(spans_of(pa.array([b"{}"], pa.binary()), "value"), schema).judge(1, first_only=False)
    _times(pa.array(["2024-01-02T03:04:05Z"]), pa.timestamp("us"))


class _Block:
    """Some records as the lines of a text; Arrow can parse any run of the lines."""

    def __init__(self, spans: Spans, schema: pa.Schema) -> None:
        self.row_count = len(spans.lengths)
        self.schema = schema
        self._verdicts = np.zeros(self.row_count, np.uint8)
        self._line_starts = np.zeros(self.row_count + 1, np.int64)
        size = int(np.maximum(spans.lengths, 0).sum()) + RECORD_OVERHEAD * self.row_count
        text = np.empty(size, np.uint8)
        written = join_records(
            spans.data, spans.starts, spans.lengths, text, self._line_starts, self._verdicts
        )
        assert written >= 0, "a span leaves its data"
        self._text = text[:written]
        self._is_pruned = False
        self._no_numbers: list[int] = []
        self._has_odd_word = bool(has_odd_word(self._text))
        read_fields = [field.with_type(_read_type(field.type)) for field in schema]
        self._parse_options = pyarrow.json.ParseOptions(
            explicit_schema=pa.schema(read_fields), unexpected_field_behavior="ignore"
        )

    def parse(self, begin: int, end: int) -> pa.RecordBatch:
        """Return the rows `begin <= row < end`; ArrowInvalid unless all are well-formed."""
        start, stop = self._line_starts[begin], self._line_starts[end]
        # A block_size beyond the text keeps it whole: Arrow would convert each block on its own.
        options = pyarrow.json.ReadOptions(use_threads=False, block_size=int(stop - start) + 1)
        lines = pa.BufferReader(pa.py_buffer(self._text[start:stop]))
        # The same as read_json, but a malformed record alone costs a fifth of the time.
        table = pyarrow.json.open_json(lines, options, self._parse_options).read_all()
        if table.num_rows != end - begin:
            raise pa.ArrowInvalid("it holds more than one JSON document")
        arrays = [
            _converted(column.combine_chunks(), field.type)
            for column, field in zip(table.columns, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def judge(self, together: int, *, first_only: bool) -> "_Judged":
        """Return the batches of well-formed records, and the reason of each malformed record.

        Args:
            together: how many of the first rows are tried together; the batches have all of these
                rows, nulls where one is malformed. The others are tried alone, once, which is
                cheaper where nearly all are malformed; the batches have the well-formed ones.
            first_only: in both groups, try nothing after a malformed record.
        """
        batches = list[tuple[int, pa.RecordBatch]]()
        if together < self.row_count or self._has_odd_word:
            self._prune()
        hopeless = np.flatnonzero(self._verdicts != GOOD).tolist()
        wrong = {row: _REASONS[int(self._verdicts[row])] for row in hopeless}
        wrong |= dict.fromkeys(self._no_numbers, _NO_NUMBER_REASON)
        if together:
            for row, outcome in self.outcomes(0, together):
                if isinstance(outcome, str):
                    wrong[row] = outcome
                    if first_only:
                        break
                    outcome = nulls(self.schema, 1)
                batches.append((row, outcome))
        for row in range(together, self.row_count):
            if row not in wrong:
                try:
                    batches.append((row, self.parse(row, row + 1)))
                    continue
                except pa.ArrowInvalid as problem:
                    wrong[row] = _reason(problem)
            if first_only:
                break
        return batches, wrong

    def _prune(self) -> None:
        """Remove undeclared fields from all records: Arrow may refuse a record for such a field."""
        self._is_pruned = True
        self._text, self._line_starts, verdicts = pruned(self._text, self._line_starts, self.schema)
        self._no_numbers = np.flatnonzero(verdicts == NO_NUMBER).tolist()

    def outcomes(self, begin: int, end: int, *, suspect: bool = False) -> Iterator["_Outcome"]:
        """Yield the outcomes of a run of rows, in order: well-formed rows, or a reason.

        k malformed records among n cost about 2 k log2(n) parses.

        Args:
            begin: the first row.
            end: the row after the last; there is at least one.
            suspect: the run holds a malformed record as far as is known, so parsing it whole is
                not worth a try. A single row is always tried: only its own failure condemns it.
        """
        alone = end - begin == 1
        if alone or not suspect:
            try:
                yield begin, self.parse(begin, end)
                return
            except pa.ArrowInvalid as problem:
                if not self._is_pruned:
                    self._prune()
                    yield from self.outcomes(begin, end)
                    return
                if alone:
                    yield begin, _reason(problem)
                    return
        middle = (begin + end) // 2
        has_malformed = False
        for row, outcome in self.outcomes(begin, middle):
            has_malformed = has_malformed or isinstance(outcome, str)
            yield row, outcome
        yield from self.outcomes(middle, end, suspect=not has_malformed)


_Outcome = tuple[int, pa.RecordBatch | str]
"""A row of a block, and the well-formed rows from there on or the reason why it is malformed."""
_Judged = tuple[list[tuple[int, pa.RecordBatch]], dict[int, str]]
"""Batches of a block with their first rows, and the reasons of the malformed rows."""


def _read(
    spans: Spans, schema: pa.Schema, *, first_only: bool
) -> tuple[pa.RecordBatch, dict[int, str]]:
    """Return all rows, nulls where a record is malformed, and the reason of each malformed row.

    Args:
        spans: the records.
        schema: the columns to read.
        first_only: if a record is malformed, the batch is of no use, and reasons of later records
            may be missing.
    """
    flat = flat_of(schema) if is_kernel_ready() else None
    columns = FlatColumns(schema, flat, spans) if flat else None
    if columns is None or columns.is_unsure:
        batches, wrong = _Block(spans, schema).judge(len(spans.lengths), first_only=first_only)
        whole = _concatenated([batch for _, batch in batches]) if batches else nulls(schema, 0)
        return whole, wrong
    unsure, suspects = columns.rows_of(UNSURE), columns.rows_of(SUSPECT)
    rows = np.concatenate([unsure, suspects])
    if not rows.size:
        return columns.batch(), {}
    block = _Block(Spans(spans.data, spans.starts[rows], spans.lengths[rows]), schema)
    batches, wrong = block.judge(unsure.size, first_only=first_only)
    if batches:
        places = [rows[first : first + batch.num_rows] for first, batch in batches]
        columns.put(np.concatenate(places), _concatenated([batch for _, batch in batches]))
    return columns.batch(), {int(rows[row]): reason for row, reason in wrong.items()}


def _concatenated(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)  # which always copies


def _in_words(value: pa.Scalar, schema: pa.Schema, refusal: str) -> str:
    """Return the reason why a record is malformed: the field's, or as it was refused."""
    if refusal == _REASONS[NOT_AN_OBJECT]:
        kind = no_object(value.as_py())
        return f"{refusal}: {kind}" if kind else refusal
    is_known = refusal in _REASONS.values() or refusal == _NO_NUMBER_REASON
    return refusal if is_known else misfit(value.as_py(), schema, refusal) or refusal


def _reason(problem: pa.ArrowInvalid) -> str:
    """Return the reason why a record that was parsed alone is malformed."""
    return re.sub(r" in row \d+$", "", str(problem).partition("\n")[0])


def _read_type(kind: pa.DataType) -> pa.DataType:
    """Return the type to ask Arrow's parser for: text for dates and times.

    The parser takes only numbers for dates, and of times at most six digits of fraction. A decimal
    that it has read is multiplied by 10 to the power of the scale, without a look at whether the
    result has more bits: 24 digits for a `decimal(38, 18)` gave another number.
    """
    if pa.types.is_date32(kind) or pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_decimal128(kind):
        return pa.decimal256(min(DECIMAL_DIGITS_MAX, DECIMAL_DIGITS_MAX - kind.scale), kind.scale)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_read_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_read_type(kind.value_type))
    return kind


def _converted(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the array as the type asked for; ArrowInvalid where a value does not fit."""
    if pa.types.is_date32(kind):
        return array.cast(kind)
    if pa.types.is_timestamp(kind):
        return _times(array, kind)
    if pa.types.is_decimal128(kind):
        return array.cast(kind)  # the parser lets more digits through than the type has
    if pa.types.is_struct(kind):
        children = [_converted(array.field(index), field.type) for index, field in enumerate(kind)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())
    if pa.types.is_list(kind):
        items = _converted(array.values, kind.value_type)
        return pa.ListArray.from_arrays(array.offsets, items, type=kind, mask=array.is_null())
    return array


def _times(array: pa.Array, kind: pa.DataType) -> pa.Array:
    spans = spans_of(array, "value")
    micros = np.zeros(len(array), np.int64)
    wrong = read_times(spans.address, spans.starts, spans.lengths, micros.ctypes.data)
    if wrong >= 0:
        text = array[wrong].as_py()
        raise pa.ArrowInvalid(f"Failed to convert JSON to {kind}, couldn't parse:{text}")
    valid = (spans.lengths >= 0).astype(np.uint8)
    return pa.Array.from_buffers(kind, len(array), [validity(valid), pa.py_buffer(micros)])


def _check_fields(fields: Sequence[pa.Field], path: str) -> None:
    check_names(fields, path, "JSON")
    for field in fields:
        _check_field(field, f"field {field.name!r} of {path}")


def _check_field(field: pa.Field, path: str) -> None:
    kind = field.type
    if not field.nullable:
        raise OptionError(
            f"{path} is NOT NULL, but a record may lack it, and a tombstone is a row of nulls: "
            f"declare it nullable and filter"
        )
    if pa.types.is_struct(kind):
        _check_fields(list(kind), path)
    elif pa.types.is_list(kind):
        _check_field(kind.value_field, f"the element of {path}")
    elif not _is_scalar(kind):
        raise OptionError(
            f"{path} has type {kind}, which cannot be read from JSON: use boolean, tinyint to "
            f"bigint, float, double, decimal, string, date, timestamp, struct or array; read "
            f"binary as string (base64), and a map as a struct of the keys that you need"
        )


def _is_scalar(kind: pa.DataType) -> bool:
    if pa.types.is_timestamp(kind):
        return bool(kind.unit == "us")
    return any(is_type(kind) for is_type in _SCALAR_TYPES)


# ---- Confluent's wire format ---------------------------------------------------------------------

BATCH_BYTES_MAX = 1 << 30
"""The bytes that are unwrapped at once: Arrow's offsets have 31 bits."""
FRAMED_EXPECTED = (
    "JSON in Confluent's wire format (byte 0, four bytes of schema id, an object of the schema)"
)


@dataclass(frozen=True, slots=True)
class FramedJsonReader:
    """A `ValueReader` of JSON in Confluent's wire format.

    Args:
        json: the reader of the text.
    """

    json: JsonReader

    @property
    def schema(self) -> pa.Schema:
        """See `ValueReader.schema`."""
        return self.json.schema

    def parse(self, values: pa.Array, mode: str, where: Where) -> ParsedValues:
        """See `ValueReader.parse`."""
        spans = spans_of(values, "value")
        batches: list[pa.RecordBatch] = []
        reasons: dict[int, str] = {}
        for first, last in spans.runs(BATCH_BYTES_MAX):
            texts, wrong = _unwrapped(spans, first, last)
            parsed = self.json.parse(texts, PERMISSIVE, where)
            batches.append(parsed.columns)
            reasons |= {
                first + row: why for row, why in sorted({**parsed.reasons, **wrong}.items())
            }
        columns = pa.concat_batches(batches) if batches else nulls(self.schema, 0)
        return by_mode(values, columns, reasons, mode, FRAMED_EXPECTED, where)


def _unwrapped(spans: Spans, first: int, last: int) -> tuple[pa.Array, dict[int, str]]:
    """Return the JSON texts of a run of rows, null if missing, and the malformed rows' reasons."""
    starts, lengths = spans.starts[first:last], spans.lengths[first:last]
    ids, verdicts = np.zeros(last - first, np.int32), np.zeros(last - first, np.uint8)
    kernels.read_envelopes(spans.address, starts, lengths, ids, verdicts)
    good = verdicts == kernels.GOOD
    sizes = np.where(good, lengths - kernels.ENVELOPE_SIZE, 0)
    at = np.where(good, starts + spans.address + kernels.ENVELOPE_SIZE, 0)
    texts = text_array(pa.binary(), at, sizes, good.astype(np.uint8))
    reasons = {}
    for row in np.flatnonzero(~good & (verdicts != kernels.TOMBSTONE)).tolist():
        if verdicts[row] == kernels.TOO_SHORT:
            reasons[row] = (
                f"it has {lengths[row]} bytes, and the zero byte and the schema id alone take "
                f"{kernels.ENVELOPE_SIZE}"
            )
        else:
            first_byte = spans.data[starts[row]]
            reasons[row] = (
                f"it begins with byte {first_byte:#04x}, not with the zero byte of the format"
            )
    return texts, reasons
