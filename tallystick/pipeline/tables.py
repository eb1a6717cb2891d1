"""The broadcast tables of a started pipeline: an input that each task reads, and rows by key."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from tallystick.codec.formats import DEADLETTER
from tallystick.errors import OptionError
from tallystick.pipeline.inputs import InputDeclaration, PipelineInput, WithColumns, columns_after
from tallystick.pipeline.keyed import columns_of
from tallystick.spark.cluster import Cluster
from tallystick.spark.gang.messages import dumps
from tallystick.state.operator_state import ListCodec, TableCodec
from tallystick.tasks.keyed_step import Columns, Stages
from tallystick.tasks.lists import ListStep, UnionFunction, refuse_lists
from tallystick.tasks.outputs import Predicate
from tallystick.tasks.tables import TableStep, refuse_transform


@dataclass(frozen=True)
class TableDeclaration:
    """A broadcast table as the user wrote it.

    Args:
        input: the control topic, with the steps of its stream.
        key: the columns that tell rows apart.
        deleted: true for rows that delete the row of their key; None: no row deletes.
    """

    input: InputDeclaration
    key: tuple[str, ...]
    deleted: Predicate | None = None


@dataclass(frozen=True)
class ListDeclaration:
    """A list state as the user wrote it.

    Args:
        uid: names it.
        columns: of an element.
        union: see `lists.ListStep`.
    """

    uid: str
    columns: Columns
    union: UnionFunction | None = None


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
        is_bounded = self.input.is_bounded and options.offset_count_max is not None
        if is_bounded or options.offset_count_min > 1:
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
        self.step = TableStep(self.uid, codec, read, declared.deleted)


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
        steps.append(ListStep(declaration.uid, codec, declaration.union))
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
