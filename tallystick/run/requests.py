"""Requests of operators, served by the run that they are addressed to.

A thread of the driver looks for them, so an epoch that hangs, or a Kafka that is away, holds up
none. It begins them in the order in which they were sent; each is waited for and answered in a
thread of its own. The run has not ended before what was taken is answered: a program that waits for
its end would end too, in the midst of a savepoint.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from threading import Event, Lock, Thread

from tallystick.checkpoint.requests import (
    DONE,
    FAILED,
    TAKEN,
    Answer,
    Inbox,
    Request,
    put_answer,
)
from tallystick.errors import StorageError, TallystickError, without_values
from tallystick.run.console import Console

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""The interval between two looks, each a read of one small file."""
ANSWER_TRIES = 15

Begin = Callable[[Request], Callable[[], str]]
"""A callback that begins a request, and returns what waits for the result and puts it in words."""


class RequestWatch:
    """The thread that serves the requests to a run.

    Args:
        console: of the run; tells who asks for what.
        inbox: of the run.
        begin: called for each request, in their order.
        look_s: the interval between two looks.
    """

    def __init__(
        self, console: Console, inbox: Inbox, begin: Begin, look_s: float = LOOK_S
    ) -> None:
        self._console = console
        self._inbox = inbox
        self._begin = begin
        self._look_s = look_s
        self._closed = Event()
        self._lock = Lock()
        self._beats: dict[str, int] = {}
        self._answering: list[Thread] = []
        self._is_away = False
        name = f"tallystick {console.name} requests"
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def begin(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Take no further request, and wait until those that were taken are answered."""
        with self._lock:
            self._closed.set()
        for thread in self._answering:
            thread.join()

    def _run(self) -> None:
        while not self._closed.is_set() or self._beats:
            self.look()
            if self._closed.is_set():
                time.sleep(self._look_s)
            else:
                self._closed.wait(self._look_s)

    def look(self) -> None:
        """Show that requests are being worked on, and begin the new ones."""
        try:
            self._beat()
            if not self._closed.is_set():
                for path, request in self._inbox.new():
                    self._take(path, request)
            self._is_away = False
        except StorageError as error:  # the next look finds what this one has not
            if not self._is_away:
                logger.warning("%s: no request can be read: %s", self._console.name, error)
            self._is_away = True
        except Exception:
            logger.exception("%s: a look for requests failed", self._console.name)

    def _beat(self) -> None:
        with self._lock:
            for path in self._beats:
                self._beats[path] += 1
                put_answer(self._inbox.storage, path, Answer(TAKEN, beat=self._beats[path]))

    def _take(self, path: str, request: Request) -> None:
        if not self._inbox.take(path):
            return
        self._console.info(f"{request.by} asks: {request.words}")
        with self._lock:
            if self._closed.is_set():
                return put_answer(self._inbox.storage, path, Answer(FAILED, "the run has ended"))
            self._beats[path] = 0
            thread = Thread(target=self._answer, args=(path, request, self._begun(request)))
            self._answering = [*filter(Thread.is_alive, self._answering), thread]
            thread.start()

    def _begun(self, request: Request) -> Callable[[], str]:
        """Begin a request; return the wait for its result, or for the error."""
        try:
            return self._begin(request)
        except Exception as error:
            return partial(_raise, error)

    def _answer(self, path: str, request: Request, wait: Callable[[], str]) -> None:
        """Wait for the result of a request, and write the answer."""
        try:
            answer = Answer(DONE, wait())
        except Exception as error:
            name = "" if isinstance(error, TallystickError) else f"{type(error).__name__}: "
            answer = Answer(FAILED, f"{name}{without_values(error)}")
        self._console.info(f"{request.words}: {answer.text}")
        with self._lock:
            del self._beats[path]
        for _ in range(ANSWER_TRIES):
            try:
                return put_answer(self._inbox.storage, path, answer)
            except StorageError:
                time.sleep(self._look_s)
        self._console.warning(f"{request.words}: the answer could not be written")


def _raise(error: Exception) -> str:
    raise error
