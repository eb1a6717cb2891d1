"""Where decisions are kept may change between two runs: another mode, prefix, sink, or cluster.

    KafkaSink(transactions="epoch") ◄──► the checkpoint's log ◄──► another transactional id prefix

The log is the directory of all of it: its newest slot says which places in Kafka may know of more
than its own token. A run that decides where the run before did writes nothing there.

    what a run does                    why nobody else decides behind its back
    leave a trace (log silent only)    whoever comes later finds a place that never decided yet
    take a slot of the log             slots are in one order, and each is had once
    look which places there are        behind the slot: who leaves a trace later, finds the slot
    fence them                         whoever took the slot before cannot decide there any more
    prove that the slot is the newest  else its own fence came behind that of the next run
    ask them                           now their answers are final

Invariants:
    * Whatever may have decided an epoch of this checkpoint is fenced before it is asked, so that a
      run of the old kind cannot decide any more.
    * A run that decides in Kafka proves that the log has no newer owner: behind each fence of its
      own, and again right before its first decision. Of two runs in different places, the one with
      the earlier slot is fenced by the other, or finds the other's slot.
    * Of what the places answer, the newest epoch of this lineage counts. Of one epoch decided in
      two places Kafka's decision counts: only what the log decided is ever run again
      (`checkpoint.lost_output`), so it is the newer one.
    * A place that belongs to another lineage is not taken from it unless a person said so.
    * With the first decision in the present place the log says so; from then on it alone is asked.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tallystick.checkpoint.facts import Identity
from tallystick.checkpoint.manifest import KAFKA, Manifest
from tallystick.checkpoint.refusals import new_lineage_word
from tallystick.decision_log import (
    DecisionLog,
    Entry,
    KafkaPlace,
    kafka_places,
    leave_trace,
    newest_entry,
)
from tallystick.errors import AuthorizationError, FencedError, TallystickError
from tallystick.ports import Broker, Clock, Storage
from tallystick.sink.tokens import encode_token, newest_token
from tallystick.sink.transaction import ProducedRange, Producer, Token
from tallystick.topic_partition import TopicPartition

logger = logging.getLogger(__name__)


class Earlier(NamedTuple):
    """A place in Kafka where decisions may have been kept before."""

    broker: Broker
    transactional_id: str
    token_group: str


class Surroundings(NamedTuple):
    """What a handover looks at.

    Args:
        storage: the checkpoint.
        clock: draws the run's name in the log.
        manifests: reads those of the newest epochs.
        reach: how to reach a place in Kafka; several where its cluster is not known.
        assumed: where a run of an earlier release, which left no trace, would have decided.
    """

    storage: Storage
    clock: Clock
    manifests: Callable[[], Iterable[Manifest]]
    reach: Callable[[KafkaPlace], Sequence[Earlier]]
    assumed: Callable[[], Iterable[KafkaPlace]] = tuple


class Handover:
    """`ports.Broker` in which the present place of decisions goes on from earlier ones.

    Args:
        kafka: where this run decides; None: in the checkpoint's log.
        place: of the token, in the present place.
        identity: of the run.
        around: what it looks at.
    """

    def __init__(
        self,
        kafka: tuple[KafkaPlace, Broker] | None,
        place: TopicPartition,
        identity: Identity,
        around: Surroundings,
    ) -> None:
        self._around = around
        self._storage = around.storage
        self._log = DecisionLog(around.storage, around.clock)
        self._own = None if kafka is None else kafka[0]
        self._current: Broker = self._log if kafka is None else kafka[1]
        self._earlier: tuple[Earlier, ...] = ()
        self._held: Producer | None = None  # the log's, by a run that decides in Kafka
        self._place = place
        self._identity = identity

    def fence(self, transactional_id: str, current: Producer | None) -> Producer:
        """See `ports.Broker.fence`; at the start, earlier runs of every kind are fenced.

        Raises:
            FencedError: another run owns the pipeline, wherever that one decides.
        """
        if current is not None:
            producer = self._current.fence(transactional_id, current)
            self._prove()  # what lingers elsewhere is aborted on the strength of this
            return producer
        self._earlier, self._held = (), None
        if self._own is None:
            return self._take_over_in_log(transactional_id)
        if self._is_silent():
            leave_trace(self._storage, self._own)
        before = newest_entry(self._storage)
        if self._goes_on(before):
            producer = self._current.fence(transactional_id, None)
            if newest_entry(self._storage) == before and self._goes_on(before):
                return producer
        return self._take_over_in_kafka(transactional_id, self._own)

    def _is_silent(self) -> bool:
        entry = newest_entry(self._storage)
        return entry is None or entry.is_silent

    def _goes_on(self, entry: Entry | None) -> bool:
        """Whether whoever decided before did it in the same place, by what is known now."""
        if self._places(entry, with_assumed=False) - {self._own}:
            return False
        return entry is None or (entry.is_by_kafka and entry.token is None)

    def _take_over_in_log(self, transactional_id: str) -> Producer:
        producer = self._log.fence(transactional_id, None)
        entry = newest_entry(self._storage)
        places = self._places(entry, with_assumed=True)
        known = () if entry is None else entry.kafka
        if places - set(known):
            producer = self._log.note(producer, tuple(sorted(places)))
        self._fence_earlier(places)
        return producer

    def _take_over_in_kafka(self, transactional_id: str, own: KafkaPlace) -> Producer:
        held = self._log.fence(transactional_id, None)
        places = self._places(newest_entry(self._storage), with_assumed=False) | {own}
        self._held = self._log.note(held, tuple(sorted(places)), is_by_kafka=True)
        self._fence_earlier(places - {own})
        producer = self._current.fence(transactional_id, None)
        self._prove()
        return producer

    def _places(self, entry: Entry | None, *, with_assumed: bool) -> set[KafkaPlace]:
        """Where in Kafka more may be decided than the log's token says."""
        found = kafka_places(self._storage, entry)
        if with_assumed and (entry is None or entry.is_silent):
            found |= {each for each in self._around.assumed() if self._may_be_ours(each)}
        token = None if entry is None else entry.token
        known = {each.transactional_id for each in found}
        if self._own is not None:
            known.add(self._own.transactional_id)
        return found | {
            KafkaPlace(each.producer.transactional_id, "")
            for each in self._around.manifests()
            if each.decided_by == KAFKA
            and each.lineage == self._identity.lineage
            and each.origin is None
            and each.producer.transactional_id not in known
            and (token is None or each.checkpoint_id > token.checkpoint_id)
        }

    def _may_be_ours(self, assumed: KafkaPlace) -> bool:
        """Whether nobody else is known to decide there; nothing says that this checkpoint did."""
        try:
            tokens = [self._token_of(each) for each in self._around.reach(assumed)]
        except AuthorizationError as error:
            logger.info("transactional id %r decided nothing: %s", assumed.transactional_id, error)
            return False
        return all(each is None or each.lineage == self._identity.lineage for each in tokens)

    def _fence_earlier(self, places: Iterable[KafkaPlace]) -> None:
        reached = [each for place in sorted(places) for each in self._around.reach(place)]
        for each in reached:
            each.broker.fence(each.transactional_id, None)
        self._earlier = tuple(reached)

    def _prove(self) -> None:
        """That no run has taken the log over: it would fence this one, and may have done so."""
        if self._held is not None and not self._log.holds(self._held):
            raise FencedError(
                f"pipeline {self._identity.pipeline!r}: another run of checkpoint "
                f"{self._identity.checkpoint} has begun since this one did, with another mode or "
                f"transactional id prefix: this run stops. Two runs must not use one checkpoint; "
                f"the newer one goes on."
            )

    def _token_of(self, place: Earlier) -> Token | None:
        held = place.broker.group_offsets(place.token_group)
        return newest_token(held, self._place, self._identity.lineage)

    def group_offsets(
        self, group: str, place: TopicPartition | None = None
    ) -> Mapping[TopicPartition, tuple[int, str]]:
        """See `ports.Broker.group_offsets`; with the newest token of this lineage."""
        found = dict(self._current.group_offsets(group, place))
        present = newest_token(found, self._place, self._identity.lineage)
        logged = newest_entry(self._storage) if self._held is not None else None
        in_log = logged.token if logged is not None else None
        in_kafka = [self._token_of(each) for each in self._earlier]
        if self._own is None:
            in_log = present
        else:
            in_kafka.insert(0, present)
        own = [
            (token.checkpoint_id, is_kafka, token)
            for is_kafka, tokens in ((True, in_kafka), (False, [in_log]))
            for token in tokens
            if token is not None and token.lineage == self._identity.lineage
        ]
        if not own or self._is_anothers(present):
            return found
        *_, newest = max(own, key=lambda each: each[:2])
        if newest != present:
            found[self._place] = encode_token(newest)
        return found

    def _is_anothers(self, present: Token | None) -> bool:
        if present is None or present.lineage == self._identity.lineage:
            return False
        return new_lineage_word(present) not in self._identity.accepted

    def stage_offsets(
        self,
        producer: Producer,
        group: str,
        offsets: Mapping[TopicPartition, tuple[int, str]],
        *,
        for_show: bool = False,
    ) -> None:
        """See `ports.Broker.stage_offsets`."""
        self._current.stage_offsets(producer, group, offsets, for_show=for_show)

    def last_sequences(
        self, producer: Producer, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int] | None:
        """See `ports.Broker.last_sequences`."""
        return self._current.last_sequences(producer, partitions)

    def commit_transaction(self, producer: Producer) -> Producer:
        """See `ports.Broker.commit_transaction`.

        Raises:
            FencedError: another run owns the pipeline, wherever that one decides.
        """
        self._prove()
        following = self._current.commit_transaction(producer)
        self._earlier = ()
        if self._held is not None:
            self._settle(self._held)
        return following

    def _settle(self, held: Producer) -> None:
        """It is decided whatever fails: the next start would only look at more places."""
        assert self._own is not None, "only a run that decides in Kafka holds the log besides"
        self._held = None
        try:
            self._log.note(held, (self._own,), is_by_kafka=True, keeps_token=False)
        except TallystickError as error:
            logger.warning(
                "checkpoint %s: that Kafka decides now is not written down: %s. The next start "
                "asks the earlier places once more; nothing else depends on it",
                self._storage.location,
                error,
            )

    def abort_transaction(self, producer: Producer) -> None:
        """See `ports.Broker.abort_transaction`."""
        self._current.abort_transaction(producer)

    def foreign_rows(
        self, producer: Producer, produced: Iterable[ProducedRange]
    ) -> Mapping[TopicPartition, int]:
        """See `ports.Broker.foreign_rows`."""
        return self._current.foreign_rows(producer, produced)
