"""Input and output with the same keys in partitions of the same numbers: rows stay where they are.

Whether they do is looked at per row, so nothing depends on it but the time that it takes.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions
from pyspark.sql import SparkSession

from tallystick.codec.layout import Layout
from tallystick.codec.rows import RowLayout
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.fetcher import KafkaFetch
from tallystick.kafka.writer import KafkaProduce
from tallystick.spark.engine import SplitsEngine
from tallystick.spark.tasks import InputSplits, Unread, UnreadInput, share
from tallystick.tasks.epoch_plan import NO_STEPS, EpochPlan
from tallystick.tasks.read import EncodePlan, Report, Route, WritePlan
from tallystick.tasks.read_plan import ReadPlan
from tallystick.tasks.write import FanOut
from tallystick.testing import EmbeddedKafka
from tallystick.values import Producer, SplitRange, TopicPartition
from tests.spark.flow import Flow
from tests.spark.topics import WAIT_S, numbered, produce, wait_until_nothing_is_pending

CONFIG = KafkaConfig("nowhere:1")
ENCODE = EncodePlan((Route(RowLayout({"out": 8}, "out"), "none", 1000),), 2)
PARTITIONS = 4


@dataclass
class Recorder:
    """Runs no task, and keeps what it was told to run."""

    epochs: list[EpochPlan] = field(default_factory=list)

    def run(self, unread: Unread, epoch: EpochPlan, write: Any) -> list[Report]:
        """See `TaskRunner`."""
        self.epochs.append(epoch)
        return []


def planned(topics: list[str], last: Any) -> tuple[Unread, Any]:
    """What reads, and where it sends its rows."""
    splits = tuple(SplitRange(topic, at, 0, 10) for topic in topics for at in range(8))
    (shares,) = share(2, InputSplits(splits))
    unread = Unread((UnreadInput(shares, ReadPlan(KafkaFetch(CONFIG), Layout())),))
    tasks = Recorder()

    def write(producer: Producer) -> WritePlan:
        return WritePlan(KafkaProduce(CONFIG, 2), producer)

    engine = SplitsEngine(tasks, unread, lambda _: last, write, NO_STEPS)
    engine.run_epoch(1, Producer("id", 1, 0), ())
    return unread, tasks.epochs[0].first


@pytest.mark.parametrize("topic", ["a", "b"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_who_reads_a_partition_writes_that_of_the_same_number(topic: str, has_sinks: bool) -> None:
    """Whatever the names of the topics: by their own, every second output is written elsewhere."""
    unread, first = planned([topic], FanOut((), ENCODE, 1) if has_sinks else ENCODE)

    encode = first.encode if has_sinks else first
    for reader, share_of_reader in enumerate(unread.inputs[0].shares):
        for split in share_of_reader:
            assert encode.target(TopicPartition("out", split.partition)) == reader


def test_the_output_of_several_topics_follows_none() -> None:
    _, first = planned(["a", "b"], ENCODE)

    assert first == ENCODE


@pytest.fixture(params=["resident", "jobs"])
def flow(
    request: pytest.FixtureRequest,
    tallystick_kafka: EmbeddedKafka,
    spark: SparkSession,
    tmp_path: Path,
) -> Flow:
    return Flow(tallystick_kafka, spark, tmp_path, partitions=PARTITIONS, execution=request.param)


def feed_strays(flow: Flow, count: int) -> None:
    """Keys that each partition has for itself, and that mostly belong to others."""
    for partition in range(flow.partitions):
        records = [(f"stray-{partition}-{k}", v) for k, v in numbered(count, keys=5)]
        produce(flow.confluent, flow.topic_in, records, partition=partition)
        flow.input += records


@pytest.mark.broker
@pytest.mark.spark
def test_strays_new_partitions_and_another_parallelism_leave_all_exact_and_in_order(
    flow: Flow,
) -> None:
    def settled() -> None:
        query.processAllAvailable()
        wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
        flow.assert_exact()

    source = {"options": {"partition.discovery.interval.ms": "100"}}
    pipeline = flow.pipeline(max_offsets_per_trigger=70, **source)
    for parallelism in (1, 3):
        query: Any = pipeline.start(
            flow.spark, checkpoint=str(flow.checkpoint), execution=flow.execution
        )
        flow.feed(200, keys=16)
        feed_strays(flow, 30)
        settled()
        flow.grow(40)  # the input has one more than the output
        feed_strays(flow, 30)
        settled()
        query.rescale(parallelism=parallelism)
        feed_strays(flow, 30)
        flow.feed(100, keys=16)
        settled()
        query.stop()


@pytest.mark.broker
@pytest.mark.spark
def test_an_output_with_more_partitions_than_the_input_is_exact(flow: Flow) -> None:
    admin = AdminClient(flow.confluent)
    admin.create_partitions([NewPartitions(flow.topic_out, 7)])[flow.topic_out].result(WAIT_S)
    flow.kafka.wait_until_in_sync([flow.topic_out])
    flow.feed(200, keys=16)
    feed_strays(flow, 30)

    query = flow.pipeline().start(
        flow.spark,
        checkpoint=str(flow.checkpoint),
        execution=flow.execution,
        trigger={"availableNow": True},
    )
    assert query.awaitTermination(120)

    flow.assert_exact()
