"""The origins of a task's rows, for errors about rows that cannot be written.

A row loses its place on its way through functions to a sink. So the code that hands rows on
sets their origin, and only an error looks it up. A thread runs one task at a time.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Place(NamedTuple):
    """The place of the records that a row is made of.

    Args:
        words: the place as a message names it.
        topic: of the record; "": the place is no record, or not known.
        partition: of the record.
        offset: of the record; of several, the first.
        values: what tells the row from others of the place, as words that follow; it is of the
            user's data, which not every message may hold.
    """

    words: str = ""
    topic: str = ""
    partition: int = 0
    offset: int = 0
    values: str = ""


FindPlace = Callable[[Any, int], Place]
"""Returns the place of a row, given its batch and its number, or the batch and `ALL_ROWS`."""
ALL_ROWS = -1
"""In place of a row's number: the whole batch."""


class _Here(threading.local):
    find: FindPlace | None = None


_here = _Here()


@contextmanager
def place_to_be_set() -> Iterator[Callable[[FindPlace | None], None]]:
    """Yield a setter for the origin of the rows that this thread hands on next.

    The origin is cleared at the end, unless another task of the thread has set its own since: the
    generator of a failed task may be closed late.
    """
    mine: FindPlace | None = None

    def rows_come_from(find: FindPlace | None) -> None:
        nonlocal mine
        _here.find = mine = find

    try:
        yield rows_come_from
    finally:
        if _here.find is mine:
            _here.find = None


def place_of(rows: Any, row: int) -> Place:
    """Return the place of a row of a batch, or of `ALL_ROWS`; an empty `Place` if not known."""
    return Place() if _here.find is None else _here.find(rows, row)
