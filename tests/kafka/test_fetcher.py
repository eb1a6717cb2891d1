"""The fetcher against a log of prepared answers."""

import struct
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from tallystick.codec.records.encoder import encode, stamp
from tallystick.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    LogTruncatedError,
    PartitionRemovedError,
    RecordsExpiredError,
    TopicRecreatedError,
)
from tallystick.kafka import fetcher
from tallystick.kafka.client import Client
from tallystick.kafka.cluster import list_offsets
from tallystick.kafka.fetcher import fetch
from tallystick.source.subscription import EARLIEST
from tallystick.values import Producer, SplitRange, TopicPartition
from tests.kafka.fake_broker import CLOSE, CODES, FakeBroker, answer, part

pytestmark = pytest.mark.timeout(60)
RECORDS_PER_BATCH = 4


class Log:
    """Batches of four records each; one answer holds two of them."""

    def __init__(self, count: int) -> None:
        self.faults: list[Any] = []
        self.earliest = 0
        self.end = count * RECORDS_PER_BATCH
        self.batches = []
        for index in range(count):
            base = index * RECORDS_PER_BATCH
            values = pa.array([b"%d" % (base + number) for number in range(4)], pa.binary())
            (encoded,) = encode(pa.record_batch({"key": values, "value": values}), now_ms=1)
            data = stamp(encoded.data, Producer("t", 7, 3), base)
            self.batches.append(struct.pack(">q", base) + data[8:])

    def fetch(self, request: Any) -> Any:
        fault = self.faults.pop(0) if self.faults else None
        if fault is CLOSE:
            return CLOSE
        offset = request.topics[0].partitions[0].fetch_offset
        if offset < self.earliest or offset > self.end:
            fault = fault or "OffsetOutOfRange"
        first = offset // RECORDS_PER_BATCH
        records = b"".join(self.batches[first : first + 2])
        topic_class = part(request, "FetchableTopicResponse")
        data = topic_class.PartitionData(
            partition_index=0,
            error_code=CODES[fault],
            high_watermark=self.end,
            last_stable_offset=self.end,
            log_start_offset=self.earliest,
            aborted_transactions=[],
            preferred_read_replica=-1,
            records=b"" if fault else records,
        )
        topic = topic_class(
            topic=request.topics[0].topic, topic_id=request.topics[0].topic_id, partitions=[data]
        )
        return answer(request, responses=[topic], error_code=0)

    def list_offsets(self, request: Any) -> Any:
        partition = request.topics[0].partitions[0]
        topic_class = part(request, "ListOffsetsTopicResponse")
        offsets = topic_class.ListOffsetsPartitionResponse(
            partition_index=0,
            error_code=0,
            timestamp=-1,
            offset=self.earliest if partition.timestamp == EARLIEST else self.end,
            leader_epoch=0,
        )
        return answer(request, topics=[topic_class(name="orders", partitions=[offsets])])


@pytest.fixture
def log() -> Log:
    return Log(5)


@pytest.fixture
def broker(log: Log) -> Iterator[FakeBroker]:
    with FakeBroker({"Fetch": log.fetch, "ListOffsets": log.list_offsets}) as fake:
        yield fake


def read(broker: FakeBroker, start: int, stop: int, **options: str) -> list[int]:
    client = Client(broker.config(**options))
    batches = fetch(client, SplitRange("orders", 0, start, stop))
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


@pytest.mark.parametrize(("start", "stop"), [(0, 20), (3, 17), (4, 8), (19, 20), (5, 5)])
def test_a_split_is_read_from_its_first_to_its_last_offset(
    broker: FakeBroker, start: int, stop: int
) -> None:
    assert read(broker, start, stop) == list(range(start, stop))


def test_an_empty_split_asks_nobody(broker: FakeBroker) -> None:
    assert read(broker, 7, 7) == []
    assert broker.received == []


@pytest.mark.parametrize("fault", ["NotLeaderForPartition", "FencedLeaderEpoch", CLOSE])
def test_a_leader_that_moves_is_followed(broker: FakeBroker, log: Log, fault: str) -> None:
    log.faults = [None, fault, fault]

    assert read(broker, 0, 20) == list(range(20))
    assert len(broker.requests_of("Metadata")) >= 3


def test_expired_records_are_a_loss_with_figures(broker: FakeBroker, log: Log) -> None:
    log.earliest = 12

    with pytest.raises(RecordsExpiredError) as lost:
        read(broker, 4, 20)

    assert "orders-0[4,20)" in str(lost.value)
    assert "next to read is offset 4, but the earliest left is 12: 8 offsets" in str(lost.value)


def test_no_more_is_counted_as_lost_than_the_split_had(broker: FakeBroker, log: Log) -> None:
    log.earliest = 20

    with pytest.raises(RecordsExpiredError, match="the earliest left is 20: 4 offsets"):
        read(broker, 4, 8)


def test_a_log_that_ends_too_early_is_a_loss(broker: FakeBroker, log: Log) -> None:
    log.end = 8

    with pytest.raises(LogTruncatedError, match="is offset 12, and the log ends before it: its en"):
        read(broker, 12, 20, delivery_timeout_ms="1000")


def test_a_missing_topic_is_a_loss_that_names_it(broker: FakeBroker) -> None:
    broker.partitions = {}

    with pytest.raises(PartitionRemovedError, match="topic 'orders' has no partition 0"):
        read(broker, 0, 20, delivery_timeout_ms="500")


def test_a_topic_that_is_created_again_meanwhile_is_a_loss(
    broker: FakeBroker, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "CERTAIN_AFTER_S", 0.3)

    def fetched(request: Any) -> Any:
        response = log.fetch(request)
        broker.topic_id = uuid.UUID(int=8)
        return response

    log.faults = [None, "UnknownTopicId"]
    broker.handlers["Fetch"] = fetched

    with pytest.raises(TopicRecreatedError, match="it was deleted and created again"):
        read(broker, 0, 20)


def test_records_that_never_come_are_not_waited_for_for_ever(broker: FakeBroker, log: Log) -> None:
    log.end = 24  # and has 20

    with pytest.raises(BrokerUnavailableError, match=r"orders-0\[0,24\).*at offset 20"):
        read(broker, 0, 24, delivery_timeout_ms="500")


def test_a_missing_right_to_read_is_named(broker: FakeBroker, log: Log) -> None:
    log.faults = ["TopicAuthorizationFailed"]

    with pytest.raises(AuthorizationError, match="READ on the topic"):
        read(broker, 0, 20)


def test_the_earliest_offset_is_what_retention_left(broker: FakeBroker, log: Log) -> None:
    log.earliest = 12

    partition = TopicPartition("orders", 0)

    assert list_offsets(Client(broker.config()), [partition], EARLIEST) == {partition: 12}
