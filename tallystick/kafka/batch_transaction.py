"""The transaction of a batch write: begun by one process, written by tasks, ended by another.

Invariants:
    * It begins with InitProducerId: its producer epoch has one transaction.
    * It is committed only while its coordinator has it open, and only if the leaders of all its
      partitions have as many rows of it as the tasks report.
    * It is fenced when it is aborted, also where nothing is open yet: a task that Spark has not
      stopped so far can no longer open anything.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from tallystick.codec.rows import RowLayout
from tallystick.epoch.rights import TRANSACTIONAL_ID, WRITE, Right, writing
from tallystick.epoch.transactional_ids import BATCH_PREFIX, is_batch_id
from tallystick.errors import (
    BrokerUnavailableError,
    EpochAbortedError,
    FencedError,
    ForeignRowsError,
)
from tallystick.kafka import cluster, outcome
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.broker import ABORTED, COMMITTED, KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.outcome import Fate, TaskTransaction, fate_of, written
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.preflight import check, missing_rights, refuse
from tallystick.values import ProducedRange, Producer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchTransaction:
    """The transaction of one batch write; picklable.

    Args:
        output: what the user chose.
        rows: how rows become records, with the partitions that topics had when it was begun.
        producer: as Kafka admitted it under its transactional id.
        transaction_version: the cluster's; tasks and the end must use the same.
    """

    output: KafkaOutput
    rows: RowLayout
    producer: Producer
    transaction_version: int

    @classmethod
    def begin(
        cls, output: KafkaOutput, transactional_id: str, columns: pa.Schema
    ) -> "BatchTransaction":
        """Check cluster, rights and columns, and fence the transactional id.

        Args:
            output: what the user chose.
            transactional_id: what is open under it is aborted.
            columns: of the rows.

        Raises:
            OptionError: something cannot work; all problems are named.
            BrokerUnavailableError: the deadline passed.
        """
        broker = KafkaBroker(output.config, output.transaction_timeout_ms)
        try:
            _check(broker, output, transactional_id)
            topics = cluster.topics(broker.client) if output.topic is None else [output.topic]
            counts = cluster.partition_counts(broker.client, topics)
            rows = output.rows(counts, cluster.batch_limits(broker.client, counts))
            rows.check(columns)
            producer = broker.fence(transactional_id, None)
            return cls(output, rows, producer, broker.transaction_version)
        finally:
            broker.close()

    def commit(self, produced: Sequence[ProducedRange]) -> None:
        """Commit the transaction if it holds exactly the rows that the tasks report.

        Args:
            produced: the ranges of all tasks, one per partition.

        Raises:
            EpochAbortedError: it timed out, another write has taken its id, or it holds more or
                less than the tasks report: nothing of it is visible.
            FencedError: another write has taken its id while this one was being committed.
            BrokerUnavailableError: whether it was committed is not known.
            ForeignRowsError: it was committed, with rows that no task reports.
        """
        broker = KafkaBroker(self.output.config, self.output.transaction_timeout_ms)
        transaction = replace(self._transaction, produced=tuple(produced))
        try:
            state = transaction_state(broker.client, self.producer.transactional_id)
            if produced and fate_of(transaction, state) is not Fate.OPEN:
                raise EpochAbortedError(self._not_open(transaction))
            self._check_count(broker, produced)
            if not produced:
                return
            self._end(broker.client, transaction)
            foreign = broker.foreign_rows(self.producer, produced)
        finally:
            broker.close()
        if foreign:
            where = ", ".join(f"{partition}: {rows}" for partition, rows in sorted(foreign.items()))
            raise ForeignRowsError(
                f"{transaction} was committed, and a task that Spark had given up wrote rows into "
                f"it between the last count and the commit ({where}). They repeat rows of the "
                f"write, right after {written(transaction)}: remove them where the output is used"
            )

    def abort(self) -> None:
        """Abort the transaction, and fence its tasks; do nothing if it is committed.

        Raises:
            BrokerUnavailableError: no answer; it ends with its timeout then.
        """
        broker = KafkaBroker(self.output.config, self.output.transaction_timeout_ms)
        try:
            state = transaction_state(broker.client, self.producer.transactional_id)
            if state is not None and not self._is_in(state, COMMITTED):
                broker.fence(self.producer.transactional_id, self.producer)
        except FencedError:
            pass  # another write has taken the id, and has aborted this one
        finally:
            broker.close()

    @property
    def _transaction(self) -> TaskTransaction:
        return TaskTransaction(
            self.producer.transactional_id,
            self.producer.producer_id,
            self.producer.producer_epoch,
            self.transaction_version,
            cluster_id="",
        )

    def _check_count(self, broker: KafkaBroker, produced: Sequence[ProducedRange]) -> None:
        reported = {rows.topic_partition: rows.record_count - 1 for rows in produced}
        actual = broker.last_sequences(self.producer, reported)
        if actual is None or dict(actual) == reported:
            return
        wrong = sorted(
            f"{partition}: {actual.get(partition, -1) + 1} in Kafka, "
            f"{reported.get(partition, -1) + 1} reported"
            for partition in {*reported, *actual}
            if actual.get(partition) != reported.get(partition)
        )
        raise EpochAbortedError(
            f"{self._transaction} does not hold the rows that its tasks report "
            f"({'; '.join(wrong)}): another attempt of a task wrote too. It is aborted, and "
            f"nothing of it is visible. Write again"
        )

    def _end(self, client: Client, transaction: TaskTransaction) -> None:
        evidence = (
            f"Read {written(transaction)} with isolation.level=read_committed once its brokers "
            f"answer: if these records are there, all of the write is, else nothing"
        )
        try:
            refused = outcome.end_transaction(client, transaction, committed=True)
        except BrokerUnavailableError as error:
            raise BrokerUnavailableError(
                f"whether {transaction} was committed is not known ({error}). {evidence}"
            ) from error
        if refused is None:
            return
        state = transaction_state(client, self.producer.transactional_id)
        if state is not None and self._is_in(state, COMMITTED):
            return
        if state is not None and self._is_in(state, ABORTED):
            raise EpochAbortedError(self._not_open(transaction))
        raise FencedError(
            f"{transaction} is over ({refused}), and another write has used its transactional id "
            f"since. {evidence}. Give each write that may run beside another one its own "
            f"transactional.id.prefix, or none"
        )

    def _is_in(self, state: Any, states: frozenset[str]) -> bool:
        """True if the transaction is in a given state; ending a transaction adds 1 to the epoch."""
        epochs = (self.producer.producer_epoch, self.producer.producer_epoch + 1)
        return (
            int(state.producer_id) == self.producer.producer_id
            and int(state.producer_epoch) in epochs
            and state.transaction_state in states
        )

    def _not_open(self, transaction: TaskTransaction) -> str:
        return (
            f"{transaction} was aborted before all tasks had written: it was open for longer than "
            f"transaction.timeout.ms={self.output.transaction_timeout_ms}, or another write with "
            f"the same transactional.id.prefix has begun. Nothing of it is visible. Raise "
            f"transaction.timeout.ms (at most the brokers' transaction.max.timeout.ms), and write "
            f"again"
        )


def _check(broker: KafkaBroker, output: KafkaOutput, transactional_id: str) -> None:
    prefix = BATCH_PREFIX if is_batch_id(transactional_id) else ""
    right = Right(TRANSACTIONAL_ID, transactional_id, WRITE, prefix)
    missing = missing_rights(broker.client, (*writing(output.topics), right))
    # Whether Spark speculates cannot be seen from here; a second attempt never writes.
    findings = check(cluster.cluster_facts(broker.client), output, trigger_interval_ms=None)
    for warning in findings.warnings:
        logger.warning("%s", warning)
    refuse(findings.problems, missing, output.config.sasl_username)
