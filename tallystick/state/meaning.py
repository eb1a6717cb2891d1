"""The meaning of a state: a function and its arguments, as frozen text.

A state's schema tells how to read the bytes, and not what the values mean: the sum of a column has
the type of its maximum. So a ready-made function declares with each state the arguments that decide
the content; a checkpoint holds the arguments, and a start compares them one by one (`changes`).

    (("function", "aggregate"), ("columns.total", 'sum("amount")'))

Invariants: texts stay the same in every release for the same arguments. An argument is declared
with its default too, so an argument that a checkpoint lacks was unknown to the release that wrote
it. A column of accumulators has an argument of its own, whose text names no type: types are in the
schema of the state.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

Meaning = tuple[tuple[str, str], ...]
"""Arguments by name, in the order of their declaration; empty: nothing is known."""

FUNCTION = "function"
OWN_FUNCTION = "a function of your own"
"""The function of all states whose meaning is in the user's code alone."""


class Change(NamedTuple):
    """A changed argument: the text in the checkpoint, and the text declared now."""

    argument: str
    before: str
    now: str

    @property
    def text(self) -> str:
        """The change in words."""
        return f"{self.argument} is now {self.now}, and its state was made with {self.before}"


def meaning_of(function: str, arguments: Mapping[str, str] | None = None) -> Meaning:
    """Return the meaning of a state that a function keeps.

    Args:
        function: the name of the function.
        arguments: the arguments that decide the content of the state, as text.
    """
    return ((FUNCTION, function), *(arguments or {}).items())


def shown(meanings: Iterable[Meaning]) -> str:
    """Return the meanings of states for a person; "" where only a user's code says them.

    Columns that are as they came are left out.
    """
    parts = [
        text if argument == FUNCTION else f"{argument} = {text}"
        for meaning in meanings
        if (FUNCTION, OWN_FUNCTION) not in meaning
        for argument, text in meaning
        if argument != f"column[{text}]"
    ]
    return "; ".join(dict.fromkeys(parts))


def name_text(name: str | Sequence[str]) -> str:
    """Return the text of a column's name, or of several."""
    return json.dumps(name, ensure_ascii=False)


def changes(before: Meaning, now: Meaning) -> Iterator[Change]:
    """Yield the arguments with different texts in two meanings.

    Arguments of only one meaning are not compared: an argument that the checkpoint lacks was
    unknown when the state was written, and columns that come or go show in the state's schema.
    """
    texts = dict(before)
    for argument, text in now:
        if texts.get(argument, text) != text:
            yield Change(argument, texts[argument], text)


def meaning_from_json(value: object) -> Meaning:
    """Decode a meaning from a manifest's JSON.

    Raises:
        TypeError: the JSON is no list of pairs of texts.
    """
    pairs: list[tuple[str, str]] = []
    for pair in value if isinstance(value, list) else [value]:
        match pair:
            case [str(argument), str(text)]:
                pairs.append((argument, text))
            case _:
                raise TypeError(f"meaning {value!r}: expected pairs of texts")
    return tuple(pairs)
