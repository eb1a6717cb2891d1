"""What a manifest says of state reads back, and stays short."""

import json

import pytest

from tallystick.state.catalog import StepState, Version
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
