"""The byte behind the key group in an entry's key: whose entry it is.

1 and above are a step's states (`StateField.state_id`); the greatest ones are indexes:

    0xFC  timers by time   key group | FC | time | key
    0xFD  times to live    key group | FD | expiry | entry key without its group
    0xFE  timers by key    key group | FE | key | time
"""

from collections.abc import Collection

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tallystick.spans import spans_of

TIMERS_BY_TIME = 0xFC
TTL_INDEX = 0xFD
TIMERS_BY_KEY = 0xFE
INDEXES = frozenset({TIMERS_BY_TIME, TTL_INDEX, TIMERS_BY_KEY})

ID_AT = 2
"""Where the byte stands."""
REST_AT = 3


def ids_of(keys: pa.BinaryArray) -> NDArray[np.uint8]:
    """That byte of each entry's key."""
    spans = spans_of(keys, "key")
    ids: NDArray[np.uint8] = spans.data[spans.starts + ID_AT]
    return ids


def living(entries: pa.RecordBatch, state_ids: Collection[int]) -> pa.RecordBatch:
    """The entries of these states and of the indexes: others are of states that were deleted.

    Args:
        entries: `ENTRIES`.
        state_ids: those in use.
    """
    is_living = np.isin(ids_of(entries.column(0)), [*state_ids, *INDEXES])
    return entries if is_living.all() else entries.filter(pa.array(is_living))
