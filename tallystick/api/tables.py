"""Broadcast tables and list states, the steps with access to them, and the join `enrich`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from tallystick.errors import OptionError
from tallystick.pipeline.inputs import InputDeclaration, ListDeclaration, TableDeclaration
from tallystick.state.catalog import PLAIN_NAME
from tallystick.tasks.enrichment import HOW, Enrichment
from tallystick.tasks.keyed_step import Columns, MapBatches
from tallystick.tasks.operator_state import (
    ListFunction,
    ListFunctionType,
    TableFunction,
    TableFunctionType,
    UnionFunction,
)
from tallystick.tasks.outputs import Predicate
from tallystick.tasks.read import BatchFunction

if TYPE_CHECKING:
    from tallystick.api.streams import Stream


@dataclass(frozen=True)
class BroadcastTable:
    """A table of a topic's rows, held by every task; made by `broadcast`.

    Args:
        stream: the stream of the table's rows.
        key: the columns that tell rows apart.
        uid: names the table, and the positions in its topic.
        delete: marks rows that delete the row of their key; None: no row does.
    """

    stream: "Stream"
    key: tuple[str, ...]
    uid: str
    delete: Predicate | None = None

    def declared(self, pipeline: str) -> TableDeclaration:
        """Return the declaration of the table, for a run of a pipeline."""
        options = self.stream.source.to_options(f"{pipeline}/{self.uid}")
        declaration = InputDeclaration(self.uid, options, self.stream.steps)
        return TableDeclaration(declaration, self.key, self.delete)


@dataclass(frozen=True)
class ListState:
    """A list of elements in each task that reads; made by `list_state`.

    Args:
        columns: of an element.
        uid: names the state.
        union: chooses a task's elements from all elements; None: they are divided evenly.
    """

    columns: Columns
    uid: str
    union: UnionFunction | None = None


def list_state(columns: Columns, *, uid: str, union: UnionFunction | None = None) -> ListState:
    """Return a list state for a function of `map_batches`: each task has elements of its own.

    With another number of tasks all elements are divided evenly among the new ones, in the order of
    the old tasks; or as `union` says. Source: Flink's operator list state (`getListState` and
    `getUnionListState`, FLIP-8).

    Args:
        columns: of an element, as DDL, a Spark type or an Arrow schema.
        uid: names the state in the checkpoint, for as long as it lives.
        union: called in each new task with the elements of all old tasks, the number of the task
            and the number of tasks; returns the elements of the task.

    Raises:
        OptionError: the uid is no name, or `union` no function.
    """
    if union is not None and not callable(union):
        raise OptionError(
            f"list_state(union={union!r}): expected a function of all elements, the task's number "
            f"and how many tasks there are"
        )
    return ListState(columns, check_name("list_state: uid", uid), union)


@dataclass(frozen=True)
class EnrichmentStep:
    """A join of rows with a table, for `map_batches`; made by `enrich`."""

    table: BroadcastTable
    function: Enrichment


def enrich(
    table: BroadcastTable,
    *,
    on: str | Sequence[str] | Mapping[str, str],
    how: Literal["inner", "left"] = "inner",
    columns: Sequence[str] | Mapping[str, str] | None = None,
) -> EnrichmentStep:
    """Return a function for `map_batches` that adds the columns of a table's row to each row.

    Source: the lookup join of Flink SQL, against a broadcast table instead of another system.

    Args:
        table: the broadcast table.
        on: the columns of the rows that equal the table's key, as `{"auction": "id"}`: the rows'
            column first, the table's second. A name alone: the same in both.
        how: "inner": rows without a row in the table are left out; "left": they have nulls.
        columns: of the table; or new names by their name there. None: all but those of its key.

    Raises:
        OptionError: an argument is not what it should be, or not all of the key is named.
    """
    if not isinstance(table, BroadcastTable):
        raise OptionError(f"enrich({table!r}): expected a table that ts.broadcast() has made")
    if isinstance(on, str):
        on = {on: on}
    pairs = dict(on) if isinstance(on, Mapping) else {name: name for name in on}
    by_key = {table_column: own for own, table_column in pairs.items()}
    if len(by_key) < len(pairs) or by_key.keys() != set(table.key):
        raise OptionError(
            f"enrich(on={on!r}): the key of table {table.uid!r} is {', '.join(table.key)}: "
            f"expected a column of the rows for each of these, so that there is one row at most"
        )
    if how not in HOW:
        raise OptionError(f"enrich(how={how!r}): expected one of {', '.join(HOW)}")
    if isinstance(columns, str):
        raise OptionError(f"enrich(columns={columns!r}): expected a list, [{columns!r}]")
    if columns is not None and not isinstance(columns, Mapping):
        columns = {name: name for name in columns}
    names = None if columns is None else tuple(columns.items())
    on_columns = tuple(by_key[name] for name in table.key)
    return EnrichmentStep(table, Enrichment(table.uid, on_columns, how, names))


MapFunction = BatchFunction | TableFunctionType | ListFunctionType | EnrichmentStep
State = BroadcastTable | ListState
"""The state of a function in `map_batches`."""


def map_step(
    function: MapFunction,
    schema: str | None,
    outputs: Mapping[str, Columns] | None,
    state: State | None,
) -> MapBatches:
    """Return the arguments of `map_batches` as a step.

    Raises:
        OptionError: `state` is neither a broadcast table nor a list state.
    """
    if isinstance(function, EnrichmentStep):
        if state not in (None, function.table):
            raise OptionError("map_batches(enrich(table, …), state=…): it has its table already")
        inner = TableFunction(function.function, function.table.uid)
        return MapBatches(inner, schema, outputs or {}, function.table)
    if state is None:
        return MapBatches(cast(BatchFunction, function), schema, outputs or {})
    MapBatches(cast(BatchFunction, function))  # checks it
    if isinstance(state, ListState):
        with_list = ListFunction(cast(ListFunctionType, function), state.uid)
        return MapBatches(with_list, schema, outputs or {}, state)
    if not isinstance(state, BroadcastTable):
        raise OptionError(
            f"map_batches(state={state!r}): expected a table of ts.broadcast(), or ts.list_state()"
        )
    with_table = TableFunction(cast(TableFunctionType, function), state.uid)
    return MapBatches(with_table, schema, outputs or {}, state)


def lists_in(steps: Iterable[object]) -> tuple[ListDeclaration, ...]:
    """Return the list states of steps.

    Raises:
        OptionError: two steps have a list state of the same uid.
    """
    by_uid: dict[str, ListDeclaration] = {}
    for step in steps:
        state = step.state if isinstance(step, MapBatches) else None
        if not isinstance(state, ListState):
            continue
        if state.uid in by_uid:
            raise OptionError(
                f"two steps have list state {state.uid!r}, and each would find the elements of the "
                f"other: give each its own"
            )
        by_uid[state.uid] = ListDeclaration(state.uid, state.columns, state.union)
    return tuple(by_uid.values())


def tables_in(steps: Iterable[object]) -> tuple[BroadcastTable, ...]:
    """Return the tables that steps use, each once.

    Raises:
        OptionError: two different tables have the same uid.
    """
    by_uid: dict[str, BroadcastTable] = {}
    for step in steps:
        table = step.state if isinstance(step, MapBatches) else None
        if not isinstance(table, BroadcastTable):
            continue
        if by_uid.setdefault(table.uid, table) != table:
            raise OptionError(
                f"two tables have the uid {table.uid!r}, and are not the same: make the table once "
                f"and give it to both steps, or give each its own uid"
            )
    return tuple(by_uid.values())


def check_name(what: str, name: str) -> str:
    """Return a name if it may stand in a path.

    Raises:
        OptionError: the name may not.
    """
    if not isinstance(name, str) or not PLAIN_NAME.fullmatch(name):
        raise OptionError(
            f"{what} {name!r}: expected up to 100 letters, digits, '.', '_' and '-', the first a "
            f"letter or digit"
        )
    return name
