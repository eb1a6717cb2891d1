"""What a store lacks, and nothing else."""

import pytest

from tallystick.state.catalog import CHANGELOG, SNAPSHOT, StateFile, StepState, Version
from tallystick.state.file_sets import Load, needed, steps_from
from tallystick.state.key_groups import KeyGroupRange

ALL = KeyGroupRange(0, 9)


def changelog(epoch, first=0, last=9, first_epoch=None):
    path = f"{epoch}-{first}-{last}-{first_epoch}"
    return StateFile(path, CHANGELOG, epoch, first, last, 100, 10, 0, 1, first_epoch)


def snapshot(epoch, first=0, last=9):
    return StateFile(f"{epoch}-{first}-{last}", SNAPSHOT, epoch, first, last, 100, 10, 0, 1)


def step(*files, epochs=10):
    trail = tuple(Version(epoch, f"token {epoch}") for epoch in range(epochs))
    return StepState("counts", 10, 1, "[]", 1, files=files, trail=trail)


def at(epoch):
    return Version(epoch, f"token {epoch}")


def loads(*pairs):
    return [Load(file, tuple(KeyGroupRange(*part) for part in parts)) for file, *parts in pairs]


def test_a_store_of_the_trail_gets_what_is_newer():
    files = [changelog(epoch) for epoch in range(10)]

    assert steps_from(step(*files), at(7), ALL) == loads((files[8], (0, 9)), (files[9], (0, 9)))
    assert steps_from(step(*files), at(9), ALL) == []


@pytest.mark.parametrize("have", [None, Version(3, "of another run"), Version(99, "token 99")])
def test_any_other_store_starts_from_nothing(have):
    """Epoch numbers repeat: one alone says nothing."""
    files = [changelog(0), changelog(1)]

    assert steps_from(step(*files), have, ALL) == [
        ALL,
        *loads((files[0], (0, 9)), (files[1], (0, 9))),
    ]


def test_only_the_part_of_a_range_is_asked_for():
    files = [changelog(0, 0, 4), changelog(0, 5, 9), snapshot(0, 2, 3)]

    assert steps_from(step(*files), None, KeyGroupRange(3, 6)) == [
        KeyGroupRange(3, 6),
        *loads((files[0], (4, 4)), (files[1], (5, 6)), (files[2], (3, 3))),
    ]


def test_a_newer_snapshot_replaces_what_the_store_has_of_its_key_groups():
    """Deletions before it are in no file any more."""
    files = [changelog(4), snapshot(5, 3, 6), changelog(6)]

    assert steps_from(step(*files), at(3), ALL) == [
        *loads((files[0], (0, 2), (7, 9))),
        KeyGroupRange(3, 6),
        *loads((files[1], (3, 6)), (files[2], (0, 9))),
    ]
    assert steps_from(step(*files), at(5), ALL) == loads((files[2], (0, 9)))


def test_a_merged_changelog_stands_for_those_it_was_made_of_and_no_others():
    older, parts = changelog(1), [changelog(2), changelog(3, 0, 4), changelog(3, 5, 9)]
    between, merged = snapshot(1, 0, 1), changelog(3, 0, 7, first_epoch=2)

    assert needed([older, between, *parts, merged], ALL) == loads(
        (older, (2, 9)), (between, (0, 1)), (parts[0], (8, 9)), (parts[2], (8, 9)), (merged, (0, 7))
    )


def test_a_store_in_the_middle_of_a_merged_changelog_gets_all_of_it():
    """It holds the newest value of each key, whatever the store knew already."""
    merged, newest = changelog(3, first_epoch=1), changelog(4)

    assert steps_from(step(merged, newest), at(2), ALL) == loads((merged, (0, 9)), (newest, (0, 9)))
    assert steps_from(step(merged, newest), at(3), ALL) == loads((newest, (0, 9)))


def test_a_merged_changelog_is_merged_again():
    first, second = changelog(2, first_epoch=0), changelog(4, first_epoch=0)

    assert needed([first, changelog(3), changelog(4), second], ALL) == loads((second, (0, 9)))
    late = changelog(4, first_epoch=3)
    assert needed([first, changelog(3), late], ALL) == loads((first, (0, 9)), (late, (0, 9)))
