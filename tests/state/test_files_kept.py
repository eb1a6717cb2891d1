"""Files, bytes and rubbish stay within bounds, at a cost that grows with what was changed."""

from dataclasses import replace

import pytest
from test_file_sets import changelog, snapshot

from tallystick.state.catalog import CHANGELOG, SNAPSHOT, StateFile, StepState, Version
from tallystick.state.file_sets import (
    MERGED_BYTES_MAX,
    SNAPSHOT_BYTES,
    TRAIL_LENGTH,
    collectable,
    due_merges,
    due_snapshots,
    extend,
)
from tallystick.state.key_groups import KeyGroupRange, key_group_range

MIB = 1 << 20
GROUPS = 128


def file(kind, epoch, groups, size, first_epoch=None):
    path = f"{kind} {epoch} {groups.first} {first_epoch}"
    ends = groups.first, groups.last
    return StateFile(path, kind, epoch, *ends, size, 10, 0, 1, first_epoch)


def empty():
    return StepState("counts", GROUPS, 1, "[]", 1)


def share(load):
    inside = sum(part.count for part in load.groups)
    return load.file.size * inside // load.file.groups.count


def grown(step, sizes, parallelism=1):
    """The step after an epoch in which each task changed so many bytes, and did what was due."""
    written = []
    for index, groups in due_snapshots(step, parallelism).items():
        assert key_group_range(GROUPS, parallelism, index).intersection(groups) == groups
        written.append(
            file(SNAPSHOT, step.version.epoch, groups, sizes.total * groups.count // GROUPS)
        )
    for index, loads in due_merges(step, parallelism).items():
        groups = key_group_range(GROUPS, parallelism, index)
        size = sum(share(load) for load in loads)
        first_epoch = min(load.file.epochs.start for load in loads)
        written.append(file(CHANGELOG, step.version.epoch, groups, size, first_epoch))
    epoch = step.version.epoch + 1 if step.version else 0
    changes = [
        file(CHANGELOG, epoch, key_group_range(GROUPS, parallelism, index), sizes.changed)
        for index in range(parallelism)
    ]
    return extend(step, Version(epoch, "t"), [*changes, *written]), written


class Sizes:
    """Of the state as it stands, and of what a task changes in an epoch."""

    def __init__(self, total, changed):
        self.total, self.changed = total, changed


def test_an_epoch_appends_snapshots_then_changelogs_and_its_version():
    base = extend(empty(), Version(4, "a"), [changelog(4)])
    files = [changelog(5, 5, 9), snapshot(4, 0, 2), changelog(5, 0, 4)]

    step = extend(base, Version(5, "b"), files)
    assert [state_file.path for state_file in step.files] == [
        changelog(4).path,
        snapshot(4, 0, 2).path,
        changelog(5, 0, 4).path,
        changelog(5, 5, 9).path,
    ]
    assert step.trail == (Version(4, "a"), Version(5, "b"))
    assert step.version == Version(5, "b")


def test_files_go_when_all_their_key_groups_are_in_later_snapshots():
    base = extend(empty(), Version(0, "a"), [changelog(0, 0, 9)])
    half = extend(base, Version(1, "b"), [snapshot(0, 0, 4)])
    assert changelog(0, 0, 9) in half.files

    whole = extend(half, Version(2, "c"), [snapshot(1, 5, 9), changelog(2, 3, 3)])
    assert whole.files == (snapshot(0, 0, 4), snapshot(1, 5, 9), changelog(2, 3, 3))


def test_the_trail_is_bounded():
    step = empty()
    for epoch in range(TRAIL_LENGTH + 5):
        step = extend(step, Version(epoch, "t"), [])
    assert [version.epoch for version in step.trail] == list(range(5, TRAIL_LENGTH + 5))


@pytest.mark.parametrize("files", [[changelog(3)], [snapshot(5)], [changelog(6)]])
def test_files_of_other_epochs_are_a_bug(files):
    base = extend(empty(), Version(4, "a"), [])
    with pytest.raises(AssertionError):
        extend(base, Version(5, "b"), files)


def test_an_epoch_is_later_than_its_base():
    with pytest.raises(AssertionError, match="epoch 4 is not after 4"):
        extend(extend(empty(), Version(4, "a"), []), Version(4, "b"), [])


def test_small_changes_are_not_worth_a_snapshot():
    step = empty()
    for _ in range(100):
        step, _ = grown(step, Sizes(total=1000, changed=500), parallelism=2)
        assert not due_snapshots(step, 2)


def test_bytes_are_bounded_by_the_state_and_written_a_few_times():
    """64 MiB of state, 1 MiB changed by each of 2 tasks per epoch."""
    step, sizes, snapshots = empty(), Sizes(total=64 * MIB, changed=MIB), 0
    for epoch in range(200):
        step, written = grown(step, sizes, parallelism=2)
        cost = [file_written.size for file_written in written if file_written.kind == SNAPSHOT]
        assert all(size <= 2 * SNAPSHOT_BYTES for size in cost) or epoch < 40
        snapshots += sum(cost)
        assert sum(state_file.size for state_file in step.files) < 4 * sizes.total
    assert snapshots < 2 * 200 * 2 * MIB
    assert len(step.files) < 100


@pytest.mark.parametrize("parallelism", [1, 3])
def test_the_number_of_files_is_bounded_however_large_the_state(parallelism):
    """A gigabyte, a few kilobytes per epoch: no snapshot may be the price."""
    first_snapshot = file(SNAPSHOT, 0, KeyGroupRange(0, GROUPS - 1), 1 << 30)
    step = extend(extend(empty(), Version(0, "t"), []), Version(1, "t"), [first_snapshot])
    epochs, written_bytes = 400, 0
    for _ in range(epochs):
        step, written = grown(step, Sizes(total=1 << 30, changed=4096), parallelism)
        assert all(file_written.kind == CHANGELOG for file_written in written)
        written_bytes += sum(file_written.size for file_written in written)
        assert len(step.files) < 40 * parallelism
    assert written_bytes < 8 * epochs * 4096 * parallelism


def written_with(sizes, parallelism, snapshot_size):
    """What it took to write changelogs of such sizes over a state, and how many files it had."""
    snapshots = (
        [file(SNAPSHOT, 0, KeyGroupRange(0, GROUPS - 1), snapshot_size)] if snapshot_size else []
    )
    step = extend(extend(empty(), Version(0, "t"), []), Version(1, "t"), snapshots)
    merged_bytes, most, largest = 0, 0, 0
    for size in sizes:
        step, written = grown(step, Sizes(snapshot_size, size), parallelism)
        merged = [file_written.size for file_written in written if file_written.kind == CHANGELOG]
        merged_bytes += sum(merged)
        largest = max([largest, *merged])
        most = max(most, len(step.files))
    return merged_bytes / (sum(sizes) * parallelism), most / parallelism, largest


@pytest.mark.parametrize("parallelism", [1, 4])
@pytest.mark.parametrize("changed", [20_000, 66 << 10, 100_000, MIB, 5 * MIB])
def test_files_and_work_are_bounded_whatever_an_epoch_changes(changed, parallelism):
    amplification, most, largest = written_with([changed] * 300, parallelism, 200 * MIB)
    assert amplification < 5
    assert most < 50
    assert largest <= 2 * MERGED_BYTES_MAX


@pytest.mark.parametrize(
    "sizes",
    [
        [MIB - 2000 * epoch for epoch in range(500)],
        [MIB if epoch % 15 == 0 else 20_000 for epoch in range(500)],
        [int(20_000 * 1.3 ** (epoch % 20)) for epoch in range(500)],
        [int(3_000_000 / 1.3 ** (epoch % 20)) for epoch in range(500)],
    ],
    ids=["evening", "spikes", "swelling", "subsiding"],
)
def test_changelogs_of_unlike_sizes_are_merged_too(sizes):
    amplification, most, _ = written_with(sizes, 1, 1 << 30)
    assert amplification < 6
    assert most < 130


def test_more_state_makes_the_changelogs_larger_not_more():
    _, most, _ = written_with([32 * MIB] * 600, 1, 1 << 40)
    assert most < 64


def test_large_changelogs_are_not_merged():
    sizes = [MERGED_BYTES_MAX + 1] * 50
    assert written_with(sizes, 1, 64 * MIB)[0] == 0


def test_after_a_rescale_ranges_are_looked_at_as_they_are_now():
    step = empty()
    for parallelism in (1, 2, 3, 2, 5, 3, 5, 6, 5, 2, 5, 3, 2, 1):
        for _ in range(20):
            step, _ = grown(step, Sizes(total=8 * MIB, changed=MIB // 4), parallelism)
            assert len(step.files) < 200


def test_collectable_is_what_nobody_retains_up_to_the_committed_epoch():
    """A later epoch's files may be another driver's, or of the epoch under way."""
    names = [
        f"keyed-state/counts/{epoch:012d}-0-{nonce}.changelog"
        for epoch in (3, 4, 5)
        for nonce in "ab"
    ]
    kept = StateFile(names[2], CHANGELOG, 4, 0, 1, 1, 1, 1, 1)
    step = StepState("counts", GROUPS, 1, "[]", 1, files=(kept,))

    assert collectable([*names, "keyed-state/counts/notes.txt"], 4, [[], [step]]) == [
        names[0],
        names[1],
        names[3],
    ]


def test_a_merge_takes_all_that_it_will_stand_for():
    """Two tasks wrote epoch 1, the larger file first: one task merges both, or none."""
    large = file(CHANGELOG, 1, KeyGroupRange(0, 63), MIB)
    small = file(CHANGELOG, 1, KeyGroupRange(64, 127), 1000)
    rest = [file(CHANGELOG, epoch, KeyGroupRange(0, 127), 1000) for epoch in range(2, 22)]
    older = file(CHANGELOG, 0, KeyGroupRange(0, 127), MIB)
    step = replace(empty(), files=(older, large, small, *rest))

    merged = [load.file for load in due_merges(step, 1)[0]]
    assert merged == [large, small, *rest]


def test_a_bulk_load_is_not_written_again_at_once():
    """A gigabyte in one epoch: a part of it goes into a snapshot in each of the next epochs."""
    first = file(CHANGELOG, 0, KeyGroupRange(0, GROUPS - 1), 1 << 30)
    step = extend(empty(), Version(0, "t"), [first])

    assert due_snapshots(step, 1)[0].count == GROUPS // 64
