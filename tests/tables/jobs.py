"""Compactions without threads, for tests that count epochs."""

import threading
from collections.abc import Callable

import pytest

from tallystick.tables import background


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each job of this process do all of its work when it begins."""

    class Thread:
        def __init__(self, target: Callable[[], None], **_: object) -> None:
            self.ident: int | None = None
            self._target = target

        def start(self) -> None:
            self.ident = threading.get_ident()
            self._target()

        def is_alive(self) -> bool:
            return False

        def join(self) -> None:
            pass

    monkeypatch.setattr(background, "NICENESS", 0)
    monkeypatch.setattr(background, "_jobs", {})  # those that no test has ended are its own
    monkeypatch.setattr(background, "Thread", Thread)
