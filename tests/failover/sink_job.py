"""A pipeline with any sinks, without Spark: its driver, sinks and tasks under a stand-in for Spark.

Each epoch reads the same number of rows from each partition of a pretended source, and the task
that owns the partition writes them; what they are is known beforehand.
"""

import contextlib
import gc
import json
import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as Assigned
from pyspark import SparkContext

import tallystick as ts
from tallystick.api.kafka_sink import topology_of
from tallystick.epoch import protocol as c
from tallystick.epoch.facts import Request
from tallystick.epoch.manifest import Identity
from tallystick.epoch.protocol import EpochRan
from tallystick.epoch.two_phase import Sink
from tallystick.errors import RetriableError
from tallystick.kafka import client as kafka_client
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.transactions import list_open_ids
from tallystick.pipeline.sinks import Sinks
from tallystick.postgres.connection import idle_connections
from tallystick.run.driver import Driver
from tallystick.source.offsets import SourceOffsets
from tallystick.spark.cluster import Cluster
from tallystick.spark.context import SETTINGS
from tallystick.state.catalog import StepState
from tallystick.storage.file_storage import FileStorage
from tallystick.tasks.epoch_plan import NO_STEPS
from tallystick.tasks.read import Outlet, send
from tallystick.testing import EmbeddedKafka
from tallystick.values import Producer, TopicPartition
from tests.failover.job import Death
from tests.waiting import wait_for

PARTITIONS = 3
ROWS = 8
"""Per partition and epoch."""
RESTARTS_MAX = 20


def spark_with(parallelism: int) -> Cluster:
    """What the sinks ask of Spark: how many tasks it runs at a time, and its settings."""
    conf = {name: value for name, (value, _) in SETTINGS.items()}
    context = SimpleNamespace(
        master="local[2]",
        pythonExec=sys.executable,
        defaultParallelism=parallelism,
        getConf=lambda: SimpleNamespace(getAll=conf.items),
        applicationId="no-spark",
    )
    return Cluster(lambda: cast(SparkContext, context))


def values_of(pipeline: str, epoch: int, partition: int) -> list[str]:
    """The rows of one epoch in one partition, in order."""
    return [f"{pipeline}:{epoch}:{partition}:{row}" for row in range(ROWS)]


@dataclass(frozen=True)
class _Mortal:
    """An outlet whose tasks tidy nothing up when they are killed."""

    outlet: Outlet

    @property
    def target_count(self) -> int:
        return self.outlet.target_count

    @property
    def part(self) -> str:
        return self.outlet.part

    def begun(self, source: int, attempt: int, attempt_number: int) -> Any:
        opened = self.outlet.begun(source, attempt, attempt_number)

        def abandon() -> None:
            if not isinstance(sys.exception(), Death):
                opened.abandon()

        return SimpleNamespace(frames=opened.frames, finish=opened.finish, abandon=abandon)


@dataclass
class TasksEngine:
    """The Engine port: one process in the place of all tasks.

    Args:
        pipeline: whose rows.
        sinks: of the run.
        parallelism: how many tasks there are.
        partitions: of the source, and of the rows.
        attempt: Spark's number of the attempt of each task.
        midway: called with the task's index when it has written half of its rows.
    """

    pipeline: str
    sinks: Sinks
    parallelism: int
    partitions: int
    attempt: int
    midway: Callable[[int], None]

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> EpochRan:
        last = self.sinks.last((), checkpoint_id)
        epoch = NO_STEPS.epoch(checkpoint_id, 0, secrets.token_hex(8), state, last)
        write = replace(self.sinks.write_plan(producer), stage=epoch.stage)
        sent = [
            list(
                send(
                    _Mortal(epoch.first),
                    self._rows(checkpoint_id, task),
                    source=task,
                    attempt_number=self.attempt,
                )
            )
            for task in range(self.parallelism)
        ]
        if epoch.writer_count:
            frames = sorted(frame for frames in sent for frame in frames)
            targets = range(epoch.writer_count)
            sent = [[frame for frame in frames if frame.target == target] for target in targets]
        reports = [write.write(iter(frames), 0) for frames in sent]
        return epoch.prepared(reports)

    def _rows(self, epoch: int, task: int) -> Iterator[pa.RecordBatch]:
        halves = slice(0, ROWS // 2), slice(ROWS // 2, ROWS)
        for half in halves:
            for partition in range(task, self.partitions, self.parallelism):
                values = values_of(self.pipeline, epoch, partition)[half]
                numbers = pa.array([partition] * len(values), pa.int32())
                yield pa.record_batch({"value": pa.array(values), "partition": numbers})
            if half.start == 0:
                self.midway(task)


@dataclass
class SinkJob:
    """One pipeline: asks for epoch after epoch, and again for one that failed, as Spark does.

    What it is given may be changed before the next `restart`.
    """

    name: str
    folder: Path
    sinks: Sequence[Sink]
    parallelism: int = 2
    partitions: int = PARTITIONS
    accepted: frozenset[str] = frozenset()
    trigger_interval_ms: int | None = None
    attempt: int = 0
    on_event: Callable[[c.Event], None] = lambda _: None
    midway: Callable[[int], None] = lambda _: None
    logged: int = 0
    restarts: int = 0
    errors: list[str] = field(default_factory=list)
    _open: tuple[Sinks, Driver] | None = None

    def run_into_a_death(self) -> None:
        """Run the next epoch; the second of its tasks is killed, and the first one is through."""

        def die(task: int) -> None:
            if task == 1:
                raise Death("a task is killed")

        self.midway = die
        with pytest.raises(Death):
            self.run_next()

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

    def run_next(self) -> None:
        """Run one epoch, in the run that there is or in a new one."""
        sinks, driver = self._open or self.start()
        position = {TopicPartition("input", 0): (self.logged + 1) * ROWS}
        offsets = SourceOffsets("another-cluster", "", position)
        request = Request(
            self.logged, (json.dumps(offsets.to_json(), sort_keys=True),), may_skip=False
        )
        engine = TasksEngine(
            self.name,
            sinks,
            self.parallelism,
            self.partitions,
            self.attempt,
            lambda task: self.midway(task),
        )
        driver.run_epoch(request, engine)
        self.logged += 1

    def start(self) -> tuple[Sinks, Driver]:
        """Begin a run, as `Pipeline.start` does."""
        cluster = spark_with(self.parallelism)
        sinks = Sinks(topology_of(self.sinks), self.name, cluster, self.trigger_interval_ms)
        try:
            sinks.check(accepted=self.accepted)
            storage = FileStorage(str(self.folder))
            lineage = f"lineage-of-{self.name}"
            identity = Identity(self.name, lineage, storage.location, self.accepted)
            forward = lambda event: self.on_event(event)  # noqa: E731  whoever listens by then
            self._open = sinks, sinks.make_driver(identity, storage, listener=forward)
        except BaseException:
            sinks.close()
            raise
        return self._open

    def restart(self, *sinks: Sink, **changes: Any) -> None:
        """The run is over; the next epoch begins another, with what is changed."""
        self.restarts += 1
        self.close()
        self.sinks = sinks or self.sinks
        for name, value in changes.items():
            setattr(self, name, value)

    def close(self) -> None:
        """Hang up, and leave everything as it is; what workers keep ends with them."""
        if self._open is not None:
            self._open[0].close()
        self._open = None
        kafka_client._clients.close()
        idle_connections.close()

    def leave(self) -> "SinkJob":
        """Another instance of the same pipeline, while this one is left as it stands."""
        return replace(self, _open=None, errors=[], restarts=0)

    def die_at(self, event: type, occurrence: int = 1) -> None:
        """Run until a fact comes that kills the driver: nobody handles that, nothing is tidied up.

        The listener stays as it was.
        """
        before, remaining = self.on_event, [occurrence]

        def listen(fact: c.Event) -> None:
            remaining[0] -= isinstance(fact, event)
            if not remaining[0]:
                raise Death(event.__name__)

        self.on_event = listen
        try:
            while True:
                self.run_next()
        except Death:
            self.on_event = before

    def expected(self, epochs: Sequence[int] | None = None) -> dict[int, list[str]]:
        """All rows of the epochs that are done, per partition."""
        numbers = range(self.logged) if epochs is None else epochs
        return {
            partition: [row for epoch in numbers for row in values_of(self.name, epoch, partition)]
            for partition in range(self.partitions)
        }


# --- what is there, as others see it --------------------------------------------------------------


def read_topic(
    kafka: EmbeddedKafka,
    topic: str,
    partitions: int = PARTITIONS,
    isolation: str = "read_committed",
) -> dict[int, list[str]]:
    """What an independent client sees, per partition, in order.

    Kafka answers EndTxn before its markers are written: what is being decided is waited for.
    """
    if isolation == "read_committed":
        wait_for(lambda: being_decided(kafka), set(), "transactions that are being decided")
    consumer = Consumer(
        {
            **kafka.confluent_options(),
            "group.id": "audit",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    consumer.assign([Assigned(topic, partition, 0) for partition in range(partitions)])
    rows: dict[int, list[str]] = {partition: [] for partition in range(partitions)}
    unread, deadline = set(rows), time.monotonic() + 60
    while unread:
        assert time.monotonic() < deadline, f"{topic}: partitions {unread} have no end"
        for message in consumer.consume(1_000, 0.05):
            if message.error():
                unread.discard(message.partition())
            else:
                rows[message.partition()].append(message.value().decode())
    consumer.close()
    return rows


def being_decided(kafka: EmbeddedKafka) -> set[str]:
    """Transactions whose end is decided, and not written everywhere."""
    return _listed(kafka, ("PrepareCommit", "PrepareAbort", "PrepareEpochFence"))


def open_ids(kafka: EmbeddedKafka) -> set[str]:
    """Transactions that nobody has decided."""
    client = Client(KafkaConfig(kafka.bootstrap_servers))
    try:
        return list_open_ids(client)
    finally:
        client.close()


def _listed(kafka: EmbeddedKafka, states: tuple[str, ...]) -> set[str]:
    from tallystick.kafka import protocol
    from tallystick.kafka.client import Node

    client, transactions = Client(KafkaConfig(kafka.bootstrap_servers)), set()
    try:
        for broker in client.metadata().brokers:
            answer = client.call(
                lambda: protocol.ListTransactionsRequest(
                    state_filters=list(states), producer_id_filters=[], max_version=0
                ),
                Node(int(broker.node_id)),
                lambda response: [(response.error_code, "listing")],
            )
            transactions |= {str(state.transactional_id) for state in answer.transaction_states}
    finally:
        client.close()
    return transactions


def read_files(folder: Path) -> Counter[str]:
    """The values in the visible Parquet files."""
    dataset = ds.dataset(str(folder), format="parquet")
    return Counter(
        dataset.to_table(columns=["value"])["value"].to_pylist() if dataset.files else []
    )


def flat(rows: Mapping[int, Sequence[str]]) -> Counter[str]:
    """Rows whatever their partition and order."""
    return Counter(row for row_values in rows.values() for row in row_values)


# --- what a run leaves ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What this process holds on to."""

    sockets: tuple[str, ...]
    threads: tuple[str, ...]
    children: tuple[str, ...]

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        tasks = Path("/proc/self/task")
        children = []
        for path in tasks.iterdir():
            with contextlib.suppress(FileNotFoundError):  # a thread that has ended meanwhile
                children.append((path / "children").read_text().split())
        return cls(
            tuple(sorted(os.readlink(link) for link in links if link.is_socket())),
            tuple(sorted(thread.name for thread in threading.enumerate())),
            tuple(sorted(pid for pids in children for pid in pids)),
        )


def assert_nothing_more_is_held(before: Held) -> None:
    """But for what is closed a moment later."""
    deadline = time.monotonic() + 10
    while (now := Held.now()) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not {*now.sockets} - {*before.sockets}
    assert not {*now.threads} - {*before.threads}
    assert not {*now.children} - {*before.children}


def kafka_sink(kafka: EmbeddedKafka, topic: str | None, **settings: Any) -> ts.KafkaSink:
    """One transaction per task, unless told."""
    return ts.KafkaSink(**sink_settings(kafka, topic, **settings))


def sink_settings(kafka: EmbeddedKafka, topic: str | None, **settings: Any) -> dict[str, Any]:
    """Of a `KafkaSink`, as JSON takes them."""
    timeout_ms = settings.setdefault("transaction_timeout_ms", 120_000)
    delivery_ms = min(20_000, timeout_ms - 1)
    options = {
        "kafka.delivery.timeout.ms": str(delivery_ms),
        "kafka.request.timeout.ms": str(min(8_000, delivery_ms - 1)),
        "kafka.socket.connection.setup.timeout.ms": str(min(4_000, delivery_ms - 2)),
    }
    how = {"bootstrap_servers": kafka.bootstrap_servers, "topic": topic, "transactions": "task"}
    return {**how, "options": options, **settings}


@contextmanager
def sink_jobs(folder: Path, names: Iterator[str]) -> Iterator[Callable[..., SinkJob]]:
    """Give a function that makes a job of some sinks; close all jobs at the end.

    Args:
        folder: for the jobs' own folders.
        names: a name for each job.
    """
    jobs: list[SinkJob] = []

    def make(*sinks: Sink, **how: Any) -> SinkJob:
        name = next(names)
        jobs.append(SinkJob(name, folder / name, sinks, **how))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()
