"""A run with nothing to read learns that it was replaced; groups show what its successor has read.

Where no transaction carries positions, a run that wakes up late may put its old ones over newer
ones: Kafka fences no such commit. The owner puts them right, though it has nothing to read.
"""

import json

import pytest
from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

import tallystick as ts
from tallystick.errors import FencedError
from tallystick.pipeline import loop as pipeline_loop
from tests.spark.flow import Flow, pass_on
from tests.spark.topics import WAIT_S, group_positions, read_committed
from tests.waiting import wait_for, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_loop, "LOOK_AGAIN_S", 0.5)


def started(flow: Flow, *further: ts.KafkaSink, transactions: str = "task") -> ts.Query:
    source, sink = flow.source(), flow.sink(transactions=transactions)
    pipeline = ts.Pipeline(flow.name).read(source).map_batches(pass_on()).write(sink, *further)
    return pipeline.start(flow.spark, checkpoint=str(flow.checkpoint))


def wait_for_rows(flow: Flow, count: int) -> None:
    wait_for(
        lambda: len(read_committed(flow.confluent, flow.topic_out)), count, "the number of rows"
    )


def shown(flow: Flow) -> int:
    """The sum of all positions that the pipeline's group shows."""
    return sum(group_positions(flow.confluent, f"tallystick-{flow.name}").values())


@pytest.mark.parametrize(
    ("transactions", "reason"),
    [("task", "belongs to another run now"), ("epoch", "another run has taken over")],
    ids=["the checkpoint decides", "Kafka decides"],
)
def test_an_idle_run_ends_when_another_one_has_taken_over(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, transactions: str, reason: str
) -> None:
    monkeypatch.setattr(pipeline_loop, "refuse_second", lambda *_: None)  # as in another process
    flow.feed(40)
    first = started(flow, transactions=transactions)
    wait_for_rows(flow, 40)
    second = started(flow, transactions=transactions)
    try:
        with pytest.raises(FencedError, match=reason):
            first.awaitTermination(WAIT_S)

        flow.feed(20)
        wait_for_rows(flow, 60)
        assert second.isActive
    finally:
        second.stop()
    flow.assert_exact()


def test_an_idle_run_whose_own_transaction_took_too_long_goes_on(
    flow: Flow, caplog: pytest.LogCaptureFixture
) -> None:
    """Kafka raises the producer's epoch then, as it does for a run that takes over."""
    flow.feed(40)
    query = started(flow, transactions="epoch")
    try:
        wait_for_rows(flow, 40)
        driver = query._loop._driver
        mine = driver.coordinator.producer
        bumped = driver._decider.fence(mine)
        assert bumped.producer_epoch > mine.producer_epoch, "else there is nothing to find out"
        wait_until(lambda: "Kafka has admitted producer" in caplog.text, "it never looked")

        flow.feed(20)
        wait_for_rows(flow, 60)
        assert query.isActive
    finally:
        query.stop()
    flow.assert_exact()


def test_positions_that_were_put_back_are_shown_again(flow: Flow) -> None:
    flow.feed(40)
    query = started(flow)
    try:
        wait_for(lambda: shown(flow), 40, "the sum of the group's positions")
        put_back(flow)
        assert shown(flow) < 40, "else there is nothing to put right"

        wait_for(lambda: shown(flow), 40, "the sum of the group's positions")
    finally:
        query.stop()


@pytest.mark.parametrize("decides", ["checkpoint", "kafka"])
def test_a_transaction_that_a_replaced_run_opens_late_is_aborted(flow: Flow, decides: str) -> None:
    """Else readers of that topic wait for the next record of the input, or Kafka's timeout."""
    other = f"{flow.name}-other"
    flow.kafka.create_topic(other, 1)
    further = [flow.sink(topic=other)] if decides == "kafka" else []
    flow.feed(40)
    query = started(flow, *further)
    try:
        wait_for_rows(flow, 40)
        wait_until(
            lambda: any(flow.checkpoint.rglob("settled-*")),
            "it never found that it has nothing to do",
        )
        options = {"transactional.id": an_id_of(flow), "transaction.timeout.ms": 900_000}
        zombie = Producer({**flow.confluent, **options})
        zombie.init_transactions(WAIT_S)
        zombie.begin_transaction()
        offsets: list[int] = []
        zombie.produce(
            flow.topic_out,
            "late",
            "zombie",
            0,
            on_delivery=lambda _, at: offsets.append(at.offset()),
        )
        zombie.flush(WAIT_S)
        (late,) = offsets  # in the topic; readers wait before it until its transaction has ended

        wait_until(
            lambda: ends(flow, committed=True) > late,
            lambda: f"readers wait at {ends(flow, committed=True)}",
        )

        assert query.isActive
        with pytest.raises(KafkaException, match="fenced"):
            zombie.commit_transaction(WAIT_S)
        flow.feed(20)
        wait_for_rows(flow, 60)
    finally:
        query.stop()
    flow.assert_exact()


def an_id_of(flow: Flow) -> str:
    """Return a transactional id of one of its tasks."""
    newest = max((flow.checkpoint / "tallystick").glob("0*.json"))
    manifest = json.loads(newest.read_text().splitlines()[0])
    transactional_id: str = json.loads(manifest["committables"][0]["details"])["transactional_id"]
    return transactional_id


def ends(flow: Flow, *, committed: bool) -> int:
    """Return the end offset of the output's first partition."""
    level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
    place, admin = TopicPartition(flow.topic_out, 0), AdminClient(flow.confluent)
    futures = admin.list_offsets({place: OffsetSpec.latest()}, isolation_level=level)
    return int(futures[place].result(WAIT_S).offset)


def put_back(flow: Flow) -> None:
    """Commit the beginning of each partition, as a run does that woke up late."""
    group = {"group.id": f"tallystick-{flow.name}", "enable.auto.commit": False}
    consumer = Consumer({**flow.confluent, **group})
    beginnings = [TopicPartition(flow.topic_in, number, 0) for number in range(flow.partitions)]
    consumer.commit(offsets=beginnings, asynchronous=False)
    consumer.close()
