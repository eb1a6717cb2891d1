"""Attempts of tasks that begin to write after the newest epoch was decided: the run's end."""

import logging
from pathlib import Path

import pytest

from tallystick.epoch.two_phase import Committable
from tests.run.one_sink import Sink, run, started

COUNTS, STRAY = (Committable("sink", 0, 0, name, 1, 1) for name in ("counts", "stray"))


def test_the_end_of_a_run_aborts_them_and_nothing_that_counts(tmp_path: Path) -> None:
    sink = Sink(COUNTS)
    driver = started(tmp_path, sink)
    run(driver, sink)
    sink.open = [COUNTS, STRAY]  # the first, as where the commit's markers are still written

    driver.abort_strays()

    assert (sink.open, sink.visible) == ([COUNTS], [COUNTS])


def test_a_run_that_is_replaced_leaves_them_to_its_successor(tmp_path: Path) -> None:
    sink = Sink(COUNTS)
    driver = started(tmp_path, sink)
    run(driver, sink)
    run(started(tmp_path, sink), sink, epoch=1)
    sink.open, before = [STRAY], [*sink.aborted]

    driver.abort_strays()

    assert sink.open == [STRAY]
    assert sink.aborted == before


def test_a_sink_that_does_not_answer_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Sink(COUNTS)
    driver = started(tmp_path, sink)
    run(driver, sink)
    sink.open, sink.refuses = [STRAY], True

    with caplog.at_level(logging.WARNING):
        driver.abort_strays()

    assert "tallystick recover" in caplog.text
    assert "not now" in caplog.text
