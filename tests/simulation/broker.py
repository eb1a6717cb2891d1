"""The Broker port of one driver, over a cluster that it shares with others, and that breaks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from tallystick.errors import BrokerUnavailableError
from tallystick.values import ProducedRange, Producer, TopicPartition
from tests.simulation.kafka_cluster import EPOCH_BY_END_TXN, KafkaCluster, Offsets
from tests.simulation.scheduler import Process
from tests.simulation.wire import Call

Result = TypeVar("Result")


class Wire(Protocol):
    """What a request goes through; see `World.send`."""

    def send(self, process: Process, call: Call[Result]) -> Result:
        """Make the call take effect: at once, later, or not at all."""
        ...

    def asks_to_take_over(self, process: Process) -> None:
        """Note that a process that owned the transactional id asks for it without saying so."""
        ...

    def took_over(self, process: Process) -> None:
        """Note that this process owns the transactional id from now on."""
        ...


class SimulatedBroker:
    """One driver's connection to a cluster."""

    def __init__(self, wire: Wire, process: Process, cluster: KafkaCluster) -> None:
        self._wire = wire
        self._process = process
        self._cluster = cluster
        self._was_owner = False

    def fence(self, transactional_id: str, current: Producer | None) -> Producer:
        """See `ports.Broker.fence`."""

        def effect() -> Producer:
            producer = self._cluster.fence(transactional_id, current)
            if current is None:
                self._wire.took_over(self._process)
            return producer

        if current is None and self._was_owner:
            self._wire.asks_to_take_over(self._process)
        producer = self._send("fence" if current else "take over", effect)
        self._was_owner = True
        return producer

    def newest_producer(self, transactional_id: str) -> Producer | None:
        """See `ports.Broker.newest_producer`."""
        return self._send("newest_producer", lambda: self._cluster.current)

    def group_offsets(
        self, group: str, place: TopicPartition | None = None
    ) -> Mapping[TopicPartition, tuple[int, str]]:
        """See `ports.Broker.group_offsets`."""
        return self._send("group_offsets", lambda: self._cluster.group_offsets(group))

    def stage_offsets(
        self, producer: Producer, group: str, offsets: Offsets, *, best_effort: bool = False
    ) -> None:
        """See `ports.Broker.stage_offsets`."""
        self._send("stage_offsets", lambda: self._cluster.stage(producer, group, offsets))

    def commit_offsets(self, group: str, offsets: Offsets) -> None:
        """Outside any transaction: no driver does it, but broken ones of the tests do."""
        committed = {(group, partition): what for partition, what in offsets.items()}
        self._send("commit_offsets", lambda: self._cluster.offsets.update(committed))

    def last_sequences(
        self, producer: Producer, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int] | None:
        """See `ports.Broker.last_sequences`."""
        wanted = list(partitions)
        return self._send("last_sequences", lambda: self._cluster.last_sequences(producer, wanted))

    def commit_transaction(self, producer: Producer) -> Producer:
        """See `ports.Broker.commit_transaction`: one request, or two on an old cluster."""

        def effect() -> Producer:
            self._cluster.commit(producer)
            return self._cluster.current

        following = self._send("commit_transaction", effect)
        if self._cluster.transaction_version >= EPOCH_BY_END_TXN:
            return following
        return self.fence(producer.transactional_id, producer)

    def abort_transaction(self, producer: Producer) -> None:
        """See `ports.Broker.abort_transaction`."""
        self._send("abort_transaction", lambda: self._cluster.abort(producer))

    def foreign_rows(
        self, producer: Producer, produced: Iterable[ProducedRange]
    ) -> Mapping[TopicPartition, int]:
        """See `ports.Broker.foreign_rows`."""
        ranges = list(produced)
        return self._send("foreign_rows", lambda: self._cluster.foreign_rows(producer, ranges))

    def _send(self, name: str, effect: Callable[[], Result]) -> Result:
        return self._wire.send(self._process, Call(name, effect, BrokerUnavailableError))
