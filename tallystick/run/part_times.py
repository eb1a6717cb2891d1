"""How long the parts of an epoch take, told by the facts that end them."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from tallystick.epoch.protocol import (
    EpochPlanned,
    EpochRan,
    EpochWanted,
    Event,
    ManifestWritten,
    OutputConfirmed,
    OutputCounted,
    OutputSettled,
    TransactionCommitted,
)
from tallystick.host.stopwatch import TaskTimes
from tallystick.run.driver import Listener

PLAN, TASKS, MANIFEST, COUNT = "plan", "tasks", "manifest", "count"
COMMIT, OTHER_SINKS, CONFIRM = "commit", "otherSinks", "confirm"
RECOVER, CLEAN_UP, WHOLE = "recover", "cleanUp", "triggerExecution"
PARTS = (PLAN, TASKS, MANIFEST, COUNT, COMMIT, OTHER_SINKS, CONFIRM, RECOVER, CLEAN_UP)
"""In their order, as `durationMs` of a progress has them."""
_ENDS: Mapping[type, str] = {
    EpochPlanned: PLAN,
    EpochRan: TASKS,
    ManifestWritten: MANIFEST,
    OutputCounted: COUNT,
    TransactionCommitted: COMMIT,
    OutputSettled: OTHER_SINKS,
    OutputConfirmed: CONFIRM,
}
"""Fact -> the part that it ends; any other, such as a fence or a failed try, ends RECOVER."""


class PartTimes:
    """A listener that measures the parts of each epoch, and passes every event on.

    Args:
        listener: told next.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self._since_s = time.monotonic()
        self._tasks: tuple[TaskTimes, ...] = ()

    def __call__(self, event: Event) -> None:
        """See `job.Listener`."""
        now_s = time.monotonic()
        if isinstance(event, EpochWanted):
            self._spent_s, self._tasks = defaultdict(float), ()
        else:
            self._spent_s[_ENDS.get(type(event), RECOVER)] += now_s - self._since_s
        self._since_s = now_s
        self._listener(event)

    def note_tasks(self, times: Sequence[TaskTimes]) -> None:
        """Take in how long the tasks of the epoch took."""
        self._tasks = tuple(times)

    def duration_ms(self, took_s: float) -> dict[str, int]:
        """The newest epoch by part, for `durationMs` of its progress; what is left is CLEAN_UP.

        Args:
            took_s: the whole of it.
        """
        spent_s = {**self._spent_s, CLEAN_UP: max(0.0, took_s - sum(self._spent_s.values()))}
        found = {name: round(1000 * spent_s[name]) for name in PARTS if name in spent_s}
        return {WHOLE: round(1000 * took_s), **found}

    def tasks(self, uids: Sequence[str]) -> list[dict[str, Any]]:
        """The tasks of the newest epoch: of each step, how many, and the one that worked longest.

        Args:
            uids: of the keyed steps.
        """
        names = ("read", *uids, "write")
        found = []
        for stage, name in enumerate(names):
            its = [each for each in self._tasks if each.stage == stage]
            if its:
                busiest = max(its, key=lambda each: each.busy_ms)
                found.append({"step": name, "tasks": len(its), "busiestMs": busiest.ms})
        return found
