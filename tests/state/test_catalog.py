"""What a manifest says of state reads back, and stays short."""

import json
from dataclasses import replace

import pytest

from tallystick.state.catalog import (
    CHANGELOG,
    SNAPSHOT,
    StateField,
    StateFile,
    StepState,
    Version,
)
from tallystick.state.evolution import evolved
from tallystick.state.file_sets import TRAIL_LENGTH, extend


def read_back(step):
    return StepState.from_json(json.loads(json.dumps(step.to_json())))


@pytest.mark.parametrize(
    "epochs", [[], [0], [1], [0, 1, 2], [7, 8, 12, 13, 40], range(2**40, 2**40 + 9)]
)
def test_a_trail_reads_back(epochs):
    trail = tuple(Version(epoch, f"{epoch:x} token") for epoch in epochs)
    step = StepState("counts", 128, 1, "[]", 1, trail=trail)
    assert read_back(step) == step


def test_a_copy_may_be_hundreds_of_epochs_behind_at_a_few_bytes_each():
    """Wherever Spark places a range: it comes back to one of 32 hosts in time, nearly always."""
    step = StepState("counts", 128, 1, "[]", 1)
    without = len(json.dumps(step.to_json()))
    for epoch in range(1000, 2000):
        step = extend(step, Version(epoch, f"{epoch:016x}"), [])

    assert (31 / 32) ** len(step.trail) < 0.001
    assert len(json.dumps(step.to_json())) - without < 21 * TRAIL_LENGTH
    assert read_back(step).trail == step.trail


def test_former_schemas_read_back_and_end_with_the_last_file_that_has_entries_of_one():
    old, new = (StateField("s", 1, "columns", "", text) for text in ('[["a","int32"]]', WIDER))
    step = StepState("counts", 128, 1, "[]", 1, (old,), 2)
    step = extend(step, Version(3, "t"), [changelog_of(3)])
    assert "schema" not in json.dumps(step.to_json()["files"]), "every release reads it"

    changed = evolved(step, [new], 2, {}, 0, {})
    assert changed.copy_name != step.copy_name
    assert evolved(changed, [new], 2, {}, 0, {}) == changed
    assert evolved(step, [new], 2, {}, 0, {}) == changed, "each attempt finds the same name"
    later = extend(changed, Version(4, "t"), [changelog_of(4)])
    assert read_back(later) == later
    assert [file.schema for file in later.files] == ["", changed.schema]
    with pytest.raises(ValueError, match="there is none of that name"):
        read_back(replace(later, former=()))

    snapshot = replace(changelog_of(4), kind=SNAPSHOT, path=f"{PLACE}/4.snapshot")
    whole = extend(later, Version(5, "t"), [snapshot])
    assert [file.schema for file in whole.files] == [changed.schema]
    assert (whole.former, whole.schema) == ((), changed.schema)


PLACE = "keyed-state/counts"
WIDER = '[["a","int64"],["b","string"]]'


def changelog_of(epoch):
    return StateFile(f"{PLACE}/{epoch}.changelog", CHANGELOG, epoch, 0, 127, 100, 10, 0, 1)
