"""From one cluster to another: the output is exact, and the source's cluster shows how far."""

from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import finish, pass_on
from tests.spark.test_changing_topics import wait_until
from tests.spark.topics import assert_exact, numbered, produce

pytestmark = [pytest.mark.broker, pytest.mark.spark]


def test_positions_are_shown_where_the_source_is(
    kafka: EmbeddedKafka, spark: SparkSession, tmp_path: Path
) -> None:
    records = numbered(100)
    kafka.create_topic("from-here", 1)
    produce(kafka.confluent_options(), "from-here", records)
    witness = Consumer({**kafka.confluent_options(), "group.id": "tallystick-across"})
    with EmbeddedKafka() as other:
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
        finish(
            lambda: pipeline.start(
                spark, checkpoint=str(tmp_path / "c"), trigger={"availableNow": True}
            )
        )

        assert_exact(other.confluent_options(), "to-there", records)

    def shown() -> int:
        return witness.committed([TopicPartition("from-here", 0)])[0].offset

    wait_until(lambda: shown() == len(records))
    witness.close()
