"""Several processes in one world, one running at a time: which one is next is drawn, not raced.

Each driver, and each resident task, is a thread of its own, because both are ordinary loops that
block in their calls. A thread runs only while it holds the baton, and gives it back at a call.

Invariant: at any moment exactly one thread runs, the scheduler's or one process's, so a seed gives
the same run every time.
"""

import random
import threading
from collections.abc import Callable
from typing import Protocol


class Crash(BaseException):
    """The process died. Not an Exception, so that no `except Exception` can survive it."""


class Endless(BaseException):
    """The world's steps are used up; not an Exception, so that a driver cannot survive it."""


class Broken(BaseException):
    """A promise was broken, and the rest of the world's life would tell no more."""


class Resident(Protocol):
    """What is known of a process that is no driver."""

    def befall(self) -> None:
        """Let happen what may happen to it here and now."""
        ...

    def ended(self) -> None:
        """Learn that the process is gone."""
        ...


class Process:
    """A process: runs its body until it ends, dies, or is killed.

    Args:
        name: for stories.
        body: what it runs.
        resident: the resident task that it is; None: it is a driver.
    """

    def __init__(
        self, name: str, body: Callable[["Process"], None], resident: Resident | None = None
    ) -> None:
        self.name = name
        self.resident = resident
        self.is_blocked = False  # until another process wakes it
        self.has_patience = True  # what it waits for may take as long as it likes
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

    def block(self, *, has_patience: bool = True) -> bool:
        """Wait to be woken; called by the process itself.

        Args:
            has_patience: it waits for ever; else no longer than until nothing else goes on.

        Returns:
            Whether it was woken; if not, its patience is at its end.
        """
        self.is_blocked, self.has_patience = True, has_patience
        self.give_back()
        was_woken, self.is_blocked = not self.is_blocked, False
        return was_woken

    def wake(self) -> None:
        """End its wait, if it waits."""
        self.is_blocked = False

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
        """The drivers that have not ended, oldest first."""
        return [process for process in self._processes if process.resident is None]

    @property
    def running(self) -> list[Process]:
        """All processes that have not ended, resident tasks among them."""
        return self._processes

    def is_anyone_awake(self, step: int) -> bool:
        """Whether a process can go on by itself."""
        return any(_is_awake(process, step) for process in self._processes)

    def add(self, process: Process) -> None:
        """A process starts; it runs when it is chosen."""
        self._processes.append(process)

    def run_one(self, step: int) -> Process | None:
        """Resume a process that is awake, or one that has slept or waited for long enough.

        Returns:
            The process, if it ended.
        """
        awake = [process for process in self._processes if _is_awake(process, step)]
        patient = [
            candidate
            for candidate in self._processes
            if candidate.is_blocked and candidate.has_patience
        ]
        process = self._dice.choice(
            awake or [candidate for candidate in self._processes if candidate not in patient]
        )
        process.resume()
        if process.alive:
            return None
        if process in self._processes:
            self._processes.remove(process)
        return process

    def kill(self, process: Process) -> None:
        """End a process that is not the one that runs."""
        process.kill()
        if process in self._processes:
            self._processes.remove(process)

    def kill_all(self) -> None:
        """End what still lives, so that no thread outlives its world."""
        while self._processes:
            self.kill(self._processes[0])


def _is_awake(process: Process, step: int) -> bool:
    return not process.is_blocked and process.asleep_until <= step
