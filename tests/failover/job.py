"""A pipeline without Spark: the real driver and broker port under a stand-in for its epochs."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tallystick.epoch import protocol as c
from tallystick.epoch.facts import Request
from tallystick.epoch.manifest import Identity
from tallystick.epoch.protocol import EpochRan
from tallystick.errors import RetriableError
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import client_for
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.writer import KafkaProduce
from tallystick.ports import Engine, PlannedEpoch
from tallystick.run.driver import Driver
from tallystick.run.transaction_decider import Target, TransactionDecider
from tallystick.source.offsets import SourceOffsets, from_json
from tallystick.state.catalog import StepState
from tallystick.storage.file_storage import FileStorage, SystemClock
from tallystick.tasks.read import WritePlan
from tallystick.values import Producer, TopicPartition
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
    """The driver of one run, as `pipeline.sinks.Sinks.make_driver` makes it."""
    lineage = lineage or f"lineage-of-{shape.pipeline}"
    identity = Identity(shape.pipeline, lineage, str(checkpoint), accepted)
    target = Target(
        transactional_id(shape.pipeline),
        token_group(shape.pipeline),
        TopicPartition(token_topic or shape.topic, 0),
        broker.cluster_id(),
    )
    return Driver(
        identity,
        TransactionDecider(broker, target, identity.lineage),
        FileStorage(str(checkpoint)),
        SystemClock(),
        listener=listener,
    )


def request_of(shape: Shape, epoch: int, cluster_id: str, source_topic: str = "") -> Request:
    """What Spark asks for, and has logged, for an epoch: its source has moved on by one."""
    return Request(epoch, at_offset(epoch + 1, shape, cluster_id, source_topic), may_skip=False)


def at_offset(
    offset: int, shape: Shape, cluster_id: str, source_topic: str = ""
) -> tuple[str, ...]:
    """A position of the source."""
    position = {TopicPartition(source_topic or shape.topic, 0): offset}
    offsets = SourceOffsets(cluster_id, readers_group(shape.pipeline), position)
    return (json.dumps(offsets.to_json(), sort_keys=True),)


@dataclass
class Planned:
    """Plans the epochs of a loop, each of one offset; see `ports.EpochSource`.

    Args:
        at: the position of an offset.
        rows: writes them; its epochs count from 0, those of a loop from 1.
    """

    at: Callable[[int], tuple[str, ...]]
    rows: Engine
    epoch: int = 0

    def plan(
        self, checkpoint_id: int, start: tuple[str, ...], state: tuple[StepState, ...]
    ) -> PlannedEpoch:
        self.epoch = checkpoint_id
        begins = start or self.at(0)
        ((_, offset),) = from_json(json.loads(begins[0])).positions.items()
        return PlannedEpoch(begins, self.at(offset + 1))

    def engine(
        self, checkpoint_id: int, start: tuple[str, ...], sources: tuple[str, ...]
    ) -> Engine:
        return self

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> EpochRan:
        return self.rows.run_epoch(checkpoint_id - 1, producer, state)


MakeJob = Callable[..., "Job"]
"""The fixture of that name."""


@dataclass
class Job:
    """One pipeline: asks for epoch after epoch, and again for one that failed.

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
        has_loop: it runs as a pipeline does; else as Spark asks for what it has logged.
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
    has_loop: bool = False
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
        cluster_id = self._broker.cluster_id()
        engine = self.engine or RowsEngine(self.shape, self._write_plan, self.midway)
        if self.has_loop:
            planned = Planned(
                lambda offset: at_offset(offset, self.shape, cluster_id, self.token_topic), engine
            )
            self._driver.run_next(planned)
            self.logged = planned.epoch
            return
        request = request_of(self.shape, self.logged, cluster_id, self.token_topic)
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
        return WritePlan(KafkaProduce(self.config, self.broker.transaction_version), producer)
