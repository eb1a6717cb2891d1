"""Each class of error has a row that says what it means and what to do."""

import inspect

import pytest

from tallystick import errors
from tallystick.errors import TallystickError
from tallystick.ops.remedies import CHECKPOINT, REMEDIES, remedy_of

CLASSES = [
    member
    for _, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, TallystickError)
]
GENERAL = remedy_of(Exception)


def test_no_class_has_two_rows():
    named = [error for row in REMEDIES for error in row.errors]

    assert len(named) == len(set(named))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_class_of_ours_has_a_row_of_its_own_kind(kind):
    row = remedy_of(kind)

    assert any(issubclass(kind, error) for error in row.errors)
    # What these say is all.
    is_general = kind in (TallystickError, errors.QueryEndedError, errors.UnknownNameError)
    assert (row is GENERAL) == is_general


def test_what_is_not_ours_has_the_general_row():
    class TheirError(ValueError):
        pass

    assert remedy_of(TheirError) is remedy_of(KeyboardInterrupt) is GENERAL


def test_a_command_can_be_typed_whatever_the_checkpoint_is_called():
    row = remedy_of(errors.StateFileError)

    assert CHECKPOINT in row.command
    assert row.command_for("/data/it's #1") == (
        """tallystick inspect '/data/it'"'"'s #1' --verify"""
    )
