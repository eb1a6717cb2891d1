"""Texts that all layers share: spans of time as users give them, long lists, text of others.

A span of time is whole milliseconds, or a text such as "10 seconds". All texts have one grammar:

    span   = ["interval "] part {part}           1 second, 500ms, interval 2 minutes 30 s
    part   = number unit                         spaces may stand around both
    number = digits ["." digits]
    unit   = ms, msec, millisecond, s, sec, second, m, min, minute, h, hour, day

A unit may end in "s", and case does not matter. The sum is rounded to whole milliseconds.
"""

import re
from collections.abc import Iterable

from tallystick.errors import OptionError

_NAMES_BY_UNIT_MS = {
    1: ("ms", "msec", "millisecond"),
    1000: ("s", "sec", "second"),
    60_000: ("m", "min", "minute"),
    3_600_000: ("h", "hour"),
    86_400_000: ("day",),
}
_UNITS_MS = {name: ms for ms, names in _NAMES_BY_UNIT_MS.items() for name in names}
_PART = re.compile(r"\s*(\d+)(\.\d+)?\s*([a-z]+)\s*")
SPAN_MAX_MS = 1 << 52
"""The most that a span may be: added to an event time, in microseconds, 64 bits still hold it."""
WAIT_MAX_MS = 9_000_000_000_000
"""The longest wait: computers count at most 2^63 ns, from when they were switched on."""
WAIT_MAX_WORDS = "at most 285 years, the longest that a process can wait"


def shortened(names: Iterable[object], shown_max: int = 5, more: str = "more") -> str:
    """Return the first of many names, by comma, and the number of those that are left out."""
    texts = [str(name) for name in names]
    left_out = len(texts) - shown_max
    return ", ".join(texts[:shown_max]) + (f" and {left_out} {more}" if left_out > 0 else "")


def printable(text: str) -> str:
    """Return a text without control characters: parts of a message may come from a file."""
    return "".join(
        char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text
    )


def span_ms(text: str) -> int | None:
    """Return the milliseconds of a span of time, or None for a text that the grammar refuses."""
    remaining = text.lower().strip().removeprefix("interval ")
    total_ms: float = 0
    is_empty = True
    while remaining:
        part = _PART.match(remaining)
        name = "" if part is None else part[3]
        unit_ms = _UNITS_MS.get(name) or _UNITS_MS.get(name.removesuffix("s"))
        if part is None or unit_ms is None:
            return None
        # Without a fraction the sum stays a whole number: exact, however large.
        total_ms += (int(part[1]) if part[2] is None else float(part[1] + part[2])) * unit_ms
        remaining, is_empty = remaining[part.end() :], False
    return None if is_empty else round(total_ms)


def duration_ms(name: str, duration: str | int) -> int:
    """Return a span of time in ms, given in ms or as for Spark's `withWatermark`: "10 seconds".

    Args:
        name: of the option, for errors.
        duration: from 0.

    Raises:
        OptionError: `duration` has another form, or is more than 140,000 years.
    """
    span = span_ms(duration) if isinstance(duration, str) else None
    if isinstance(duration, int) and not isinstance(duration, bool) and duration >= 0:
        span = duration
    if span is not None and span <= SPAN_MAX_MS:
        return span
    if span is not None:
        raise OptionError(f"{name}={duration!r}: more than 140,000 years")
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
        return -duration_ms(name, -duration if isinstance(duration, int) else text[1:])
    return duration_ms(name, duration)
