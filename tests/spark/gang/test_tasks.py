"""The gangs of a run, one after another: what the next one knows of the one that was lost."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.spark.gang import gang as gangs
from tallystick.spark.gang import member
from tallystick.spark.gang.gang import GangLostError, GangStoppedError, GangTasks, Size
from tallystick.tasks.read import OpenOutlet, Report, StatelessOutlet
from tests.spark.gang.forked import (
    ForkedContext,
    Numbers,
    Reading,
    UnreadNumbers,
    WriteStep,
    end,
    numbers_of,
    wait_until_gone,
)

SHARES = ((1, 3), (2, 4))

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class Counting(Numbers):
    """Adds a hundred times the number of the attempt."""

    def begun(self, source: int, attempt: int, attempt_number: int) -> OpenOutlet:
        """See `Outlet`."""

        def frames(number: int, *given: int) -> Any:
            return self.frames(number + 100 * attempt_number, *given)

        return StatelessOutlet(frames, source, attempt)


def run(tasks: GangTasks, reading: Reading | None = None) -> list[int]:
    unread: Any = UnreadNumbers(SHARES, reading or Reading())
    epoch: Any = SimpleNamespace(first=Counting(2), plans=(), writer_count=2)
    write: Any = WriteStep()
    reports: list[Report] = tasks.run(unread, epoch, write)
    return numbers_of(reports)


def tasks_of(size: Size, context: Any = None) -> GangTasks:
    return GangTasks(context or ForkedContext(), size, "numbers")  # type: ignore[arg-type]


def test_attempts_behind_a_lost_gang_say_that_others_may_have_begun_something(
    tmp_path: Path,
) -> None:
    """Then other sinks are looked through after each commit for what a zombie prepared."""
    tasks, marker = tasks_of(Size(1, 2)), str(tmp_path / "killed")

    def die(_: int) -> None:
        if not os.path.exists(marker):
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        assert run(tasks) == [1, 2, 3, 4]
        lost = tasks.start()
        with pytest.raises(GangLostError):
            run(tasks, Reading(die))
        for _ in range(2):
            assert run(tasks) == [101, 102, 103, 104]
        assert tasks.start() is not lost
    finally:
        tasks.close()


def test_a_gang_that_comes_up_when_its_query_has_ended_does_not_stay() -> None:
    for pause_s in (0.0, 0.01, 0.03, 0.06, 0.1):
        context = ForkedContext()
        tasks = tasks_of(Size(1, 2), context)
        tasks.prepare()
        time.sleep(pause_s)
        tasks.close()
        with tasks._lock:  # after who starts it
            wait_until_gone(context.pids)
        with pytest.raises(GangStoppedError):
            tasks.start()


def test_a_gang_for_which_spark_has_not_the_slots_starts_smaller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gangs, "START_MAX_S", 1.0)

    def wait_for_a_slot(task: int) -> None:
        if task > 0:
            time.sleep(1000)

    tasks = tasks_of(Size(3), ForkedContext(wait_for_a_slot))
    try:
        assert run(tasks) == [1, 2, 3, 4]
        gang = tasks.start()
        assert gang.size == Size(1)
        assert "slots for 1 of its 3 resident tasks" in caplog.text
    finally:
        tasks.close()
        end(list(tasks._gang.pids.values()) if tasks._gang else [])


def test_a_member_that_hangs_at_its_start_costs_the_gang_and_not_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gangs, "START_MAX_S", 1.0)
    bind, hung = member.bind_to_forker, tmp_path / "hung"

    def hang_once(parent: int) -> None:
        bind(parent)
        try:
            hung.touch(exist_ok=False)
        except FileExistsError:
            return
        time.sleep(1000)  # as a fork does for a lock that another thread held

    monkeypatch.setattr(member, "bind_to_forker", hang_once)
    tasks = tasks_of(Size(1, 2), ForkedContext())
    try:
        with pytest.raises(GangLostError, match="1 of 2 resident tasks came up"):
            tasks.start()
        assert run(tasks) == [1, 2, 3, 4]
    finally:
        tasks.close()
