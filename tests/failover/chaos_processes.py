"""What is killed in a campaign: a driver, and the tasks that outlive it.

    python -m tests.failover.chaos_processes '{"servers": …}'

The tasks are processes of their own, as Spark's are. When their driver is gone they become
zombies: they go on writing with its producer, right after what it knows of, for a while.
"""

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tallystick.epoch.protocol import EpochRan
from tallystick.errors import EpochAbortedError, ForeignRowsError, RetriableError
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.writer import KafkaProduce
from tallystick.state.catalog import StepState
from tallystick.tasks.read import Report, WritePlan
from tallystick.values import Producer, TopicPartition
from tests.failover.job import Job
from tests.failover.known_rows import Shape
from tests.failover.wire import write_as_zombie

ROOT = Path(__file__).parents[2]
RUN = "runpy.run_module('tests.failover.chaos_processes', run_name='__main__')"
TASK_COUNT = 2
ZOMBIE_S = 2.0
ZOMBIE_TIMEOUT_MS = 300
ZOMBIE_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Settings:
    """What all processes of a campaign know."""

    servers: str
    topic: str
    partition_count: int
    folder: str
    transaction_version: int

    @property
    def shape(self) -> Shape:
        partitions = tuple(range(self.partition_count))
        return Shape("chaos", self.topic, partitions, batch_count=5, batch_rows=10)

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder, "checkpoint")

    def config(self, client_id: str) -> KafkaConfig:
        return KafkaConfig(self.servers, client_id=client_id, delivery_timeout_ms=60_000)

    @property
    def command(self) -> list[str]:
        """How a driver is started, from any folder."""
        start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import runpy; {RUN}"
        return [sys.executable, "-c", start, json.dumps(asdict(self))]

    def tell(self, **facts: object) -> None:
        """Add a line to the campaign's diary; whole, whoever is killed meanwhile."""
        line = json.dumps(facts).encode() + b"\n"
        diary = os.open(Path(self.folder, "diary"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(diary, line)
        os.close(diary)

    def diary(self) -> list[dict[str, Any]]:
        """All that was told."""
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in Path(self.folder, "diary").open()]
        return []

    @property
    def logged(self) -> int:
        """How many epochs are done, as Spark's commit log would say."""
        with contextlib.suppress(FileNotFoundError):
            return int(Path(self.folder, "logged").read_text())
        return 0

    def log(self, epochs: int) -> None:
        draft = Path(self.folder, f"logged.{os.getpid()}")
        draft.write_text(str(epochs))
        draft.rename(Path(self.folder, "logged"))


class Task:
    """A task as a fork of its driver, in a session of its own; to be made before any client.

    Args:
        settings: of the campaign.
        index: its number.
        others: the tasks before it, whose pipes the fork must not keep open.
    """

    def __init__(self, settings: Settings, index: int, others: "list[Task]") -> None:
        orders, self._orders = os.pipe()
        self._reports, reports = os.pipe()
        if os.fork():
            os.close(orders)
            os.close(reports)
            self.stdin, self.stdout = os.fdopen(self._orders, "w"), os.fdopen(self._reports)
            return
        os.setsid()
        for number in (self._orders, self._reports):
            os.close(number)
        for other in others:
            other.stdin.close()
            other.stdout.close()
        sys.stdin, sys.stdout = os.fdopen(orders), os.fdopen(reports, "w")
        try:
            be_task(settings, index)
        except BaseException:
            traceback.print_exc()
        os._exit(0)


class TaskProcesses:
    """The Engine port: writes with processes that do not end when their driver is killed."""

    def __init__(self, settings: Settings) -> None:
        self._tasks: list[Task] = []
        for index in range(TASK_COUNT):
            self._tasks.append(Task(settings, index, self._tasks))

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> EpochRan:
        order = json.dumps({"epoch": checkpoint_id, "producer": asdict(producer)})
        for task in self._tasks:
            task.stdin.write(order + "\n")
            task.stdin.flush()
        reports = [self._report(task) for task in self._tasks]
        for report in reports:
            if report.failure is not None:
                raise report.failure.to_error()
        return EpochRan(tuple(produced for report in reports for produced in report.produced))

    def _report(self, task: Task) -> Report:
        line = task.stdout.readline()
        if not line:
            raise EpochAbortedError("a task is gone")
        return Report.from_json(line)


def be_task(settings: Settings, index: int) -> None:
    """Write what the driver orders; once it is gone, write what nobody ordered."""
    config = settings.config(f"task-{index}")
    partitions = settings.shape.partitions[index::TASK_COUNT]
    producer: Producer | None = None
    for line in sys.stdin:
        order = json.loads(line)
        producer = Producer(**order["producer"])
        plan = WritePlan(KafkaProduce(config, settings.transaction_version), producer)
        report = plan.write(settings.shape.frames(order["epoch"], partitions), attempt_number=0)
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(report.to_json() + "\n")
            sys.stdout.flush()
    if producer is not None:
        settings.tell(zombie=be_zombie(settings, producer, partitions))
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.close()


def be_zombie(
    settings: Settings, producer: Producer, partitions: tuple[int, ...]
) -> dict[str, int]:
    """Write after the last row of each partition, and from its first row on; how it went."""
    client = Client(settings.config("zombie"))
    answers: Counter[str] = Counter()
    following = dict.fromkeys(partitions, settings.shape.row_count)
    end = time.monotonic() + ZOMBIE_S
    while time.monotonic() < end:
        for partition in partitions:
            for sequence in (following[partition], 0):
                where = TopicPartition(settings.topic, partition)
                answer = write_as_zombie(client, producer, where, sequence, ZOMBIE_TIMEOUT_MS)
                answers[answer] += 1
                following[partition] += answer == "accepted" and sequence > 0
        time.sleep(ZOMBIE_PAUSE_S)
    client.close()
    return dict(answers)


class Foreign:
    """What a ForeignRowsError tells, taken apart."""

    def __init__(self, epoch: int, rows: dict[str, int], accept: str) -> None:
        self.epoch, self.rows, self.accept = epoch, rows, accept

    @classmethod
    def of(cls, error: ForeignRowsError) -> Self:
        text = str(error)
        (epoch,) = re.findall(r"epoch (\d+) is committed", text)
        (accept,) = re.findall(r"accept='([^']+)'", text)
        rows = {partition: int(n) for partition, n in re.findall(r"-(\d+): (\d+)", text)}
        return cls(int(epoch), rows, accept)


def run_job(settings: Settings, job: Job, until: int | None = None) -> None:
    """Epoch after epoch; a query that failed is started again, with what has to be accepted."""
    while until is None or job.logged < until:
        began = time.monotonic()
        try:
            job.run_next()
        except ForeignRowsError as error:
            foreign = Foreign.of(error)
            settings.tell(foreign={"epoch": foreign.epoch, "rows": foreign.rows})
            job.accepted |= {foreign.accept}
            job.restart()
        except RetriableError as error:
            settings.tell(failed=str(error), epoch=job.logged)
            job.restart()
        else:
            settings.log(job.logged)
            obstacles = job.broker.client.obstacles
            settings.tell(
                epoch=job.logged, seconds=time.monotonic() - began, obstacles=dict(obstacles)
            )
            obstacles.clear()


def be_driver(settings: Settings) -> None:
    """Run epochs until something kills this process."""
    run_job(
        settings,
        Job(
            settings.shape,
            settings.config("driver"),
            settings.checkpoint,
            engine=TaskProcesses(settings),
            logged=settings.logged,
        ),
    )


if __name__ == "__main__":
    be_driver(Settings(**json.loads(sys.argv[1])))
