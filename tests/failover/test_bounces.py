"""Brokers and pipelines are bounced, hard and clean, while somebody reads what is committed.

Source: transactions_test of Kafka's system tests: input is copied in transactions while brokers and
clients come and go; a concurrent read_committed reader never sees a duplicate, and all in order.
"""

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as Assigned

from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.testing import EmbeddedKafka
from tests.failover.evidence import replay
from tests.failover.sink_job import PARTITIONS, SinkJob, flat, read_topic, sink_settings
from tests.failover.sink_job_process import JobProcess
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

ROUNDS = int(os.environ.get("SINK_BOUNCES", "1"))
"""How often each broker, and each pipeline, is bounced in each way."""
PARALLELISM = 2
WAYS: dict[str, dict[str, Any]] = {
    "epoch": {"transactions": "epoch"},
    "task": {"transactions": "task"},
    "at_least_once": {"guarantee": "at_least_once"},
}
FALSE_FENCE = "InitProducerId for transactional id '{}': ProducerFenced"
"""See docs/guarantees.md, "Where a guard has an edge": told to a run that nobody has replaced."""
numbers = count()


@pytest.fixture(scope="module", params=[2, 1] if ROUNDS > 1 else [2])
def bounced(request: pytest.FixtureRequest) -> Iterator[EmbeddedKafka]:
    """Three brokers; both transaction versions where there is time."""
    properties = {"leader.imbalance.check.interval.seconds": "1"}
    version = request.param
    with EmbeddedKafka(brokers=3, transaction_version=version, properties=properties) as kafka:
        yield kafka


class Reader:
    """Reads topics while they are written, as soon as something is committed."""

    def __init__(self, kafka: EmbeddedKafka, topics: list[str]) -> None:
        self.rows: dict[str, dict[int, list[str]]] = {
            topic: {partition: [] for partition in range(PARTITIONS)} for topic in topics
        }
        self._consumer = Consumer(
            {
                **kafka.confluent_options(),
                "group.id": "reader",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
            }
        )
        parts = [Assigned(topic, part, 0) for topic in topics for part in range(PARTITIONS)]
        self._consumer.assign(parts)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def epochs(self, topic: str) -> int:
        """How many epochs it has seen something of."""
        ends = [rows[-1] for rows in self.rows[topic].values() if rows]
        return max((int(row.split(":")[1]) + 1 for row in ends), default=0)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        self._consumer.close()

    def _read(self) -> None:
        while not self._over.is_set():
            for message in self._consumer.consume(1_000, 0.1):
                if message.error() is None:
                    rows = self.rows[message.topic()][message.partition()]
                    rows.append(message.value().decode())


class Copying:
    """The pipelines of all ways to write, each in a process of its own."""

    def __init__(self, kafka: EmbeddedKafka, folder: Path, ways: list[str]) -> None:
        self._may_be_fenced_falsely = kafka.transaction_version == 1
        self.topics = {way: f"bounced-{way}-{next(numbers)}" for way in ways}
        for topic in self.topics.values():
            kafka.create_topic(topic, PARTITIONS)
        self._specs = {
            way: {
                "name": topic,
                "folder": str(folder / topic),
                "sinks": [sink_settings(kafka, topic, **WAYS[way])],
                "parallelism": PARALLELISM,
                "pause_s": 0.1,
            }
            for way, topic in self.topics.items()
        }
        self._folder = folder
        self._running: dict[str, JobProcess] = {}
        self.logged = dict.fromkeys(ways, 0)

    def start(self, until_epoch: int = 100_000) -> None:
        for way in self._specs:
            self._start(way, until_epoch)

    def _start(self, way: str, until_epoch: int = 100_000) -> None:
        more = {"logged": self.logged[way], "until": until_epoch}
        self._running[way] = JobProcess(self._folder / f"{way}.log", **self._specs[way], **more)

    def check_alive(self) -> None:
        """Start again what a supervisor would have to; nothing else may have ended."""
        for way, process in list(self._running.items()):
            if process.process.poll() is None:
                continue
            last = self._log(way).rstrip().rpartition("\n")[2]
            is_false_fence = FALSE_FENCE.format(f"tallystick-{self.topics[way]}") in last
            assert self._may_be_fenced_falsely, self._log(way)
            assert is_false_fence, self._log(way)
            process.wait()
            self.logged[way] = process.logged
            self._start(way)

    def stop(self, by: signal.Signals) -> None:
        self.check_alive()
        for way, process in self._running.items():
            process.stop(by)
            self.logged[way] = process.logged

    def finish(self) -> None:
        """Each goes on for a few epochs, and ends in order."""
        last = max(self.logged.values()) + 5
        self.start(last)
        for way, process in self._running.items():
            assert process.wait() == 0, self._log(way)
            self.logged[way] = process.logged
            assert process.logged == last

    def kill(self) -> None:
        for process in self._running.values():
            process.kill()

    def _log(self, way: str) -> str:
        return (self._folder / f"{way}.log").read_text()[-3000:]


def bounce(kafka: EmbeddedKafka, node: int, *, hard: bool) -> None:
    if hard:
        kafka.kill(node)
    else:
        kafka.terminate(node)
    kafka.restart(node)
    kafka.wait_until_in_sync()


def test_what_is_copied_while_everything_is_bounced(bounced: EmbeddedKafka, tmp_path: Path) -> None:
    ways = list(WAYS) if ROUNDS > 1 else ["epoch", "task"]
    copying = Copying(bounced, tmp_path, ways)
    reader = Reader(bounced, list(copying.topics.values()))

    def go_on() -> None:
        """Something becomes visible of each, with all connections as they are now."""
        before = {topic: reader.epochs(topic) for topic in reader.rows}
        for topic, epochs in before.items():
            wait_until(
                partial(is_on, topic, epochs),
                f"no epoch of {topic} is visible behind its epochs {epochs}",
                timeout_s=90,
            )

    def is_on(topic: str, epochs: int) -> bool:
        copying.check_alive()
        return reader.epochs(topic) > epochs

    try:
        copying.start()
        go_on()
        for number in range(ROUNDS):
            bounce(bounced, 1 + number % 3, hard=True)
            go_on()
            copying.stop(signal.SIGKILL)
            copying.start()
            go_on()
            bounce(bounced, 1 + (number + 1) % 3, hard=False)
            go_on()
            copying.stop(signal.SIGINT)
            if number + 1 < ROUNDS:
                copying.start()
                go_on()
        copying.finish()
        for way, topic in copying.topics.items():
            check(bounced, reader, way, topic, copying.logged[way], tmp_path)
    finally:
        reader.stop()
        copying.kill()


def check(
    kafka: EmbeddedKafka, reader: Reader, way: str, topic: str, epochs: int, folder: Path
) -> None:
    job = SinkJob(topic, folder, [], logged=epochs)
    if way == "at_least_once":
        assert not flat(job.expected()) - flat(read_topic(kafka, topic))
        return
    deadline = time.monotonic() + 30
    while reader.rows[topic] != job.expected() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert reader.rows[topic] == job.expected()  # no duplicate, no gap, in order
    client = Client(KafkaConfig(kafka.bootstrap_servers))
    parts = replay(client, topic, PARTITIONS)
    client.close()
    transactions: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for part in parts:
        epochs_of = {value.split(":")[1] for value in part.values}
        assert len(epochs_of) == 1, part
        if part.committed:
            transactions[epochs_of.pop()].add(part.transaction)
    most = 1 if way == "epoch" else PARALLELISM
    counts = {len(epochs_of_id) for epochs_of_id in transactions.values()}
    assert counts == {most}  # one: no epoch is torn
