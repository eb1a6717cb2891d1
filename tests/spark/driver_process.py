"""The test's side of `crash_job.py`: start it, tell it what to run, hear of it, end it."""

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

from tallystick.testing.process import ProcessGroup
from tests.spark.forked_driver import ForkedProcess, KeptJvm, take_jvm

JOB = Path(__file__).with_name("crash_job.py")
WAIT_S = 150.0
"""No fact for so long means that the process hangs."""


class DriverProcess:
    """A driver in a process of its own, with Spark started and nothing running yet.

    Args:
        log: where goes what it prints, Spark's log included.
        config: Spark settings, and `log.level`.
        job: the program, `crash_job.py` or one made of it.
        kept_jvm: whose JVM it uses, until it ends; None: it starts a Python and a JVM of its own.
    """

    def __init__(
        self,
        log: Path,
        config: dict[str, str] | None = None,
        job: Path = JOB,
        kept_jvm: KeptJvm | None = None,
    ) -> None:
        self._logs = [log, *([kept_jvm.log] if kept_jvm is not None else [])]
        self._kept_jvm = kept_jvm
        self._file = log.open("a")
        self._group = ProcessGroup()  # a JVM of its own is in it too
        arguments = [str(job), json.dumps(config or {})]
        self._process: subprocess.Popen[str] | ForkedProcess
        if kept_jvm is not None:
            self._process = ForkedProcess(
                arguments, self._group.id, kept_jvm.variables, stderr=self._file
            )
        else:
            self._process = self._group.start(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._file,
                text=True,
            )
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.facts: list[str] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self._process.pid)

    def run(self, spec: dict[str, Any]) -> None:
        """Start a pipeline; returns at once."""
        self.facts.clear()
        self._command(run=spec)

    def go_on(self) -> None:
        """End its stop at `block_at`."""
        self._command(go_on=True)

    def wait_for_fact(self, fact: str, occurrence: int = 1) -> None:
        """Wait until something has been a fact so many times in this run."""
        while self.facts.count(fact) < occurrence:
            self._wait_for("fact")

    def wait_until_blocked(self) -> None:
        """Wait until it stands at `block_at`."""
        self._wait_for("blocked")

    def wait_until_killed(self) -> None:
        """Wait for its SIGKILL; ending in another way is an error."""
        with contextlib.suppress(EOFError):
            ended = self._wait_for("error")
            raise AssertionError(f"it was to be killed, and ended: {ended}\n{self.log_tail()}")
        assert self._process.wait() == -signal.SIGKILL, self.log_tail()
        self._clear_jvm()

    def wait_for_end(self) -> str | None:
        """Wait until the run is over; the text of its error."""
        return self._wait_for("error")["error"]

    def pause(self) -> None:
        """SIGSTOP to the driver, its JVM included; what its workers have begun goes on."""
        self._send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it and what it started; again is fine."""
        self._group.close()
        self._process.wait()
        self._clear_jvm()
        self._thread.join()
        self._file.close()

    def log_tail(self) -> str:
        """The end of what it wrote to stderr."""
        return "\n".join(log.read_text(errors="replace")[-4000:] for log in self._logs)

    def _send_signal(self, number: signal.Signals) -> None:
        self._group.send_signal(number)
        if self._kept_jvm is not None:
            self._kept_jvm.send_signal(number)

    def _clear_jvm(self) -> None:
        if self._kept_jvm is not None:
            self._kept_jvm.clear()
            self._kept_jvm = None

    def _command(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _wait_for(self, name: str) -> dict[str, Any]:
        while (line := self._said.get(timeout=WAIT_S)) is not None:
            if name in line:
                return line
        raise EOFError(f"the driver ended\n{self.log_tail()}")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith('{"'):
                self._file.write(line)
                continue
            message = json.loads(line)
            if "fact" in message:
                self.facts.append(message["fact"])
            self._said.put(message)
        self._said.put(None)


class Drivers:
    """Starts driver processes, and keeps the JVM of each that has ended for the next one.

    Args:
        folder: for their logs.
        settings: of each `DriverProcess`.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._folder, self._settings = folder, settings
        self._all: list[DriverProcess] = []
        self._spares: list[DriverProcess] = []

    def take(self) -> DriverProcess:
        """One that nobody uses."""
        return self._spares.pop() if self._spares else self._start()

    def give_back(self, driver: DriverProcess) -> None:
        """Let another test have it: it is alive, and runs nothing."""
        self._spares.append(driver)

    def close(self) -> None:
        """End them all."""
        for driver in self._all:
            driver.stop()

    def _start(self) -> DriverProcess:
        log = self._folder / f"driver-{len(self._all)}.log"
        driver = DriverProcess(log, **self._settings, kept_jvm=take_jvm(self._folder))
        self._all.append(driver)
        return driver
