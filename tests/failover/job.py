"""A pipeline without Spark: the real driver and broker port under a stand-in for micro-batches."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tallystick.checkpoint import protocol as c
from tallystick.checkpoint.facts import Identity, Request
from tallystick.errors import RetriableError
from tallystick.job import Driver, Target
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.ports import Engine
from tallystick.sink.transaction import Producer
from tallystick.source.offsets import SourceOffsets
from tallystick.storage import FileStorage, SystemClock
from tallystick.task import WritePlan, client_for
from tallystick.topic_partition import TopicPartition
from tests.failover.known_rows import RowsEngine, Shape

PARTITIONS = 3
"""Of the topic that pipelines share in tests without an outage."""
TRANSACTION_TIMEOUT_MS = 60_000
RESTARTS_MAX = 20


class Death(BaseException):
    """The driver is gone: nobody handles this, nothing is cleaned up."""


def transactional_id(pipeline: str) -> str:
    return f"tallystick-{pipeline}"


def token_group(pipeline: str) -> str:
    return f"tallystick-{pipeline}-token"


def readers_group(pipeline: str) -> str:
    """Where the positions of the (pretended) source are shown."""
    return f"{pipeline}-readers"


def make_driver(
    shape: Shape,
    broker: KafkaBroker,
    checkpoint: Path,
    *,
    token_topic: str = "",
    lineage: str = "",
    accepted: frozenset[str] = frozenset(),
    listener: Callable[[c.Event], None],
) -> Driver:
    """The driver of one run, as `spark.epochs.driver_of` makes it."""
    return Driver(
        Identity(
            shape.pipeline, lineage or f"lineage-of-{shape.pipeline}", str(checkpoint), accepted
        ),
        Target(
            transactional_id(shape.pipeline),
            token_group(shape.pipeline),
            TopicPartition(token_topic or shape.topic, 0),
            broker.cluster_id(),
        ),
        broker,
        FileStorage(str(checkpoint)),
        SystemClock(),
        listener=listener,
    )


def request_of(shape: Shape, epoch: int, cluster_id: str, source_topic: str = "") -> Request:
    """What Spark asks for, and has logged, for an epoch: its source has moved on by one."""
    position = {TopicPartition(source_topic or shape.topic, 0): epoch + 1}
    offsets = SourceOffsets(cluster_id, readers_group(shape.pipeline), position)
    return Request(epoch, (json.dumps(offsets.to_json(), sort_keys=True),), may_skip=False)


MakeJob = Callable[..., "Job"]
"""The fixture of that name."""


@dataclass
class Job:
    """One pipeline: asks for epoch after epoch, and again for one that failed, as Spark does.

    Args:
        shape: what it writes.
        config: of the cluster; a client id of its own, so that no other job shares its client.
        checkpoint: its folder.
        on_event: told every event of the protocol.
        midway: called in the middle of writing.
        on_start: called with each new broker port, before its first use.
        engine: what runs the epochs; None: a task in this thread.
        token_topic: where the token is kept, and what the source reads; "": the shape's topic.
        lineage: of the checkpoint; "": one of the pipeline's name.
        accepted: the decisions of a person.
    """

    shape: Shape
    config: KafkaConfig
    checkpoint: Path
    on_event: Callable[[c.Event], None] = lambda _: None
    midway: Callable[[], None] = lambda: None
    on_start: Callable[[KafkaBroker], None] = lambda _: None
    engine: Engine | None = None
    token_topic: str = ""
    lineage: str = ""
    accepted: frozenset[str] = frozenset()
    logged: int = 0
    restarts: int = 0
    errors: list[str] = field(default_factory=list)
    producer: Producer | None = None
    _broker: KafkaBroker | None = None
    _driver: Driver | None = None

    def run_until(self, epochs: int) -> None:
        """Go on until so many epochs are done; a query that failed is started again."""
        while self.logged < epochs:
            try:
                self.run_next()
            except RetriableError as error:
                self.errors.append(str(error))
                if self.restarts >= RESTARTS_MAX:
                    raise
                self.restart()
            except Death:
                self.restart()

    def run_next(self) -> None:
        """Run one epoch, in the run that there is or in a new one."""
        if self._driver is None:
            self._start()
        assert self._driver is not None
        assert self._broker is not None
        request = request_of(self.shape, self.logged, self._broker.cluster_id(), self.token_topic)
        engine = self.engine or RowsEngine(self.shape, self._write_plan, self.midway)
        self._driver.run_epoch(request, engine)
        self.logged += 1

    def restart(self) -> None:
        """The run is over; the next epoch begins another."""
        self.restarts += 1
        self.close()

    def close(self) -> None:
        """Hang up, and leave everything in Kafka as it is."""
        if self._broker is not None:
            self._broker.close()
        client_for(self.config).close()
        self._broker = self._driver = None

    @property
    def broker(self) -> KafkaBroker:
        assert self._broker is not None, "a run has begun"
        return self._broker

    def _start(self) -> None:
        self._broker = KafkaBroker(self.config, TRANSACTION_TIMEOUT_MS)
        self.on_start(self._broker)
        self._driver = make_driver(
            self.shape,
            self._broker,
            self.checkpoint,
            token_topic=self.token_topic,
            lineage=self.lineage,
            accepted=self.accepted,
            listener=self.on_event,
        )

    def _write_plan(self, producer: Producer) -> WritePlan:
        self.producer = producer
        return WritePlan(self.config, producer, self.broker.transaction_version)
