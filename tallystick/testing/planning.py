"""The planner of an input whose topics are in memory; see `input_planning.Planner`."""

from collections.abc import Callable

from tallystick.errors import OptionError
from tallystick.pipeline.compiled import PipelineRun
from tallystick.pipeline.inputs import PipelineInput
from tallystick.source.enumerator import Enumerator
from tallystick.source.offsets import SourceOffsets, Ticks, next_tick
from tallystick.source.subscription import AtOffsets, FoundTopic
from tallystick.testing.memory import Topics
from tallystick.values import TopicPartition

CLUSTER = "memory"
"""The id of the cluster of topics in memory."""


class MemoryPlanner:
    """Plans the epochs of one input.

    All that was fed is read, wherever a real run would begin; and each epoch is ripe that a test
    asks for, whatever `minOffsetsPerTrigger` says.

    Args:
        source: the input.
        topics: where its records are.
        run: the pipeline, for its timers.
        clock: of the test.
        before_look: called before each look, to append records that are due.
    """

    waiting = 0

    def __init__(
        self,
        source: PipelineInput,
        topics: Topics,
        run: PipelineRun,
        clock: Callable[[], int],
        before_look: Callable[[], None] = lambda: None,
    ) -> None:
        self._before_look = before_look
        self._options, self._topics, self._clock = source.options, topics, clock
        self._enumerator = Enumerator(source.options.subscription, source.options.policy)
        self._ends: dict[TopicPartition, int] = {}
        self._paused: frozenset[TopicPartition] = frozenset()
        self._ticks = Ticks(run.keyed.tick_interval_ms, run.keyed.tick_count, clock())

    def stop_at_what_is_there(self) -> None:
        """Do nothing: a test says when records come."""

    def first(self) -> SourceOffsets:
        """Return the beginning of each partition, and the ends if reading ends for good."""
        self._discover_topics()
        partitions = self._enumerator.unresolved
        self._resolve()
        stop, stops = self._options.stop, None
        if stop is not None and not isinstance(stop, AtOffsets):
            raise OptionError("an ending time of a source is not known to tests in memory")
        if stop is not None:
            given = {partition: stop.partitions.get(partition, -1) for partition in partitions}
            stops = {
                partition: self._topics.end(partition) if offset < 0 else offset
                for partition, offset in given.items()
            }
        return self._enumerator.first(CLUSTER, "", stops)

    def look(self, start: SourceOffsets) -> None:
        """Look at topics and ends; see `Planner.look`."""
        self._before_look()
        self._paused = frozenset()
        self._enumerator.restored(start)
        self._discover_topics()
        self._resolve()
        self._ends = {at: self._topics.end(at) for at in self._enumerator.readable}
        self._enumerator.ended(self._ends)
        self.waiting = self._enumerator.plan().waiting

    def hold(self, partitions: frozenset[TopicPartition]) -> None:
        """Read nothing of these in the next plan."""
        self._paused = partitions
        self.waiting = self._enumerator.plan(None, partitions).waiting

    def plan(self, start: SourceOffsets, offset_count_max: int | None) -> SourceOffsets:
        """Return the next offsets by the newest look; `start` itself if there are none."""
        count_max = self._options.own_count_max if offset_count_max is None else offset_count_max
        plan = self._enumerator.plan(count_max, self._paused)
        self.waiting = plan.waiting
        if plan.offsets is start:
            return next_tick(start) if self._ticks.is_due(start, self._clock()) else start
        self._ticks.note_records(self._clock())
        return plan.offsets

    def next(self, start: SourceOffsets, offset_count_max: int | None) -> SourceOffsets:
        """Look and plan."""
        self.look(start)
        return self.plan(start, offset_count_max)

    def latest(self) -> SourceOffsets | None:
        """Return the ends of the topics as last seen."""
        return SourceOffsets(CLUSTER, "", self._ends) if self._ends else None

    def _discover_topics(self) -> None:
        existing = {
            topic: FoundTopic("", self._topics.partition_count(topic))
            for topic in self._topics.names
        }
        self._enumerator.discovered(existing, self._clock())

    def _resolve(self) -> None:
        """Let new partitions begin with their first record."""
        self._enumerator.resolved(dict.fromkeys(self._enumerator.unresolved, 0))
