"""How a local copy of a range's state gets from what it holds to what is committed.

Invariants: the steps, done in order on a store at the version they start from, leave the committed
state, nothing else. Doing a changelog again changes nothing, for it holds values. A deletion that
was in a changelog which a snapshot made superfluous is known from the snapshot alone: so a
snapshot newer than the store replaces the store's key groups, it is not laid over them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tallystick.state.handles import SNAPSHOT, StateFile, StepState, Version
from tallystick.state.key_groups import KeyGroupRange


@dataclass(frozen=True, slots=True)
class Load:
    """Apply what a file says of these key groups, in order."""

    file: StateFile
    groups: tuple[KeyGroupRange, ...]


Step = KeyGroupRange | Load
"""A range is to be cleared."""


def steps_from(step: StepState, have: Version | None, groups: KeyGroupRange) -> list[Step]:
    """What brings a store of these key groups from the version it has to the step's.

    Args:
        step: the committed state.
        have: of the store; None, or a version that the step's trail does not know: from nothing.
        groups: those of the store.
    """
    is_known = have is not None and have in step.trail
    files = touching(step.files, groups)
    if is_known and have is not None:
        files = [each for each in files if each.epoch > have.epoch]
    steps: list[Step] = [] if is_known else [groups]
    for load in needed(files, groups):
        if is_known and load.file.kind == SNAPSHOT:
            steps.extend(load.groups)
        steps.append(load)
    return steps


def touching(files: Iterable[StateFile], groups: KeyGroupRange) -> list[StateFile]:
    """The files that speak for some of these key groups."""
    first, last = groups.first, groups.last
    return [each for each in files if each.first <= last and each.last >= first]


def needed(files: Sequence[StateFile], groups: KeyGroupRange) -> list[Load]:
    """The parts of files that no later one makes superfluous, in the files' order."""
    coverage = Coverage(groups)
    loads = []
    for file in reversed(files):
        parts = coverage.left_of(file)
        coverage.add(file)
        if parts:
            loads.append(Load(file, parts))
    return loads[::-1]


class Coverage:
    """What later files say of each key group, going through the files from the newest on."""

    def __init__(self, groups: KeyGroupRange) -> None:
        self._groups = groups
        self._snapshot = np.zeros(groups.count, np.bool_)
        self._merged_from = np.full(groups.count, np.iinfo(np.int64).max)

    def add(self, file: StateFile) -> None:
        """Take note of a file, which stands before all that were added."""
        window = self._window(file)
        if file.kind == SNAPSHOT:
            self._snapshot[window] = True
        elif file.first_epoch is not None:
            merged_from = self._merged_from[window]
            np.minimum(merged_from, file.first_epoch, out=merged_from)

    def left_of(self, file: StateFile) -> tuple[KeyGroupRange, ...]:
        """The key groups for which the file, standing before all that were added, is needed."""
        window = self._window(file)
        left = ~self._snapshot[window]
        if file.kind != SNAPSHOT:
            left &= file.epochs.start < self._merged_from[window]
        if left.all():
            return (file.groups.intersection(self._groups),) if left.size else ()
        return tuple(_runs(left, self._groups.first + window.start)) if left.any() else ()

    def _window(self, file: StateFile) -> slice:
        both = file.groups.intersection(self._groups)
        start = both.first - self._groups.first if both.count else 0
        return slice(start, start + both.count)


def _runs(mask: npt.NDArray[np.bool_], first: int) -> Iterable[KeyGroupRange]:
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        yield KeyGroupRange(first + start, first + stop - 1)
