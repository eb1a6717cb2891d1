"""Between a client and its brokers: lose what is sent or answered, or stop just there."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import pyarrow as pa

from tallystick.codec.records.encoder import encode, stamp
from tallystick.errors import TallystickError
from tallystick.kafka import protocol
from tallystick.kafka.broker import EPOCH_BY_END_TXN
from tallystick.kafka.client import AnyBroker, Client
from tallystick.kafka.connection import PendingRequest
from tallystick.kafka.writer import VERSION_WITHOUT_ADD
from tallystick.values import Producer, TopicPartition
from tests.failover.known_rows import TIMESTAMP_MS, ZOMBIE

Loss = Literal["request", "answer"]


class Wire:
    """Stands on a client's connections; what it does to a request it does once, unless told."""

    def __init__(self, client: Client) -> None:
        self.lost: Counter[tuple[str, Loss]] = Counter()
        """How many messages of each kind were lost so far."""
        self._network = client.network
        self._post, self._wait = client.network.post, client.network.wait
        self._armed: dict[tuple[str, Loss], int] = {}
        self._before: dict[str, Callable[[], None]] = {}
        self._after: dict[str, Callable[[], None]] = {}
        self._names: dict[int, str] = {}
        client.network.post = self.post  # type: ignore[method-assign]
        client.network.wait = self.wait  # type: ignore[method-assign]

    def lose(self, api: str, loss: Loss, times: int = 1) -> None:
        """Cut the connection: instead of sending, or of reading an answer that has come."""
        self._armed[api, loss] = times

    def before(self, api: str, act: Callable[[], None]) -> None:
        """Do something right before the next request of this API is sent."""
        self._before[api] = act

    def after(self, api: str, act: Callable[[], None]) -> None:
        """Do something right after the next request of this API was sent."""
        self._after[api] = act

    def post(self, node: int, request: Any, deadline: float) -> PendingRequest:
        name = protocol.api_name(request)
        self._before.pop(name, _nothing)()
        if self._is_lost(name, "request"):
            self._network.drop(node)
            raise ConnectionResetError(f"{name} was lost on its way to {node}, by a test")
        posted = self._post(node, request, deadline)
        self._names[id(posted)] = name
        self._after.pop(name, _nothing)()
        return posted

    def wait(self, posted: PendingRequest, deadline: float) -> Any:
        answer = self._wait(posted, deadline)
        name = self._names.pop(id(posted), "")
        if self._is_lost(name, "answer"):
            self._network.drop(posted.node)
            raise ConnectionResetError(f"the answer to {name} was lost, by a test")
        return answer

    def _is_lost(self, name: str, loss: Loss) -> bool:
        remaining = self._armed.get((name, loss), 0)
        if remaining <= 0:
            return False
        self._armed[name, loss] = remaining - 1
        self.lost[name, loss] += 1
        return True


def _nothing() -> None:
    return


def write_as_zombie(
    client: Client,
    producer: Producer,
    partition: TopicPartition,
    sequence: int,
    timeout_ms: int,
    transaction_version: int = EPOCH_BY_END_TXN,
) -> str:
    """Write one row with an old producer, as a task would that nobody can stop.

    Returns:
        "accepted", or Kafka's name of the error, or the obstacle that it gave up at.
    """
    (batch,) = encode(_zombie_rows(), now_ms=TIMESTAMP_MS)
    data = stamp(batch.data, producer, sequence)
    topic_class = protocol.ProduceRequest.TopicProduceData

    is_new = transaction_version >= EPOCH_BY_END_TXN
    speaks = (
        {"min_version": VERSION_WITHOUT_ADD} if is_new else {"max_version": VERSION_WITHOUT_ADD - 1}
    )

    def make(partitions: list[TopicPartition]) -> Any:
        part = topic_class.PartitionProduceData(index=partition.partition, records=data)
        topic_id = client.topic_ids.get(partition.topic)
        topic = topic_class(name=partition.topic, topic_id=topic_id, partition_data=[part])
        return protocol.ProduceRequest(
            transactional_id=producer.transactional_id,
            acks=-1,
            timeout_ms=timeout_ms,
            topic_data=[topic],
            **speaks,
        )

    deadline = client.deadline(timeout_ms)
    try:
        for node in client.by_leader([partition], deadline):
            response = client.network.ask(node, make([partition]), deadline)
            code = response.responses[0].partition_responses[0].error_code
            if code:
                client.forget_leaders([partition])
            return protocol.error_name(code) or "accepted"
    except (OSError, TallystickError) as error:
        client.forget_leaders([partition])
        return type(error).__name__
    return "no leader"


def _zombie_rows() -> Any:
    return pa.record_batch({"value": pa.array([ZOMBIE])})


def coordinator_of(client: Client, kind: Literal["group", "transaction"], key: str) -> int:
    """The node that is coordinator right now."""
    kinds = {"group": 0, "transaction": 1}

    def make() -> Any:
        return protocol.FindCoordinatorRequest(key_type=kinds[kind], coordinator_keys=[key])

    response = client.call(
        make, AnyBroker(), lambda r: [(r.coordinators[0].error_code, f"{kind} {key}")]
    )
    return int(response.coordinators[0].node_id)
