"""A pipeline under test with its topics, and a listener that hears what its driver does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
from confluent_kafka.admin import AdminClient, NewPartitions
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import tallystick as ts
from tallystick.epoch import protocol as c
from tallystick.testing import EmbeddedKafka
from tests.spark.topics import WAIT_S, assert_exact, numbered, produce

NOT_IN_TIME = "Python worker failed to connect back"
_numbers = count()


@dataclass
class Flow:
    """An input topic, an output topic, a checkpoint, and the pipeline between them.

    The pipeline passes keys and values on. Its name is the flow's.
    """

    kafka: EmbeddedKafka
    spark: SparkSession | None
    folder: Path
    name: str = field(default_factory=lambda: f"flow-{next(_numbers)}")
    partitions: int = 3
    input: list[tuple[str, str]] = field(default_factory=list)
    execution: Any = "jobs"

    def __post_init__(self) -> None:
        self.topic_in, self.topic_out = f"{self.name}-in", f"{self.name}-out"
        for topic in (self.topic_in, self.topic_out):
            self.kafka.create_topic(topic, self.partitions)

    @property
    def confluent(self) -> dict[str, str]:
        """How the witness reaches the broker."""
        return self.kafka.confluent_options()

    @property
    def checkpoint(self) -> Path:
        """The checkpoint folder, with a name of which a URI would have other characters."""
        return self.folder / "checkpoint #1 at 100%25"

    def feed(self, record_count: int, *, keys: int = 7, partition: int = -1) -> None:
        """Append numbered records to the input; a partition that grew keeps to its own keys."""
        records = numbered(record_count, first=len(self.input), keys=keys)
        produce(self.confluent, self.topic_in, records, partition=partition)
        self.input += records

    def grow(self, record_count: int) -> None:
        """Add a partition to the input, with records of keys that no other partition has."""
        new, self.partitions = self.partitions, self.partitions + 1
        admin = AdminClient(self.confluent)  # its answers come while it lives
        futures = admin.create_partitions([NewPartitions(self.topic_in, self.partitions)])
        futures[self.topic_in].result(WAIT_S)
        self.kafka.wait_until_in_sync([self.topic_in])
        records = [(f"new{new}", value) for _, value in numbered(record_count)]
        produce(self.confluent, self.topic_in, records, partition=new)
        self.input += records

    def source(self, **settings: Any) -> ts.KafkaSource:
        """The input, from the earliest record."""
        options = dict(self.kafka.kafka_options) | settings.pop("options", {})
        servers = options.pop("kafka.bootstrap.servers")
        return ts.KafkaSource(
            servers,
            **{
                "topics": [self.topic_in],
                "starting_offsets": "earliest",
                "options": options,
                **settings,
            },
        )

    def sink(self, **settings: Any) -> ts.KafkaSink:
        """The output."""
        options = dict(self.kafka.kafka_options) | settings.pop("options", {})
        servers = options.pop("kafka.bootstrap.servers")
        return ts.KafkaSink(servers, **{"topic": self.topic_out, "options": options, **settings})

    def pipeline(self, *functions: Any, name: str | None = None, **settings: Any) -> ts.Pipeline:
        """From input to output, through functions; settings of the source go to it."""
        sink = self.sink(**settings.pop("sink", {}))
        pipeline = ts.Pipeline(name or self.name).read(self.source(**settings))
        for function in functions or (pass_on(),):
            pipeline = pipeline.map_batches(function)
        return pipeline.write(sink)

    def run(
        self,
        pipeline: ts.Pipeline | None = None,
        *,
        checkpoint: Path | None = None,
        **settings: Any,
    ) -> None:
        """Run over all that is there, in this process."""
        finish(
            lambda: (pipeline or self.pipeline()).start(
                self.spark,
                checkpoint=str(checkpoint or self.checkpoint),
                trigger={"availableNow": True},
                **settings,
            )
        )

    def spec(self, **further: Any) -> dict[str, Any]:
        """The same for a driver process."""
        return {
            "name": self.name,
            "kafka": dict(self.kafka.kafka_options),
            "topic_in": self.topic_in,
            "topic_out": self.topic_out,
            "checkpoint": str(self.checkpoint),
            **further,
        }

    def assert_exact(self) -> None:
        """The output is the input, exactly once, in order per key."""
        assert_exact(self.confluent, self.topic_out, self.input)


def finish(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Run a query to its end, and raise what it raises.

    Spark gives its Python process for a streaming source 10 s to come up, whatever else the machine
    has to do. When that fails, nothing has been run, and it is simply started again.
    """
    for _ in range(3):
        query = start()
        try:
            ended = query.awaitTermination(150)
        except StreamingQueryException as error:
            if NOT_IN_TIME not in str(error):
                raise
        else:
            assert ended is not False, f"the query hangs: {query.status}"
            return query
    raise AssertionError("this machine is too busy for Spark")


def pass_on() -> Any:
    """A function of a pipeline that changes nothing; made here, so that workers need no tests."""

    def keys_and_values(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(["key", "value"])

    return keys_and_values


class Facts:
    """A listener that keeps the events, and does something at the n-th of a kind."""

    def __init__(self, at: str = "", do: Callable[[c.Event], None] | None = None) -> None:
        self.names: list[str] = []
        self.errors: list[Exception] = []
        self.producers: list[Any] = []
        self._at, self._do = at, do

    def __call__(self, event: c.Event) -> None:
        """Called by the driver."""
        self.names.append(type(event).__name__)
        match event:
            case c.ProducerFenced(producer) | c.TransactionCommitted(producer):
                self.producers.append(producer)
            case c.ActionFailed(error):
                self.errors.append(error)
        if self._do is not None and type(event).__name__ == self._at:
            do, self._do = self._do, None
            do(event)


def die(event: c.Event) -> None:
    """End the driver at an event, with nothing tidied up: a listener of `Facts`."""
    raise RuntimeError(f"died after {type(event).__name__}")
