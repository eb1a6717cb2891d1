"""`ports.Decider` by Kafka's transactions: a token travels with the rows that it decides.

The token is an offset of a consumer group, committed in the transaction: whether an epoch happened
is one fact, and Kafka keeps it. It is kept under the output's topic, and under earlier ones.

Source: KIP-447 (offsets in a transaction), Flink's FLIP-143 (what is committed names a checkpoint).
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from tallystick.epoch.manifest import KAFKA, DeciderName
from tallystick.epoch.tokens import Token, encode_token, newest_token, takeover_count
from tallystick.errors import AuthorizationError, RetriableError
from tallystick.ports import Broker
from tallystick.source.offsets import SourceOffsets, requests, shown
from tallystick.values import ProducedRange, Producer, TopicPartition

logger = logging.getLogger(__name__)


def now_text() -> str:
    """Return the time, in ISO's form."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Target:
    """The place of a pipeline's decisions in Kafka: transactional id, token group, partition."""

    transactional_id: str
    token_group: str
    token_partition: TopicPartition
    cluster_id: str


class TransactionDecider:
    """Decides by committing the transaction that the epoch's rows are in.

    Args:
        broker: the cluster that is written to.
        target: the transactional id, and where the token goes.
        lineage: of the checkpoint: whose decisions count.
        now: returns the time that tokens note.
    """

    def __init__(
        self, broker: Broker, target: Target, lineage: str, now: Callable[[], str] = now_text
    ) -> None:
        self._broker = broker
        self._now = now
        self._target = target
        self._lineage = lineage
        self._earlier_places: frozenset[TopicPartition] = frozenset()
        self._takeover_count = 0

    @property
    def name(self) -> DeciderName:
        """See `ports.Decider.name`."""
        return DeciderName(KAFKA, self._target.transactional_id, self._target.cluster_id)

    def fence(self, current: Producer | None) -> Producer:
        """See `ports.Decider.fence`."""
        return self._broker.fence(self._target.transactional_id, current)

    def check_owner(self, current: Producer) -> None:
        """See `ports.Decider.check_owner`: the newest producer of the id is the owner's.

        Kafka admits another one too when it ends a transaction that took too long, as a stray
        attempt of a task may leave one: a fence tells that from another run (KIP-360).
        """
        newest = self._broker.newest_producer(self._target.transactional_id)
        if newest is not None and newest != current:
            raise RetriableError(
                f"transactional id {current.transactional_id!r}: Kafka has admitted producer "
                f"{newest.producer_id} with epoch {newest.producer_epoch} since this run's "
                f"{current.producer_id} with epoch {current.producer_epoch}: another run has taken "
                f"over, or a transaction took too long"
            )

    def last_decision(self) -> Token | None:
        """See `ports.Decider.last_decision`."""
        place = self._target.token_partition
        tokens = self._broker.group_offsets(self._target.token_group, place)
        token = newest_token(tokens, place, self._lineage)
        self._earlier_places = frozenset(tokens) - {place}
        self._takeover_count = takeover_count(tokens, self._lineage)
        return token

    def stage(self, producer: Producer, token: Token, positions: Sequence[SourceOffsets]) -> None:
        """See `ports.Decider.stage`.

        Positions on other clusters are left out: no transaction spans two.
        """
        group = self._target.token_group
        count = self._takeover_count
        text = encode_token(replace(token, takeover_count=count, staged_at=self._now()))
        self._broker.stage_offsets(producer, group, {self._target.token_partition: text})
        try:
            earlier = dict.fromkeys(self._earlier_places, text)
            self._broker.stage_offsets(producer, group, earlier, best_effort=True)
        except AuthorizationError as error:
            logger.warning("the token is not kept under earlier topics of the sink: %s", error)
            self._earlier_places = frozenset()
        for source in positions:
            if source.cluster_id == self._target.cluster_id:
                for some in requests(shown(source)):
                    self._broker.stage_offsets(producer, source.group, some, best_effort=True)

    def decide(self, producer: Producer, token: Token) -> Producer:
        """Commit the rows together with the staged token and positions: all or nothing."""
        return self._broker.commit_transaction(producer)

    def abort(self, producer: Producer) -> None:
        """See `ports.Decider.abort`."""
        self._broker.abort_transaction(producer)

    def last_sequences(
        self, producer: Producer, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int] | None:
        """See `ports.Decider.last_sequences`."""
        return self._broker.last_sequences(producer, partitions)

    def foreign_rows(
        self, producer: Producer, produced: Iterable[ProducedRange]
    ) -> Mapping[TopicPartition, int]:
        """See `ports.Decider.foreign_rows`."""
        return self._broker.foreign_rows(producer, produced)
