"""A start on brokers that do not say whether they verify partitions, until a person decides."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tests.kafka.other_broker import REDPANDA, OtherBroker
from tests.spark.topics import numbered, produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

ACCEPT = ["unverified-partitions"]


def test_pipelines_and_batches_are_written_with_the_decision_and_not_without(
    shared_spark: SparkSession, tallystick_kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    topic_in, topic_out = (tallystick_kafka.create_topic(f"other-{end}", 1) for end in "io")
    options = tallystick_kafka.confluent_options()
    produce(options, topic_in, numbered(20))

    with OtherBroker(tallystick_kafka.bootstrap_servers, **REDPANDA) as broker:
        source = ts.KafkaSource(broker.address, topics=[topic_in], starting_offsets="earliest")
        sink = ts.KafkaSink(broker.address, topic=topic_out)
        pipeline = ts.Pipeline("on-another-broker").read(source).write(sink)
        run: dict[str, Any] = {"checkpoint": tmp_path, "trigger": {"availableNow": True}}
        with pytest.raises(ts.OptionError, match="accept=\\['unverified-partitions'\\]"):
            pipeline.start(shared_spark, **run)
        pipeline.start(shared_spark, accept=ACCEPT, **run).awaitTermination()

        rows = shared_spark.createDataFrame(pa.table({"value": ["a batch"]}))
        with pytest.raises(ts.OptionError, match="accept=\\['unverified-partitions'\\]"):
            sink.write(rows)
        ts.KafkaSink(broker.address, topic=topic_out, accept=ACCEPT).write(rows)

    values = [record.value for record in read_committed(options, topic_out)]
    assert values == [*map(str, range(20)), "a batch"]
    assert broker.refused == []
