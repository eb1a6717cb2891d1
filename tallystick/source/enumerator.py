"""Discovery of partitions and planning of the next epoch: events in, a plan out.

A partition is *discovered* (it was seen in Kafka), then *planned* (an epoch's logged offsets hold
its start and how far that epoch reads), then *read* (the epoch was committed). Only a logged plan
is remembered: `restored` takes it over, and everything else is worked out again from the plan and
from the last discovery. So a crash at any point forgets nothing that matters, and nothing is handed
out a second time (the double assignment of apache/beam#31313).

    plan n ──logged──► restored(n) ─► discovered ─► resolved ─► ended ─► plan n+1
                             ▲            (any of these any number of times)  │
                             └────────────────────────────────────────────────┘

Rules, after Flink's KafkaSourceEnumerator:
    * A partition with a position goes on from there, whether or not it can be seen right now
      (FLINK-6006), and whether or not the subscription covers it at the moment: then its position
      is kept, and it is not read.
    * A partition without one is read from its first offset: it was created between two looks.
      Only the very first discovery asks `startingOffsets`.
    * A topic is known by its id (KIP-516). Flink leaves removed partitions a TODO; here a
      `LossPolicy` says what becomes of removed, re-created, expired and truncated ones.

No IO, clock or threads: the shell asks Kafka about the partitions in `unresolved` and `readable`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from tallystick.errors import (
    BrokenInvariantError,
    LogTruncatedError,
    PartitionRemovedError,
    TopicRecreatedError,
)
from tallystick.source.offsets import SourceOffsets
from tallystick.source.splits import Positions, limit_offsets
from tallystick.source.subscription import DROP, FAIL, KEEP, FoundTopic, LossPolicy, Subscription
from tallystick.text import shortened
from tallystick.values import TopicPartition


@dataclass(frozen=True, slots=True)
class Plan:
    """The next epoch.

    Args:
        offsets: the value for Spark's log: where the epoch ends, and where it starts if not at its
            predecessor's end. The very value that was restored if there is nothing to do.
        waiting: how many offsets wait to be read, offsets beyond the limit included.
        notes: the losses that were accepted, for the log.
    """

    offsets: SourceOffsets
    waiting: int
    notes: tuple[str, ...] = ()


class Enumerator:
    """The driver side of a source: takes events, plans the next epoch.

    Args:
        subscription: the topics and partitions to read.
        policy: what to do when records are lost.
    """

    def __init__(self, subscription: Subscription, policy: LossPolicy) -> None:
        self._subscription = subscription
        self._policy = policy
        self._state: SourceOffsets | None = None
        self._discovered: Mapping[str, FoundTopic] = {}
        self._discovered_at_ms = 0
        self._missed_since: dict[str, int] = {}
        self._new_starts: dict[tuple[TopicPartition, str], int] = {}
        self._earliest: Positions = {}
        self._ends: Positions = {}
        self._new: list[TopicPartition] = []  # found, and without a position

    # --- events -------------------------------------------------------------------------------

    def restored(self, offsets: SourceOffsets) -> None:
        """Restore the last plan in Spark's log, which has been read or will be in any case.

        Starts that were resolved and are not in the plan are resolved again: they may have been
        those of a new query, which Spark asks for also where it goes on from a log.
        """
        self._state = offsets
        self._new_starts = {}
        self._compare()

    def discovered(self, topics: Mapping[str, FoundTopic], now_ms: int) -> None:
        """Take the topics as Kafka lists them now: all, or all that the subscription names.

        Raises:
            TopicRecreatedError, PartitionRemovedError: a topic that is being read was created again
                or is gone, and the policy does not accept that.
        """
        self._discovered = {
            topic: facts
            for topic, facts in topics.items()
            if self._subscription.partitions(topic, facts.partition_count)
        }
        self._discovered_at_ms = now_ms
        self._compare()
        self._check_removed()
        self._check_recreated()

    def resolved(self, starts: Positions) -> None:
        """Take the starting offsets of `unresolved` partitions."""
        for partition, offset in starts.items():
            self._new_starts[partition, self.found_id(partition.topic)] = offset

    def begun(self, earliest: Positions) -> None:
        """Take the earliest offsets that are left; needed where expired records are skipped."""
        self._earliest = earliest

    def ended(self, ends: Positions) -> None:
        """Take the ends of partitions (last stable offsets); unknown ends are absent."""
        self._ends = ends

    # --- questions ----------------------------------------------------------------------------

    def found_id(self, topic: str) -> str:
        """Return the id under which a topic was found; "": it was not found, or has no id."""
        facts = self._discovered.get(topic)
        return "" if facts is None else facts.topic_id

    @property
    def positions(self) -> Positions:
        """The next offset to read of each partition, as restored."""
        return self._known().positions

    @property
    def unresolved(self) -> list[TopicPartition]:
        """Discovered partitions without a start, sorted."""
        return sorted(
            partition
            for partition in self._new
            if (partition, self.found_id(partition.topic)) not in self._new_starts
        )

    @property
    def readable(self) -> list[TopicPartition]:
        """Partitions whose ends the next plan needs, sorted."""
        state = self._known()
        others = self._recreated() | self._removed()
        old = (
            partition
            for partition in state.positions
            if partition.topic not in others and self._subscription.covers(partition)
        )
        return sorted({*old, *self._new})

    @property
    def missed(self) -> frozenset[str]:
        """Topics that the last discovery did not find; their positions are kept."""
        return frozenset(self._missed_since)

    @property
    def suspicious(self) -> list[TopicPartition]:
        """Readable partitions whose end is unknown or before their position: ask Kafka again."""
        positions, recreated = self._known().positions, self._recreated()
        return [
            partition
            for partition in self.readable
            if self._ends.get(partition, -1) < positions.get(partition, 0)
            and partition.topic not in recreated
        ]

    def first(self, cluster_id: str, group: str, stops: Positions | None) -> SourceOffsets:
        """Return a new query's first offsets; all discovered partitions must be resolved."""
        assert self._state is None
        return SourceOffsets(
            cluster_id=cluster_id,
            group=group,
            positions={p: self._start_of(p) for p in sorted(self._new)},
            initial=True,
            topic_ids={topic: facts.topic_id for topic, facts in self._discovered.items()},
            stops=stops,
        )

    def plan(
        self,
        offset_count_max: int | None = None,
        paused: Collection[TopicPartition] = frozenset(),
    ) -> Plan:
        """Plan the next epoch; the same plan for the same events.

        Args:
            offset_count_max: how many offsets it may span; None: all that are there.
            paused: partitions of which nothing is to be read.

        Raises:
            TopicRecreatedError, PartitionRemovedError: as `discovered`, where it was called before
                the positions were known.
            LogTruncatedError: a log ends before its position, and the policy does not accept that.
        """
        draft = _Draft(self._known())
        self._check_removed()
        self._check_recreated()
        self._leave_removed(draft)
        self._replace_recreated(draft)
        for partition in sorted(self._new):
            if (partition, self.found_id(partition.topic)) in self._new_starts:
                draft.start(partition, self._start_of(partition))
        self._skip_expired(draft)
        self._resume_truncated(draft)
        return self._finish(draft, offset_count_max, paused)

    # --- discovery against the restored plan ----------------------------------------------------

    def _known(self) -> SourceOffsets:
        if self._state is None:
            raise BrokenInvariantError("the enumerator was asked to plan before it was restored")
        return self._state

    def _compare(self) -> None:
        """Recompute the new partitions and the missed topics, after a restore or a discovery."""
        logged = {} if self._state is None else self._state.gone
        before = {**logged, **self._missed_since}
        self._missed_since = {t: before.get(t, self._discovered_at_ms) for t in self._removed()}
        self._new = self._without_position()

    def _without_position(self) -> list[TopicPartition]:
        """Return discovered partitions without a position; for a bounded stream, none."""
        if self._state is not None and self._state.stops is not None:
            return []
        positions = {} if self._state is None else self._state.positions
        recreated = self._recreated()
        discovered = (
            TopicPartition(topic, index)
            for topic, facts in self._discovered.items()
            for index in self._subscription.partitions(topic, facts.partition_count)
        )
        return [
            partition
            for partition in discovered
            if partition not in positions or partition.topic in recreated
        ]

    def _start_of(self, partition: TopicPartition) -> int:
        return self._new_starts[partition, self.found_id(partition.topic)]

    def _recreated(self) -> set[str]:
        """Return topics that were found under an id other than the id of their positions.

        Where no id is known (a broker without KIP-516) fewer partitions than before give
        it away; with an id, they only mean that a broker's metadata are old.
        """
        if self._state is None:
            return set()
        ids, discovered = self._state.topic_ids, self._discovered
        by_id = {
            topic
            for topic, topic_id in ids.items()
            if topic_id and self.found_id(topic) not in ("", topic_id)
        }
        return by_id | {
            topic
            for topic, index in self._state.positions
            if not ids.get(topic)
            and topic in discovered
            and index >= discovered[topic].partition_count
        }

    def _removed(self) -> set[str]:
        """Return topics with a position that the last discovery did not find."""
        if self._state is None or not self._discovered_at_ms:
            return set()
        covered = {p.topic for p in self._state.positions if self._subscription.covers(p)}
        return covered - self._discovered.keys()

    # --- policies -------------------------------------------------------------------------------

    def _check_removed(self) -> None:
        removed = self._removed()
        if removed and self._policy.removed == FAIL:
            topic = min(removed)
            raise PartitionRemovedError(
                f"topic {topic!r} is gone; next to read were {self._positions_text(topic)}. What "
                f"was unread in it is lost. To go on without it set when.removed=drop, or keep to "
                f"wait for its return; if this is the wrong cluster, correct bootstrap.servers."
            )

    def _check_recreated(self) -> None:
        recreated = self._recreated()
        if not recreated:
            return
        topic, is_bounded = min(recreated), self._known().stops is not None
        if self._policy.recreated == FAIL or is_bounded:
            remedy = (
                "The end of this stream means nothing in the new one: start from a new checkpoint."
                if is_bounded
                else "To read the new one from its beginning set when.recreated=restart."
            )
            raise TopicRecreatedError(
                f"topic {topic!r} was deleted and created again: its id was "
                f"{self._known().topic_ids.get(topic) or 'not known'}, and is "
                f"{self.found_id(topic)}; next to read were {self._positions_text(topic)}. What "
                f"was unread in the old one is lost. {remedy}"
            )

    def _positions_text(self, topic: str) -> str:
        positions = self._known().positions
        own = [f"{p} offset {positions[p]}" for p in sorted(positions) if p.topic == topic]
        return shortened(own)

    def _leave_removed(self, draft: "_Draft") -> None:
        draft.gone = dict(self._missed_since)
        for topic, since in sorted(self._missed_since.items()):
            is_over = self._discovered_at_ms - since >= self._policy.keep_ms
            if self._policy.removed == DROP or (self._policy.removed == KEEP and is_over):
                draft.note(f"topic {topic!r} is gone; dropped {self._positions_text(topic)}")
                draft.forget(topic)

    def _replace_recreated(self, draft: "_Draft") -> None:
        for topic in sorted(self._recreated()):
            draft.note(
                f"topic {topic!r} was deleted and created again; what was unread of the old one "
                f"from {self._positions_text(topic)} on is given up, the new one is read from its "
                f"beginning"
            )
            draft.forget(topic)

    def _skip_expired(self, draft: "_Draft") -> None:
        for partition, earliest in sorted(self._earliest.items()):
            position = draft.positions.get(partition)
            if position is not None and position < earliest:
                draft.skip(partition, earliest)
                draft.note(
                    f"{partition}: offsets {position} to {earliest - 1} ({earliest - position}) "
                    f"were deleted before they were read, and are skipped"
                )

    def _resume_truncated(self, draft: "_Draft") -> None:
        for partition, end in sorted(self._ends.items()):
            position = draft.positions.get(partition)
            if position is None or end >= position or partition in draft.starts:
                continue
            if self._policy.truncated == FAIL:
                raise LogTruncatedError(
                    f"{partition}: next to read is offset {position}, but the log ends at {end}: "
                    f"it was truncated (an unclean leader election, or lost disks). Records that "
                    f"were read are gone, and new ones take their offsets. To go on "
                    f"at the new end set when.truncated=resume."
                )
            draft.start(partition, end)
            draft.note(
                f"{partition}: the log was truncated from {position} to {end}; resumed there"
            )

    # --- the plan -------------------------------------------------------------------------------

    def _finish(
        self, draft: "_Draft", offset_count_max: int | None, paused: Collection[TopicPartition]
    ) -> Plan:
        state = self._known()
        stops = state.stops or {}
        available = {
            partition: position
            if partition in paused
            else max(position, min(self._ends.get(partition, position), limit))
            for partition, position in draft.positions.items()
            for limit in (stops.get(partition, 1 << 62),)
        }
        waiting = sum(available[p] - draft.positions[p] for p in available)
        if not (waiting or draft.is_changed or state.initial):
            return Plan(state, 0, tuple(draft.notes))
        ids = {topic: facts.topic_id for topic, facts in self._discovered.items() if facts.topic_id}
        read = {partition.topic for partition in draft.positions}
        offsets = replace(
            state,
            positions=limit_offsets(draft.positions, available, offset_count_max),
            starts=draft.positions if state.initial else draft.starts,
            initial=False,
            topic_ids={t: i for t, i in {**state.topic_ids, **ids}.items() if t in read},
            gone=draft.gone,
            skipped=draft.skipped,
            tick=0,
        )
        return Plan(offsets, waiting, tuple(draft.notes))


class _Draft:
    """The start of the next epoch while `Enumerator.plan` works it out."""

    def __init__(self, state: SourceOffsets) -> None:
        self.positions = dict(state.positions)
        self.starts: dict[TopicPartition, int] = {}
        self.gone = dict(state.gone)
        self.skipped: dict[TopicPartition, tuple[int, int]] = {}
        self.notes: list[str] = []
        self.is_changed = False

    def start(self, partition: TopicPartition, offset: int) -> None:
        """Start a partition at an offset, whatever its position was."""
        self.positions[partition] = self.starts[partition] = offset
        self.is_changed = True

    def skip(self, partition: TopicPartition, offset: int) -> None:
        """Skip lost records up to an offset, and note their range for the epoch's offsets."""
        self.skipped[partition] = (self.positions[partition], offset)
        self.start(partition, offset)

    def forget(self, topic: str) -> None:
        """Drop all positions of a topic."""
        for partition in [p for p in self.positions if p.topic == topic]:
            del self.positions[partition]
        self.gone.pop(topic, None)
        self.is_changed = True

    def note(self, text: str) -> None:
        """Note something for the log."""
        self.notes.append(text)
