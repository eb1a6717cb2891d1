"""A pipeline of this process: rows of the program, to its console or any other sink.

    RowsSource ─► topics in memory ─► the driver, planners and tasks of `testing` ─► sinks

It runs by the clock, in a thread, behind the same `Query` as on Spark. What it keeps is in memory,
and gone with the process.
"""

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tallystick.api.console_sink import ConsoleSink, WholeConsoleSink
from tallystick.api.kafka_sink import TASK, KafkaSink
from tallystick.api.kafka_source import KafkaSource
from tallystick.api.rows_source import TAKEN_MAX, IteratedRows, RowsSource
from tallystick.api.streams import tables_in
from tallystick.epoch.two_phase import Sink
from tallystick.errors import OptionError
from tallystick.pipeline.compiled import PipelineRun
from tallystick.pipeline.inputs import PipelineInput
from tallystick.pipeline.loop import PipelinePlanner, planners_of
from tallystick.pipeline.sinks import Sinks
from tallystick.pipeline.topology import OutputTopology
from tallystick.run.console import Console
from tallystick.run.driver import Listener
from tallystick.run.epoch_clock import wall_ms
from tallystick.run.epoch_loop import EpochEnded, EpochLoop, Trigger
from tallystick.run.query import Query
from tallystick.spark.cluster import Cluster
from tallystick.tasks.steps import Transform
from tallystick.testing.memory import MemoryHost, MemoryStorage, Topics
from tallystick.testing.planning import MemoryPlanner
from tallystick.testing.tasks import begin_here
from tallystick.values import TopicPartition

if TYPE_CHECKING:
    from tallystick.api.pipeline import Pipeline

_INSTEAD = (
    "Give the pipeline RowsSource alone; or write the rows to a topic with `tallystick topic put`, "
    "and read it with a KafkaSource"
)


def is_in_process(pipeline: "Pipeline") -> bool:
    """Return whether a pipeline reads rows of its own program.

    Raises:
        OptionError: some of its ends are here, and others are not.
    """
    sources = _sources(pipeline)
    given = [source for source in sources.values() if isinstance(source, RowsSource)]
    if not given:
        return False
    who = f"pipeline {pipeline.name!r}: a RowsSource"
    if len(given) < len(sources):
        raise OptionError(f"{who} beside a KafkaSource: its rows are in this process. {_INSTEAD}")
    for number, step in enumerate(pipeline.steps, start=1):
        if isinstance(step, Transform):
            raise OptionError(
                f"{who} before step {number}, transform: its rows are a DataFrame of Spark's, and "
                f"here is no Spark. Make it a map_batches; or read from a KafkaSource"
            )
    return True


def refuse_in_process(pipeline: "Pipeline") -> None:
    """Refuse a pipeline of this process where clusters are to be asked about it.

    Raises:
        OptionError: it reads rows of this process.
    """
    if is_in_process(pipeline):
        raise OptionError(
            f"pipeline {pipeline.name!r} reads RowsSource, so it runs in the process of its "
            f"program: there is no cluster and no checkpoint to look at"
        )


def start_in_process(
    pipeline: "Pipeline",
    trigger: Trigger,
    listener: Listener | None,
    refused: Mapping[str, object],
    *,
    is_quiet: bool,
) -> Query:
    """Start a pipeline of this process.

    Args:
        pipeline: whole, and `is_in_process`.
        trigger: when epochs begin; the last row ends the run in any case.
        listener: of the user.
        refused: the arguments of `start` that need a checkpoint or Spark.
        is_quiet: as for `Pipeline.start`.

    Raises:
        OptionError: a refused argument is set.
    """
    for name, given in refused.items():
        if given is not None:
            raise OptionError(
                f"start({name}={given!r}): pipeline {pipeline.name!r} reads RowsSource, so it runs "
                f"in this process, from the first row at each start, and keeps nothing: leave "
                f"{name} out until there is a KafkaSource"
            )
    pipeline = replace(pipeline, sinks=tuple(map(_of_tasks, pipeline.sinks)))
    pipeline._check_whole(None)
    console = Console(pipeline.name, is_quiet=is_quiet)
    started = _Run(pipeline, pipeline._run(Cluster.absent(), None, listener), trigger)
    query = Query(
        pipeline.name,
        started.lineage,
        str(uuid.uuid4()),
        loop=started.loop,
        prepare=lambda: None,
        cancel=lambda: None,
        close=started.close,
        describe=started.planner.describe,
        rescale=started.rescale,
        console=console,
    )
    query.begin()
    return query


class _Run:
    """A run of a pipeline in the process of its program.

    Args:
        pipeline: as declared.
        run: the same, checked.
        trigger: when epochs begin.
    """

    def __init__(self, pipeline: "Pipeline", run: PipelineRun, trigger: Trigger) -> None:
        self._run, self._trigger = run, Trigger(trigger.interval_ms)
        self._topics = Topics({})
        self._feeds: dict[str, _Feed] = {}
        self._sinks = Sinks(_whole(run.topology), run.name, run.cluster, None)
        host = MemoryHost(MemoryStorage())
        identity = begin_here(run, self._sinks, self._topics, host)
        self.lineage = identity.lineage
        sources = _sources(pipeline)
        for reader in run.all_inputs:
            given = sources[reader.uid]
            assert isinstance(given, RowsSource), "checked before"
            self._feeds[reader.uid] = _Feed(given, reader, self._topics)
        try:
            self._driver = self._sinks.make_driver(identity, host.files, listener=run.parts)
        except BaseException:
            self.close()
            raise
        planners = planners_of(run, self._planner)
        self.planner = PipelinePlanner(run, planners, None, lambda _: self._is_over())

    def _planner(self, reader: PipelineInput) -> MemoryPlanner:
        feed = self._feeds[reader.uid]
        return MemoryPlanner(reader, self._topics, self._run, wall_ms, feed)

    def loop(self, note: Callable[[EpochEnded], dict[str, Any]]) -> EpochLoop:
        """Return the loop of epochs; see `Query`."""

        def on_end(ended: EpochEnded) -> None:
            self.planner.ended()
            note(ended)
            for position in self.planner.shown:
                for offset in position.positions.values():
                    self._feeds[position.input].committed(offset)

        self._loop = EpochLoop(self._driver, self.planner, self._trigger, on_end)
        return self._loop

    def rescale(self, parallelism: int) -> None:
        """See `Query.rescale`."""
        newest = self._driver.coordinator.committed_manifest
        self._run.rescale(parallelism, () if newest is None else newest.state)

    def close(self) -> None:
        """End the run."""
        self._run.close()

    def _is_over(self) -> bool:
        """End the loop where there is nothing to do, and no row to come; no sink is ever due."""
        if all(feed.is_over for feed in self._feeds.values()):
            self._loop.stop()
        return False


class _Feed:
    """Appends rows of a source to its topic, when they are due.

    Args:
        source: the rows.
        reader: the input that reads them.
        topics: where they go.
    """

    def __init__(self, source: RowsSource, reader: PipelineInput, topics: Topics) -> None:
        (topic,) = reader.options.subscription.named or ()
        self._at, self._topics = TopicPartition(topic, 0), topics
        self._rate, self._row_count = source.rate, 0
        self._committed_count = 0
        self._began_s: float | None = None
        self._rows = source.rows if isinstance(source.rows, IteratedRows) else None
        topics.add(topic)
        if self._rows is not None:
            self._rows.begin()
        else:
            topics.append_columns(self._at, source.rows, wall_ms())

    @property
    def is_over(self) -> bool:
        """True if no row is to come."""
        return self._rows is None or self._rows.is_over

    def committed(self, offset: int) -> None:
        """Forget the rows before an offset."""
        self._committed_count = offset
        self._topics.forget(self._at, offset)

    def __call__(self) -> None:
        """Append the rows that are due now.

        Raises:
            FunctionError: the iterator raised an error, and all rows before are committed.
        """
        if self._rows is None or self._rows.is_over:
            return
        if self._rows.error is not None:
            if self._committed_count == self._row_count:
                raise self._rows.error
            return
        now_s = time.monotonic()
        began_s = self._began_s = self._began_s or now_s
        count = TAKEN_MAX
        if self._rate is not None:
            count = int((now_s - began_s) * self._rate) + 1 - self._row_count
        if count > 0:
            rows = self._rows.take(count)
            self._row_count += rows.num_rows
            self._topics.append_columns(self._at, rows, wall_ms())


def _of_tasks(sink: Sink) -> Sink:
    """Return a sink that decides nothing: in this process there is no token to go on from."""
    return replace(sink, transactions=TASK) if isinstance(sink, KafkaSink) else sink


def _whole(topology: OutputTopology) -> OutputTopology:
    """Return sinks of which those of the console print every row."""
    others = (
        (uid, WholeConsoleSink(uid) if isinstance(sink, ConsoleSink) else sink)
        for uid, sink in topology.others
    )
    return replace(topology, others=tuple(others))


def _sources(pipeline: "Pipeline") -> dict[str, KafkaSource | RowsSource]:
    """Return the sources of a pipeline by the uid of their input, those of tables too."""
    inputs, tables = pipeline.inputs, tables_in((*pipeline.inputs.steps, *pipeline.steps))
    own = zip(inputs.uids, inputs.sources, strict=True)
    return {**dict(own), **{table.uid: table.stream.source for table in tables}}
