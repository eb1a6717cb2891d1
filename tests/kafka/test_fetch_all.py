"""Many splits at once, against prepared logs on fake brokers."""

import itertools
import logging
import struct
import time
import uuid
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from fake_broker import CLOSE, CODES, SILENCE, FakeBroker, answer, part

from tallystick.codec.records.encoder import encode, stamp
from tallystick.errors import (
    BrokerUnavailableError,
    CorruptRecordError,
    LogTruncatedError,
    PartitionRemovedError,
    RecordsExpiredError,
    TopicRecreatedError,
)
from tallystick.kafka import fetch_request, fetcher
from tallystick.kafka.client import Client
from tallystick.kafka.fetcher import fetch_all
from tallystick.kafka.protocol import NO_ID, topic_id_text
from tallystick.source.subscription import EARLIEST, LENIENT, LossPolicy
from tallystick.values import Producer, SplitRange

pytestmark = pytest.mark.timeout(60)
FIRST_ID, SECOND_ID = uuid.UUID(int=7), uuid.UUID(int=8)
RECORDS_PER_BATCH = 4


def encoded(base: int) -> bytes:
    values = pa.array([b"%d" % (base + number) for number in range(RECORDS_PER_BATCH)], pa.binary())
    (batch,) = encode(pa.record_batch({"key": values, "value": values}), now_ms=1)
    return struct.pack(">q", base) + stamp(batch.data, Producer("t", 7, 3), base)[8:]


class Logs:
    """Partitions of batches of four records; each part of an answer holds one batch.

    Args:
        counts: of batches, by partition.
        parts_max: how many partitions one answer has records of.
    """

    def __init__(self, counts: dict[int, int], parts_max: int = 1000) -> None:
        batches = [encoded(index * RECORDS_PER_BATCH) for index in range(max(counts.values()))]
        self.batches = {index: batches[:count] for index, count in counts.items()}
        self.end = {index: count * RECORDS_PER_BATCH for index, count in counts.items()}
        self.earliest: Counter[int] = Counter()
        self.errors: dict[int, list[str | None]] = {}
        self.parts_max = parts_max
        self.topic_id = FIRST_ID

    def fetch(self, request: Any) -> Any:
        topic_class = part(request, "FetchableTopicResponse")
        self.parts_left = self.parts_max
        topics = [
            topic_class(
                topic=topic.topic,
                topic_id=topic.topic_id,
                partitions=[
                    self.partition(partition, topic_class.PartitionData, topic.topic_id or NO_ID)
                    for partition in topic.partitions
                ],
            )
            for topic in request.topics
        ]
        return answer(request, responses=topics, error_code=0)

    def partition(self, wanted: Any, part_class: Any, topic_id: uuid.UUID) -> Any:
        index, offset = wanted.partition, wanted.fetch_offset
        errors = self.errors.get(index)
        error = errors.pop(0) if errors else None
        if topic_id != self.topic_id:
            error = "UnknownTopicId"
        elif not self.earliest[index] <= offset <= self.end[index]:
            error = error or "OffsetOutOfRange"
        batches = self.batches[index][offset // RECORDS_PER_BATCH :][:1]
        if error or offset >= self.end[index] or not self.parts_left:
            batches = []
        self.parts_left -= len(batches)
        return part_class(
            partition_index=index,
            error_code=CODES[error],
            high_watermark=self.end[index],
            last_stable_offset=self.end[index],
            log_start_offset=self.earliest[index],
            aborted_transactions=[],
            preferred_read_replica=-1,
            records=b"".join(batches),
        )

    def list_offsets(self, request: Any) -> Any:
        topic_class = part(request, "ListOffsetsTopicResponse")
        return answer(
            request,
            topics=[
                topic_class(
                    name=topic.name,
                    partitions=[
                        topic_class.ListOffsetsPartitionResponse(
                            partition_index=partition.partition_index,
                            error_code=0,
                            timestamp=-1,
                            offset=(self.earliest if partition.timestamp == EARLIEST else self.end)[
                                partition.partition_index
                            ],
                            leader_epoch=0,
                        )
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topics
            ],
        )


def serving(logs: Logs) -> FakeBroker:
    broker = FakeBroker({"Fetch": logs.fetch, "ListOffsets": logs.list_offsets})
    broker.partitions = {"orders": len(logs.end)}
    return broker


def whole(logs: Logs, topic_id: uuid.UUID | None = FIRST_ID) -> list[SplitRange]:
    text = topic_id_text(topic_id)
    return [SplitRange("orders", index, 0, end, text) for index, end in logs.end.items()]


Read = list[tuple[int, int]]
"""Partition and offset of what was read, in order."""


def read(
    broker: FakeBroker, splits: list[SplitRange], policy: LossPolicy | None = None, **options: str
) -> Read:
    keywords = {} if policy is None else {"policy": policy}
    fetched = fetch_all(Client(broker.config(**options)), splits, **keywords)
    return [
        (split.partition, offset)
        for split, batch in fetched
        for offset in batch.column("offset").to_pylist()
    ]


def all_of(logs: Logs, *partitions: int) -> Read:
    return [(index, offset) for index in partitions for offset in range(logs.end[index])]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "CERTAIN_AFTER_S", 0.3)


# --- turns and requests -----------------------------------------------------------------------


def test_partitions_of_one_leader_take_turns() -> None:
    logs = Logs({0: 3, 1: 2, 2: 3})
    with serving(logs) as broker:
        rows = read(broker, whole(logs))

    assert [partition for partition, _ in rows[::RECORDS_PER_BATCH]] == [0, 1, 2, 0, 1, 2, 0, 2]
    assert sorted(rows) == all_of(logs, 0, 1, 2)


def test_who_got_nothing_of_a_full_answer_comes_first_in_the_next() -> None:
    logs = Logs({0: 3, 1: 3, 2: 3}, parts_max=1)
    with serving(logs) as broker:
        rows = read(broker, whole(logs))
        first = [
            request.topics[0].partitions[0].partition for request in broker.requests_of("Fetch")
        ]

    assert first == [0, 1, 2] * 3
    assert sorted(rows) == all_of(logs, 0, 1, 2)


def test_many_small_splits_need_few_requests() -> None:
    logs = Logs(dict.fromkeys(range(300), 1))
    with serving(logs) as broker:
        rows = read(broker, whole(logs))

        assert sorted(rows) == all_of(logs, *range(300))
        assert len(broker.requests_of("Fetch")) == 5
        assert len(broker.requests_of("Metadata")) == 1


def test_the_next_request_is_under_way_while_rows_are_looked_at() -> None:
    logs = Logs({0: 3})
    with serving(logs) as broker:
        fetched = fetch_all(Client(broker.config()), whole(logs))
        next(fetched)
        until = time.monotonic() + 5
        while len(broker.requests_of("Fetch")) < 2:
            assert time.monotonic() < until, "only one request, and rows were handed over already"
            time.sleep(0.001)

        assert len(list(fetched)) == 2


def test_what_nobody_waits_for_any_more_does_not_stay_in_memory() -> None:
    logs = Logs({0: 3})
    with serving(logs) as broker:
        client = Client(broker.config())
        for _ in range(3):
            fetched = fetch_all(client, whole(logs))
            next(fetched)
            fetched.close()

        assert sum(len(batch) for _, batch in fetch_all(client, whole(logs))) == 12
        (connection,) = (c for node, c in client.network._connections.items() if node >= 0)
        assert not connection._answers
        assert not connection._unwanted


def test_two_splits_of_one_partition_do_not_get_into_each_others_way() -> None:
    logs = Logs({0: 6})
    splits = [SplitRange("orders", 0, 0, 9), SplitRange("orders", 0, 9, 24)]
    with serving(logs) as broker:
        rows = read(broker, splits)
        counts = [len(request.topics[0].partitions) for request in broker.requests_of("Fetch")]

    assert sorted(rows) == all_of(logs, 0)
    assert set(counts) == {1}


def test_a_reader_that_takes_long_is_not_to_blame_the_broker() -> None:
    logs = Logs({0: 3, 1: 3})
    logs.errors = {1: ["NotLeaderForPartition"] * 2}
    with serving(logs) as broker:
        config = broker.config(request_timeout_ms="300", delivery_timeout_ms="400")
        fetched = fetch_all(Client(config), whole(logs))
        rows = len(next(fetched)[1])
        time.sleep(0.5)
        rows += sum(len(batch) for _, batch in fetched)

    assert rows == 24


def test_a_leader_that_moves_takes_only_its_split_along() -> None:
    logs = Logs({0: 4, 1: 4})
    with serving(logs) as old, serving(logs) as new:
        old.nodes = new.nodes = [old, new]

        def tell(request: Any) -> Any:
            response = old.tell_metadata(request)
            moved = bool(old.requests_of("Fetch"))
            for topic in response.topics:
                topic.partitions[1].leader_id = int(moved)
            return response

        def fetch_of_old(request: Any) -> Any:
            if len(old.requests_of("Fetch")) > 1:
                logs.errors[1] = ["NotLeaderForPartition"]
            return logs.fetch(request)

        old.handlers |= {"Metadata": tell, "Fetch": fetch_of_old}
        new.handlers |= {"Metadata": tell}
        rows = read(old, whole(logs))
        moved = [
            partition.partition
            for r in new.requests_of("Fetch")
            for partition in r.topics[0].partitions
        ]

    assert sorted(rows) == all_of(logs, 0, 1)
    assert [o for p, o in rows if p == 1] == list(range(16))
    assert set(moved) == {1}


@pytest.mark.parametrize("fault", [CLOSE, SILENCE])
def test_a_broker_that_fails_costs_no_row(fault: str) -> None:
    logs = Logs({0: 3, 1: 3})
    faults = iter([None, fault, None, fault])
    with serving(logs) as broker:
        broker.handlers["Fetch"] = lambda request: next(faults, None) or logs.fetch(request)

        assert sorted(read(broker, whole(logs))) == all_of(logs, 0, 1)


def test_one_leader_that_hangs_does_not_hold_up_the_other() -> None:
    logs = Logs({0: 4, 1: 4})
    with serving(logs) as quick, serving(logs) as hanging:
        quick.nodes = [quick, hanging]

        def tell(request: Any) -> Any:
            response = quick.tell_metadata(request)
            for topic in response.topics:
                topic.partitions[1].leader_id = 1
            return response

        quick.handlers["Metadata"] = hanging.handlers["Metadata"] = tell
        hanging.handlers["Fetch"] = lambda request: SILENCE
        config = quick.config(request_timeout_ms="5000", delivery_timeout_ms="6000")
        fetched = fetch_all(Client(config), whole(logs))
        began = time.monotonic()
        rows = [split.partition for split, _ in itertools.islice(fetched, 4)]

        assert rows == [0] * 4
        assert time.monotonic() - began < 4.0
        fetched.close()


def test_a_leader_that_hangs_is_noticed_while_the_other_keeps_answering() -> None:
    logs = Logs({0: 40, 1: 2})
    with serving(logs) as quick, serving(logs) as hanging:
        quick.nodes = hanging.nodes = [quick, hanging]

        def tell(request: Any) -> Any:
            response = quick.tell_metadata(request)
            for topic in response.topics:
                topic.partitions[1].leader_id = int(not hanging.requests_of("Fetch"))
            return response

        def slow(request: Any) -> Any:
            time.sleep(0.05)
            return logs.fetch(request)

        quick.handlers |= {"Metadata": tell, "Fetch": slow}
        hanging.handlers |= {"Metadata": tell, "Fetch": lambda request: SILENCE}
        rows = read(quick, whole(logs))

    assert sorted(rows) == all_of(logs, 0, 1)
    assert rows.index((1, 0)) < rows.index((0, 80)), "half of the other, which takes 2 s"


def test_a_look_up_does_not_wait_behind_a_fetch() -> None:
    logs = Logs({0: 2})
    with serving(logs) as broker:
        client = Client(broker.config(request_timeout_ms="2000"))
        broker.handlers["Fetch"] = lambda request: time.sleep(0.5) or logs.fetch(request)
        client.metadata(["orders"])
        reading = fetcher.Turns(client, whole(logs), LENIENT, 1 << 20, "read_committed")
        reading._ask()
        began = time.monotonic()
        for _ in range(3):
            client.metadata(["orders"])

        assert time.monotonic() - began < 0.4
        reading.close()


def test_an_answer_that_came_while_nobody_looked_is_taken() -> None:
    logs = Logs({0: 3, 1: 3})
    with serving(logs) as broker:
        client = Client(broker.config(request_timeout_ms="200"))
        offsets: Counter[int] = Counter()
        for split, batch in fetch_all(client, whole(logs)):
            offsets[split.partition] += len(batch)
            time.sleep(0.3)

        assert offsets == {0: 12, 1: 12}
        assert not client.obstacles


def test_damage_is_told_and_not_waited_for() -> None:
    logs = Logs({0: 2})
    logs.batches[0][0] = logs.batches[0][0][:8] + b"\0\0\0\1" + logs.batches[0][0][12:]
    with serving(logs) as broker, pytest.raises(CorruptRecordError, match="batch length of 1"):
        read(broker, whole(logs))


# --- topic ids --------------------------------------------------------------------------------


def test_a_topic_that_was_created_again_before_the_first_fetch_is_told_by_its_id() -> None:
    logs = Logs({0: 2})
    logs.topic_id = SECOND_ID
    with serving(logs) as broker:
        broker.topic_id = SECOND_ID
        with pytest.raises(TopicRecreatedError) as lost:
            read(broker, whole(logs, FIRST_ID))

        assert not broker.requests_of("Fetch")
    assert "orders-0[0,8): next to read is offset 0" in str(lost.value)
    assert topic_id_text(FIRST_ID) in str(lost.value)
    assert topic_id_text(SECOND_ID) in str(lost.value)
    assert "when.recreated=restart" in str(lost.value)


@pytest.mark.parametrize("split_id", [FIRST_ID, None])
def test_a_topic_that_is_created_again_midway_is_not_read_on(split_id: uuid.UUID | None) -> None:
    logs = Logs({0: 4})
    with serving(logs) as broker:
        fetched = fetch_all(Client(broker.config()), whole(logs, split_id))
        rows = next(fetched)[1].column("offset").to_pylist()
        broker.topic_id = logs.topic_id = SECOND_ID
        with pytest.raises(TopicRecreatedError, match=r"next to read is offset [48] "):
            rows.extend(o for _, batch in fetched for o in batch.column("offset").to_pylist())

    assert rows in ([0, 1, 2, 3], list(range(8))), "one answer was under way"


def test_a_broker_that_has_not_heard_of_the_new_topic_yet_is_asked_again() -> None:
    logs = Logs({0: 2})
    logs.topic_id = SECOND_ID
    with serving(logs) as broker:

        def tell(request: Any) -> Any:
            broker.topic_id = FIRST_ID if len(broker.requests_of("Metadata")) < 4 else SECOND_ID
            return broker.tell_metadata(request)

        broker.handlers["Metadata"] = tell

        assert read(broker, whole(logs, SECOND_ID)) == all_of(logs, 0)


def test_a_split_without_an_id_reads_the_topic_that_is_there() -> None:
    logs = Logs({0: 2})
    logs.topic_id = SECOND_ID
    with serving(logs) as broker:
        client = Client(broker.config())
        client.metadata(["orders"])  # remembers the first
        broker.topic_id = SECOND_ID

        assert sum(len(batch) for _, batch in fetch_all(client, whole(logs, None))) == 8


def test_no_split_goes_on_in_a_new_topic_that_another_splits_look_up_has_shown() -> None:
    logs = Logs({0: 4, 1: 4})
    logs.errors[1] = ["NotLeaderForPartition"]
    with serving(logs) as broker:

        def fetch(request: Any) -> Any:
            response = logs.fetch(request)
            if len(broker.requests_of("Fetch")) == 2:
                time.sleep(0.1)  # the other split is due for a look-up when this answer comes
                broker.topic_id = logs.topic_id = SECOND_ID
            return response

        broker.handlers["Fetch"] = fetch
        with pytest.raises(TopicRecreatedError):
            read(broker, whole(logs, FIRST_ID))
        topic_ids = {request.topics[0].topic_id for request in broker.requests_of("Fetch")}

    assert topic_ids == {FIRST_ID}


def test_a_topic_that_is_gone_is_not_taken_for_the_one_that_was_known_before() -> None:
    logs = Logs({0: 2})
    with serving(logs) as broker:
        client = Client(broker.config())
        client.metadata(["orders"])
        broker.partitions = {}

        with pytest.raises(PartitionRemovedError):
            list(fetch_all(client, whole(logs, SECOND_ID)))


def test_a_cluster_without_topic_ids_is_read_by_name() -> None:
    logs = Logs({0: 2})
    logs.topic_id = NO_ID
    with serving(logs) as broker:
        broker.topic_id = NO_ID

        assert read(broker, whole(logs, FIRST_ID)) == all_of(logs, 0)
        assert broker.requests_of("Fetch")[0].topics[0].topic == "orders"


@pytest.mark.parametrize("split_id", [FIRST_ID, None])
def test_an_id_that_is_known_is_not_given_up_because_a_broker_knows_nothing(
    split_id: uuid.UUID | None,
) -> None:
    """One split is found; then the look-up of the other one is told that there is no topic."""
    logs = Logs({0: 4, 1: 4})
    logs.errors[1] = ["NotLeaderForPartition"]
    with serving(logs) as broker:

        def fetch(request: Any) -> Any:
            if len(broker.requests_of("Fetch")) == 2:
                time.sleep(0.1)  # the other split is due for a look-up when this answer comes
            return logs.fetch(request)

        def tell(request: Any) -> Any:
            response = broker.tell_metadata(request)
            for topic in response.topics if len(broker.requests_of("Metadata")) == 2 else []:
                topic.error_code, topic.partitions = CODES["UnknownTopicOrPartition"], []
            return response

        broker.handlers |= {"Metadata": tell, "Fetch": fetch}

        assert sorted(read(broker, whole(logs, split_id))) == all_of(logs, 0, 1)
        assert len(broker.requests_of("Metadata")) > 2
        assert {request.topics[0].topic_id for request in broker.requests_of("Fetch")} == {FIRST_ID}


def test_without_any_id_nothing_is_fetched_before_it_is_looked_up_again() -> None:
    logs = Logs({0: 2})
    with serving(logs) as broker:
        client = Client(broker.config())
        client.metadata(["orders"])
        client.topic_ids.clear()  # as after UnknownTopicOrPartition

        assert sum(len(batch) for _, batch in fetch_all(client, whole(logs, None))) == 8
        assert {request.topics[0].topic_id for request in broker.requests_of("Fetch")} == {FIRST_ID}


# --- losses -----------------------------------------------------------------------------------


def test_a_missing_partition_is_a_loss_after_a_few_seconds_and_not_after_the_deadline() -> None:
    logs = Logs({0: 2, 1: 2})
    with serving(logs) as broker:
        broker.partitions = {"orders": 1}
        began = time.monotonic()
        with pytest.raises(PartitionRemovedError) as lost:
            read(broker, whole(logs), delivery_timeout_ms="30000")

    assert 0.3 <= time.monotonic() - began < 5
    assert "orders-1[0,8)" in str(lost.value)
    assert "when.removed=drop" in str(lost.value)


@pytest.mark.parametrize("between", ["leaderless", "there"])
def test_signs_of_a_loss_with_other_answers_between_them_do_not_add_up(between: str) -> None:
    """Gone, then something else for longer than it takes to be certain, then gone once more."""
    logs = Logs({0: 2})
    late: list[float] = []
    with serving(logs) as broker:

        def tell(request: Any) -> Any:
            first, *_, last = broker.when("Metadata") * 2
            response = broker.tell_metadata(request)
            (topic,) = response.topics
            if not late and (first == last or last - first > 0.4):
                late.extend([last] * (last > first))
                topic.error_code, topic.partitions = CODES["UnknownTopicOrPartition"], []
            elif not late and between == "leaderless":
                topic.partitions[0].leader_id = -1
            return response

        def fetch(request: Any) -> Any:
            logs.errors[0] = [] if late else ["NotLeaderForPartition"]
            return logs.fetch(request)

        broker.handlers |= {"Metadata": tell, "Fetch": fetch}

        assert read(broker, whole(logs), LENIENT) == all_of(logs, 0)
    assert late


def test_signs_of_a_loss_that_are_far_apart_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_request, "SILENCE_S", 0.2)
    cursor = fetch_request.Cursor(SplitRange("orders", 0, 0, 8))
    cursor.doubt(fetcher.REMOVED)
    time.sleep(0.21)

    assert cursor.doubt(fetcher.REMOVED) == 0


def lose_one(broker: FakeBroker, logs: Logs, how: str) -> None:
    """Break partition 1."""
    if how == "expired":
        logs.earliest[1] = 8
    elif how == "truncated":
        logs.end[1] = 4
    elif how == "removed":
        broker.partitions = {"orders": 1}


LOSSES = [
    ("expired", LossPolicy(expired="skip"), range(8, 12), "offsets 0 to 8, 8 of them, had expired"),
    ("truncated", LossPolicy(truncated="resume"), range(4), "offsets 4 to 12, 8 of them, are give"),
    ("removed", LossPolicy(removed="drop"), range(0), "offsets 0 to 12, 12 of them, are given up"),
]


@pytest.mark.parametrize(("how", "policy", "remaining", "warning"), LOSSES)
def test_an_accepted_loss_is_told_and_disturbs_no_other_split(
    how: str, policy: LossPolicy, remaining: range, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    logs = Logs({0: 3, 1: 3})
    splits = whole(logs)
    with serving(logs) as broker, caplog.at_level(logging.WARNING):
        lose_one(broker, logs, how)
        rows = read(broker, splits, policy)

    assert sorted(rows) == all_of(logs, 0) + [(1, offset) for offset in remaining]
    (message,) = (record.getMessage() for record in caplog.records)
    assert f"split orders-1[0,12): {warning}" in message


def test_a_split_of_a_planned_epoch_cannot_be_kept_for_later() -> None:
    logs = Logs({0: 3, 1: 3})
    splits = whole(logs)
    with serving(logs) as broker:
        lose_one(broker, logs, "removed")
        with pytest.raises(PartitionRemovedError) as lost:
            read(broker, splits, LossPolicy(removed="keep"))

    assert "split orders-1[0,12): next to read is offset 0" in str(lost.value)
    assert "when.removed=keep holds positions between epochs" in str(lost.value)
    assert "come back" in str(lost.value)
    assert "when.removed=drop" in str(lost.value)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("expired", RecordsExpiredError),
        ("truncated", LogTruncatedError),
        ("removed", PartitionRemovedError),
    ],
)
def test_what_is_not_accepted_stops_even_when_all_else_is(how: str, error: type[Exception]) -> None:
    accepted = {"expired": "skip", "truncated": "resume", "removed": "drop", "recreated": "restart"}
    logs = Logs({0: 3, 1: 3})
    splits = whole(logs)
    with serving(logs) as broker:
        lose_one(broker, logs, how)
        with pytest.raises(error):
            read(broker, splits, LossPolicy(**(accepted | {how: "fail"})))


def test_a_topic_that_is_created_again_ends_only_its_own_splits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logs = Logs({0: 2})
    with serving(logs) as broker, caplog.at_level(logging.WARNING):
        broker.partitions = {"orders": 1, "invoices": 1}
        old = SplitRange("invoices", 0, 4, 8, topic_id_text(SECOND_ID))
        fetched = fetch_all(Client(broker.config()), [old, *whole(logs)], policy=LENIENT)

        assert {split.topic for split, _ in fetched} == {"orders"}
    assert "split invoices-0[4,8): offsets 4 to 8, 4 of them, are given up" in caplog.text


def test_a_split_that_expired_as_a_whole_is_skipped_as_a_whole() -> None:
    logs = Logs({0: 4})
    logs.earliest[0] = 12
    with serving(logs) as broker:
        assert read(broker, [SplitRange("orders", 0, 2, 9)], LENIENT) == []


def test_records_that_expire_midway_are_skipped_from_where_the_reader_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logs = Logs({0: 6})
    with serving(logs) as broker, caplog.at_level(logging.WARNING):
        offsets = []
        for _, batch in fetch_all(Client(broker.config()), whole(logs), policy=LENIENT):
            logs.earliest[0] = 16
            offsets += batch.column("offset").to_pylist()

    skipped = sorted(set(range(24)) - set(offsets))
    assert offsets == sorted(set(offsets))
    assert skipped in (list(range(4, 16)), list(range(8, 16)))
    assert f"offsets {skipped[0]} to 16, {len(skipped)} of them, had expired" in caplog.text


def test_a_log_that_becomes_too_short_before_the_end_of_the_split_is_a_loss() -> None:
    logs = Logs({0: 2})
    with (
        serving(logs) as broker,
        pytest.raises(LogTruncatedError, match=r"offset 8, and the split"),
    ):
        read(broker, [SplitRange("orders", 0, 0, 12)], delivery_timeout_ms="30000")


@pytest.mark.parametrize("start", [8, 4])
def test_a_leader_that_was_deposed_and_does_not_know_is_not_believed(start: int) -> None:
    """Its log ends early; it is asked again who leads, and the new leader has all."""
    logs, short = Logs({0: 4}), Logs({0: 1})
    with serving(logs) as new, serving(short) as deposed:
        new.nodes = deposed.nodes = [new, deposed]

        def tell(request: Any) -> Any:
            response = new.tell_metadata(request)
            for topic in response.topics:
                topic.partitions[0].leader_id = int(not short_told())
            return response

        def short_told() -> list[Any]:
            return deposed.requests_of("Fetch")

        new.handlers["Metadata"] = deposed.handlers["Metadata"] = tell
        rows = read(deposed, [SplitRange("orders", 0, start, 16)], LENIENT)

    assert rows == [(0, offset) for offset in range(start, 16)]


def test_a_leader_is_asked_with_its_epoch_and_looked_up_when_it_knows_another() -> None:
    logs = Logs({0: 2})
    epochs = itertools.count(5)
    with serving(logs) as broker:

        def tell(request: Any) -> Any:
            response = broker.tell_metadata(request)
            for topic in response.topics:
                topic.partitions[0].leader_epoch = next(epochs)
            return response

        broker.handlers["Metadata"] = tell
        logs.errors[0] = ["UnknownLeaderEpoch", "FencedLeaderEpoch", "OffsetOutOfRange"]

        assert read(broker, whole(logs)) == all_of(logs, 0)
        fetched = [request.topics[0].partitions[0] for request in broker.requests_of("Fetch")]
        listed = [request.topics[0].partitions[0] for request in broker.requests_of("ListOffsets")]

    assert [partition.current_leader_epoch for partition in fetched] == [5, 6, 7, 8, 8]
    assert [partition.current_leader_epoch for partition in listed] == [7, 7]


def test_a_position_that_is_within_its_log_after_all_is_tried_again() -> None:
    logs = Logs({0: 2})
    logs.errors[0] = [None, "OffsetOutOfRange", "OffsetOutOfRange"]
    with serving(logs) as broker:
        assert read(broker, whole(logs)) == all_of(logs, 0)


def test_a_leader_that_never_answers_is_no_loss() -> None:
    logs = Logs({0: 2})
    logs.errors[0] = ["NotLeaderForPartition"] * 100
    with serving(logs) as broker, pytest.raises(BrokerUnavailableError, match="NotLeaderForPart"):
        read(broker, whole(logs), LENIENT, delivery_timeout_ms="600")
