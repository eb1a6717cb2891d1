"""The brokers of a chaos run behind proxies, its input, and an independent view of its output.

Input is written and output is read with confluent-kafka, over a listener of the brokers' own that
no fault of the network touches.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

from tallystick.errors import BrokerUnavailableError
from tallystick.kafka import protocol
from tallystick.kafka.audit import describe_producers
from tallystick.kafka.client import Client, Node
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.group_offsets import fetch
from tallystick.testing import node
from tallystick.testing.kafka import EmbeddedKafka
from tallystick.testing.process import free_ports
from tallystick.values import TopicPartition as OwnTopicPartition
from tallystick_tools.chaos.proxy import HOST, Proxies
from tallystick_tools.reading import BATCH, POLL_S, read_to_end

ANSWER_S = 5.0
"""The longest time to wait for an answer; in a fault there is none."""
READ_IDLE_S = 30.0
ALONE_TIMEOUT_MS = "15000"
"""A broker that is paused does not count as dead where no other can take its place: what it has
committed would lack markers (KAFKA-20734). One that was killed is let back only after that time:
until then the controller takes the dead one to be alive."""
AHEAD_MAX_MS = str(2 * 86_400_000)
"""The brokers take rows of a program whose clock is a day ahead, the furthest of `clock.JUMPS_S`.
By default they refuse rows an hour ahead: the program would end, again and again, and write nothing
by that clock."""
NO_OFFSET = -1
"""The offset of a row that is in no topic."""


@dataclass(frozen=True, slots=True)
class InputRecord:
    """A record of the input, as it is written in every run: same partition, same timestamp."""

    partition: int
    key: bytes | None
    value: bytes
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """A committed record of the output, or a row of a file."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None

    @property
    def place(self) -> tuple[str, int, int]:
        """Topic, partition and offset."""
        return self.topic, self.partition, self.offset


@dataclass
class Cluster:
    """A running cluster with its proxies and topics.

    Args:
        kafka: The brokers, where they are ours; None: a given cluster.
        proxies: In front of the brokers; the program is given their addresses.
        direct: The addresses of the brokers without a proxy.
        inputs: Topics of the input.
        outputs: Topics of the output.
        partitions: Of each topic.
    """

    kafka: EmbeddedKafka | None
    proxies: Proxies
    direct: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    partitions: int
    silence: str = field(init=False, default="")
    """The reason why the last question was not answered; "": it was."""
    _admin: AdminClient = field(init=False)
    _client: Client = field(init=False)
    """For offsets of groups: librdkafka's AdminClient dies of a coordinator that has moved
    (librdkafka #5040)."""

    def __post_init__(self) -> None:
        quiet = {"log_level": 0, "socket.timeout.ms": int(ANSWER_S * 1000)}
        self._admin = AdminClient({"bootstrap.servers": self.direct, **quiet})
        self._client = Client(KafkaConfig(self.direct))

    def ends(self, topics: Sequence[str], *, committed: bool) -> dict[tuple[str, int], int] | None:
        """Return the end offsets of topics; None: the brokers do not answer.

        Args:
            topics: The topics.
            committed: Only up to the first open transaction; else the end of the log.
        """
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        specs = {
            TopicPartition(topic, number): OffsetSpec.latest()
            for topic in topics
            for number in range(self.partitions)
        }
        try:
            answers = self._admin.list_offsets(
                specs, isolation_level=level, request_timeout=ANSWER_S
            )
            offsets = {
                (spec.topic, spec.partition): answer.result(ANSWER_S).offset
                for spec, answer in answers.items()
            }
        except (KafkaException, TimeoutError) as error:
            self.silence = f"the ends of {', '.join(topics)}: {error}"
            return None
        self.silence = ""
        return offsets

    def positions(self) -> dict[tuple[str, int], int] | None:
        """Return the offsets of the input that consumer groups have committed; None: no answer."""
        committed: dict[tuple[str, int], int] = {}
        deadline = self._client.deadline(int(ANSWER_S * 1000))
        try:
            for group in self._groups(deadline):
                offsets = fetch(self._client, group, None, stable=False, deadline=deadline)
                for entry, (offset, _) in offsets.items():
                    if entry.topic in self.inputs:
                        where = entry.topic, entry.partition
                        committed[where] = max(offset, committed.get(where, 0))
        except BrokerUnavailableError as error:
            self.silence = f"offsets of consumer groups: {error}"
            return None
        self.silence = ""
        return committed

    def _groups(self, deadline: float) -> list[str]:
        groups = []
        for broker in self._client.metadata((), deadline=deadline).brokers:
            answer = self._client.call(
                protocol.ListGroupsRequest,
                Node(broker.node_id),
                lambda response: [(response.error_code, "consumer groups")],
                deadline=deadline,
            )
            groups += [group.group_id for group in answer.groups]
        return groups

    def waited_for(self) -> str:
        """Return the transactions that readers wait for, as text; "": none, or no answer."""
        stable, written = (
            self.ends(self.outputs, committed=is_stable) for is_stable in (True, False)
        )
        if stable is None or written is None:
            return ""
        behind = [
            OwnTopicPartition(*where) for where, end in stable.items() if end < written[where]
        ]
        deadline = self._client.deadline(int(ANSWER_S * 1000))
        try:
            answers = self._client.ask_leaders(
                behind, describe_producers, protocol.partitions_of, deadline=deadline
            )
        except BrokerUnavailableError as error:
            return f"the brokers do not say whose transactions are open: {error}"
        return "; ".join(
            f"readers of {where} wait at offset {producer.current_txn_start_offset} for a "
            f"transaction of producer {producer.producer_id}, epoch {producer.producer_epoch}"
            for where, answer in answers.items()
            for producer in answer.active_producers
            if producer.current_txn_start_offset >= 0
        )

    def close(self) -> None:
        """Close the connections of the cluster object itself."""
        self._client.close()


def listeners_behind(broker: node.Node, advertised: int, own: int) -> dict[str, str]:
    """Return the settings of a broker that advertises another port than its own.

    Args:
        broker: The number of the broker.
        advertised: The port advertised to clients.
        own: The port of a second listener, for the other brokers and for witnesses.
    """
    names = ("PLAINTEXT", "DIRECT", "CONTROLLER")
    return {
        "listeners": f"PLAINTEXT://{broker.address},DIRECT://{HOST}:{own},"
        f"CONTROLLER://{HOST}:{broker.controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{advertised},DIRECT://{HOST}:{own}",
        "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in names),
        "inter.broker.listener.name": "DIRECT",
    }


@contextmanager
def running(
    brokers: int,
    inputs: Sequence[str],
    outputs: Sequence[str],
    partitions: int,
    transaction_version: int | None = None,
) -> Iterator[Cluster]:
    """Yield a new cluster with these topics, behind proxies.

    Args:
        brokers: One or three.
        inputs: Topics of the input.
        outputs: Topics of the output.
        partitions: Of each topic.
        transaction_version: See `EmbeddedKafka`.
    """
    ports = free_ports(2 * brokers, HOST)
    proxied, direct = ports[:brokers], ports[brokers:]
    # They listen before the brokers start, which takes so long that a port may be gone.
    proxies = Proxies(proxied, [(HOST, 0)] * brokers)

    def listeners(broker: node.Node) -> Mapping[str, str]:
        index = broker.node_id - 1
        proxies.lead_to(index, (HOST, broker.port))
        alone = {} if brokers > 1 else {"broker.session.timeout.ms": ALONE_TIMEOUT_MS}
        addresses = listeners_behind(broker, proxied[index], direct[index])
        return {**addresses, **alone, "log.message.timestamp.after.max.ms": AHEAD_MAX_MS}

    kafka = EmbeddedKafka(brokers, transaction_version=transaction_version, properties=listeners)
    with contextlib.closing(proxies), kafka:
        for topic in dict.fromkeys((*inputs, *outputs)):
            kafka.create_topic(topic, partitions)
        servers = ",".join(f"{HOST}:{port}" for port in direct)
        cluster = Cluster(kafka, proxies, servers, tuple(inputs), tuple(outputs), partitions)
        with contextlib.closing(cluster):
            yield cluster


class Feed:
    """A writer of the input, part by part, each over some seconds, in a thread of its own.

    Args:
        cluster: The cluster with the input topics.
        records: By topic, in order.
        parts: The number of parts.
        seconds: The time over which a part is written.
    """

    def __init__(
        self,
        cluster: Cluster,
        records: Mapping[str, Sequence[InputRecord]],
        parts: int,
        seconds: float,
    ) -> None:
        self.error: BaseException | None = None
        self._producer = Producer(
            {
                "bootstrap.servers": cluster.direct,
                "enable.idempotence": True,
                "linger.ms": 5,
                "message.timeout.ms": 300_000,
                "log_level": 0,
            }
        )
        self._parts = [
            [
                (topic, record)
                for topic, all_of_it in records.items()
                for record in all_of_it[
                    len(all_of_it) * part // parts : len(all_of_it) * (part + 1) // parts
                ]
            ]
            for part in range(parts)
        ]
        self._seconds = seconds
        self._thread: threading.Thread | None = None

    def begin(self, part: int) -> None:
        """Begin to write a part, after the part before."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(part,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the part is written and acknowledged.

        Raises:
            RuntimeError: Kafka did not take a record.
        """
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise RuntimeError(f"the input could not be written: {self.error}") from self.error

    def _write(self, part: int) -> None:
        began = time.monotonic()
        records = self._parts[part]
        try:
            for index, (topic, record) in enumerate(records):
                if index % 100 == 0:
                    self._producer.poll(0)
                    ahead = began + self._seconds * index / len(records) - time.monotonic()
                    time.sleep(max(0.0, ahead))
                while True:
                    try:
                        self._producer.produce(
                            topic,
                            record.value,
                            record.key,
                            record.partition,
                            on_delivery=self._on_delivery,
                            timestamp=record.timestamp_ms,
                        )
                        break
                    except BufferError:
                        self._producer.poll(POLL_S)
            self._producer.flush()
        except BaseException as error:
            self.error = error

    def _on_delivery(self, error: object, message: object) -> None:
        if error is not None:
            self.error = KafkaException(error)


class Witness:
    """A reader of the output, like a user's consumer, which keeps when each record was seen."""

    def __init__(self, cluster: Cluster) -> None:
        self.seen: dict[tuple[str, int, int], OutputRecord] = {}
        self.seen_at: dict[tuple[str, int, int], float] = {}
        self.problems: list[str] = []
        self._cluster = cluster
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        consumer = _consumer(self._cluster, "tallystick-chaos-witness")
        try:
            while not self._over.is_set():
                for message in consumer.consume(BATCH, timeout=POLL_S):
                    if message.error() is None:
                        self._note(record_of(message))
        finally:
            consumer.close()

    def _note(self, record: OutputRecord) -> None:
        before = self.seen.setdefault(record.place, record)
        self.seen_at.setdefault(record.place, time.monotonic())
        if before != record:
            self.problems.append(
                f"{record.topic}-{record.partition} at offset {record.offset}: a reader saw "
                f"{before.value!r}, and later {record.value!r}"
            )


def read_all(cluster: Cluster) -> list[OutputRecord]:
    """Return all committed records of the output, by partition in the order of the log.

    Raises:
        TimeoutError: The end was not reached; a transaction is open, or a broker is out.
    """
    consumer = _consumer(cluster, "tallystick-chaos-judge")
    try:
        records = map(record_of, read_to_end(consumer, READ_IDLE_S))
        return sorted(records, key=lambda record: record.place)
    finally:
        consumer.close()


def _consumer(cluster: Cluster, group: str) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.direct,
            "group.id": group,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "check.crcs": True,
            "log_level": 0,
        }
    )
    consumer.assign(
        [
            TopicPartition(topic, number, 0)
            for topic in cluster.outputs
            for number in range(cluster.partitions)
        ]
    )
    return consumer


def record_of(message: object) -> OutputRecord:
    """Return a message of librdkafka's as a record of output."""
    return OutputRecord(
        message.topic(),  # type: ignore[attr-defined]
        message.partition(),  # type: ignore[attr-defined]
        message.offset(),  # type: ignore[attr-defined]
        message.key(),  # type: ignore[attr-defined]
        message.value(),  # type: ignore[attr-defined]
    )
