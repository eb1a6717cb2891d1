"""The inputs of a pipeline, with steps of their own, and the state of steps without keys.

That state is broadcast tables and lists of readers; `enrich` joins rows with a table.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar, cast

from tallystick.api.kafka_source import KafkaSource
from tallystick.api.rows_source import RowsSource
from tallystick.arguments import checked, near, not_one_of
from tallystick.errors import OptionError
from tallystick.expressions.binding import (
    condition_of,
    dropped,
    named_by_expressions,
    renamed,
    selected,
    with_columns_of,
)
from tallystick.pipeline.inputs import InputDeclaration, ListDeclaration, TableDeclaration
from tallystick.source.offsets import ONLY_INPUT
from tallystick.state.catalog import PLAIN_NAME
from tallystick.state.compatibility import AS_BEFORE, Succession
from tallystick.state.functions.inputs import TIME
from tallystick.state.functions.processing import Processor
from tallystick.tasks.dataframes import with_frames
from tallystick.tasks.enrichment import HOW, Enrichment
from tallystick.tasks.operator_state import (
    ListFunction,
    ListFunctionType,
    TableFunction,
    TableFunctionType,
    UnionFunction,
)
from tallystick.tasks.outputs import Filter, Predicate
from tallystick.tasks.read import BatchFunction
from tallystick.tasks.steps import (
    Columns,
    MapBatches,
    Process,
    Step,
    Transform,
    check_function,
)

Source = KafkaSource | RowsSource


@checked
@dataclass(frozen=True)
class BroadcastTable:
    """A table of a topic's rows, held by every task; made by `broadcast`.

    Args:
        stream: the stream of the table's rows.
        key: the columns that tell rows apart.
        uid: names the table, and the positions in its topic.
        delete: marks rows that delete the row of their key; None: no row does.
        succession: the way from the state in the checkpoint to the table.
    """

    stream: "Stream"
    key: tuple[str, ...]
    uid: str
    delete: Predicate | None = None
    succession: Succession = AS_BEFORE

    def declared(self, pipeline: str) -> TableDeclaration:
        """Return the declaration of the table, for a run of a pipeline."""
        options = self.stream.source.read_options(f"{pipeline}/{self.uid}")
        declaration = InputDeclaration(self.uid, options, self.stream.steps)
        return TableDeclaration(declaration, self.key, self.delete, self.succession)


@checked
@dataclass(frozen=True)
class ListState:
    """A list of elements in each task that reads; made by `list_state`.

    Args:
        columns: of an element.
        uid: names the state.
        union: chooses a task's elements from all elements; None: they are divided evenly.
        succession: the way from the state in the checkpoint to the list.
    """

    columns: Columns
    uid: str
    union: UnionFunction | None = None
    succession: Succession = AS_BEFORE


@checked
def list_state(
    columns: Columns,
    *,
    uid: str,
    union: UnionFunction | None = None,
    renamed: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    previous_uid: str | None = None,
) -> ListState:
    """Return a list state for a function of `map_batches`: each task has elements of its own.

    With another number of tasks all elements are divided evenly among the new ones, in the order of
    the old tasks; or as `union` says. Source: Flink's operator list state (`getListState` and
    `getUnionListState`, FLIP-8).

    Args:
        columns: of an element, as DDL, a Spark type or an Arrow schema.
        uid: names the state in the checkpoint, for as long as it lives.
        union: called in each new task with the elements of all old tasks, the number of the task
            and the number of tasks; returns the elements of the task.
        renamed: columns with another name than in the checkpoint: `{"new": "old"}`.
        defaults: of new columns, for the elements in the checkpoint; else null.
        previous_uid: the `uid` under which the checkpoint has the list, if it is another.

    Raises:
        OptionError: the uid is no name.
    """
    succession = Succession(renamed or {}, defaults or {}, previous_uid)
    return ListState(columns, check_name("list_state: uid", uid), union, succession)


@dataclass(frozen=True)
class EnrichmentStep:
    """A join of rows with a table, for `map_batches`; made by `enrich`."""

    table: BroadcastTable
    function: Enrichment


@checked
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
        raise not_one_of("how", how, HOW, of="enrich")
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
    schema: Columns | None,
    outputs: Mapping[str, Columns] | None,
    state: State | None,
) -> MapBatches:
    """Return the arguments of `map_batches` as a step.

    Raises:
        OptionError: the function cannot be called so, or has a table already.
    """
    if isinstance(function, EnrichmentStep):
        if state not in (None, function.table):
            raise OptionError("map_batches(enrich(table, …), state=…): it has its table already")
        inner = TableFunction(function.function, function.table.uid)
        return MapBatches(inner, schema, outputs or {}, function.table)
    argument_count = 1 if state is None else 2
    check_function("map_batches", function, argument_count)
    function = with_frames(function, argument_count)
    if state is None:
        return MapBatches(cast(BatchFunction, function), schema, outputs or {})
    if isinstance(state, ListState):
        with_list = ListFunction(cast(ListFunctionType, function), state.uid)
        return MapBatches(with_list, schema, outputs or {}, state)
    with_table = TableFunction(cast(TableFunctionType, function), state.uid)
    return MapBatches(with_table, schema, outputs or {}, state)


def filter_step(predicate: Predicate | str) -> MapBatches:
    """Return the argument of `filter` as a step.

    Raises:
        OptionError: it is no function of a batch, and no expression.
    """
    if isinstance(predicate, str):
        return MapBatches(Filter(condition_of(predicate)))
    check_function("filter", predicate, 1, "predicate")
    return MapBatches(Filter(predicate))


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
        by_uid[state.uid] = ListDeclaration(state.uid, state.columns, state.union, state.succession)
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


INPUTS_MAX = 100
"""The most inputs of a pipeline: rows have the number of theirs as int8."""
NOT_A_NAME = "max_parallelism"
"""Another argument of `key_by`."""


class Expressions(ABC):
    """The methods of streams and pipelines with expressions in Spark's SQL."""

    @abstractmethod
    def _added(self, step: MapBatches) -> Self:
        """Return the rows behind one more step."""

    @checked
    def select(self, *columns: str) -> Self:
        """Compute the columns of the rows.

        Args:
            columns: names, or expressions with a name: "dest", "dep_delay * 60 AS seconds".

        Raises:
            OptionError: one is no expression; at the start, a column or function is not there.
        """
        return self._added(MapBatches(selected(columns)))

    @checked
    def with_columns(self, **columns: str) -> Self:
        """Compute columns beside the others, or in place of those of the same name.

        Args:
            columns: an expression for each name: late="dep_delay > 15".

        Raises:
            OptionError: as of `select`.
        """
        return self._added(MapBatches(with_columns_of(columns)))

    @checked
    def drop(self, *columns: str) -> Self:
        """Leave columns out.

        Args:
            columns: names; each has to be there.
        """
        return self._added(MapBatches(dropped(columns)))

    @checked
    def rename(self, columns: Mapping[str, str]) -> Self:
        """Give columns other names.

        Args:
            columns: new names by old ones.

        Raises:
            OptionError: at the start, a column is not there.
        """
        return self._added(MapBatches(renamed(columns)))


@checked
@dataclass(frozen=True)
class Stream(Expressions):
    """A source and the functions that its rows pass through; immutable, as a pipeline.

    Args:
        source: where the rows come from.
        uid: names the positions; None: the name of the input, or the name of an only input.
        steps: the functions, in order.
    """

    source: Source
    uid: str | None = None
    steps: tuple[MapBatches, ...] = ()

    def __post_init__(self) -> None:
        if self.uid is not None:
            check_name("uid", self.uid)

    @checked
    def map_batches(
        self,
        function: MapFunction,
        *,
        schema: Columns | None = None,
        outputs: Mapping[str, Columns] | None = None,
        state: State | None = None,
    ) -> Self:
        """Pass each Arrow batch of the input through a function, in the task that reads.

        Args:
            function: as for `Pipeline.map_batches`.
            schema: the columns of the returned rows, as DDL; the last function of an input needs
                them where there are other inputs.
            outputs: the side outputs, as for `Pipeline.map_batches`.
            state: a broadcast table or a list, as for `Pipeline.map_batches`.
        """
        return replace(self, steps=(*self.steps, map_step(function, schema, outputs, state)))

    @checked
    def filter(self, predicate: Predicate | str) -> Self:
        """Keep some rows of the input, as `Pipeline.filter` does.

        Args:
            predicate: as for `Pipeline.filter`.
        """
        return replace(self, steps=(*self.steps, filter_step(predicate)))

    def _added(self, step: MapBatches) -> Self:
        return replace(self, steps=(*self.steps, step))

    def declared(self, pipeline: str, name: str, uid: str) -> InputDeclaration:
        """Return the declaration of the input, for a run.

        Args:
            pipeline: the pipeline's name, by default in the name of the consumer group.
            name: of the input; "": none.
            uid: of the input's positions.
        """
        owner = pipeline if uid == ONLY_INPUT else f"{pipeline}/{uid}"
        return InputDeclaration(uid, self.source.read_options(owner), self.steps, name)


@checked
def stream(source: Source, *, uid: str | None = None) -> Stream:
    """Return an input of a pipeline, to give it steps of its own before it is merged with others.

    Args:
        source: the source to read.
        uid: names its positions in the checkpoint, for as long as the pipeline lives. Each of
            several inputs needs one, or a name: `read(bids=…, people=…)`.

    Raises:
        OptionError: it is no source, or the uid no name.
    """
    return Stream(source, uid)


@checked
def broadcast(
    source: Source | Stream,
    *,
    key: str | Sequence[str],
    uid: str,
    delete: Predicate | None = None,
    renamed: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    previous_uid: str | None = None,
) -> BroadcastTable:
    """Return a broadcast table: a topic's newest rows by key, held whole by every task of a step.

    Source: Flink's broadcast state (FLIP-5, `MapStateDescriptor` of a `BroadcastStream`); its rows
    come without an order relative to others there, and before those of their epoch here.

    Args:
        source: the topic, or a stream with steps that make the table's rows. It is read from the
            earliest record, unless it says where.
        key: the columns that tell rows apart: of each key the newest row counts.
        uid: names the table and its positions in the checkpoint, for as long as it lives.
        delete: gets a batch, and returns a column of booleans: rows that delete that of their key.
        renamed: columns beside the key with another name than in the checkpoint: `{"new": "old"}`.
        defaults: of new columns, for the rows in the checkpoint; else null.
        previous_uid: the `uid` under which the checkpoint has the rows, and the positions in the
            topic, if it is another.

    Raises:
        OptionError: an argument is not what it should be.
    """
    stream = source if isinstance(source, Stream) else Stream(source)
    if stream.uid not in (None, uid):
        raise OptionError(f"broadcast(uid={uid!r}): its stream has the uid {stream.uid!r}")
    check_name("broadcast: uid", uid)
    names = (key,) if isinstance(key, str) else tuple(key)
    if not names or len(set(names)) < len(names):
        raise OptionError(f"broadcast(key={key!r}): expected names of columns, each once")
    reads = stream.source
    if isinstance(reads, KafkaSource) and reads.says_no_start:
        stream = replace(stream, source=replace(reads, starting_offsets="earliest"))
    succession = Succession(renamed or {}, defaults or {}, previous_uid)
    return BroadcastTable(stream, names, uid, delete, succession)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a pipeline, in their order.

    Args:
        streams: the stream of each input, with its name or "".
        uids: the uid of each input's positions.
        are_named: the inputs stay apart up to the first keyed step, instead of one stream.
    """

    streams: tuple[tuple[str, Stream], ...] = ()
    uids: tuple[str, ...] = ()
    are_named: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of named inputs; empty for others."""
        return tuple(name for name, _ in self.streams) if self.are_named else ()

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources, by input."""
        return tuple(input_stream.source for _, input_stream in self.streams)

    @property
    def chain(self) -> tuple[MapBatches, ...]:
        """The steps of an only input without a name, which are the pipeline's first."""
        is_one = len(self.streams) == 1 and not self.are_named
        return self.streams[0][1].steps if is_one else ()

    @property
    def steps(self) -> tuple[MapBatches, ...]:
        """The steps of all inputs, one input after another."""
        return tuple(step for _, input_stream in self.streams for step in input_stream.steps)

    def check_joined(self, pipeline: str, first: Step | None) -> None:
        """Refuse named inputs unless the pipeline's first step is a keyed step with all of them.

        Raises:
            OptionError: the first step has other inputs, or is not keyed.
        """
        joined = len(first.inputs) if isinstance(first, Process) else 0
        if joined != len(self.names):
            raise OptionError(
                f"pipeline {pipeline!r}: named inputs go to a process step: key_by(name='…', …)"
                f".process(…) follows read(), with their names. Inputs of equal columns become one "
                f"stream without names: read(first, second)"
            )

    def declared(self, pipeline: str) -> tuple[InputDeclaration, ...]:
        """Return the declarations of the inputs, for a run."""
        declarations = [
            input_stream.declared(pipeline, name, uid)
            for (name, input_stream), uid in zip(self.streams, self.uids, strict=True)
        ]
        return (replace(declarations[0], steps=()),) if self.chain else tuple(declarations)


NO_INPUTS = Inputs()


def inputs_of(
    given: Sequence[Source | Stream],
    named: Mapping[str, Source | Stream],
    before: Inputs,
) -> Inputs:
    """Return the arguments of `read` as inputs.

    Args:
        given: the inputs that become one stream.
        named: the inputs that stay apart.
        before: the inputs of an earlier call.

    Raises:
        OptionError: there are no inputs, or too many, or the positions of one have no name; or
            there was an earlier call.
    """
    if before.streams:
        raise OptionError(
            "read() was called before: a pipeline has one read(), which gets all sources, as in "
            "read(orders, returns)"
        )
    if bool(given) == bool(named):
        raise OptionError(
            "read(): expected sources, read(orders) or read(old, new), which become one stream; or "
            "named ones, read(bids=bids, people=people), for a process step with several inputs"
        )
    for name in named:
        check_name("the name of an input", name)
        if name == NOT_A_NAME:
            raise OptionError(f"read({name}=…): key_by has an argument of that name: rename it")
    streams = [
        (name, input_stream if isinstance(input_stream, Stream) else Stream(input_stream))
        for name, input_stream in [*(("", input_stream) for input_stream in given), *named.items()]
    ]
    if len(streams) > INPUTS_MAX:
        raise OptionError(f"read(): {len(streams)} inputs: expected up to {INPUTS_MAX}")
    uids = [
        input_stream.uid or name or (ONLY_INPUT if len(streams) == 1 else "")
        for name, input_stream in streams
    ]
    for number, uid in enumerate(uids, start=1):
        if not uid:
            raise OptionError(
                f"read(): {len(streams)} sources, and number {number} has no uid: which positions "
                f"of the checkpoint are whose would hang on their order. Give each its own: "
                f"read(ts.stream(orders, uid='orders'), …). The one that was the only source of a "
                f"checkpoint so far has its positions under uid={ONLY_INPUT!r}"
            )
        if uids.count(uid) > 1:
            raise OptionError(f"read(): two inputs have the uid {uid!r}: give each its own")
    return Inputs(tuple(streams), tuple(uids), bool(named))


def keys_of(
    inputs: Inputs,
    names: Sequence[str],
    columns: Sequence[str],
    named: Mapping[str, str | Sequence[str]],
) -> tuple[Inputs, tuple[tuple[str, ...], ...]]:
    """Return the columns of the key of each named input, and the inputs that compute them.

    Args:
        inputs: of the pipeline.
        names: of the inputs; none where they have none, or other steps stand before `key_by`.
        columns: the arguments of `key_by` without a name.
        named: the arguments of `key_by` with a name.

    Raises:
        OptionError: an input has no key, or there is no such input.
    """
    given = f"key_by({', '.join([*map(repr, columns), *(f'{n}={c!r}' for n, c in named.items())])})"
    if not names:
        raise OptionError(
            f"{given}: only right after read() with named inputs has each of them a key of its own "
            f"here; rows of one stream have one: key_by('user')"
        )
    if columns or set(named) != set(names):
        raise OptionError(
            f"{given}: the inputs are {', '.join(names)}, and each needs its key: "
            f"key_by({', '.join(f'{name}=…' for name in names)})"
        )
    keys = tuple(
        (key,) if isinstance(key, str) else tuple(key) for key in (named[name] for name in names)
    )
    for name, key in zip(names, keys, strict=True):
        if len(key) != len(keys[0]) or not key or len(set(key)) < len(key):
            raise OptionError(
                f"{given}: the key of {name!r}: expected as many columns as that of {names[0]!r} "
                f"has, one at least, and each once"
            )
    computed = [computing(one, key) for (_, one), key in zip(inputs.streams, keys, strict=True)]
    streams = tuple(zip(names, (rows for rows, _ in computed), strict=True))
    return replace(inputs, streams=streams), tuple(key for _, key in computed)


Rows = TypeVar("Rows", bound=Expressions)


def computing(
    rows: Rows, names: Iterable[str], step: str = "key_by", *, may_have_alias: bool = True
) -> tuple[Rows, tuple[str, ...]]:
    """Return the rows with the columns that are named by an expression, and all names.

    Behind DataFrame code all are names: nobody knows its columns yet.

    Args:
        rows: of an input or a pipeline.
        names: of columns, or expressions.
        step: that has them, for messages.
        may_have_alias: AS gives a name.
    """
    if any(isinstance(one, Transform) for one in getattr(rows, "steps", ())):
        return rows, tuple(names)
    columns, function = named_by_expressions(names, step, may_have_alias=may_have_alias)
    return rows if function is None else rows._added(MapBatches(function)), columns


def with_aggregated(rows: Rows, processor: Processor) -> Rows:
    """Return the rows with the columns that a function's aggregates name by an expression."""
    names = getattr(processor, "aggregated", None) or processor.reads or ()
    return computing(rows, sorted(names), "process", may_have_alias=False)[0]


def times_of(
    inputs: Inputs, keys: tuple[tuple[str, ...], ...], event_time: str | Mapping[str, str] | None
) -> tuple[str | None, tuple[tuple[tuple[str, ...], str | None], ...]]:
    """Return the column of event times of a keyed step, and key and time of each named input.

    Args:
        inputs: of the pipeline.
        keys: of named inputs; none where the step's rows come in one stream.
        event_time: the argument of `process`.

    Raises:
        OptionError: `event_time` names no column for an input, or an input that does not exist.
    """
    if not keys:
        if event_time is not None and not isinstance(event_time, str):
            raise OptionError(
                f"event_time={event_time!r}: a column for each input is for a process right after "
                f"named inputs; expected one column, e.g. event_time='at'"
            )
        return event_time, ()
    names = inputs.names
    if isinstance(event_time, str):
        raise OptionError(
            f"event_time={event_time!r}: each of the inputs {', '.join(names)} has its own, e.g. "
            f"event_time={{{names[0]!r}: {event_time!r}}}; leave out those without"
        )
    times = dict(event_time or {})
    if unknown := sorted(times.keys() - set(names)):
        raise OptionError(
            f"event_time={times!r}: there is no input {unknown[0]!r}, only {', '.join(names)}."
            f"{near(unknown[0], names)}"
        )
    pairs = tuple((key, times.get(name)) for name, key in zip(names, keys, strict=True))
    return TIME if times else None, pairs
