"""Signals at the worst moments of a pipeline on Spark: the epoch is committed, and nothing is open.

The output is read by librdkafka, `read_committed`. Between epochs: `tests/run/test_signals.py`.
"""

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from tallystick.ops import savepoints
from tallystick.storage.file_storage import FileStorage
from tests.spark.drained_job import PREPARED_S
from tests.spark.flow import Facts, Flow
from tests.spark.topics import pending

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]

WAIT_S = 90
COMMAND = [sys.executable, "-m", "tests.spark.drained_job"]


def own_terminal() -> None:
    """Make the standard error of a new session its terminal, so that ^C reaches the whole group."""
    fcntl.ioctl(2, termios.TIOCSCTTY, 0)


class Job:
    """A pipeline in a process of its own, with or without a terminal."""

    def __init__(self, flow: Flow, *, terminal: bool = False) -> None:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [*COMMAND, json.dumps(flow.spec())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs if terminal else subprocess.PIPE,
            start_new_session=True,
            preexec_fn=own_terminal if terminal else None,
            env=dict(os.environ, COLUMNS="200"),
        )
        self._has_terminal = terminal
        os.close(theirs)

    def wait_for(self, moment: str) -> None:
        assert self._process.stdout is not None
        line = ""
        while line.strip() != moment:
            line = self._process.stdout.readline().decode()
            assert line, f"it ended before {moment!r}: {self.end()}"

    def signal_group(self, number: signal.Signals) -> None:
        """As GNU timeout does; the JVM and the workers must outlive it."""
        os.killpg(self._process.pid, number)

    def press_ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def end(self) -> tuple[int, str]:
        """Return the exit code, and what it printed on stderr."""
        text, until_s = b"", time.monotonic() + WAIT_S
        if not self._has_terminal:
            _, text = self._process.communicate(timeout=WAIT_S)
        while self._has_terminal and time.monotonic() < until_s:
            is_over = self._process.poll() is not None
            if select.select([self._ours], [], [], 0.2)[0]:
                try:
                    text += os.read(self._ours, 65536)
                except OSError:
                    break
            elif is_over:
                break
        os.close(self._ours)
        return self._process.wait(WAIT_S), text.decode()


def assert_quiet(text: str) -> None:
    """Nothing of the JVM's, and no traceback; a slow machine has lines of ours about waiting."""
    for noise in ("Traceback", "WARN", "ERROR", "incubator", "log4j", "Exception"):
        assert noise not in text, text


def test_signals_at_the_worst_moments_commit_the_epoch_and_leave_nothing_open(
    flow: Flow, tmp_path: Path
) -> None:
    flow.feed(30)
    job = Job(flow)
    job.wait_for("starting")  # its tasks do not run yet
    job.signal_group(signal.SIGTERM)
    code, text = job.end()
    assert_quiet(text)
    assert (code, text.splitlines()[-1]) == (
        0,
        f"{flow.name}: SIGTERM: stopped in order; epoch 1 was the last one, and is committed",
    )
    assert not any(pending(flow.confluent, flow.topic_out).values())

    flow.feed(30)
    job = Job(flow, terminal=True)
    job.wait_for("prepared")
    job.press_ctrl_c()
    code, text = job.end()
    assert code == 130
    assert f"{flow.name}: reads {flow.topic_in}" in text
    assert "goes on after epoch 1" in text
    assert f"{flow.name}: SIGINT: stopped in order; epoch 2 was the last one" in text
    assert "records/s, lag " in text, "the live line"
    assert_quiet(text)
    assert not any(pending(flow.confluent, flow.topic_out).values())

    flow.feed(10)
    is_prepared = threading.Event()

    def stay(_: object) -> None:
        is_prepared.set()
        time.sleep(PREPARED_S)

    query = flow.pipeline(max_offsets_per_trigger="all").start(
        flow.spark, checkpoint=str(flow.checkpoint), listener=Facts("OutputCounted", stay)
    )
    assert is_prepared.wait(WAIT_S)
    query.stop(savepoint=str(tmp_path / "saved"))
    saved = savepoints.read(FileStorage(str(tmp_path / "saved")))
    newest = max((flow.checkpoint / "tallystick").glob("0*.json"))
    assert saved.manifest.checkpoint_id == int(newest.name[:12]), "the epoch that was prepared"
    assert not any(pending(flow.confluent, flow.topic_out).values())
    flow.assert_exact()
