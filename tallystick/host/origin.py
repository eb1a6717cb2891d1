"""The places that a task's rows come from, for the message about one that cannot be written.

A row loses its place on its way through functions to a sink. So whoever hands rows on says what
they are made of, and only an error asks. A thread runs one task at a time.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Place(NamedTuple):
    """The place of the records that a row is made of.

    Args:
        words: as a message names it.
        topic: of the record; "": it is no record, or not known.
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
"""Returns what a row, by its number, of a batch is made of."""


class _Here(threading.local):
    find: FindPlace | None = None


_here = _Here()


@contextmanager
def place_to_be_set() -> Iterator[Callable[[FindPlace | None], None]]:
    """Yield what says of which records the rows are that this thread hands on next.

    At the end nobody knows any more; unless another task of the thread has said it since: the
    generator of one that failed may be closed late.
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
    """Return what a row of a batch is made of, as far as it is known."""
    return Place() if _here.find is None else _here.find(rows, row)
