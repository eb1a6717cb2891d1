"""The driver side of a stream: asks Kafka what the enumerator needs, epoch by epoch.

Lives in the driver of a pipeline, and for `readStream` in the Python process that Spark keeps per
query. The planner remembers nothing that matters: each plan starts from where the epoch before has
ended.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from tallystick.errors import OptionError
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.cluster import (
    METADATA_LAG_MAX_S,
    READ_UNCOMMITTED,
    confirm_topic_ids,
    list_offsets,
)
from tallystick.options.source import SourceOptions
from tallystick.pipeline.topics import (
    STARTING,
    check_named,
    check_same_cluster,
    check_within,
    find_topics,
    partitions_of,
    resolve,
)
from tallystick.run.epoch_clock import SteadyClock
from tallystick.source.enumerator import Enumerator, Plan
from tallystick.source.offsets import SourceOffsets, Ticks, next_tick
from tallystick.source.splits import is_worth_an_epoch
from tallystick.source.subscription import (
    EARLIEST,
    LATEST,
    SKIP,
    Assignment,
    AtCommitted,
    AtOffsets,
    FoundTopic,
)
from tallystick.values import TopicPartition

logger = logging.getLogger(__name__)

MISSED_INTERVAL_MS = 30_000
"""The longest interval between looks for a topic whose position is kept."""


class StreamPlanner:
    """Plans the epochs of one run of a query.

    Args:
        broker: the cluster.
        options: of the source.
        tick_interval_ms: the interval of epochs without records, for timers; 0: none are planned.
        tick_count_max: the number of them that follow at once after an epoch with records.
    """

    def __init__(
        self,
        broker: KafkaBroker,
        options: SourceOptions,
        *,
        tick_interval_ms: int = 0,
        tick_count_max: int = 0,
    ) -> None:
        self._broker = broker
        self._options = options
        self._ticks = Ticks(tick_interval_ms, tick_count_max, began_ms=0)
        self._enumerator = Enumerator(options.subscription, options.policy)
        self._initial: SourceOffsets | None = None
        self._is_bounded_by_now = False
        self._cannot_start: OptionError | None = None
        self.waiting = 0
        """The number of offsets readable at the newest plan, those beyond its limit too."""
        self._has_looked = False
        self._pauses = SteadyClock()
        """Says for how long a topic has been missed."""
        self._discovered_at = 0.0
        self._planned_at: float | None = None
        self._ends: dict[TopicPartition, int] = {}
        self._known_cluster = ""
        self._waiting_partitions: frozenset[TopicPartition] = frozenset()

    def stop_at_what_is_there(self) -> None:
        """Make the next plan's view of topics and ends the last one (trigger availableNow)."""
        self._is_bounded_by_now = True

    def first(self) -> SourceOffsets:
        """Return where a new query starts; resolved once.

        Spark also asks when it is to run the very first epoch again, and uses the answer for
        nothing: that epoch's log entry has the starts. So a start that cannot be resolved is an
        error only once the first epoch is planned.
        """
        if self._initial is None:
            try:
                self._initial = self._resolve_first()
            except OptionError as error:
                self._cannot_start = error
                self._initial = SourceOffsets(self._broker.cluster_id(), "", initial=True)
        return self._initial

    def next(self, start: SourceOffsets, offset_count_max: int | None) -> SourceOffsets:
        """Return the offsets of the next epoch; `start` itself when there is none to run.

        Args:
            start: where the epoch before has ended.
            offset_count_max: the most that the epoch may span; None: no limit.

        Raises:
            OptionError: a new query cannot start as its options say.
            DataLossError: records were lost in a way that the policy does not accept.
        """
        self._look_at(start)
        return self.plan(start, offset_count_max)

    def look(self, start: SourceOffsets) -> None:
        """Look at topics and ends, and set `waiting` by them; `plan` follows.

        Raises:
            OptionError, DataLossError: see `next`.
        """
        self._look_at(start)
        self.waiting = self._enumerator.plan().waiting

    def hold(self, partitions: frozenset[TopicPartition]) -> None:
        """Read nothing of these in the next plan, up to the next look."""
        self._waiting_partitions = partitions
        self.waiting = self._enumerator.plan(None, partitions).waiting

    def _look_at(self, start: SourceOffsets) -> None:
        if start.initial and self._cannot_start is not None:
            raise self._cannot_start
        self._waiting_partitions = frozenset()
        self.check_cluster(start)
        self._check_end(start)
        self._enumerator.restored(start)
        if not self._has_looked or self._is_discovery_due():
            self._discover(start)
        if not (self._is_bounded_by_now and self._ends):
            self._look(start)
        else:  # planned again, after the same look
            self._resolve_new()

    def plan(self, start: SourceOffsets, offset_count_max: int | None) -> SourceOffsets:
        """Return what `next` does, by the newest look."""
        plan = self._enumerator.plan(offset_count_max, self._waiting_partitions)
        self.waiting = plan.waiting
        if plan.offsets is start or not self._is_ripe(plan):
            is_last, now_ms = self._is_bounded_by_now, 1000 * time.monotonic()
            is_due = self._ticks.is_due(start, now_ms, is_last=is_last)
            return next_tick(start) if is_due else start
        for note in plan.notes:
            logger.warning("%s", note)
        self._planned_at = time.monotonic()
        self._ticks.note_records(1000 * self._planned_at)
        return replace(plan.offsets, group=self._options.shown_group)

    def latest(self) -> SourceOffsets | None:
        """Return the ends of the logs as last seen, as positions; for progress and lag."""
        if not self._ends:
            return None
        return SourceOffsets(self._known_cluster, self._options.shown_group, self._ends)

    # --- discovery ----------------------------------------------------------------------------

    def _discover(self, start: SourceOffsets) -> None:
        """Look at the topics; a broker that is down for a moment is asked again by the client."""
        known = {partition.topic for partition in start.positions}
        missed = self._enumerator.missed
        existing = find_topics(self._broker, self._options.subscription, known)
        self._enumerator.discovered(
            existing, self._pauses.now_ms(max(start.gone.values(), default=0))
        )
        for topic in sorted(self._enumerator.missed - missed):
            logger.warning("topic %r is gone; its positions are kept for now", topic)
        for topic in sorted(missed - self._enumerator.missed):
            logger.warning("topic %r is back", topic)
        if not self._has_looked:
            self._warn_of_missing(existing, start)
        self._has_looked, self._discovered_at = True, time.monotonic()

    def _is_discovery_due(self) -> bool:
        """True at each interval; and while a topic is missed, since nothing else looks for it."""
        if self._is_bounded_by_now:
            return False
        interval_ms = self._options.discovery_interval_ms
        if self._enumerator.missed:
            often_ms = min(MISSED_INTERVAL_MS, self._options.policy.keep_ms)
            interval_ms = min(interval_ms, often_ms) if interval_ms > 0 else often_ms
            return (time.monotonic() - self._discovered_at) * 1000 >= interval_ms
        return 0 < interval_ms <= (time.monotonic() - self._discovered_at) * 1000

    def _warn_of_missing(self, existing: Mapping[str, FoundTopic], start: SourceOffsets) -> None:
        """Warn of named topics and partitions that do not exist, perhaps dropped since."""
        subscription = self._options.subscription
        there = set(partitions_of(subscription, existing)) | start.positions.keys()
        if isinstance(subscription, Assignment):
            missing = [str(p) for p in subscription.assigned if p not in there]
        else:
            topics = {partition.topic for partition in there}
            missing = [topic for topic in subscription.named or () if topic not in topics]
        if missing:
            logger.warning(
                "named, but not there: %s; read from the first offset once it is",
                ", ".join(missing[:5]) + (" and others" if len(missing) > 5 else ""),
            )

    def check_cluster(self, offsets: SourceOffsets) -> None:
        """Refuse offsets of another cluster, see `reading.check_same_cluster`.

        Raises:
            DataLossError: the offsets are another cluster's.
        """
        if not self._known_cluster:
            self._known_cluster = self._broker.cluster_id()
        servers = self._broker.client.config.bootstrap_servers
        check_same_cluster(offsets, self._known_cluster, servers)

    def _check_end(self, start: SourceOffsets) -> None:
        """Raise if options change the end: it is settled when a query is new."""
        if start.initial or (self._options.stop is None) == (start.stops is None):
            return
        begun, now = ("with", "none") if start.stops is not None else ("without", "one")
        raise OptionError(
            f"the query was begun {begun} an end (endingOffsets and the like), and its options now "
            f"name {now}: the end of a query cannot be changed. Put the option back as it was, or "
            f"start from a new checkpoint."
        )

    # --- offsets ------------------------------------------------------------------------------

    def _resolve_first(self) -> SourceOffsets:
        options = self._options
        existing = find_topics(self._broker, options.subscription)
        check_named(self._broker, options.subscription, existing)
        self._enumerator.discovered(existing, self._pauses.now_ms())
        self._has_looked, self._discovered_at = True, time.monotonic()
        partitions = self._enumerator.unresolved
        confirm_topic_ids(self._broker.client, self._ids_of(partitions))
        starts = resolve(self._broker, options.start, partitions, STARTING)
        given = {
            p: starts[p]
            for p in partitions
            if isinstance(options.start, AtCommitted)
            or (isinstance(options.start, AtOffsets) and options.start.partitions.get(p, -1) >= 0)
        }
        if given:
            may_expire = options.policy.expired == SKIP
            check_within(self._broker, given, STARTING, may_expire=may_expire)
        self._enumerator.resolved(starts)
        stops = None
        if options.stop is not None:
            stops = resolve(self._broker, options.stop, partitions, "endingOffsets")
        return self._enumerator.first(self._broker.cluster_id(), options.shown_group, stops)

    def _look(self, start: SourceOffsets) -> None:
        """Pass the beginnings and ends of logs to the enumerator."""
        enumerator = self._enumerator
        self._resolve_new()
        self._see_ends()
        if enumerator.suspicious:
            self._discover(start)
            self._see_ends()
            self._tell_truncated_from_uncommitted()
        if self._options.policy.expired == SKIP:
            enumerator.begun(self._list_offsets(enumerator.readable, EARLIEST))

    def _resolve_new(self) -> None:
        """Start new partitions where the log begins, once the leader knows the topic's id.

        Before that, the leader lists offsets of a deleted topic of the same name: with those, the
        query would wait for records that nobody has written, or lose records that were.
        """
        ids = self._ids_of(self._enumerator.unresolved)
        if not ids:
            return
        client = self._broker.client
        confirmed = confirm_topic_ids(client, ids, absent_after_s=METADATA_LAG_MAX_S)
        self._enumerator.resolved(self._list_offsets(sorted(confirmed), EARLIEST))
        if len(confirmed) < len(ids):
            self._has_looked = False  # the topic may be gone again, or another one

    def _ids_of(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, str]:
        return {partition: self._enumerator.found_id(partition.topic) for partition in partitions}

    def _see_ends(self) -> None:
        self._ends = self._list_offsets(self._enumerator.readable, LATEST)
        self._enumerator.ended(self._ends)

    def _tell_truncated_from_uncommitted(self) -> None:
        """Accept a position beyond the last stable offset as long as the log reaches it.

        A group that read uncommitted records may have left such a position.
        """
        suspects = [p for p in self._enumerator.suspicious if p in self._ends]
        if not suspects:
            return
        high = list_offsets(self._broker.client, suspects, LATEST, isolation=READ_UNCOMMITTED)
        positions = self._enumerator.positions
        self._ends |= {p: min(high[p], positions[p]) for p in suspects}
        self._enumerator.ended(self._ends)

    def _list_offsets(self, partitions: list[TopicPartition], at: int) -> dict[TopicPartition, int]:
        return list_offsets(self._broker.client, partitions, at, absent_after_s=METADATA_LAG_MAX_S)

    def _is_ripe(self, plan: Plan) -> bool:
        """True if the planned epoch is worth its cost: always, if more changes than positions."""
        if plan.offsets.starts or not plan.waiting or self._is_bounded_by_now:
            return True
        waited_ms = (
            None
            if self._planned_at is None
            else round((time.monotonic() - self._planned_at) * 1000)
        )
        return is_worth_an_epoch(
            plan.waiting,
            self._options.offset_count_min,
            waited_ms,
            self._options.trigger_delay_max_ms,
        )
