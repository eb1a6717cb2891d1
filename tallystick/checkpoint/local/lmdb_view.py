"""Entries of state as LMDB has them: long keys shortened, and read back as columns.

LMDB takes keys of up to 511 bytes. A longer one is stored as its beginning and a digest, 511 bytes
in all (which no other stored key has), and the value begins with the whole key. Shortened keys of
one beginning stand in the order of their digests: what is read in order is sorted again, run by
run. Only stores that ever held such a key pay for it.
"""

import hashlib
import itertools
import operator
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import ENTRIES

if TYPE_CHECKING:
    import lmdb

STORED_KEY_MAX = 511
DIGEST_BYTES = 32
PREFIX_BYTES = STORED_KEY_MAX - DIGEST_BYTES
BATCH_ROWS = 16_384
FIRST_ENTRY = b"\0\0"
"""Keys that sort before this one are the store's own."""

_KEY_AND_VALUE = operator.itemgetter(0), operator.itemgetter(1)
_LENGTH = struct.Struct("<I")


def stored_key(key: bytes) -> bytes:
    """The key under which LMDB has an entry."""
    if len(key) < STORED_KEY_MAX:
        return key
    digest = hashlib.blake2b(key, digest_size=DIGEST_BYTES).digest()
    return key[:PREFIX_BYTES] + digest


def stored_value(key: bytes, value: bytes) -> bytes:
    """The value that LMDB has for an entry."""
    return value if len(key) < STORED_KEY_MAX else _LENGTH.pack(len(key)) + key + value


def has_long_keys(keys: pa.BinaryArray) -> bool:
    """True if one of them must be shortened."""
    return bool(len(keys)) and pc.max(pc.binary_length(keys)).as_py() >= STORED_KEY_MAX


def bounds(groups: KeyGroupRange) -> tuple[bytes, bytes]:
    """The first possible key of the key groups, and the first one after them."""
    return groups.first.to_bytes(2, "big"), (groups.last + 1).to_bytes(2, "big")


class LmdbView:
    """The entries that a read transaction sees.

    Args:
        txn: ends with the view.
        long_keys: whether the store ever held a key that had to be shortened.
    """

    def __init__(self, txn: "lmdb.Transaction[bytes]", *, long_keys: bool) -> None:
        self._txn = txn
        self._long_keys = long_keys

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """See `StateView.get_many`."""
        wanted = keys.to_pylist()
        if not (self._long_keys and has_long_keys(keys)):
            return pa.array(list(map(self._txn.get, wanted)), pa.binary())
        found = map(self._txn.get, map(stored_key, wanted))
        return pa.array(list(map(_user_value, wanted, found)), pa.binary())

    def scan(self, first: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """See `StateView.scan`."""
        if not self._long_keys:
            return self._stored(first, end)
        # The bounds may be long keys themselves: all that begins as they do is looked at.
        widest = end if len(end) <= PREFIX_BYTES else end[:PREFIX_BYTES] + b"\xff" * 33
        found = _in_order(self._stored(first[:PREFIX_BYTES], widest))
        return (entry for entry in found if first <= entry[0] < end)

    def batches(self, groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        """See `StateView.batches`."""
        entries = self.scan(*bounds(groups))
        while rows := list(itertools.islice(entries, BATCH_ROWS)):
            columns = [pa.array(list(map(item, rows)), pa.binary()) for item in _KEY_AND_VALUE]
            yield pa.RecordBatch.from_arrays(columns, schema=ENTRIES)

    def _stored(self, first: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        cursor = self._txn.cursor()
        if not cursor.set_range(max(first, FIRST_ENTRY)):
            return iter(())
        return itertools.takewhile(lambda entry: entry[0] < end, cursor.iternext())


def _in_order(stored: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    for _, run in itertools.groupby(stored, key=lambda entry: entry[0][:PREFIX_BYTES]):
        yield from sorted(itertools.starmap(_user_entry, run), key=operator.itemgetter(0))


def _user_entry(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    if len(key) < STORED_KEY_MAX:
        return key, value
    start = _LENGTH.size
    stop = start + _LENGTH.unpack_from(value)[0]
    return value[start:stop], value[stop:]


def _user_value(key: bytes, found: bytes | None) -> bytes | None:
    if found is None or len(key) < STORED_KEY_MAX:
        return found
    return found[_LENGTH.size + len(key) :]
