"""Durations of the parts of an epoch, from the facts that end them; and a table of them."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
from tallystick.host.stopwatch import (
    LIVE_ENTRIES,
    REBUILT_COPIES,
    REUSED_COPIES,
    ROWS_IN,
    ROWS_OUT,
    TaskTimes,
)
from tallystick.host.stopwatch import PARTS as TASK_PARTS
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
_WIDTH = 26


class PartTimes:
    """A listener that measures the parts of each epoch, and passes every event on.

    Args:
        listener: called next.
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
        """Return the newest epoch by part, for `durationMs` of its progress; the rest is CLEAN_UP.

        Args:
            took_s: the whole of it.
        """
        spent_s = {**self._spent_s, CLEAN_UP: max(0.0, took_s - sum(self._spent_s.values()))}
        by_part = {name: round(1000 * spent_s[name]) for name in PARTS if name in spent_s}
        return {WHOLE: round(1000 * took_s), **by_part}

    def count(self, name: str) -> int:
        """Return what the tasks of the newest epoch counted under a name, all together."""
        return sum(task.counts.get(name, 0) for task in self._tasks)

    @property
    def newest(self) -> tuple[TaskTimes, ...]:
        """The tasks of the newest epoch."""
        return self._tasks

    def tasks(self, uids: Sequence[str]) -> list[dict[str, Any]]:
        """Return the tasks of the newest epoch: of each step, how many, the busiest, and the rows.

        Of those with keys also how many local copies of state were there, and how many were made
        again; and how many entries these have, if each task has looked into its own.

        Args:
            uids: of the keyed steps.
        """
        names = ("read", *uids, "write")
        steps = []
        for stage, name in enumerate(names):
            step_tasks = [task for task in self._tasks if task.stage == stage]
            if step_tasks:
                busiest = max(step_tasks, key=lambda task: task.busy_ms)
                fields: dict[str, Any] = {
                    "step": name,
                    "tasks": len(step_tasks),
                    "busiestMs": busiest.ms,
                    "busyMs": round(sum(task.busy_ms for task in step_tasks), 3),
                    "waitMs": round(sum(task.wait_ms for task in step_tasks), 3),
                    ROWS_IN: sum(task.rows_in for task in step_tasks),
                    ROWS_OUT: sum(task.rows_out for task in step_tasks),
                }
                if name in uids:
                    for counted in (REUSED_COPIES, REBUILT_COPIES, LIVE_ENTRIES):
                        if counted != LIVE_ENTRIES or all(
                            counted in task.counts for task in step_tasks
                        ):
                            fields[counted] = sum(
                                task.counts.get(counted, 0) for task in step_tasks
                            )
                steps.append(fields)
        return steps


def profile_text(name: str, recent: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of where the time of epochs goes.

    Args:
        name: the pipeline's.
        recent: the progress of epochs, as `recentProgress` has it.
    """
    if not recent:
        return f"pipeline {name}: no epoch has ended yet"
    first, last = recent[0]["batchId"], recent[-1]["batchId"]
    executions = "/".join(sorted({str(progress["execution"]) for progress in recent}))
    durations = [progress["durationMs"] for progress in recent]
    total = sum(duration[WHOLE] for duration in durations)
    lines = [
        f"pipeline {name}, epochs {first} to {last}, {executions}",
        f"{'ms per epoch':{_WIDTH}}{'p50':>9}{'p90':>9}{'share':>8}",
        _line("the whole epoch", [duration[WHOLE] for duration in durations], total),
    ]
    for part in PARTS:
        spent = [duration.get(part, 0) for duration in durations]
        if any(spent) or part == TASKS:
            lines.append(_line(f"  {part}", spent, total))
        if part == TASKS:
            lines += _steps(recent, total)
    return "\n".join(lines)


def _steps(recent: Sequence[Mapping[str, Any]], total: float) -> Iterable[str]:
    """Return the busiest task of each step, as the newest epochs had them."""
    names = dict.fromkeys(step["step"] for progress in recent for step in progress["tasks"])
    for name in names:
        entries = [
            step for progress in recent for step in progress["tasks"] if step["step"] == name
        ]
        most = max(step["tasks"] for step in entries)
        yield f"    {name}: {most} task{'s' if most > 1 else ''}, the busiest one"
        for part in TASK_PARTS:
            spent = [step["busiestMs"].get(part, 0.0) for step in entries]
            if any(spent):
                yield _line(f"      {part}", spent, total)


def _line(what: str, spent: Sequence[float], total: float) -> str:
    ordered = sorted(spent)
    p50, p90 = (ordered[math.ceil(len(ordered) * share) - 1] for share in (0.5, 0.9))
    share = 100 * sum(spent) / total if total else 0.0
    return f"{what:{_WIDTH}}{p50:9.0f}{p90:9.0f}{share:7.0f}%"
