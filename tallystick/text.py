"""Texts that all layers share: spans of time as users give them, and long lists, cut.

A span of time is whole milliseconds, or a text such as "10 seconds".
"""

from collections.abc import Iterable

from tallystick.errors import OptionError

_UNITS_MS = {"millisecond": 1, "second": 1000, "minute": 60_000, "hour": 3_600_000}
_UNITS_MS |= {"day": 24 * _UNITS_MS["hour"]}
SIGNED_MAX_MS = 1 << 52
"""The most that a signed span may be: as far as event times themselves may be from 1970."""


def shortened(names: Iterable[object], shown_max: int = 5, more: str = "more") -> str:
    """Return the first of many names, by comma, and the number of those that are left out."""
    texts = [str(name) for name in names]
    left_out = len(texts) - shown_max
    return ", ".join(texts[:shown_max]) + (f" and {left_out} {more}" if left_out > 0 else "")


def duration_ms(name: str, duration: str | int) -> int:
    """Return a span of time in ms, given in ms or as for Spark's `withWatermark`: "10 seconds".

    Args:
        name: of the option, for errors.
        duration: from 0.

    Raises:
        OptionError: `duration` has another form.
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


def signed_duration_ms(name: str, duration: str | int) -> int:
    """Return a span of time in ms as `duration_ms` does, or a negative one: -5, "-8 hours".

    Args:
        name: of the option, for errors.
        duration: in ms or as a text.

    Raises:
        OptionError: `duration` has another form, or is more than 140,000 years.
    """
    text = str(duration).strip()
    is_negative = text.startswith("-")
    if is_negative:
        span = -duration_ms(name, -duration if isinstance(duration, int) else text[1:])
    else:
        span = duration_ms(name, duration)
    if abs(span) > SIGNED_MAX_MS:
        raise OptionError(f"{name}={duration!r}: more than 140,000 years")
    return span
