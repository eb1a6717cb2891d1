"""The processes of a job: found, killed, stopped, and started again at once by a supervisor."""

import threading
import time
from collections import Counter
from pathlib import Path

from tallystick_tools.chaos.program import Life, ProgramSettings

from .systems import Setting, System

LOOK_S = 0.05
OWN_END_S = 0.5
"""The wait before a start, after an end that was not of our making."""


class Parts:
    """The processes of one system, each started again as soon as it has ended."""

    def __init__(self, system: System, setting: Setting) -> None:
        self.system = system
        self.starts: Counter[str] = Counter()
        self.own_ends: list[str] = []
        """Ends that were not of our making, with their exit codes."""
        self._setting = setting
        self._killed: set[Life] = set()
        self._lives: dict[str, Life] = {}
        self._all: list[Life] = []
        self._lock = threading.RLock()
        self._is_over = False
        self._is_held = False
        for name in system.commands:
            self._start(name)
        self._thread = threading.Thread(target=self._look_after, daemon=True)
        self._thread.start()

    def roots(self) -> list[Life]:
        """Return the lives of all parts."""
        with self._lock:
            return list(self._lives.values())

    def life(self, name: str) -> Life:
        """Return the life of one part."""
        with self._lock:
            return self._lives[name]

    def hold(self) -> None:
        """Start nothing again, until `kill_all` is done."""
        with self._lock:
            self._is_held = True

    def kill_roots(self) -> None:
        """Kill -9 the process of each part, at once; what they started is left."""
        with self._lock:
            for life in self.roots():
                self._killed.add(life)
                life.process.kill()

    def kill_all(self, hold_s: float = 0.0) -> int:
        """Kill -9 all processes of the job; return how many.

        Args:
            hold_s: How long nothing is started again.
        """
        with self._lock:
            # What they started is found again when they are gone.
            count = sum(len(life.processes()) for life in self.roots())
            self.kill_roots()
            for life in self.roots():
                life.kill_all()
            self._is_held = hold_s > 0
        time.sleep(hold_s)
        self._is_held = False
        return count

    def kill(self, name: str) -> int:
        """Kill -9 one part with all that it started; return how many processes."""
        with self._lock:
            life = self._lives[name]
            self._killed.add(life)
            return life.kill_all()

    def close(self) -> None:
        """End everything."""
        self._is_over = True
        self._thread.join()
        for life in self._all:
            life.kill_all()
            life.end()

    def _start(self, name: str) -> None:
        folder = self._setting.folder / name
        folder.mkdir(exist_ok=True)
        command = tuple(self.system.commands[name](self._setting))
        life = Life(ProgramSettings(command, self._setting.servers, folder), 1)
        self._lives[name] = life
        self._all.append(life)
        self.starts[name] += 1

    def _look_after(self) -> None:
        while not self._is_over:
            with self._lock:
                for name, life in list(self._lives.items()):
                    if life.exit_code is not None and not self._is_held:
                        if life not in self._killed:
                            self.own_ends.append(f"{name}: {life.exit_code}")
                            time.sleep(OWN_END_S)
                        self._start(name)
            time.sleep(LOOK_S)


def state_of(pid: int) -> str:
    """Return the letter of a process's state in /proc; "": it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
