"""The writer against a log that checks sequence numbers as Kafka does, and fails when told to."""

import struct
import time
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from fake_broker import CLOSE, CODES, FakeBroker, answer, part

from tallystick.codec.records.batch_header import batch_headers
from tallystick.codec.records.compression import CODEC_IDS
from tallystick.codec.records.decoder import HEADERS_TYPE, decode
from tallystick.codec.records.encoder import EncodedBatch, encode
from tallystick.errors import (
    AuthorizationError,
    BrokenInvariantError,
    BrokerUnavailableError,
    EpochAbortedError,
    RecordError,
    TallystickError,
)
from tallystick.kafka import error_policy, protocol, writer
from tallystick.kafka.client import Client
from tallystick.kafka.writer import IN_FLIGHT_MAX, PartitionWriter
from tallystick.values import ProducedRange, Producer, TopicLimit, TopicPartition

pytestmark = pytest.mark.timeout(60)
PRODUCER = Producer("tallystick-test", 7, 3)
ORDERS = TopicPartition("orders", 0)
OTHER = TopicPartition("orders", 1)


class Log:
    """What the leader of two partitions keeps; `faults` are given out, one per request."""

    def __init__(self) -> None:
        self.batches: dict[int, list[bytes]] = {0: [], 1: []}
        self.record_counts = {0: 0, 1: 0}
        self.faults: list[Any] = []
        self.tells_offsets = True
        self.limit = 1 << 20

    def produce(self, request: Any) -> Any:
        fault = self.faults.pop(0) if self.faults else None
        if fault is CLOSE:
            return CLOSE
        topic_class = part(request, "TopicProduceResponse")
        topics = [
            topic_class(
                name=topic.name,
                topic_id=topic.topic_id,
                partition_responses=[
                    self._append(partition_data, topic_class.PartitionProduceResponse, fault)
                    for partition_data in topic.partition_data
                ],
            )
            for topic in request.topic_data
        ]
        appended = answer(request, responses=topics)
        return CLOSE if fault == "appended, then closed" else appended

    def _append(self, sent: Any, response_class: Any, fault: str | None) -> Any:
        (header,) = batch_headers(bytes(sent.records))
        count = self.record_counts[sent.index]
        error_name, offset = None, count
        if fault is not None and fault in CODES:
            error_name = fault
        elif len(sent.records) > self.limit:
            error_name = "MessageSizeTooLarge"
        elif header.base_sequence < count:
            error_name = None if self.tells_offsets else "DuplicateSequenceNumber"
            offset = header.base_sequence
        elif header.base_sequence > count:
            error_name = "OutOfOrderSequenceNumber"
        else:
            self.batches[sent.index].append(bytes(sent.records))
            self.record_counts[sent.index] += header.record_count
        return response_class(
            index=sent.index,
            error_code=CODES[error_name],
            base_offset=-1 if error_name else offset,
            log_append_time_ms=-1,
            log_start_offset=0,
            record_errors=[],
            error_message=None,
        )

    def fetch(self, request: Any) -> Any:
        topic_class = part(request, "FetchableTopicResponse")
        topic, offset = request.topics[0], request.topics[0].partitions[0].fetch_offset
        index = topic.partitions[0].partition
        records = b"".join(
            struct.pack(">q", header.base_sequence) + batch[8:]
            for batch in self.batches[index]
            for header in batch_headers(batch)
            if header.base_sequence + header.record_count > offset
        )
        data = topic_class.PartitionData(
            partition_index=index,
            error_code=0,
            high_watermark=self.record_counts[index],
            last_stable_offset=self.record_counts[index],
            log_start_offset=0,
            aborted_transactions=[],
            preferred_read_replica=-1,
            records=records,
        )
        return answer(
            request, responses=[topic_class(topic=topic.topic, partitions=[data])], error_code=0
        )

    def describe(self, request: Any) -> Any:
        topic_class = part(request, "TopicResponse")
        part_class = topic_class.PartitionResponse
        return answer(
            request,
            topics=[
                topic_class(
                    name=topic.name,
                    partitions=[
                        part_class(
                            partition_index=index,
                            error_code=0,
                            active_producers=[
                                part_class.ProducerState(
                                    producer_id=7,
                                    producer_epoch=3,
                                    last_sequence=self.record_counts[index] - 1,
                                    last_timestamp=0,
                                    coordinator_epoch=0,
                                    current_txn_start_offset=0,
                                )
                            ],
                        )
                        for index in topic.partition_indexes
                    ],
                )
                for topic in request.topics
            ],
        )


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def broker(log: Log) -> Iterator[FakeBroker]:
    handlers = {"Produce": log.produce, "Fetch": log.fetch, "DescribeProducers": log.describe}
    handlers["DescribeConfigs"] = refuse_settings
    with FakeBroker(handlers) as fake:
        yield fake


def refuse_settings(request: Any) -> Any:
    result_class = part(request, "DescribeConfigsResult")
    return answer(
        request,
        results=[
            result_class(
                error_code=CODES["TopicAuthorizationFailed"],
                error_message=None,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
                configs=[],
            )
            for resource in request.resources
        ],
    )


def writer_for(broker: FakeBroker, version: int = 2, **options: str) -> PartitionWriter:
    return PartitionWriter(Client(broker.config(**options)), PRODUCER, transaction_version=version)


def frames(
    count: int, partition: TopicPartition = ORDERS
) -> list[tuple[TopicPartition, EncodedBatch]]:
    """As many batches, of 3 records each."""
    values = pa.array([b"value-%d" % index for index in range(3)], pa.binary())
    batch = pa.record_batch({"key": values, "value": values})
    return [(partition, encoded) for _ in range(count) for encoded in encode(batch, now_ms=1)]


def sequences(log: Log, index: int = 0) -> list[int]:
    return [header.base_sequence for data in log.batches[index] for header in batch_headers(data)]


def test_ranges_tell_what_was_written_to_each_partition(broker: FakeBroker, log: Log) -> None:
    writer = writer_for(broker)

    writer.write(frames(7) + frames(2, OTHER))
    writer.write(frames(1))

    assert writer.close() == (
        ProducedRange("orders", 0, 24, 0, 23),
        ProducedRange("orders", 1, 6, 0, 5),
    )
    assert sequences(log) == list(range(0, 24, 3))


def test_batches_carry_the_producer(broker: FakeBroker, log: Log) -> None:
    writer_for(broker).write(frames(1))

    (header,) = batch_headers(log.batches[0][0])
    assert (header.producer_id, header.producer_epoch, header.is_transactional) == (7, 3, True)


def test_nobody_writes_after_closing(broker: FakeBroker) -> None:
    writer = writer_for(broker)
    writer.close()

    with pytest.raises(BrokenInvariantError):
        writer.write(frames(1))


@pytest.mark.parametrize(
    "fault",
    [
        "NotEnoughReplicas",
        "ConcurrentTransactions",
        "NotLeaderForPartition",
        "KafkaStorage",
        CLOSE,
        "appended, then closed",
    ],
)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_after_a_failure_the_same_bytes_go_out_again_in_order(
    broker: FakeBroker, log: Log, fault: str, place: int
) -> None:
    """The batches after the failed one are out of order then: expected, and no reason to stop."""
    log.faults = [None] * place + [fault]
    writer = writer_for(broker)

    writer.write(frames(8))

    assert writer.close() == (ProducedRange("orders", 0, 24, 0, 23),)
    assert sequences(log) == list(range(0, 24, 3))
    by_sequence: dict[int, set[bytes]] = {}
    for request in broker.requests_of("Produce"):
        records = bytes(request.topic_data[0].partition_data[0].records)
        (header,) = batch_headers(records)
        by_sequence.setdefault(header.base_sequence, set()).add(records)
    assert all(len(different) == 1 for different in by_sequence.values())


def test_where_two_tasks_add_their_partitions_at_once_the_next_try_is_quick(
    broker: FakeBroker, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal of what is in the transaction already is an outage, and waited for as one."""
    pauses: list[float] = []
    # Of this module alone: threads that other tests have left behind sleep too.
    clock = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr(error_policy, "time", clock)
    writer = writer_for(broker)

    log.faults = ["NotEnoughReplicas"] * 2
    writer.write(frames(1))
    log.faults = ["NotEnoughReplicas"] * 2
    writer.write(frames(1))

    assert [0.0005 <= pauses[0] <= 0.001, 0.001 <= pauses[1] <= 0.002] == [True, True], pauses
    assert [0.01 <= pauses[2] <= 0.02, 0.02 <= pauses[3] <= 0.04] == [True, True], pauses


def test_no_more_than_five_batches_of_a_partition_are_under_way(
    broker: FakeBroker, log: Log
) -> None:
    log.faults = ["NotEnoughReplicas"] * IN_FLIGHT_MAX
    writer_for(broker).write(frames(12))

    first = [
        header.base_sequence
        for request in broker.requests_of("Produce")[: IN_FLIGHT_MAX + 1]
        for header in batch_headers(bytes(request.topic_data[0].partition_data[0].records))
    ]
    assert first == [0, 3, 6, 9, 12, 0]


def test_out_of_order_of_the_first_unacknowledged_batch_ends_the_epoch(
    broker: FakeBroker, log: Log
) -> None:
    """Somebody else with the same producer epoch has written."""
    log.faults = [None, "OutOfOrderSequenceNumber"]

    with pytest.raises(EpochAbortedError, match=r"orders-0.*OutOfOrderSequenceNumber"):
        writer_for(broker).write(frames(3))


@pytest.mark.parametrize("name", ["InvalidProducerEpoch", "ProducerFenced", "TransactionAbortable"])
def test_a_task_takes_being_fenced_for_a_lost_epoch(
    broker: FakeBroker, log: Log, name: str
) -> None:
    log.faults = [name]

    with pytest.raises(EpochAbortedError, match=name):
        writer_for(broker).write(frames(1))


def test_duplicates_whose_offset_is_not_told_are_found_in_the_log(
    broker: FakeBroker, log: Log
) -> None:
    log.faults = ["appended, then closed"]
    log.tells_offsets = False
    writer = writer_for(broker)

    writer.write(frames(1))

    assert writer.close() == (ProducedRange("orders", 0, 3, 0, 2),)


@pytest.mark.parametrize("place", [0, 1, 4])
@pytest.mark.parametrize("then", [None, CLOSE, "appended, then closed", "NotEnoughReplicas"])
def test_a_batch_that_is_too_large_goes_out_again_as_smaller_ones_of_the_same_sequence(
    broker: FakeBroker, log: Log, place: int, then: Any
) -> None:
    """Whatever is lost right after it: the numbers are those that the large one had (KIP-126)."""
    log.faults = [None] * place + ["MessageSizeTooLarge"] + [None] * (4 - place) + [then]
    writer = writer_for(broker)

    writer.write(frames(6))

    assert writer.close() == (ProducedRange("orders", 0, 18, 0, 17),)
    large = range(3 * place, 3 * place + 3)
    assert sequences(log) == sorted({*range(0, 18, 3), large[2]})
    assert [value for data in log.batches[0] for value in contents(data)] == [
        b"value-%d" % (index % 3) for index in range(18)
    ]


def test_batches_are_cut_until_the_topic_takes_them(broker: FakeBroker, log: Log) -> None:
    """Also where nobody may ask for its limit; keys, times, headers and compression stay."""
    log.limit = 400
    values = pa.array([bytes([index]) * 50 for index in range(40)], pa.binary())
    headers = pa.array([[{"key": "h", "value": b"x"}], None] * 20, HEADERS_TYPE)
    times = pa.array(range(40), pa.int64())
    columns = {"key": values, "value": values, "headers": headers, "timestamp": times}
    for compression in ("none", "lz4"):
        log.batches[0].clear()
        log.record_counts[0] = 0
        (encoded,) = encode(pa.record_batch(columns), now_ms=1, compression=compression)
        writer_for(broker).write([(ORDERS, encoded)])

        rows = [row for data in log.batches[0] for row in rows_of(data)]
        assert [row["value"] for row in rows] == values.to_pylist()
        assert [row["timestamp"] for row in rows] == times.to_pylist()
        assert [row["headers"] for row in rows] == headers.to_pylist()
        assert all(len(data) <= log.limit for data in log.batches[0])
        assert len(log.batches[0]) > 1
        codecs = {header.compression for data in log.batches[0] for header in batch_headers(data)}
        assert codecs == {CODEC_IDS[compression]}


def test_a_single_record_that_is_too_large_is_not_tried_again(broker: FakeBroker, log: Log) -> None:
    log.limit = 70
    values = pa.array([b"v" * 100], pa.binary())
    (encoded,) = encode(pa.record_batch({"value": values}), now_ms=1)

    with pytest.raises(RecordError, match=r"orders-0.*a single record takes \d+ bytes.*DESCRIBE_C"):
        writer_for(broker).write([(ORDERS, encoded)])

    assert len(broker.requests_of("Produce")) == 1


def test_a_record_beyond_a_limit_that_was_lowered_meanwhile_ends_the_epoch_which_runs_again(
    broker: FakeBroker, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.limit = 70
    monkeypatch.setattr(writer, "batch_limits", lambda *_: {"orders": TopicLimit(70)})
    values = pa.array([b"v" * 100, b"w"], pa.binary())
    (encoded,) = encode(pa.record_batch({"value": values}), now_ms=1)

    with pytest.raises(EpochAbortedError, match="the topic takes 70"):
        writer_for(broker).write([(ORDERS, encoded)])


def rows_of(data: bytes) -> list[dict[str, Any]]:
    (header,) = batch_headers(data)
    decoded = decode(
        data,
        topic_partition=ORDERS,
        start_offset=0,
        stop_offset=header.record_count,
        aborted=None,
        headers=True,
    )
    return decoded.batch.to_pylist()


def contents(data: bytes) -> list[bytes]:
    return [row["value"] for row in rows_of(data)]


def test_a_missing_right_to_write_is_named(broker: FakeBroker, log: Log) -> None:
    log.faults = ["TopicAuthorizationFailed"]

    with pytest.raises(AuthorizationError, match="WRITE on the topic"):
        writer_for(broker).write(frames(1))


def test_answers_behind_one_that_ends_the_epoch_are_not_kept(broker: FakeBroker, log: Log) -> None:
    log.faults = ["TopicAuthorizationFailed"] * 5
    client = Client(broker.config())
    writer = PartitionWriter(client, PRODUCER, transaction_version=2)
    with pytest.raises(AuthorizationError):
        writer.write(frames(5))
    client.network.ask(0, protocol.MetadataRequest(topics=[]), client.deadline())  # after them
    connections = client.network._connections.values()

    assert len(broker.requests_of("Produce")) == 5
    assert not any(connection._answers or connection._unwanted for connection in connections)


def test_without_progress_it_ends_at_the_deadline(broker: FakeBroker, log: Log) -> None:
    log.faults = ["NotEnoughReplicas"] * 1000

    with pytest.raises(BrokerUnavailableError, match="NotEnoughReplicas"):
        writer_for(broker, delivery_timeout_ms="500").write(frames(1))


def test_before_version_2_partitions_are_added_to_the_transaction_first(
    broker: FakeBroker, log: Log
) -> None:
    def added(request: Any) -> Any:
        result_class = part(request, "AddPartitionsToTxnTopicResult")
        part_class = result_class.AddPartitionsToTxnPartitionResult
        results = [
            result_class(
                name=topic.name,
                results_by_partition=[
                    part_class(partition_index=index, partition_error_code=codes.pop(0))
                    for index in topic.partitions
                ],
            )
            for topic in request.v3_and_below_topics
        ]
        return answer(request, results_by_topic_v3_and_below=results)

    codes = [CODES["OperationNotAttempted"], CODES["ConcurrentTransactions"], 0, 0]
    broker.handlers["AddPartitionsToTxn"] = added
    writer = writer_for(broker, version=1)

    writer.write(frames(1) + frames(1, OTHER))
    writer.write(frames(1))

    names = [name for _, name, _ in broker.received if name in ("AddPartitionsToTxn", "Produce")]
    assert names == ["AddPartitionsToTxn", "AddPartitionsToTxn", "Produce", "Produce"]
    assert {request.version for request in broker.requests_of("Produce")} == {11}


def test_before_version_2_a_transaction_that_has_no_room_for_its_partitions_says_so_too(
    broker: FakeBroker,
) -> None:
    """Kafka only says that the error is unknown, and of the others that they were not tried."""

    def refused(request: Any) -> Any:
        result_class = part(request, "AddPartitionsToTxnTopicResult")
        part_class = result_class.AddPartitionsToTxnPartitionResult
        codes = [CODES["OperationNotAttempted"], CODES["Unknown"]]
        results = [
            part_class(partition_index=index, partition_error_code=codes.pop())
            for index in request.v3_and_below_topics[0].partitions
        ]
        name = request.v3_and_below_topics[0].name
        return answer(
            request,
            results_by_topic_v3_and_below=[result_class(name=name, results_by_partition=results)],
        )

    def described(request: Any) -> Any:
        state = part(request, "TransactionState")
        unknown = CODES["TransactionalIdNotFound"]
        return answer(request, transaction_states=[state(error_code=unknown)])

    broker.handlers |= {"AddPartitionsToTxn": refused, "DescribeTransactions": described}

    with pytest.raises(TallystickError, match="AddPartitionsToTxn for orders-0: Unk") as caught:
        writer_for(broker, version=1).write(frames(1) + frames(1, OTHER))
    assert "has 2 partitions by now" in str(caught.value)
    assert "Raise max.message.bytes of __transaction_state" in str(caught.value)
    assert broker.requests_of("Produce") == []


def test_a_topic_that_is_created_again_meanwhile_ends_the_epoch(
    broker: FakeBroker, log: Log
) -> None:
    writer = writer_for(broker)
    writer.write(frames(1))
    broker.topic_id = uuid.UUID(int=8)
    log.faults = ["UnknownTopicId"]

    with pytest.raises(EpochAbortedError, match="'orders' was deleted and created again"):
        writer.write(frames(1))


def test_a_topic_that_was_created_again_before_is_no_trouble(broker: FakeBroker, log: Log) -> None:
    """Worker processes, and their clients, live longer than topics in a test or a notebook."""
    client = Client(broker.config())
    client.metadata(["orders"])
    broker.topic_id = uuid.UUID(int=8)
    log.faults = ["UnknownTopicId"]
    writer = PartitionWriter(client, PRODUCER, transaction_version=2)

    writer.write(frames(1))

    assert sequences(log) == [0]


def test_what_somebody_has_written_with_this_producer_shows(broker: FakeBroker, log: Log) -> None:
    writer = writer_for(broker)
    assert writer.last_sequences([ORDERS, OTHER]) == {}
    log.record_counts[1] = 5

    assert writer.last_sequences([ORDERS, OTHER]) == {OTHER: 4}


def test_where_nobody_may_look_it_does_not_tell(broker: FakeBroker, log: Log) -> None:
    def refused(request: Any) -> Any:
        response = log.describe(request)
        response.topics[0].partitions[0].error_code = CODES["TopicAuthorizationFailed"]
        return response

    broker.handlers["DescribeProducers"] = refused

    assert writer_for(broker).last_sequences([ORDERS]) is None
