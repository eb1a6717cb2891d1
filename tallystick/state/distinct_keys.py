"""The distinct keys of a batch of rows, and which of them each row has."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.state.key_bytes import KeyCodec, bodies, entry_keys
from tallystick.state.key_groups import key_groups_of


class Keys(NamedTuple):
    """Distinct keys in the order of their entries: by key group, then by value.

    Args:
        columns: the key's columns.
        entries: their keys in the state.
    """

    columns: pa.RecordBatch
    entries: pa.BinaryArray


def distinct_keys(
    rows: pa.RecordBatch, key: KeyCodec, max_parallelism: int, state_id: int
) -> tuple[NDArray[np.int32], Keys]:
    """The number of each row's key, and the keys."""
    columns = key.columns(rows)
    if len(columns) == 1 and not pa.types.is_floating(columns[0].type):
        coded = columns[0].dictionary_encode(null_encoding="encode")
        found = pa.RecordBatch.from_arrays([coded.dictionary], schema=key.schema)
        key_bytes = key.encode(found)
    else:  # equal keys have equal bytes, which Arrow does not know of NaN and -0.0
        coded = key.encode(rows).dictionary_encode()
        key_bytes = coded.dictionary
        found = key.decode(key_bytes)
    groups = key_groups_of(key.hash_codes(found), max_parallelism)
    entries = entry_keys(groups, state_id, key_bytes)
    order = pc.sort_indices(entries)
    number = np.empty(len(order), np.int32)
    number[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
    return number[coded.indices.to_numpy()], Keys(found.take(order), entries.take(order))


def keys_of(entries: pa.BinaryArray, key: KeyCodec) -> Keys:
    """The keys that these entries are of; the entries are sorted."""
    return Keys(key.decode(bodies(entries)), entries)
