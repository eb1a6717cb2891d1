"""How a local copy of a range's state gets from what it holds to what is committed.

Invariants: the steps, done in order on a store at the version they start from, leave the committed
state, nothing else. Doing a changelog again changes nothing, for it holds values. A deletion that
was in a changelog which a snapshot made superfluous is known from the snapshot alone: so a
snapshot newer than the store replaces the store's key groups, it is not laid over them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
    """What later files say of each key group, going through the files from the newest on.

    Sets of key groups are the bits of whole numbers: drivers do this for every epoch.
    """

    def __init__(self, groups: KeyGroupRange) -> None:
        self._groups = groups
        self._snapshot = 0
        self._merged = 0
        self._merged_from: dict[int, int] = {}

    def add(self, file: StateFile) -> None:
        """Take note of a file, which stands before all that were added."""
        if file.kind == SNAPSHOT:
            self._snapshot |= self._window(file)
        elif file.first_epoch is not None:
            window = self._window(file)
            self._merged |= window
            self._merged_from[file.first_epoch] = (
                self._merged_from.get(file.first_epoch, 0) | window
            )

    def left_of(self, file: StateFile) -> tuple[KeyGroupRange, ...]:
        """The key groups for which the file, standing before all that were added, is needed."""
        window = self._window(file)
        left = window & ~self._snapshot
        if file.kind != SNAPSHOT and left & self._merged:
            start = file.epochs.start
            for first_epoch, merged in self._merged_from.items():
                if start >= first_epoch:
                    left &= ~merged
        if left == window:
            return (file.groups.intersection(self._groups),) if window else ()
        return tuple(_runs(left, self._groups.first))

    def _window(self, file: StateFile) -> int:
        first, last = max(file.first, self._groups.first), min(file.last, self._groups.last)
        return (
            ((1 << (last - first + 1)) - 1) << (first - self._groups.first) if first <= last else 0
        )


def _runs(bits: int, first: int) -> Iterator[KeyGroupRange]:
    """The runs of set bits, as ranges from `first` on."""
    while bits:
        skipped = (bits & -bits).bit_length() - 1
        bits >>= skipped
        count = (~bits & (bits + 1)).bit_length() - 1
        first += skipped
        yield KeyGroupRange(first, first + count - 1)
        first += count
        bits >>= count
