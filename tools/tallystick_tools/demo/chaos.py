"""The kills of the pipeline's process: their plan, and the process."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tallystick.testing.process import ProcessGroup

CRASH_POINTS = ("prepared", "completed", "committed")
"""Between prepare and complete, complete and commit, commit and the end of the epoch."""
EPOCHS = (4, 6)
"""The epochs of a run in one of which it dies: the first ones are small."""
DELAY_MAX_S = 0.2
"""The longest delay of a kill at a random moment: a few epochs, so that input is left."""
FATES = ("kept", "set aside", "lost", "put back old")
"""The fates of a host's copies of state while no pipeline runs; none of them may matter."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A planned kill: at a fact of the protocol, or at a random moment."""

    epoch: int
    crash_point: str | None = None
    delay_s: float = 0.0
    copies: str = "kept"

    def __str__(self) -> str:
        where = self.crash_point and f"the moment it has {self.crash_point}"
        return f"in its epoch {self.epoch}, {where or f'{self.delay_s:.2f} s after it began'}"


def plan(kill_count: int, seed: int) -> list[Kill]:
    """Plan the kills: each crash point once if there are three or more, the rest at random."""
    chance = random.Random(seed)
    points: list[str | None] = list(CRASH_POINTS[:kill_count])
    points += [None] * (kill_count - len(points))
    chance.shuffle(points)
    planned = [
        Kill(chance.randint(*EPOCHS), point, chance.uniform(0.0, DELAY_MAX_S)) for point in points
    ]
    return [replace(kill, copies=FATES[n % len(FATES)]) for n, kill in enumerate(planned)]


class Copies:
    """The folder of a host's copies of state; only ever renamed, as zombies may use the files.

    Args:
        folder: the folder of the demo.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "copies"
        self._old = folder / "copies-old"
        self._folder = folder

    def suffer(self, fate: str) -> str:
        """Let one of `FATES` happen; return the fate: another one if a folder is missing."""
        if fate == "kept" or not self.path.exists():
            return "kept"
        if fate == "set aside":
            self._lose(self._old)
            self.path.rename(self._old)
            return fate
        self._lose(self.path)
        if fate == "put back old" and self._old.exists():
            self._old.rename(self.path)
            return fate
        return "lost"

    def _lose(self, path: Path) -> None:
        if path.exists():
            lost = path.rename(Path(tempfile.mkdtemp(prefix="lost-", dir=self._folder), "copies"))
            shutil.rmtree(lost, ignore_errors=True)


def tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-4000:]


class Victim:
    """The pipeline's process, and its reported progress."""

    def __init__(
        self, arguments: list[str], kill: Kill | None, log: Path, copies: Path | None = None
    ) -> None:
        command = [sys.executable, "-m", "tallystick_tools.demo.job", *arguments]
        if kill is not None and kill.crash_point is not None:
            command += ["--die-at", kill.crash_point, "--die-epoch", str(kill.epoch)]
        self._kill = kill
        self._log = log
        self._file = log.open("a")
        self._group = ProcessGroup()  # its JVM is in it too
        self._process = self._group.start(
            command,
            stdout=subprocess.PIPE,
            stderr=self._file,
            text=True,
            env={**os.environ, **({} if copies is None else {"TALLYSTICK_STATE_DIR": str(copies)})},
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
        """True if the process still runs."""
        return self._process.poll() is None

    @property
    def was_killed(self) -> bool:
        """True if the process ended by SIGKILL, and not by an error of its own."""
        return self._process.returncode == -signal.SIGKILL

    @property
    def error_text(self) -> str:
        """The end of the log with the process's stderr."""
        return tail(self._log)

    def stop(self) -> None:
        """End the process and its children; the JVM may outlive a kill -9 for a moment."""
        self._group.close()
        self._process.wait()
        self._thread.join()
        self._file.close()

    def _watch(self) -> None:
        has_run = False
        for event in self._events():
            has_run = event == "EpochRan" or (has_run and event != "EpochPlanned")
            if event == "TransactionCommitted" and has_run:  # else it is the seed's
                self.committed_epochs += 1
            if self._is_time(event):
                assert self._kill is not None
                time.sleep(self._kill.delay_s)
                self._process.kill()

    def _is_time(self, event: str) -> bool:
        kill = self._kill
        if kill is None or kill.crash_point is not None:
            return False
        return event == "EpochPlanned" and self.committed_epochs == kill.epoch

    def _events(self) -> Iterator[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                yield json.loads(line)["event"]
