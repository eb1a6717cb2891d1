"""The processes of the machine, as listed by `ps`."""

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Process:
    """A process in the output of `ps`."""

    pid: int
    parent: int
    command: str

    def send(self, number: signal.Signals) -> None:
        """Signal the process unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def all_processes() -> list[Process]:
    """Return all processes, of all users.

    Raises:
        OSError: there is no `ps`, as in a small container.
        CalledProcessError: `ps` has failed.
    """
    options = ["-A", "-ww", "-o", "pid=,ppid=,args="]
    listed = subprocess.run(["ps", *options], capture_output=True, text=True, check=True).stdout
    split = (line.split(maxsplit=2) for line in listed.splitlines())
    return [
        Process(int(columns[0]), int(columns[1]), columns[2])
        for columns in split
        if len(columns) == 3
    ]
