"""The storage format of vectorised state: several columns as one binary value per row.

A row is

    a bit per column, 1 where it is null, from the lowest bit of the first byte
    per column, little endian:  its value (0 where it is null), or the length of its bytes in 4
    the bytes of the columns with a length, end to end

A bool takes a byte, a decimal 16. A list of values of fixed width has as bytes, per element, 1 or
(null) 0 and the value; a list of strings has the length of each, -1 for null, and its bytes.
A row whose columns are all null is a null value: it takes no entry.
"""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.codec.spans import Int64Array, Spans, spans_of
from tallystick.errors import ManifestError, OptionError
from tallystick.state import row_kernels
from tallystick.state.keys import binary_of, check_size
from tallystick.state.numpy_columns import (
    checked_digits,
    column_of,
    is_fixed_width,
    numpy_type_of,
    valid_of,
    validity_of,
    values_of,
)
from tallystick.state.schema import text_of

_LENGTH = np.dtype("<u4")
_NULLS = "nulls"

BoolArray = NDArray[np.bool_]


class ColumnsCodec:
    """The storage format of rows of some columns as binary values.

    Args:
        schema: fixed-width columns, strings, binaries, and lists of those.
        name: of the columns, for errors.

    Raises:
        OptionError: there are no columns, or a type cannot be stored.
    """

    def __init__(self, schema: pa.Schema, name: str = "state") -> None:
        if not len(schema):
            raise OptionError(f"{name}: no columns; name at least one.")
        for field in schema:
            if not _is_storable(field.type):
                raise OptionError(
                    f"{name}, column {field.name!r} is {field.type}: expected numbers, bool, date, "
                    f"timestamp in microseconds, decimal, string, binary, or a list of those."
                )
        self.schema = pa.schema([pa.field(field.name, field.type) for field in schema])
        widths = [
            numpy_type_of(field.type) if is_fixed_width(field.type) else _LENGTH
            for field in self.schema
        ]
        nulls = (_NULLS, np.uint8, ((len(schema) + 7) // 8,))
        self._record = np.dtype([nulls, *((f"c{at}", width) for at, width in enumerate(widths))])

    @property
    def all_null(self) -> bytes:
        """The value of a row of nulls, where `encode` gives null but an entry must exist."""
        record = np.zeros(1, self._record)
        record[_NULLS] = 0xFF
        return record.tobytes()

    def encode(self, columns: pa.RecordBatch) -> pa.BinaryArray:
        """Return the value of each row; null where all columns are."""
        assert columns.schema.equals(self.schema), (columns.schema, self.schema)
        count = columns.num_rows
        records = np.zeros(count, self._record)
        nulls = np.zeros(count, np.int64)
        sizes = np.full(count, self._record.itemsize, np.int64)
        texts = []
        for at, column in enumerate(columns.columns):
            if column.null_count:
                null = ~valid_of(column)
                records[_NULLS][:, at // 8] |= null.astype(np.uint8) << np.uint8(at % 8)
                nulls += null
            if is_fixed_width(column.type):
                records[f"c{at}"] = values_of(column)
                continue
            spans = _payload(column)
            lengths = np.maximum(spans.lengths, 0)
            records[f"c{at}"] = lengths
            sizes += lengths
            texts.append(spans)
        present = nulls < len(self.schema)
        return _joined(records, sizes, texts, present)

    def decode(self, values: pa.BinaryArray) -> pa.RecordBatch:
        """Decode the columns of rows from the values of `encode`.

        Raises:
            ManifestError: the bytes are not of these columns.
        """
        spans = spans_of(values, "state")
        count, width = len(values), self._record.itemsize
        raw = np.empty(count * width, np.uint8)
        if row_kernels.read_records(spans.data, spans.starts, spans.lengths, width, raw) < 0:
            raise self._damaged()
        records = raw.view(self._record)
        if values.null_count:
            records[_NULLS][spans.lengths < 0] = 0xFF
        ends = spans.starts + np.maximum(spans.lengths, 0)
        cursors = np.where(spans.lengths < 0, spans.starts, spans.starts + width)
        try:
            columns = [
                self._read(at, field.type, records, spans, cursors, ends)
                for at, field in enumerate(self.schema)
            ]
        except pa.ArrowInvalid:  # a text that is not UTF-8, a decimal with too many digits
            raise self._damaged() from None
        if not (cursors == ends).all():
            raise self._damaged()
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _read(
        self,
        at: int,
        kind: pa.DataType,
        records: NDArray[Any],
        spans: Spans,
        cursors: Int64Array,
        ends: Int64Array,
    ) -> pa.Array:
        """Decode a column, and move the cursors past the column's bytes."""
        nulls = records[_NULLS][:, at // 8]
        valid = (nulls & np.uint8(1 << at % 8)) == 0 if nulls.any() else None
        if is_fixed_width(kind):
            values = np.ascontiguousarray(records[f"c{at}"])
            return checked_digits(column_of(values, valid, kind))
        lengths = records[f"c{at}"].astype(np.int64)
        out = np.empty(min(int(lengths.sum()), len(spans.data)), np.uint8)
        offsets = np.empty(len(records) + 1, np.int64)
        if row_kernels.read_texts(spans.data, cursors, ends, lengths, out, offsets) < 0:
            raise self._damaged()
        if pa.types.is_list(kind):
            column = _list_from(out, offsets, valid, kind.value_type)
            if column is None:
                raise self._damaged()
            return column
        return _text_from(out, offsets, valid, kind)

    def _damaged(self) -> ManifestError:
        return ManifestError(
            f"values in the state are not of the columns {text_of(self.schema)}: they were "
            f"written for others, or are damaged. Restore an older checkpoint or a savepoint."
        )


def changed_rows(before: pa.BinaryArray, after: pa.BinaryArray) -> BoolArray:
    """Return an array that is true where the two columns differ."""
    assert len(before) == len(after), (len(before), len(after))
    one, two = spans_of(before, "before"), spans_of(after, "after")
    out = np.empty(len(before), np.bool_)
    row_kernels.differs(one.data, one.starts, one.lengths, two.data, two.starts, two.lengths, out)
    return out


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    columns = pa.record_batch({"n": [1, None], "s": ["a", None], "t": [["a", None], None]})
    codec = ColumnsCodec(columns.schema)
    values = codec.encode(columns)
    codec.decode(values)
    changed_rows(values, values)


def _is_storable(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        kind = kind.value_type
    return bool(is_fixed_width(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind))


def _joined(
    records: NDArray[Any], sizes: Int64Array, texts: list[Spans], present: BoolArray
) -> pa.BinaryArray:
    """Return each present row's record, followed by its texts."""
    count, whole = len(records), bool(present.all())
    raw, width = records.view(np.uint8), records.dtype.itemsize
    if not whole:
        sizes = np.where(present, sizes, 0)
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    if whole and not texts:
        return binary_of(raw, offsets, None)
    check_size(count, int(offsets[-1]))
    out = np.empty(int(offsets[-1]), np.uint8)
    cursors = offsets[:-1].copy()
    status = row_kernels.write_records(raw, width, present, out, cursors)
    for spans in texts:
        status |= row_kernels.append_texts(
            spans.data, spans.starts, spans.lengths, present, out, cursors
        )
    assert status == 0, "sizes were wrong"
    return binary_of(out, offsets, present)


def _payload(column: pa.Array) -> Spans:
    """Return the bytes of each row of a column that has no fixed width."""
    if not pa.types.is_list(column.type):
        return spans_of(column, "state")
    count, offset = len(column), column.offset
    window = np.frombuffer(column.buffers()[1] or b"", np.int32)[offset : offset + count + 1]
    ends = window.astype(np.int64) if count else np.zeros(1, np.int64)
    elements = column.values
    if is_fixed_width(elements.type):
        pairs = np.empty(len(elements), _element(elements.type))
        pairs["present"], pairs["value"] = valid_of(elements), values_of(elements)
        data, places = pairs.view(np.uint8), ends * pairs.dtype.itemsize
    else:
        inner = spans_of(elements, "state")
        sizes = np.maximum(inner.lengths, 0) + row_kernels.LENGTH_SIZE
        data = np.empty(int(sizes.sum()), np.uint8)
        offsets = np.empty(len(elements) + 1, np.int64)
        written = row_kernels.write_elements(inner.data, inner.starts, inner.lengths, data, offsets)
        assert written == len(data), "sizes were wrong"
        places = offsets[ends]
    data.flags.writeable = False
    lengths = np.diff(places)
    if column.null_count:
        lengths[~valid_of(column)] = -1
    return Spans(data, places[:-1], lengths)


def _element(kind: pa.DataType) -> np.dtype[Any]:
    return np.dtype([("present", np.uint8), ("value", numpy_type_of(kind))])


def _text_from(
    data: NDArray[np.uint8], offsets: Int64Array, valid: BoolArray | None, kind: pa.DataType
) -> pa.Array:
    column = binary_of(data, offsets, valid)
    return column if pa.types.is_binary(kind) else column.cast(kind)


def _list_from(
    data: NDArray[np.uint8], offsets: Int64Array, valid: BoolArray | None, kind: pa.DataType
) -> pa.Array | None:
    """Decode a column of lists from the bytes of their elements; None for bytes of another form."""
    if is_fixed_width(kind):
        element = _element(kind)
        if (offsets % element.itemsize).any():
            return None
        pairs = data[: offsets[-1]].view(element)
        present = pairs["present"] != 0
        elements = column_of(np.ascontiguousarray(pairs["value"]), present, kind)
        checked_digits(elements)
        ends = offsets // element.itemsize
    else:
        counts = np.empty(len(offsets) - 1, np.int64)
        places, lengths = np.empty((2, len(data) // row_kernels.LENGTH_SIZE), np.int64)
        count = row_kernels.find_elements(data, offsets[:-1], offsets[1:], counts, places, lengths)
        if count < 0:
            return None
        elements = _elements_at(data, places[:count], lengths[:count], kind)
        ends = np.concatenate([[0], np.cumsum(counts)])
    present_buffer, null_count = validity_of(valid)
    buffers = [present_buffer, pa.py_buffer(ends.astype(np.int32))]
    return pa.Array.from_buffers(
        pa.list_(kind), len(ends) - 1, buffers, null_count, children=[elements]
    )


def _elements_at(
    data: NDArray[np.uint8], places: Int64Array, lengths: Int64Array, kind: pa.DataType
) -> pa.Array:
    sizes = np.maximum(lengths, 0)
    out, offsets = np.empty(int(sizes.sum()), np.uint8), np.empty(len(sizes) + 1, np.int64)
    written = row_kernels.read_texts(data, places, places + sizes, sizes, out, offsets)
    assert written == len(out), "elements are checked"
    return _text_from(out, offsets, lengths >= 0, kind)
