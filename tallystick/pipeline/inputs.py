"""The inputs of a started pipeline: what each reads, and how their rows become one table.

    source 1 ─► functions ─┐ of equal columns: a union
    source 2 ─► functions ─┴─► or, with names, side by side (`state.functions.inputs`)

An input has an id, under which the checkpoint keeps its positions.

Broadcast tables and lists of readers are prepared here too: a table is an input that each task
reads, with its rows by key.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from tallystick.codec import ddl
from tallystick.codec.formats import DEADLETTER
from tallystick.errors import OptionError
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.fetcher import KafkaFetch
from tallystick.kafka.preflight import missing_rights, refuse, rights_to_read
from tallystick.options.source import SourceOptions
from tallystick.pipeline.keyed import columns_of, lean_layout
from tallystick.pipeline.sinks import with_columns
from tallystick.pipeline.topics import (
    check_named,
    check_same_cluster,
    columns_ddl,
    find_topics,
    layout_of,
)
from tallystick.pipeline.topology import OutputTopology
from tallystick.source.offsets import SourceOffsets
from tallystick.source.splits import plan_splits
from tallystick.spark.cluster import Cluster
from tallystick.spark.gang.messages import dumps
from tallystick.state.compatibility import AS_BEFORE, Succession
from tallystick.state.functions.inputs import KeyedInput, KeyedInputs
from tallystick.state.functions.vectorised import ByColumns
from tallystick.state.operator_state import ListCodec, TableCodec
from tallystick.tasks.frames import conform
from tallystick.tasks.keyed import KeyedStep
from tallystick.tasks.operator_state import (
    ListStep,
    TableStep,
    UnionFunction,
    refuse_lists,
    refuse_transform,
)
from tallystick.tasks.outputs import Predicate
from tallystick.tasks.read import BatchFunction
from tallystick.tasks.read_plan import ReadPlan
from tallystick.tasks.steps import Columns, MapBatches, Process, Stages, Step, maker_of_columns
from tallystick.values import SplitRange


@dataclass(frozen=True)
class InputDeclaration:
    """An input as the user wrote it.

    Args:
        uid: of its positions.
        options: the settings of the source, checked.
        steps: the functions that rows pass through before they meet rows of other inputs.
        name: of an input that stays apart from others; "": no name.
    """

    uid: str
    options: SourceOptions
    steps: tuple[MapBatches, ...] = ()
    name: str = ""


class PipelineInput:
    """One input, checked.

    Args:
        declared: as the user declared it.
        cluster: whose Spark may have to read its columns.
        waits: its rows are divided among the tasks, and the watermark waits for its partitions; a
            broadcast table's are read by each task as a whole.
    """

    def __init__(self, declared: InputDeclaration, cluster: Cluster, *, waits: bool = True) -> None:
        self.waits = waits
        self.uid = declared.uid
        self.name = declared.name
        self.options = declared.options
        self.config = self.options.config
        self.ddl = columns_ddl(self.options)
        """The columns of the source's rows."""
        steps = with_columns(cluster, declared.steps, self.ddl)
        self.steps = tuple(step for step in steps if isinstance(step, MapBatches))
        columns = cluster.columns(self.ddl, "the columns of the source")
        layout = layout_of(self.options, columns, dead_letters=True)
        fetch = KafkaFetch(self.config)
        self.declared = layout
        """The columns of the source; those of `read` are the ones that somebody uses."""
        self.read = ReadPlan(fetch, layout, self.options.policy, input=self.uid)
        self.cluster_id = ""
        self.topics: Collection[str] = ()
        self.event_time: str | None = None
        """The column of its own that holds event times, if it is a named input with such times."""

    @property
    def is_timed(self) -> bool:
        """True if the watermark goes by its rows; a named input may have no event times."""
        return self.waits and (not self.name or self.event_time is not None)

    def source_time(self, steps: Sequence[KeyedStep], stages: Stages) -> str | None:
        """Return the column of its records that is the event time, if no function is in between."""
        if not steps or self.steps or stages.before:
            return None
        name = self.event_time if self.name else steps[0].event_time
        return name if name in self.read.layout.schema.names else None

    @property
    def text(self) -> str:
        """Name it in messages."""
        return f"input {(self.name or self.uid)!r}"

    def check(self, *, is_new: bool) -> None:
        """Check the input's cluster and topics, and the rights to read the topics.

        Raises:
            OptionError: a topic is not there, or a right is missing.
        """
        broker, user = KafkaBroker(self.config), self.config.sasl_username
        subscription = self.options.subscription
        try:
            self.cluster_id = broker.cluster_id()
            self.topics = subscription.named or ()
            refuse((), missing_rights(broker.client, rights_to_read(self.topics)), user)
            topics = find_topics(broker, subscription)
            if subscription.named is None:
                refuse((), missing_rights(broker.client, rights_to_read(topics)), user)
            if is_new:
                check_named(broker, subscription, topics)
            self.topics = topics
        finally:
            broker.close()

    def splits(self, start: SourceOffsets | None, stop: SourceOffsets) -> tuple[SplitRange, ...]:
        """Return the ranges of an epoch.

        Args:
            start: where the epoch before ended; None: nothing was read yet.
            stop: where it ends.
        """
        check_same_cluster(stop, self.cluster_id, self.config.bootstrap_servers)
        if start is None or start.initial:  # its own end has the starts, as they were resolved
            start = SourceOffsets(stop.cluster_id, stop.group)
        return () if stop.initial else plan_splits(start, stop)


@dataclass(frozen=True)
class WithColumns:
    """A function that conforms rows to the declared columns, or raises."""

    columns: pa.Schema
    what: str

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with the declared columns, in their order."""
        return conform(rows, self.columns, self.what)


@dataclass(frozen=True)
class NumberedRows:
    """A function that makes rows of one input rows of the table of all."""

    inputs: KeyedInputs
    number: int

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows in the struct of their input."""
        return self.inputs.numbered(self.number, rows)


def joined(
    inputs: Sequence[PipelineInput], steps: tuple[Step, ...], cluster: Cluster
) -> tuple[Columns, tuple[tuple[BatchFunction, ...], ...]]:
    """Return the columns of all inputs' rows, and what the rows of each pass through before.

    Args:
        inputs: of the pipeline.
        steps: that follow.
        cluster: whose Spark may have to read columns.

    Raises:
        OptionError: columns are not known, or not equal.
    """
    if len(inputs) == 1 and not inputs[0].name:
        return inputs[0].ddl, ((),)
    texts = [columns_after(source) for source in inputs]
    schemas = [
        _nullable(cluster.columns(text, f"the columns of {source.text}"))
        for source, text in zip(inputs, texts, strict=True)
    ]
    if not inputs[0].name:
        for source, schema in zip(inputs[1:], schemas[1:], strict=True):
            _check_equal(inputs[0], schemas[0], source, schema)
        return texts[0], tuple(
            (*_functions(source), WithColumns(schemas[0], f"the rows of {source.text}"))
            for source in inputs
        )
    first = steps[0] if steps else None
    assert isinstance(first, Process), "checked before"
    table = KeyedInputs(
        [
            _keyed_input(first, *arguments)
            for arguments in zip(inputs, schemas, *zip(*first.inputs, strict=True), strict=True)
        ]
    )
    return table.columns, tuple(
        (
            *_functions(source),
            WithColumns(table.inputs[number].columns, f"the rows of {source.text}"),
            NumberedRows(table, number),
        )
        for number, source in enumerate(inputs)
    )


def _keyed_input(
    first: Process,
    source: PipelineInput,
    schema: pa.Schema,
    key: tuple[str, ...],
    event_time: str | None,
) -> KeyedInput:
    """Return an input of a step; Kafka's columns that it does not need are not even made."""
    processor = first.processor
    source.event_time = event_time
    if not isinstance(processor, ByColumns) or processor.carried is None:
        return KeyedInput(source.name, schema, key, event_time)
    layout = source.read.layout
    prefix = layout.prefix if layout.value is not None else ""
    kafkas = {f"{prefix}{name}" for name in layout.metadata}
    if layout.headers:
        kafkas.add(f"{prefix}headers")
    # What a function of the user's returns is columns that they want.
    carried = processor.carried.of(source.name, schema.names, set() if source.steps else kafkas)
    if not source.steps:
        layout = lean_layout(layout, {*carried, *key, event_time})
        source.read = replace(source.read, layout=layout)
        schema = pa.schema([field for field in schema if field.name in layout.schema.names])
    return KeyedInput(source.name, schema, key, event_time, carried)


def value_mode_of(inputs: Sequence[PipelineInput]) -> str:
    """Return what is done with malformed values: `deadletter`, if any input asks for it."""
    modes = [source.options.value_mode for source in inputs]
    return DEADLETTER if DEADLETTER in modes else modes[0]


def check_dead_letters(
    inputs: Sequence[PipelineInput],
    topology: OutputTopology,
    *,
    has_transform: bool,
    has_keyed: bool,
) -> None:
    """Refuse dead letters that the pipeline's steps could not bring to their topic exactly once.

    Raises:
        OptionError: of Avro values before DataFrame code, or without an epoch's transaction.
    """
    asks_registry = any(source.options.asks_registry for source in inputs)
    if has_transform and asks_registry and value_mode_of(inputs) == DEADLETTER:
        raise OptionError(
            "mode='deadletter' with Avro or Protobuf values and a transform step: the dead letters "
            "of such a pipeline are found by a second reading, and a schema that became known in "
            "between would be in neither output. Use map_batches instead of transform, or another "
            "mode."
        )
    if topology.decider is None and topology.dead_letter_topic and (has_keyed or has_transform):
        raise OptionError(
            "dead letters of a pipeline with process or transform steps travel with the epoch's "
            "own transaction: use KafkaSink(transactions='epoch'), or another mode than "
            "'deadletter' in the source's value"
        )


def check_groups(inputs: Sequence[PipelineInput]) -> None:
    """Refuse inputs that would show their positions in one place; called after their checks.

    Raises:
        OptionError: two read a topic of one cluster, and show it in one consumer group.
    """
    shown: dict[tuple[str, str, str], PipelineInput] = {}
    for source in inputs:
        if not source.options.shown_group:
            continue
        for topic in source.topics:
            other = shown.setdefault((source.cluster_id, source.options.shown_group, topic), source)
            if other is not source:
                raise OptionError(
                    f"{other.text} and {source.text} both read topic {topic!r}, and group "
                    f"{source.options.shown_group!r} is to show how far: it has one position. Give "
                    f"each KafkaSource its own group_id, or one '' for none"
                )


def columns_after(source: PipelineInput) -> str:
    """Return the columns after the input's own functions, as DDL.

    Raises:
        OptionError: the last function does not declare its columns.
    """
    maker = maker_of_columns(source.steps)
    columns = maker.schema if isinstance(maker, MapBatches) else source.ddl
    if columns is None:
        raise OptionError(
            f"{source.text}: its last map_batches needs schema=, e.g. schema='dest string, n "
            f"bigint': what it returns meets the rows of other inputs"
        )
    return str(ddl.text_of(columns))


def _functions(source: PipelineInput) -> tuple[BatchFunction, ...]:
    return tuple(step.function for step in source.steps)


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(field.name, field.type) for field in schema])


def _check_equal(
    first: PipelineInput, expected: pa.Schema, source: PipelineInput, schema: pa.Schema
) -> None:
    """Raise OptionError where the columns of two inputs are not the same, in any order."""
    differing = [
        f"{name!r} is {_type(expected, name)} in {first.text}, and {_type(schema, name)} in "
        f"{source.text}"
        for name in dict.fromkeys([*expected.names, *schema.names])
        if _type(expected, name) != _type(schema, name)
    ]
    if differing:
        raise OptionError(
            f"read(): the inputs become one stream, so their columns have to be equal: "
            f"{'; '.join(differing)}. Make them so with ts.stream(…).map_batches(…, schema=…); or "
            f"give the inputs names, read(first=…, second=…), if a process step is to get both"
        )


def _type(schema: pa.Schema, name: str) -> str:
    return str(schema.field(name).type) if name in schema.names else "not there"


@dataclass(frozen=True)
class TableDeclaration:
    """A broadcast table as the user wrote it.

    Args:
        input: the control topic, with the steps of its stream.
        key: the columns that tell rows apart.
        deleted: true for rows that delete the row of their key; None: no row deletes.
        succession: see `operator_state.TableStep`.
    """

    input: InputDeclaration
    key: tuple[str, ...]
    deleted: Predicate | None = None
    succession: Succession = AS_BEFORE


@dataclass(frozen=True)
class ListDeclaration:
    """A list state as the user wrote it.

    Args:
        uid: names it.
        columns: of an element.
        union, succession: see `operator_state.ListStep`.
    """

    uid: str
    columns: Columns
    union: UnionFunction | None = None
    succession: Succession = AS_BEFORE


class PipelineTable:
    """A broadcast table, checked.

    Args:
        declared: as the user declared it.
        cluster: whose Spark may have to read its columns.

    Raises:
        OptionError: its rows cannot be a table.
    """

    def __init__(self, declared: TableDeclaration, cluster: Cluster) -> None:
        self.input = PipelineInput(declared.input, cluster, waits=False)
        self.uid = declared.input.uid
        what = f"broadcast table {self.uid!r}"
        if self.input.options.value_mode == DEADLETTER:
            raise OptionError(
                f"{what}: each task reads its topic, and would put its malformed records into the "
                f"dead letters: choose mode 'failfast' or 'dropmalformed' for its value"
            )
        options = self.input.options
        if options.own_count_max is not None or options.offset_count_min > 1:
            raise OptionError(
                f"{what}: an epoch has all of the table that is there when it is planned, or its "
                f"rows would meet half of it: leave out max_offsets_per_trigger and "
                f"minOffsetsPerTrigger"
            )
        if any(step.outputs or step.state is not None for step in self.input.steps):
            raise OptionError(
                f"{what}: each task reads its topic, so steps of its stream have neither side "
                f"outputs nor state of their own"
            )
        read, functions = self.input.read, tuple(step.function for step in self.input.steps)
        if functions:
            columns = cluster.columns(columns_after(self.input), f"the columns of {what}")
            columns = pa.schema([pa.field(field.name, field.type) for field in columns])
            functions = (*functions, WithColumns(columns, f"the rows of {what}"))
        else:
            # Of Kafka's own columns only those that are asked for.
            layout = self.input.read.layout
            prefix = layout.prefix if layout.value is not None else ""
            names = tuple(
                name
                for name in layout.metadata
                if prefix + name in declared.key or (name == "key" and layout.key is not None)
            )
            layout = replace(layout, metadata=names, headers=False)
            read, columns = replace(read, layout=layout), layout.schema
        try:
            codec = TableCodec(columns, declared.key)
            dumps(declared.deleted)
        except OptionError as error:
            raise OptionError(f"{what}: {error}") from error
        except Exception as error:
            raise OptionError(
                f"{what}: its delete= cannot be sent to the tasks that call it: {error}"
            ) from error
        read = replace(read, functions=functions)
        self.step = TableStep(self.uid, codec, read, declared.deleted, declared.succession)


def lists_of(declared: Sequence[ListDeclaration], cluster: Cluster) -> tuple[ListStep, ...]:
    """Return the list states of a pipeline.

    Raises:
        OptionError: one cannot be as declared.
    """
    steps = []
    for declaration in declared:
        what = f"list state {declaration.uid!r}"
        try:
            codec = ListCodec(columns_of(cluster, declaration.columns, f"the columns of {what}"))
        except OptionError as error:
            raise OptionError(f"{what}: {error}") from error
        try:
            dumps(declaration.union)
        except Exception as error:
            raise OptionError(
                f"{what}: its union= cannot be sent to the tasks that call it: {error}"
            ) from error
        steps.append(ListStep(declaration.uid, codec, declaration.union, declaration.succession))
    return tuple(steps)


def tables_of(
    declared: Sequence[TableDeclaration],
    cluster: Cluster,
    inputs: Sequence[str],
    stages: Stages,
    lists: Sequence[ListStep],
) -> tuple[PipelineTable, ...]:
    """Return the broadcast tables of a pipeline, checked beside its other state.

    Args:
        declared: as the user wrote them.
        cluster: whose Spark may have to read columns.
        inputs: the ids of the other inputs.
        stages: the steps of the pipeline.
        lists: the list states of its readers.

    Raises:
        OptionError: one cannot be as declared, or its uid is that of something else; or there is
            operator state where no task could have it.
    """
    steps = [stage.uid for stage in stages.keyed]
    refuse_lists(function for stage in stages.keyed for function in stage.functions)
    if stages.frames is not None:
        refuse_transform([*(table.input.uid for table in declared), *(step.uid for step in lists)])
    for list_step in lists:
        if list_step.uid in (*steps, *(table.input.uid for table in declared)):
            raise OptionError(
                f"list state {list_step.uid!r}: other state of the pipeline has that uid, and both "
                f"would be one in the checkpoint: give it another one"
            )
    taken: Mapping[str, str] = {
        **dict.fromkeys(steps, "a process step"),
        **dict.fromkeys(inputs, "an input"),
    }
    for table in declared:
        uid = table.input.uid
        if uid in taken:
            raise OptionError(
                f"broadcast table {uid!r}: {taken[uid]} of the pipeline has that uid, and both "
                f"would be one in the checkpoint: give the table another one"
            )
    return tuple(PipelineTable(table, cluster) for table in declared)
