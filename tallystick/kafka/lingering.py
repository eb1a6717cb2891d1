"""The open transactions of a sink, of whatever run, task and attempt (KIP-664).

ListTransactions asks every broker for what it coordinates. It needs no right of its own, and that
is the trap: ids that this user may not describe are left out without a word. So the right is tried
on one id of each prefix, with DescribeTransactions, which does refuse.
"""

import logging
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from tallystick.epoch.transactional_ids import PooledId, owned, transactional_id
from tallystick.errors import AuthorizationError, BrokerUnavailableError
from tallystick.kafka import protocol
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.client import Client, Node
from tallystick.kafka.error_policy import Attempts

logger = logging.getLogger(__name__)

OPEN = "Ongoing"
"""The one state in which nobody has decided; those that begin with `Prepare` end by themselves."""
NODE_TIMEOUT_MS = 3_000
"""How long one broker may take; then it is looked for again among those that are left."""


class OpenTransaction(NamedTuple):
    """A transaction that is open, as its coordinator tells."""

    pooled_id: PooledId
    producer_id: int
    producer_epoch: int
    begun_ms: int
    timeout_ms: int
    topics: tuple[str, ...]


class Finder:
    """Finds the open transactions of one sink.

    Args:
        client: of the cluster.
        prefixes: every one that the pipeline has ever used.
        sink: its uid.
    """

    def __init__(self, client: Client, prefixes: Collection[str], sink: str) -> None:
        self._client = client
        self._prefixes = frozenset(prefixes)
        self._sink = sink
        self._told: set[str] = set()

    def open_transactions(self) -> tuple[OpenTransaction, ...]:
        """Everything of the sink that is open now.

        Raises:
            BrokerUnavailableError: a broker did not answer, so that something may be missing.
        """
        allowed = {prefix for prefix in self._prefixes if self._may_describe(prefix)}
        found = owned(list_open_ids(self._client), allowed, [self._sink])
        return tuple(each for each in map(self._describe, found) if each is not None)

    def _describe(self, pooled_id: PooledId) -> OpenTransaction | None:
        """None when it has ended since."""
        state = transaction_state(self._client, str(pooled_id))
        if state is None or state.transaction_state != OPEN:
            return None
        return OpenTransaction(
            pooled_id,
            int(state.producer_id),
            int(state.producer_epoch),
            max(0, int(state.transaction_start_time_ms)),
            int(state.transaction_timeout_ms),
            tuple(sorted(f"{topic.topic}-{part}" for topic in state.topics or []
                         for part in topic.partitions)),
        )  # fmt: skip

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
        if warning not in self._told:
            self._told.add(warning)
            logger.warning("%s", warning)


def list_open_ids(client: Client, states: Collection[str] = (OPEN,)) -> set[str]:
    """The ids of all open transactions of a cluster that this user may describe.

    Args:
        client: of the cluster.
        states: in which they are looked for.

    Raises:
        BrokerUnavailableError: not all brokers that the cluster names have answered.
        TallystickError: the brokers refuse it.
    """
    attempts = Attempts(client.deadline(), "ListTransactions", "all brokers")
    while True:
        nodes = [int(broker.node_id) for broker in client.metadata().brokers]
        found: set[str] = set()
        try:
            for node in nodes:
                found |= _list_of(client, node, states, attempts.deadline)
        except BrokerUnavailableError as error:  # it may be gone, and its ids another's by now
            attempts.pause(str(error))
        else:
            return found


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
    return {str(each.transactional_id) for each in response.transaction_states}
