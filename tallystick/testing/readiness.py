"""When a cluster is ready: as each of its nodes tells it, over Kafka's protocol."""

import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tallystick.errors import BrokerUnavailableError
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.testing.node import Node

ASK_TIMEOUT_S = 2.0
"""So soon it is looked whether the node's process still lives."""
POLL_S = 0.05

Holds = Callable[[Any], bool]
"""Whether a Metadata response says what is waited for."""


@contextmanager
def connected(options: Mapping[str, str]) -> Iterator[Client]:
    """A client for the length of a `with`."""
    client = Client(KafkaConfig.from_options(options))
    try:
        yield client
    finally:
        client.close()


def wait_for(
    node: Node,
    process: subprocess.Popen[bytes],
    options: Mapping[str, str],
    deadline: float,
    topics: Iterable[str] | None,
    holds: Holds,
) -> None:
    """Ask one node for Metadata until `holds` of it.

    Args:
        node: Whom.
        process: Of that node; it is not waited for any longer once this has ended.
        options: How to reach the cluster; the address is replaced by the node's own.
        deadline: `time.monotonic` when to give up.
        topics: What to ask for; None is all topics.
        holds: Whether an answer says what is waited for.

    Raises:
        BrokerUnavailableError: The process ended, or the deadline has come.
    """
    why = "it told something else than was waited for"
    alone = {**options, "bootstrap.servers": node.address}
    while process.poll() is None:
        if time.monotonic() >= deadline:
            raise _failed(node, f"was not ready in time ({why})")
        try:
            # A new client each time: one that knows the other nodes might ask those.
            with connected(alone) as client:
                ask_until = min(deadline, time.monotonic() + ASK_TIMEOUT_S)
                if holds(client.metadata(topics, deadline=ask_until)):
                    return
        except BrokerUnavailableError as error:
            why = str(error)
        time.sleep(POLL_S)
    raise _failed(node, f"ended with code {process.returncode}")


def names_all(wanted: set[int], metadata: Any) -> bool:
    """Whether all these brokers are there."""
    return wanted <= {broker.node_id for broker in metadata.brokers}


def is_in_sync(alive: set[int], metadata: Any) -> bool:
    """Whether every partition has a leader alive, and all its replicas that are alive in sync."""
    return all(
        topic.error_code == 0
        and all(
            part.leader_id in alive and alive.intersection(part.replica_nodes) <= {*part.isr_nodes}
            for part in topic.partitions
        )
        for topic in metadata.topics
    )


def _failed(node: Node, what: str) -> BrokerUnavailableError:
    return BrokerUnavailableError(
        f"node {node.node_id} of the embedded Kafka ({node.address}) {what}. "
        f"The end of {node.log_path}:\n{node.log_tail()}"
    )
