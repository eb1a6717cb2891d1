"""State entries in other key groups: for another `max_parallelism`.

An entry's key begins with its key group and its state's id; where the key of the step stands behind
them depends on the id.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.state.entry_ids import REST_AT, TIMERS_BY_TIME, TTL_INDEX, ids_of
from tallystick.state.key_bytes import KeyCodec, behind, entry_keys
from tallystick.state.key_groups import key_groups_of
from tallystick.state.view import ENTRIES, one_batch

_TIME_SIZE = 8
KEY_AT = {TIMERS_BY_TIME: REST_AT + _TIME_SIZE, TTL_INDEX: REST_AT + _TIME_SIZE + 1}
"""Where the step's key begins; elsewhere it is right behind the id. An index has the time first,
that of expiries then the id of the state."""


def regrouped(entries: pa.RecordBatch, codec: KeyCodec, max_parallelism: int) -> pa.RecordBatch:
    """The same entries under the key groups that they have with another `max_parallelism`.

    Args:
        entries: `ENTRIES`.
        codec: of the step's key.
        max_parallelism: the new one.

    Returns:
        The entries, sorted by key.

    Raises:
        ManifestError: an entry's key is not of the codec's columns.
    """
    ids = ids_of(entries.column(0))
    parts = []
    for state_id in np.unique(ids).tolist():
        keys, values = (column.filter(pa.array(ids == state_id)) for column in entries.columns)
        rows, _ = codec.decode_start(behind(keys, KEY_AT.get(state_id, REST_AT)))
        groups = key_groups_of(codec.hash_codes(rows), max_parallelism)
        moved = entry_keys(groups, state_id, behind(keys, REST_AT))
        parts.append(pa.RecordBatch.from_arrays([moved, values], schema=ENTRIES))
    together = pa.Table.from_batches(parts, ENTRIES).combine_chunks()
    ordered = together.take(pc.sort_indices(together, sort_keys=[("key", "ascending")]))
    return one_batch(ordered, "entries in other key groups", "migrate to more key groups")
