"""Where the rows come from that a task works on, for the message about one that cannot be written.

A row loses its place on its way through functions to a sink. So whoever hands rows on says what
they are made of, and only an error asks. A thread runs one task at a time.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Place(NamedTuple):
    """The place of the records that a row is made of.

    Args:
        words: as a message names it.
        topic: of the record; "": it is no record, or not known.
        partition: of the record.
        offset: of the record; of several, the first.
    """

    words: str = ""
    topic: str = ""
    partition: int = 0
    offset: int = 0


FindPlace = Callable[[Any, int], Place]
"""Returns what a row, by its number, of a batch is made of."""


class _Here(threading.local):
    find: FindPlace | None = None


_here = _Here()


def rows_come_from(find: FindPlace | None) -> None:
    """Say what the rows are made of that this thread hands on next; None: nobody knows."""
    _here.find = find


def place_of(rows: Any, row: int) -> Place:
    """Return what a row of a batch is made of, as far as it is known."""
    return Place() if _here.find is None else _here.find(rows, row)
