"""Runs of a sink with one transaction per task follow each other, with more and with fewer tasks.

Source: the behaviours of Flink's FlinkKafkaProducerITCase, KafkaSinkITCase and
KafkaSinkRecoveryITCase.
"""

import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tallystick.epoch import protocol as c
from tallystick.errors import DataLossError, EpochAbortedError, FencedError, OptionError
from tallystick.testing import EmbeddedKafka
from tests.failover.job import Death
from tests.failover.sink_job import (
    Held,
    SinkJob,
    assert_nothing_more_is_held,
    flat,
    kafka_sink,
    open_ids,
    read_topic,
)

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

UNDECIDED = (c.EpochRan, c.ManifestWritten, c.OutputCounted)
DECIDED = (c.TransactionCommitted, c.OutputSettled, c.OutputConfirmed)
RESCALES = ((1, 2), (2, 3), (2, 5), (3, 5), (5, 6), (6, 5), (5, 2), (5, 3), (3, 2), (2, 1))
PARTITIONS = 6
names = (f"rescaled-{number}" for number in count())
MakeJob = Callable[..., SinkJob]


@pytest.fixture
def kafka(tallystick_kafka: EmbeddedKafka) -> EmbeddedKafka:
    return tallystick_kafka


@pytest.fixture
def make_job(kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[MakeJob]:
    """Makes pipelines; after the test nothing is open in Kafka, and nothing held by this process.

    The first connections of a process stay: they are not counted.
    """
    jobs: list[SinkJob] = []
    resources = Held.now()

    def make(parallelism: int = 2, **how: Any) -> SinkJob:
        name = next(names)
        kafka.create_topic(name, PARTITIONS)
        settings = how.pop("sink", {})
        job = SinkJob(
            name,
            tmp_path / name,
            [kafka_sink(kafka, name, **settings)],
            parallelism=parallelism,
            partitions=PARTITIONS,
            **how,
        )
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        job.close()
    assert not {ident for ident in open_ids(kafka) if "rescaled" in ident}
    assert_nothing_more_is_held(resources)


def assert_exact(kafka: EmbeddedKafka, job: SinkJob) -> None:
    """Every row once, in order per partition."""
    assert read_topic(kafka, job.name, PARTITIONS) == job.expected()


@pytest.mark.parametrize("event", [*UNDECIDED, *DECIDED], ids=lambda event: event.__name__)
def test_a_run_that_dies_behind_any_fact_is_gone_on_from(
    kafka: EmbeddedKafka, make_job: MakeJob, event: type
) -> None:
    """testFailBeforeNotify: prepared, and never told that the checkpoint is complete."""
    job = make_job()
    job.run_until(2)
    job.die_at(event)
    is_visible = event in (c.OutputSettled, c.OutputConfirmed)
    seen = read_topic(kafka, job.name, PARTITIONS)
    assert seen == job.expected(range(3 if is_visible else 2))
    job.restart()
    job.run_until(4)

    assert_exact(kafka, job)


@pytest.mark.parametrize("event", [*UNDECIDED, *DECIDED], ids=lambda event: event.__name__)
def test_an_instance_that_was_left_open_finds_that_it_is_replaced(
    kafka: EmbeddedKafka, make_job: MakeJob, event: type
) -> None:
    """testFailBeforeNotifyAndResumeWorkAfterwards: the old one wakes up when the new one is on."""
    new: list[SinkJob] = []

    def overtake(fact: c.Event) -> None:
        if isinstance(fact, event) and old.logged == 2 and not new:
            new.append(old.leave())
            new[0].run_until(4)

    old = make_job(on_event=overtake)
    with pytest.raises(FencedError):
        old.run_until(4)
    new[0].run_until(5)

    assert_exact(kafka, new[0])
    new[0].close()


def test_tasks_that_go_on_while_another_run_took_over_leave_nothing(
    kafka: EmbeddedKafka, make_job: MakeJob
) -> None:
    """They have written half of their rows when the other run begins, and it is through by then."""
    old = make_job()
    old.run_until(1)
    new = old.leave()

    def overtake(_: int) -> None:
        old.midway = lambda _: None
        new.run_until(3)

    old.midway = overtake
    with pytest.raises(FencedError):
        old.run_next()
    new.run_until(4)

    assert_exact(kafka, new)
    new.close()


def test_a_checkpoint_is_restored_twice(kafka: EmbeddedKafka, make_job: MakeJob) -> None:
    """testFailAndRecoverSameCheckpointTwice: what it names is committed already the second time."""
    job = make_job()
    job.run_until(2)
    job.die_at(c.TransactionCommitted)  # epoch 2 is decided, and pending
    for _ in range(2):
        job.restart()
        job.midway = die
        with pytest.raises(Death):  # in epoch 3: epoch 2 is committed before, by the first one
            job.run_until(4)
        job.logged = 2  # nothing of it was logged
        assert read_topic(kafka, job.name, PARTITIONS) == job.expected(range(3))
    job.restart(midway=lambda _: None)
    job.run_until(4)

    assert_exact(kafka, job)


def die(_: int) -> None:
    raise Death("a task is killed")


@pytest.mark.parametrize("pending", [True, False])
def test_of_two_copies_of_a_checkpoint_the_second_one_stops(
    kafka: EmbeddedKafka, make_job: MakeJob, tmp_path: Path, pending: bool
) -> None:
    """Each has a log of decisions of its own: only Kafka can tell that the other one went on."""
    job = make_job()
    job.run_until(2)
    if pending:
        job.die_at(c.TransactionCommitted)
    shutil.copytree(job.folder, tmp_path / "copy")
    copy = job.leave()
    copy.folder = tmp_path / "copy"
    job.restart()
    job.run_until(5)

    with pytest.raises((FencedError, DataLossError)):
        copy.run_until(5)

    assert_exact(kafka, job)
    copy.close()


def test_fewer_tasks_before_the_first_checkpoint(kafka: EmbeddedKafka, make_job: MakeJob) -> None:
    """testScaleDownBeforeFirstCheckpoint: nothing names what the tasks that are gone left open."""
    job = make_job(parallelism=5)
    for _ in range(3):
        job.die_at(c.EpochRan)
        assert len([ident for ident in open_ids(kafka) if job.name in ident]) == 5
        job.restart()
    job.restart(parallelism=2)
    job.run_until(1)

    assert_exact(kafka, job)
    assert not [ident for ident in open_ids(kafka) if job.name in ident]


@pytest.mark.parametrize("event", [c.ManifestWritten, c.TransactionCommitted])
def test_more_tasks_after_fewer(kafka: EmbeddedKafka, make_job: MakeJob, event: type) -> None:
    """testScaleUpAfterScalingDown: 4, 2, 3, with something pending each time."""
    job = make_job(parallelism=4)
    for parallelism in (4, 2, 3):
        job.restart(parallelism=parallelism)
        job.run_until(job.logged + 1)
        job.die_at(event)
    job.restart()
    job.run_until(job.logged + 2)

    assert_exact(kafka, job)


def test_ten_pairs_of_parallelism(kafka: EmbeddedKafka, make_job: MakeJob) -> None:
    """KafkaSinkITCase.rescaleListing, with something pending or something undecided."""
    for number, (before, after) in enumerate(RESCALES):
        job = make_job(parallelism=before)
        job.run_until(1)
        job.die_at((c.ManifestWritten, c.TransactionCommitted)[number % 2])
        job.restart(parallelism=after)
        job.run_until(3)

        assert_exact(kafka, job)


def test_ids_that_run_out_are_told_and_the_next_run_goes_on(
    kafka: EmbeddedKafka, make_job: MakeJob
) -> None:
    """testRestoreToCheckpointAfterExceedingProducersPool: all slots of a task hold something."""
    job = make_job()
    job.run_until(1)
    for attempt in range(16):
        job.restart(attempt=attempt)
        job.die_at(c.EpochRan)
        job.close()
    job.restart(attempt=16)
    with pytest.raises(
        OptionError, match=r"task 0.*16 transactional ids.*spark\.task\.maxFailures"
    ):
        job.run_next()
    job.restart(attempt=15)
    job.run_until(3)

    assert_exact(kafka, job)


def test_with_a_new_prefix_what_is_open_under_the_old_one_is_settled(
    kafka: EmbeddedKafka, make_job: MakeJob
) -> None:
    """As testAbortTransactionsOfPendingCheckpointsAfterFailure has it.

    One of the prefixes is of a run that never left a manifest.
    """
    job = make_job(parallelism=4)
    job.run_until(1)
    for number, event in enumerate([c.ManifestWritten, c.TransactionCommitted, c.EpochRan]):
        job.die_at(event)
        new = kafka_sink(kafka, job.name, transactional_id_prefix=f"team-{number}-")
        job.restart(new, parallelism=2)
        job.run_until(job.logged + 1)
        assert_exact(kafka, job)
        assert not [ident for ident in open_ids(kafka) if job.name in ident]


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_job_whose_tasks_fail_recovers_by_itself(
    kafka: EmbeddedKafka, make_job: MakeJob, guarantee: str
) -> None:
    """KafkaSinkRecoveryITCase: a failing mapper, with each guarantee."""
    failures = iter([True, False, True, True, False, True])

    def fail(_: int) -> None:
        if next(failures, False):
            raise EpochAbortedError("this task failed, by a test")

    job = make_job(midway=fail, sink={"guarantee": guarantee})
    job.run_until(5)

    if guarantee == "exactly_once":
        assert_exact(kafka, job)
    seen = flat(read_topic(kafka, job.name, PARTITIONS))
    assert not flat(job.expected()) - seen
