"""Killed between decision and commit, and down for longer than transactions may stay open.

Flink loses the output of such a checkpoint, and looks healthy. Here: nothing is lost, or the loss
is named, and a person decides.
"""

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest

import tallystick as ts
from tallystick.epoch import protocol as c
from tallystick.epoch.two_phase import Committable, Outcome
from tallystick.errors import DataLossError
from tallystick.kafka.task_sink import KafkaTaskSink
from tallystick.testing import EmbeddedKafka
from tests.failover.job import Death
from tests.failover.sink_job import (
    PARTITIONS,
    ROWS,
    SinkJob,
    flat,
    kafka_sink,
    open_ids,
    read_files,
    read_topic,
    sink_settings,
)
from tests.failover.sink_job_process import JobProcess
from tests.postgres.real_postgres import PostgresServer
from tests.waiting import wait_for

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

TIMEOUT_MS = 1_500
"""Long enough for an epoch, also on a busy machine."""
ALL_VERSIONS = int(os.environ.get("SINK_BOUNCES", "1")) > 1
"""`make stress` has the time."""
names = (f"down-{number}" for number in count())
MakeJob = Callable[..., SinkJob]


@pytest.fixture(
    scope="module", params=[2, 1] if ALL_VERSIONS else [2], ids=lambda version: f"version-{version}"
)
def kafka(request: pytest.FixtureRequest) -> Iterator[EmbeddedKafka]:
    """It looks for transactions that timed out five times a second, not every ten."""
    quick = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}
    with EmbeddedKafka(transaction_version=request.param, properties=quick) as running:
        yield running


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def make_job(kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[MakeJob]:
    """Makes pipelines whose first two epochs are done, and which have little time from now on."""
    jobs: list[SinkJob] = []

    def make(transactions: str, *others: Any) -> SinkJob:
        name = next(names)
        kafka.create_topic(name, PARTITIONS)
        patient = kafka_sink(kafka, name, transactions=transactions)
        job = SinkJob(name, tmp_path / name, [patient, *others])
        jobs.append(job)
        job.run_until(2)
        hasty = kafka_sink(
            kafka, name, transactions=transactions, transaction_timeout_ms=TIMEOUT_MS
        )
        job.restart(hasty, *others)
        job.start()
        return job

    yield make
    for job in jobs:
        job.close()


def stay_down(kafka: EmbeddedKafka) -> None:
    """For so long that Kafka has given up everything."""
    wait_for(lambda: open_ids(kafka), set(), "transactions that nobody has decided")


def die_in_the_commit(job: SinkJob, committed: int, patch: pytest.MonkeyPatch) -> None:
    """Run an epoch whose driver dies when it has committed so many of its transactions."""
    commit, permits = KafkaTaskSink.commit_by, Semaphore(committed)  # they run beside each other

    def die(self: KafkaTaskSink, committable: Committable, until: float) -> Outcome:
        if not permits.acquire(blocking=False):
            raise Death("between two commits")
        return commit(self, committable, until)

    with patch.context() as patched:
        patched.setattr(KafkaTaskSink, "commit_by", die)
        with pytest.raises(Death):
            job.run_next()


def restart_in_time(kafka: EmbeddedKafka, job: SinkJob, **changes: Any) -> None:
    """With a timeout that does not come into play any more."""
    first, *others = job.sinks
    assert isinstance(first, ts.KafkaSink)
    patient = kafka_sink(kafka, job.name, transactions=first.transactions)
    job.restart(patient, *others, **changes)


def test_with_a_transaction_per_epoch_nothing_is_lost(
    kafka: EmbeddedKafka, make_job: MakeJob, tmp_path: Path
) -> None:
    """What timed out was not decided, and runs again; also the other sink's part of it."""
    jobs = {
        event: make_job("epoch", ts.FileSink(str(tmp_path / event.__name__)))
        for event in (c.EpochRan, c.OutputCounted, c.TransactionCommitted)
    }
    for event, job in jobs.items():
        job.die_at(event)
    stay_down(kafka)
    for event, job in jobs.items():
        restart_in_time(kafka, job)
        job.run_until(4)

        assert read_topic(kafka, job.name) == job.expected()
        assert read_files(tmp_path / event.__name__) == flat(job.expected())


def test_with_a_transaction_per_task_all_that_is_lost_is_run_again(
    kafka: EmbeddedKafka, make_job: MakeJob
) -> None:
    """Whether it was decided or not: nothing of it was visible."""
    jobs = {
        event: make_job("task") for event in (c.EpochRan, c.ManifestWritten, c.TransactionCommitted)
    }
    for event, job in jobs.items():
        job.die_at(event)
    stay_down(kafka)
    for job in jobs.values():
        assert read_topic(kafka, job.name) == job.expected()
        restart_in_time(kafka, job)
        job.run_until(4)

        assert read_topic(kafka, job.name) == job.expected()


def test_what_is_lost_again_and_again_is_run_until_it_is_not(
    kafka: EmbeddedKafka, make_job: MakeJob
) -> None:
    """The replay is down for too long as well."""
    job = make_job("task")
    for _ in range(2):
        job.die_at(c.TransactionCommitted)
        stay_down(kafka)
        job.restart()
    restart_in_time(kafka, job)
    job.run_until(4)

    assert read_topic(kafka, job.name) == job.expected()


def test_with_a_transaction_per_task_a_part_that_is_lost_stops_the_pipeline(
    kafka: EmbeddedKafka, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, every time, until a person says how to go on."""
    job = make_job("task")
    die_in_the_commit(job, 1, monkeypatch)
    stay_down(kafka)

    messages = []
    for _ in range(2):  # a restart does not make it good
        job.restart()
        with pytest.raises(DataLossError) as raised:
            job.run_next()
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert_named(messages[0], job, task=1, partitions=[1])
    (accept,) = re.findall(r"accept='([^']+)'", messages[0])
    assert accept == "lost-output-of-epoch-2"
    job.restart(kafka_sink(kafka, job.name), accepted=frozenset({accept}))
    job.run_until(5)
    job.restart(accepted=frozenset())
    job.run_until(6)

    without = {partition: list(rows) for partition, rows in job.expected().items()}
    without[1] = [row for row in without[1] if f"{job.name}:2:" not in row]
    assert read_topic(kafka, job.name) == without


def assert_named(message: str, job: SinkJob, task: int, partitions: list[int]) -> None:
    """The error says which transactions, how many records, where they were, and of which input."""
    assert f"'tallystick-{job.name}/lineage-of-{job.name}/kafka-1/{task}/0'" in message
    assert f"1 of its 2 transactions with {ROWS * len(partitions)} records" in message
    for partition in partitions:
        assert re.search(rf"{job.name}-{partition} offsets \d+\.\.\d+", message)
    assert f"input-0 up to offset {3 * ROWS}" in message


@pytest.mark.parametrize("way", ["prepared", "staged"])
def test_postgres_beside_it_never_times_out(
    kafka: EmbeddedKafka, make_job: MakeJob, postgres: PostgresServer, way: str
) -> None:
    """With one Kafka transaction the two agree; with one per task what Kafka lost is named."""
    jobs: dict[str, SinkJob] = {}
    for mode in ("epoch", "task"):
        table = f"{way}_{mode}_{kafka.transaction_version}"
        postgres.query(f"CREATE TABLE {table} (value text, partition int)")
        beside = ts.PostgresSink(postgres.dsn, table=table, transactions=way)
        jobs[table] = make_job(mode, beside)
        jobs[table].die_at(c.TransactionCommitted)
    stay_down(kafka)
    for table, job in jobs.items():
        restart_in_time(kafka, job)
        lost: Counter[str] = Counter()
        if "task" in table:
            with pytest.raises(DataLossError, match="2 of its 4 transactions") as raised:
                job.run_next()
            (accept,) = re.findall(r"accept='([^']+)'", str(raised.value))
            job.restart(accepted=frozenset({accept}))
            lost = flat(job.expected([2]))
        job.run_until(4)
        assert flat(read_topic(kafka, job.name)) == flat(job.expected()) - lost
        values = Counter(value for (value,) in postgres.query(f"SELECT value FROM {table}"))
        assert values == flat(job.expected())
        job.close()
    assert postgres.query("SELECT gid FROM pg_prepared_xacts") == []


def test_a_process_that_is_killed_and_down_for_too_long(
    kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    """The crash in which Flink loses a checkpoint: kill -9 where the checkpoint is durable."""

    def spec_of(mode: str) -> dict[str, Any]:
        how = {"transactions": mode, "transaction_timeout_ms": TIMEOUT_MS}
        name = kafka.create_topic(next(names), PARTITIONS)
        sinks = [sink_settings(kafka, name, **how)]
        return {"name": name, "folder": str(tmp_path / name), "sinks": sinks, "until": 8}

    specs = {mode: spec_of(mode) for mode in ("epoch", "task")}
    decided = {"epoch": "OutputCounted", "task": "TransactionCommitted"}
    killed = {
        mode: JobProcess(tmp_path / f"{mode}.log", **spec, kill_at=decided[mode], occurrence=5)
        for mode, spec in specs.items()
    }
    assert {process.wait() for process in killed.values()} == {-signal.SIGKILL}
    stay_down(kafka)
    for mode, spec in specs.items():
        name = spec["name"]
        sinks = [ts.KafkaSink(**options) for options in spec["sinks"]]
        with closing(SinkJob(name, tmp_path / name, sinks, logged=killed[mode].logged)) as job:
            job.run_until(spec["until"])
            assert read_topic(kafka, name) == job.expected()
