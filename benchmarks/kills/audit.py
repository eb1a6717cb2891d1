"""The judge of a run: each user's counts must be 1 to n, once each and in order.

It knows nothing of the systems: it is given the input and the committed output, each by partition
in the order of the log. A user is in one partition of either.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """A record of the input."""

    user: str
    amount: int
    ts: int


@dataclass(frozen=True, slots=True)
class Update:
    """A record of the output: a user's totals after one more event, which was made at `ts`."""

    user: str
    count: int
    sum: int
    ts: int


@dataclass(frozen=True, slots=True)
class Audit:
    """The numbers of updates, and of what is wrong with them.

    Args:
        expected: One for each event.
        rows: Updates in the output.
        lost: Expected and not there.
        duplicated: There, with a user and a count that were there before.
        out_of_order: There for the first time, after a higher count of that user.
        wrong: Another sum or event than the count says, or a count that no event led to.
    """

    expected: int
    rows: int
    lost: int
    duplicated: int
    out_of_order: int
    wrong: int

    @property
    def is_exact(self) -> bool:
        """True if nothing is wrong."""
        return not (self.lost or self.duplicated or self.out_of_order or self.wrong)


def audit(events: Iterable[Event], updates: Iterable[Update]) -> Audit:
    """Compare an output with what its input asks for."""
    counts: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    missing: dict[tuple[str, int], Update] = {}
    for event in events:
        counts[event.user] += 1
        sums[event.user] += event.amount
        count = counts[event.user]
        missing[event.user, count] = Update(event.user, count, sums[event.user], event.ts)
    tally: Counter[str] = Counter()
    highest: Counter[str] = Counter()
    seen: set[tuple[str, int]] = set()
    for update in updates:
        tally["rows"] += 1
        place = update.user, update.count
        wanted = missing.pop(place, None)
        if place in seen:
            tally["duplicated"] += 1
            continue
        seen.add(place)
        if wanted != update:
            tally["wrong"] += 1
        if update.count < highest[update.user]:
            tally["out_of_order"] += 1
        highest[update.user] = max(highest[update.user], update.count)
    return Audit(
        expected=counts.total(),
        rows=tally["rows"],
        lost=len(missing),
        duplicated=tally["duplicated"],
        out_of_order=tally["out_of_order"],
        wrong=tally["wrong"],
    )
