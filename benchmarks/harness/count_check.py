"""Is a `count` job's output right? Worked out anew from the input, whole columns at once. Pure.

Each row names the number of inputs after it, so that each can be judged by itself: its sum and its
time must be those of exactly that many inputs of its user. And from row to row a user's count must
go up: by one where each input gives a row, by at least one where a commit gives a row per key.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
RECORD, EPOCH = "record", "epoch"
MODES = (RECORD, EPOCH)
"""A row per input; a row per key and commit."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the job read: a line per record, in the order of its partition's offsets."""

    users: Numbers
    cents: Numbers
    times_ms: Numbers


@dataclass(frozen=True, slots=True)
class Outputs:
    """What it wrote, in the order of (partition, offset); -1 where a row does not say."""

    partitions: Numbers
    offsets: Numbers
    users: Numbers
    counts: Numbers
    cents: Numbers
    times_ms: Numbers


@dataclass(frozen=True, slots=True)
class Findings:
    """What is wrong, in numbers of rows; nothing of it in an exact output.

    Args:
        strange_rows: with a user, or a count, that the input does not have.
        wrong_steps: with a count that does not follow upon the user's row before: a duplicate, a
            gap, another order.
        wrong_sums: with another sum than that of as many inputs.
        wrong_times: with another time than that of the last of them.
        unfinished_users: users whose last row does not count all of their inputs.
        done_records: inputs that the output covers.
    """

    strange_rows: int
    wrong_steps: int
    wrong_sums: int
    wrong_times: int
    unfinished_users: int
    done_records: int

    @property
    def right_so_far(self) -> bool:
        """Whether all rows are right; some may be missing at the end."""
        wrong = self.strange_rows + self.wrong_steps + self.wrong_sums + self.wrong_times
        return wrong == 0

    @property
    def exact(self) -> bool:
        """Whether all rows are right, and nothing is missing."""
        return self.right_so_far and self.unfinished_users == 0


class Truth:
    """What the job has to write, for any user and any number of its inputs."""

    def __init__(self, inputs: Inputs) -> None:
        order = np.argsort(inputs.users, kind="stable")
        self.totals = np.bincount(inputs.users)
        self.records = len(inputs.users)
        self._first = np.concatenate([[0], np.cumsum(self.totals)])
        self._cents = np.concatenate([[0], np.cumsum(inputs.cents[order])])
        self._times_ms = inputs.times_ms[order]

    def knows(self, users: Numbers, counts: Numbers) -> NDArray[np.bool_]:
        """Where there is such a user, with at least so many inputs."""
        known = (users >= 0) & (users < len(self.totals)) & (counts >= 1)
        known[known] = counts[known] <= self.totals[users[known]]
        return known

    def cents(self, users: Numbers, counts: Numbers) -> Numbers:
        """The sums of the users' first so many inputs."""
        first = self._first[users]
        return self._cents[first + counts] - self._cents[first]

    def times_ms(self, users: Numbers, counts: Numbers) -> Numbers:
        """The times of the last of them."""
        return self._times_ms[self._first[users] + counts - 1]


class Check:
    """One output, held against the truth.

    Args:
        truth: of the input.
        outputs: all committed rows.
        mode: one of `MODES`.
        in_order: whether a user's rows are all in one partition; if not, their order is not seen,
            and each count must be there once.
    """

    def __init__(self, truth: Truth, outputs: Outputs, mode: str, *, in_order: bool = True) -> None:
        assert mode in MODES, mode
        known = truth.knows(outputs.users, outputs.counts)
        users, counts = outputs.users[known], outputs.counts[known]
        steps = _steps(users, counts, in_order)
        covered = _greatest(users, counts, len(truth.totals))
        wrong_steps = steps != 1 if mode == RECORD else steps < 1
        self.findings = Findings(
            strange_rows=int(np.count_nonzero(~known)),
            wrong_steps=int(np.count_nonzero(wrong_steps)),
            wrong_sums=_different(outputs.cents[known], truth.cents(users, counts)),
            wrong_times=_different(outputs.times_ms[known], truth.times_ms(users, counts)),
            unfinished_users=_different(covered, truth.totals),
            done_records=int(covered.sum()),
        )
        self._partitions = outputs.partitions
        self._offsets = outputs.offsets
        self._done = np.zeros(len(known) + 1, dtype=np.int64)
        gained = np.zeros(len(known), dtype=np.int64)
        gained[known] = np.maximum(steps, 0)
        np.cumsum(gained, out=self._done[1:])

    def done(self, ends: Sequence[int]) -> int:
        """How many inputs the rows before these ends of the partitions cover."""
        done_records = 0
        for partition, end in enumerate(ends):
            start, stop = np.searchsorted(self._partitions, [partition, partition + 1])
            before = start + np.searchsorted(self._offsets[start:stop], end)
            done_records += int(self._done[before] - self._done[start])
        return done_records


def _steps(users: Numbers, counts: Numbers, in_order: bool) -> Numbers:
    """By how much each row's count is above that of its user's row before; aligned with the rows.

    The first row of a user has none before: its count.
    """
    order = np.argsort(users, kind="stable") if in_order else np.lexsort((counts, users))
    sorted_users, sorted_counts = users[order], counts[order]
    steps = sorted_counts.copy()
    again = sorted_users[1:] == sorted_users[:-1]
    steps[1:][again] -= sorted_counts[:-1][again]
    inverse = np.empty_like(steps)
    inverse[order] = steps
    return inverse


def _greatest(users: Numbers, counts: Numbers, user_count: int) -> Numbers:
    largest = np.zeros(user_count, dtype=np.int64)
    np.maximum.at(largest, users, counts)
    return largest


def _different(actual: Numbers, expected: Numbers) -> int:
    return int(np.count_nonzero(actual != expected))
