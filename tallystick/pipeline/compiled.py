"""A started pipeline: inputs, steps and sinks of its epochs, and the engine for tasks."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import pyarrow as pa
from pyspark.sql import DataFrame

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.local.store import LocalState
from tallystick.codec.formats import DEADLETTER
from tallystick.epoch.manifest import Identity, Manifest, epoch_of
from tallystick.epoch.tokens import Token
from tallystick.errors import DataLossError, OptionError, TallystickError
from tallystick.expressions.binding import Condition, Projection
from tallystick.expressions.zones import check_zone
from tallystick.kafka.config import TRANSACTION_TIMEOUT_MS, KafkaConfig
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.preflight import Right, check_all, rights_to_show
from tallystick.pipeline.definitions import table_with_definitions, with_definitions
from tallystick.pipeline.graph import graph_of
from tallystick.pipeline.input_planning import by_input
from tallystick.pipeline.inputs import (
    InputDeclaration,
    ListDeclaration,
    PipelineInput,
    TableDeclaration,
    WithColumns,
    check_dead_letters,
    check_groups,
    joined,
    lists_of,
    tables_of,
    value_mode_of,
)
from tallystick.pipeline.keyed import check_sendable, keyed_steps, lean_layout
from tallystick.pipeline.listeners import PIPELINES, counts_of
from tallystick.pipeline.sinks import (
    STRAYS_LIVE_S,
    Sinks,
    engine_of,
    is_speculative,
    side_outputs,
    with_columns,
)
from tallystick.pipeline.topics import with_fields
from tallystick.pipeline.topology import OutputTopology
from tallystick.ports import Engine, Fetch
from tallystick.run.driver import Driver, Listener
from tallystick.run.part_times import PartTimes
from tallystick.spark.cluster import JOBS, Cluster, execution_of, tasks_at_once
from tallystick.spark.engine import SplitsEngine, read_frame, transformed
from tallystick.spark.gang.gang import GangTasks, size_of
from tallystick.spark.jobs import JobTasks
from tallystick.spark.jvm import jvm_end
from tallystick.spark.tasks import (
    BroadcastPlans,
    InputSplits,
    TaskRunner,
    Unread,
    UnreadInput,
    share,
)
from tallystick.state.catalog import StepState
from tallystick.storage.file_storage import FileStorage
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.tasks.event_times import InputState
from tallystick.tasks.keyed import KeyedStep, WorkerHost
from tallystick.tasks.operator_state import parts_of
from tallystick.tasks.outputs import MAIN, DeclaredFunction, Filter
from tallystick.tasks.read import BatchFunction
from tallystick.tasks.read_plan import ReadPlan
from tallystick.tasks.steps import FrameStage, Step, arrange, refuse_outputs

logger = logging.getLogger(__name__)


class EpochInput(Protocol):
    """The sources and the clock of an epoch."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The end offsets of the epoch's inputs, as JSON texts."""
        ...

    @property
    def previous_sources(self) -> tuple[str, ...]:
        """The end offsets of the epoch before; none before the first."""
        ...

    @property
    def timestamp_ms(self) -> int:
        """The processing time of the epoch."""
        ...


class PipelineRun:
    """The parts of one started pipeline, on the driver."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        inputs: Sequence[InputDeclaration],
        steps: tuple[Step, ...],
        topology: OutputTopology,
        listener: Listener | None,
        allow_dropped_state: frozenset[str] = frozenset(),
        execution: str | None = None,
        tables: Sequence[TableDeclaration] = (),
        lists: Sequence[ListDeclaration] = (),
    ) -> None:
        self.name = name
        self.cluster = cluster
        self._topology = topology
        self.parts = PartTimes(counts_of(name, topology, listener))
        self._sinks: Sinks | None = None
        self._gang: GangTasks | None = None
        self._tasks: TaskRunner | None = None
        self.inputs = tuple(PipelineInput(declared, cluster) for declared in inputs)
        topology.check_dead_letters(value_mode_of(self.inputs))
        columns, joining = joined(self.inputs, steps, cluster)
        steps = with_columns(cluster, steps, columns)
        self._stages = arrange(steps, columns)
        list_steps, uids = lists_of(lists, cluster), [source.uid for source in self.inputs]
        self.tables = tables_of(tables, cluster, uids, self._stages, list_steps)
        self.all_inputs = (*self.inputs, *(table.input for table in self.tables))
        """Those of broadcast tables too."""
        frames = self._stages.frames
        has_transform = frames is not None
        if has_transform:
            refuse_outputs(step for source in self.inputs for step in source.steps)
        self.execution = execution_of(name, execution, cluster.conf, has_transform=has_transform)
        keyed = with_definitions(keyed_steps(cluster, self._stages), self._stages, self.inputs)
        is_routed = bool(keyed) and frames is None and not any(joining)
        for source, before in zip(self.inputs, joining, strict=True):
            source.read = replace(source.read, functions=(*before, *self._stages.before))
            source.read = _without_unused(source, keyed[0] if is_routed else None)
        if is_routed:
            keyed = (_with_columns_of(keyed[0], self.inputs[0].read), *keyed[1:])
        self.keyed = PipelinePlan(
            keyed,
            task_count=tasks_at_once(cluster, self.execution),
            allow_dropped=allow_dropped_state,
            functions=() if frames is None else self._stages.after,
            slice_bytes=min(source.options.task_bytes_max for source in self.inputs),
            tables=tuple(map(table_with_definitions, (table.step for table in self.tables))),
            lists=list_steps,
            is_noted=not has_transform,
        )
        for source in self.inputs:
            source.read = replace(
                source.read,
                event_time=self.keyed.event_time,
                source_time=None if has_transform else source.source_time(keyed, self._stages),
            )
        self._split_count_mins = {
            source.uid: self._pieces(source.options.split_count_min) for source in self.inputs
        }
        self.columns = self._known_columns()
        all_steps = [*(step for source in self.all_inputs for step in source.steps), *steps]
        self.outputs = side_outputs(all_steps, self.keyed.steps, topology)
        """The columns of each side output."""
        self._check_expressions()
        PIPELINES[name].graph = graph_of(self.all_inputs, self.keyed.steps, topology)
        check_sendable(all_steps)
        check_dead_letters(
            self.inputs, topology, has_transform=has_transform, has_keyed=bool(keyed)
        )

    def _known_columns(self) -> pa.Schema | None:
        """The columns of the rows that are written; None: nobody knows before there are some."""
        steps, read = self.keyed.steps, self.inputs[0].read
        if steps:
            return _columns_after(steps[-1].functions, steps[-1].output)
        if self._stages.frames:
            return _columns_after(self._stages.after, None)
        return _columns_after(read.functions, read.layout.schema)

    def _check_expressions(self) -> None:
        """Refuse conditions of sinks on missing columns, and expressions in another time zone.

        Raises:
            ExpressionError: an expression is not for these columns, or not for the time zone of
                the session.
        """
        sent = {MAIN: self.columns, **self.outputs}
        ways: list[tuple[Sequence[BatchFunction], pa.Schema | None]] = [
            *((source.read.functions, source.read.layout.schema) for source in self.inputs),
            *((step.functions, step.output) for step in self.keyed.steps),
            (self._stages.after if self._stages.frames else (), None),
        ]
        for one in self._topology.selections.values():
            condition = () if one.when is None else (Filter(one.when),)
            ways.append(((*condition, *one.functions), sent.get(one.output)))
        for functions, columns in ways:
            for function in functions:
                inner = function.predicate if isinstance(function, Filter) else function
                if isinstance(inner, Condition) and columns is not None:
                    inner.check(columns)
                if isinstance(inner, Condition | Projection):
                    check_zone(inner, columns, self.cluster.time_zone)
                columns = _columns_after((function,), columns)

    def _pieces(self, split_count_min: int | None) -> int | None:
        """Return how many pieces partitions may be cut into, as far as their order allows it.

        Tasks that write to sinks of their own do so side by side. An exchange before them puts the
        pieces in order again: that of a keyed step does, that of the epoch's own transaction is
        not for other sinks.
        """
        if split_count_min is None or self.keyed.steps or not self._topology.others:
            return split_count_min
        logger.warning(
            "pipeline %r: min_partitions=%d has no effect: the tasks that read also write to %s, "
            "and pieces of a partition that are written at the same time would not be in order. "
            "Use KafkaSink(transactions='epoch') alone, or more partitions in the topic",
            self.name,
            split_count_min,
            ", ".join(uid for uid, _ in self._topology.others),
        )
        return None

    def check(
        self,
        trigger_interval_ms: int | None,
        *,
        is_new: bool,
        accepted: frozenset[str] = frozenset(),
        is_dry: bool = False,
    ) -> None:
        """Find what cannot work before anything starts.

        Args:
            trigger_interval_ms: how long Spark waits between two epochs; None: it does not.
            is_new: no epoch was planned yet. Later, a topic that is gone is a loss, and the
                policy's to judge.
            accepted: decisions that the user stated.
            is_dry: change nothing: sinks that are not Kafka's are not tried out.

        Raises:
            OptionError: a topic, an ACL, a broker setting or a Spark setting is in the way.
        """
        tasks = self.keyed.steps[-1].parallelism or 0 if self.keyed.steps else 0
        self._sinks = Sinks(self._topology, self.name, self.cluster, trigger_interval_ms, tasks)
        try:
            sinks = partial(self._check_sinks, accepted, is_dry)
            check_all([partial(self.check_source, is_new=is_new), sinks])
        except BaseException:
            self.close()
            raise

    def check_source(self, *, is_new: bool) -> None:
        """Check the clusters that are read, their topics, and the rights to read them.

        Raises:
            OptionError: a topic is not there, or a right is missing.
        """
        check_all([partial(source.check, is_new=is_new) for source in self.all_inputs])
        check_groups(self.all_inputs)

    def _check_sinks(self, accepted: frozenset[str], is_dry: bool) -> None:
        assert self._sinks is not None, "made before it is checked"
        cluster = self._sinks.cluster
        cluster_id = "" if cluster is None else cluster.broker.cluster_id()
        for source in self.all_inputs:
            written = self._topology.written_to(source.config.bootstrap_servers)
            if cluster is not None and source.cluster_id == cluster_id:
                written = (*cluster.outputs, *written)
            for output in written:
                self._check_circle(output, source)
        self._sinks.check(self.shown_rights(cluster_id), accepted=accepted, is_dry=is_dry)

    def shown_rights(self, cluster_id: str) -> tuple[Right, ...]:
        """Return the rights needed to show positions of the inputs in a cluster.

        Call it after `check_source`.
        """
        return tuple(
            right
            for source in self.all_inputs
            if source.options.shown_group and source.cluster_id == cluster_id
            for right in rights_to_show(source.options.shown_group, source.topics)
        )

    @property
    def topology(self) -> OutputTopology:
        """The sinks."""
        return self._topology

    @property
    def configs(self) -> list[KafkaConfig]:
        """The settings of the clusters that are read and written, each once."""
        read = (source.config for source in self.all_inputs)
        return list(dict.fromkeys([*read, *self._topology.configs]))

    def newest_token(self, lineage: str) -> Token | None:
        """See `Sinks.newest_token`; call it after `check`."""
        assert self._sinks is not None, "made by the check"
        return self._sinks.newest_token(lineage)

    def close(self) -> None:
        """Hang up, when the run is over or does not come about."""
        try:
            if self._gang is not None:
                self._gang.close()
            if self._sinks is not None:
                self._sinks.close()
        finally:
            self.cluster.close()

    def _check_circle(self, sink: KafkaOutput, source: PipelineInput) -> None:
        """Warn of an output topic that the pipeline reads; refuse such a dead-letter topic."""
        if sink.topic in source.topics:
            logger.warning(
                "pipeline %r writes to topic %r and reads it too: whatever it writes comes back",
                self.name,
                sink.topic,
            )
        if sink.dead_letter_topic in source.topics:
            raise OptionError(
                f"dead_letter_topic {sink.dead_letter_topic!r} is read by this very pipeline: its "
                f"dead letters would come back to it for ever. Name another topic, or read others."
            )

    def make_driver(self, identity: Identity, storage: FileStorage) -> Driver:
        """Return the driver of one run of the query."""
        assert self._sinks is not None, "checked before it is started"
        worker_host = LocalState(storage.uri, identity.lineage)
        self.keyed = replace(self.keyed, worker_host=worker_host)
        open_now = PIPELINES[self.name].transactions
        return self._sinks.make_driver(
            identity,
            storage,
            listener=self.parts,
            note=open_now.note,
            on_lingering=open_now.replace_all,
        )

    def use(
        self, sinks: Sinks, tasks: TaskRunner, fetch: Fetch, worker_host: WorkerHost, cluster: str
    ) -> None:
        """Run over other ports than those to Kafka and Spark; instead of `check`.

        Args:
            sinks: in place of those of `topology`.
            tasks: runs the tasks.
            fetch: reads the records of all inputs.
            worker_host: see `PipelinePlan`.
            cluster: the id of the cluster that `fetch` reads.
        """
        self._sinks, self._tasks = sinks, tasks
        for source in self.all_inputs:
            source.cluster_id = cluster
            source.read = replace(source.read, fetch=fetch)
        tables = (replace(step, read=replace(step.read, fetch=fetch)) for step in self.keyed.tables)
        self.keyed = replace(self.keyed, tables=tuple(tables), worker_host=worker_host)

    def start_tasks(self) -> None:
        """Start resident tasks if the pipeline runs with a gang; call `make_driver` first."""
        if self.execution.kind == JOBS:
            return
        decider = self._topology.decider
        # Kafka aborts an epoch that takes longer; then its members hang, or it was in vain.
        epoch_max_s = None if decider is None else decider.transaction_timeout_ms / 1000
        context = self.cluster.context
        size = size_of(context, self.keyed.task_count)
        self._gang = GangTasks(context, size, self.name, self._known(), epoch_max_s)
        self._gang.prepare()

    def check_tasks(self) -> None:
        """Raise the error for tasks that can never come up, before records come.

        Raises:
            TallystickError: Spark has ended.
            OptionError: see `GangTasks.check`.
        """
        if self.cluster.is_there and self.cluster.context._jsc is None:
            raise TallystickError(f"pipeline {self.name!r}: its SparkContext was stopped")
        if self.cluster.is_there and (end := jvm_end()):
            raise TallystickError(f"pipeline {self.name!r}: {end}")
        if self._gang is not None:
            self._gang.check()

    def rescale(self, parallelism: int, state: tuple[StepState, ...]) -> None:
        """Divide readers and keys again; call it between two epochs.

        Args:
            parallelism: how many tasks read, and hold the keys of each step.
            state: what is committed.

        Raises:
            OptionError: a step has fewer key groups.
        """
        self.keyed = self.keyed.rescaled(parallelism, state)
        if self._gang is not None:
            self._gang.resize(size_of(self.cluster.context, parallelism), self._known())
            self._gang.prepare()

    def _known(self) -> tuple[object, ...]:
        """Return what the plans of all epochs have in common."""
        steps = self.keyed.steps
        table_steps = [table.step for table in self.tables]
        reads = [*(source.read for source in self.inputs), *(table.read for table in table_steps)]
        return (
            *table_steps,
            *self.keyed.lists,
            *(
                part
                for list_step in self.keyed.lists
                for part in (list_step.codec, list_step.union)
            ),
            *(part for table in table_steps for part in (table.read, table.codec, table.deleted)),
            *(part for step in steps for part in parts_of(step.functions)),
            *(part for read in reads for part in (read.fetch, read.layout, read.policy)),
            *(part for read in reads for part in (read.functions, *parts_of(read.functions))),
            *(source.config for source in self.all_inputs),
            self._stages.before,
            self._stages.after,
            self.keyed.worker_host,
            *(function for _, function in self._topology.functions),
            *steps,
            *(part for step in steps for part in (step.key, step.columns, step.output)),
            *(part for step in steps for part in (step.processor, step.functions, step.declared)),
        )

    def cancel(self) -> None:
        """End what resident tasks are doing: the query is stopped."""
        if self._gang is not None:
            self._gang.cancel()

    @property
    def strays_live_s(self) -> float:
        """The time after an epoch in which a loser of a speculation may begin to write."""
        has_strays = self.execution.kind == JOBS and is_speculative(self.cluster.conf)
        return STRAYS_LIVE_S if has_strays else 0.0

    @property
    def transaction_timeout_ms(self) -> int:
        """The timeout of an epoch's transaction; the default where there is none."""
        decider = self._topology.decider
        return TRANSACTION_TIMEOUT_MS if decider is None else decider.transaction_timeout_ms

    def make_engine(self, batch: EpochInput, source: InputState | None = None) -> Engine:
        """Return the engine of an epoch.

        Args:
            batch: the epoch's offsets and clock.
            source: the input's state; None: not known, and watermarks go by rows alone.
        """
        assert self._sinks is not None, "checked before it is started"
        sinks, stages = self._sinks, self._stages
        unread = self._unread(batch)
        if stages.frames is None:
            return SplitsEngine(
                tasks=self._tasks or self._gang or JobTasks(self.cluster.context),
                unread=unread,
                last=lambda checkpoint_id: sinks.last((), checkpoint_id),
                write=sinks.write_plan,
                keyed=self.keyed,
                timestamp_ms=batch.timestamp_ms,
                source=source,
            )
        twice = unread if value_mode_of(self.inputs) == DEADLETTER else None
        after = () if self.keyed.steps else stages.after
        rows = partial(self._rows, unread, stages.frames)
        is_over = source is not None and source.is_over
        return engine_of(
            sinks, self.cluster.session, rows, after, twice, self.keyed, batch.timestamp_ms, is_over
        )

    @property
    def previous_inputs(self) -> dict[str, str]:
        """The uids under which a checkpoint may have a table's positions, by those of now."""
        pairs = ((table.uid, table.step.succession.previous_uid) for table in self.tables)
        return {uid: previous for uid, previous in pairs if previous}

    def _unread(self, batch: EpochInput) -> Unread:
        """Return the splits that an epoch reads, with inputs matched by id.

        Raises:
            OptionError: the epoch is to run again, and the pipeline has lost one of its inputs.
        """
        starts = by_input(batch.previous_sources, self.previous_inputs)
        stops = by_input(batch.sources, self.previous_inputs)
        gone = sorted(stops.keys() - {source.uid for source in self.all_inputs})
        if gone:
            raise OptionError(
                f"pipeline {self.name!r}: an epoch of an earlier run has to run again, and it read "
                f"input {gone[0]!r}, which the pipeline no longer has: put it back until the epoch "
                f"has run"
            )
        read_inputs = [source for source in self.inputs if source.uid in stops]
        splits = [
            source.splits(starts.get(source.uid), stops[source.uid]) for source in read_inputs
        ]
        shares = share(
            self.keyed.task_count,
            *(
                InputSplits(input_splits, self._split_count_mins[source.uid])
                for source, input_splits in zip(read_inputs, splits, strict=True)
            ),
            takes_all=bool(self.keyed.lists),
        )
        control = {
            table.uid: table.input.splits(starts.get(table.uid), stops[table.uid])
            for table in self.tables
            if table.uid in stops
        }
        most_ms = self.keyed.event_time_max_ahead_ms
        reads = [source.read.until(batch.timestamp_ms, most_ms) for source in read_inputs]
        return Unread(tuple(map(UnreadInput, shares, reads)), control)

    def _rows(
        self, unread: Unread, frames: FrameStage, broadcast_plans: BroadcastPlans
    ) -> DataFrame:
        """Return an epoch's rows after the `transform` steps."""
        rows = read_frame(self.cluster.session, unread, frames.ddl, broadcast_plans)
        return transformed(frames.functions, rows)


def check_checkpoint(storage: FileStorage, name: str) -> Manifest | None:
    """Refuse a checkpoint in which another pipeline's manifests lie.

    A restored savepoint may be of any pipeline: whether it may go on is the coordinator's verdict.

    Returns:
        The newest manifest of an epoch that Spark logged as done: what an attempt left that never
        was committed must not stand in the way of going back. None if there is none; the driver
        checks again, by what Kafka committed.

    Raises:
        DataLossError: it is another pipeline's.
        ManifestError: that manifest is damaged.
    """
    folder = CheckpointFolder(storage)
    paths = folder.manifest_paths()
    newest = max(folder.done_by_spark(), default=-1)
    logged = [path for path in paths if epoch_of(path) <= newest]
    if not paths:
        return None
    # Before the first epoch is logged, whose the checkpoint is shows by any of them.
    manifest = folder.read_manifest((logged or paths)[-1])
    if manifest.pipeline != name and manifest.origin is None:
        raise DataLossError(
            f"checkpoint {storage.location} belongs to pipeline {manifest.pipeline!r}, this one is "
            f"{name!r}: use that name, or a checkpoint folder of its own. Nothing was changed."
        )
    return manifest if logged else None


def _columns_after(
    functions: Sequence[BatchFunction], columns: pa.Schema | None
) -> pa.Schema | None:
    """Return the columns of rows that have passed through functions; None: nobody says.

    Args:
        functions: of `map_batches`, and those that conform rows to declared columns.
        columns: of the rows before.
    """
    for function in functions:
        if isinstance(function, DeclaredFunction | WithColumns):
            columns = function.columns
        elif isinstance(function, Projection):
            columns = None if columns is None else function.output(columns)
        elif not isinstance(function, Filter):
            columns = None
    return columns


def _without_unused(source: PipelineInput, first: KeyedStep | None) -> ReadPlan:
    """Drop the columns that nothing names up to the first `select`, or the first keyed step.

    Args:
        source: the input, with the functions that its rows pass through.
        first: the keyed step behind them; None: there is none, or it takes all columns.
    """
    read = source.read
    names: set[str] = set()
    for function in read.functions:
        match function:
            case Filter(Condition() as condition):
                names |= condition.node.columns()
            case Projection():
                names |= function.names()
                if not function.beside:
                    break
            case _:
                return read
    else:
        if first is None:
            return read
        names |= {*first.routed.names}
        if first.watermark_column is not None:
            names.add(first.watermark_column)
    small = {name.lower() for name in names}
    used = [name for name in read.layout.schema.names if name.lower() in small]
    layout = with_fields(lean_layout(read.layout, used), source.options, used)
    return replace(read, layout=layout)


def _with_columns_of(first: KeyedStep, read: ReadPlan) -> KeyedStep:
    """Return the first keyed step with the columns that rows come with, without dropped ones."""
    there = _columns_after(read.functions, read.layout.schema)
    if there is None:
        return first
    return replace(first, columns=pa.schema([c for c in first.columns if c.name in there.names]))


def newest_manifest(storage: FileStorage, name: str) -> Manifest | None:
    """Return the newest manifest of a pipeline, committed or not; None: the checkpoint is new.

    Raises:
        DataLossError, ManifestError: see `check_checkpoint`.
    """
    check_checkpoint(storage, name)
    folder = CheckpointFolder(storage)
    paths = folder.manifest_paths()
    return folder.manifest(paths[-1]) if paths else None
