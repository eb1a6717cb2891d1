"""What Kafka tells of transactions that are open, for a person who looks; and giving one up.

Everything is asked of the coordinators and leaders as it is now; nothing waits for a transaction
to end. What this user may not see is left out where it is only for show.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tallystick.errors import AuthorizationError, TallystickError
from tallystick.kafka import group_offsets, outcome, protocol
from tallystick.kafka.attempts import Attempts
from tallystick.kafka.broker import EPOCH_BY_END_TXN
from tallystick.kafka.client import Client, Coordinator
from tallystick.kafka.lingering import list_open_ids
from tallystick.kafka.outcome import TaskTransaction
from tallystick.kafka.partitions import partitions_of
from tallystick.kafka.written import INTERNAL_TOPICS, describe_producers, transaction_state
from tallystick.sink.transaction import Producer
from tallystick.topic_partition import TopicPartition

LISTED = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")
"""States in which readers of the output wait."""
ABSENT_AFTER_S = 1.0
"""How long a partition may be unknown, that was deleted under an open transaction."""


class Found(NamedTuple):
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
        """Who writes it."""
        return Producer(self.transactional_id, self.producer_id, self.producer_epoch)


class Rows(NamedTuple):
    """What a partition's leader tells of a transaction.

    Args:
        first_offset: of the transaction in this partition; -1: it has written none there.
        written_ms: the timestamp of its newest batch.
    """

    first_offset: int
    written_ms: int


def found_open(client: Client) -> tuple[Found, ...]:
    """All transactions that readers may wait for, of everybody, as far as this user may see.

    Raises:
        BrokerUnavailableError: a broker did not answer, so that something may be missing.
        TallystickError: the brokers do not offer it, or refuse it.
    """
    ids = sorted(list_open_ids(client, LISTED))
    states = (found(client, each) for each in ids)
    return tuple(each for each in states if each is not None and each.state in LISTED)


def found(client: Client, transactional_id: str) -> Found | None:
    """What the coordinator knows of an id; None: nothing.

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
    return Found(
        transactional_id,
        str(state.transaction_state),
        int(state.producer_id),
        int(state.producer_epoch),
        max(0, int(state.transaction_start_time_ms)),
        int(state.transaction_timeout_ms),
        tuple(sorted(rows)),
        partitions != rows,
    )


def rows_of(
    client: Client, transactions: Iterable[Found]
) -> Mapping[tuple[str, TopicPartition], Rows]:
    """What leaders tell of transactions, by id and partition; without READ on a topic, nothing."""
    waited = list(transactions)
    asked = {partition for each in waited for partition in each.partitions}
    try:
        answers = client.ask_leaders(
            asked, describe_producers, partitions_of, absent_after_s=ABSENT_AFTER_S
        )
    except TallystickError:
        return {}
    told: dict[tuple[str, TopicPartition], Rows] = {}
    for each in waited:
        for partition in each.partitions:
            answer = answers.get(partition)
            for state in [] if answer is None else answer.active_producers:
                writer = (int(state.producer_id), int(state.producer_epoch))
                if writer == (each.producer_id, each.producer_epoch):
                    first, last_ms = state.current_txn_start_offset, state.last_timestamp
                    told[each.transactional_id, partition] = Rows(int(first), int(last_ms))
    return told


def offsets_of(client: Client, group: str) -> dict[TopicPartition, tuple[int, str]]:
    """What a group holds now, whatever an open transaction is about to replace; see KIP-447.

    Raises:
        AuthorizationError: READ or DESCRIBE on the group is missing.
    """
    return group_offsets.fetch(client, group, None, stable=False)


def offsets_if_allowed(client: Client, group: str) -> dict[TopicPartition, tuple[int, str]] | None:
    """The same; None: this user may not see them."""
    try:
        return offsets_of(client, group)
    except AuthorizationError:
        return None


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


def await_end(client: Client, transaction: TaskTransaction) -> str:
    """Wait until Kafka has written the markers of a transaction that was ended; the last state.

    Raises:
        BrokerUnavailableError: it takes too long; it is decided all the same.
    """
    attempts = Attempts(client.deadline(), "EndTxn", str(transaction))
    while True:
        state = found(client, transaction.transactional_id)
        if state is None or not state.state.startswith("Prepare"):
            return "" if state is None else state.state
        attempts.pause(f"the coordinator says {state.state}")
