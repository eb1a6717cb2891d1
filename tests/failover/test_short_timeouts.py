"""Transactions that are open for too long: refused beforehand, warned about, aborted, run again."""

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tallystick.epoch import protocol as c
from tallystick.errors import OptionError
from tallystick.testing import EmbeddedKafka
from tests.failover.sink_job import PARTITIONS, SinkJob, kafka_sink, open_ids, read_topic
from tests.waiting import wait_for

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

names = (f"late-{number}" for number in count())
MakeJob = Callable[..., SinkJob]


@pytest.fixture(scope="module")
def kafka() -> Iterator[EmbeddedKafka]:
    quick = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}
    with EmbeddedKafka(properties=quick) as running:
        yield running


@pytest.fixture
def make_job(kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[MakeJob]:
    jobs: list[SinkJob] = []

    def make(trigger_interval_ms: int | None = None, **settings: Any) -> SinkJob:
        name = kafka.create_topic(next(names), PARTITIONS)
        sink = kafka_sink(kafka, name, **settings)
        job = SinkJob(name, tmp_path / name, [sink], trigger_interval_ms=trigger_interval_ms)
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        job.close()


@pytest.mark.parametrize("mode", ["epoch", "task"])
def test_more_than_the_broker_allows_is_refused(make_job: MakeJob, mode: str) -> None:
    job = make_job(transactions=mode, transaction_timeout_ms=900_001)
    with pytest.raises(OptionError, match=r"900001, the brokers allow 900000"):
        job.start()


def test_too_little_for_trigger_and_recovery_is_refused_and_one_more_is_not(
    make_job: MakeJob,
) -> None:
    how = {"max_recovery_ms": 60_000, "trigger_interval_ms": 20_000}
    with pytest.raises(OptionError, match="must be more than 80000"):
        make_job(transaction_timeout_ms=80_000, **how).start()
    make_job(transaction_timeout_ms=80_001, **how).run_until(1)


def test_a_recovery_time_is_nothing_for_a_transaction_per_epoch(make_job: MakeJob) -> None:
    with pytest.raises(OptionError, match="nothing is lost however long it takes"):
        make_job(transactions="epoch", max_recovery_ms=1_000)


@pytest.mark.parametrize("mode", ["epoch", "task"])
def test_an_epoch_that_takes_nearly_too_long_is_warned_about_with_its_numbers(
    kafka: EmbeddedKafka, make_job: MakeJob, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """Both of what Flink warns about: in the commit of a running job, and of a restored one."""
    job = make_job(transactions=mode, transaction_timeout_ms=60_000, timeout_warning_share=0.01)

    def pause(event: c.Event) -> None:
        if isinstance(event, c.EpochRan):
            time.sleep(0.7)

    job.on_event = pause
    job.run_until(1)
    warnings = of_timeouts(caplog)
    assert len(warnings) == (2 if mode == "task" else 1)  # one for each transaction
    assert all(
        "% of its timeout of 60000 ms" in warning and "Use a longer" in warning
        for warning in warnings
    )

    job.on_event = lambda _: None
    job.die_at(c.TransactionCommitted)
    time.sleep(0.7)
    caplog.clear()
    job.restart()
    job.run_until(2)
    assert len(of_timeouts(caplog)) == (2 if mode == "task" else 0)
    assert read_topic(kafka, job.name) == job.expected()


@pytest.mark.parametrize("mode", ["epoch", "task"])
def test_an_epoch_in_time_is_not_warned_about(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    job = make_job(transactions=mode)
    job.run_until(3)
    assert of_timeouts(caplog) == []


def test_before_its_first_row_an_epoch_may_take_long(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    """The time that reading takes is not the transaction's: Kafka is asked when it began."""
    job = make_job(transactions="epoch", transaction_timeout_ms=60_000, timeout_warning_share=0.02)
    job.run_until(1)
    job.midway = lambda task: time.sleep(0.7)  # rows are written when all are there
    job.run_until(2)
    assert of_timeouts(caplog) == []


@pytest.mark.parametrize("mode", ["epoch", "task"])
def test_an_epoch_that_took_too_long_runs_again_and_says_why(
    kafka: EmbeddedKafka, make_job: MakeJob, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """Its transactions are aborted before it is decided: nothing of it is lost or repeated."""
    job = make_job(transactions=mode, transaction_timeout_ms=1_500)
    slow = iter([True])

    def wait(event: c.Event) -> None:
        if isinstance(event, c.EpochRan) and next(slow, False):
            wait_for(lambda: open_ids(kafka), set(), "transactions that nobody has decided")

    job.on_event = wait
    job.run_until(2)

    assert read_topic(kafka, job.name) == job.expected()
    if mode == "epoch":
        assert "may be open for 1500 ms" in caplog.text


def of_timeouts(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = (record.getMessage() for record in caplog.records)
    return [text for text in messages if "of its timeout" in text]
