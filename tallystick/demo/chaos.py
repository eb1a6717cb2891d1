"""Kills: when, how often, and the process that is killed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

CRASH_POINTS = ("prepared", "completed", "committed")
"""Between prepare and complete, complete and commit, commit and Spark's own commit log."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One planned death: at a fact of the protocol, or at a moment of nobody's choice."""

    epoch: int
    crash_point: str | None = None
    delay_s: float = 0.0

    def __str__(self) -> str:
        where = self.crash_point and f"the moment it has {self.crash_point}"
        return f"in its epoch {self.epoch}, {where or f'{self.delay_s:.2f} s after it began'}"


def plan(kill_count: int, seed: int) -> list[Kill]:
    """A schedule: each crash point at least once if there are three kills, the rest at random."""
    chance = random.Random(seed)
    points: list[str | None] = list(CRASH_POINTS[:kill_count])
    points += [None] * (kill_count - len(points))
    chance.shuffle(points)
    return [Kill(chance.randint(2, 4), point, chance.uniform(0.0, 0.4)) for point in points]


class Victim:
    """The pipeline's process, with what it says of itself."""

    def __init__(self, arguments: list[str], kill: Kill | None, log: Path) -> None:
        command = [sys.executable, "-m", "tallystick.demo.job", *arguments]
        if kill is not None and kill.crash_point is not None:
            command += ["--die-at", kill.crash_point, "--die-epoch", str(kill.epoch)]
        self._kill = kill
        self._log = log
        self._file = log.open("a")
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._file, text=True, start_new_session=True
        )
        self.committed_epochs = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Whether it ended by SIGKILL, and not by an error of its own."""
        return self._process.returncode == -signal.SIGKILL

    @property
    def error_text(self) -> str:
        """The end of what it wrote to stderr."""
        return self._log.read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        """End the process and what it started; its JVM may outlive a kill -9 for a moment."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._thread.join()
        self._file.close()

    def _watch(self) -> None:
        for event in self._events():
            if event == "TransactionCommitted":
                self.committed_epochs += 1
            if self._is_time(event):
                assert self._kill is not None
                time.sleep(self._kill.delay_s)
                self._process.kill()

    def _is_time(self, event: str) -> bool:
        kill = self._kill
        if kill is None or kill.crash_point is not None:
            return False
        return event == "EpochRequested" and self.committed_epochs == kill.epoch

    def _events(self) -> Iterator[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                yield json.loads(line)["event"]
