"""A pipeline's checkpoint and topic in which tasks and drivers have died, without any Spark."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
from typer.testing import CliRunner, Result

import tallystick as ts
from tallystick.__main__ import app
from tallystick.epoch.two_phase import Committable, Owner, RunFacts
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.transactions import list_open_ids
from tallystick.testing.kafka import EmbeddedKafka
from tests.kafka.task_sinks import place_of, written_by, written_in_another_process
from tests.lingering_job import LingeringJob

LINEAGE = "lineage-1"
_numbers = itertools.count()


def never(rows: Any) -> Any:
    """A function of a pipeline that nobody may call."""
    raise AssertionError("a recovery calls no function of the pipeline")


class Scene:
    """One pipeline with a topic of its own, whose tasks die."""

    def __init__(self, kafka: EmbeddedKafka, folder: Path) -> None:
        number = next(_numbers)
        self.pipeline_name, self.topic = f"settled-{number}", f"left-{number}"
        kafka.create_topic(self.topic, 1)
        self.options = {**kafka.kafka_options, "kafka.delivery.timeout.ms": "20000"}
        self.servers = self.options.pop("kafka.bootstrap.servers")
        plain = {name.removeprefix("kafka."): value for name, value in self.options.items()}
        self.config = KafkaConfig.from_options({**plain, "bootstrap.servers": self.servers})
        self.job = LingeringJob(
            folder / f"checkpoint-{number}", self.pipeline_name, LINEAGE, is_loops=True
        )
        self.id = f"tallystick-{self.pipeline_name}/{LINEAGE}/out/0/0"

    def kafka_sink(self, **settings: Any) -> ts.KafkaSink:
        """The output topic."""
        known = {"topic": self.topic, "transactions": "task", "uid": "out", "options": self.options}
        return ts.KafkaSink(settings.pop("servers", self.servers), **{**known, **settings})

    def pipeline(self, *sinks: Any, name: str | None = None) -> ts.Pipeline:
        """The pipeline that left it all; by default with the topic alone."""
        source = ts.KafkaSource(self.servers, topics=["no-such-topic"], options=self.options)
        pipeline = ts.Pipeline(name or self.pipeline_name).read(source).map_batches(never)
        return pipeline.write(*(sinks or (self.kafka_sink(),)))

    def recover(self, *sinks: Any) -> ts.Recovery:
        """Recover the pipeline."""
        return self.pipeline(*sinks).recover(checkpoint=str(self.job.folder))

    @contextmanager
    def sink(self) -> Iterator[Any]:
        """The topic, as a run has it."""
        owner = Owner(self.pipeline_name, "out", LINEAGE)
        opened = self.kafka_sink().open(owner, RunFacts(tasks=2))
        yield opened
        opened.close()

    def written(
        self, *texts: str, epoch: int = 1, task: int = 0, dies: bool = False
    ) -> Committable:
        """What a task hands over; `dies`: one that is killed (-9) right after."""
        write = written_in_another_process if dies else written_by
        with self.sink() as sink:
            place = place_of(self.pipeline_name, epoch, task, lineage=LINEAGE)
            return write(sink.plan(), place, *texts)

    def call(self, *words: object) -> Result:
        """`tallystick transactions list`."""
        where = ("transactions", "list", "--bootstrap-servers", self.servers)
        return CliRunner().invoke(app, [str(word) for word in (*where, *words)])

    def read(self, until: Callable[[list[str]], bool]) -> list[str]:
        """What an independent reader of committed records gets to see."""
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": f"witness-{next(_numbers)}",
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
            }
        )
        consumer.assign([confluent_kafka.TopicPartition(self.topic, 0, 0)])
        texts: list[str] = []
        deadline = time.monotonic() + 20
        while not until(texts) and time.monotonic() < deadline:
            message = consumer.poll(0.2)
            if message is not None and message.error() is None:
                texts.append(message.value().decode())
        consumer.close()
        return texts

    def clean_up(self) -> None:
        """Leave nothing open for which readers, or other tests, would wait."""
        client, broker = Client(self.config), KafkaBroker(self.config)
        for ident in list_open_ids(client):
            if f"tallystick-{self.pipeline_name}" in ident:
                broker.fence(ident, None)
        client.close()
        broker.close()

    def write_plainly(self, text: str) -> None:
        """A record of another program, after whatever is open."""
        producer = confluent_kafka.Producer({"bootstrap.servers": self.servers})
        producer.produce(self.topic, text.encode(), partition=0)
        assert producer.flush(20) == 0
