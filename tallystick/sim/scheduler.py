"""Several drivers in one world, one running at a time: which one is next is drawn, not raced.

Each driver is a thread of its own, because `Driver.run_epoch` is an ordinary loop that blocks in
its port calls. A thread runs only while it holds the baton, and gives it back at a port call.

Invariant: at any moment exactly one thread runs, the scheduler's or one process's, so a seed gives
the same run every time.
"""

import random
import threading
from collections.abc import Callable


class Crash(BaseException):
    """The process died. Not an Exception, so that no `except Exception` can survive it."""


class Process:
    """One driver's process: runs its body until it ends, dies, or is killed."""

    def __init__(self, name: str, body: Callable[["Process"], None]) -> None:
        self.name = name
        self.asleep_until = 0  # a step of the world: paused (SIGSTOP) before it
        self.offered = -1  # the epoch that Spark offered last
        self.ended_by: BaseException | None = None
        self.alive = True
        self._killed = False
        self._body = body
        self._may_run = threading.Lock()
        self._may_run.acquire()
        self._gave_back = threading.Lock()
        self._gave_back.acquire()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._may_run.acquire()
        try:
            if not self._killed:
                self._body(self)
        except BaseException as error:
            self.ended_by = error
        self.alive = False
        self._gave_back.release()

    def resume(self) -> None:
        """Let it run until it gives the baton back, or ends."""
        assert self.alive, self.name
        self._may_run.release()
        self._gave_back.acquire()

    def give_back(self) -> None:
        """Let others run; called by the process itself. Dies here if it was killed meanwhile."""
        self._gave_back.release()
        self._may_run.acquire()
        if self._killed:
            raise Crash

    def kill(self) -> None:
        """End it where it stands."""
        self._killed = True
        while self.alive:
            self.resume()


class Scheduler:
    """Which of the living processes runs next."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._processes: list[Process] = []

    @property
    def living(self) -> list[Process]:
        """The processes that have not ended, oldest first."""
        return self._processes

    def add(self, process: Process) -> None:
        """A process starts; it runs when it is chosen."""
        self._processes.append(process)

    def run_one(self, step: int) -> Process | None:
        """Resume a process that is awake, or wake one up; return it if it ended."""
        awake = [process for process in self._processes if process.asleep_until <= step]
        process = self._dice.choice(awake or self._processes)
        process.resume()
        if process.alive:
            return None
        self._processes.remove(process)
        return process

    def kill_all(self) -> None:
        """End what still lives, so that no thread outlives its world."""
        for process in self._processes:
            process.kill()
        self._processes.clear()
