"""One reader of `reading.py`, in a process of its own; stays up, and reads when told to.

`reading_worker.py confluent|spark|ours|plan BOOTSTRAP TOPIC RECORDS`; then, on stdin, one line per
read: `raw` or `json`, or, without Kafka's other columns, `value` or `fields`. Each is answered by
`READ <seconds>` when all records have been read.
"""

import os
import sys
import time
from collections.abc import Callable

from confluent_kafka import Consumer, TopicPartition
from harness.spark_connector import FORMAT as CONNECTOR
from harness.spark_connector import connector_jars
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql import types as t

import tallystick as ts
from tallystick.spark.streaming.source import FORMAT, TallystickSource

EVENT = "user string, item string, ts bigint, amount double, country string, session string"
KAFKA_COLUMNS = ("key", "topic", "partition", "offset", "timestamp", "timestampType")
KAFKA_TYPES = (
    *(t.BinaryType(), t.StringType(), t.IntegerType(), t.LongType()),
    *(t.TimestampType(), t.IntegerType()),
)
HEAP = "2g"
CONSUME_RECORDS = 10_000
WAIT_S = 60.0

Read = Callable[[str], int]
"""Reads the topic as a kind and returns how many records there were."""
JSON_KINDS = ("json", "fields")


def confluent(bootstrap: str, topic: str, records: int) -> Read:
    """All values of all partitions as Python objects.

    By default librdkafka pauses a second whenever its queue is full, and then does little else.
    """
    tuned = {"fetch.queue.backoff.ms": 10, "queued.min.messages": 1_000_000}

    def read(_: str) -> int:
        options = {"bootstrap.servers": bootstrap, "group.id": "reading"}
        consumer = Consumer({**options, **tuned, "enable.auto.commit": False})
        partitions = consumer.list_topics(topic, WAIT_S).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        rows_read = 0
        while rows_read < records:
            messages = consumer.consume(CONSUME_RECORDS, WAIT_S)
            values = [message.value() for message in messages]
            assert values, "nothing came"
            rows_read += len(values)
        consumer.close()
        return rows_read

    return read


def spark(bootstrap: str, topic: str, records: int) -> Read:
    """Spark's own connector, and `from_json`."""
    jars = ",".join(map(str, connector_jars()))
    session = _session({"spark.jars": jars})

    def frame(kind: str) -> DataFrame:
        rows = session.read.format(CONNECTOR).options(**_options(bootstrap, topic)).load()
        beside = () if kind in ("value", "fields") else KAFKA_COLUMNS
        if kind not in JSON_KINDS:
            return rows.select("value", *beside)
        event = F.from_json(F.col("value").cast("string"), EVENT)
        return rows.select(event.alias("event"), *beside).select("event.*", *beside)

    return _noop(frame)


def ours(bootstrap: str, topic: str, records: int) -> Read:
    """Our source in Spark."""
    session = _session({})
    ts.register(session)
    return _noop(
        lambda kind: (
            session.read.format(FORMAT).options(**_our_options(bootstrap, topic, kind)).load()
        )
    )


def plan(bootstrap: str, topic: str, records: int) -> Read:
    """What runs in one task of ours, without Spark around it: a pipeline's functions start here."""
    event = [t.StructField(*field) for field in zip(_names(EVENT), _types(EVENT), strict=True)]
    kafka = [t.StructField(*field) for field in zip(KAFKA_COLUMNS, KAFKA_TYPES, strict=True)]
    value = t.StructField("value", t.BinaryType())
    schemas = {"raw": [kafka[0], value, *kafka[1:]], "json": [*event, *kafka]}

    def read(kind: str) -> int:
        source = TallystickSource(_our_options(bootstrap, topic, kind))
        reader = source.reader(t.StructType(schemas[kind]))
        return sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))

    return read


def _names(text: str) -> list[str]:
    return [field.split()[0] for field in text.split(", ")]


def _types(text: str) -> list[t.DataType]:
    known = {"string": t.StringType(), "bigint": t.LongType(), "double": t.DoubleType()}
    return [known[field.split()[1]] for field in text.split(", ")]


def _options(bootstrap: str, topic: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": bootstrap, "subscribe": topic}


def _our_options(bootstrap: str, topic: str, kind: str) -> dict[str, str]:
    json = {"value.format": "json", "value.schema": EVENT} if kind in JSON_KINDS else {}
    few = {"metadata.columns": "none"} if kind in ("value", "fields") else {}
    return {**_options(bootstrap, topic), **json, **few}


def _session(config: dict[str, str]) -> SparkSession:
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    heap = {"spark.driver.memory": HEAP}
    session = ts.spark_session("reading", master="local[2]", config={**quiet, **heap, **config})
    session.sparkContext.setLogLevel("ERROR")
    return session


def _noop(frame: Callable[[str], DataFrame]) -> Read:
    """Reads and throws away; the first read of a kind is followed by one that counts."""
    counts: dict[str, int] = {}

    def read(kind: str) -> int:
        frame(kind).write.format("noop").mode("overwrite").save()
        if kind not in counts:
            seen = Observation()
            counted = frame(kind).observe(seen, F.count(F.lit(1)).alias("count"))
            counted.write.format("noop").mode("overwrite").save()
            counts[kind] = int(seen.get["count"])
        return counts[kind]

    return read


READERS = {"confluent": confluent, "spark": spark, "ours": ours, "plan": plan}


def main() -> None:
    """Read as often as asked."""
    name, bootstrap, topic, records = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")  # Java may print to the other one
    os.dup2(2, 1)
    read = READERS[name](bootstrap, topic, int(records))
    answers.write("READY\n")
    answers.flush()
    for line in sys.stdin:
        start = time.perf_counter()
        rows_read = read(line.strip())
        took_s = time.perf_counter() - start
        assert rows_read == int(records), (
            f"{name} read {rows_read} records, and {records} are there"
        )
        answers.write(f"READ {took_s}\n")
        answers.flush()


if __name__ == "__main__":
    main()
