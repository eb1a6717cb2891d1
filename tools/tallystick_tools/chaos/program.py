"""The processes of the user's program: started as by a supervisor, found, stopped and killed."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tallystick.errors import OptionError
from tallystick.host.processes import Process, all_processes
from tallystick.testing.process import ProcessGroup
from tallystick_tools.chaos.clock import Clock
from tallystick_tools.chaos.object_store import ObjectStore

SERVERS_VARIABLE = "TALLYSTICK_CHAOS_SERVERS"
CHECKPOINT_VARIABLE = "TALLYSTICK_CHAOS_CHECKPOINT"
FILES = "files"
FILES_VARIABLE = "TALLYSTICK_CHAOS_FILES"
PARALLELISM_VARIABLE = "TALLYSTICK_CHAOS_PARALLELISM"
PARALLELISMS = (2, 3, 1, 4)
"""The parallelism of the first start, and of those after each fault `parallelism`."""
LOG_TAIL_LINES = 40
DAEMON = re.compile(r"pyspark[./](daemon|worker)|tallystick\.spark\.early_daemon")
"""In the command of Spark's daemon of Python workers, which is also that of the workers."""
EXECUTOR_MARK = "CoarseGrainedExecutorBackend"
STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """The program's command, and the places and addresses that the program is given.

    Args:
        command: Its arguments, with {servers}, {checkpoint}, {files} and {parallelism} to
            fill in.
        servers: Of the proxies.
        folder: For the checkpoint, the local copies of state, and the log.
        object_store: The object store with the checkpoint; None: the folder has the checkpoint.
        clock: A wall clock of the program's own; None: the machine's.
    """

    command: tuple[str, ...]
    servers: str
    folder: Path
    object_store: ObjectStore | None = None
    clock: Clock | None = None

    @property
    def checkpoint(self) -> str:
        """The checkpoint that the program is told to use."""
        if self.object_store is not None:
            return self.object_store.checkpoint
        return str(self.folder / "checkpoint")

    @property
    def files(self) -> Path:
        """The folder in which the program is told to write files."""
        return self.folder / FILES

    @property
    def state(self) -> Path:
        """The folder of a host's local copies of state."""
        return self.folder / "state"

    @property
    def log(self) -> Path:
        """The log with all output of the program's processes."""
        return self.folder / "program.log"

    def filled(self, parallelism: int) -> tuple[list[str], dict[str, str]]:
        """Return the command and the environment of a start."""
        values = {
            "{servers}": self.servers,
            "{checkpoint}": self.checkpoint,
            "{files}": str(self.files),
            "{parallelism}": str(parallelism),
        }
        command = []
        for argument in self.command:
            for name, value in values.items():
                argument = argument.replace(name, value)
            command.append(argument)
        environment = {
            **os.environ,
            SERVERS_VARIABLE: self.servers,
            CHECKPOINT_VARIABLE: self.checkpoint,
            FILES_VARIABLE: str(self.files),
            PARALLELISM_VARIABLE: str(parallelism),
            "TALLYSTICK_STATE_DIR": str(self.state),
            "PYTHONUNBUFFERED": "1",
            **({} if self.object_store is None else self.object_store.environment),
            **({} if self.clock is None else self.clock.environment),
        }
        return command, environment


class Life:
    """The processes of the program from one start to the end."""

    def __init__(self, settings: ProgramSettings, parallelism: int) -> None:
        command, environment = settings.filled(parallelism)
        self._group = ProcessGroup()
        self._known: dict[int, Process] = {}
        self._file_limits: dict[int, int] = {}
        try:
            self.process = self._group.spawn(command, settings.log, env=environment)
        except OSError as error:
            self._group.close()
            raise OptionError(f"the program {command[0]!r} cannot be started: {error}") from error

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process, a signal as a negative number; None: it still runs."""
        return self.process.poll()

    def processes(self) -> list[Process]:
        """Return the processes that are alive: the program's own, then its descendants."""
        everyone = {process.pid: process for process in all_processes()}
        children: dict[int, list[Process]] = {}
        for process in everyone.values():
            children.setdefault(process.parent, []).append(process)
        roots = [self.process.pid, *self._known]
        alive: dict[int, Process] = {}
        while roots:
            pid = roots.pop(0)
            known = self._known.get(pid)
            if pid in alive or pid not in everyone:
                continue
            if known is not None and known.command != everyone[pid].command:
                continue  # the number has been given to another process
            alive[pid] = everyone[pid]
            roots += [child.pid for child in children.get(pid, ())]
        self._known = dict(alive)
        return sorted(
            alive.values(), key=lambda process: (process.pid != self.process.pid, process.pid)
        )

    def kill(self) -> None:
        """Kill -9 the program's own process; remember the processes left behind."""
        self.processes()
        self.process.kill()
        self.process.wait()

    def kill_all(self) -> int:
        """Kill -9 all processes at once; return how many were killed."""
        alive = self.processes()
        for process in alive:
            process.send(signal.SIGKILL)
        self.process.wait()
        return len(alive)

    def stop_still(self) -> int:
        """Stop all processes where they stand (SIGSTOP); return how many were stopped."""
        alive = self.processes()
        for process in alive:
            process.send(signal.SIGSTOP)
        return len(alive)

    def go_on(self) -> None:
        """Let the processes run again after `stop_still`."""
        for process in self.processes():
            process.send(signal.SIGCONT)

    def limit_files(self, limited: bool) -> int:
        """Let no process make a file longer, or lift the limit; return how many were changed."""
        count = 0
        inherited, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        for process in self.processes():
            with contextlib.suppress(OSError, ValueError):
                soft, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
                if limited:
                    self._file_limits[process.pid] = soft
                    soft = 0
                else:  # one that began in the meantime has no limit of its own yet
                    soft = self._file_limits.pop(process.pid, inherited)
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (soft, hard))
                count += 1
        return count

    def end(self) -> int | None:
        """Terminate the program, and kill all processes after a while; return the exit code."""
        self.processes()
        self.go_on()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self.kill_all()
        self._group.close()
        return self.exit_code


class Supervisor:
    """A supervisor that keeps the program running, one life after another.

    Args:
        settings: The settings of each start.
        say: Called with a text about each start and end.
    """

    def __init__(self, settings: ProgramSettings, say: Callable[[str], None]) -> None:
        settings.folder.mkdir(parents=True, exist_ok=True)
        self.settings = settings
        self.starts = 0
        self.own_ends: list[int] = []
        """Exit codes of lives that nobody killed."""
        self._say = say
        self._parallelism = 0
        self._lives: list[Life] = []
        self.life = self.start()

    def start(self) -> Life:
        """Start a life; the supervisor no longer looks after the life before."""
        parallelism = PARALLELISMS[self._parallelism % len(PARALLELISMS)]
        self.life = Life(self.settings, parallelism)
        self._lives.append(self.life)
        self.starts += 1
        self._say(f"start {self.starts} of the program, process {self.life.process.pid}")
        return self.life

    def use_another_parallelism(self) -> int:
        """Let the next start have another parallelism; return it."""
        self._parallelism += 1
        return PARALLELISMS[self._parallelism % len(PARALLELISMS)]

    def look(self) -> None:
        """Start the program again if it has ended, with success or error."""
        code = self.life.exit_code
        if code is None:
            return
        self.own_ends.append(code)
        self._say(f"the program has ended by itself, with code {code}")
        time.sleep(0.2)
        self.start()

    def tail(self) -> str:
        """Return the end of the program's log."""
        with contextlib.suppress(FileNotFoundError):
            lines = self.settings.log.read_text(errors="replace").splitlines()
            return "\n".join(lines[-LOG_TAIL_LINES:])
        return "(nothing)"

    def close(self) -> None:
        """End all lives."""
        for life in reversed(self._lives):
            life.end()


def python_workers(processes: Sequence[Process]) -> list[Process]:
    """Return the processes in which Spark runs Python code: the last forks of its daemon.

    The daemon is Spark's own, or one that the driver has started; then Spark's is a stand-in that
    does nothing, and the driver's has forked once before it has workers.

    Args:
        processes: A program's, its own first.
    """
    (driver, *_) = processes
    daemons = {process.pid: process for process in processes if DAEMON.search(process.command)}
    parents = {process.parent for process in processes}
    return [
        daemon
        for daemon in daemons.values()
        if daemon.parent in daemons
        and daemons[daemon.parent].parent != driver.pid
        and daemon.pid not in parents
    ]


def executors(processes: Sequence[Process]) -> list[Process]:
    """Return the executors that have a JVM of their own."""
    return [process for process in processes if EXECUTOR_MARK in process.command]
