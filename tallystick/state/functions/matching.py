"""Pairs of rows by key and time, with arrays: rows of one side in ranges of the other side.

Rows are numbers into arrays that are sorted by the number of the key, then by time.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def ranges(
    codes: Int64Array,
    firsts: Int64Array,
    lasts: Int64Array,
    of_codes: Int64Array,
    of_times: Int64Array,
) -> tuple[Int64Array, Int64Array]:
    """Return which rows have a key and a time within bounds: from a start to before a stop.

    Args:
        codes: a key for each range.
        firsts: the least time of each, included.
        lasts: the greatest, included; none is before its first.
        of_codes: the key of each row.
        of_times: its time; rows are sorted by code, then time.
    """
    moments = np.unique(of_times)
    # One number for key and time, from 0: the rank of a moment instead of itself cannot overflow.
    width = len(moments) + 1
    places = of_codes * width + np.searchsorted(moments, of_times)
    starts = codes * width + np.searchsorted(moments, firsts, "left")
    stops = codes * width + np.searchsorted(moments, lasts, "right")
    return np.searchsorted(places, starts), np.searchsorted(places, stops)


def pairs(
    starts: Int64Array, stops: Int64Array, count_max: int
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield each range's number with each row in it, at most so many pairs at a time.

    Args:
        starts: of the ranges, as `ranges` returns them.
        stops: their ends.
        count_max: bounds the memory: a skewed key has many pairs.
    """
    counts = stops - starts
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    offsets = starts - (ends - counts)
    for first in range(0, total, count_max):
        numbers = np.arange(first, min(first + count_max, total))
        whose = np.searchsorted(ends, numbers, "right")
        yield whose, numbers + offsets[whose]


def covered(starts: Int64Array, stops: Int64Array, count: int) -> BoolArray:
    """Return which of `count` rows lie in a range."""
    opened = np.bincount(starts, minlength=count + 1)
    closed = np.bincount(stops, minlength=count + 1)
    inside: BoolArray = np.cumsum(opened - closed)[:count] > 0
    return inside


def order_of(codes: Int64Array, times: Int64Array) -> Int64Array:
    """Return the order of rows by code, then time; ties stay in their order."""
    order: Int64Array = np.lexsort((times, codes))
    return order


def least(values: Int64Array, codes: Int64Array, count: int, otherwise: int) -> Int64Array:
    """Return the least value of each code; `otherwise` for a code without values."""
    by_code = np.full(count, otherwise, np.int64)
    np.minimum.at(by_code, codes, values)
    return by_code


def greatest(values: Int64Array, codes: Int64Array, count: int, otherwise: int) -> Int64Array:
    """Return the greatest value of each code; `otherwise` for a code without values."""
    by_code = np.full(count, otherwise, np.int64)
    np.maximum.at(by_code, codes, values)
    return by_code
