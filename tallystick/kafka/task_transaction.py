"""The writing of one attempt of a task: into a transaction of its own, or into none.

Invariants:
    * A transaction begins with InitProducerId: a producer epoch has one transaction, whatever the
      cluster's transaction.version, and what an earlier user of the id left open is aborted.
    * The token is staged inside the transaction, after all rows were acknowledged.
    * A task never ends a transaction that it has prepared: that is the driver's, see `outcome`.
    * An idempotent producer without a transactional id has one writer per epoch. Brokers remember
      an id for a day in each partition that it wrote to (producer.id.expiration.ms), so an id per
      task and epoch would fill their memory: a process keeps its ids. Such a producer may raise its
      own epoch, and begins at sequence 0 in it; what is still under way of an older epoch is
      refused by then (KIP-360).
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

import pyarrow as pa

from tallystick.codec.output_records import OutputRecords, letters_of, plain, told_of
from tallystick.codec.records.encoder import EncodedBatch, stamp
from tallystick.codec.rows import RowLayout
from tallystick.epoch.transactional_ids import slot_of, token_group, transactional_id
from tallystick.epoch.two_phase import Committable, Guarantee, Place
from tallystick.errors import BrokenInvariantError, TallystickError
from tallystick.host.forks import check_parent
from tallystick.host.stopwatch import WRITTEN_BYTES, count, now_ms
from tallystick.host.worker_cache import WorkerCache
from tallystick.kafka import protocol
from tallystick.kafka.broker import KafkaBroker, init_producer_request
from tallystick.kafka.client import AnyBroker, Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.error_policy import Attempts, describe
from tallystick.kafka.outcome import TaskTransaction, end_transaction
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.writer import PartitionWriter
from tallystick.text import shortened
from tallystick.values import ProducedRange, Producer, TopicPartition

logger = logging.getLogger(__name__)

GROUP_BYTES = 8 << 20
GROUP_BATCHES = 64
"""Enough to be worth a round trip, and small enough to hold."""
ABORT_TIMEOUT_MS = 2_000
"""The time a failed attempt has to abort its transaction at once; else it is found later."""
EPOCH_MAX = 32_766
"""Kafka's own bound: the number is a short one, and its last value is never given out."""
NOBODY = Producer("", -1, -1)
"""The producer of writes without an id: Kafka checks no sequence."""

Frames = list[tuple[TopicPartition, EncodedBatch]]

_idle: WorkerCache[tuple[KafkaConfig, int], KafkaBroker] = WorkerCache(KafkaBroker.close)
_idle_producers: WorkerCache[tuple[KafkaConfig, str], Producer] = WorkerCache()
"""Idempotent producers by cluster; a fork must not write with a producer of its parent."""


def _take(output: KafkaOutput) -> KafkaBroker:
    """Return an idle connection of the process, or a new connection.

    Never the reader's connection: our answers would have to wait for its large ones.
    """
    key = (output.config, output.transaction_timeout_ms)
    return _idle.take(key) or KafkaBroker(*key)


def _give_back(broker: KafkaBroker, output: KafkaOutput) -> None:
    _idle.give_back((output.config, output.transaction_timeout_ms), broker)


def close_idle(config: KafkaConfig) -> None:
    """Close the connections that the process keeps to a cluster for the next task."""
    _idle.close(lambda key: key[0] == config)


@dataclass(frozen=True)
class TaskPlan:
    """The settings with which the tasks of an epoch write.

    Args:
        output: what the user chose.
        cluster_id: the cluster's id when the epoch began.
        id_prefix: of the transactional ids.
        rows: how rows become records, with the partitions that topics have now.
        dead_letters: the same for malformed records; None: there may be none.
        token_topic_id: the id of the token topic now.
    """

    output: KafkaOutput
    cluster_id: str
    id_prefix: str
    rows: RowLayout
    dead_letters: RowLayout | None
    token_topic_id: str

    def begin(self, place: Place) -> "TaskWriter":
        """See `TransactionPlan.begin`.

        Raises:
            OptionError: the task has used up its transactional ids.
            AuthorizationError: WRITE on the transactional id is missing.
            BrokerUnavailableError: the deadline passed.
        """
        match self.output.guarantee:
            case Guarantee.EXACTLY_ONCE:
                return InTransaction(self, place)
            case Guarantee.AT_LEAST_ONCE | Guarantee.NONE:
                return AtOnce(self, place)
            case _:
                assert_never(self.output.guarantee)


class _Encoder:
    """Rows to record batches, handed on in groups."""

    def __init__(self, plan: TaskPlan, place: Place) -> None:
        self._plan = plan
        self._spread = place.task
        self._frames: Frames = []
        self._size = 0
        self.record_count = 0

    def add(
        self,
        layout: RowLayout,
        rows: pa.RecordBatch,
        send: Callable[[Frames], None],
        *,
        takes_letters: bool = True,
    ) -> None:
        """Encode rows, and send each group of batches that is full.

        Args:
            layout: makes records of them.
            rows: what is to be written.
            send: takes a group.
            takes_letters: whether a record too large becomes a dead letter, where there may be one.
        """
        output, dead_letters = self._plan.output, self._plan.dead_letters
        letters: list[pa.RecordBatch] | None = [] if dead_letters and takes_letters else None
        records = OutputRecords(layout, output.compression, output.batch_bytes, letters)
        for partition, encoded in records.encode(rows, spread=self._spread, now_ms=now_ms()):
            self._frames.append((partition, encoded))
            self._size += len(encoded.data)
            count(WRITTEN_BYTES, len(encoded.data))
            self.record_count += encoded.record_count
            if self._size >= GROUP_BYTES or len(self._frames) >= GROUP_BATCHES:
                self.flush(send)
        self._spread += 1
        if letters and dead_letters is not None:
            whole = letters_of(letters)
            logger.warning("%s", told_of(whole))
            is_cut = layout is dead_letters  # a cut letter that is too large is an error
            self.add(dead_letters, whole, send, takes_letters=not is_cut)

    def flush(self, send: Callable[[Frames], None]) -> None:
        """Send what is left, unless the executor may be gone: a late task fences its successor."""
        check_parent()
        frames, self._frames, self._size = self._frames, [], 0
        if frames:
            send(frames)


class InTransaction:
    """Exactly once: rows in a transaction, which `prepare` leaves open.

    Args:
        plan: of the epoch.
        place: which attempt of which task.
    """

    def __init__(self, plan: TaskPlan, place: Place) -> None:
        self._plan, self._place = plan, place
        slot = slot_of(place.attempt, place.task)
        name = transactional_id(plan.id_prefix, place.owner.sink, place.task, slot)
        self._encoder = _Encoder(plan, place)
        check_parent()
        self._begun_ms = now_ms()
        self._broker: KafkaBroker | None = _take(plan.output)
        try:
            self._producer = self._broker.fence(name, None)
        except BaseException:
            self._broker.close()
            raise
        self._version = self._broker.transaction_version
        self._writer = PartitionWriter(
            self._broker.client, self._producer, transaction_version=self._version
        )

    def write(self, rows: pa.RecordBatch) -> None:
        """See `Transaction.write`."""
        self._encoder.add(self._plan.rows, rows, self._writer.write)

    def write_dead_letters(self, records: pa.RecordBatch) -> None:
        """Write malformed records to the dead-letter topic, in the same transaction."""
        self._encoder.add(_dead_letters_of(self._plan), records, self._writer.write)

    def prepare(self) -> Sequence[Committable]:
        """See `Transaction.prepare`."""
        broker = self._broker
        if broker is None:
            raise BrokenInvariantError(f"{self._producer} was prepared or aborted before")
        self._encoder.flush(self._writer.write)
        transaction = self._transaction(self._writer.close())
        place, plan = self._place, self._plan
        token = (place.checkpoint_id + 1, transaction.token_metadata(place.task))
        token_partition = TopicPartition(plan.output.token_topic, 0)
        broker.stage_offsets(self._producer, transaction.token_group, {token_partition: token})
        self._broker = None
        _give_back(broker, plan.output)
        committable = Committable(
            sink=place.owner.sink,
            checkpoint_id=place.checkpoint_id,
            task=place.task,
            name=transaction.name,
            record_count=self._encoder.record_count,
            begun_ms=self._begun_ms,
            details=transaction.to_json(),
        )
        return [committable]

    def abort(self) -> None:
        """See `Transaction.abort`; what was prepared is the driver's, and stays."""
        broker, self._broker = self._broker, None
        if broker is None:
            return
        try:
            deadline = broker.client.deadline(ABORT_TIMEOUT_MS)
            given_up = self._transaction(())
            end_transaction(broker.client, given_up, committed=False, deadline=deadline)
        except (OSError, TallystickError):
            pass  # it is found by its id, or times out
        finally:
            broker.close()

    def _transaction(self, produced: tuple[ProducedRange, ...]) -> TaskTransaction:
        return TaskTransaction(
            transactional_id=self._producer.transactional_id,
            producer_id=self._producer.producer_id,
            producer_epoch=self._producer.producer_epoch,
            transaction_version=self._version,
            cluster_id=self._plan.cluster_id,
            lineage=self._place.owner.lineage,
            nonce=self._place.nonce,
            token_group=token_group(self._producer.transactional_id),
            token_topic=self._plan.output.token_topic,
            token_topic_id=self._plan.token_topic_id,
            produced=produced,
        )


class AtOnce:
    """Writing without a transaction: rows are visible at once, `prepare` leaves nothing open.

    With `at_least_once` Kafka has acknowledged all rows (acks=all) when `prepare` returns; a
    producer id keeps them in order and single through lost answers. A later failure, in this task
    or in another one, makes the epoch run again: its rows are there twice, or once and a different
    once, until the epoch succeeds.

    With `none` nothing is acknowledged (acks=0). Rows are lost, and nothing reports it: those under
    way to a broker that went down, or was no longer the leader; all those of a batch that Kafka
    refuses (too large, no right to write); and those in the socket of a worker that is killed. An
    epoch that fails runs again, so rows may be there twice as well.
    """

    def __init__(self, plan: TaskPlan, place: Place) -> None:
        self._plan = plan
        self._encoder = _Encoder(plan, place)
        self._producer: Producer | None = None
        self._broker: KafkaBroker | None = _take(plan.output)
        try:
            self._send = self._sender(self._broker.client)
        except BaseException:
            self._broker.close()
            raise

    def write(self, rows: pa.RecordBatch) -> None:
        """See `Transaction.write`."""
        self._encoder.add(self._plan.rows, rows, self._send)

    def write_dead_letters(self, records: pa.RecordBatch) -> None:
        """Write malformed records to the dead-letter topic."""
        self._encoder.add(_dead_letters_of(self._plan), records, self._send)

    def prepare(self) -> Sequence[Committable]:
        """Send all; there is nothing to commit."""
        self._encoder.flush(self._send)
        broker, self._broker = self._broker, None
        assert broker is not None, "prepared or aborted before"
        _give_back(broker, self._plan.output)
        self._give_producer_back()
        return []

    def abort(self) -> None:
        """See `Transaction.abort`; what was written stays."""
        broker, self._broker = self._broker, None
        if broker is not None:
            broker.close()
            self._give_producer_back()

    def _give_producer_back(self) -> None:
        if self._producer is not None:
            give_producer_back(self._producer, self._plan.output.config, self._plan.cluster_id)
            self._producer = None

    def _sender(self, client: Client) -> Callable[[Frames], None]:
        if self._plan.output.guarantee is Guarantee.NONE:
            acks0 = Acks0Writer(client)
            return lambda frames: acks0.write(_plain(frames))
        plan = self._plan
        self._producer = take_producer(client, plan.output.config, plan.cluster_id)
        writer = PartitionWriter(client, self._producer, transaction_version=0)
        return lambda frames: writer.write(_plain(frames))


TaskWriter = InTransaction | AtOnce
"""The result of `TaskPlan.begin`: a `Transaction` that takes malformed records too."""


def _dead_letters_of(plan: TaskPlan) -> RowLayout:
    assert plan.dead_letters is not None, "dead letters, and no topic for them"
    return plan.dead_letters


def _plain(frames: Frames) -> Frames:
    """Return the batches without the mark of a transaction."""
    return [(partition, plain(encoded)) for partition, encoded in frames]


def take_producer(client: Client, config: KafkaConfig, cluster_id: str) -> Producer:
    """Return an idempotent producer for one writer, with an epoch that was never used before.

    Raises:
        AuthorizationError: the right to write idempotently is missing.
        BrokerUnavailableError: the deadline passed.
    """
    last = _idle_producers.take((config, cluster_id))
    if last is not None:
        return Producer("", last.producer_id, last.producer_epoch + 1)
    answer = client.call(
        partial(init_producer_request, None, 0x7FFFFFFF),
        AnyBroker(),
        lambda response: [(response.error_code, "an idempotent producer")],
    )
    return Producer("", int(answer.producer_id), int(answer.producer_epoch))


def give_producer_back(producer: Producer, config: KafkaConfig, cluster_id: str) -> None:
    """Keep a producer for the next writer, unless it has used up its epochs."""
    if producer.producer_epoch < EPOCH_MAX:
        _idle_producers.give_back((config, cluster_id), producer)


class Acks0Writer:
    """Hands batches to the sockets of their leaders, and waits for nothing: acks=0.

    Kafka answers such a request with nothing, not even when it refuses it; then it disconnects.

    Args:
        client: of the cluster; not to be shared meanwhile.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def write(self, frames: Frames) -> None:
        """Send batches that are part of no transaction, in order per partition.

        Raises:
            BrokerUnavailableError: no leader could be reached within delivery.timeout.ms.
        """
        unsent = deque((partition, stamp(encoded.data, NOBODY, 0)) for partition, encoded in frames)
        partitions = {partition for partition, _ in frames}
        attempts = Attempts(self._client.deadline(), "Produce", shortened(sorted(partitions)))
        while unsent:
            partition, data = unsent[0]
            led = self._client.by_leader([partition], attempts.deadline)
            obstacle = self._client.leader_obstacle(partition)
            for node in led:
                try:
                    until = self._client.try_until(attempts.deadline)
                    self._client.network.post(
                        node, _acks0_request(partition, data, self._client), until
                    )
                except OSError as error:
                    self._client.forget_leaders([partition])
                    obstacle = describe(error)
                else:
                    unsent.popleft()
                    obstacle = ""
            if obstacle:
                attempts.pause(obstacle)


def _acks0_request(partition: TopicPartition, data: bytes, client: Client) -> Any:
    topic_class = protocol.ProduceRequest.TopicProduceData
    part = topic_class.PartitionProduceData(index=partition.partition, records=data)
    topic_id = client.topic_ids.get(partition.topic)
    topic = topic_class(name=partition.topic, topic_id=topic_id, partition_data=[part])
    return protocol.ProduceRequest(
        transactional_id=None,
        acks=0,
        timeout_ms=client.config.request_timeout_ms,
        topic_data=[topic],
    )
