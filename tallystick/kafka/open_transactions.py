"""Open transactions as Kafka describes them, for a person who looks; and aborting one.

Everything is asked of the coordinators and leaders as it is now; nothing waits for a transaction
to end. What this user may not see is left out where it is only for show.
"""

from typing import Any, NamedTuple

from tallystick.kafka import outcome, protocol
from tallystick.kafka.audit import INTERNAL_TOPICS, transaction_state
from tallystick.kafka.broker import EPOCH_BY_END_TXN
from tallystick.kafka.client import Client, Coordinator
from tallystick.kafka.lingering import list_open_ids
from tallystick.kafka.outcome import TaskTransaction
from tallystick.values import Producer, TopicPartition

LISTED = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")
"""States in which readers of the output wait."""


class TransactionDescription(NamedTuple):
    """A transaction as its coordinator tells.

    Args:
        partitions: those with rows.
        has_offsets: offsets are staged in it too; of our tasks it is the last thing they do.
    """

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    begun_ms: int
    timeout_ms: int
    partitions: tuple[TopicPartition, ...]
    has_offsets: bool

    @property
    def name(self) -> str:
        """No other transaction of the cluster has it; see `TaskTransaction.name`."""
        return self.producer.transaction_name

    @property
    def producer(self) -> Producer:
        """The producer that writes it."""
        return Producer(self.transactional_id, self.producer_id, self.producer_epoch)


def found_open(client: Client) -> tuple[TransactionDescription, ...]:
    """All transactions that readers may wait for, of everybody, as far as this user may see.

    Raises:
        BrokerUnavailableError: a broker did not answer, so that something may be missing.
        TallystickError: the brokers do not offer it, or refuse it.
    """
    ids = sorted(list_open_ids(client, LISTED))
    states = (found(client, each) for each in ids)
    return tuple(each for each in states if each is not None and each.state in LISTED)


def found(client: Client, transactional_id: str) -> TransactionDescription | None:
    """Return what the coordinator knows of an id; None: nothing.

    Raises:
        AuthorizationError: DESCRIBE on the id is missing.
        BrokerUnavailableError: it did not answer.
    """
    state = transaction_state(client, transactional_id)
    if state is None:
        return None
    partitions = {
        TopicPartition(topic.topic, partition)
        for topic in state.topics or []
        for partition in topic.partitions
    }
    rows = {each for each in partitions if each.topic not in INTERNAL_TOPICS}
    return TransactionDescription(
        transactional_id,
        str(state.transaction_state),
        int(state.producer_id),
        int(state.producer_epoch),
        max(0, int(state.transaction_start_time_ms)),
        int(state.transaction_timeout_ms),
        tuple(sorted(rows)),
        partitions != rows,
    )


def give_up(client: Client, transaction: TaskTransaction, timeout_ms: int) -> None:
    """Abort the one producer epoch, and nothing that the id is used for since. Idempotent.

    InitProducerId alone would abort whatever is open under the id by then. It follows where EndTxn
    does not fence the writer: before transaction.version 2.

    Raises:
        AuthorizationError: WRITE on the id is missing.
        BrokerUnavailableError: no answer; whether Kafka acted is unknown.
    """
    state = transaction_state(client, transaction.transactional_id)
    if outcome.fate_of(transaction, state) is not outcome.Fate.OPEN:
        return
    outcome.end_transaction(client, transaction, committed=False)
    if transaction.transaction_version >= EPOCH_BY_END_TXN:
        return

    def make() -> Any:
        return protocol.InitProducerIdRequest(
            transactional_id=transaction.transactional_id,
            transaction_timeout_ms=timeout_ms,
            producer_id=transaction.producer_id,
            producer_epoch=transaction.producer_epoch,
            min_version=3,  # KIP-360
            max_version=5,
        )

    client.call(
        make,
        Coordinator("transaction", transaction.transactional_id),
        lambda response: [(response.error_code, str(transaction))],
        accept=outcome.REFUSED,
    )
