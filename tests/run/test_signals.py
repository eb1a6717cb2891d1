"""SIGINT and SIGTERM in `awaitTermination`: the epoch is finished, one line, and an exit code."""

import json
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any

import pytest

from tallystick.errors import OptionError, TallystickError
from tallystick.run.epoch_loop import EpochLoop, Trigger
from tallystick.run.query import RUNNING, Query, refuse_second

WAIT_S = 60


class Process:
    """A `waiting_job` in a session of its own."""

    def __init__(self, **spec: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.run.waiting_job", json.dumps({"epoch_s": 0.5, **spec})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell's background jobs, and what they start, ignore SIGINT.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        self.lines: list[str] = []
        self._waits = "timeout" not in spec

    def wait_for(self, line: str) -> None:
        assert self._process.stdout is not None
        while line not in self.lines:
            text = self._process.stdout.readline()
            assert text, f"it has ended, after {self.lines}: {self._process.stderr}"
            self.lines.append(text.strip())

    def send(self, number: signal.Signals) -> None:
        if self._waits:
            self.wait_for("waiting")
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Return the exit code, and stderr without the line that a slow drain prints first."""
        out, err = self._process.communicate(timeout=WAIT_S)
        self.lines += out.splitlines()
        lines = err.splitlines(keepends=True)
        printed = [line for line in lines if ": finishing the running epoch, for " not in line]
        return self._process.returncode, "".join(printed)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_lets_the_epoch_end_and_prints_one_line(number: signal.Signals, code: int) -> None:
    process = Process()
    process.wait_for("late epoch 2 begins")
    process.send(number)

    assert process.end() == (
        code,
        f"late: {number.name}: stopped in order; epoch 2 was the last one, and is committed\n",
    )
    assert [line for line in process.lines if line != "waiting"][-3:] == [
        "late epoch 2 ends",
        "late closed",
        "SIGINT is Python's again: True",
    ]


def test_a_signal_between_epochs_ends_it_after_the_last_one() -> None:
    process = Process(last_epoch=1, epoch_s=0.1)
    process.wait_for("between epochs")
    process.send(signal.SIGTERM)

    assert process.end() == (
        0,
        "late: SIGTERM: stopped in order; epoch 1 was the last one, and is committed\n",
    )
    assert "late closed" in process.lines


def test_all_runs_of_the_process_are_drained() -> None:
    process = Process(names=["late", "early"], epoch_s=0.3)
    process.wait_for("early epoch 1 begins")
    process.send(signal.SIGTERM)

    code, _ = process.end()

    assert code == 0
    assert "early epoch 1 ends" in process.lines
    assert {"late closed", "early closed"} <= set(process.lines)


def test_an_epoch_that_takes_longer_than_the_limit_is_aborted() -> None:
    process = Process(epoch_s=60, drain_s=0.2)
    process.wait_for("late epoch 1 begins")
    process.send(signal.SIGTERM)

    code, err = process.end()

    assert code == 143, "a supervisor is not told that all is done"
    assert "it is aborted, nothing is lost" in err
    assert "Traceback" not in err
    assert "late closed" in process.lines


def test_a_run_with_an_end_that_is_not_reached_is_not_complete() -> None:
    """A Job of Kubernetes whose pod is evicted must run again."""
    process = Process(available_now=True)
    process.wait_for("late epoch 1 begins")
    process.send(signal.SIGTERM)

    code, err = process.end()

    assert (code, err.count("\n")) == (143, 1)
    assert "late epoch 1 ends" in process.lines


def test_a_second_sigint_ends_it_at_once() -> None:
    process = Process(epoch_s=60)
    process.wait_for("late epoch 1 begins")
    began_s = time.monotonic()
    process.send(signal.SIGINT)
    time.sleep(0.5)  # one within 0.3 s is the same key press
    process.send(signal.SIGINT)

    code, err = process.end()

    assert code == 130
    assert time.monotonic() - began_s < 15, "the limit was not waited for"
    assert "Traceback" not in err
    assert "late closed" not in process.lines


def test_a_signal_sent_twice_at_a_time_counts_once() -> None:
    """`timeout` signals its child, and then the group that the child is in."""
    process = Process()
    process.wait_for("late epoch 1 begins")
    process.send(signal.SIGINT)
    process.send(signal.SIGINT)

    assert process.end()[0] == 130
    assert "late epoch 1 ends" in process.lines


def test_an_error_while_it_is_drained_is_raised() -> None:
    process = Process(fails=True)
    process.wait_for("late epoch 1 begins")
    process.send(signal.SIGTERM)

    code, err = process.end()

    assert code == 1
    assert "ValueError: of the user's function" in err


def test_a_handler_of_the_program_is_left_alone() -> None:
    process = Process(own_handler=True)
    process.wait_for("late epoch 1 begins")
    process.send(signal.SIGTERM)
    process.wait_for("own handler")
    process.wait_for("late epoch 3 begins")
    process.send(signal.SIGINT)

    assert process.end()[0] == 130


def test_signals_are_the_programs_own_after_a_wait_with_a_time_limit() -> None:
    process = Process(timeout=0.1, then_s=60)
    process.wait_for("SIGINT is Python's again: True")
    process.send(signal.SIGTERM)

    assert process.end()[0] == -signal.SIGTERM


def a_query(epoch_s: float, saved: list[str], **how: Any) -> Query:
    from tests.run.waiting_job import Driver, Source

    driver: Any = Driver("late", {"epoch_s": epoch_s, **how})
    source: Any = Source()
    query = Query(
        *("late", "query", "run"),
        loop=lambda note: EpochLoop(driver, source, Trigger(), lambda ended: note(ended) and None),
        prepare=lambda: None,
        cancel=driver.cancelled.set,
        close=lambda: None,
        describe=lambda _: {"batchId": driver._epochs},
        rescale=lambda _: None,
        key="checkpoint",
        save=saved.append,
    )
    query.begin()
    return query


def test_stop_with_drain_finishes_the_epoch_and_saves() -> None:
    saved: list[str] = []
    query = a_query(0.3, saved)
    query.stop(savepoint="target")

    assert query.lastProgress is not None, "the epoch that ran is committed"
    assert saved == ["target"]
    assert query.exception() is None


def test_a_drain_that_takes_too_long_says_so_and_saves_nothing() -> None:
    saved: list[str] = []
    query = a_query(60, saved)
    with pytest.raises(TallystickError, match=r"did not end within 0\.1 s of stop\(drain=True\)"):
        query.stop(savepoint="target", timeout=0.1)

    assert not saved
    assert not query.isActive


def test_an_error_in_the_last_epoch_is_no_drained_stop() -> None:
    saved: list[str] = []
    query = a_query(0.2, saved, fails=True)
    with pytest.raises(ValueError, match="of the user's function"):
        query.stop(savepoint="target")

    assert not saved


def test_a_second_start_in_one_process_is_refused() -> None:
    query = a_query(0.1, [])
    try:
        with pytest.raises(OptionError, match="pipeline 'late' runs in this process already"):
            refuse_second("late", "checkpoint")
        refuse_second("late", "another checkpoint")
    finally:
        query.stop()
    refuse_second("late", "checkpoint")
    assert query not in RUNNING
