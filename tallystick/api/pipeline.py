"""`Pipeline`: read, map, transform, write, start.

    query = (
        Pipeline("late-flights")
        .read(KafkaSource("localhost:9092", topics=["flights"], value=Json("dest string, n int")))
        .map_batches(late_only)
        .write(KafkaSink("localhost:9092", topic="late", key="dest", value=Json()))
        .start(checkpoint="/data/late-flights")
    )
    query.awaitTermination()

The functions of `map_batches` are chained into the reader: they get the Arrow batches that it
decoded, in the same task, and what they return is encoded for Kafka right there. Tasks stay in the
same processes of Spark's for the life of a run; no query of Structured Streaming is involved.

With state, exactly once with the output:

    .key_by("dest").process(aggregate({"n": count()}))

After `process` the functions run in the task that owns the key.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeGuard, cast

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from tallystick.api.explained import explained
from tallystick.api.kafka_sink import check_columns, check_for_pipeline, topology_of
from tallystick.api.kafka_source import KafkaSource
from tallystick.api.live_page import open_live_page
from tallystick.api.routing import AnySink, routing_of
from tallystick.epoch.transactional_ids import token_group
from tallystick.epoch.two_phase import Sink
from tallystick.errors import OptionError, StepMissingError
from tallystick.run.driver import Listener
from tallystick.run.outputs import MAIN, Selection
from tallystick.run.query import Query
from tallystick.run.steps import Columns, FrameFunction, MapBatches, Process, Step, Transform
from tallystick.run.task import BatchFunction
from tallystick.spark.cluster import JOBS, RESIDENT, Cluster
from tallystick.spark.pipeline_loop import start_loop
from tallystick.spark.pipeline_run import PipelineRun
from tallystick.spark.recovery import Recovery, recover
from tallystick.spark.topology import OutputTopology
from tallystick.state.functions.processing import NO_TIME, Processor
from tallystick.state.functions.ready_made import Aggregate

if TYPE_CHECKING:  # PySpark 3.5 has none
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

NAME_LENGTH_MAX = 200


@dataclass(frozen=True)
class Pipeline:
    """Kafka to Kafka and elsewhere, exactly once. Immutable: each step returns a new pipeline.

    Args:
        name: names the pipeline in Kafka (transactional id, groups). Two running pipelines must
            not share one: the newer fences the older.

    Raises:
        OptionError: the name has other characters than letters, digits, `.`, `_` and `-`.
    """

    name: str
    source: KafkaSource | None = None
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

    def read(self, source: KafkaSource) -> Self:
        """Say what is read; the first step."""
        return replace(self, source=source)

    def map_batches(
        self,
        function: BatchFunction,
        *,
        schema: str | None = None,
        outputs: Mapping[str, Columns] | None = None,
    ) -> Self:
        """Pass each Arrow batch through a function, in the task that read it.

        Args:
            function: gets a `pyarrow.RecordBatch` and returns one, or a Table, or None for no rows.
                It must not keep state between calls: batches may be cut elsewhere when an epoch is
                run again, and any worker may get any batch.
            schema: what the function returns, as DDL; needed where a `transform` follows.
            outputs: the columns of its side outputs, whose rows it returns in a `ts.Rows`.
        """
        return replace(self, steps=(*self.steps, MapBatches(function, schema, outputs or {})))

    def transform(self, function: FrameFunction) -> Self:
        """Pass the epoch's rows through Spark: any DataFrame code without streaming state.

        Only here do rows go through the JVM. A shuffle in it may change the order of rows.
        """
        return replace(self, steps=(*self.steps, Transform(function)))

    def key_by(self, *columns: str, max_parallelism: int | None = None) -> "KeyedPipeline":
        """Bring the rows of each key to one task, in order; `process` says what is done there.

        Args:
            columns: of the key; a `map_batches` right before needs its `schema`.
            max_parallelism: how many key groups there are: the most tasks that the state can ever
                be shared among, fixed once it exists. None: by Flink's formula, 128 at least.
        """
        if not columns or not all(isinstance(name, str) for name in columns):
            raise OptionError(f"key_by{columns}: expected names of columns, e.g. key_by('user')")
        if repeated := [name for name in columns if columns.count(name) > 1]:
            raise OptionError(f"key_by{columns}: {repeated[0]!r} is there more than once")
        return KeyedPipeline(self, columns, max_parallelism)

    def write(self, /, *sinks: AnySink, **outputs: AnySink | Sequence[AnySink]) -> Self:
        """Say where the rows go; the last step.

        Every sink gets all rows of its output (with `ts.when` some of them), and none ever shows an
        epoch that another one has not: what they hold back is committed after one decision.

        Args:
            sinks: of the main output, the rows that the last step returns.
            outputs: by the name of a side output: its sink, or a list; an empty one drops its rows.
        """
        return replace(self, **routing_of(sinks, outputs)._asdict())

    @property
    def topology(self) -> OutputTopology:
        """The sinks in order: which decides, which share its transaction, who gets which rows."""
        return topology_of(self.sinks, self.selections, self.dropped)

    def start(
        self,
        spark: SparkSession | SparkContext | None = None,
        *,
        checkpoint: str,
        trigger: Mapping[str, Any] | None = None,
        accept: Collection[str] = (),
        allow_dropped_state: Collection[str] = (),
        listener: Listener | None = None,
        execution: Literal["resident", "jobs"] | None = None,
        ui_port: int | None = None,
    ) -> Query:
        """Check everything that can be checked, then start.

        Args:
            spark: a classic session, as `spark_session()` makes it, a context, or nothing: then the
                context of this process, or one that is made for it and ends with it. A `transform`
                step has a session made of the context, which takes seconds.
            checkpoint: a folder of this pipeline's own, on storage that driver and executors reach.
            trigger: `{"processingTime": "10 seconds"}`, `{"availableNow": True}` or
                `{"once": True}`, as for Spark's `DataStreamWriter.trigger`; None: an epoch begins
                as soon as there is something to read.
            accept: decisions to state, as an error message names them.
            allow_dropped_state: uids of process steps that are gone from the pipeline, and whose
                state may be given up.
            listener: called with every event of the epoch protocol, in the driver.
            execution: `"resident"`: one long Spark job, whose tasks run all epochs. `"jobs"`: each
                epoch is a Spark job. None: resident, unless there are `transform` steps, or Spark
                encrypts what tasks exchange, or allocates executors dynamically.
            ui_port: serve a page about the run there, on this machine alone; needs the extra
                `tallystick[ui]`. It stays after the run has ended, to show why, until the process
                ends or another start takes the port. None: there is no page; `tallystick ui` shows
                one from outside.

        Returns:
            The running query, with the members of Spark's StreamingQuery. What ends it is raised
            there with its own class, also what a user's function raises.

        Raises:
            OptionError: the pipeline, the cluster, a topic or a setting cannot work.
            DataLossError: the checkpoint is another pipeline's.
        """
        dropped, accepted = _uids(allow_dropped_state), frozenset(accept)
        has_transform = any(isinstance(step, Transform) for step in self.steps)
        is_light = execution != "jobs" and not has_transform
        self._check_whole(execution)
        cluster = Cluster.of(spark, self.name, is_light=is_light)
        try:
            if ui_port is None:
                run = self._run(cluster, execution, listener, dropped)
                return start_loop(run, checkpoint, trigger, accepted)
            live = open_live_page(
                ui_port, checkpoint, self.source, self.topology, trigger, listener
            )
            query = start_loop(
                self._run(cluster, execution, live, dropped), checkpoint, trigger, accepted
            )
            live.show(query)
            return query
        except BaseException:
            cluster.close()
            raise

    def recover(self, *, checkpoint: str) -> Recovery:
        """Commit and abort what earlier runs left, as `start` does first, and run nothing.

        No Spark is started, no function of the pipeline is called, and no epoch is planned. As any
        start it takes the pipeline over: a run that is at work stops with a FencedError, and has
        lost nothing. What cannot be settled is refused as by a start.

        Args:
            checkpoint: as for `start`; an earlier run must have begun there.

        Returns:
            What was done in each sink, and what is left; `print` it.

        Raises:
            OptionError: there is no checkpoint, or the pipeline or a sink cannot work.
            DataLossError: the checkpoint is another pipeline's, or a person has to decide; and
                whatever else `start` or its query raises before the first epoch. What was done in
                the sinks until then is in the error's `__notes__`.
        """
        self._check_whole(None)
        return recover(self.name, self.topology, checkpoint)

    def explain(
        self,
        spark: SparkSession | SparkContext | None = None,
        *,
        checkpoint: str | None = None,
        execution: Literal["resident", "jobs"] | None = None,
    ) -> str:
        """Say what `start` would do: sources, steps and their state, sinks, what runs the tasks.

        Nothing is started or written, and Kafka is not asked.

        Args:
            spark: as for `start`; None: the context of this process, and where there is none,
                what hangs on Spark is left open.
            checkpoint: as for `start`; its state is compared with the steps. None: not looked at.
            execution: as for `start`.

        Returns:
            A text to print.

        Raises:
            OptionError: `start` would find the same mistake.
            DataLossError: the checkpoint is another pipeline's.
        """
        source = self._check_whole(execution)
        run = self._run(Cluster.at_hand(spark), execution)
        return explained(run, source, self.steps, self.topology, checkpoint)

    def _check_whole(self, execution: str | None) -> KafkaSource:
        """Find mistakes for which nothing but the pipeline need be known."""
        if execution not in (None, RESIDENT, JOBS):
            raise OptionError(f"execution={execution!r}: expected 'resident', 'jobs' or None")
        if self.source is None or not self.sinks:
            raise OptionError(f"pipeline {self.name!r}: call read() and write() before start()")
        check_for_pipeline(self.sinks)
        token = token_group(f"{self.topology.id_prefix}{self.name}")
        if self.source.group_id == token:
            raise OptionError(
                f"group_id={token!r} of the KafkaSource is the group in which pipeline "
                f"{self.name!r} keeps its token: name another"
            )
        return self.source

    def _run(
        self,
        cluster: Cluster,
        execution: str | None,
        listener: Listener | None = None,
        dropped: frozenset[str] = frozenset(),
    ) -> PipelineRun:
        assert self.source is not None, "checked before"
        run = PipelineRun(
            name=self.name,
            cluster=cluster,
            source_options=self.source.to_options(self.name),
            steps=self.steps,
            topology=self.topology,
            listener=listener,
            allow_dropped_state=dropped,
            execution=execution,
        )
        check_columns(self.topology, {MAIN: run.columns, **run.outputs})
        return run

    if not TYPE_CHECKING:  # type checkers know what is there

        def __getattr__(self, name: str) -> NoReturn:
            """Say what `process` needs."""
            if name == "process":
                raise StepMissingError(
                    f"pipeline {self.name!r}: process() needs key_by() before it, which says whose "
                    f"state it is, e.g. .key_by('user').process(...)"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


@dataclass(frozen=True)
class KeyedPipeline:
    """A pipeline whose rows go by key to the step that `process` adds."""

    pipeline: Pipeline
    columns: tuple[str, ...]
    max_parallelism: int | None = None

    def process(
        self,
        function: "StatefulProcessor | Processor",
        *,
        output: Columns | None = None,
        parallelism: int | None = None,
        uid: str | None = None,
        time_mode: str | None = None,
        event_time: str | None = None,
        watermark_delay: str | int = 0,
        idle_after: str | int = 0,
        rows: str = "row",
        initial_state: DataFrame | None = None,
    ) -> Pipeline:
        """Pass the rows through a function that keeps state per key.

        Args:
            function: a PySpark `StatefulProcessor`, as for `transformWithState`; or one of ours,
                `vectorised(...)` and the ready-made ones.
            output: the columns that it puts out, as DDL or as an Arrow schema. The ready-made ones
                have theirs.
            parallelism: how many tasks share the key groups; None: as many as Spark runs at a time.
                It may be another one at each start.
            uid: names the state, for as long as it lives. None, where this is the only step with
                state: `process-1`, which it has to be given when another one joins it.
            time_mode: Spark's: "None", "ProcessingTime" or "EventTime"; None: the function's own,
                and for a `StatefulProcessor` "None".
            event_time: the column with a row's event time, a timestamp or bigint in ms.
            watermark_delay: how much later than the latest row of its partition another one may
                come, in ms or as text such as "10 seconds". What comes later still is dropped with
                time mode EventTime.
            idle_after: how long the watermark waits for a partition that is read to its end, in ms
                or as such a text; for one with unread records it always does. First step only.
            rows: how a `StatefulProcessor` gets its rows: "row" (as `transformWithState`) or
                "pandas" (as `transformWithStateInPandas`).
            initial_state: the rows for its `handleInitialState`, with the columns of the key.

        Raises:
            OptionError: an argument is not what it should be.
        """
        if _is_stateful_processor(function):
            from tallystick.state.pyspark.processor import row_processor

            if output is None:
                raise OptionError(
                    f"process({type(function).__name__}()): a StatefulProcessor needs output=, the "
                    f"columns of the rows that it returns, e.g. output='user string, n bigint'"
                )
            processor: Processor = row_processor(
                function,
                output=output,
                rows=rows,
                time_mode=time_mode or NO_TIME,
                initial_state=initial_state,
            )
        else:
            processor = cast(Processor, function)
            _check_own(processor, time_mode, rows, initial_state)
        step = Process(
            uid=uid,
            key=self.columns,
            processor=processor,
            output=output,
            max_parallelism=self.max_parallelism,
            parallelism=parallelism,
            event_time=event_time,
            watermark_delay_ms=_delay_ms("watermark_delay", watermark_delay),
            idle_after_ms=_delay_ms("idle_after", idle_after),
        )
        return replace(self.pipeline, steps=(*self.pipeline.steps, step))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Say what `key_by` needs."""
            if name in _STEPS:
                raise StepMissingError(
                    f"pipeline {self.pipeline.name!r}: {name}() stands right after "
                    f"key_by{self.columns}, which needs process() first: what is to be done with "
                    f"the rows of each key. Without state, leave key_by out"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_OF_A_PROCESSOR = ("time_mode", "has_timers", "reads", "declared", "output", "run")
_STEPS = ("read", "map_batches", "transform", "key_by", "write", "start", "recover")
"""The methods of a `Pipeline` that a `KeyedPipeline` does not have."""


def _is_stateful_processor(function: object) -> "TypeGuard[StatefulProcessor]":
    module = sys.modules.get("pyspark.sql.streaming.stateful_processor")  # as its class imports it
    return module is not None and isinstance(function, module.StatefulProcessor)


def _check_own(
    processor: Processor, time_mode: str | None, rows: str, initial_state: DataFrame | None
) -> None:
    if isinstance(processor, Aggregate):
        raise OptionError(
            "process(): count(), sum() and the like are columns of an aggregate, not a function by "
            'themselves. Wrap it: ts.aggregate({"n": ts.count()})'
        )
    if not all(hasattr(processor, name) for name in _OF_A_PROCESSOR):
        raise OptionError(
            f"process({processor!r}): expected a StatefulProcessor, a function made with "
            f"vectorised(...), or a ready-made one such as deduplicate()"
        )
    if time_mode not in (None, processor.time_mode):
        raise OptionError(
            f"time_mode={time_mode!r}: the function has time mode {processor.time_mode!r} already"
        )
    if rows != "row" or initial_state is not None:
        raise OptionError("rows= and initial_state= are for a StatefulProcessor: leave them out")


_UNITS_MS = {"millisecond": 1, "second": 1000, "minute": 60_000, "hour": 3_600_000}
_UNITS_MS |= {"day": 24 * _UNITS_MS["hour"]}


def _delay_ms(name: str, delay: str | int) -> int:
    """Return a delay in ms, given as such or as for Spark's `withWatermark`: "10 seconds"."""
    if isinstance(delay, int) and not isinstance(delay, bool) and delay >= 0:
        return delay
    words = str(delay).lower().split()
    unit = _UNITS_MS.get(words[1].removesuffix("s")) if len(words) == 2 else None
    if isinstance(delay, str) and unit is not None and words[0].isdecimal():
        return int(words[0]) * unit
    raise OptionError(
        f"{name}={delay!r}: expected whole ms from 0, or a text such as '10 seconds' "
        f"(milliseconds, seconds, minutes, hours, days)"
    )


def _uids(uids: Collection[str]) -> frozenset[str]:
    if isinstance(uids, str):
        raise OptionError(f"allow_dropped_state={uids!r}: expected a list, [{uids!r}]")
    return frozenset(uids)
