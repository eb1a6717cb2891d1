"""Record batches as the stream of `COPY … FROM STDIN (FORMAT binary)`, column by column.

The module knows which Arrow type goes into which type of PostgreSQL. A column is cast to the one
Arrow type whose bytes are the table column's; pgpq writes them. Nothing is rounded, cut or guessed:
a value that the column cannot hold exactly is an error. A pair of types that never fit is an
`OptionError`, a single value that does not fit a `RecordError`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pgpq import ArrowToPostgresBinaryEncoder
from pgpq.encoders import LargeStringEncoderBuilder
from pgpq.schema import Jsonb

from tallystick.errors import OptionError, RecordError

_EPOCH_DAYS = 10_957  # from 1970 to 2000, where PostgreSQL's time begins
_EPOCH_US = _EPOCH_DAYS * 86_400_000_000
TEXTS = {"text", "varchar", "bpchar", "json", "citext", "enum", "name"}
"""Without xml: a binary COPY takes a document's bytes for the encoding that it says it has."""
_VARCHAR_HEADER = 4
"""The bytes that atttypmod counts besides a varchar's characters."""
_WIDTHS = {"int2": pa.int16(), "int4": pa.int32(), "int8": pa.int64()}
_ABOUT_MAX = 160
_NUMERIC_DIGITS = 38
_EMPTY = b"PGCOPY\n\xff\r\n\x00" + bytes(8) + b"\xff\xff"
"""A COPY without rows."""
CHUNK_ROWS = 8192
"""This many rows are cast and encoded at a time."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of the table, as the server describes it.

    Args:
        name: without quotes.
        type_name: as a person reads it, such as `numeric(10,2)`.
        kind: the name of the type below all domains, such as `int4`; `enum` for every enumeration.
        modifier: the server's atttypmod; -1: none.
        not_null: whether the column refuses nulls.
        has_default: whether rows may leave the column out although it refuses nulls.
        generated: whether the server computes the column.
        always: whether it is GENERATED ALWAYS AS IDENTITY: given at an INSERT, never changed.
        type_id: the server's number of the column's type, which may be a domain.
        type_modifier: the column's own; `modifier` may be that of its domain.
        collation: as SQL; empty: the type's own, or it has none.
        collation_id: the server's number of it.
        counts_bytes: whether a byte is a character to the database: it has SQL_ASCII.
    """

    name: str
    type_name: str
    kind: str
    modifier: int = -1
    not_null: bool = False
    has_default: bool = False
    generated: bool = False
    always: bool = False
    type_id: int = 0
    type_modifier: int = -1
    collation: str = ""
    collation_id: int = 0
    counts_bytes: bool = False

    @property
    def declared(self) -> str:
        """The column's type as DDL; without COLLATE it has the type's own collation."""
        return f"{self.type_name} COLLATE {self.collation}" if self.collation else self.type_name


_Cast = Callable[[pa.Array], pa.Array]
"""Returns the values in the type that is written; raises for those the column cannot hold."""


@dataclass(frozen=True, slots=True)
class ColumnEncoder:
    """An encoder from a column of rows to a column of the table.

    Args:
        source: the column of the rows.
        target: the column of the table.
        table: names the table in errors.
        cast: see `_Cast`.
    """

    source: pa.Field
    target: TableColumn
    table: str
    cast: _Cast = field(repr=False)

    def exact(self, array: pa.Array) -> pa.Array:
        """Return the values in the Arrow type that is written.

        Raises:
            RecordError: a value does not fit into the table's column.
        """
        try:
            values = self.cast(array)
        except (pa.ArrowInvalid, ValueError, OverflowError) as error:
            raise self._error(str(error)) from None
        # Not of the array itself, whose nulls may be among the values of its dictionary.
        if self.target.not_null and values.null_count:
            raise self._error("a value is null, and the column is NOT NULL")
        return values

    def builder(self, written: pa.Field) -> Any:
        """Return pgpq's encoder of the values that `exact` returns."""
        if self.target.kind == "jsonb" and pa.types.is_large_string(written.type):
            return LargeStringEncoderBuilder.new_with_output(written, Jsonb())
        return ArrowToPostgresBinaryEncoder.infer_encoder(written)

    def _error(self, reason: str) -> RecordError:
        return RecordError(
            f"table {self.table}, column {self.target.name} ({self.target.type_name}), from values "
            f"of type {self.source.type}: {reason[:_ABOUT_MAX]}"
        )


def encoders_for(
    schema: pa.Schema, columns: Sequence[TableColumn], table: str
) -> tuple[ColumnEncoder, ...]:
    """Return an encoder for each column of a schema, into the table's column of the same place.

    Raises:
        OptionError: a column's type cannot be written into the table's.
    """
    return tuple(
        _encoder_for(source, target, table) for source, target in zip(schema, columns, strict=True)
    )


def binary_copy(
    batches: Iterable[pa.RecordBatch], encoders: Sequence[ColumnEncoder]
) -> Iterator[bytes]:
    """Yield the whole stream of one COPY.

    Raises:
        RecordError: a value does not fit into the table's column.
    """
    stream = None
    for rows in batches:
        for start in range(0, rows.num_rows, CHUNK_ROWS):
            columns = rows.slice(start, CHUNK_ROWS).columns
            exact = [encoder.exact(array) for encoder, array in zip(encoders, columns, strict=True)]
            chunk = pa.RecordBatch.from_arrays(exact, [str(n) for n in range(len(exact))])
            if stream is None:
                builders = {
                    written.name: encoder.builder(written)
                    for encoder, written in zip(encoders, chunk.schema, strict=True)
                }
                stream = ArrowToPostgresBinaryEncoder.new_with_encoders(chunk.schema, builders)
                yield stream.write_header()
            yield stream.write_batch(chunk)
    if stream is not None:
        yield stream.finish()
    else:
        yield _EMPTY


def _encoder_for(source: pa.Field, target: TableColumn, table: str) -> ColumnEncoder:
    cast = None if target.generated else _cast_for(source.type, target)
    if cast is None:
        raise OptionError(
            f"table {table}, column {target.name}: values of type {source.type} cannot be written "
            f"into {'a generated column' if target.generated else target.type_name}{_hint(source)}"
        )
    return ColumnEncoder(source, target, table, cast)


def _hint(source: pa.Field) -> str:
    if pa.types.is_nested(source.type):
        return ": make it JSON text first (in Spark: to_json) and the column json or jsonb"
    if pa.types.is_timestamp(source.type):
        return (
            ": times with a zone go into timestamptz, times without one into timestamp; cast it "
            "to what is meant"
        )
    return ": cast it first, or change the column's type"


def _cast_for(source: pa.DataType, target: TableColumn) -> _Cast | None:
    is_, kind = pa.types, target.kind
    if is_.is_dictionary(source):
        inner = _cast_for(source.value_type, target)
        return inner and (lambda array: inner(array.dictionary_decode()))
    if is_.is_null(source):
        return lambda array: array.cast(pa.binary())
    if kind in TEXTS or kind == "jsonb":
        room = target.modifier - _VARCHAR_HEADER if kind == "varchar" else -1
        length = pc.binary_length if target.counts_bytes else pc.utf8_length
        return (lambda array: _text(array, room, length)) if _is_text(source) else None
    if kind == "bool" and is_.is_boolean(source):
        return lambda array: array
    if kind in _WIDTHS and is_.is_integer(source):
        return lambda array: array.cast(_WIDTHS[kind])
    if kind in {"float4", "float8"}:
        return _float_cast(source, kind)
    if kind == "numeric" and (is_.is_decimal(source) or is_.is_integer(source)):
        return lambda array: _numeric(array, target.modifier)
    if kind == "bytea" and _is_bytes(source):
        return lambda array: array.cast(pa.large_binary())
    if kind == "uuid":
        if is_.is_fixed_size_binary(source) and source.byte_width == 16:
            return lambda array: array
        return _uuid_text if _is_text(source) else None
    return _time_cast(source, target)


def _is_text(source: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_string(source) or is_.is_large_string(source) or is_.is_string_view(source))


def _is_bytes(source: pa.DataType) -> bool:
    is_ = pa.types
    return bool(
        is_.is_binary(source)
        or is_.is_large_binary(source)
        or is_.is_binary_view(source)
        or is_.is_fixed_size_binary(source)
    )


def _float_cast(source: pa.DataType, kind: str) -> _Cast | None:
    is_ = pa.types
    if kind == "float4":
        exact = is_.is_float16(source) or is_.is_float32(source)
        return (lambda array: array.cast(pa.float32())) if exact else None
    if is_.is_floating(source) or is_.is_integer(source):  # Arrow refuses an integer that is cut
        return lambda array: array.cast(pa.float64())
    return None


def _time_cast(source: pa.DataType, target: TableColumn) -> _Cast | None:
    is_, digits = pa.types, target.modifier
    match target.kind:
        case "date" if is_.is_date(source):
            return _date
        case "timestamp" if is_.is_timestamp(source) and source.tz is None:
            return lambda array: _timestamp(array, digits)
        case "timestamptz" if is_.is_timestamp(source) and source.tz is not None:
            return lambda array: _timestamp(array, digits)
        case "time" if is_.is_time(source):
            return lambda array: _refuse_finer(array.cast(pa.time64("us")), digits)
        case "interval" if is_.is_duration(source) and digits < 0:
            return lambda array: array.cast(pa.duration("us"))
    return None


def _text(array: pa.Array, room: int, length: _Cast) -> pa.Array:
    array = array.cast(pa.large_string())
    # Blanks that are too many the server would cut off.
    if room >= 0 and pc.any(pc.greater(length(array), room)).as_py():
        raise ValueError(f"a text is too long for {room} characters, blanks among them")
    return array


def _numeric(array: pa.Array, modifier: int) -> pa.Array:
    exact = array.cast(pa.decimal128(20, 0)) if pa.types.is_integer(array.type) else array
    scale = max(exact.type.scale, 0)
    if modifier >= 0:  # the column's scale, of 11 bits and a sign
        allowed = ((modifier - 4) & 0x7FF ^ 1024) - 1024
        if allowed < 0:  # the server would round to tens or hundreds: Arrow refuses to
            exact.cast(pa.decimal128(_NUMERIC_DIGITS, allowed))
        scale = min(scale, max(allowed, 0))
    return exact.cast(pa.decimal128(_NUMERIC_DIGITS, scale))


def _uuid_text(array: pa.Array) -> pa.Array:
    plain = array.cast(pa.large_string())
    wrong = pc.invert(pc.match_substring_regex(plain, "^[0-9a-fA-F-]{32,36}$"))
    digits = pc.replace_substring(plain, "-", "")
    wrong = pc.or_(wrong, pc.not_equal(pc.binary_length(digits), 32))
    if pc.any(wrong).as_py():
        raise ValueError("a value is not a UUID: expected 32 hexadecimal digits")
    text = pc.fill_null(digits, "0" * 32)
    # A sum of a byte's low digit and, for a letter, 9: '0' is 0x30, 'a' 0x61, 'A' 0x41.
    codes = np.frombuffer(text.buffers()[2], np.uint8)
    begin = np.frombuffer(text.buffers()[1], np.int64)[text.offset]
    codes = codes[begin : begin + 32 * len(array)]
    halves = (codes & 0xF) + 9 * (codes >> 6)
    data: NDArray[np.uint8] = (halves[0::2] << 4 | halves[1::2]).astype(np.uint8)
    uuids = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), len(array), [None, pa.py_buffer(data)]
    )
    return pc.if_else(array.is_valid(), uuids, pa.scalar(None, pa.binary(16)))


def _date(array: pa.Array) -> pa.Array:
    days = array.cast(pa.date32())
    first = np.iinfo(np.int32).min + _EPOCH_DAYS
    _refuse(pc.less_equal(days.cast(pa.int32()), first), "a date is out of range")
    return days


def _timestamp(array: pa.Array, digits: int) -> pa.Array:
    times = array.cast(pa.timestamp("us", array.type.tz))
    first = np.iinfo(np.int64).min + _EPOCH_US
    _refuse(pc.less_equal(times.cast(pa.int64()), first), "a time is out of range")
    return _refuse_finer(times, digits)


def _refuse_finer(times: pa.Array, digits: int) -> pa.Array:
    """Return the times; refuse times that the server would round to the column's digits."""
    if 0 <= digits < 6:
        unit = pa.scalar(10 ** (6 - digits), pa.int64())
        values = times.cast(pa.int64())
        finer = pc.not_equal(pc.multiply(pc.divide(values, unit), unit), values)
        _refuse(finer, f"a time has more than the column's {digits} digits")
    return times


def _refuse(wrong: pa.Array, reason: str) -> None:
    if pc.any(wrong).as_py():
        raise ValueError(reason)
