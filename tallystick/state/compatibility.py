"""A comparison of a pipeline's keyed steps with the state in its checkpoint.

State belongs to a step's uid. The key, its hash and the number of key groups decide where an entry
lies, so they cannot change under existing state. A step's own states each have an id, given once
and kept for the life of the checkpoint.

Invariant: an id is never used for two states. So the entries of a deleted state need no search:
nothing reads them, and the next snapshot leaves them out.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tallystick.codec.ddl import ddl_of
from tallystick.errors import OptionError
from tallystick.state.catalog import StateField, StepState
from tallystick.state.evolution import (
    REFUSED,
    REMOVED,
    ROUNDED,
    Renamed,
    ambiguous,
    changed_since,
    column_changes,
    renames,
)
from tallystick.state.functions.processing import (
    COLUMNS,
    DELETED,
    ELEMENTS,
    NO_TIME,
    OWN_KINDS,
    PANES,
    ROWS,
    TABLE,
    StateDeclaration,
)
from tallystick.state.functions.vectorised import TIMER
from tallystick.state.functions.windows import windows_text
from tallystick.state.key_groups import (
    KeyGroupRange,
    default_max_parallelism,
    key_group_range,
)
from tallystick.state.keys import HASH_VERSION
from tallystick.state.meaning import FUNCTION, OWN_FUNCTION, Meaning, changes
from tallystick.state.schema import schema_from_text
from tallystick.state.time_to_live import has_ttl

STATE_ID_MAX = 0xEF
"""Ids above are the step's own: timers and the index of entries that expire."""


def dropped_column_word(uid: str, column: str) -> str:
    """Return the word by which a user accepts that a column of state is forgotten."""
    return f"dropped-column-{uid}-{column}"


def rounded_column_word(uid: str, column: str) -> str:
    """Return the word by which a user accepts that values of a column are rounded."""
    return f"rounded-column-{uid}-{column}"


def settle(
    uid: str,
    declared: Iterable[StateDeclaration],
    base: StepState | None,
    renamed: Renamed | None = None,
    accepted: Collection[str] = (),
) -> tuple[tuple[StateField, ...], int]:
    """Match the states that a function declares with the step's states in the checkpoint.

    A state of the checkpoint that is no longer declared is kept, as in Spark: only a declaration of
    kind `DELETED` (`deleteIfExists`) drops a state.

    Args:
        uid: of the step, for messages.
        declared: the function's states, in the order of their declaration.
        base: the step's state in the checkpoint; None: there is none.
        renamed: old names of columns by their new names.
        accepted: the words of the user's decisions, such as `dropped_column_word`.

    Returns:
        The step's states and its next free id.

    Raises:
        OptionError: a state has another kind, schema or meaning in the checkpoint, there are too
            many states, or the checkpoint's states are those of another function.
    """
    declared = tuple(declared)
    by_name = {field.name: field for field in base.fields} if base else {}
    next_id = base.next_id if base else 1
    for state in declared:
        if state.kind == DELETED:
            by_name.pop(state.name, None)
        elif state.name in by_name:
            assert base is not None, "it has the state"
            before = by_name[state.name]
            by_name[state.name] = _same(uid, state, before, base, renamed or {}, accepted)
        else:
            if next_id > STATE_ID_MAX:
                raise OptionError(
                    f"step {uid}: no id is left for state {state.name!r}: {STATE_ID_MAX} states "
                    f"were declared over the life of this checkpoint, and ids are not used twice. "
                    f"Give the step a new uid, or start from a new checkpoint"
                )
            by_name[state.name] = StateField(
                state.name,
                next_id,
                state.kind,
                state.key_schema,
                state.value_schema,
                state.ttl_ms,
                state.meaning,
            )
            next_id += 1
    _check_function(uid, declared, by_name)
    return tuple(by_name.values()), next_id


def _check_function(
    uid: str, declared: Collection[StateDeclaration], by_name: Mapping[str, StateField]
) -> None:
    """Refuse a function that would leave the state of another function unread in the checkpoint.

    States of a function's own may come and go; those of a ready-made function belong together. So
    what nobody declares any more is compared by its function alone.

    Raises:
        OptionError: the checkpoint holds state of another function, under other names.
    """
    kept = [state for state in declared if state.kind != DELETED]
    names = {state.name for state in kept}
    now = {_function_of(state) for state in kept} - {""} if kept else {OWN_FUNCTION}
    for name, known in by_name.items():
        before = _function_of(known)
        if name in names or not before or not now or before in now:
            continue
        raise OptionError(
            f"step {uid}: function is now {', '.join(sorted(now))}, "
            f"and the checkpoint holds state {name!r} that was made with {before}: it would stay "
            f"there, and what is open in it never come out. Set it back; or give the step a new "
            f"uid, so that it begins without state, and start once with "
            f"allow_dropped_state=[{uid!r}] to give up what is held. A function of your own can "
            f"drop it, by deleteIfExists({name!r}) in init()"
        )


def _function_of(state: StateDeclaration | StateField) -> str:
    """Return the function that a state was made with; "": not known, as in release 0.1.0."""
    named = dict(state.meaning).get(FUNCTION, "")
    return named or (OWN_FUNCTION if state.kind in OWN_KINDS else "")


def _same(
    uid: str,
    state: StateDeclaration,
    base: StateField,
    step: StepState,
    renamed: Renamed,
    accepted: Collection[str],
) -> StateField:
    is_other = _place(state) != _place(base)
    differs = state.value_schema != base.value_schema
    if both := ambiguous(state.kind, base.value_schema, renamed):
        raise OptionError(
            f"step {uid}: renamed={dict(renamed)!r}: the checkpoint holds a column {both[0]!r} and "
            f"a column {both[1]!r}, and neither becomes the other. A rename that is done leaves "
            f"the program; of two columns that change their names at once, none may have a name "
            f"that is held"
        )
    refused = _refused_columns(uid, state, base, renamed, accepted) if differs else ""
    if is_other or refused:
        now = _shape(state.kind, state.key_schema, state.value_schema, state.ttl_ms)
        before = _shape(base.kind, base.key_schema, base.value_schema, base.ttl_ms)
        if state.kind in OWN_KINDS:
            raise OptionError(
                f"step {uid}: the checkpoint holds state {state.name!r} as {before}, and the "
                f"function declares it as {now}{refused}. Declare it as it was; or give the new "
                f"one another name, and call deleteIfExists({state.name!r}) in init() to drop what "
                f"is held{changed_since(step)}"
            )
        raise OptionError(
            f"step {uid}: the checkpoint holds {before}, and the function's state is {now}"
            f"{refused}. Declare it as it was; or give the step a new uid, so that it begins "
            f"without state, and start once with allow_dropped_state=[{uid!r}] to give up what is "
            f"held{changed_since(step)}"
        )
    if differs:
        names = renames(state.kind, base.value_schema, state.value_schema, renamed)
        base = replace(base, meaning=_with_names(base.meaning, renamed if names else {}))
    if differing := "; ".join(change.text for change in changes(base.meaning, state.meaning)):
        raise OptionError(
            f"step {uid}: {differing}: what the checkpoint holds would count as something else "
            f"from now on. Set it back (a column that only has another name gets its old one in a "
            f"map_batches before key_by); or give the step a new uid, so that it begins without "
            f"state, and start once with allow_dropped_state=[{uid!r}] to give up what is held"
        )
    # Releases that did not write a meaning, or not all of it, are believed: from now on it stands.
    return replace(
        base,
        key_schema=state.key_schema,
        value_schema=state.value_schema,
        ttl_ms=state.ttl_ms,
        meaning=state.meaning,
    )


def _place(state: StateDeclaration | StateField) -> tuple[str, str]:
    """Return the part of a state's form that decides where its entries lie."""
    panes = windows_text(state.key_schema) if state.kind == PANES else state.key_schema
    return state.kind, panes


def _with_names(meaning: Meaning, renamed: Renamed) -> Meaning:
    """Return a meaning in which the arguments of renamed columns have their new names."""
    new = {old: name for name, old in renamed.items()}
    named = []
    for argument, text in meaning:
        what, dot, column = argument.partition(".")
        named.append((f"{what}{dot}{new.get(column, column)}", text))
    return tuple(named)


def _refused_columns(
    uid: str,
    state: StateDeclaration,
    base: StateField,
    renamed: Renamed,
    accepted: Collection[str],
) -> str:
    """Return what no conversion between two schemas does, in words; "": all changes are fine."""
    if state.kind != base.kind:
        return ""
    prefix = f"{state.name}." if state.kind in OWN_KINDS else ""
    names = renames(state.kind, base.value_schema, state.value_schema, renamed)
    texts, dropped = [], []
    rounded = []
    for change in column_changes(state.kind, base.value_schema, state.value_schema, names):
        if change.column == TIMER and has_ttl(base) != has_ttl(state):
            continue  # the time to forget keys: those that are held get it, or lose it
        if change.what == REFUSED:
            texts.append(f"{change.text}, which does not hold all of its values")
        elif change.what == ROUNDED:
            word = rounded_column_word(uid, f"{prefix}{change.column}")
            if word not in accepted:
                rounded.append(word)
                texts.append(f"{change.text}, which rounds large numbers")
        elif change.what == REMOVED:
            word = dropped_column_word(uid, f"{prefix}{change.column}")
            if word not in accepted:
                dropped.append(word)
                texts.append(change.text)
    if dropped:
        texts.append(
            f"to give up columns, start once with accept={dropped}; one with a new name stays "
            f"with renamed={{'new': 'old'}} on the step"
        )
    if rounded:
        texts.append(f"to have them rounded, start once with accept={rounded}")
    return "".join(f"; {text}" for text in texts)


def _shape(kind: str, key_schema: str, value_schema: str, ttl_ms: int) -> str:
    if kind == PANES:
        columns = ddl_of(schema_from_text(value_schema))
        return f"{windows_text(key_schema)} with the columns {columns!r}"
    if kind == COLUMNS:
        return f"the columns {ddl_of(schema_from_text(value_schema))!r}"
    if kind == TABLE:
        return f"a broadcast table with the columns {ddl_of(schema_from_text(value_schema))!r}"
    if kind == ELEMENTS:
        return f"a list with the columns {ddl_of(schema_from_text(value_schema))!r}"
    if kind == ROWS:
        columns = ddl_of(schema_from_text(value_schema))
        return f"rows of a join ({key_schema}) with the columns {columns!r}"
    schemas = f"{key_schema} -> {value_schema}" if key_schema else value_schema
    return f"{kind} of {schemas}, {'with' if ttl_ms else 'without'} a TTL"


def is_operator_state(step: StepState) -> bool:
    """True if the state is not divided by key groups, and fits any parallelism as it is."""
    return any(field.kind in (TABLE, ELEMENTS) for field in step.fields)


def parts_of(step: StepState) -> tuple[KeyGroupRange, ...]:
    """Return the key groups of each task; for list state, the group with the task's number."""
    count = step.parallelism
    if any(field.kind == ELEMENTS for field in step.fields):
        return tuple(KeyGroupRange(index, index) for index in range(count))
    return tuple(key_group_range(step.max_parallelism, count, index) for index in range(count))


@dataclass(frozen=True)
class Succession:
    """The way from state in a checkpoint to that of the program, where the user has to say it.

    Args:
        renamed: the old names of columns of state that have another name now, by the new one.
        defaults: the values of columns that are new, for what is there, by column.
        previous_uid: the uid under which the checkpoint has the state, until it is taken up; None:
            the same.
    """

    renamed: Renamed = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    previous_uid: str | None = None

    def __post_init__(self) -> None:
        if len({*self.renamed.values()}) < len(self.renamed):
            raise OptionError(
                f"renamed={dict(self.renamed)!r}: two columns have one old name: expected a column "
                f"of its own for each"
            )


AS_BEFORE = Succession()
"""State goes on under its uid and names."""


@dataclass(frozen=True, slots=True)
class StepRequirement:
    """A keyed step as the pipeline declares it.

    Args:
        uid: names its state.
        key_schema: `KeyCodec.schema_text` of the step's key.
        max_parallelism: how many key groups; None: as many as the state has.
        parallelism: how many tasks; None: as many as Spark runs at a time, at most one per group.
        time_mode: one of `TIME_MODES`.
    """

    uid: str
    key_schema: str
    max_parallelism: int | None = None
    parallelism: int | None = None
    time_mode: str = NO_TIME


def taken_up(
    state: Iterable[StepState], previous: Sequence[tuple[str, str]], uids: Collection[str]
) -> tuple[StepState, ...]:
    """Return committed state under the uids of the program, where steps have a new one.

    Copies of the state on hosts are made again: of what a copy under the new uid holds, only the
    newest version cannot be from a step that had that uid before. So the trail begins with it.

    Args:
        state: the state of all steps in the checkpoint.
        previous: the new uid and the previous one of each step that names one.
        uids: all uids of the program.

    Raises:
        OptionError: the previous uid is in use in the program or named twice, or the checkpoint has
            state under both uids, or has state and none under either.
    """
    state = tuple(state)
    known = [step.uid for step in state]
    by_previous: dict[str, str] = {}
    for uid, before in previous:
        name = f"step {uid}: previous_uid={before!r}"
        if before in uids:
            raise OptionError(
                f"{name}: the program has a step or state with that uid, which goes on with it: "
                f"expected a uid that is gone from the program. Give one of the two another"
            )
        if before in by_previous:
            raise OptionError(
                f"{name}: step {by_previous[before]} names it too, and state has one owner: "
                f"expected it once. Leave it out on one of the two"
            )
        by_previous[before] = uid
        if before in known and uid in known:
            raise OptionError(
                f"{name}: the checkpoint holds state under {before!r} and under {uid!r}, and a "
                f"step goes on with one of them. Leave previous_uid out, and the step goes on with "
                f"{uid!r} (allow_dropped_state=[{before!r}] gives the other up); or give the step "
                f"another uid"
            )
        if known and before not in known and uid not in known:
            raise OptionError(
                f"{name}: the checkpoint holds state under neither of the two, but under "
                f"{', '.join(map(repr, sorted(known)))}. Name one of these; or leave previous_uid "
                f"out for a step that begins without state"
            )
    return tuple(
        replace(
            step,
            uid=by_previous[step.uid],
            trail=step.trail[-1:],
            former_uids=(*step.former_uids, step.uid),
        )
        if step.uid in by_previous
        else step
        for step in state
    )


def check(
    wanted: Sequence[StepRequirement],
    state: Iterable[StepState],
    allow_dropped: Collection[str] = (),
) -> Mapping[str, StepState]:
    """Check the pipeline's steps against the committed state; return each old step's state by uid.

    Args:
        wanted: the keyed steps of the pipeline.
        state: the state of all steps in the checkpoint.
        allow_dropped: uids whose state may be given up.

    Raises:
        OptionError: a step with state is gone from the pipeline, or its key, hash, number of key
            groups or time mode is another one.
    """
    by_uid = {step.uid: step for step in wanted}
    kept = {}
    for step in state:
        if step.uid in by_uid:
            _check_same(by_uid[step.uid], step)
            kept[step.uid] = step
        elif step.uid not in allow_dropped:
            raise _gone(step, by_uid.keys() - kept.keys(), allow_dropped)
    return kept


def starting_point(wanted: StepRequirement, base: StepState | None, task_count: int) -> StepState:
    """Return the state from which an epoch of a step starts, with the epoch's parallelism.

    Args:
        wanted: the step.
        base: the step's committed state; None: a new step.
        task_count: how many tasks Spark runs at a time.

    Raises:
        OptionError: more tasks are asked for than there are key groups.
    """
    if base is not None:
        most = base.max_parallelism
    else:
        most = wanted.max_parallelism or default_max_parallelism(wanted.parallelism or task_count)
    parallelism = wanted.parallelism or min(task_count, most)
    if parallelism > most:
        raise OptionError(
            f"step {wanted.uid}: parallelism={parallelism}, but its state has {most} key groups "
            f"(max_parallelism), and a task without any would have nothing to do: ask for at most "
            f"{most}, or have the state rewritten with `tallystick savepoint migrate`"
        )
    if base is not None:
        return replace(base, parallelism=parallelism, time_mode=wanted.time_mode)
    return StepState(
        uid=wanted.uid,
        max_parallelism=most,
        parallelism=parallelism,
        key_schema=wanted.key_schema,
        hash_version=HASH_VERSION,
        time_mode=wanted.time_mode,
    )


def _check_same(wanted: StepRequirement, step: StepState) -> None:
    if wanted.max_parallelism not in (None, step.max_parallelism):
        raise OptionError(
            f"step {step.uid}: max_parallelism={wanted.max_parallelism}, but its state has "
            f"{step.max_parallelism} key groups, and every key's group would be another one. Set "
            f"it back, or leave it out. To change it, take a savepoint, have it rewritten with "
            f"`tallystick savepoint migrate`, and start from that"
        )
    if wanted.key_schema != step.key_schema:
        raise OptionError(
            f"step {step.uid}: its key is now {wanted.key_schema}, but its state belongs to the "
            f"key {step.key_schema}, and is not to be found under any other. Use that key; or give "
            f"the step a new uid, so that it begins without state"
        )
    if step.hash_version != HASH_VERSION:
        raise OptionError(
            f"step {step.uid}: the key groups of its state come from hash version "
            f"{step.hash_version}, and this release has version {HASH_VERSION}. Run the release "
            f"that wrote the checkpoint; or take a savepoint with it, and have that rewritten with "
            f"`tallystick savepoint migrate`"
        )

    # Spark refuses any other mode; without a time there was nothing yet that another could change.
    # The timers of a ready-made function end with its time to forget keys.
    ends = wanted.time_mode == NO_TIME and any(
        field.kind == COLUMNS and has_ttl(field) for field in step.fields
    )
    if wanted.time_mode != step.time_mode != NO_TIME and not ends:
        raise OptionError(
            f"step {step.uid}: its time mode is now {wanted.time_mode!r}, but its state has timers "
            f"and expiries by {step.time_mode!r}, which would be due by the wrong clock, or never. "
            f"Set it back; or give the step a new uid, so that it begins without state"
            f"{changed_since(step)}"
        )


def _gone(step: StepState, new: Collection[str], allowed: Collection[str]) -> OptionError:
    other = f", and allow_dropped_state names {', '.join(map(repr, sorted(allowed)))}"
    renamed = (
        f" If it was renamed, set uid={step.uid!r} on {sorted(new)[0]!r}, or, on a process step, "
        f"previous_uid={step.uid!r}."
        if new
        else ""
    )
    return OptionError(
        f"the checkpoint holds state of step {step.uid!r} ({sum(f.size for f in step.files)} bytes "
        f"in {len(step.files)} files), and the pipeline has no process step with that uid: the "
        f"state would be lost{other if allowed else ''}.{renamed} To give it up, start once with "
        f"allow_dropped_state=[{step.uid!r}]"
    )
