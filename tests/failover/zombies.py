"""A second live attempt of a writing task, as a process of its own that wants its rows committed.

    python -m tests.failover.zombies '{"servers": …, "topic": …, "transaction_version": 2}'

It is told the producer of the first attempt, and where that one stands in each partition. Once
released, it writes one row after the other, to one partition after the other, each with the right
next sequence number, until Kafka has refused it in each.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tallystick.epoch import protocol as c
from tallystick.errors import ForeignRowsError
from tallystick.kafka.audit import producer_states
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.testing.process import ProcessGroup
from tallystick.values import ProducedRange, Producer, TopicPartition
from tests.failover.chaos_processes import Foreign
from tests.failover.job import Job
from tests.failover.wire import write_as_zombie

ROOT = Path(__file__).parents[2]
RUN = "runpy.run_module('tests.failover.zombies', run_name='__main__')"
TIMEOUT_MS = 5_000
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Haunt:
    """The answers to the rows of one release, and how many rows Kafka took, by partition."""

    answers: dict[str, int]
    accepted: dict[int, int]

    @classmethod
    def from_json(cls, line: str) -> Self:
        fields = json.loads(line)
        return cls(
            fields["answers"], {int(name): count for name, count in fields["accepted"].items()}
        )


class Zombie:
    """The process, as the driver's process sees it: `prepare`, `release`, `wait_for_end`."""

    def __init__(self, servers: str, topic: str, transaction_version: int) -> None:
        start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import runpy; {RUN}"
        order = json.dumps(
            {"servers": servers, "topic": topic, "transaction_version": transaction_version}
        )
        self._has_begun = False
        self._group = ProcessGroup()
        self._process: subprocess.Popen[str] = self._group.start(
            [sys.executable, "-c", start, order],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def prepare(self, producer: Producer, produced: Iterable[ProducedRange]) -> None:
        """Tell it where the first attempt stands, and wait until it has its connections."""
        stands = {transaction.partition: transaction.record_count for transaction in produced}
        self._tell({"producer": asdict(producer), "stands": stands})
        assert self._hear() == "ready\n"

    def release(self, after_s: float = 0.0) -> None:
        """Let it write, so much later; this call does not wait."""
        self._tell({"after_s": after_s})
        self._has_begun = False

    def wait_for_first_row(self) -> None:
        """Wait until Kafka has answered its first row."""
        if not self._has_begun:
            assert self._hear() == "begun\n"
        self._has_begun = True

    def wait_for_end(self) -> Haunt:
        """Wait until it is refused everywhere."""
        self.wait_for_first_row()
        return Haunt.from_json(self._hear())

    def close(self) -> None:
        """Kill it."""
        self._group.close()

    def _tell(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the zombie is dead"
        return line


@dataclass(frozen=True, slots=True)
class HauntedEpoch:
    """What became of the zombie's rows in one epoch; rows are counted by partition."""

    epoch: int
    answers: dict[str, int]
    accepted: dict[int, int]
    reported: dict[int, int]
    """Those that a ForeignRowsError told of."""
    is_repeated: bool
    """The count before the commit found them, and the epoch ran again."""


def run_haunted(
    job: Job,
    zombie: Zombie,
    epochs: int,
    at: type,
    *,
    after_s: Callable[[], float] = lambda: 0.0,
    is_waited_for: bool = False,
) -> Iterator[HauntedEpoch]:
    """Run epochs with a zombie in each, and go on as a person would who accepts its rows.

    Args:
        job: begins another run, with another listener.
        zombie: is released once in each epoch.
        epochs: how many.
        at: the event of the protocol that releases it.
        after_s: how much later it begins.
        is_waited_for: the driver stands at the event until the first row is answered.
    """
    runs: list[c.EpochRan] = []

    def listen(event: c.Event) -> None:
        if isinstance(event, c.EpochRan):
            runs.append(event)
            if len(runs) == 1:
                assert job.producer is not None
                zombie.prepare(job.producer, event.produced)
        if isinstance(event, at) and len(runs) == 1:
            zombie.release(after_s())
            if is_waited_for:
                zombie.wait_for_first_row()

    job.on_event = listen
    job.restart()
    for _ in range(epochs):
        runs.clear()
        reported: dict[int, int] = {}
        try:
            job.run_next()
        except ForeignRowsError as error:
            foreign = Foreign.of(error)
            assert foreign.epoch == job.logged
            reported = {int(partition): count for partition, count in foreign.rows.items()}
            job.accepted |= {foreign.accept}
            job.restart()
            job.run_next()  # finds the epoch committed, and confirms it
        haunt = zombie.wait_for_end()
        yield HauntedEpoch(
            job.logged - 1, haunt.answers, haunt.accepted, reported, is_repeated=len(runs) > 1
        )


def be_zombie(servers: str, topic: str, transaction_version: int) -> None:
    """Do what is ordered, line by line."""
    client = Client(KafkaConfig(servers, client_id="zombie"))
    for line in sys.stdin:
        order = json.loads(line)
        if "producer" in order:
            producer = Producer(**order["producer"])
            stands = {
                TopicPartition(topic, int(number)): n for number, n in order["stands"].items()
            }
            states = producer_states(client, producer, stands) or {}  # of all leaders: it connects
            assert {state: states[state].last_sequence + 1 for state in states} == stands
            print("ready", flush=True)
            continue
        time.sleep(order["after_s"])
        print(json.dumps(asdict(haunt(client, producer, stands, transaction_version))), flush=True)


def haunt(
    client: Client,
    producer: Producer,
    stands: dict[TopicPartition, int],
    transaction_version: int,
) -> Haunt:
    """Write until each partition has refused a row."""
    answers: Counter[str] = Counter()
    following, deadline = dict(stands), time.monotonic() + PATIENCE_S
    waiting = list(stands)
    while waiting:
        assert time.monotonic() < deadline, f"Kafka goes on to accept rows: {answers}"
        for partition in list(waiting):
            sequence = following[partition]
            answer = write_as_zombie(
                client, producer, partition, sequence, TIMEOUT_MS, transaction_version
            )
            if not answers:
                print("begun", flush=True)
            answers[answer] += 1
            if answer == "accepted":
                following[partition] += 1
            else:
                waiting.remove(partition)
    more = {place.partition: following[place] - stood for place, stood in stands.items()}
    return Haunt(dict(answers), {partition: count for partition, count in more.items() if count})


if __name__ == "__main__":
    be_zombie(**json.loads(sys.argv[1]))
