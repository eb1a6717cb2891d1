"""Sketches: the number of different values, and quantiles, in little room and mergeable.

Both are lists of numbers that do not depend on the order of the rows, nor on how they were divided:
an epoch that runs again, or elsewhere, gives the same.

*Distinct count*: HyperLogLog with 4096 registers. A value is hashed to 64 bits: numbers by the
finaliser of splitmix64 over their 64 bits, texts by FNV-1a and then the same. The upper 12 bits
name a register, the number of leading zeros of the others plus one is its rank. Kept are the
registers that are not 0, as `register << 6 | rank`. The standard error is 1.04 / sqrt(4096), 1.6 %.

*Quantiles*: counts per bucket. The bucket of a double is its exponent and the first 7 bits of its
mantissa, as in HdrHistogram: integers only, so that all machines agree. A bucket is 1/128 wide,
relative to its values, and stands for its middle: the error is at most 0.4 %.

Sources: Flajolet et al., HyperLogLog (2007); Ertl, New cardinality estimation algorithms for
HyperLogLog sketches (2017), for the estimate without tables; Masson et al., DDSketch (2019).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.codec.spans import spans_of
from tallystick.errors import OptionError
from tallystick.state import key_kernels
from tallystick.state.functions.folds import Columns, Fold
from tallystick.state.functions.keyed_batch import Int64Array, KeyedBatch
from tallystick.state.keys import one_of_each
from tallystick.state.numpy_columns import explode, is_fixed_width, lists_of, values_of

UInt64Array = NDArray[np.uint64]

REGISTER_BITS = 12
REGISTERS = 1 << REGISTER_BITS
_RANK_BITS = 6
_ENTRY_BITS = REGISTER_BITS + _RANK_BITS
BUCKET_BITS = 7
_BUCKET_SHIFT = 52 - BUCKET_BITS
_INFINITE = 0x7FF << BUCKET_BITS
_BUCKETS = pa.list_(pa.int32())
_COUNTS = pa.list_(pa.int64())


def distinct_count(column: str, kind: pa.DataType) -> Fold:
    """Return the fold that counts different values, nulls apart.

    Raises:
        OptionError: values of this type are not told apart here.
    """
    is_text = pa.types.is_string(kind) or pa.types.is_binary(kind)
    if not (is_fixed_width(kind) or is_text):
        raise OptionError(f"values of type {kind} are not counted: expected numbers or texts")

    def add(batch: KeyedBatch) -> Columns:
        values = batch.column(column)
        codes = batch.codes.astype(np.int64)
        if values.null_count:
            codes = codes[values.is_valid().to_numpy(zero_copy_only=False)]
            values = values.drop_null()
        return [_greatest(codes, _entries(_hashes(values)), len(batch))]

    def merge(batch: KeyedBatch) -> Columns:
        lines, (registers,) = explode([batch.column("registers")])
        entries = registers.to_numpy().astype(np.int64)
        return [_greatest(batch.codes[lines].astype(np.int64), entries, len(batch))]

    schema = pa.schema([("registers", _BUCKETS)])
    text = f" of {_hashed_as(kind)} in {REGISTERS} registers"
    return Fold(schema, pa.int64(), add, merge, lambda lines: _estimates(lines.column(0)), text)


def _hashed_as(kind: pa.DataType) -> str:
    """Return the name for all types whose equal values have equal hashes."""
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return "texts"
    if pa.types.is_integer(kind):
        return "whole numbers"
    return "floats" if pa.types.is_floating(kind) else str(kind)


def _hashes(values: pa.Array) -> UInt64Array:
    """Return a hash of 64 bits of each value; equal numbers of all integer types have the same."""
    kind = values.type
    if not is_fixed_width(kind):
        spans = spans_of(values, "value")
        bits = np.empty(len(values), np.uint64)
        key_kernels.hash_long(spans.data, spans.starts, spans.lengths, bits)
        return _mixed(bits)
    numbers: NDArray[Any] = values_of(values)
    if pa.types.is_decimal128(kind):
        return _mixed(numbers["low"] ^ _mixed(numbers["high"].view(np.uint64)))
    if numbers.dtype.kind == "f":
        return _mixed(one_of_each(numbers.astype(np.float64)).view(np.uint64))
    return _mixed(numbers.astype(np.int64).view(np.uint64))


def _mixed(bits: UInt64Array) -> UInt64Array:
    """Return the next number of splitmix64 after each."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _entries(hashes: UInt64Array) -> Int64Array:
    """Return the register and the rank of each hash."""
    registers = (hashes >> np.uint64(64 - REGISTER_BITS)).astype(np.int64)
    # 52 bits and a 1 behind them: a double holds them all, and its exponent is their length.
    rest = ((hashes << np.uint64(REGISTER_BITS)) >> np.uint64(11)) | np.uint64(1)
    ranks = 54 - np.frexp(rest.astype(np.float64))[1].astype(np.int64)
    entries: Int64Array = registers << _RANK_BITS | ranks
    return entries


def _greatest(codes: Int64Array, entries: Int64Array, count: int) -> pa.ListArray:
    """Return the entry with the greatest rank of each group and register."""
    ordered = np.sort(codes << _ENTRY_BITS | entries)
    is_last = np.ones(len(ordered), np.bool_)
    is_last[:-1] = np.diff(ordered >> _RANK_BITS) != 0
    kept = ordered[is_last]
    counts = np.bincount(kept >> _ENTRY_BITS, minlength=count)
    return lists_of(counts, pa.array((kept & ((1 << _ENTRY_BITS) - 1)).astype(np.int32)))


def _estimates(registers: pa.ListArray) -> pa.Int64Array:
    codes, (entries,) = explode([registers])
    ranks = entries.to_numpy() & ((1 << _RANK_BITS) - 1)
    weights = np.ldexp(1.0, -ranks.astype(np.int64))
    count = len(registers)
    total = np.bincount(codes, weights, minlength=count)
    empty = (REGISTERS - np.bincount(codes, minlength=count)) / REGISTERS
    with np.errstate(divide="ignore"):
        estimates = REGISTERS**2 / (2 * np.log(2)) / (REGISTERS * _sigma(empty) + total)
    return pa.array(np.rint(estimates).astype(np.int64))


def _sigma(empty: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weight of the empty registers (Ertl's sigma); infinite where all are empty."""
    power, weight, total = empty, np.ones_like(empty), empty
    for _ in range(64):
        power = power * power
        total = total + power * weight
        weight = weight * 2
    return np.where(empty == 1, np.inf, total)


def quantiles(column: str, at: Sequence[float]) -> Fold:
    """Return the fold that keeps a histogram of numbers, nulls apart.

    Args:
        column: numbers.
        at: the quantiles of the result, a list; null without a value.
    """

    def add(batch: KeyedBatch) -> Columns:
        values = batch.column(column).cast(pa.float64(), safe=False)
        codes = batch.codes.astype(np.int64)
        if values.null_count:
            codes = codes[values.is_valid().to_numpy(zero_copy_only=False)]
            values = values.drop_null()
        buckets = _buckets(values.to_numpy())
        return _added(codes, buckets, np.ones(len(codes), np.int64), len(batch))

    def merge(batch: KeyedBatch) -> Columns:
        lines, (buckets, counts) = explode([batch.column("buckets"), batch.column("counts")])
        codes = batch.codes[lines].astype(np.int64)
        return _added(codes, buckets.to_numpy().astype(np.int64), counts.to_numpy(), len(batch))

    schema = pa.schema([("buckets", _BUCKETS), ("counts", _COUNTS)])
    kind = pa.list_(pa.float64())
    text = f" in buckets of 1/{1 << BUCKET_BITS}"
    return Fold(schema, kind, add, merge, lambda lines: _quantiles(lines, at), text)


def _buckets(values: NDArray[np.float64]) -> Int64Array:
    """Return the bucket of each double; in the order of the values, NaN after all."""
    values = one_of_each(values)
    size = (np.abs(values).view(np.uint64) >> np.uint64(_BUCKET_SHIFT)).astype(np.int64)
    buckets: Int64Array = np.where(values < 0, -size, size)
    return buckets


def _middles(buckets: Int64Array) -> NDArray[np.float64]:
    """Return the value that each bucket stands for."""
    size = np.abs(buckets).astype(np.uint64)
    half = np.uint64(1 << (_BUCKET_SHIFT - 1))
    bits = (size << np.uint64(_BUCKET_SHIFT)) + np.where(
        (size == 0) | (size >= _INFINITE), np.uint64(0), half
    )
    middles: NDArray[np.float64] = np.copysign(bits.view(np.float64), buckets)
    return middles


def _added(codes: Int64Array, buckets: Int64Array, counts: Int64Array, count: int) -> Columns:
    """Return the buckets of each group and how many values are in each."""
    order = np.argsort((codes << 32) + buckets, kind="stable")
    ordered = (codes << 32)[order] + buckets[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    totals = np.add.reduceat(counts[order], firsts) if len(firsts) else counts[:0]
    kept = order[firsts]
    sizes = np.bincount(codes[kept], minlength=count)
    return [
        lists_of(sizes, pa.array(buckets[kept].astype(np.int32))),
        lists_of(sizes, pa.array(totals)),
    ]


def _quantiles(lines: pa.RecordBatch, at: Sequence[float]) -> pa.ListArray:
    """Return the quantiles of each line: the least value that so many are not above."""
    count = lines.num_rows
    codes, (buckets, counts) = explode(lines.columns)
    totals = np.bincount(codes, counts.to_numpy(), minlength=count).astype(np.int64)
    ends = np.cumsum(counts.to_numpy())
    before = np.concatenate([[0], np.cumsum(totals)[:-1]]) if count else totals
    is_there = totals > 0
    results = np.zeros((count, len(at)))
    for place, share in enumerate(at):
        ranks = np.maximum(np.ceil(share * totals).astype(np.int64), 1)
        places = np.searchsorted(ends, (before + ranks)[is_there])
        results[is_there, place] = _middles(buckets.to_numpy()[places].astype(np.int64))
    values = pa.array(results[is_there].reshape(-1))
    return pc.cast(lists_of(is_there * len(at), values), pa.list_(pa.float64()))
