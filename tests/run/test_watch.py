"""The report of a run: progress each 30 s, waiting and outages after 3 s with the reason."""

import logging
import time
from typing import Any

import pytest

from tallystick.kafka.outages import OUTAGES
from tallystick.pipeline import watch as watch_module
from tallystick.pipeline.listeners import PIPELINES
from tallystick.pipeline.watch import RunWatch
from tallystick.run.console import Console

NAME = "watched"
SERVERS = "kafka-of-the-watch:9092"


class Drawn(Console):
    """Keeps the live line."""

    line = ""

    def draw(self, text: str) -> None:
        self.line = text


class Watched:
    """A watch whose time passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.now_s = 1_000.0
        self.idle_since_s: float | None = None
        self._caplog = caplog
        monkeypatch.setattr(watch_module.time, "monotonic", lambda: self.now_s)
        caplog.set_level(logging.INFO, "tallystick")
        self.console = Drawn(NAME)
        self.watch = RunWatch(NAME, [SERVERS], self.console)

    def start(self, hint: str = "") -> None:
        self.watch.started(lambda: self.idle_since_s, "reads in", hint)

    def pass_by(self, seconds: float) -> list[str]:
        """Let time pass, in steps as the thread takes them; return the new lines."""
        self._caplog.clear()
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            self.watch.look(self.now_s)
        return [record.getMessage() for record in self._caplog.records]

    def epoch(self, number: int, records: int) -> None:
        progress = {"batchId": number, "numInputRows": records, "sources": []}
        self.watch.note({**progress, "durationMs": {"triggerExecution": 200}})


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    return Watched(monkeypatch, caplog)


def test_a_line_each_30_s_has_what_was_done_since_the_one_before(watched: Watched) -> None:
    watched.start()
    watched.epoch(7, 600)
    PIPELINES[NAME].rows_written += 500
    assert watched.pass_by(29) == []
    first = watched.pass_by(1)
    watched.epoch(8, 30)
    second = watched.pass_by(30)

    assert len(first) == len(second) == 1
    assert first[0].startswith(
        f"{NAME}: in 30 s 600 records (20/s), 500 rows, 1 epochs; lag not known, last commit "
    )
    assert second[0].startswith(f"{NAME}: in 30 s 30 records (1/s), 0 rows, 1 epochs; ")
    assert "(epoch 8)" in second[0]


def test_a_run_without_records_says_after_3_s_that_it_waits_and_why(watched: Watched) -> None:
    watched.start(": the run began at the end")
    watched.epoch(1, 0)  # in which a new pipeline keeps where it began
    watched.idle_since_s = watched.now_s
    assert watched.pass_by(2.5) == []

    assert watched.pass_by(0.5) == [
        f"{NAME}: waits for records: there is none to read: the run began at the end"
    ]
    assert watched.pass_by(20) == [], "once"
    assert "waiting for records (23 s)" in watched.console.line


def test_a_trickle_of_records_does_not_fill_the_log_with_waiting(watched: Watched) -> None:
    watched.start()
    lines = []
    for number in range(12):
        watched.epoch(number, 1)
        watched.idle_since_s = None
        lines += watched.pass_by(0.5)
        watched.idle_since_s = watched.now_s
        lines += watched.pass_by(4.5)

    assert sum("waits for records" in line for line in lines) <= 2


def test_an_outage_is_reported_with_the_reason_of_each_server_and_its_end(
    watched: Watched,
) -> None:
    OUTAGES.fails(SERVERS, "a:9092", ConnectionRefusedError(111, "Connection refused"))
    OUTAGES.fails(SERVERS, "b:9092", TimeoutError())
    assert watched.pass_by(2.5) == []
    OUTAGES.fails(SERVERS, "a:9092", ConnectionRefusedError(111, "Connection refused"))

    assert watched.pass_by(0.5) == [
        f"{NAME}: Kafka does not answer for 3 s, and is asked again: a:9092: connection refused; "
        f"b:9092: no answer in time"
    ]
    watched.pass_by(1)
    assert "Kafka does not answer (4 s)" in watched.console.line
    OUTAGES.answers(SERVERS, "a:9092")
    OUTAGES.answers(SERVERS, "b:9092")
    assert watched.pass_by(0.5) == [f"{NAME}: Kafka answers again, after 4 s"]


def test_the_end_is_a_line_with_the_sums(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.start()
    watched.epoch(3, 10)
    watched.now_s += 60
    watched.watch.ended(None)

    assert f"{NAME}: ended after 60 s: 1 epochs, 10 records read, 0 rows written" in caplog.text


def test_an_epoch_that_takes_much_longer_than_those_before_is_warned_about_once(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.start()
    watched.epoch(1, 10)
    watched.epoch(2, 10)
    monkeypatch.setattr(PIPELINES[NAME], "open_since_ms", int((time.time() - 14) * 1000))
    assert watched.pass_by(1) == []
    monkeypatch.setattr(PIPELINES[NAME], "open_since_ms", int((time.time() - 16) * 1000))
    (line,) = watched.pass_by(2)
    assert "an epoch is under way for 16 s, and none took longer than 0.2 s: a function" in line
