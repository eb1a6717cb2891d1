"""The comparison of a disturbed run's output with an undisturbed one's, with an explanation."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tallystick_tools.chaos.cluster import NO_OFFSET, OutputRecord

Comparison = Literal["sequence", "rows", "final"]
COMPARISONS: tuple[Comparison, ...] = ("sequence", "rows", "final")
"""The rows of each topic, partition and key in order; all rows in any order; the last per key."""
SHOWN_MAX = 20
TEXT_MAX = 200

Row = tuple[str, bytes | None, bytes | None]
"""Topic, key and value."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between the outputs of two runs.

    Args:
        kind: lost, added, other order, or other value.
        topic: Of the row.
        key: Of the row.
        expected: The value in the undisturbed run; None: no value.
        actual: The value in the disturbed run; None: no value.
        partition: Of the row found, or -1.
        offset: Of the row found, or -1.
    """

    kind: Literal["lost", "added", "other order", "other value"]
    topic: str
    key: bytes | None
    expected: bytes | None
    actual: bytes | None
    partition: int = -1
    offset: int = -1

    def __str__(self) -> str:
        return self.text("the undisturbed run")

    def text(self, first: str) -> str:
        """Return the difference in words.

        Args:
            first: Whose output was expected, as in "the undisturbed run".
        """
        where = f"{self.topic}"
        if self.offset >= 0:
            where += f"-{self.partition} at offset {self.offset}"
        values = {
            "lost": f"lost {_text(self.expected)}",
            "added": f"{_text(self.actual)}, which {first} does not have (so often)",
            "other order": f"{_text(self.actual)}, where {first} has {_text(self.expected)}",
            "other value": f"{_text(self.actual)}, where {first} has {_text(self.expected)}",
        }
        return f"{where}, key {_text(self.key)}: {values[self.kind]}"


def differences(
    expected: Sequence[OutputRecord], actual: Sequence[OutputRecord], comparison: Comparison
) -> list[Difference]:
    """Return the differences between two outputs; empty: the outputs are the same.

    Rows of files have no keys, and no order but that of tasks: they are compared as `rows`.

    Args:
        expected: Of the undisturbed run, by partition in the order of the log.
        actual: Of the disturbed run.
        comparison: What counts.
    """
    if comparison == "rows":
        return _rows(expected, actual)
    of_files = _rows(
        *([record for record in side if record.offset == NO_OFFSET] for side in (expected, actual))
    )
    expected, actual = (
        [record for record in side if record.offset != NO_OFFSET] for side in (expected, actual)
    )
    if comparison == "final":
        return of_files + _finals(expected, actual)
    return of_files + (_rows(expected, actual) or _orders(expected, actual))


def _finals(expected: Iterable[OutputRecord], actual: Iterable[OutputRecord]) -> list[Difference]:
    last = {(record.topic, record.key): record for record in expected}
    now = {(record.topic, record.key): record for record in actual}
    different = []
    for topic, key in dict.fromkeys([*last, *now]):
        old, new = last.get((topic, key)), now.get((topic, key))
        if old is None:
            assert new is not None
            different.append(_at(new, "added", None))
        elif new is None:
            different.append(Difference("lost", topic, key, old.value, None))
        elif new.value != old.value:
            different.append(_at(new, "other value", old.value))
    return different


def _rows(expected: Sequence[OutputRecord], actual: Sequence[OutputRecord]) -> list[Difference]:
    missing = Counter(map(_row, expected))
    missing.subtract(map(_row, actual))
    lost = [
        Difference("lost", topic, key, value, None)
        for (topic, key, value), count in missing.items()
        for _ in range(count)
    ]
    surplus = {row: -count for row, count in missing.items() if count < 0}
    added = []
    for record in reversed(actual):  # the last ones of equal rows are those too many
        if surplus.get(_row(record), 0) > 0:
            surplus[_row(record)] -= 1
            added.append(_at(record, "added", None))
    return lost + added[::-1]


def _orders(expected: Iterable[OutputRecord], actual: Iterable[OutputRecord]) -> list[Difference]:
    first = _sequences(expected)
    different = []
    for where, sequence in _sequences(actual).items():
        for old, new in zip(first.get(where, ()), sequence, strict=False):
            if old.value != new.value:
                different.append(_at(new, "other order", old.value))
                break
    return different


def _sequences(records: Iterable[OutputRecord]) -> dict[object, list[OutputRecord]]:
    by_key: dict[object, list[OutputRecord]] = defaultdict(list)
    for record in records:
        by_key[record.topic, record.partition, record.key].append(record)
    return by_key


def _row(record: OutputRecord) -> Row:
    return record.topic, record.key, record.value


def _at(
    record: OutputRecord, kind: Literal["added", "other order", "other value"], old: bytes | None
) -> Difference:
    return Difference(
        kind, record.topic, record.key, old, record.value, record.partition, record.offset
    )


def state_differences(
    expected: Mapping[str, Sequence[str]], actual: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the differences in the state of steps, a sentence for each entry.

    Args:
        expected: Of the undisturbed run: by step, a text for each key.
        actual: Of the disturbed run.
    """
    different = []
    for uid in dict.fromkeys([*expected, *actual]):
        missing = Counter(expected.get(uid, ()))
        missing.subtract(actual.get(uid, ()))
        for text, count in missing.items():
            if count:
                where = "is missing" if count > 0 else "is there, and undisturbed it is not"
                different.append(f"state of step {uid!r}: {_cut(text)} {where}")
    return different


def explain(
    first: Sequence[OutputRecord],
    again: Sequence[OutputRecord],
    actual: Sequence[OutputRecord],
    comparison: Comparison,
) -> str:
    """Explain the cause of a difference, as far as a second undisturbed run shows it.

    Args:
        first: Of the undisturbed run.
        again: Of another undisturbed run of the same input.
        actual: Of the disturbed run, which differs.
        comparison: What counts.
    """
    if not differences(first, again, comparison):
        fields = _changed_fields(first, actual)
        if fields and len(first) == len(actual):
            return (
                f"Two undisturbed runs agree, and no row is lost or added but for the field"
                f"{'s' * (len(fields) > 1)} {', '.join(fields)}, whose value depends on what the "
                f"process has seen since its start. A function probably keeps something in a "
                f"global variable or an object of its own, which a restart loses and an epoch "
                f"that runs again counts twice: keep it as keyed state, or as operator state."
            )
        return (
            "Two undisturbed runs agree, so the faults made the difference: rows are written by "
            "something that is not part of the epoch (a producer or a client of the program's "
            "own), or this is a bug of Tallystick's. The log of the program and the faults around "
            "the first difference say more."
        )
    weaker = [other for other in COMPARISONS[COMPARISONS.index(comparison) + 1 :]
              if not differences(first, again, other)]  # fmt: skip
    if weaker:
        return (
            f"Two undisturbed runs of the same input differ already as {comparison!r} and agree "
            f"as {weaker[0]!r}: your output depends on how rows of several input partitions "
            f"mix, or on where epochs end. Use --compare {weaker[0]}, or give the input a key "
            f"(--key TOPIC=FIELD) so that what belongs together is in one partition."
        )
    fields = _changed_fields(first, again)
    named = f" in the field{'s' * (len(fields) > 1)} {', '.join(fields)}" if fields else ""
    return (
        f"Two undisturbed runs of the same input differ already{named}: the program is not "
        f"deterministic. A function reads the clock, random numbers, or something outside of its "
        f"input, or keeps something in a global variable or an object of its own, which each "
        f"process has for itself. An epoch that runs again gives other rows then; exactly once "
        f"still holds for each row, but no comparison can show it. Take times from the records, "
        f"seeds from keys, and keep what is to last as keyed state or operator state."
    )


def _changed_fields(first: Sequence[OutputRecord], second: Sequence[OutputRecord]) -> list[str]:
    """Return the JSON fields without which two outputs are the same; empty: no such fields."""
    one, two = _objects(first), _objects(second)
    if one is None or two is None:
        return []
    names = sorted({name for pair in (*one, *two) for name in pair[1]})
    changed = [name for name in names if _column(one, name) != _column(two, name)]

    def without(rows: list[tuple[Any, dict[str, Any]]]) -> Counter[object]:
        return Counter(
            (
                where,
                json.dumps({k: v for k, v in fields.items() if k not in changed}, sort_keys=True),
            )
            for where, fields in rows
        )

    return changed if without(one) == without(two) else []


def _objects(records: Iterable[OutputRecord]) -> list[tuple[Any, dict[str, Any]]] | None:
    objects = []
    for record in records:
        try:
            value = json.loads(record.value or b"null")
        except ValueError:
            return None
        if not isinstance(value, dict):
            return None
        objects.append(((record.topic, record.key), value))
    return objects


def _column(rows: Iterable[tuple[Any, dict[str, Any]]], name: str) -> Counter[object]:
    return Counter((where, json.dumps(fields.get(name))) for where, fields in rows)


def _text(value: bytes | None) -> str:
    if value is None:
        return "(none)"
    return _cut(value.decode(errors="backslashreplace"))


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…"
