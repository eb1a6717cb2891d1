"""`Pipeline`: read, map, transform, write, start.

    query = (
        Pipeline("late-flights")
        .read(KafkaSource("localhost:9092", topics=["flights"], value=Json("dest string, n int")))
        .map_batches(late_only)
        .write(KafkaSink("localhost:9092", topic="late", key="dest", value=Json()))
        .start(checkpoint="/data/late-flights")
    )
    query.awaitTermination()

The functions of `map_batches` are chained into the reader: they get its decoded Arrow batches, in
the same task, and their results are encoded for Kafka right there. Tasks stay in the same Python
processes of Spark for the life of a run; no query of Structured Streaming is involved.

With state, exactly once with the output:

    .key_by("dest").process(aggregate({"n": count()}))

After `process` the functions run in the task that owns the key.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from tallystick.api.explain import explained
from tallystick.api.forks import as_forked
from tallystick.api.in_process import is_in_process, refuse_in_process, start_in_process
from tallystick.api.kafka_sink import KafkaSink, check_columns, check_for_pipeline, topology_of
from tallystick.api.kafka_source import KafkaSource
from tallystick.api.processors import ahead_ms, delays_ms, processor_of
from tallystick.api.routing import AnySink, routing_of
from tallystick.api.streams import (
    NO_INPUTS,
    Expressions,
    Inputs,
    MapFunction,
    Source,
    State,
    Stream,
    computing,
    filter_step,
    inputs_of,
    keys_of,
    lists_in,
    map_step,
    tables_in,
    times_of,
    with_aggregated,
)
from tallystick.arguments import checked
from tallystick.epoch.transactional_ids import token_group
from tallystick.epoch.two_phase import Sink
from tallystick.errors import (
    NeedsSparkError,
    OptionError,
    StepMissingError,
    TallystickError,
    UnknownNameError,
)
from tallystick.host.installed import pip_install
from tallystick.kafka.config import KafkaConfig
from tallystick.options.table import plain_client_options
from tallystick.pipeline.compiled import PipelineRun
from tallystick.pipeline.first_start import check_first_start
from tallystick.pipeline.listeners import of_user
from tallystick.pipeline.loop import opened, start_loop
from tallystick.pipeline.recovery import Recovery, recover
from tallystick.pipeline.topology import OutputTopology
from tallystick.run.console import Console
from tallystick.run.driver import Listener
from tallystick.run.epoch_loop import Trigger, trigger_arguments
from tallystick.run.query import Query
from tallystick.run.signals import interruption, is_interactive
from tallystick.spark.cluster import JOBS, RESIDENT, Cluster
from tallystick.spark.jvm import reason_of_end
from tallystick.state.compatibility import Succession
from tallystick.state.functions.processing import Processor
from tallystick.storage.file_storage import FileStorage
from tallystick.storage.places import Place, make_local, resolved
from tallystick.tasks.hints import returns_nothing, warn_of_silence
from tallystick.tasks.outputs import MAIN, Predicate, Selection, users_function
from tallystick.tasks.steps import Columns, FrameFunction, MapBatches, Process, Step, Transform
from tallystick.words import unknown_name

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor  # PySpark 3.5 has none

    from tallystick.api.preview import Preview
    from tallystick.ops.doctor_pipeline import DeclaredPipeline
    from tallystick.ops.ui.page import LiveRun

NAME_LENGTH_MAX = 200


@checked
@dataclass(frozen=True, repr=False)
class Pipeline(Expressions):
    """Kafka to Kafka and elsewhere, exactly once. Immutable: each step returns a new pipeline.

    Args:
        name: names the pipeline in Kafka (transactional id, groups). Two running pipelines must
            not share one: the newer fences the older.

    Raises:
        OptionError: the name has other characters than letters, digits, `.`, `_` and `-`.
    """

    name: str
    inputs: Inputs = NO_INPUTS
    steps: tuple[Step, ...] = ()
    sinks: tuple[Sink, ...] = ()
    selections: tuple[Selection, ...] = ()
    dropped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        plain = self.name.replace(".", "").replace("_", "").replace("-", "")
        if not (plain.isascii() and plain.isalnum()) or len(self.name) > NAME_LENGTH_MAX:
            raise OptionError(
                f"pipeline name {self.name!r}: expected up to {NAME_LENGTH_MAX} letters, digits, "
                f"'.', '_' and '-'"
            )

    def __repr__(self) -> str:
        """Return the text of `explain()`; of an unfinished pipeline, the parts it has."""
        try:
            return self.explain()
        except TallystickError as error:
            parts = f"{len(self.inputs.sources)} sources, {len(self._all_steps)} steps"
            return f"<Pipeline {self.name}: {parts}, {len(self.sinks)} sinks; {error}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"

    @checked
    def read(self, *sources: Source | Stream, **named: Source | Stream) -> Self:
        """Name the sources; the first step.

        Args:
            sources: several become one stream: their columns have to be equal, after the steps that
                each may have (`ts.stream`), and each needs a uid there.
            named: inputs that stay apart, for a `process` with several inputs; `key_by` follows.

        Raises:
            OptionError: there is no input, or a second `read`, or one cannot be told from another.
        """
        return replace(self, inputs=inputs_of(sources, named, self.inputs))

    @checked
    def map_batches(
        self,
        function: MapFunction,
        *,
        schema: Columns | None = None,
        outputs: Mapping[str, Columns] | None = None,
        state: State | None = None,
    ) -> Self:
        """Pass each Arrow batch through a function, in the task that read it.

        Args:
            function: gets a `pyarrow.RecordBatch` and returns one, or a Table, or None for no rows;
                `ts.enrich(…)` makes such a function. With a `polars.DataFrame` or a
                `pandas.DataFrame` in its annotations it gets and returns such frames. It must keep
                nothing between calls, except in `state`, its second argument: batches may be cut
                elsewhere when an epoch is run again, and any worker may get any batch.
            schema: the columns of the returned rows, as DDL or as a schema, by name; `transform`
                and `key_by` need them.
            outputs: the columns of the side outputs, whose rows are returned in a `ts.Rows`.
            state: a table of `ts.broadcast`, passed as a `pyarrow.Table`; or a list of
                `ts.list_state`, passed as a batch of elements: the function returns a pair then,
                the rows and the new elements of the list.
        """
        self._refuse_named("map_batches")
        return replace(self, steps=(*self.steps, map_step(function, schema, outputs, state)))

    @checked
    def filter(self, predicate: Predicate | str) -> Self:
        """Keep some rows, and all of their columns.

        Args:
            predicate: as of `ts.when`.
        """
        return self._added(filter_step(predicate))

    def _added(self, step: Step) -> Self:
        self._refuse_named("filter() or an expression")
        return replace(self, steps=(*self.steps, step))

    @checked
    def transform(self, function: FrameFunction) -> Self:
        """Pass the epoch's rows through Spark: any DataFrame code without streaming state.

        Only here do rows go through the JVM. A shuffle in it may change the order of rows.
        """
        self._refuse_named("transform")
        return replace(self, steps=(*self.steps, Transform(function)))

    def _refuse_named(self, step: str) -> None:
        if self.inputs.are_named and not self.steps:
            raise OptionError(
                f"pipeline {self.name!r}: {step}() stands between read() with named inputs and "
                f"key_by(): their rows have different columns. Give the function to its input, "
                f"read({self.inputs.names[0]}=ts.stream(source).map_batches(…, schema=…), …)"
            )

    @checked
    def key_by(
        self,
        *columns: str,
        max_parallelism: int | None = None,
        **named: str | Sequence[str],
    ) -> "KeyedPipeline":
        """Bring the rows of each key to one task, in order; `process` follows.

        Args:
            columns: of the key, or expressions in Spark's SQL, "lower(user) AS user"; a
                `map_batches` right before needs its `schema`.
            max_parallelism: the number of key groups: the most tasks that can ever share the state,
                fixed once the state exists. None: by Flink's formula, 128 at least.
            named: the key of each input, a column or several, right after `read` with named ones.
        """
        names = () if self.steps else self.inputs.names
        if names or named:
            inputs, keys = keys_of(self.inputs, names, columns, named)
            return KeyedPipeline(replace(self, inputs=inputs), keys[0], max_parallelism, keys)
        if not columns or not all(isinstance(name, str) for name in columns):
            raise OptionError(f"key_by{columns}: expected names of columns, e.g. key_by('user')")
        if repeated := [name for name in columns if columns.count(name) > 1]:
            raise OptionError(f"key_by{columns}: {repeated[0]!r} is there more than once")
        return KeyedPipeline(*computing(self, columns), max_parallelism)

    @checked
    def write(self, /, *sinks: AnySink, **outputs: AnySink | Sequence[AnySink]) -> Self:
        """Name the sinks; the last step.

        Every sink gets all rows of its output (with `ts.when` some of them). An epoch is shown by
        all sinks or by none: they commit after one decision.

        Args:
            sinks: of the main output, the rows that the last step returns.
            outputs: by the name of a side output: its sink, or a list; an empty one drops its rows.

        Raises:
            OptionError: an argument is no sink, or this is a second `write`.
        """
        return replace(self, **routing_of(sinks, outputs, self.sinks)._asdict())

    @property
    def topology(self) -> OutputTopology:
        """The sinks by role: the decider, the sharers of its transaction, and each sink's rows."""
        return topology_of(self.sinks, self.selections, self.dropped)

    @checked
    def start(
        self,
        spark: SparkSession | SparkContext | None = None,
        *,
        checkpoint: Place | None = None,
        trigger: Mapping[str, Any] | str | timedelta | None = None,
        accept: Collection[str] = (),
        allow_dropped_state: Collection[str] = (),
        listener: Listener | None = None,
        execution: Literal["resident", "jobs"] | None = None,
        ui_port: int | None = None,
        quiet: bool = False,
        dry_run: bool = False,
    ) -> Query:
        """Check everything that can be checked, then start.

        Args:
            spark: a session, as `spark_session()` makes it, a context, or nothing: this process's,
                or one for the run alone. A `transform` step has a session made, in seconds.
            checkpoint: a folder of this pipeline's own, on storage that driver and executors reach.
                None: there is none where a `RowsSource` is read, in this process and without Spark.
            trigger: `{"processingTime": "10 seconds"}`, or the interval alone; or as for Spark,
                "availableNow" or "once". None: an epoch begins when there is something to read.
            accept: decisions to state, as an error message names them.
            allow_dropped_state: uids of process steps that are gone, whose state may be given up.
            listener: called with every event of the epoch protocol, in the driver.
            execution: `"resident"`: one Spark job for all epochs. `"jobs"`: one each. None: the
                first, unless there is a `transform`, or Spark encrypts or allocates executors.
            ui_port: serve a page about the run there, on this machine, until the process ends or
                another start takes the port; needs the extra `tallystick[ui]`. None: no page.
            quiet: print nothing on the terminal; `logging` gets the lines about the run anyway.
            dry_run: check, say what would change, write nothing, and return a query that ends.

        Returns:
            The running query, with the members of Spark's StreamingQuery. The error that ends the
            run is raised there with its own class, also an error in a user's function.

        Raises:
            OptionError: the pipeline, the cluster, a topic or a setting cannot work.
            DataLossError: the checkpoint is another pipeline's.
        """
        accepted, trigger = frozenset(accept), trigger_arguments(trigger)
        rule, listener = Trigger.of(trigger), listener and of_user(listener)
        if is_in_process(self):
            refused = {"checkpoint": checkpoint, "ui_port": ui_port, "execution": execution}
            refused["dry_run"] = dry_run or None
            return start_in_process(self, rule, listener, refused, is_quiet=quiet)
        place, dropped = _folder(checkpoint), frozenset(allow_dropped_state)
        own = as_forked(self, place)
        is_light = execution != JOBS and not any(isinstance(one, Transform) for one in own.steps)
        own._check_before_spark(place, spark, execution, dropped)
        cluster = Cluster.of(spark, own.name, is_light=is_light)
        begin = partial(start_loop, is_quiet=quiet, save=partial(_save, own, place))
        try:
            page = None if ui_port is None else _live_page(own, ui_port, place, trigger, listener)
            run = own._run(cluster, execution, page or listener, dropped)
            query = begin(run, place, rule, accepted, dry_run)
            if page:
                page.show(query)
            return query
        except KeyboardInterrupt:
            if is_interactive():  # a program's JVM ends with it, and is not waited for
                cluster.close()
            Console(own.name, is_quiet=quiet).farewell("SIGINT: stopped before its first epoch")
            raise interruption() from None
        except BaseException as error:
            cluster.close()
            if (reason := reason_of_end(error)) is error:
                raise
            raise reason from None

    @checked
    def recover(self, *, checkpoint: Place) -> Recovery:
        """Commit and abort the transactions of earlier runs, as `start` does first; run nothing.

        No Spark is started, no function of the pipeline is called, and no epoch is planned. As any
        start it takes the pipeline over: a run that is at work stops with a FencedError, and has
        lost nothing. A transaction that cannot be settled raises the same error as in a start.

        Args:
            checkpoint: as for `start`; an earlier run must have begun there.

        Returns:
            The outcome in each sink, and the transactions that are left; `print` it.

        Raises:
            OptionError: there is no checkpoint, or the pipeline or a sink cannot work.
            DataLossError: the checkpoint is another pipeline's, or a person has to decide; and
                whatever else `start` or its query raises before the first epoch. The work done in
                the sinks until then is in the error's `__notes__`.
        """
        refuse_in_process(self)
        place = resolved(checkpoint, "checkpoint")
        own = as_forked(self, place)
        own._check_whole(None)
        return recover(own.name, own.topology, place)

    @checked
    def explain(
        self,
        spark: SparkSession | SparkContext | None = None,
        *,
        checkpoint: Place | None = None,
        execution: Literal["resident", "jobs"] | None = None,
    ) -> str:
        """Describe a start: sources, steps and their state, sinks, and the engine for tasks.

        Nothing is started or written, and Kafka is not asked.

        Args:
            spark: as for `start`; None: the context of this process; without one, facts that
                depend on Spark are left open.
            checkpoint: as for `start`; its state is compared with the steps. None: not looked at.
            execution: as for `start`.

        Returns:
            A text to print.

        Raises:
            OptionError: `start` would find the same mistake.
            DataLossError: the checkpoint is another pipeline's.
        """
        place = None if checkpoint is None else resolved(checkpoint, "checkpoint")
        own = self if place is None else as_forked(self, place)
        own._check_whole(execution)
        run = own._run(Cluster.at_hand(spark), execution)
        return explained(run, own.inputs.sources, own._all_steps, own.topology, place)

    @checked
    def preview(self, rows: Any) -> "Preview":
        """Run some rows through the pipeline in this process, and show what comes out.

        Nothing is written, and neither Kafka nor Spark is asked; no sink has to be named yet.

        Args:
            rows: as for `tallystick.testing.run`: those of the only topic, or by source.

        Returns:
            The rows of the main output as a `table`, shown with their types.
        """
        from tallystick.api.preview import previewed

        return previewed(self, rows)

    @property
    def _all_steps(self) -> tuple[Step, ...]:
        """The steps, those of an only input included."""
        return (*self.inputs.chain, *self.steps)

    @property
    def _configs(self) -> tuple[KafkaConfig, ...]:
        """The settings of the clusters that are read and written."""
        read = (source.options.config for source in self.inputs.declared(self.name))
        return (*read, *self.topology.configs)

    def _check_before_spark(
        self,
        place: str,
        spark: SparkSession | SparkContext | None,
        execution: str | None,
        dropped: frozenset[str],
    ) -> None:
        """Refuse what can be known before a Spark is started, then a Kafka that is away."""
        self._check_whole(execution)
        if spark is None and not Cluster.at_hand(None).is_there:  # it would have to be started
            opened(place, self.name)
            with suppress(NeedsSparkError):
                self._run(Cluster.at_hand(None), execution, None, dropped)
            make_local(place, "checkpoint")
        self._warn_of_silence()
        check_first_start(place, self._configs)

    def _check_whole(self, execution: str | None) -> None:
        """Refuse mistakes that can be found in the pipeline alone."""
        if execution not in (None, RESIDENT, JOBS):
            raise OptionError(f"execution={execution!r}: expected 'resident', 'jobs' or None")
        if not self.inputs.streams or not self.sinks:
            missing = "write(sink)" if self.inputs.streams else "read(source)"
            raise OptionError(
                f"pipeline {self.name!r}: {missing} is missing: call read() and write() before "
                f"start()"
            )
        self.inputs.check_joined(self.name, self.steps[0] if self.steps else None)
        check_for_pipeline(self.sinks)
        token = token_group(f"{self.topology.id_prefix}{self.name}")
        if any(source.group_id == token for source in self.inputs.sources):
            raise OptionError(
                f"group_id={token!r} of the KafkaSource is the group in which pipeline "
                f"{self.name!r} keeps its token: name another"
            )

    def _warn_of_silence(self) -> None:
        """Warn of functions that never return rows."""
        steps = (*self.inputs.steps, *self.steps)
        functions = [
            *(("map_batches", step.function) for step in steps if isinstance(step, MapBatches)),
            *(("mapped", function) for one in self.selections for function in one.functions),
        ]
        for step, function in functions:
            written = users_function(function)
            if returns_nothing(written):
                warn_of_silence(step, written)

    def _compiled(self, cluster: Cluster) -> PipelineRun:
        """Return the pipeline as a start compiles it; Kafka is not asked."""
        self._check_whole(None)
        return self._run(cluster, None)

    def _run(
        self,
        cluster: Cluster,
        execution: str | None,
        listener: Listener | None = None,
        dropped: frozenset[str] = frozenset(),
        topology: OutputTopology | None = None,
    ) -> PipelineRun:
        steps, topology = (*self.inputs.steps, *self.steps), topology or self.topology
        run = PipelineRun(
            name=self.name,
            cluster=cluster,
            inputs=self.inputs.declared(self.name),
            steps=self._all_steps,
            topology=topology,
            listener=listener,
            allow_dropped_state=dropped,
            execution=execution,
            tables=tuple(table.declared(self.name) for table in tables_in(steps)),
            lists=lists_in(steps),
        )
        check_columns(topology, {MAIN: run.columns, **run.outputs})
        return run

    if not TYPE_CHECKING:  # type checkers know what is there

        def __getitem__(self, name: object) -> NoReturn:
            """Raise an error for a pipeline that is used as a DataFrame, or looped over."""
            raise UnknownNameError(
                f"pipeline {self.name!r}: [{name!r}] or a loop over it: a pipeline has no rows "
                f"before it runs. A function of map_batches gets them: rows[{'column'!r}]"
            )

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error for `process` without a `key_by` before it."""
            if name == "process":
                raise StepMissingError(
                    f"pipeline {self.name!r}: process() needs key_by() before it, which says whose "
                    f"state it is, e.g. .key_by('user').process(...)"
                )
            _raise_unknown(self, name)


@dataclass(frozen=True)
class KeyedPipeline:
    """A pipeline after `key_by`: its rows go by key to the step that `process` adds."""

    pipeline: Pipeline
    columns: tuple[str, ...]
    max_parallelism: int | None = None
    keys: tuple[tuple[str, ...], ...] = ()

    @checked
    def process(
        self,
        function: "StatefulProcessor | Processor",
        *,
        output: Columns | None = None,
        parallelism: int | None = None,
        uid: str | None = None,
        time_mode: str | None = None,
        event_time: str | Mapping[str, str] | None = None,
        watermark_delay: str | int = 0,
        idle_after: str | int = 0,
        max_drift: str | int = 0,
        watermark_column: str | None = None,
        idle_advance: bool = False,
        event_time_max_ahead: str | int | None = None,
        rows: str = "row",
        initial_state: DataFrame | None = None,
        renamed: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        previous_uid: str | None = None,
    ) -> Pipeline:
        """Pass the rows through a function that keeps state per key.

        Args:
            function: a PySpark `StatefulProcessor`, as for `transformWithState`; or one of ours,
                `vectorised(...)` and the ready-made ones.
            output: the columns that it puts out, as DDL or Arrow schema; the ready-made ones know.
            parallelism: how many tasks share the key groups, from this start on; None: all slots.
            uid: names the state, for as long as it lives. None: `process-1`, of an only step.
            time_mode: Spark's: "None", "ProcessingTime" or "EventTime"; None: the function's own,
                and for a `StatefulProcessor` "None".
            event_time: the column of event times, timestamps or bigint in ms; by name of inputs.
            watermark_delay: how much later than the latest row of its partition another one may
                come, in ms or as text such as "10 seconds"; with EventTime the others are dropped.
                Later steps: how much earlier a function makes times, no more of the next four.
            idle_after: how long, in ms or text, a partition read to its end is waited for.
            max_drift: how far a partition may be ahead of the slowest unread one; 0: any.
            watermark_column: a column, as `event_time`, in which producers promise that no earlier
                row follows in its partition, in place of `watermark_delay`; null: nothing new.
            idle_advance: the watermark of idle partitions goes on with the clock.
            event_time_max_ahead: of the clock; rows beyond are dead letters or late.
            rows: a `StatefulProcessor`'s: "row", or "pandas" as `transformWithStateInPandas`.
            initial_state: the rows for its `handleInitialState`, with the columns of the key.
            renamed: columns of state with another name than in the checkpoint: `{"new": "old"}`.
            defaults: of new columns of state, for the keys in the checkpoint; else null.
            previous_uid: the `uid` under which the checkpoint has the state, if it is another.

        Raises:
            OptionError: an argument is not what it should be.
        """
        event_time, inputs = times_of(self.pipeline.inputs, self.keys, event_time)
        step = Process(
            uid=uid,
            key=self.columns,
            processor=processor_of(function, output, time_mode, rows, initial_state),
            output=output,
            max_parallelism=self.max_parallelism,
            parallelism=parallelism,
            inputs=inputs,
            event_time=event_time,
            watermark_column=watermark_column,
            idle_advance=idle_advance,
            event_time_max_ahead_ms=ahead_ms(event_time_max_ahead),
            succession=Succession(renamed or {}, defaults or {}, previous_uid),
            **delays_ms(
                watermark_delay=watermark_delay, idle_after=idle_after, max_drift=max_drift
            ),
        )
        before = self.pipeline if self.keys else with_aggregated(self.pipeline, step.processor)
        return replace(before, steps=(*before.steps, step))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error for a step right after `key_by` other than `process`."""
            if name in _STEPS:
                raise StepMissingError(
                    f"pipeline {self.pipeline.name!r}: {name}() stands right after "
                    f"key_by{self.columns}, which needs process() first: what is to be done with "
                    f"the rows of each key. Without state, leave key_by out"
                )
            _raise_unknown(self, name)


def _raise_unknown(owner: object, name: str) -> NoReturn:
    """Raise the error of an attribute that is not there, for Python's own names as Python does."""
    if name.startswith("_"):
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")
    known = {*dir(owner), *_STEPS, "process"}
    raise unknown_name(type(owner).__name__, name, known) from None


_STEPS = (
    *("read", "map_batches", "filter", "select", "with_columns", "drop", "rename", "transform"),
    *("key_by", "write", "start", "recover"),
)
"""The methods of a `Pipeline` that a `KeyedPipeline` does not have."""


def _folder(checkpoint: Place | None) -> str:
    """Return the folder of a start on Spark, which has to have one."""
    if checkpoint is None:
        raise OptionError(
            "start(): checkpoint= is missing: a folder of this pipeline's own, such as "
            "checkpoint='/data/late-flights'; the next start goes on from there"
        )
    return resolved(checkpoint, "checkpoint")


def _live_page(
    pipeline: Pipeline,
    port: int,
    checkpoint: str,
    trigger: Mapping[str, Any] | None,
    listener: Listener | None,
) -> "LiveRun":
    """Serve a page about a run, before its start, and return the listener of the run.

    Raises:
        OptionError: the port is taken, or the extra `tallystick[ui]` is missing.
    """
    try:
        from tallystick.ops.ui.page import LiveRun
        from tallystick.ops.ui.server import open_page
    except ModuleNotFoundError as error:
        raise OptionError(f"the page needs {error.name}: {pip_install('ui')}") from None
    live = LiveRun(listener, trigger, pipeline.topology.dead_letter_topic or "")
    open_page(port, checkpoint, connection_of(pipeline), live)
    return live


def _save(pipeline: Pipeline, checkpoint: str, target: str) -> None:
    """Write a savepoint of a pipeline that was drained."""
    from tallystick.ops import savepoints
    from tallystick.ops.checkpoint_view import asking

    ask = asking(KafkaConfig.from_options(connection_of(pipeline)))
    folder = FileStorage(resolved(target))
    savepoints.create(FileStorage(checkpoint), folder, ask_kafka=ask)


def connection_of(pipeline: Pipeline) -> dict[str, str]:
    """Return the client options of the cluster that the page and the doctor ask about a pipeline.

    The cluster of the deciding sink; else of another Kafka sink, or of the first source.
    """
    ends = (*(sink for _, sink in pipeline.topology.by_uid), *pipeline.inputs.sources)
    end = next(candidate for candidate in ends if isinstance(candidate, KafkaSink | KafkaSource))
    options = {
        name: value for name, value in end.options.items() if name.startswith("kafka.")
    }  # a source has other options too
    return plain_client_options(end.bootstrap_servers, options)


def declared(pipeline: Pipeline) -> "DeclaredPipeline":
    """Return a pipeline as its code declares it, for `tallystick doctor`; call no function.

    Args:
        pipeline: whole, with source and sinks.

    Raises:
        OptionError: `start` would find the same mistake.
    """
    from tallystick.ops.doctor_pipeline import DeclaredPipeline

    refuse_in_process(pipeline)
    run, topology = pipeline._compiled(Cluster.at_hand(None)), pipeline.topology
    by_uid = dict(topology.by_uid)
    return DeclaredPipeline(
        run=run,
        outputs={uid: sink.output for uid, sink in by_uid.items() if isinstance(sink, KafkaSink)},
        decider=topology.uid,
        other_sinks=tuple(uid for uid, sink in by_uid.items() if not isinstance(sink, KafkaSink)),
        sharing=tuple(sharing.uid for sharing in topology.sharing),
    )
