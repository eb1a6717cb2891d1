"""Open transactions as Kafka describes them (KIP-664), of a sink or of a cluster, and their abort.

Everything is asked of the coordinators and leaders as it is now; nothing waits for a transaction
to end.

ListTransactions asks every broker for what it coordinates. It needs no right of its own, and that
is the trap: ids that this user may not describe are left out without a word. Where it is only for
show, that will do. For a sink the right is tried on one id of each prefix, with
DescribeTransactions, which does refuse.
"""

import logging
import time
from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

from tallystick.epoch.transactional_ids import PooledId, owned, transactional_id
from tallystick.errors import AuthorizationError, BrokerUnavailableError
from tallystick.kafka import outcome, protocol
from tallystick.kafka.audit import INTERNAL_TOPICS, transaction_state
from tallystick.kafka.broker import EPOCH_BY_END_TXN, init_producer_request
from tallystick.kafka.client import Client, Coordinator, Node
from tallystick.kafka.error_policy import Attempts
from tallystick.kafka.outcome import TaskTransaction
from tallystick.values import Producer, TopicPartition

logger = logging.getLogger(__name__)

OPEN = "Ongoing"
"""The one state without a decision; those that begin with `Prepare` end by themselves."""
LISTED = (OPEN, "PrepareCommit", "PrepareAbort", "PrepareEpochFence")
"""States in which readers of the output wait."""
NODE_TIMEOUT_MS = 3_000
"""The timeout of one broker; then the transaction is looked for again among the others."""


class TransactionDescription(NamedTuple):
    """The transaction coordinator's description of a transaction.

    Args:
        partitions: those with rows.
        has_offsets: offsets are staged in it too, which our tasks do last.
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
        """The name of the transaction, unique in the cluster; see `TaskTransaction.name`."""
        return self.producer.transaction_name

    @property
    def producer(self) -> Producer:
        """The producer that writes it."""
        return Producer(self.transactional_id, self.producer_id, self.producer_epoch)


class Finder:
    """Finds the open transactions of one sink.

    Args:
        client: of the cluster.
        prefixes: every prefix that the pipeline has ever used.
        sink: its uid.
    """

    def __init__(self, client: Client, prefixes: Collection[str], sink: str) -> None:
        self._client = client
        self._prefixes = frozenset(prefixes)
        self._sink = sink
        self._warned: set[str] = set()

    def open_transactions(self) -> dict[PooledId, TransactionDescription]:
        """Return all open transactions of the sink, by id.

        Raises:
            BrokerUnavailableError: a broker did not answer, so that something may be missing.
        """
        allowed = {prefix for prefix in self._prefixes if self._may_describe(prefix)}
        ids = owned(list_open_ids(self._client), allowed, [self._sink])
        described = ((pooled_id, describe(self._client, str(pooled_id))) for pooled_id in ids)
        return {
            pooled_id: state
            for pooled_id, state in described
            if state is not None and state.state == OPEN
        }

    def _may_describe(self, prefix: str) -> bool:
        some_id = transactional_id(prefix, self._sink, 0, 0)
        try:
            transaction_state(self._client, some_id)
        except AuthorizationError as error:
            self._tell(
                f"open transactions with prefix {prefix!r} cannot be looked for ({error}); what is "
                f"open there holds up readers of the output until it times out."
            )
            return False
        return True

    def _tell(self, warning: str) -> None:
        if warning not in self._warned:
            self._warned.add(warning)
            logger.warning("%s", warning)


def found_open(client: Client) -> tuple[TransactionDescription, ...]:
    """Return the transactions that readers may wait for, of all users, where we may see them.

    Raises:
        BrokerUnavailableError: a broker did not answer, so that something may be missing.
        TallystickError: the brokers do not offer it, or refuse it.
    """
    ids = sorted(list_open_ids(client, LISTED))
    states = (describe(client, listed_id) for listed_id in ids)
    return tuple(state for state in states if state is not None and state.state in LISTED)


def describe(client: Client, transactional_id: str) -> TransactionDescription | None:
    """Return the coordinator's description of an id's transaction; None: the id is unknown.

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
    rows = {partition for partition in partitions if partition.topic not in INTERNAL_TOPICS}
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


def list_open_ids(client: Client, states: Collection[str] = (OPEN,)) -> set[str]:
    """Return the ids of all open transactions of a cluster that this user may describe.

    Args:
        client: of the cluster.
        states: in which to look for them.

    Raises:
        BrokerUnavailableError: not all brokers that the cluster names have answered.
        TallystickError: the brokers refuse it.
    """
    attempts = Attempts(client.deadline(), "ListTransactions", "all brokers")
    while True:
        nodes = [int(broker.node_id) for broker in client.metadata().brokers]
        ids: set[str] = set()
        try:
            for node in nodes:
                ids |= _list_of(client, node, states, attempts.deadline)
        except BrokerUnavailableError as error:  # it may be gone, and its ids another's by now
            attempts.pause(str(error))
        else:
            return ids


def _list_of(client: Client, node: int, states: Collection[str], deadline: float) -> set[str]:
    def make() -> Any:
        return protocol.ListTransactionsRequest(
            state_filters=list(states), producer_id_filters=[], max_version=0
        )

    response = client.call(
        make,
        Node(node),
        lambda response: [(response.error_code, f"broker {node}")],
        deadline=min(deadline, time.monotonic() + NODE_TIMEOUT_MS / 1000),
    )
    return {str(state.transactional_id) for state in response.transaction_states}


def give_up(client: Client, transaction: TaskTransaction, timeout_ms: int) -> None:
    """Abort the transaction of a producer epoch, and none that the id began later. Idempotent.

    InitProducerId alone would abort any transaction open under the id by then. It follows only
    where a writer may go on and EndTxn does not fence it: before transaction.version 2, of a
    transaction that was found open. What a task prepared has no writer any more, and a task of a
    newer run may have taken its id meanwhile.

    Raises:
        AuthorizationError: WRITE on the id is missing.
        BrokerUnavailableError: no answer; whether Kafka acted is unknown.
    """
    state = transaction_state(client, transaction.transactional_id)
    if outcome.fate_of(transaction, state) is not outcome.Fate.OPEN:
        return
    outcome.end_transaction(client, transaction, committed=False)
    is_prepared = bool(transaction.nonce)
    if is_prepared or transaction.transaction_version >= EPOCH_BY_END_TXN:
        return
    client.call(
        partial(
            init_producer_request, transaction.transactional_id, timeout_ms, transaction.producer
        ),
        Coordinator("transaction", transaction.transactional_id),
        lambda response: [(response.error_code, str(transaction))],
        accept=outcome.REFUSED,
    )
