"""Attempts of tasks that begin to write after the newest epoch was decided: the run's end."""

import logging
from pathlib import Path

import pytest

from tallystick.checkpoint.decision_log import DecisionLog
from tallystick.epoch.facts import Identity, Request
from tallystick.epoch.two_phase import Committable, Lost
from tallystick.errors import StorageError
from tallystick.ports import EpochResult
from tallystick.run.driver import Driver
from tallystick.state.catalog import StepState
from tallystick.storage.file_storage import FileStorage, SystemClock
from tallystick.values import Producer

COUNTS, STRAY = (Committable("sink", 0, 0, name, 1, 1) for name in ("counts", "stray"))


class Sink:
    """Engine and participant: what is open there, and what is visible."""

    def __init__(self) -> None:
        self.open: list[Committable] = []
        self.visible: list[Committable] = []
        self.aborts = 0
        self.refuses = False

    def run_epoch(self, *_: int | Producer | tuple[StepState, ...]) -> EpochResult:
        self.open.append(COUNTS)
        return EpochResult((), committables=(COUNTS,), has_strays=True)

    def commit(self, committables: tuple[Committable, ...]) -> tuple[Lost, ...]:
        self.visible += committables
        self.open = [each for each in self.open if each not in committables]
        return ()

    def lingering(self) -> tuple[Committable, ...]:
        return tuple(self.open)

    def abort(self, committables: tuple[Committable, ...]) -> None:
        if self.refuses:
            raise StorageError("not now")
        self.aborts += 1
        self.open = [each for each in self.open if each not in committables]

    def check_prepared(self, committables: tuple[Committable, ...]) -> None: ...

    check_newest = check_prepared


def started(folder: Path, sink: Sink) -> Driver:
    storage, clock = FileStorage(str(folder)), SystemClock()
    identity = Identity("job", "L", storage.location)
    log = DecisionLog(storage, clock, "tallystick-job", kept_slots=3)
    return Driver(identity, log, storage, clock, participants=sink)


def run(driver: Driver, sink: Sink, epoch: int = 0) -> None:
    driver.run_epoch(Request(epoch, (f'{{"to": {epoch}}}',), may_skip=False), sink)


def test_the_end_of_a_run_aborts_them_and_nothing_that_counts(tmp_path: Path) -> None:
    sink = Sink()
    driver = started(tmp_path, sink)
    run(driver, sink)
    sink.open = [COUNTS, STRAY]  # the first, as where the commit's markers are still written

    driver.abort_strays()

    assert (sink.open, sink.visible) == ([COUNTS], [COUNTS])


def test_a_run_that_is_replaced_leaves_them_to_its_successor(tmp_path: Path) -> None:
    sink = Sink()
    driver = started(tmp_path, sink)
    run(driver, sink)
    run(started(tmp_path, sink), sink, epoch=1)
    sink.open, before = [STRAY], sink.aborts

    driver.abort_strays()

    assert sink.open == [STRAY]
    assert sink.aborts == before


def test_a_sink_that_does_not_answer_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Sink()
    driver = started(tmp_path, sink)
    run(driver, sink)
    sink.open, sink.refuses = [STRAY], True

    with caplog.at_level(logging.WARNING):
        driver.abort_strays()

    assert "tallystick recover" in caplog.text
    assert "not now" in caplog.text
