"""What each guarantee lets happen after which fault, of each sink: this much, and nothing else.

exactly_once     a kill anywhere, a broker or a server that dies: every row once
at_least_once    what was not decided is there twice after a kill; nothing is lost
none             the same; and what a broker or server has not taken is missing, silently
"""

import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pytest

import tallystick as ts
from tallystick.epoch import protocol as c
from tallystick.errors import TallystickError
from tallystick.testing import EmbeddedKafka
from tests.failover.sink_job import (
    PARTITIONS,
    SinkJob,
    flat,
    kafka_sink,
    read_files,
    read_topic,
    sink_jobs,
    values_of,
)
from tests.postgres.real_postgres import PostgresServer
from tests.waiting import wait_for

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

GUARANTEES = ("exactly_once", "at_least_once", "none")
names = (f"promised_{number}" for number in count())


@pytest.fixture(scope="module")
def kafka() -> Iterator[EmbeddedKafka]:
    """One broker, which is killed."""
    with EmbeddedKafka() as running:
        yield running


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


class Output(Protocol):
    """One sink, and what is in it for everybody to see."""

    sink: Any

    def seen(self) -> Counter[str]: ...


class Topic:
    def __init__(self, kafka: EmbeddedKafka, guarantee: str) -> None:
        self.topic = kafka.create_topic(next(names), PARTITIONS)
        self.sink = kafka_sink(kafka, self.topic, guarantee=guarantee)
        self._kafka = kafka

    def seen(self) -> Counter[str]:
        return flat(read_topic(self._kafka, self.topic))


class Files:
    def __init__(self, folder: Path, guarantee: str) -> None:
        self.folder = folder
        self.sink = ts.FileSink(str(folder), guarantee=guarantee)

    def seen(self) -> Counter[str]:
        return read_files(self.folder)


class Table:
    def __init__(self, postgres: PostgresServer, guarantee: str, check: str = "true") -> None:
        self._postgres, self.table = postgres, next(names)
        columns = f"value text CONSTRAINT picky CHECK ({check}), partition int"
        postgres.query(f"CREATE TABLE {self.table} ({columns})")
        self.sink = ts.PostgresSink(postgres.dsn, table=self.table, guarantee=guarantee)

    def take_anything(self) -> None:
        self._postgres.query(f"ALTER TABLE {self.table} DROP CONSTRAINT picky")

    def seen(self) -> Counter[str]:
        rows = self._postgres.query(f"SELECT value FROM {self.table}")
        return Counter(value for (value,) in rows)


@pytest.fixture(params=["kafka", "files", "postgres"])
def output_of(
    request: pytest.FixtureRequest,
    kafka: EmbeddedKafka,
    postgres: PostgresServer,
    tmp_path: Path,
) -> Callable[[str], Output]:
    """Makes one sink with a guarantee."""
    outputs: dict[str, Callable[[str], Output]] = {
        "kafka": lambda guarantee: Topic(kafka, guarantee),
        "files": lambda guarantee: Files(tmp_path / "files", guarantee),
        "postgres": lambda guarantee: Table(postgres, guarantee),
    }
    return outputs[request.param]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., SinkJob]]:
    with sink_jobs(tmp_path, names) as make:
        yield make


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_after_a_kill_what_was_not_decided_is_there_twice_but_with_exactly_once(
    output_of: Callable[[str], Output], run: Callable[..., SinkJob], guarantee: str
) -> None:
    """A kill after the decision repeats nothing, whatever the guarantee."""
    output = output_of(guarantee)
    job = run(output.sink)
    job.run_until(1)
    twice: Counter[str] = Counter()
    for event in (c.OutputCounted, c.TransactionCommitted):
        job.die_at(event)
        if event is c.OutputCounted and guarantee != "exactly_once":
            twice = flat(job.expected([job.logged]))
        job.restart()
        job.run_until(job.logged + 1)
    wanted = flat(job.expected()) + twice

    wait_for(output.seen, wanted, "the rows")


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_after_the_kill_of_a_task_its_rows_may_be_there_twice_and_never_less_than_once(
    output_of: Callable[[str], Output], run: Callable[..., SinkJob], guarantee: str
) -> None:
    """The second of two tasks dies; the first one is through, and writes again."""
    output = output_of(guarantee)
    job = run(output.sink)
    job.run_until(1)

    job.run_into_a_death()
    job.restart(midway=lambda _: None)
    job.run_until(3)
    wanted = flat(job.expected())

    wait_for(lambda: wanted - output.seen(), Counter(), "the rows that are missing")
    more = output.seen() - wanted
    assert bool(more) == (guarantee != "exactly_once")
    assert {row.split(":")[1] for row in more} <= {"1"}
    its_own = {1} if guarantee == "none" else set()  # some sinks do not even wait for its end
    assert {int(row.split(":")[2]) % 2 for row in more} <= {0} | its_own


def test_a_broker_that_dies_takes_rows_along_only_where_nobody_waits(
    kafka: EmbeddedKafka, run: Callable[..., SinkJob]
) -> None:
    """It hangs when the rows are sent, and is killed: they are in a socket, and nowhere else.

    It dies once, under a pipeline with each guarantee.
    """
    outputs = {guarantee: Topic(kafka, guarantee) for guarantee in GUARANTEES}
    jobs = {guarantee: run(output.sink) for guarantee, output in outputs.items()}
    for guarantee, job in jobs.items():
        job.run_until(1)
        # With "none", nobody has waited.
        wait_for(outputs[guarantee].seen, flat(job.expected()), "the rows")

    def replace_broker() -> None:
        time.sleep(1)
        kafka.kill(1)
        kafka.restart(1)

    replacing = threading.Thread(target=replace_broker)

    def hang() -> None:
        kafka.pause(1)
        replacing.start()

    all_are_there = threading.Barrier(len(jobs), action=hang, timeout=60)

    def stand(job: SinkJob, task: int) -> None:
        if task == job.parallelism - 1 and replacing.ident is None:
            all_are_there.wait()

    for job in jobs.values():
        job.midway = partial(stand, job)
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda job: job.run_until(2), jobs.values()))
    replacing.join()
    kafka.wait_until_ready()

    for guarantee, job in jobs.items():
        assert_lost_only_where_nobody_waits(kafka, guarantee, job, outputs[guarantee])


def assert_lost_only_where_nobody_waits(
    kafka: EmbeddedKafka, guarantee: str, job: SinkJob, output: Topic
) -> None:
    """Go on until an epoch is there, and look which epochs are not."""

    def arrives(epoch: int) -> bool:
        """Run one more epoch; with "none", its rows may meet a broker that is not at work yet."""
        job.run_until(epoch + 1)
        rows = {row for row in flat(job.expected()) if row.split(":")[1] == str(epoch)}
        deadline = time.monotonic() + 5
        while rows - output.seen().keys() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not rows - output.seen().keys()

    went_on = next(epoch for epoch in range(2, 12) if arrives(epoch))
    lost = {int(row.split(":")[1]) for row in flat(job.expected()) - output.seen()}

    assert job.errors == []
    assert (1 in lost) == (guarantee == "none")
    assert lost <= (set(range(1, went_on)) if guarantee == "none" else set())
    if guarantee == "exactly_once":
        assert read_topic(kafka, output.topic) == job.expected()


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_rows_that_postgres_refuses_are_left_out_only_with_none(
    postgres: PostgresServer,
    run: Callable[..., SinkJob],
    caplog: pytest.LogCaptureFixture,
    guarantee: str,
) -> None:
    """It refuses one of the second task, when the first one is through."""
    output = Table(postgres, guarantee, check="value NOT LIKE '%:1:1:5'")
    job = run(output.sink)
    job.run_until(1)
    if guarantee != "none":
        with pytest.raises(TallystickError, match="check"):
            job.run_until(3)
        assert job.logged == 1
        output.take_anything()
        job.restart()
        job.run_until(3)
        through = values_of(job.name, 1, 0) + values_of(job.name, 1, 2)
        twice = Counter(through if guarantee == "at_least_once" else [])
        assert output.seen() == flat(job.expected()) + twice
        return
    job.run_until(3)
    lost = flat(job.expected()) - output.seen()
    assert f"{job.name}:1:1:5" in lost
    assert {row.rpartition(":")[0] for row in lost} == {f"{job.name}:1:1"}
    assert any(record.levelno >= logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_files_that_cannot_be_written_are_left_out_only_with_none(
    run: Callable[..., SinkJob],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    guarantee: str,
) -> None:
    """The folder is gone, and something else in its place, when a task is half through."""
    output = Files(tmp_path / "files", guarantee)
    job = run(output.sink)
    aside = tmp_path / "aside"

    def take_away(task: int) -> None:
        if task == job.parallelism - 1 and job.logged == 1 and not aside.exists():
            shutil.move(output.folder, aside)
            output.folder.write_text("in the way")

    def bring_back() -> None:
        output.folder.unlink()
        shutil.move(aside, output.folder)

    job.midway = take_away
    job.run_until(1)
    if guarantee != "none":
        with pytest.raises(TallystickError):
            job.run_next()
        bring_back()
        job.restart(midway=lambda _: None)
        job.run_until(3)
        through = values_of(job.name, 1, 0) + values_of(job.name, 1, 2)  # by the first task
        twice = Counter(through if guarantee == "at_least_once" else [])
        assert output.seen() == flat(job.expected()) + twice
        return
    job.run_until(2)
    bring_back()
    job.midway = lambda _: None
    job.run_until(3)
    lost = flat(job.expected()) - output.seen()
    assert {row.rpartition(":")[0] for row in lost} == {f"{job.name}:1:1"}  # of the second task
    assert f"{lost.total()} rows of epoch 1, task 1 are lost" in caplog.text
