"""Record batches as the stream of `COPY … FROM STDIN (FORMAT binary)`, column by column.

Arrow's types and PostgreSQL's: which goes into which, and the bytes of each value. Nothing is
rounded, cut or guessed: a value that the column cannot hold exactly is an error. What a pair of
types can never do is an `OptionError`, what one value cannot a `RecordError`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.errors import OptionError, RecordError
from tallystick.postgres import kernels

_EPOCH_DAYS = 10_957  # from 1970 to 2000, where PostgreSQL's time begins
_EPOCH_US = _EPOCH_DAYS * 86_400_000_000
TEXTS = {"text", "varchar", "bpchar", "json", "citext", "enum", "name"}
"""Not xml: a binary COPY takes a document's bytes for the encoding that it says it has."""
_VARCHAR_HEADER = 4
"""The bytes that atttypmod counts besides a varchar's characters."""
_WIDTHS = {"int2": pa.int16(), "int4": pa.int32(), "int8": pa.int64()}
_ABOUT_MAX = 160
_NONE = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column as the server has it.

    Args:
        name: without quotes.
        type_name: as a person reads it, such as `numeric(10,2)`.
        kind: the name of the type below all domains, such as `int4`; `enum` for every enumeration.
        modifier: the server's atttypmod; -1: none.
        not_null: whether it refuses nulls.
        has_default: whether rows may leave it out although it refuses nulls.
        generated: whether the server computes it.
        always: whether it is GENERATED ALWAYS AS IDENTITY: given at an INSERT, never changed.
        type_id: the server's number of its type, which may be a domain.
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
        """Its type as DDL, which takes the type's own collation where it names none."""
        return f"{self.type_name} COLLATE {self.collation}" if self.collation else self.type_name


class Fields(NamedTuple):
    """The values of a column as bytes.

    Args:
        data: all values, without gaps.
        width: of each; negative: value i is `data[offsets[i]:offsets[i + 1]]`.
        offsets: empty where there is a width.
        valid: 0 where a value is null; empty: none is.
        version: a byte before each value; negative: none.
    """

    data: NDArray[np.uint8]
    width: int
    offsets: NDArray[np.int64]
    valid: NDArray[np.uint8]
    version: int = -1

    @property
    def more(self) -> int:
        """How many bytes stand before each value."""
        return 1 if self.version >= 0 else 0


Encoder = Callable[[pa.Array], Fields]
_Kernel = Callable[[pa.Array], Fields]


@dataclass(frozen=True, slots=True)
class _Pair:
    """A column of rows and the table's column that it goes into."""

    source: pa.Field
    target: TableColumn
    table: str
    encode: _Kernel = field(repr=False)

    def __call__(self, array: pa.Array) -> Fields:
        try:
            fields = self.encode(array)
        except (pa.ArrowInvalid, ValueError, OverflowError) as error:
            raise self.error(str(error)) from None
        # Not of the array itself, whose nulls may be among the values of its dictionary.
        if self.target.not_null and not fields.valid.all():
            raise self.error("a value is null, and the column is NOT NULL")
        return fields

    def error(self, reason: str) -> RecordError:
        return RecordError(
            f"table {self.table}, column {self.target.name} ({self.target.type_name}), from values "
            f"of type {self.source.type}: {reason[:_ABOUT_MAX]}"
        )


def encoder_for(source: pa.Field, target: TableColumn, table: str) -> Encoder:
    """Return how values of an Arrow column are written into a table's column.

    Raises:
        OptionError: they cannot be.
    """
    encode = None if target.generated else _kernel_for(source.type, target)
    if encode is None:
        raise OptionError(
            f"table {table}, column {target.name}: values of type {source.type} cannot be written "
            f"into {'a generated column' if target.generated else target.type_name}{_hint(source)}"
        )
    return _Pair(source, target, table, encode)


def _hint(source: pa.Field) -> str:
    if pa.types.is_nested(source.type):
        return ": make it JSON text first (in Spark: to_json) and the column json or jsonb"
    if pa.types.is_timestamp(source.type):
        return (
            ": times with a zone go into timestamptz, times without one into timestamp; cast it "
            "to what is meant"
        )
    return ": cast it first, or change the column's type"


def _kernel_for(source: pa.DataType, target: TableColumn) -> _Kernel | None:
    is_, kind = pa.types, target.kind
    if is_.is_dictionary(source):
        inner = _kernel_for(source.value_type, target)
        return inner and (lambda array: inner(array.dictionary_decode()))
    if is_.is_null(source):
        return lambda array: Fields(_NONE, 0, _no_offsets(), np.zeros(len(array), np.uint8))
    if kind in TEXTS or kind == "jsonb":
        version = 1 if kind == "jsonb" else -1
        room = target.modifier - _VARCHAR_HEADER if kind == "varchar" else -1
        length = pc.binary_length if target.counts_bytes else pc.utf8_length
        return (lambda array: _text(array, version, room, length)) if _is_text(source) else None
    if kind == "bool" and is_.is_boolean(source):
        return lambda array: _fixed(array, array.cast(pa.uint8()), ">u1")
    if kind in _WIDTHS and is_.is_integer(source):
        wide = _WIDTHS[kind]
        return lambda array: _fixed(array, array.cast(wide), f">i{wide.bit_width // 8}")
    if kind in {"float4", "float8"}:
        return _float_kernel(source, kind)
    if kind == "numeric" and (is_.is_decimal(source) or is_.is_integer(source)):
        return lambda array: _numeric(array, target.modifier)
    if kind == "bytea" and _is_bytes(source):
        return lambda array: _ragged(array.cast(pa.large_binary()), -1)
    if kind == "uuid":
        return _uuid_kernel(source)
    return _time_kernel(source, target)


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


def _float_kernel(source: pa.DataType, kind: str) -> _Kernel | None:
    is_ = pa.types
    if kind == "float4":
        exact = is_.is_float16(source) or is_.is_float32(source)
        return (lambda array: _fixed(array, array.cast(pa.float32()), ">f4")) if exact else None
    if is_.is_floating(source) or is_.is_integer(source):  # Arrow refuses an integer that is cut
        return lambda array: _fixed(array, array.cast(pa.float64()), ">f8")
    return None


def _uuid_kernel(source: pa.DataType) -> _Kernel | None:
    if pa.types.is_fixed_size_binary(source) and source.byte_width == 16:
        return _uuid_bytes
    return _uuid_text if _is_text(source) else None


def _time_kernel(source: pa.DataType, target: TableColumn) -> _Kernel | None:
    is_, digits = pa.types, target.modifier
    match target.kind:
        case "date" if is_.is_date(source):
            return _date
        case "timestamp" if is_.is_timestamp(source) and source.tz is None:
            return lambda array: _timestamp(array, digits)
        case "timestamptz" if is_.is_timestamp(source) and source.tz is not None:
            return lambda array: _timestamp(array, digits)
        case "time" if is_.is_time(source):
            return lambda array: _time(array, digits)
        case "interval" if is_.is_duration(source) and digits < 0:
            return _interval
    return None


def _no_offsets() -> NDArray[np.int64]:
    return np.empty(0, np.int64)


def _valid(array: pa.Array) -> NDArray[np.uint8]:
    if not array.null_count:
        return _NONE
    valid: NDArray[np.uint8] = array.is_valid().to_numpy(zero_copy_only=False).view(np.uint8)
    return valid


def _values(array: pa.Array, dtype: str, words: int = 1) -> NDArray[Any]:
    """Return the buffer of values, those of nulls included, which are anything."""
    start, count = array.offset * words, len(array) * words
    return np.frombuffer(array.buffers()[1] or b"", dtype, start + count)[start:]


def _fixed(array: pa.Array, values: pa.Array, dtype: str) -> Fields:
    numbers = _values(values, dtype[1:])
    return _packed(array, numbers, dtype)


def _packed(array: pa.Array, numbers: NDArray[Any], dtype: str) -> Fields:
    data = np.ascontiguousarray(numbers.astype(dtype)).view(np.uint8)
    return Fields(data, np.dtype(dtype).itemsize, _no_offsets(), _valid(array))


def _text(
    array: pa.Array, version: int, room: int, length: Callable[[pa.Array], pa.Array]
) -> Fields:
    array = array.cast(pa.large_string()) if pa.types.is_string_view(array.type) else array
    # Blanks that are too many the server would cut off.
    if room >= 0 and pc.any(pc.greater(length(array), room)).as_py():
        raise ValueError(f"a text is too long for {room} characters, blanks among them")
    return _ragged(array, version)


def _ragged(array: pa.Array, version: int) -> Fields:
    if pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type):
        dtype = "i8"
    else:
        dtype = "i4"
    stop = array.offset + len(array) + 1
    offsets = np.frombuffer(array.buffers()[1], dtype, stop)[array.offset :].astype(np.int64)
    data = np.frombuffer(array.buffers()[2] or b"", np.uint8)
    return Fields(data, -1, offsets, _valid(array), version)


def _numeric(array: pa.Array, modifier: int) -> Fields:
    exact = array
    if pa.types.is_integer(array.type):
        exact = array.cast(pa.decimal128(20, 0))
    digits = 38
    scale = max(exact.type.scale, 0)
    if modifier >= 0:  # the column's scale, of 11 bits and a sign
        allowed = ((modifier - 4) & 0x7FF ^ 1024) - 1024
        if allowed < 0:  # the server would round to tens or hundreds: Arrow refuses to
            exact.cast(pa.decimal128(digits, allowed))
        scale = min(scale, max(allowed, 0))
    if exact.type != pa.decimal128(digits, scale):
        exact = exact.cast(pa.decimal128(digits, scale))
    words = _values(exact, "u8", words=2)
    out = np.empty(len(array) * kernels.NUMERIC_BYTES_MAX, np.uint8)
    offsets = np.zeros(len(array) + 1, np.int64)
    valid = _valid(exact)
    if len(valid):
        words = words * np.repeat(valid, 2)
    size = kernels.numerics(words, scale, out, offsets)
    return Fields(out[:size], -1, offsets, valid)


def _uuid_bytes(array: pa.Array) -> Fields:
    data = np.frombuffer(array.buffers()[1] or b"", np.uint8)
    start = array.offset * 16
    return Fields(data[start : start + len(array) * 16], 16, _no_offsets(), _valid(array))


def _uuid_text(array: pa.Array) -> Fields:
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
    data = (halves[0::2] << 4 | halves[1::2]).astype(np.uint8)
    return Fields(data, 16, _no_offsets(), _valid(array))


def _date(array: pa.Array) -> Fields:
    days = _values(array.cast(pa.date32()), "i4").astype(np.int64) - _EPOCH_DAYS
    _refuse(array, days <= np.iinfo(np.int32).min, "a date is out of range")
    return _packed(array, days, ">i4")


def _timestamp(array: pa.Array, digits: int) -> Fields:
    values = _values(array.cast(pa.timestamp("us", array.type.tz)), "i8")
    _refuse(array, values <= np.iinfo(np.int64).min + _EPOCH_US, "a time is out of range")
    _refuse_finer(array, values, digits)
    with np.errstate(over="ignore"):
        return _packed(array, values - _EPOCH_US, ">i8")


def _time(array: pa.Array, digits: int) -> Fields:
    values = _values(array.cast(pa.time64("us")), "i8")
    _refuse_finer(array, values, digits)
    return _packed(array, values, ">i8")


def _interval(array: pa.Array) -> Fields:
    fields = np.zeros(len(array), np.dtype([("us", ">i8"), ("days", ">i4"), ("months", ">i4")]))
    fields["us"] = _values(array.cast(pa.duration("us")), "i8")
    return Fields(fields.view(np.uint8), 16, _no_offsets(), _valid(array))


def _refuse_finer(array: pa.Array, values: NDArray[Any], digits: int) -> None:
    """Refuse times that the server would round to the column's digits."""
    if 0 <= digits < 6:
        unit = 10 ** (6 - digits)
        _refuse(array, values % unit != 0, f"a time has more than the column's {digits} digits")


def _refuse(array: pa.Array, wrong: NDArray[np.bool_], reason: str) -> None:
    valid = _valid(array)
    if np.any(wrong & valid.astype(bool) if len(valid) else wrong):
        raise ValueError(reason)


HEADER = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
TRAILER = b"\xff\xff"
CHUNK_ROWS = 8192
"""This many rows stay in the processor's cache while column after column is written."""


def encoders_for(
    schema: pa.Schema, columns: Sequence[TableColumn], table: str
) -> tuple[Encoder, ...]:
    """Return how each column of a schema is written into the table's column of the same place.

    Raises:
        OptionError: a column's type cannot be written into the table's; all such are named.
    """
    return tuple(
        encoder_for(field, each, table) for field, each in zip(schema, columns, strict=True)
    )


def chunks(rows: pa.RecordBatch, encoders: Sequence[Encoder]) -> Iterator[memoryview]:
    """Yield the tuples of a batch, between the stream's header and its trailer.

    Raises:
        RecordError: a value has no place in the table's column.
    """
    for start in range(0, rows.num_rows, CHUNK_ROWS):
        piece = rows.slice(start, CHUNK_ROWS)
        fields = [encode(column) for encode, column in zip(encoders, piece.columns, strict=True)]
        yield _tuples(fields, piece.num_rows).data


def _tuples(columns: Sequence[Fields], row_count: int) -> NDArray[np.uint8]:
    sizes = np.full(row_count, 2 + 4 * len(columns), np.int64)
    for column in columns:
        lengths = column.width if column.width >= 0 else np.diff(column.offsets) + column.more
        sizes += lengths * column.valid if len(column.valid) else lengths
    ends = np.cumsum(sizes)
    out = np.empty(ends[-1] if row_count else 0, np.uint8)
    at = ends - sizes
    kernels.put_counts(out, at, len(columns))
    for column in columns:
        if column.width >= 0:
            kernels.put_fixed(out, at, column.data, column.width, column.valid)
        else:
            kernels.put_ragged(out, at, column.data, column.offsets, column.valid, column.version)
    return out


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    decimal = pa.array([1, None]).cast(pa.decimal128(24, 1))
    rows = pa.record_batch({"n": pa.array([1, None]), "t": pa.array(["a", None]), "d": decimal})
    kinds = {"n": "int8", "t": "text", "d": "numeric"}
    columns = [TableColumn(name, kind, kind) for name, kind in kinds.items()]
    list(chunks(rows, encoders_for(rows.schema, columns, "")))
