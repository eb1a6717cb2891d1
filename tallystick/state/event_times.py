"""Event times that steps can reckon with: none of them, plus or minus any delay, wraps."""

import pyarrow as pa
import pyarrow.compute as pc

from tallystick.errors import RecordError

EVENT_TIME_US_MAX = 1 << 62
"""146,000 years; half of what 64 bits hold, so that a delay or a gap may be as long."""
_MICROS = {"s": 1_000_000, "ms": 1000, "us": 1}


def check_event_times(column: pa.Array, what: str) -> None:
    """Refuse event times that no event can have had.

    Args:
        column: timestamps, or milliseconds since 1970 as whole numbers.
        what: it is, for the message.

    Raises:
        RecordError: a time is more than 146,000 years from 1970; the watermark would stay there,
            and every later row would be late.
    """
    unit = column.type.unit if pa.types.is_timestamp(column.type) else "ms"
    if unit not in _MICROS:
        return  # nanoseconds: 64 bits of them are 292 years
    bound = EVENT_TIME_US_MAX // _MICROS[unit]
    ends = pc.min_max(column.cast(pa.int64())).as_py()
    for found in ends.values():
        if found is not None and abs(found) > bound:
            raise RecordError(
                f"{what}: {found} {unit} since 1970 is more than 146,000 years away, and no event "
                f"time. Is it in micro- or nanoseconds? Divide it in a map_batches before, or make "
                f"it null."
            )
