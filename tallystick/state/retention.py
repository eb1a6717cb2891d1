"""Which files make up a step's state, which are to be written anew, and which are rubbish.

Writing anew keeps three things within bounds, each at a cost that grows with what was changed, not
with what is held: bytes (a part of the key groups gets a snapshot when its changelogs outgrow the
last one), the number of files (changelogs of like size are merged, as in an LSM tree), and what
one epoch has to do of it (a part at a time).
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tallystick.state.handles import CHANGELOG, SNAPSHOT, StateFile, StepState, Version
from tallystick.state.key_groups import KeyGroupRange, key_group_range, operator_index
from tallystick.state.restore import Load, needed

_NAME = re.compile(rf"(\d{{12,}})-\d+-[A-Za-z0-9-]+\.(?:{CHANGELOG}|{SNAPSHOT})", re.ASCII)
"""Of our files; others that lie beside them are somebody's, and nobody's rubbish."""

TRAIL_LENGTH = 256
"""How many epochs a worker's copy may be behind and still be brought forward.

A range that Spark places on any of 32 hosts comes back to one of them after so many in all but
0.03 % of the cases; with 64, in all but 13 %.
"""

SNAPSHOT_BYTES = 16 << 20
"""About what one snapshot holds: one epoch pays for it, so a second of work would be too much."""

SNAPSHOTS_PER_RANGE_MAX = 64
"""More state than that times `SNAPSHOT_BYTES` makes the snapshots larger, not more."""

CHANGED_BYTES_MIN = 1 << 20
"""Smaller changelogs are not worth a snapshot."""

MERGED_FILES_MIN = 16
"""So many changelogs of like size become one."""

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
    """The state at the end of an epoch.

    Args:
        base: what the epoch started from.
        version: of the epoch; later than the base's: files are told apart by their epochs, so a
            restored savepoint's are counted on from, not anew.
        files: what its tasks wrote: snapshots and merged changelogs of the base, which were made
            before anything was changed, and the epoch's own changelogs.
    """
    before = base.version.epoch if base.version else None
    assert before is None or version.epoch > before, f"epoch {version.epoch} behind {before}"
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
    """The key groups of which a task should write a snapshot, before the next epoch; by task.

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
    """The changelogs that a task should merge into one, before the next epoch; by task.

    The newest one, and each older one that is not much larger than all newer ones together: so a
    byte is written a few times, and the number of files grows with the logarithm. Proof: a file
    that stops the merging is more than `LIKE` times what was behind it when that was looked at,
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
    """The files that nothing needs any more.

    Files of later epochs are left alone: an epoch under way, or another driver's, may name them.

    Args:
        names: the files there are, as `StateFile.path` has them.
        committed_epoch: the newest.
        retained: the state in each manifest that somebody may go back to; the newest one's too.
    """
    kept = {file.path for steps in retained for step in steps for file in step.files}
    return [
        name
        for name in names
        if name not in kept and (epoch := epoch_of(name)) is not None and epoch <= committed_epoch
    ]


def epoch_of(name: str) -> int | None:
    """The epoch that wrote a state file, by its name; None where it is not one of ours."""
    found = _NAME.fullmatch(name.rpartition("/")[2])
    return int(found[1]) if found else None


def _is_rewrite(file: StateFile) -> bool:
    return file.kind == SNAPSHOT or file.first_epoch is not None


def _by_task(
    step: StepState, parallelism: int, files_min: int = 1
) -> Iterator[tuple[int, KeyGroupRange, list[Load]]]:
    """What makes up each task's key groups, of the tasks with so many files."""
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
    """How many bytes are to be merged, and from which epoch on."""
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
    """About how many bytes of the file the load is: as if all key groups had the same."""
    inside = sum(part.count for part in load.groups)
    return load.file.size * inside / load.file.groups.count


def _bytes(loads: Sequence[Load], groups: KeyGroupRange, kind: str) -> npt.NDArray[np.float64]:
    """About how many bytes of such files each key group has."""
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
