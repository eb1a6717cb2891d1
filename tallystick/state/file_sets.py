"""The files of a step's state: the files to restore from, the files to rewrite, and garbage.

Restoring brings a local copy of a range of key groups from its version to the committed one.
Invariants: the steps, done in order on a store at the version from which they start, leave the
committed state and nothing else. Applying a changelog twice changes nothing, for it holds values.
A deletion in a changelog that a snapshot made superfluous is known from the snapshot alone: so a
snapshot newer than the store replaces the store's key groups, it is not laid over them.

Rewriting keeps three things within bounds, each at a cost that grows with the changes, not with
the state: bytes (a part of the key groups gets a snapshot when its changelogs outgrow the last
snapshot), the number of files (changelogs of like size are merged, as in an LSM tree), and the work
of one epoch (a part at a time).
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile

import numpy as np
import numpy.typing as npt

from tallystick.state.catalog import (
    CHANGELOG,
    SNAPSHOT,
    FormerSchema,
    StateFile,
    StepState,
    Version,
)
from tallystick.state.key_groups import KeyGroupRange, key_group_range, operator_index


@dataclass(frozen=True, slots=True)
class Load:
    """A step of a restore: apply a file's entries of some key groups."""

    file: StateFile
    groups: tuple[KeyGroupRange, ...]


Step = KeyGroupRange | Load
"""A step of a restore: clear a range of key groups, or load a file."""


def steps_from(step: StepState, have: Version | None, groups: KeyGroupRange) -> list[Step]:
    """Return the steps that bring a store's key groups to the committed version.

    Args:
        step: the committed state.
        have: the store's version; None, or a version that is not in the trail: from nothing.
        groups: the key groups of the store.
    """
    is_known = have is not None and have in step.trail
    files = touching(step.files, groups)
    if is_known and have is not None:
        files = [file for file in files if file.epoch > have.epoch]
    steps: list[Step] = [] if is_known else [groups]
    for load in needed(files, groups):
        if is_known and load.file.kind == SNAPSHOT:
            steps.extend(load.groups)
        steps.append(load)
    return steps


def touching(files: Iterable[StateFile], groups: KeyGroupRange) -> list[StateFile]:
    """Return the files that cover any key group of a range."""
    first, last = groups.first, groups.last
    return [file for file in files if file.first <= last and file.last >= first]


def needed(files: Sequence[StateFile], groups: KeyGroupRange) -> list[Load]:
    """Return the parts of files that no later file makes superfluous, in the files' order."""
    coverage = Coverage(groups)
    loads = []
    for file in reversed(files):
        parts = coverage.left_of(file)
        coverage.add(file)
        if parts:
            loads.append(Load(file, parts))
    return loads[::-1]


class Coverage:
    """The key groups that later files cover, on a walk through the files from the newest on.

    Sets of key groups are the bits of whole numbers, for speed: drivers do this for every epoch.
    """

    def __init__(self, groups: KeyGroupRange) -> None:
        self._groups = groups
        self._snapshot = 0
        self._merged = 0
        self._merged_from: dict[int, int] = {}

    def add(self, file: StateFile) -> None:
        """Add a file that stands before all files added so far."""
        if file.kind == SNAPSHOT:
            self._snapshot |= self._window(file)
        elif file.first_epoch is not None:
            window = self._window(file)
            self._merged |= window
            self._merged_from[file.first_epoch] = (
                self._merged_from.get(file.first_epoch, 0) | window
            )

    def left_of(self, file: StateFile) -> tuple[KeyGroupRange, ...]:
        """Return the key groups of an earlier file for which no added file supersedes the file."""
        window = self._window(file)
        remaining = window & ~self._snapshot
        if file.kind != SNAPSHOT and remaining & self._merged:
            start = file.epochs.start
            for first_epoch, merged in self._merged_from.items():
                if start >= first_epoch:
                    remaining &= ~merged
        if remaining == window:
            return (file.groups.intersection(self._groups),) if window else ()
        return tuple(_runs(remaining, self._groups.first))

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
"""The size of one snapshot, about: one epoch pays for it, so a second of work would be too much."""

SNAPSHOTS_PER_RANGE_MAX = 64
"""More state than that times `SNAPSHOT_BYTES` makes the snapshots larger, not more."""

CHANGED_BYTES_MIN = 1 << 20
"""Smaller changelogs are not worth a snapshot."""

MERGED_FILES_MIN = 16
"""The number of changelogs of similar size that become one."""

SMALL_BYTES = 64 << 10
"""All sizes below count as alike."""

LIKE = 2
"""A changelog is of like size to all newer ones together if it is at most this much larger.

More than 1: else changelogs that grow a little smaller from epoch to epoch would never be merged.
"""

MERGED_BYTES_MAX = 16 << 20
"""Larger changelogs stay as they are until snapshots replace them; the limit grows with the state,
as the size of snapshots does."""


def extend(base: StepState, version: Version, files: Iterable[StateFile]) -> StepState:
    """Return a step's state at the end of an epoch.

    Args:
        base: the state from which the epoch started.
        version: of the epoch; later than the base's: epochs tell files apart, so the epochs of a
            restored savepoint are counted on.
        files: the files that the epoch's tasks wrote: snapshots and merged changelogs of the base,
            made before any change, and the epoch's own changelogs.
    """
    before = base.version.epoch if base.version else None
    assert before is None or version.epoch > before, f"epoch {version.epoch} is not after {before}"
    ordered = sorted(files, key=lambda file: (file.epoch, file.kind == CHANGELOG, file.first))
    for file in ordered:
        assert file.epoch in (before, version.epoch), file
        assert (file.epoch == before) == _is_rewrite(file), file
    everything = (*base.files, *(replace(file, schema=base.schema) for file in ordered))
    if any(_is_rewrite(file) for file in ordered):
        whole = KeyGroupRange(0, base.max_parallelism - 1)
        everything = tuple(load.file for load in needed(everything, whole))
    trail = (*base.trail, version)[-TRAIL_LENGTH:]
    return replace(base, files=everything, trail=trail, former=_former_of(base, everything))


def _former_of(base: StepState, files: Iterable[StateFile]) -> tuple[FormerSchema, ...]:
    """Return the former schemas from the oldest one that a file has entries of."""
    if not base.former:
        return ()
    used = {file.schema for file in files}
    kept = dropwhile(lambda former: former.schema not in used, base.former)
    return tuple(kept)


def due_snapshots(
    step: StepState, parallelism: int, changed_bytes_min: int = CHANGED_BYTES_MIN
) -> dict[int, KeyGroupRange]:
    """Return the key groups of which a task should write a snapshot before the next epoch, by task.

    At most one part of a task's range: the part whose changelogs outgrew its snapshot most.

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
        changed, snapshots = _bytes(loads, groups, CHANGELOG), _bytes(loads, groups, SNAPSHOT)
        edges = _edges(groups.count, max(snapshots.sum(), changed.sum()))
        weights = np.add.reduceat(changed, edges[:-1]) / np.maximum(
            np.add.reduceat(snapshots, edges[:-1]), changed_bytes_min
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
        snapshot_bytes = sum(_share(load) for load in loads if load.file.kind == SNAPSHOT)
        bytes_max = max(MERGED_BYTES_MAX, snapshot_bytes / SNAPSHOTS_PER_RANGE_MAX)
        total, first_epoch = _to_merge(logs, bytes_max)
        # The merged file will stand for everything from there on, so it must have everything.
        chosen = [load for load in logs if load.file.epochs.start >= first_epoch]
        if len(chosen) >= files_min or (len(chosen) > 1 and total >= bytes_max):
            due[index] = tuple(chosen)
    return due


def collectable(
    names: Iterable[str], committed_epoch: int, retained: Iterable[Iterable[StepState]]
) -> list[str]:
    """Return the garbage among state files: files that no retained manifest names.

    Files of later epochs are left alone: an epoch under way, or another driver's, may name them.

    Args:
        names: the existing files, as `StateFile.path` has them.
        committed_epoch: the newest committed epoch.
        retained: the state in each manifest that a restore may go back to; the newest one's too.
    """
    kept = {file.path for steps in retained for step in steps for file in step.files}
    return [
        name
        for name in names
        if name not in kept and (epoch := epoch_of(name)) is not None and epoch <= committed_epoch
    ]


def renamed(before: Iterable[StepState], after: Iterable[StepState]) -> tuple[list[str], list[str]]:
    """Compare the file names in two manifests; return the added and the dropped names.

    Args:
        before: the state in the earlier manifest.
        after: the state in the later manifest.
    """
    old, new = ({step.uid: step.files for step in steps} for steps in (before, after))
    added: list[str] = []
    gone: list[str] = []
    for uid in old.keys() | new.keys():
        files, others = old.get(uid, ()), new.get(uid, ())
        if others[: len(files)] == files:  # most epochs only add some
            added += [file.path for file in others[len(files) :]]
            continue
        names, other_names = ([file.path for file in listed] for listed in (files, others))
        added += set(other_names).difference(names)
        gone += set(names).difference(other_names)
    return added, list(set(gone).difference(added))  # files of a step with a new uid are both


def epoch_of(name: str) -> int | None:
    """Return the epoch in a state file's name; None for a name of another form."""
    match = _NAME.fullmatch(name.rpartition("/")[2])
    return int(match[1]) if match else None


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
    """Return the number of bytes to merge, and the first epoch of their changelogs."""
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
    """Estimate the bytes of a load, as if all key groups of the file had the same size."""
    inside = sum(part.count for part in load.groups)
    return load.file.size * inside / load.file.groups.count


def _bytes(loads: Sequence[Load], groups: KeyGroupRange, kind: str) -> npt.NDArray[np.float64]:
    """Estimate the bytes of each key group in the files of one kind."""
    sizes = np.zeros(groups.count)
    for file, parts in ((load.file, load.groups) for load in loads if load.file.kind == kind):
        for part in parts:
            start = part.first - groups.first
            sizes[start : start + part.count] += file.size / file.groups.count
    return sizes


def _edges(group_count: int, size: float) -> list[int]:
    """Halve a range until parts have about `SNAPSHOT_BYTES`; so edges stay when the state grows."""
    wanted = min(math.ceil(size / SNAPSHOT_BYTES), SNAPSHOTS_PER_RANGE_MAX, group_count)
    count = min(1 << max(0, wanted - 1).bit_length(), group_count)
    return [group_count * part // count for part in range(count + 1)]
