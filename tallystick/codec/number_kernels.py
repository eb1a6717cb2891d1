"""Doubles as text, exactly as Arrow's cast writes them, in a third of the time.

A double is written here only when it is surely the number of its text: with at most six digits
after the point, and fifteen in all. Any two decimals of fifteen digits are different doubles, so
no shorter text stands for it. All other doubles are left to Arrow.
"""

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.codec.spans import Spans, spans_of

_CHARS_MAX = 17
"""A sign, nine digits, a point, six digits."""
_WHOLE_MAX = 1e9
_FRACTION_DIGITS = 6
_SCALE = 10.0**_FRACTION_DIGITS
_UNSURE = -2
_TEN = np.uint64(10)


def double_texts(column: pa.Array, name: str) -> Spans:
    """Return the texts of finite doubles; null, NaN and the infinities have none.

    Args:
        column: of type float64.
        name: the column's name in errors.
    """
    column = pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
    values = column.fill_null(0.5).to_numpy()  # any double whose text is short
    out = np.empty(len(values) * _CHARS_MAX, np.uint8)
    starts, lengths = np.empty(len(values), np.int64), np.empty(len(values), np.int64)
    size = _write_doubles(values, out, starts, lengths)
    unsure = np.flatnonzero(lengths == _UNSURE)
    if 2 * len(unsure) > len(values):
        return spans_of(column.cast(pa.string()), name)
    if len(unsure):
        texts = spans_of(column.take(pa.array(unsure)).cast(pa.string()), name)
        starts[unsure], lengths[unsure] = texts.starts + size, texts.lengths
        out = np.concatenate((out[:size], texts.data))
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = -1
    out.flags.writeable = False
    return Spans(out, starts, lengths)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _write_doubles(values, out, starts, lengths):  # type: ignore[no-untyped-def]
    """Write the texts of doubles that are sure; return the bytes written."""
    position = 0
    for row in range(len(values)):
        value = values[row]
        size = abs(value)
        starts[row] = position
        lengths[row] = _UNSURE
        if not 0.0 < size < _WHOLE_MAX:
            continue
        number = np.uint64(np.int64(size * _SCALE + 0.5))
        if np.float64(np.int64(number)) / _SCALE != size:  # both exact: the decimal's double
            continue
        digits = _FRACTION_DIGITS
        while digits:
            rest = number // _TEN
            if rest * _TEN != number:
                break
            number = rest
            digits -= 1
        end = position + _CHARS_MAX  # written from the end, then moved to the front
        at = end
        for _ in range(digits):
            rest = number // _TEN
            at -= 1
            out[at] = np.uint8(48) + np.uint8(number - rest * _TEN)
            number = rest
        if digits:
            at -= 1
            out[at] = np.uint8(46)
        while True:
            rest = number // _TEN
            at -= 1
            out[at] = np.uint8(48) + np.uint8(number - rest * _TEN)
            number = rest
            if number == 0:
                break
        if value < 0:
            at -= 1
            out[at] = np.uint8(45)
        lengths[row] = end - at
        for index in range(end - at):
            out[position + index] = out[at + index]
        position += end - at
    return position
