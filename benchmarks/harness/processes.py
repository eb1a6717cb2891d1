"""What a job's processes cost, read from /proc: CPU seconds and memory. Linux only.

A job is started in a session of its own and owns whatever is in it: a JVM whose Python parent has
ended is nobody's child any more, but it stays in the session.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One line of `/proc/<pid>/stat`, as far as it matters here."""

    pid: int
    session: int
    cpu_s: float
    ended: bool


def parse_stat(text: str) -> ProcessStat:
    """Read a stat line; the command in it may hold spaces and parentheses."""
    pid, rest = text.split(" ", 1)
    fields = rest.rsplit(")", 1)[1].split()
    cpu_s = _seconds(int(fields[11]) + int(fields[12]))
    return ProcessStat(int(pid), int(fields[3]), cpu_s, ended=fields[0] in "ZX")


def cpu_s(pid: int) -> float:
    """CPU seconds (user and system) that a process has used; 0 when it is gone."""
    try:
        return parse_stat((PROC / str(pid) / "stat").read_text()).cpu_s
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def machine_cpu_s() -> float:
    """CPU seconds that everything on this machine has used since it booted."""
    user, nice, system, _idle, _iowait, irq, softirq = map(
        int, (PROC / "stat").read_text().split("\n", 1)[0].split()[1:8]
    )
    return _seconds(user + nice + system + irq + softirq)


def pss_mib(pid: int) -> float:
    """Memory of a process in MiB, a page that n share counted as 1/n; 0 when it is gone."""
    try:
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0.0


class Session:
    """The processes of one session, and the CPU they have used, ended ones included."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._cpu_s: dict[int, float] = {}

    def members(self) -> list[int]:
        """The processes that are alive, and book what they have used so far."""
        stats = [stat for stat in _all_processes() if stat.session == self._session]
        self._cpu_s.update({stat.pid: stat.cpu_s for stat in stats})
        return [stat.pid for stat in stats if not stat.ended]

    def cpu_s(self) -> float:
        """CPU seconds of all processes ever seen in the session."""
        self.members()
        return sum(self._cpu_s.values())

    def pss_mib(self) -> float:
        """Memory of the session's living processes in MiB."""
        return sum(pss_mib(pid) for pid in self.members())

    def end(self, grace_s: float) -> None:
        """Ask all members to end, and kill those that are still there after `grace_s`."""
        self._signal(signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        while self.members() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _all_processes() -> Iterator[ProcessStat]:
    for entry in os.listdir(PROC):
        if entry.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                yield parse_stat((PROC / entry / "stat").read_text())


def _seconds(ticks: int) -> float:
    return ticks / CLOCK_TICKS_PER_S
