"""From one cluster to another: the output is exact, and the source's cluster shows how far."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID, Consumer, TopicPartition
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.kafka.broker import KafkaBroker
from tallystick.run.query import Query
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import finish, pass_on
from tests.spark.topics import assert_exact, numbered, produce

pytestmark = [pytest.mark.broker, pytest.mark.spark]


@pytest.fixture(scope="module")
def other() -> Iterator[EmbeddedKafka]:
    """A cluster beside the one that most tests share."""
    with EmbeddedKafka() as kafka:
        yield kafka


def test_positions_are_shown_where_the_source_is(
    kafka: EmbeddedKafka,
    other: EmbeddedKafka,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What Kafka refuses is made up for where nothing is left to read, and by the next start."""
    records = numbered(100)
    kafka.create_topic("from-here", 1)
    produce(kafka.confluent_options(), "from-here", records)
    witness = Consumer({**kafka.confluent_options(), "group.id": "tallystick-across"})
    commit, refusals = KafkaBroker.commit_offsets, []

    def refuse(*_: Any) -> None:
        refusals.append(shown())
        raise ConnectionError("no way")

    def refuse_once(*settings: Any) -> None:
        monkeypatch.setattr(KafkaBroker, "commit_offsets", commit)
        refuse()

    def shown() -> int:
        return witness.committed([TopicPartition("from-here", 0)])[0].offset

    other.create_topic("to-there", 2)
    pipeline = (
        ts.Pipeline("across")
        .read(
            ts.KafkaSource(
                kafka.bootstrap_servers,
                topics=["from-here"],
                starting_offsets="earliest",
                max_offsets_per_trigger=40,
            )
        )
        .map_batches(pass_on())
        .write(ts.KafkaSink(other.bootstrap_servers, topic="to-there"))
    )

    def run() -> int:
        query = finish(
            lambda: pipeline.start(
                spark, checkpoint=str(tmp_path / "c"), trigger={"availableNow": True}
            )
        )
        assert_exact(other.confluent_options(), "to-there", records)
        return len(query.recentProgress)

    monkeypatch.setattr(KafkaBroker, "commit_offsets", refuse)
    epoch_count = run()
    # Of epochs that end while Kafka is asked only the newest counts.
    assert 2 <= len(refusals) <= epoch_count + 2, "with an epoch, and once more after them"
    assert shown() == OFFSET_INVALID
    monkeypatch.setattr(KafkaBroker, "commit_offsets", commit)
    assert run() == 0
    assert shown() == 100

    records += numbered(20, first=100)
    produce(kafka.confluent_options(), "from-here", records[100:])
    refusals.clear()
    monkeypatch.setattr(KafkaBroker, "commit_offsets", refuse_once)
    run()
    assert (shown(), len(refusals)) == (120, 1)
    witness.close()


def test_inputs_on_two_clusters_are_one_stream(
    kafka: EmbeddedKafka, other: EmbeddedKafka, spark: SparkSession, tmp_path: Path
) -> None:
    """Topics of one name; each cluster shows how far it is read, one of them beside the commit."""
    for topic, partitions in (("met-in", 2), ("met-out", 2)):
        kafka.create_topic(topic, partitions)
    records: list[tuple[str, str]] = []

    other.create_topic("met-in", 1)
    clusters = {"here": kafka, "there": other}

    def stream(uid: str) -> ts.Stream:
        servers = clusters[uid].bootstrap_servers
        source = ts.KafkaSource(
            servers, topics=["met-in"], starting_offsets="earliest", max_offsets_per_trigger=15
        )
        return ts.stream(source, uid=uid)

    def feed(uid: str, count: int) -> None:
        new = [(f"{uid}-{key}", value) for key, value in numbered(count, first=len(records))]
        produce(clusters[uid].confluent_options(), "met-in", new)
        records.extend(new)

    def shown(uid: str, partitions: int) -> int:
        options = clusters[uid].confluent_options()
        witness = Consumer({**options, "group.id": f"tallystick-met/{uid}"})
        wanted = [TopicPartition("met-in", number) for number in range(partitions)]
        total = sum(position.offset for position in witness.committed(wanted, timeout=30))
        witness.close()
        return total

    for order in (["here", "there"], ["there", "here"]):
        feed("here", 40)
        feed("there", 50)
        pipeline = (
            ts.Pipeline("met")
            .read(*map(stream, order))
            .map_batches(pass_on())
            .write(ts.KafkaSink(kafka.bootstrap_servers, topic="met-out"))
        )
        query = finish(
            lambda pipeline=pipeline: pipeline.start(
                spark, checkpoint=str(tmp_path / "c"), trigger={"availableNow": True}
            )
        )
        assert_exact(kafka.confluent_options(), "met-out", records)
        cluster_by_input = {
            position.input: position.cluster_id for position in ts.source_progress(query)
        }
        assert list(cluster_by_input) == order
        assert len(set(cluster_by_input.values())) == 2
    assert (shown("here", 2), shown("there", 1)) == (80, 100)


def test_two_clusters_hold_the_same_whatever_dies_between_their_commits(
    kafka: EmbeddedKafka, other: EmbeddedKafka, spark: SparkSession, tmp_path: Path
) -> None:
    """One decides; what tasks prepared on the other one follows, also in the next run."""
    records = numbered(100)
    for topic in ("both-in", "both-here"):
        kafka.create_topic(topic, 2)
    produce(kafka.confluent_options(), "both-in", records)

    other.create_topic("both-there", 2)
    source = ts.KafkaSource(
        kafka.bootstrap_servers,
        topics=["both-in"],
        starting_offsets="earliest",
        max_offsets_per_trigger=40,
    )
    here = ts.KafkaSink(kafka.bootstrap_servers, topic="both-here")
    there = ts.KafkaSink(other.bootstrap_servers, topic="both-there", transactions="task")
    pipeline = ts.Pipeline("both").read(source).map_batches(pass_on()).write(here, there)

    def start(dies_at: str = "") -> Query:
        seen = []

        def die(event: object) -> None:
            seen.append(type(event).__name__)
            if seen[-1] == dies_at and seen.count(dies_at) == 2:
                raise RuntimeError(f"died after {dies_at}")

        return pipeline.start(
            spark,
            checkpoint=str(tmp_path / "c"),
            trigger={"availableNow": True},
            listener=die,
        )

    for fact in ("TransactionCommitted", "EpochRan"):
        with pytest.raises(RuntimeError, match="died"):
            finish(lambda fact=fact: start(fact))
    finish(start)

    for cluster, topic in ((kafka, "both-here"), (other, "both-there")):
        assert_exact(cluster.confluent_options(), topic, records)
