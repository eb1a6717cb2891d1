"""A pipeline in this process: the real driver, planners and tasks, over ports in memory.

    feed ─► topics ─► PipelinePlanner ─► tasks, one after another ─► sinks in memory, or the user's
                      run.driver.Driver ─► manifests and decisions in memory

Replaced are Kafka, Spark and the disk. Steps, codecs, key groups, state, watermarks, the protocol
of an epoch and its two-phase commit are the code that runs on Spark.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol, Self

import pyarrow as pa

from tallystick.arguments import near
from tallystick.checkpoint.state_files import contents_of
from tallystick.codec.layout import OWN_HEADERS
from tallystick.epoch.protocol import EpochRan, Event, OutputCounted, TransactionCommitted
from tallystick.epoch.two_phase import Sink
from tallystick.errors import OptionError
from tallystick.host.kernel_cache import load_numba
from tallystick.kafka.output import KafkaOutput
from tallystick.ops.state_table import table_of
from tallystick.pipeline.compiled import PipelineRun
from tallystick.pipeline.loop import PipelinePlanner, planners_of
from tallystick.pipeline.sinks import Sinks
from tallystick.pipeline.topology import OutputTopology
from tallystick.run.epoch_clock import EpochClock, SteadyClock
from tallystick.spark.cluster import Cluster
from tallystick.state.key_groups import key_group_range
from tallystick.tasks.outputs import MAIN
from tallystick.tasks.steps import Step, Transform
from tallystick.testing.feeding import Feeder
from tallystick.testing.memory import (
    Clock,
    MemoryHost,
    MemorySink,
    MemoryStorage,
    Topics,
)
from tallystick.testing.planning import MemoryPlanner
from tallystick.testing.tasks import begin_here
from tallystick.text import duration_ms

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
PREVIEW = "preview"
IN_MEMORY = ("postgres", "console", PREVIEW)
"""The kinds of sinks, beside Kafka's, whose rows are kept in memory, and written nowhere."""
_MAIN = "main"

load_numba()  # with the imports, so that the first rows of a test take what later ones take


class RunnablePipeline(Protocol):
    """The part of a `tallystick.Pipeline` that a `Driver` uses."""

    @property
    def name(self) -> str:
        """The pipeline's name."""
        ...

    @property
    def topology(self) -> OutputTopology:
        """The sinks."""
        ...

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps."""
        ...

    def _compiled(self, cluster: Cluster) -> PipelineRun:
        """Return the pipeline, checked."""
        ...


class _CrashError(BaseException):
    """Ends a run as the end of its process would; nothing handles it."""


class Driver:
    """Runs a pipeline step by step in this process, without Kafka and Spark, for tests.

    Topics are in memory; so are the rows of `KafkaSink` and of `PostgresSink`. A sink of your own,
    and `FileSink`, writes for real. The clock stands still until `advance_clock`; only the pause
    after a RetriableError moves it, instead of a wait.

    Args:
        pipeline: whole, with source and sinks.
        parallelism: how many tasks read, and hold the keys of each step; None: as the steps say,
            else 1.
        partitions: the partitions of topics by name; a topic has as many at least as rows need.
        now: the time at the start.

    Raises:
        OptionError: `start` would find the same mistake; or a step is Spark's.
    """

    def __init__(
        self,
        pipeline: RunnablePipeline,
        *,
        parallelism: int | None = None,
        partitions: Mapping[str, int] | None = None,
        now: datetime = BEGIN,
    ) -> None:
        _refuse_transform(pipeline)
        self._pipeline, self._parallelism = pipeline, parallelism
        self._clock = Clock(round(now.timestamp() * 1000))
        self._topics, self._written = Topics(partitions or {}), Topics(partitions or {})
        self._host = MemoryHost(MemoryStorage())
        self._kept: dict[str, MemorySink] = {}
        self._topology = self._in_memory(pipeline.topology)
        self._late = Counter[str]()
        self._is_crashing = False
        self._accepted = frozenset[str]()
        self._sinks: Sinks | None = None
        self._start()
        self._feeder = Feeder(self._run.all_inputs, self._topics, self._clock)

    # --- input and time ---------------------------------------------------------------------

    def feed(
        self, source: str, rows: Any, *, partition: int = 0, at: datetime | int | None = None
    ) -> None:
        """Append records to a topic.

        Args:
            source: a topic, or the name or uid of an input with one topic.
            rows: a list of dicts, an Arrow table, a pandas or Polars frame: rows with columns of
                the source, which its own format encodes; or raw records, with a column `value`
                and, as wanted, `key`, `headers` and `timestamp`; or a list of raw values.
            partition: where they go.
            at: the timestamp of records without one of their own; None: the clock's.

        Raises:
            OptionError: there is no such source, or the rows do not fit it.
        """
        self._feeder.feed(source, rows, partition, at)

    def advance_clock(self, span: str | int) -> None:
        """Let time pass: a text such as "1 minute", or ms."""
        self._clock.now_ms += duration_ms("advance_clock", span)

    # --- runs ---------------------------------------------------------------------------------

    def epoch(self) -> bool:
        """Run the next epoch to its end; return False if there is nothing to do.

        After an epoch with records another one may be due, in which timers of event time fire.

        Raises:
            TallystickError, or what a function raised: as the query would. The epoch has no effect;
                the next call runs it again.
        """
        try:
            return self._driver.run_next(self._planner)
        except BaseException:
            self._start()
            raise

    def drain(self) -> Self:
        """Run epochs until there is nothing to do at this time; return the driver."""
        while self.epoch():
            pass
        return self

    def restart(
        self,
        parallelism: int | None = None,
        *,
        pipeline: RunnablePipeline | None = None,
        accept: Collection[str] = (),
    ) -> None:
        """Stop the run, and start another one from the same checkpoint.

        Args:
            parallelism: as for the class; None: as before.
            pipeline: a changed one, with the same sources and sinks; None: as before.
            accept: as for `Pipeline.start`, for this run alone.
        """
        self._parallelism = parallelism or self._parallelism
        self._driver.end()
        if pipeline is not None:
            self._pipeline, self._topology = pipeline, self._in_memory(pipeline.topology)
        self._accepted = frozenset(accept)
        self._start()
        self._feeder = Feeder(self._run.all_inputs, self._topics, self._clock)

    def crash(self) -> None:
        """Run the next epoch up to its decision, kill the run there, and start another one.

        All of the epoch is prepared then, in every sink, and none of it counts: the new run aborts
        it, and runs it again.

        Raises:
            OptionError: there is no epoch to run.
        """
        self._is_crashing = True
        try:
            self._driver.run_next(self._planner)
        except _CrashError:
            self._start()
        else:
            raise OptionError("crash(): there is nothing to do, and so no epoch to cut short: feed")
        finally:
            self._is_crashing = False

    # --- results --------------------------------------------------------------------------------

    def output(self, name: str = _MAIN) -> pa.Table:
        """Return all committed rows of an output, as its sink got them.

        Args:
            name: of a side output; "main"; or the uid or the topic of a sink.

        Raises:
            OptionError: there is no such output, or several sinks get some of it.
        """
        uids = self._uids_of(name)
        if len(uids) != 1:
            known = {selection.output or _MAIN for selection in self._topology.selections.values()}
            topics = {sink.output.topic or "" for sink in self._kept.values() if sink.output}
            names = sorted({*known, *self._kept, *topics} - {""})
            what = f"sinks {', '.join(uids)} get rows of it: name one" if uids else "no sink has it"
            hint = "" if uids else f"; there are {', '.join(names)}.{near(name, names)}"
            raise OptionError(f"output({name!r}): {what}{hint}")
        rows = self._kept[uids[0]].rows
        if not rows:
            selection = self._topology.selection(uids[0])
            columns = self._run.columns if not selection.output else None
            columns = columns or self._run.outputs.get(selection.output)
            return (pa.schema([]) if columns is None else columns).empty_table()
        tables = [pa.Table.from_batches([batch]) for batch in rows]
        return pa.concat_tables(tables, promote_options="permissive")

    def records(self, topic: str) -> pa.Table:
        """Return the committed records of an output topic, as a consumer gets them."""
        return self._written.table(topic)

    def dead_letters(self) -> pa.Table:
        """Return the malformed records: why, topic, partition and offset, then key and value."""
        topic = self._topology.dead_letter_topic
        letters = [] if topic is None else self.records(topic).to_pylist()
        rows = []
        for letter in letters:
            own = {header["key"]: header["value"] for header in letter["headers"] or ()}
            error, origin, partition, offset = (own[name].decode() for name in OWN_HEADERS)
            place = {"topic": origin, "partition": int(partition), "offset": int(offset)}
            rows.append({"error": error, **place, "key": letter["key"], "value": letter["value"]})
        return pa.Table.from_pylist(rows, _DEAD_LETTERS)

    def late_count(self, uid: str | None = None) -> int:
        """Return how many late rows a step dropped; None: all steps."""
        return self._late.total() if uid is None else self._late[uid]

    def state(self, uid: str | None = None) -> pa.Table:
        """Return the committed state of a step, a row per key; see `tallystick.read_state`.

        Args:
            uid: of the step; None: of the only one.

        Raises:
            OptionError: there is no such step, or no epoch is committed.
        """
        newest = self._driver.coordinator.committed_manifest
        state = () if newest is None else newest.state
        steps = [step for step in state if uid in (None, step.uid)]
        if len(steps) != 1:
            names = [step.uid for step in state]
            hint = f"{', '.join(names) or 'none'}.{near(uid or '', names)}"
            raise OptionError(f"state({uid or ''}): the steps with committed state are: {hint}")
        groups = key_group_range(steps[0].max_parallelism, 1, 0)
        entries = contents_of(steps[0], groups, self._host.files)
        return pa.Table.from_batches([table_of(steps[0], entries)])

    # --- inside ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin a run, as `pipeline.loop` does; the one before has ended, or is given up."""
        if self._sinks is not None:
            self._sinks.close()
        self._ran: EpochRan | None = None
        run = self._run = self._pipeline._compiled(Cluster.absent())
        sinks = self._sinks = Sinks(self._topology, run.name, run.cluster, trigger_interval_ms=None)
        identity = begin_here(run, sinks, self._topics, self._host)
        run.keyed = replace(run.keyed, accepted=self._accepted)
        if self._parallelism is not None:
            run.keyed = run.keyed.rescaled(self._parallelism, ())
        for source in run.all_inputs:
            for topic in source.options.subscription.named or ():
                self._topics.add(topic)
        files, clock = self._host.files, self._clock
        self._driver = sinks.make_driver(identity, files, listener=self._listen, clock=clock)
        self._planner = PipelinePlanner(
            run,
            planners_of(run, lambda source: MemoryPlanner(source, self._topics, run, self._clock)),
            sizes=None,
            clock=EpochClock(self._clock, self._clock),
            pauses=SteadyClock(self._clock, self._clock),
        )

    def _listen(self, event: Event) -> None:
        match event:
            case EpochRan():
                self._ran = event
            case OutputCounted() if self._is_crashing and self._ran is not None:
                raise _CrashError
            case TransactionCommitted() if self._ran is not None:
                self._late.update(dict(self._ran.late))
                self._ran = None

    def _in_memory(self, topology: OutputTopology) -> OutputTopology:
        """Return sinks that keep rows: in place of those on servers, and beside the real ones."""
        others: list[tuple[str, Sink]] = []
        real: list[tuple[str, Sink]] = []
        selections = dict(topology.selections)
        for uid, sink in topology.by_uid:
            output = getattr(sink, "output", None)
            is_kafka, letters = isinstance(output, KafkaOutput), topology.dead_letter_topic
            kept = MemorySink(
                self._written,
                self._clock,
                output if is_kafka else None,
                letters if letters == getattr(sink, "dead_letter_topic", None) else None,
            )
            if uid in self._kept:
                kept.take_over(self._kept[uid])
            self._kept[uid], beside = kept, uid
            if not is_kafka and sink.kind not in IN_MEMORY:
                real.append((uid, sink))
                beside = f"{uid}.rows"
            others.append((beside, kept))
            selections[beside] = topology.selection(uid)
        return replace(
            topology,
            decider=None,
            sink=None,
            uid="",
            sharing=(),
            others=(*others, *real),
            selections=selections,
        )

    def _uids_of(self, name: str) -> list[str]:
        """Return the uids of the sinks that a name means."""
        if name in self._kept:
            return [name]
        outputs = {uid: kept.output for uid, kept in self._kept.items()}
        if uids := [uid for uid, output in outputs.items() if output and output.topic == name]:
            return uids
        meant = MAIN if name == _MAIN else name
        return [uid for uid in self._kept if self._topology.selection(uid).output == meant]


_DEAD_LETTERS = pa.schema(
    {
        "error": pa.string(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "key": pa.binary(),
        "value": pa.binary(),
    }
)


def _refuse_transform(pipeline: RunnablePipeline) -> None:
    """Raise OptionError for a step whose rows pass through Spark."""
    for number, step in enumerate(pipeline.steps, start=1):
        if isinstance(step, Transform):
            name = getattr(step.function, "__name__", "")
            raise OptionError(
                f"pipeline {pipeline.name!r}: step {number}, transform {name}: its rows are a "
                f"DataFrame of Spark's, and here is no Spark: test it with "
                f"tallystick.testing.EmbeddedKafka and a session, or make it a map_batches"
            )


def run(
    pipeline: RunnablePipeline,
    inputs: Any,
    *,
    parallelism: int | None = None,
    now: datetime = BEGIN,
) -> Driver:
    """Run a pipeline in this process over all of some input, without Kafka and Spark.

    Args:
        pipeline: whole, with source and sinks.
        inputs: rows by source, as for `Driver.feed`; rows alone are those of an only topic.
        parallelism: as for `Driver`.
        now: as for `Driver`.

    Returns:
        The driver, after its last epoch: `output`, `dead_letters`, `state` and others.

    Raises:
        OptionError: as `Driver` and `Driver.feed`.
    """
    driver = Driver(pipeline, parallelism=parallelism, now=now)
    for source, rows in driver._feeder.by_source(inputs).items():
        driver.feed(source, rows)
    return driver.drain()
