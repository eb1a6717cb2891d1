"""Requests of operators to a running pipeline: files of the checkpoint that both sides reach.

    tallystick/requests/bell                      changes with each request
    tallystick/requests/<time>-<nonce>.json       the request, addressed to one run
    tallystick/requests/<time>-<nonce>.answer     the run's answer

A run reads the bell alone while there is no request. No storage has to decide between two writers:
a run notes that it takes a request, and then looks if the request is still there; a command that
gives up removes its request, and then looks if it was taken. At least one of them sees the other.
"""

import getpass
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from tallystick.epoch.manifest import FOLDER
from tallystick.errors import UNREADABLE
from tallystick.ports import Storage

REQUESTS = f"{FOLDER}/requests"
BELL = f"{REQUESTS}/bell"
STOP, RESCALE = "stop", "rescale"
DRAIN_S = 20.0
"""The longest time for the running epoch to end: Kubernetes kills 30 s after its signal."""
TAKEN, DONE, FAILED, WITHDRAWN = "taken", "done", "failed", "withdrawn"
"""The states of an answer; all but the first are final."""


@dataclass(frozen=True, slots=True)
class Request:
    """An operator's request to a run.

    Args:
        run: the id of the run; no other run answers.
        kind: `stop` or `rescale`.
        by: the user, the host and the process that ask.
        drain: of a stop: the running epoch is finished first.
        savepoint: of a stop: the place for a savepoint of the last epoch; "": none.
        timeout_s: of a stop: the longest time for the running epoch to end.
        parallelism: of a rescale.
    """

    run: str
    kind: str
    by: str = ""
    drain: bool = False
    savepoint: str = ""
    timeout_s: float = DRAIN_S
    parallelism: int = 0

    def __post_init__(self) -> None:
        texts = (self.run, self.kind, self.by, self.savepoint)
        assert all(isinstance(text, str) for text in texts), self
        assert type(self.drain) is bool, self
        assert type(self.parallelism) is int, self
        assert 0 <= self.timeout_s < math.inf, self

    @property
    def words(self) -> str:
        """The request, for logs."""
        if self.kind != STOP:
            return f"{self.kind} to parallelism {self.parallelism}"
        if self.savepoint:
            return "stop, with a savepoint"
        return "stop, draining" if self.drain else "stop"


@dataclass(frozen=True, slots=True)
class Answer:
    """A run's answer.

    Args:
        state: `taken`, `done`, `failed` or `withdrawn`.
        text: the result in words.
        beat: counts on while the run is at work on the request.
    """

    state: str
    text: str = ""
    beat: int = 0

    def __post_init__(self) -> None:
        assert self.state in (TAKEN, DONE, FAILED, WITHDRAWN), self
        assert isinstance(self.text, str), self


def asker() -> str:
    """Return user, host and process, for the log of the run that is asked."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # an id without a name, as in many containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}, process {os.getpid()}"


def send(storage: Storage, request: Request) -> str:
    """Write a request, then ring; return the request's path."""
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:12]}"
    path = f"{REQUESTS}/{name}.json"
    storage.put(path, json.dumps(asdict(request)).encode())
    storage.put(BELL, name.encode())
    return path


def withdraw(storage: Storage, path: str) -> Answer | None:
    """Remove a request; return the answer of a run that took the request before."""
    storage.delete(path)
    return answer_to(storage, path)


def answer_to(storage: Storage, path: str) -> Answer | None:
    """Return the answer to a request; None: there is none yet."""
    data = storage.get(_answer_path(path))
    try:
        return None if data is None else Answer(**json.loads(data))
    except UNREADABLE:
        return None


def put_answer(storage: Storage, path: str, answer: Answer) -> None:
    """Write the answer to a request over the one before."""
    storage.put(_answer_path(path), json.dumps(asdict(answer)).encode())


def remove(storage: Storage, path: str) -> None:
    """Remove a request and the answer to it."""
    storage.delete(path)
    storage.delete(_answer_path(path))


class Inbox:
    """The requests to a run, in the order of their sending.

    Args:
        storage: the checkpoint.
        run: the id of the run.
    """

    def __init__(self, storage: Storage, run: str) -> None:
        self.storage = storage
        self._run = run
        self._bell: bytes | None = None
        self._known: set[str] = set()

    def new(self) -> Iterator[tuple[str, Request]]:
        """Yield the requests that came since the last call, with their paths.

        A request at which the caller fails is yielded again by the next call.
        """
        bell = self.storage.get(BELL)
        if bell == self._bell:
            return
        listed = sorted(path for path in self.storage.names(REQUESTS) if path.endswith(".json"))
        self._known &= {*listed}
        for path in listed:
            if path not in self._known and (request := self._request(path)) is not None:
                yield path, request
            self._known.add(path)
        self._bell = bell

    def _request(self, path: str) -> Request | None:
        """Return a request; None: it is to another run, or was withdrawn."""
        data = self.storage.get(path)
        try:
            request = None if data is None else Request(**json.loads(data))
        except UNREADABLE:
            return None
        return request if request is not None and request.run == self._run else None

    def take(self, path: str) -> bool:
        """Take a request; False: it was withdrawn."""
        put_answer(self.storage, path, Answer(TAKEN))
        if self.storage.get(path) is not None:
            return True
        put_answer(self.storage, path, Answer(WITHDRAWN))
        return False


def _answer_path(path: str) -> str:
    return f"{path.removesuffix('.json')}.answer"
