"""Formats of a record's value: what a user asks for; the readers and writers do it."""

from dataclasses import dataclass

from tallystick.errors import OptionError
from tallystick.json_format import FAILFAST, MODES


@dataclass(frozen=True, slots=True)
class Text:
    """UTF-8 text, as column `value`.

    Args:
        mode: what a value that is not UTF-8 does; see `Json`.

    Raises:
        OptionError: the mode is none of the four.
    """

    mode: str = FAILFAST

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise OptionError(f"Text(mode={self.mode!r}): choose one of {', '.join(MODES)}")
