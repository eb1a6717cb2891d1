"""Spans of time as users give them: whole milliseconds, or a text such as "10 seconds"."""

from tallystick.errors import OptionError

_UNITS_MS = {"millisecond": 1, "second": 1000, "minute": 60_000, "hour": 3_600_000}
_UNITS_MS |= {"day": 24 * _UNITS_MS["hour"]}


def duration_ms(name: str, duration: str | int) -> int:
    """Return a span of time in ms, given as such or as for Spark's `withWatermark`: "10 seconds".

    Args:
        name: of the option, for errors.
        duration: from 0.

    Raises:
        OptionError: it is neither.
    """
    if isinstance(duration, int) and not isinstance(duration, bool) and duration >= 0:
        return duration
    words = str(duration).lower().split()
    unit = _UNITS_MS.get(words[1].removesuffix("s")) if len(words) == 2 else None
    if isinstance(duration, str) and unit is not None and words[0].isdecimal():
        return int(words[0]) * unit
    raise OptionError(
        f"{name}={duration!r}: expected whole ms from 0, or a text such as '10 seconds' "
        f"(milliseconds, seconds, minutes, hours, days)"
    )
