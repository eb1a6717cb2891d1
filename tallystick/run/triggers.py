"""When a loop of our own begins an epoch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tallystick.errors import OptionError

_PARTS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)
_UNITS_MS = {
    "millisecond": 1,
    "msec": 1,
    "ms": 1,
    "second": 1_000,
    "sec": 1_000,
    "minute": 60_000,
    "min": 60_000,
    "hour": 3_600_000,
    "day": 86_400_000,
}


@dataclass(frozen=True, slots=True)
class Trigger:
    """When epochs begin, and whether they ever end.

    Args:
        interval_ms: at most one epoch begins in so many milliseconds; 0: one after the other.
        is_available_now: read what is there, in as many epochs as that takes, and end.
    """

    interval_ms: int = 0
    is_available_now: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any] | None) -> "Trigger":
        """Read the arguments of Spark's `DataStreamWriter.trigger`.

        Args:
            arguments: `processingTime`, `availableNow` or `once`; None: one epoch after the other.

        Raises:
            OptionError: it is another one, or its text is no interval.
        """
        given = dict(arguments or {})
        if not given:
            return cls()
        if len(given) == 1:
            (name, value), *_ = given.items()
            if name in ("availableNow", "once") and value is True:
                return cls(is_available_now=True)
            if name == "processingTime":
                return cls(interval_ms=interval_ms(value))
        raise OptionError(
            f"trigger {given!r}: expected one of processingTime='1 second', availableNow=True or "
            f"once=True, which reads the same as availableNow"
        )


def interval_ms(text: str) -> int:
    """Read an interval as Spark writes it, such as `1 second` or `2 minutes 500 ms`.

    Raises:
        OptionError: it is none.
    """
    left, total = text.removeprefix("interval "), 0.0
    while left:
        part = _PARTS.match(left)
        name = "" if part is None else part[2].lower()
        unit = _UNITS_MS.get(name) or _UNITS_MS.get(name.removesuffix("s"))
        if part is None or unit is None:
            total = -1
            break
        total += float(part[1]) * unit
        left = left[part.end() :]
    if total < 0 or not text.strip():
        raise OptionError(
            f"processingTime={text!r} is no interval: expected a number and a unit, such as "
            f"'500 milliseconds', '1 second' or '2 minutes'"
        )
    return round(total)
