"""Consumer groups show how far queries have read; librdkafka is the one who looks."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from pyspark.sql import DataFrame, SparkSession

from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.pipeline.group_offsets import (
    COUNTS,
    GroupOffsets,
    SourceClient,
    forget_transactions,
    in_transaction,
    shown_in_transaction,
)
from tallystick.pipeline.listeners import source_progress
from tallystick.source.offsets import SourceOffsets
from tallystick.spark.streaming import offset_reporter
from tallystick.testing import EmbeddedKafka
from tallystick.values import TopicPartition as Partition
from tests.spark.flow import Flow, finish
from tests.spark.forked_driver import environment_of_a_jvm
from tests.spark.topics import WAIT_S, ends, produce
from tests.waiting import wait_for

pytestmark = [pytest.mark.broker, pytest.mark.spark]

NewTopic = Callable[..., str]
EXIT_JOB = Path(__file__).with_name("exit_job.py")
NOTHING = -1001
"""What librdkafka says where a group has no offset."""


class Reader:
    """Starts queries, and asks Kafka what their groups show."""

    def __init__(self, spark: SparkSession, kafka: EmbeddedKafka, folder: Path) -> None:
        self.spark, self.kafka, self.folder = spark, kafka, folder
        self._consumers: dict[str, Consumer] = {}  # they only look: none joins its group

    def options(self, topic: str, group: str, **further: str) -> dict[str, str]:
        """The options of a source."""
        return {
            **self.kafka.kafka_options,
            "subscribe": topic,
            "startingOffsets": "earliest",
            "kafka.group.id": group,
            **further,
        }

    def stream(self, topic: str, group: str, **further: str) -> DataFrame:
        """A source."""
        options = self.options(topic, group, **further)
        return self.spark.readStream.format("tallystick").options(**options).load()

    def writer(self, rows: DataFrame, name: str) -> Any:
        """A query without a sink of ours."""
        checkpoint = str(self.folder / name)
        writer = rows.writeStream.queryName(name).format("noop")
        return writer.option("checkpointLocation", checkpoint)

    def shown(self, group: str, topic: str, partitions: int) -> list[int]:
        """The offsets that a group has in Kafka."""
        if group not in self._consumers:
            options = {**self.kafka.confluent_options(), "group.id": group}
            self._consumers[group] = Consumer(options)
        wanted = [TopicPartition(topic, partition) for partition in range(partitions)]
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                committed = self._consumers[group].committed(wanted, timeout=WAIT_S)
            except KafkaException:  # the coordinator of the broker's first group comes up
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return [partition.offset for partition in committed]

    def feed(self, topic: str, *counts: int) -> None:
        """So many records into each partition."""
        for partition, count in enumerate(counts):
            records = [(None, str(number)) for number in range(count)]
            produce(self.kafka.confluent_options(), topic, records, partition=partition)

    def wait_for(self, group: str, topic: str, expected: list[int]) -> None:
        """Positions arrive a moment after the epoch that they belong to."""
        wait_for(
            lambda: self.shown(group, topic, len(expected)), expected, f"positions of group {group}"
        )


def of(topic: str, *positions: int) -> dict[Partition, int]:
    return {Partition(topic, number): offset for number, offset in enumerate(positions)}


@pytest.fixture
def reader(spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path) -> Reader:
    return Reader(spark, kafka, tmp_path)


def test_every_source_of_a_query_shows_each_epoch_in_its_own_group(
    reader: Reader, tallystick_topic: NewTopic
) -> None:
    """Two groups, and a third that is switched off."""
    one, two = tallystick_topic("one", partitions=2), tallystick_topic("two")
    rows = (
        reader.stream(one, "group-one")
        .union(reader.stream(two, "group-two"))
        .union(reader.stream(two, "group-off", **{"commit.offsets.on.checkpoint": "false"}))
    )
    reader.feed(one, 3, 5)
    reader.feed(two, 7)
    query = reader.writer(rows, "each").start()
    try:
        reader.wait_for("group-one", one, [3, 5])
        reader.wait_for("group-two", two, [7])
        reader.feed(one, 0, 2)
        reader.wait_for("group-one", one, [3, 7])
    finally:
        query.stop()
    assert COUNTS["each"].positions == 2 + 1 + 1, "only what has changed is sent"
    assert COUNTS["each"].failures == 0
    first, second, third = source_progress(query)
    assert (first.positions, first.lag_total) == (of(one, 3, 7), 0)
    assert (second.group, third.group) == ("group-two", "")
    assert reader.shown("group-off", two, 1) == [NOTHING]

    reader.feed(two, 1)
    finish(reader.writer(rows, "each").trigger(availableNow=True).start)

    reader.wait_for("group-two", two, [8])


def test_a_failure_to_show_is_told_once_counted_and_made_up_for(
    reader: Reader,
    tallystick_topic: NewTopic,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = tallystick_topic("refused")
    commit = KafkaBroker.commit_offsets

    def refuse(*_: Any) -> None:
        raise ConnectionError("no way")

    monkeypatch.setattr(KafkaBroker, "commit_offsets", refuse)
    query = reader.writer(reader.stream(topic, "group-refused"), "refused").start()
    try:
        for failures in (1, 2):
            reader.feed(topic, 1)
            wait_for(lambda: COUNTS["refused"].failures, failures, "the number of refusals")
        assert reader.shown("group-refused", topic, 1) == [NOTHING]
        monkeypatch.setattr(KafkaBroker, "commit_offsets", commit)
        reader.feed(topic, 1)
        reader.wait_for("group-refused", topic, [3])
        assert query.isActive
    finally:
        query.stop()
    warnings = [record for record in caplog.records if "does not show" in record.getMessage()]
    assert len(warnings) == 1


def test_what_the_transaction_shows_is_not_committed_a_second_time(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a driver that was replaced could put its positions over newer ones."""
    assert flow.spark is not None
    reader = Reader(flow.spark, flow.kafka, flow.folder)
    flow.feed(50)
    sink, group = flow.sink(), f"{flow.name}-group"
    show, offered = GroupOffsets.show, Counter[bool]()

    def watch(self: Any, sources: Any, *, forward_only: bool = False) -> bool:
        offered[forward_only] += len(sources)
        return show(self, sources, forward_only=forward_only)

    monkeypatch.setattr(GroupOffsets, "show", watch)

    def run() -> None:
        rows = reader.stream(flow.topic_in, group, maxOffsetsPerTrigger="20")
        writer = reader.writer(rows.select("key", "value"), flow.name)
        finish(writer.trigger(availableNow=True).foreachBatch(sink).start)
        wait_until_runs_have_ended(flow.name)

    run()
    assert offered == {False: 0}
    run()  # nothing new: what Spark's log holds is what the transaction showed
    assert offered == {False: 0, True: 1}
    assert COUNTS[flow.name].commits == COUNTS[flow.name].failures == 0
    expected = ends(flow.confluent, flow.topic_in, IsolationLevel.READ_COMMITTED)
    assert reader.shown(group, flow.topic_in, 3) == [expected[p] for p in range(3)]


def wait_until_runs_have_ended(query: str) -> None:
    """One that has ended sends nothing any more."""
    wait_for(
        lambda: [r for r in offset_reporter._runs.values() if r.query == query],
        [],
        f"runs of the query {query}",
    )


def test_a_script_that_ends_at_once_and_one_that_is_killed_show_their_last_epoch(
    reader: Reader, tallystick_topic: NewTopic
) -> None:
    """Killed between Spark's commit and Kafka's: the next start makes up for it, as it is."""
    topic = tallystick_topic("exit")

    def run(*, die_before: int | None = None) -> int:
        spec = {
            "options": reader.options(topic, "group-exit"),
            "checkpoint": str(reader.folder / "exit"),
            "die_before_showing": die_before,
        }
        command = [sys.executable, EXIT_JOB, json.dumps(spec)]
        with environment_of_a_jvm(reader.folder) as environment:
            return subprocess.run(command, timeout=300, env=environment).returncode

    reader.feed(topic, 9)
    assert run() == 0
    assert reader.shown("group-exit", topic, 1) == [9], "it had to arrive before the process ended"

    reader.feed(topic, 4)
    assert run(die_before=13) == -signal.SIGKILL
    assert reader.shown("group-exit", topic, 1) == [9]
    rows = reader.stream(topic, "group-exit")
    finish(reader.writer(rows, "exit").trigger(availableNow=True).start)
    reader.wait_for("group-exit", topic, [13])


def test_thousands_of_partitions_are_shown_and_then_only_those_that_moved(
    kafka: EmbeddedKafka, tallystick_topic: NewTopic
) -> None:
    """In one request they would be larger than what Kafka appends to its own topic at once."""
    count, group = 2_500, "g" * 200
    topic = tallystick_topic("t" * 200, partitions=count)
    config = KafkaConfig.from_options({"bootstrap.servers": kafka.bootstrap_servers})
    groups = GroupOffsets("thousands", [SourceClient(group, config)])
    cluster_id = str(AdminClient(kafka.confluent_options()).list_topics(timeout=WAIT_S).cluster_id)
    try:
        positions = of(topic, *range(count))
        assert groups.show([SourceOffsets(cluster_id, group, positions)])
        positions[Partition(topic, 7)] = 8
        assert groups.show([SourceOffsets(cluster_id, group, positions)])
        assert COUNTS["thousands"].positions == count + 1

        positions[Partition(topic, 9)] = 3
        older = GroupOffsets("older", [SourceClient(group, config)])
        assert older.show([SourceOffsets(cluster_id, group, positions)], forward_only=True)
        assert COUNTS["older"].positions == 0
        older.close()
        committed = groups._broker((cluster_id, group)).committed_offsets(group, positions)
        assert committed == {**positions, Partition(topic, 9): 9}
    finally:
        groups.close()
        admin = AdminClient(kafka.confluent_options())
        admin.delete_topics([topic])[topic].result(WAIT_S)


def test_a_cluster_is_left_to_the_transactions_of_a_run_from_its_first_one_on() -> None:
    shown_in_transaction("run", "sink")

    assert in_transaction("run", "sink")
    assert not in_transaction("run", "elsewhere")
    assert not in_transaction("next run", "sink")
    forget_transactions("run")
    assert not in_transaction("run", "sink")
