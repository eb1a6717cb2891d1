"""Which id each state of a step has: given once, kept for the life of the checkpoint.

Invariant: an id is never used for two states. So the entries of a deleted state need no search:
nothing reads them any more, and the next snapshot leaves them out.
"""

from collections.abc import Iterable
from dataclasses import replace

from tallystick.errors import OptionError
from tallystick.state.ddl import ddl_of
from tallystick.state.handles import StateField, StepState
from tallystick.state.processing import COLUMNS, DELETED, Declared
from tallystick.state.schema_text import schema_from_text

STATE_ID_MAX = 0xEF
"""Ids above are the step's own: timers and the index of entries that expire."""


def settle(
    uid: str, declared: Iterable[Declared], base: StepState | None
) -> tuple[tuple[StateField, ...], int]:
    """Match the states that a function uses with those that the checkpoint holds.

    A state that is held but not declared any more is kept, as Spark keeps it: only a declaration of
    kind `DELETED` (`deleteIfExists`) drops one.

    Args:
        uid: of the step, for messages.
        declared: in the order of their declaration.
        base: what the checkpoint holds of the step; None: nothing.

    Returns:
        The step's states and its next free id.

    Raises:
        OptionError: a state is held with another kind or schema, or there are too many.
    """
    held = {field.name: field for field in base.fields} if base else {}
    next_id = base.next_id if base else 1
    for state in declared:
        if state.kind == DELETED:
            held.pop(state.name, None)
        elif state.name in held:
            held[state.name] = _same(uid, state, held[state.name])
        else:
            if next_id > STATE_ID_MAX:
                raise OptionError(
                    f"step {uid}: no id is left for state {state.name!r}: {STATE_ID_MAX} states "
                    f"were declared over the life of this checkpoint, and ids are not used twice. "
                    f"Give the step a new uid, or start from a new checkpoint"
                )
            held[state.name] = StateField(
                state.name, next_id, state.kind, state.key_schema, state.value_schema, state.ttl_ms
            )
            next_id += 1
    return tuple(held.values()), next_id


def _same(uid: str, state: Declared, held: StateField) -> StateField:
    # How long entries live may change; whether they end at all is part of how they are stored.
    now = _shape(state.kind, state.key_schema, state.value_schema, state.ttl_ms)
    before = _shape(held.kind, held.key_schema, held.value_schema, held.ttl_ms)
    if now != before and state.kind == COLUMNS:
        raise OptionError(
            f"step {uid}: the checkpoint holds {before}, and the function's state is {now}. "
            f"Declare it as it was; or give the step a new uid, so that it begins without state, "
            f"and start once with allow_dropped_state=[{uid!r}] to give up what is held"
        )
    if now != before:
        raise OptionError(
            f"step {uid}: the checkpoint holds state {state.name!r} as {before}, and the function "
            f"declares it as {now}. Declare it as it was; or give the new one another name, and "
            f"call deleteIfExists({state.name!r}) in init() to drop what is held"
        )
    return replace(held, ttl_ms=state.ttl_ms)


def _shape(kind: str, key_schema: str, value_schema: str, ttl_ms: int) -> str:
    if kind == COLUMNS:
        return f"the columns {ddl_of(schema_from_text(value_schema))!r}"
    schemas = f"{key_schema} -> {value_schema}" if key_schema else value_schema
    return f"{kind} of {schemas}, {'with' if ttl_ms else 'without'} a TTL"
