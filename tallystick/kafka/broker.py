"""The `ports.Broker` of Kafka, as the driver of an epoch needs it.

Invariants:
    * A fresh producer epoch for each transaction. From transaction.version 2 on EndTxn gives it;
      before, InitProducerId is called after each commit, because the next transaction's sequence
      numbers would otherwise be mistaken for repetitions of the last one's, and dropped.
    * EndTxn(commit) is repeated unchanged until it is answered. Without an answer there is a
      BrokerUnavailableError, and nothing here ever follows it by an abort.
    * Offsets are read with require_stable only: the plain answer hides a pending transaction.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tallystick.errors import AuthorizationError, BrokerUnavailableError, FencedError
from tallystick.kafka import audit, cluster, group_offsets, protocol
from tallystick.kafka.client import Client, Coordinator
from tallystick.kafka.config import TRANSACTION_TIMEOUT_MS, KafkaConfig
from tallystick.kafka.error_policy import UNEXPLAINED
from tallystick.kafka.group_offsets import Offsets
from tallystick.values import ProducedRange, Producer, TopicPartition

logger = logging.getLogger(__name__)

EPOCH_BY_END_TXN = 2
"""The transaction.version from which EndTxn gives out the next producer epoch (KIP-890)."""
ABORTED = frozenset({"PrepareEpochFence", "PrepareAbort", "CompleteAbort"})
"""Coordinator states of a transaction that was, or is being, given up."""
COMMITTED = frozenset({"PrepareCommit", "CompleteCommit"})
"""Coordinator states of a transaction that was, or is being, made visible."""
ABSENT = frozenset({"UnknownTopicOrPartition"})
ASK_AGAIN_S = 0.2


def generation(transaction_version: int, since: int) -> dict[str, int]:
    """Return the versions of a request to speak: all before KIP-890, or all from it on.

    Args:
        transaction_version: of the cluster.
        since: the request's first version of KIP-890.
    """
    if transaction_version < EPOCH_BY_END_TXN:
        return {"max_version": since - 1}
    return {"min_version": since}


def end_transaction_request(
    producer: Producer, transaction_version: int, *, committed: bool
) -> Any:
    """Return the EndTxn of a producer's transaction."""
    return protocol.EndTxnRequest(
        transactional_id=producer.transactional_id,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        committed=committed,
        **generation(transaction_version, 5),
    )


def init_producer_request(
    transactional_id: str | None, timeout_ms: int, current: Producer | None = None
) -> Any:
    """Return the InitProducerId of an id; it fails if `current` is no longer the id's producer."""
    return protocol.InitProducerIdRequest(
        transactional_id=transactional_id,
        transaction_timeout_ms=timeout_ms,
        producer_id=-1 if current is None else current.producer_id,
        producer_epoch=-1 if current is None else current.producer_epoch,
        min_version=3,  # KIP-360
        max_version=5,
    )


class KafkaBroker:
    """The driver's view of one cluster.

    Args:
        config: how to reach it.
        transaction_timeout_ms: after how long Kafka aborts a transaction by itself.
    """

    def __init__(
        self, config: KafkaConfig, transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS
    ) -> None:
        self.client = Client(config)
        self._transaction_timeout_ms = transaction_timeout_ms
        self._transaction_version: int | None = None
        self._unanswered: Producer | None = None
        self._warned_unguarded = False

    def close(self) -> None:
        """Close the connections. What is open in Kafka stays open until it times out."""
        self.client.close()

    # --- ports.Broker -------------------------------------------------------------------------

    def fence(self, transactional_id: str, current: Producer | None) -> Producer:
        """See `ports.Broker.fence`."""
        self._transaction_version = cluster.transaction_version(self.client) or 0
        if current is None:
            return self._init_producer(transactional_id, None)
        current = self._newest_named(current)
        expected = self._expected_owner(current)
        try:
            return self._init_producer(transactional_id, expected)
        except FencedError:
            # Finding our own transaction open, Kafka aborted it, and then called us fenced by that.
            actual = self._expected_owner(current)
            if actual == expected:
                raise
            return self._init_producer(transactional_id, actual)

    def group_offsets(
        self, group: str, place: TopicPartition | None = None
    ) -> dict[TopicPartition, tuple[int, str]]:
        """See `ports.Broker.group_offsets`; topics that may not be described are left out.

        Asked for all, Kafka passes over a partition whose first offset is pending.
        """
        offsets = group_offsets.fetch(self.client, group, None)
        if place is not None and place not in offsets:
            offsets |= group_offsets.fetch(self.client, group, [place])
        return offsets

    def stage_offsets(
        self, producer: Producer, group: str, offsets: Offsets, *, best_effort: bool = False
    ) -> None:
        """See `ports.Broker.stage_offsets`.

        Raises:
            EpochAbortedError: the transaction is lost, or another run has taken over.
            AuthorizationError: READ on the group or on a topic is missing.
            BrokerUnavailableError: the deadline passed; a topic that does not exist ends so too,
                unless `best_effort`.
        """
        if not offsets:
            return
        if self.transaction_version < EPOCH_BY_END_TXN:
            self._add_group(producer, group)
        request_class = protocol.TxnOffsetCommitRequest

        def make(some: Offsets) -> Any:
            return request_class(
                transactional_id=producer.transactional_id,
                group_id=group,
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                generation_id=-1,
                member_id="",
                group_instance_id=None,
                topics=group_offsets.committing(request_class, some),
                **generation(self.transaction_version, 5),
            )

        self._settle(make, group, offsets, best_effort=best_effort, producer=producer)

    def newest_producer(self, transactional_id: str) -> Producer | None:
        """See `ports.Broker.newest_producer`."""
        state = audit.transaction_state(self.client, transactional_id)
        if state is None:
            return None
        return Producer(transactional_id, int(state.producer_id), int(state.producer_epoch))

    def last_sequences(
        self, producer: Producer, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int] | None:
        """See `ports.Broker.last_sequences`."""
        wanted = list(partitions)
        sequences = audit.last_sequences(self.client, producer, wanted)
        if sequences is None:
            self._tell_unguarded(wanted)
        return sequences

    def commit_transaction(self, producer: Producer) -> Producer:
        """See `ports.Broker.commit_transaction`."""
        response = self._end_transaction(producer, committed=True)
        if self.transaction_version < EPOCH_BY_END_TXN:
            return self._init_producer(producer.transactional_id, producer)
        return Producer(
            producer.transactional_id, int(response.producer_id), int(response.producer_epoch)
        )

    def abort_transaction(self, producer: Producer) -> None:
        """See `ports.Broker.abort_transaction`."""
        self._end_transaction(producer, committed=False, accept=frozenset({"InvalidTxnState"}))

    def foreign_rows(
        self, producer: Producer, produced: Iterable[ProducedRange]
    ) -> Mapping[TopicPartition, int]:
        """See `ports.Broker.foreign_rows`; without READ on the output it warns, once."""
        wanted = list(produced)
        try:
            return audit.foreign_rows(self.client, producer, wanted)
        except AuthorizationError:
            self._tell_unguarded(rows.topic_partition for rows in wanted)
            return {}

    # --- what else the driver asks ------------------------------------------------------------

    def commit_offsets(self, group: str, offsets: Offsets) -> None:
        """Commit (offset, metadata) of a group without members, in no transaction; best effort."""
        if not offsets:
            return
        request_class = protocol.OffsetCommitRequest

        def make(some: Offsets) -> Any:
            return request_class(
                group_id=group,
                generation_id_or_member_epoch=-1,
                member_id="",
                group_instance_id=None,
                topics=group_offsets.committing(request_class, some),
                max_version=8,
            )

        self._settle(make, group, offsets, best_effort=True)

    @property
    def transaction_version(self) -> int:
        """The cluster's transaction.version, as read at the last fence; 0 where it has none.

        Tasks have to use the same one as the driver.
        """
        if self._transaction_version is None:
            self._transaction_version = cluster.transaction_version(self.client) or 0
        return self._transaction_version

    def cluster_id(self) -> str:
        """Return the cluster's own name for itself."""
        return cluster.cluster_id(self.client)

    def committed_offsets(
        self, group: str, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Return the stable committed offsets of a group; absent where there is none."""
        offsets = group_offsets.fetch(self.client, group, partitions)
        return {partition: offset for partition, (offset, _) in offsets.items()}

    def _tell_unguarded(self, partitions: Iterable[TopicPartition]) -> None:
        """Warn, once, that second attempts of tasks go unnoticed without READ on the topics."""
        if self._warned_unguarded:
            return
        self._warned_unguarded = True
        topics = ", ".join(sorted({partition.topic for partition in partitions}))
        logger.warning(
            "READ on %s is missing: whether a second attempt of a task wrote into a transaction "
            "too cannot be checked, neither before nor after its commit. Grant it to have both.",
            topics or "a topic of the transaction",
        )

    # --- requests -----------------------------------------------------------------------------

    def _settle(
        self,
        make: Callable[[Offsets], Any],
        group: str,
        offsets: Offsets,
        *,
        best_effort: bool,
        producer: Producer | None = None,
    ) -> None:
        """Send offsets until all are taken; by best effort, without those of topics that are gone.

        Kafka takes no offset for a topic that it does not have. An epoch that read the last of one
        must be able to commit all the same.

        Args:
            make: returns the request with some offsets.
            group: whose offsets they are.
            offsets: all of them.
            best_effort: see above.
            producer: in whose transaction; None: in none.
        """
        accept = ABSENT if best_effort else frozenset()
        patience_until = time.monotonic() + cluster.METADATA_LAG_MAX_S
        remaining = dict(offsets)
        while True:
            response = self.client.call(
                partial(make, remaining),
                Coordinator("group", group),
                group_offsets.codes_of,
                accept=accept if producer is None else accept | {UNEXPLAINED},
            )
            for code, subject in group_offsets.codes_of(response):
                if producer is not None and protocol.error_name(code) == UNEXPLAINED:
                    doing, group_log = "TxnOffsetCommit", TopicPartition("__consumer_offsets", 0)
                    raise audit.unexplained(self.client, producer, doing, subject, [group_log])
            denied = {
                TopicPartition(topic.name, part.partition_index)
                for topic in response.topics
                for part in topic.partitions
                if protocol.error_name(part.error_code) in accept
            }
            if not denied:
                return
            if time.monotonic() > patience_until:
                gone = ", ".join(sorted({partition.topic for partition in denied}))
                logger.warning("group %r shows no positions for what is gone: %s", group, gone)
                return
            remaining = {partition: remaining[partition] for partition in denied}
            time.sleep(ASK_AGAIN_S)

    def _newest_named(self, current: Producer) -> Producer:
        """Return the producer named by the last unanswered InitProducerId, if newer than `current`.

        Kafka knows a repeated call by the producer that the call before named, and by no older one.
        """
        named = self._unanswered
        if named is None or named.producer_id != current.producer_id:
            return current
        return max(current, named, key=lambda producer: producer.producer_epoch)

    def _expected_owner(self, current: Producer) -> Producer:
        """Return the producer to name in InitProducerId, which then fails if another run took over.

        Kafka keeps that promise for `current` itself, with three exceptions:
        * Before transaction.version 2 it takes its own abort (by time-out, or by a first
          InitProducerId that found the transaction open) for a new owner. That abort leaves one
          epoch more and nothing open. A take-over leaves more than that, because it aborts, too,
          before it takes an epoch for itself; unless there was nothing to abort, and the new owner
          has aborted since: then it has made nothing visible, and we may go on just as it may.
        * From transaction.version 2 on, EndTxn leaves one epoch more. A coordinator that took over
          from another no longer knows the one before, and mistakes our own commit for a new
          owner. Only the owner of an epoch commits with it, so one more is ours.
        * It aborts an open transaction *before* it looks at the epoch: asked by a driver that was
          replaced, it would first abort the successor's. So that is not asked.

        Raises:
            FencedError: another run has a transaction open.
        """
        state = audit.transaction_state(self.client, current.transactional_id)
        if state is None:
            return current
        same_id = state.producer_id == current.producer_id
        epoch = int(state.producer_epoch)
        if state.transaction_state == "Ongoing" and epoch != current.producer_epoch:
            raise FencedError(
                f"transactional id {current.transactional_id!r}: another run has taken over and "
                f"is writing (producer {state.producer_id}, epoch {epoch}; ours was "
                f"{current.producer_id}, epoch {current.producer_epoch}). This run stops."
            )
        by_end_txn = self.transaction_version >= EPOCH_BY_END_TXN
        ours = ABORTED | COMMITTED if by_end_txn else ABORTED
        if same_id and epoch == current.producer_epoch + 1 and state.transaction_state in ours:
            return replace(current, producer_epoch=epoch)
        return current

    def _init_producer(self, transactional_id: str, current: Producer | None) -> Producer:
        make = partial(
            init_producer_request, transactional_id, self._transaction_timeout_ms, current
        )
        try:
            response = self._call_transaction(make, transactional_id, fenced=FencedError)
        except BrokerUnavailableError:
            self._unanswered = current
            raise
        return Producer(transactional_id, int(response.producer_id), int(response.producer_epoch))

    def _end_transaction(
        self, producer: Producer, *, committed: bool, accept: frozenset[str] = frozenset()
    ) -> Any:
        make = partial(
            end_transaction_request, producer, self.transaction_version, committed=committed
        )
        return self._call_transaction(make, producer.transactional_id, accept=accept)

    def _add_group(self, producer: Producer, group: str) -> None:
        """Announce offsets to the coordinator; transaction.version 2 does it by itself."""

        def make() -> Any:
            return protocol.AddOffsetsToTxnRequest(
                transactional_id=producer.transactional_id,
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                group_id=group,
                max_version=3,
            )

        accept = frozenset({UNEXPLAINED})
        response = self._call_transaction(make, producer.transactional_id, accept=accept)
        if protocol.error_name(response.error_code) is not None:
            subject = f"group {group!r}"
            raise audit.unexplained(self.client, producer, "AddOffsetsToTxn", subject)

    def _call_transaction(self, make: Any, transactional_id: str, **how: Any) -> Any:
        subject = f"transactional id {transactional_id!r}"
        return self.client.call(
            make,
            Coordinator("transaction", transactional_id),
            lambda response: [(response.error_code, subject)],
            **how,
        )
