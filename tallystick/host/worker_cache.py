"""A cache of the connections and clients that a worker process keeps between tasks.

Invariants:
    * A forked process never uses, closes or collects its parent's values: a goodbye on a shared
      connection would end the parent's. They stay referenced, and are never used.
    * A value is with its taker or in the cache, never both.
"""

import atexit
import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def _drop(_: object) -> None:
    """Close a value that needs no closing."""


class WorkerCache(Generic[Key, Value]):
    """A process-wide cache by key: values that users share, or idle values that a user takes.

    Values still in the cache are closed when the process exits.

    Args:
        close: ends a value that the cache drops; a taken value is its taker's to close.
        idle_max: the most idle values kept for a key; None: any number.
    """

    def __init__(
        self, close: Callable[[Value], object] = _drop, *, idle_max: int | None = None
    ) -> None:
        assert idle_max is None or idle_max > 0, idle_max
        self._close_value = close
        self._idle_max = idle_max
        # A lock of its own for each process: one held at the fork would never be released.
        self._by_process: dict[int, tuple[Lock, dict[Key, list[Value]]]] = {}
        atexit.register(self.close)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value that all users of a key share; make it if the cache has none."""
        lock, kept = self._of_this_process()
        with lock:
            if key in kept:
                return kept[key][0]
        value = make()  # without the lock: it may take long
        with lock:
            shared = kept.setdefault(key, [value])[0]
        if shared is not value:
            self._close_value(value)
        return shared

    def take(self, key: Key) -> Value | None:
        """Remove and return the value given back last; None if there is none."""
        lock, kept = self._of_this_process()
        with lock:
            values = kept.pop(key, [])
            value = values.pop() if values else None
            if values:
                kept[key] = values
        return value

    def give_back(self, key: Key, value: Value) -> None:
        """Keep a value for the next user; close it if enough are kept."""
        lock, kept = self._of_this_process()
        with lock:
            values = kept.setdefault(key, [])
            has_room = self._idle_max is None or len(values) < self._idle_max
            if has_room:
                values.append(value)
        if not has_room:
            self._close_value(value)

    def close(self, matching: Callable[[Key], bool] = lambda _: True) -> None:
        """Close this process's values under the matching keys, by default under all keys."""
        lock, kept = self._of_this_process()
        with lock:
            removed = [kept.pop(key) for key in list(kept) if matching(key)]
        for value in (value for values in removed for value in values):
            with suppress(Exception):  # the others are closed all the same
                self._close_value(value)

    def _of_this_process(self) -> tuple[Lock, dict[Key, list[Value]]]:
        return self._by_process.setdefault(os.getpid(), (Lock(), {}))
