"""The files of a step's state: those that it needs, those to be rewritten, and garbage.

Restoring: how a local copy of a range's state gets from what it holds to what is committed.
Invariants: the steps, done in order on a store at the version they start from, leave the committed
state, nothing else. Doing a changelog again changes nothing, for it holds values. A deletion that
was in a changelog which a snapshot made superfluous is known from the snapshot alone: so a
snapshot newer than the store replaces the store's key groups, it is not laid over them.

Rewriting keeps three things within bounds, each at a cost that grows with what was changed, not
with what is held: bytes (a part of the key groups gets a snapshot when its changelogs outgrow the
last one), the number of files (changelogs of like size are merged, as in an LSM tree), and what
one epoch has to do of it (a part at a time).
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tallystick.state.catalog import CHANGELOG, SNAPSHOT, StateFile, StepState, Version
from tallystick.state.key_groups import KeyGroupRange, key_group_range, operator_index


@dataclass(frozen=True, slots=True)
class Load:
    """Apply what a file says of these key groups, in order."""

    file: StateFile
    groups: tuple[KeyGroupRange, ...]


Step = KeyGroupRange | Load
"""A range is to be cleared."""


def steps_from(step: StepState, have: Version | None, groups: KeyGroupRange) -> list[Step]:
    """Return the steps that bring a store of these key groups from its version to the step's.

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
    """Return the files that speak for some of these key groups."""
    first, last = groups.first, groups.last
    return [each for each in files if each.first <= last and each.last >= first]


def needed(files: Sequence[StateFile], groups: KeyGroupRange) -> list[Load]:
    """Return the parts of files that no later one makes superfluous, in the files' order."""
    coverage = Coverage(groups)
    loads = []
    for file in reversed(files):
        parts = coverage.left_of(file)
        coverage.add(file)
        if parts:
            loads.append(Load(file, parts))
    return loads[::-1]


class Coverage:
    """The key groups that later files speak for, going through the files from the newest on.

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
        """Return the key groups for which a file that stands before all added ones is needed."""
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
    """Yield the runs of set bits, as ranges from `first` on."""
    while bits:
        skipped = (bits & -bits).bit_length() - 1
        bits >>= skipped
        count = (~bits & (bits + 1)).bit_length() - 1
        first += skipped
        yield KeyGroupRange(first, first + count - 1)
        first += count
        bits >>= count


_NAME = re.compile(rf"(\d{{12,}})-\d+-[A-Za-z0-9-]+\.(?:{CHANGELOG}|{SNAPSHOT})", re.ASCII)
"""The names of our files; other files beside them belong to others, and are no garbage."""

TRAIL_LENGTH = 256
"""The number of epochs that a worker's copy may lack and still be brought forward.

A range that Spark places on any of 32 hosts comes back to one of them after this many in all but
0.03 % of the cases; with 64, in all but 13 %.
"""

SNAPSHOT_BYTES = 16 << 20
"""About what one snapshot holds: one epoch pays for it, so a second of work would be too much."""

SNAPSHOTS_PER_RANGE_MAX = 64
"""More state than that times `SNAPSHOT_BYTES` makes the snapshots larger, not more."""

CHANGED_BYTES_MIN = 1 << 20
"""Smaller changelogs are not worth a snapshot."""

MERGED_FILES_MIN = 16
"""The number of changelogs of similar size that become one."""

SMALL_BYTES = 64 << 10
"""Below this, all sizes are alike."""

LIKE = 2
"""A changelog is of like size to all newer ones together if it is at most this much larger.

More than 1: else changelogs that grow a little smaller from epoch to epoch would never be merged.
"""

MERGED_BYTES_MAX = 16 << 20
"""Larger changelogs are left as they are until snapshots replace them; as `SNAPSHOT_BYTES`, more
where there is more state."""


def extend(base: StepState, version: Version, files: Iterable[StateFile]) -> StepState:
    """Return the state at the end of an epoch.

    Args:
        base: what the epoch started from.
        version: of the epoch; later than the base's: files are distinguished by their epochs, so a
            restored savepoint's are counted on from.
        files: what its tasks wrote: snapshots and merged changelogs of the base, which were made
            before anything was changed, and the epoch's own changelogs.
    """
    before = base.version.epoch if base.version else None
    assert before is None or version.epoch > before, f"epoch {version.epoch} is not after {before}"
    ordered = sorted(files, key=lambda each: (each.epoch, each.kind == CHANGELOG, each.first))
    for file in ordered:
        assert file.epoch in (before, version.epoch), file
        assert (file.epoch == before) == _is_rewrite(file), file
    everything = (*base.files, *ordered)
    if any(_is_rewrite(file) for file in ordered):
        whole = KeyGroupRange(0, base.max_parallelism - 1)
        everything = tuple(load.file for load in needed(everything, whole))
    return replace(base, files=everything, trail=(*base.trail, version)[-TRAIL_LENGTH:])


def due_snapshots(
    step: StepState, parallelism: int, changed_bytes_min: int = CHANGED_BYTES_MIN
) -> dict[int, KeyGroupRange]:
    """Return the key groups of which a task should write a snapshot before the next epoch, by task.

    At most one part of its range each, the one whose changelogs outgrew its snapshot most.

    Args:
        step: the committed state, which the snapshots are to hold.
        parallelism: of the next epoch.
        changed_bytes_min: smaller changelogs are not worth a snapshot.
    """
    due = {}
    for index, groups, loads in _by_task(step, parallelism):
        logs = [load for load in loads if load.file.kind == CHANGELOG]
        if sum(map(_share, logs)) <= changed_bytes_min:
            continue
        changed, held = _bytes(loads, groups, CHANGELOG), _bytes(loads, groups, SNAPSHOT)
        edges = _edges(groups.count, max(held.sum(), changed.sum()))
        weights = np.add.reduceat(changed, edges[:-1]) / np.maximum(
            np.add.reduceat(held, edges[:-1]), changed_bytes_min
        )
        heaviest = int(weights.argmax())
        if weights[heaviest] > 1:
            start, stop = edges[heaviest : heaviest + 2]
            due[index] = KeyGroupRange(groups.first + start, groups.first + stop - 1)
    return due


def due_merges(
    step: StepState, parallelism: int, files_min: int = MERGED_FILES_MIN
) -> dict[int, tuple[Load, ...]]:
    """Return the changelogs that a task should merge into one before the next epoch, by task.

    The newest one, and each older one that is not much larger than all newer ones together: so a
    byte is written a few times, and the number of files grows with the logarithm. Proof: a file
    that stops the merging is more than `LIKE` times all newer ones when it was looked at,
    and fewer than `files_min` lie between it and the next one that does.

    Args:
        step: the committed state.
        parallelism: of the next epoch.
        files_min: fewer are left as they are.
    """
    due = {}
    for index, _, loads in _by_task(step, parallelism, files_min):
        logs = [load for load in loads if load.file.kind == CHANGELOG]
        if len(logs) < files_min:
            continue
        held = sum(_share(load) for load in loads if load.file.kind == SNAPSHOT)
        bytes_max = max(MERGED_BYTES_MAX, held / SNAPSHOTS_PER_RANGE_MAX)
        total, first_epoch = _to_merge(logs, bytes_max)
        # The merged file will stand for everything from there on, so it must have everything.
        chosen = [load for load in logs if load.file.epochs.start >= first_epoch]
        if len(chosen) >= files_min or (len(chosen) > 1 and total >= bytes_max):
            due[index] = tuple(chosen)
    return due


def collectable(
    names: Iterable[str], committed_epoch: int, retained: Iterable[Iterable[StepState]]
) -> list[str]:
    """Return the files that nothing needs.

    Files of later epochs are left alone: an epoch under way, or another driver's, may name them.

    Args:
        names: the files there are, as `StateFile.path` has them.
        committed_epoch: the newest.
        retained: the state in each manifest that a restore may go back to; the newest one's too.
    """
    kept = {file.path for steps in retained for step in steps for file in step.files}
    return [
        name
        for name in names
        if name not in kept and (epoch := epoch_of(name)) is not None and epoch <= committed_epoch
    ]


def renamed(before: Iterable[StepState], after: Iterable[StepState]) -> tuple[list[str], list[str]]:
    """Return the files that a manifest names and the one before did not, and the other way round.

    Args:
        before: the state in one.
        after: the state in the other.
    """
    old, new = ({step.uid: step.files for step in steps} for steps in (before, after))
    added: list[str] = []
    gone: list[str] = []
    for uid in old.keys() | new.keys():
        files, others = old.get(uid, ()), new.get(uid, ())
        if others[: len(files)] == files:  # most epochs only add some
            added += [file.path for file in others[len(files) :]]
            continue
        names, other_names = ([file.path for file in each] for each in (files, others))
        added += set(other_names).difference(names)
        gone += set(names).difference(other_names)
    return added, gone


def epoch_of(name: str) -> int | None:
    """Return the epoch that wrote a state file, by its name; None where it is not one of ours."""
    found = _NAME.fullmatch(name.rpartition("/")[2])
    return int(found[1]) if found else None


def _is_rewrite(file: StateFile) -> bool:
    return file.kind == SNAPSHOT or file.first_epoch is not None


def _by_task(
    step: StepState, parallelism: int, files_min: int = 1
) -> Iterator[tuple[int, KeyGroupRange, list[Load]]]:
    """Yield the files of each task's key groups, for the tasks with `files_min` or more."""
    of_task: list[list[StateFile]] = [[] for _ in range(parallelism)]
    for file in step.files:
        first = operator_index(step.max_parallelism, parallelism, file.first)
        last = operator_index(step.max_parallelism, parallelism, file.last)
        for index in range(first, last + 1):
            of_task[index].append(file)
    for index, files in enumerate(of_task):
        if len(files) >= files_min:
            groups = key_group_range(step.max_parallelism, parallelism, index)
            yield index, groups, needed(files, groups)


def _to_merge(logs: Sequence[Load], bytes_max: float) -> tuple[float, float]:
    """Return how many bytes are to be merged, and from which epoch on."""
    total, first_epoch = 0.0, math.inf
    for load in reversed(logs):
        size = _share(load)
        like = max(LIKE * total, SMALL_BYTES) if total else math.inf
        if size > min(like, bytes_max) or total >= bytes_max:
            break
        total += size
        first_epoch = min(first_epoch, load.file.epochs.start)
    return total, first_epoch


def _share(load: Load) -> float:
    """Return about how many bytes of the file the load is: as if all key groups had the same."""
    inside = sum(part.count for part in load.groups)
    return load.file.size * inside / load.file.groups.count


def _bytes(loads: Sequence[Load], groups: KeyGroupRange, kind: str) -> npt.NDArray[np.float64]:
    """Return about how many bytes of such files each key group has."""
    sizes = np.zeros(groups.count)
    for file, parts in ((load.file, load.groups) for load in loads if load.file.kind == kind):
        for part in parts:
            start = part.first - groups.first
            sizes[start : start + part.count] += file.size / file.groups.count
    return sizes


def _edges(group_count: int, size: float) -> list[int]:
    """Cut a range so that each part has about `SNAPSHOT_BYTES`; halves of halves, which stay."""
    wanted = min(math.ceil(size / SNAPSHOT_BYTES), SNAPSHOTS_PER_RANGE_MAX, group_count)
    count = min(1 << max(0, wanted - 1).bit_length(), group_count)
    return [group_count * each // count for each in range(count + 1)]
