"""Ids of states: kept, never used again, and what changed is refused."""

import json

import pyarrow as pa
import pytest

from tallystick.errors import OptionError
from tallystick.state.catalog import StateField, StepState
from tallystick.state.compatibility import STATE_ID_MAX, settle
from tallystick.state.functions.keyed_batch import Update
from tallystick.state.functions.processing import DELETED, StateDeclaration
from tallystick.state.functions.vectorised import vectorised
from tallystick.state.keys import KeyCodec

KEY = KeyCodec(pa.schema([("user", pa.string())]))


def state_of(*fields: StateField, next_id: int) -> StepState:
    return StepState("step", 128, 1, "", 1, fields, next_id)


def struct(column: str, kind: str = "integer") -> str:
    """A schema as a checkpoint has it."""
    field = {"name": column, "type": kind, "nullable": True, "metadata": {}}
    return json.dumps({"type": "struct", "fields": [field]})


N, M = struct("n"), struct("m")
A, B = StateField("a", 1, "value", "", N), StateField("b", 2, "list", "", N, 500)


def test_new_states_get_the_next_ids_and_held_ones_keep_theirs():
    fresh = settle(
        "step",
        [StateDeclaration("a", "value", "", N), StateDeclaration("b", "list", "", N)],
        None,
    )
    assert [(field.name, field.state_id) for field in fresh[0]] == [("a", 1), ("b", 2)]

    more = [StateDeclaration("c", "value", "", N), StateDeclaration("a", "value", "", N)]
    fields, next_id = settle("step", more, state_of(A, B, next_id=5))

    assert {field.name: field.state_id for field in fields} == {"a": 1, "b": 2, "c": 5}
    assert next_id == 6


def test_a_deleted_state_is_gone_and_its_id_with_it():
    again = [StateDeclaration("a", DELETED, "", ""), StateDeclaration("x", DELETED, "", "")]
    fields, next_id = settle("step", again, state_of(A, B, next_id=3))
    assert (fields, next_id) == ((B,), 3)

    fields, next_id = settle(
        "step", [StateDeclaration("a", "map", "k", N)], state_of(*fields, next_id=3)
    )
    assert ([field.state_id for field in fields], next_id) == ([2, 3], 4)


@pytest.mark.parametrize(
    "changed",
    [
        StateDeclaration("a", "list", "", N),
        StateDeclaration("a", "value", "", M),
        StateDeclaration("a", "map", "k", N),
    ],
)
def test_a_state_that_changed_is_refused(changed):
    with pytest.raises(OptionError, match="step s: the checkpoint holds state 'a' as value of"):
        settle("s", [changed], state_of(A, next_id=2))


def columns(ddl: str) -> StateDeclaration:
    """As a vectorised function declares its state."""
    (declared,) = vectorised(lambda batch: Update(), state=ddl).declared(KEY)
    return declared


def test_columns_that_changed_are_refused_with_what_can_be_done_about_them():
    fields, next_id = settle("s", [columns("n bigint, at timestamp")], None)
    base = state_of(*fields, next_id=next_id)

    assert settle("s", [columns("n bigint, at timestamp")], base) == (fields, next_id)
    with pytest.raises(OptionError) as refused:
        settle("s", [columns("n int, at timestamp")], base)
    for words in (
        "holds the columns 'n bigint, at timestamp'",
        "state is the columns 'n int, at timestamp'",
        "column 'n' goes from bigint to int, which does not hold all of its values",
        "a new uid",
        "allow_dropped_state=['s']",
    ):
        assert words in str(refused.value)
    assert "deleteIfExists" not in str(refused.value)


def test_another_time_to_live_is_taken():
    fields, _ = settle("step", [StateDeclaration("b", "list", "", N, 900)], state_of(B, next_id=3))

    assert fields == (StateField("b", 2, "list", "", N, 900),)


def test_ids_end():
    with pytest.raises(OptionError, match="no id is left for state 'z'"):
        settle("step", [StateDeclaration("z", "value", "", N)], state_of(next_id=STATE_ID_MAX + 1))
