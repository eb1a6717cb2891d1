"""Keys of one step: hash codes, frozen for all types, and bytes that sort like the values.

A key's hash code decides its key group for the life of its state, so the hash function never
changes; another would be another `HASH_VERSION`. It is Java's where Java has one.

| column | hash code | source |
| --- | --- | --- |
| null | 0 | |
| string | `31 * h + unit` from 0 over UTF-16 units | `String.hashCode` |
| binary | `31 * h + byte` from 1 over signed bytes | `Arrays.hashCode` |
| int8, int16, int32 | the number | `Integer.hashCode` |
| int64 | its two halves, xor | `Long.hashCode` |
| bool | 1231 or 1237 | `Boolean.hashCode` |
| float, double | IEEE 754 bits; a double's as int64. One NaN; -0.0 is 0.0, as in Spark's keys | \
`Double.hashCode` |
| date | days since 1970, as int32 | `LocalDate` has another one |
| timestamp | microseconds since 1970, as int64 | |
| decimal | `31 * unscaled + scale`, the column's scale | `BigDecimal.hashCode` |
| several columns | `31 * h + next`, from the first one's | Flink's `Tuple2.hashCode` |

The order of the bytes is the order of the values: Spark's, nulls first. A key is its columns'
values one after the other. A value is `00` for null, or `01` and then

| column | bytes |
| --- | --- |
| string, binary | the bytes, `00` as `00 FF`; `00 00` at the end |
| int8 … int64, date, timestamp (microseconds) | 8, the highest first, the sign flipped |
| float, double | 8 of the double: those of a negative one flipped, else the sign. One NaN, after \
all; -0.0 is 0.0 |
| decimal | the unscaled value with its sign flipped: 8 up to 18 digits, else 16 |
| bool | 1 |

Each value says where it ends, so no key is a prefix of another one.
"""

from functools import cached_property
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.codec.spans import spans_of
from tallystick.errors import ManifestError, OptionError
from tallystick.state import key_kernels
from tallystick.state.numpy_columns import (
    checked_digits,
    column_of,
    is_fixed_width,
    numpy_type_of,
    valid_of,
    validity_of,
    values_of,
)
from tallystick.state.schema import schema_from_text, text_of

HASH_VERSION = 1

Int32Array = NDArray[np.int32]
UInt32Array = NDArray[np.uint32]

_TRUE, _FALSE = 1231, 1237
_FACTOR = np.uint32(31)
_LOW = np.uint64(0xFFFFFFFF)


def hash_codes(columns: list[pa.Array]) -> Int32Array:
    """Return the hash code of each row's key.

    Args:
        columns: the key's, of one length, in the order of `key_by`; types that `KeyCodec` takes.
    """
    code = _codes_of(columns[0])
    for column in columns[1:]:
        code = _FACTOR * code + _codes_of(column)
    return code.view(np.int32)


def _codes_of(column: pa.Array) -> UInt32Array:
    """Return the hash codes of one column, as Java's bits."""
    kind = column.type
    is_type = pa.types
    if is_type.is_string(kind) or is_type.is_large_string(kind):
        return _codes_of_spans(column, key_kernels.hash_texts)
    if is_type.is_binary(kind) or is_type.is_large_binary(kind):
        return _codes_of_spans(column, key_kernels.hash_bytes)
    codes = _codes_of_values(values_of(column), kind)
    return np.where(valid_of(column), codes, np.uint32(0)) if column.null_count else codes


def _codes_of_spans(column: pa.Array, kernel: Any) -> UInt32Array:
    spans = spans_of(column, "key")
    codes = np.empty(len(column), np.int32)
    kernel(spans.data, spans.starts, spans.lengths, codes)
    return codes.view(np.uint32)


def _codes_of_values(values: NDArray[Any], kind: pa.DataType) -> UInt32Array:
    if pa.types.is_boolean(kind):
        return np.where(values != 0, np.uint32(_TRUE), np.uint32(_FALSE))
    if pa.types.is_decimal128(kind):
        return _FACTOR * _of_unscaled(values) + np.uint32(kind.scale & 0xFFFFFFFF)
    if values.dtype.kind == "f":
        values = one_of_each(values).view(f"i{values.itemsize}")
    if values.itemsize == 8:
        bits = values.view(np.uint64)
        return ((bits ^ (bits >> np.uint64(32))) & _LOW).astype(np.uint32)
    return values.astype(np.int32).view(np.uint32)


def one_of_each(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return floats with a single NaN and a single zero, so that equal keys have equal bits."""
    nan, zero = numbers.dtype.type("nan"), numbers.dtype.type(0)
    same: NDArray[Any] = np.where(np.isnan(numbers), nan, numbers + zero)
    return same


def _of_unscaled(values: NDArray[Any]) -> UInt32Array:
    """Return Java's BigInteger.hashCode: over the words of the magnitude, with the sign."""
    low, high = values["low"], values["high"].view(np.uint64)
    negative = values["high"] < 0
    low, high = (
        np.where(negative, ~low + np.uint64(1), low),
        np.where(negative, ~high + (low == 0).astype(np.uint64), high),
    )
    code = np.zeros(len(values), np.uint32)
    for word in (high >> np.uint64(32), high & _LOW, low >> np.uint64(32), low & _LOW):
        code = _FACTOR * code + word.astype(np.uint32)
    return np.where(negative, np.uint32(0) - code, code)


_SIGN = np.uint64(1 << 63)
_SHORT_DECIMAL_DIGITS = 18
_BYTES_MAX = (1 << 31) - 1

UInt64Array = NDArray[np.uint64]


class KeyCodec:
    """Keys of one step: their hash codes, and their bytes.

    Args:
        schema: the key's columns, in the order of `key_by`.

    Raises:
        OptionError: there are none, or a type cannot be a key.
    """

    def __init__(self, schema: pa.Schema) -> None:
        if not len(schema):
            raise OptionError("key_by names no column: name at least one.")
        for field in schema:
            if not (is_fixed_width(field.type) or _is_text(field.type)):
                raise OptionError(
                    f"key_by column {field.name!r} is {field.type}: a key may be a string, binary, "
                    f"bool, int8 to int64, float, double, date, timestamp in microseconds or "
                    f"decimal. Cast it; of a struct, take its fields as columns."
                )
        self.schema = pa.schema([pa.field(field.name, field.type) for field in schema])

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Make the codec of a `schema_text`."""
        return cls(schema_from_text(text))

    @property
    def names(self) -> list[str]:
        """The names of the key's columns."""
        return list(self.schema.names)

    @cached_property
    def schema_text(self) -> str:
        """Names and types as JSON: the same for the same key in every release."""
        return text_of(self.schema)

    def columns(self, rows: pa.RecordBatch) -> list[pa.Array]:
        """Return the key's columns of rows that may have others too.

        Raises:
            OptionError: a column is missing, or of another type.
        """
        return [_column(rows, field) for field in self.schema]

    def hash_codes(self, rows: pa.RecordBatch) -> NDArray[np.int32]:
        """Return the hash code of each row's key."""
        return hash_codes(self.columns(rows))

    def encode(self, rows: pa.RecordBatch) -> pa.BinaryArray:
        """Return the bytes of each row's key; none is null.

        Raises:
            OptionError: the keys of one batch take 2 GiB.
        """
        columns = self.columns(rows)
        sizes = np.zeros(rows.num_rows, np.int64)
        writers = [_writer(column, sizes) for column in columns]
        offsets = np.zeros(rows.num_rows + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        check_size(rows.num_rows, int(offsets[-1]))
        out = np.empty(int(offsets[-1]), np.uint8)
        cursors = offsets[:-1].copy()
        for kernel, *arguments in writers:
            status = kernel(*arguments, out, cursors)
            assert status == 0, "sizes were wrong"
        return binary_of(out, offsets, None)

    def decode(self, keys: pa.BinaryArray) -> pa.RecordBatch:
        """Decode the columns of keys from the bytes of `encode`.

        Raises:
            ManifestError: the bytes are not keys of these columns.
        """
        rows, sizes = self.decode_start(keys)
        if not (sizes == spans_of(keys, "key").lengths).all():
            raise self._not_such_keys()
        return rows

    def decode_start(self, data: pa.BinaryArray) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """Decode the keys at the start of values; return their columns, and the size of each key.

        Raises:
            ManifestError: the bytes do not begin with keys of these columns.
        """
        spans = spans_of(data, "key")
        cursors, ends = spans.starts.copy(), spans.starts + spans.lengths
        try:
            columns = [_read(field.type, spans.data, cursors, ends) for field in self.schema]
        except pa.ArrowInvalid:  # a text that is not UTF-8, a decimal with too many digits
            raise self._not_such_keys() from None
        if any(column is None for column in columns):
            raise self._not_such_keys()
        rows = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        return rows, cursors - spans.starts

    def _not_such_keys(self) -> ManifestError:
        return ManifestError(
            f"keys in the state are not of the columns {self.schema_text}: it was written for "
            f"another key, or is damaged. Restore an older checkpoint or a savepoint."
        )


def entry_keys(
    groups: NDArray[np.int32], state_id: int, key_bytes: pa.BinaryArray
) -> pa.BinaryArray:
    """Return the keys of state entries: `key group | state id | key`.

    Args:
        groups: of each key.
        state_id: `StateField.state_id`, or that of an index.
        key_bytes: of `KeyCodec.encode`, with or without more bytes after the key.
    """
    assert len(groups) == len(key_bytes), (len(groups), len(key_bytes))
    assert 0 <= state_id <= 0xFF, state_id
    spans = spans_of(key_bytes, "key")
    size = int(spans.lengths.sum()) + key_kernels.HEADER_SIZE * len(groups)
    check_size(len(groups), size)
    out, offsets = np.empty(size, np.uint8), np.empty(len(groups) + 1, np.int64)
    written = key_kernels.write_entries(
        groups, state_id, spans.data, spans.starts, spans.lengths, out, offsets
    )
    assert written == size, "a key is null"
    return binary_of(out, offsets, None)


def bodies(entries: pa.BinaryArray) -> pa.BinaryArray:
    """Cut the key group and the state's id off entries; the key and anything after it stay."""
    return tails(entries, key_kernels.HEADER_SIZE)


def tails(column: pa.BinaryArray, at: int) -> pa.BinaryArray:
    """Return each value without its first `at` bytes; no value is shorter or null.

    Not Arrow's `binary_slice`: the size of its output overflows for some lengths and row counts
    (26.0).
    """
    spans = spans_of(column, "key")
    size = int(spans.lengths.sum()) - at * len(column)
    assert size >= 0, "a value is too short"
    out, offsets = np.empty(size, np.uint8), np.empty(len(column) + 1, np.int64)
    written = key_kernels.copy_behind(spans.data, spans.starts, spans.lengths, at, out, offsets)
    assert written == size, "a value is too short"
    return binary_of(out, offsets, None)


def check_size(count: int, size: int) -> None:
    """Refuse more bytes than an Arrow column holds.

    Raises:
        OptionError: the bytes take 2 GiB or more.
    """
    if size > _BYTES_MAX:
        raise OptionError(
            f"the keys or the state of {count} rows take {size} bytes in one task, more than the "
            f"2 GiB of one column: raise the step's parallelism or read fewer records per epoch."
        )


def binary_of(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], valid: NDArray[np.bool_] | None
) -> pa.BinaryArray:
    """Wrap bytes as a binary column, without copying them."""
    check_size(len(offsets) - 1, int(offsets[-1]))
    present, null_count = validity_of(valid)
    buffers = [present, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers, null_count)


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    rows = pa.record_batch({"n": [1, None], "s": ["a", None], "b": [b"a", None]})
    rows = rows.append_column("d", pa.nulls(2, pa.decimal128(38)))
    codec = KeyCodec(rows.schema)
    codec.hash_codes(rows)
    spans = spans_of(rows["s"], "key")
    key_kernels.hash_long(spans.data, spans.starts, spans.lengths, np.empty(2, np.uint64))
    codec.decode(codec.encode(rows))
    bodies(entry_keys(np.zeros(2, np.int32), 1, codec.encode(rows)))


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    )


def _column(rows: pa.RecordBatch, field: pa.Field) -> pa.Array:
    at = rows.schema.get_field_index(field.name)
    if at < 0:
        raise OptionError(
            f"the rows have no column {field.name!r}, which key_by names: they have "
            f"{', '.join(rows.schema.names)}."
        )
    column = rows.column(at)
    if column.type != field.type:
        raise OptionError(
            f"key_by column {field.name!r} is {column.type}, but was {field.type} when the "
            f"pipeline was planned: cast it in the function before."
        )
    return column


def _writer(column: pa.Array, sizes: NDArray[np.int64]) -> tuple[Any, ...]:
    """Add a column's bytes to `sizes`; return the kernel that writes the column, and arguments."""
    if _is_text(column.type):
        spans = spans_of(column, "key")
        status = key_kernels.add_text_sizes(spans.data, spans.starts, spans.lengths, sizes)
        assert status == 0, "spans are checked"
        return key_kernels.write_texts, spans.data, spans.starts, spans.lengths
    valid, values = valid_of(column), values_of(column)
    parts = _words_of(values, column.type)
    width = _width_of(column.type)
    key_kernels.add_fixed_sizes(valid, width * len(parts), sizes)
    if len(parts) == 1:
        return key_kernels.write_words, parts[0], valid, width
    return key_kernels.write_pairs, *parts, valid


def _width_of(kind: pa.DataType) -> int:
    return 1 if pa.types.is_boolean(kind) else 8


def _is_long_decimal(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal128(kind) and kind.precision > _SHORT_DECIMAL_DIGITS)


def _words_of(values: NDArray[Any], kind: pa.DataType) -> list[UInt64Array]:
    """Return the values as words that are in order as unsigned numbers; two for a long decimal."""
    if pa.types.is_boolean(kind):
        return [values.astype(np.uint64)]
    if _is_long_decimal(kind):
        return [values["high"].astype(np.uint64) ^ _SIGN, values["low"].copy()]
    if pa.types.is_decimal128(kind):
        return [values["low"] ^ _SIGN]
    if values.dtype.kind == "f":
        bits = one_of_each(values.astype(np.float64)).view(np.uint64)
        return [np.where(bits & _SIGN, ~bits, bits | _SIGN)]
    return [values.astype(np.int64).view(np.uint64) ^ _SIGN]


def _values_from(parts: list[UInt64Array], kind: pa.DataType) -> NDArray[Any]:
    """Return the values of words: the inverse of `_words_of`."""
    words = parts[0]
    if pa.types.is_boolean(kind):
        return np.minimum(words, 1).astype(np.uint8)
    if pa.types.is_decimal128(kind):
        values = np.empty(len(words), numpy_type_of(kind))
        first = (words ^ _SIGN).view(np.int64)
        values["high"] = first if len(parts) == 2 else first >> 63
        values["low"] = parts[1] if len(parts) == 2 else first.view(np.uint64)
        return values
    if pa.types.is_floating(kind):
        bits = np.where(words & _SIGN, words ^ _SIGN, ~words)
        return bits.view(np.float64).astype(numpy_type_of(kind))
    return (words ^ _SIGN).view(np.int64).astype(numpy_type_of(kind))


def _read(
    kind: pa.DataType, data: NDArray[np.uint8], cursors: NDArray[np.int64], ends: NDArray[np.int64]
) -> pa.Array | None:
    """Decode a column and move the cursors; None, or ArrowInvalid, for bytes of other values."""
    count = len(cursors)
    valid = np.empty(count, np.bool_)
    if _is_text(kind):
        out = np.empty(int((ends - cursors).sum()), np.uint8)
        offsets = np.empty(count + 1, np.int64)
        written = key_kernels.read_texts(data, cursors, ends, out, offsets, valid)
        return None if written < 0 else binary_of(out[:written], offsets, valid).cast(kind)
    words = np.empty(count, np.uint64)
    if _is_long_decimal(kind):
        low = np.empty(count, np.uint64)
        if key_kernels.read_pairs(data, cursors, ends, words, low, valid) < 0:
            return None
        return checked_digits(column_of(_values_from([words, low], kind), valid, kind))
    if key_kernels.read_words(data, cursors, ends, _width_of(kind), words, valid) < 0:
        return None
    values = _values_from([words], kind)
    if ((_words_of(values, kind)[0] != words) & valid).any():
        return None  # a narrow type has fewer values than a word, and each is written in one way
    return checked_digits(column_of(values, valid, kind))
