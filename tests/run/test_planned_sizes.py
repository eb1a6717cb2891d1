"""The plans of a loop and the sizes of its epochs, without Kafka and Spark."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from tallystick.pipeline import loop as pipeline_loop
from tallystick.pipeline.input_planning import InputPlanner, InputPlanners
from tallystick.pipeline.loop import PipelinePlanner
from tallystick.pipeline.sizing import START_COUNT, EpochSizes, Reason, SizeLimits
from tallystick.run.epoch_loop import EpochEnded, EpochLoop, Trigger
from tallystick.run.part_times import PartTimes
from tallystick.source.offsets import ONLY_INPUT, SourceOffsets, from_json
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.values import TopicPartition

PARTITION = TopicPartition("in", 0)
ENDED = EpochEnded(began_s=0.0, took_s=1.0)
LIMITS = SizeLimits(interval_s=0, timeout_s=900, task_bytes_max=1 << 20)


@dataclass
class Planner:
    """A log of one partition."""

    end: int
    waiting: int = 0

    def first(self) -> SourceOffsets:
        return SourceOffsets("cluster", "", {PARTITION: 0}, initial=False)

    def next(self, start: SourceOffsets, offset_count_max: int | None) -> SourceOffsets:
        position = start.positions[PARTITION]
        self.waiting = self.end - position
        if not self.waiting:
            return start
        count = min(self.waiting, offset_count_max or self.waiting)
        return replace(start, positions={PARTITION: position + count})

    def latest(self) -> None:
        return


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    fake = SimpleNamespace(monotonic=lambda: now.s, time_ns=lambda: int(now.s * 1e9))
    monkeypatch.setattr(pipeline_loop, "time", fake)
    return now


def planned(
    end: int, limits: SizeLimits | None = LIMITS
) -> tuple[PipelinePlanner, SimpleNamespace]:
    cluster = SimpleNamespace(context=SimpleNamespace(_jsc=object()))
    run = SimpleNamespace(
        name="sized",
        keyed=PipelinePlan(),
        parts=PartTimes(lambda _: None),
        check_tasks=lambda: None,
        cluster=cluster,
        execution=SimpleNamespace(kind="resident"),
        make_engine=lambda batch, source: None,
    )
    sizes = None if limits is None else EpochSizes(limits)
    inputs = InputPlanners([InputPlanner(ONLY_INPUT, Planner(end))])
    return PipelinePlanner(run, inputs, sizes), run


def spanned(source: PipelinePlanner, start: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """Plan one, and how many offsets it spans."""
    epoch_plan = source.plan(1, start, ())
    assert epoch_plan.sources is not None
    source.engine(1, epoch_plan.start, epoch_plan.sources)
    before, after = (
        from_json(json.loads(text)).positions[PARTITION]
        for text in (epoch_plan.start[0], epoch_plan.sources[0])
    )
    return after - before, epoch_plan.sources


def test_an_epoch_that_failed_after_a_long_time_is_planned_anew_and_smaller(clock):
    source, _ = planned(10_000)
    count, _ = spanned(source, ())
    assert count == START_COUNT
    clock.s += 500
    count, at = spanned(source, ())
    assert count < 10
    clock.s += 1
    source.ended()
    assert source.is_behind
    assert source.describe(ENDED)["epochSize"]["because"] == Reason.FAILED.value
    assert spanned(source, at)[0] >= count


def test_what_the_busiest_task_held_bounds_the_next_epochs(clock):
    source, run = planned(10**6)
    at: tuple[str, ...] = ()
    for _ in range(8):
        count, at = spanned(source, at)
        run.keyed.on_share(1000 * count)
        clock.s += 0.1
        source.ended()
    assert count == (1 << 20) // 1000
    size = source.describe(ENDED)["epochSize"]
    assert size == {
        "offsets": count,
        "isCut": True,
        "offsetsMax": count,
        "because": Reason.BYTES.value,
        "bytesOfBusiestTask": 1000 * count,
    }


def test_only_our_own_bound_makes_the_next_epoch_due_at_once(clock):
    for limits, is_behind in (
        (LIMITS, True),
        (replace(LIMITS, offset_count_max=10), False),
        (None, False),
    ):
        source, _ = planned(5_000, limits)
        spanned(source, ())
        source.ended()
        assert source.is_behind is is_behind

    source, _ = planned(500)
    spanned(source, ())
    source.ended()
    assert not source.is_behind, "it was not cut"
    assert source.describe(ENDED)["epochSize"]["offsets"] == 500


def test_a_backlog_does_not_wait_for_the_trigger_and_what_comes_later_does(monkeypatch):
    answers = [True, True, False]
    source = SimpleNamespace(is_behind=True)
    waited: list[float] = []

    def run_next(_: object) -> bool:
        source.is_behind = answers.pop(0)
        return True

    driver = SimpleNamespace(run_next=run_next, end=lambda: None, runs_epoch=False)
    ended: list[EpochEnded] = []
    loop = EpochLoop(driver, source, Trigger(interval_ms=60_000), ended.append)

    def wait(seconds: float) -> None:
        waited.append(seconds)
        loop.stop()

    monkeypatch.setattr(loop._woken, "wait", wait)
    loop.run()

    assert len(ended) == 3
    assert len(waited) == 1
    assert waited[0] > 59


def test_a_plan_that_was_not_run_has_not_failed(clock):
    """The first one of a lineage is made for its seed, and once more for the first epoch."""
    source, _ = planned(10_000)
    source.plan(0, (), ())
    clock.s += 50
    assert spanned(source, ())[0] == START_COUNT
    source.ended()
    assert source.describe(ENDED)["epochSize"]["because"] == Reason.START.value
