"""A text that shows where the time of epochs goes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tallystick.host.stopwatch import PARTS as TASK_PARTS
from tallystick.run.part_times import PARTS, TASKS, WHOLE

_WIDTH = 26


def profile_text(name: str, recent: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of where the time of epochs goes.

    Args:
        name: the pipeline's.
        recent: the progress of epochs, as `recentProgress` has it.
    """
    if not recent:
        return f"pipeline {name}: no epoch has ended yet"
    first, last = recent[0]["batchId"], recent[-1]["batchId"]
    executions = "/".join(sorted({str(each["execution"]) for each in recent}))
    durations = [each["durationMs"] for each in recent]
    total = sum(each[WHOLE] for each in durations)
    lines = [
        f"pipeline {name}, epochs {first} to {last}, {executions}",
        f"{'ms per epoch':{_WIDTH}}{'p50':>9}{'p90':>9}{'share':>8}",
        _line("the whole epoch", [each[WHOLE] for each in durations], total),
    ]
    for part in PARTS:
        spent = [each.get(part, 0) for each in durations]
        if any(spent) or part == TASKS:
            lines.append(_line(f"  {part}", spent, total))
        if part == TASKS:
            lines += _steps(recent, total)
    return "\n".join(lines)


def _steps(recent: Sequence[Mapping[str, Any]], total: float) -> Iterable[str]:
    """The busiest task of each step, as the newest epochs had them."""
    names = dict.fromkeys(step["step"] for each in recent for step in each["tasks"])
    for name in names:
        its = [step for each in recent for step in each["tasks"] if step["step"] == name]
        most = max(step["tasks"] for step in its)
        yield f"    {name}: {most} task{'s' if most > 1 else ''}, the busiest one"
        for part in TASK_PARTS:
            spent = [step["busiestMs"].get(part, 0.0) for step in its]
            if any(spent):
                yield _line(f"      {part}", spent, total)


def _line(what: str, spent: Sequence[float], total: float) -> str:
    ordered = sorted(spent)
    p50, p90 = (ordered[math.ceil(len(ordered) * share) - 1] for share in (0.5, 0.9))
    share = 100 * sum(spent) / total if total else 0.0
    return f"{what:{_WIDTH}}{p50:9.0f}{p90:9.0f}{share:7.0f}%"
