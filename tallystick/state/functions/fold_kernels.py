"""The inner loops of `keyed_batch`: one value per key out of a column of rows.

`codes` are the rows' key numbers. Invariant: no kernel reads or writes outside the arrays it is
given; the caller has checked that codes are numbers of keys and that lengths are the same.
"""

import numba
import numpy as np

SUM, MINIMUM, MAXIMUM = range(3)
"""The operations of `fold`. NaN is above all numbers, as in Spark."""

_SIGN, _ONE = np.uint64(1 << 63), np.uint64(1)


@numba.njit(cache=True, nogil=True, inline="always")
def _both(operation, one, two):  # type: ignore[no-untyped-def]
    if operation == SUM:
        return one + two
    if operation == MINIMUM:
        return two if two < one or one != one else one
    return two if two > one or two != two else one


@numba.njit(cache=True, nogil=True, inline="always")
def _is_beyond(one, two, bounds):  # type: ignore[no-untyped-def]
    """True if a sum would overflow; checked before, for a sum that wraps around may be anything."""
    return (two > 0 and one > bounds[1] - two) or (two < 0 and one < bounds[0] - two)


@numba.njit(cache=True, nogil=True)
def fold(operation, codes, values, valid, totals, known, bounds):  # type: ignore[no-untyped-def]
    """Bring each valid value into its key's total, in the order of the rows.

    `codes`, `values` and `valid` have a line per row; `valid` may be empty: all are. `totals` and
    `known` have one per key and are changed in place. `bounds` are the least and the most that
    a sum may be. Returns the first row at which a sum is out of bounds, or -1.
    """
    for row in range(len(codes)):
        if len(valid) and not valid[row]:
            continue
        code = codes[row]
        if known[code]:
            if operation == SUM and _is_beyond(totals[code], values[row], bounds):
                return row
            totals[code] = _both(operation, totals[code], values[row])
        else:
            totals[code] = values[row]
            known[code] = True
    return -1


@numba.njit(cache=True, nogil=True)
def running(operation, codes, values, valid, totals, known, bounds, out, present):  # type: ignore[no-untyped-def]
    """Fold as `fold` does, and write each key's total after each row to `out` and `present`."""
    for row in range(len(codes)):
        code = codes[row]
        if len(valid) == 0 or valid[row]:
            if known[code]:
                if operation == SUM and _is_beyond(totals[code], values[row], bounds):
                    return row
                totals[code] = _both(operation, totals[code], values[row])
            else:
                totals[code] = values[row]
                known[code] = True
        out[row] = totals[code]
        present[row] = known[code]
    return -1


@numba.njit(cache=True, nogil=True, inline="always")
def _is_less(one, two):  # type: ignore[no-untyped-def]
    """True if a decimal is less than another; a flipped sign bit puts unsigned words in order."""
    if one[1] != two[1]:
        return (one[1] ^ _SIGN) < (two[1] ^ _SIGN)
    return one[0] < two[0]


@numba.njit(cache=True, nogil=True, inline="always")
def _copy(target, source):  # type: ignore[no-untyped-def]
    """Copy a decimal; an assignment of arrays would compile numba's broadcasts."""
    target[0] = source[0]
    target[1] = source[1]


@numba.njit(cache=True, nogil=True, inline="always")
def _add(total, value, bounds):  # type: ignore[no-untyped-def]
    """Add to a decimal in place; return True if the sum is within the bounds."""
    before, added = total[1], value[1]
    total[0] += value[0]
    total[1] += added
    if total[0] < value[0]:
        total[1] += _ONE
    if ((before ^ total[1]) & (added ^ total[1])) & _SIGN:
        return False
    return not (_is_less(total, bounds[0]) or _is_less(bounds[1], total))


@numba.njit(cache=True, nogil=True)
def fold_decimals(operation, codes, values, valid, totals, known, bounds, out, present):  # type: ignore[no-untyped-def]
    """`fold` of decimals, or `running` where `out` and `present` are not empty.

    A decimal is two words of 64 bits, the low one first; so are the `bounds`.
    """
    for row in range(len(codes)):
        code = codes[row]
        if len(valid) == 0 or valid[row]:
            if not known[code]:
                _copy(totals[code], values[row])
                known[code] = True
            elif operation == SUM:
                if not _add(totals[code], values[row], bounds):
                    return row
            elif _is_less(values[row], totals[code]) == (operation == MINIMUM):
                _copy(totals[code], values[row])
        if len(out):
            _copy(out[row], totals[code])
            present[row] = known[code]
    return -1


@numba.njit(cache=True, nogil=True)
def count(codes, valid, totals):  # type: ignore[no-untyped-def]
    """Add the valid rows of each key to its total."""
    for row in range(len(codes)):
        if len(valid) == 0 or valid[row]:
            totals[codes[row]] += 1


@numba.njit(cache=True, nogil=True)
def running_count(codes, valid, totals, out):  # type: ignore[no-untyped-def]
    """Count as `count` does, and write each key's total after each row to `out`."""
    for row in range(len(codes)):
        code = codes[row]
        if len(valid) == 0 or valid[row]:
            totals[code] += 1
        out[row] = totals[code]


@numba.njit(cache=True, nogil=True)
def edges(codes, first, last):  # type: ignore[no-untyped-def]
    """Write the first and the last row of each key to `first` and `last`, both -1 at the start."""
    for row in range(len(codes)):
        code = codes[row]
        if first[code] < 0:
            first[code] = row
        last[code] = row


@numba.njit(cache=True, nogil=True)
def sort_by_key(codes, places, order):  # type: ignore[no-untyped-def]
    """Write the row numbers into `order`, key by key; `places` has the start of each key."""
    for row in range(len(codes)):
        code = codes[row]
        order[places[code]] = row
        places[code] += 1


@numba.njit(cache=True, nogil=True)
def keep_greatest(codes, values, valid, size, best, counts):  # type: ignore[no-untyped-def]
    """Keep the `size` greatest values of each key, the greatest first; NaN is above all.

    `best` holds `size` values per key, of which the first `counts` of the key are there.
    """
    for row in range(len(codes)):
        if len(valid) and not valid[row]:
            continue
        code, value = codes[row], values[row]
        begin = code * size
        at = begin + counts[code]
        if counts[code] == size:
            least = best[at - 1]
            if not (value > least or (value != value and least == least)):
                continue
            at -= 1
        else:
            counts[code] += 1
        while at > begin:
            before = best[at - 1]
            if not (value > before or (value != value and before == before)):
                break
            best[at] = before
            at -= 1
        best[at] = value


@numba.njit(cache=True, nogil=True)
def is_sorted(codes, starts):  # type: ignore[no-untyped-def]
    """True if the starts of each key ascend; equal codes stand together."""
    for row in range(1, len(codes)):
        if codes[row] == codes[row - 1] and starts[row] < starts[row - 1]:
            return False
    return True


@numba.njit(cache=True, nogil=True)
def merge_sessions(codes, starts, ends, counts, gap):  # type: ignore[no-untyped-def]
    """Merge intervals of a key that are at most `gap` apart, in place; return the number left.

    The intervals are sorted by key, then by start.
    """
    last = -1
    for row in range(len(codes)):
        if last >= 0 and codes[row] == codes[last] and starts[row] - ends[last] <= gap:
            ends[last] = max(ends[last], ends[row])
            counts[last] += counts[row]
            continue
        last += 1
        codes[last], starts[last] = codes[row], starts[row]
        ends[last], counts[last] = ends[row], counts[row]
    return last + 1


@numba.njit(cache=True, nogil=True)
def session_numbers(codes, starts, ends, gap, numbers):  # type: ignore[no-untyped-def]
    """Number the sessions of intervals of a key at most `gap` apart; return the session count.

    The intervals are sorted by key, then by start.
    """
    count = 0
    latest = np.int64(0)
    for row in range(len(codes)):
        if row and codes[row] == codes[row - 1] and starts[row] - latest <= gap:
            latest = max(latest, ends[row])
        else:
            count += 1
            latest = ends[row]
        numbers[row] = count - 1
    return count
