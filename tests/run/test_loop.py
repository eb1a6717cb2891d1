"""When the loop looks for new records; a driver that finds none, and a clock of the test's own."""

import json
import traceback
from threading import Thread
from typing import Any, cast

import pytest

from tallystick.errors import FencedError, OptionError
from tallystick.run import epoch_loop
from tallystick.run import query as query_module
from tallystick.run.epoch_loop import IDLE_MAX_S, IDLE_MIN_S, EpochLoop, Trigger
from tallystick.run.query import Query
from tallystick.source.offsets import SourceOffsets
from tallystick.values import TopicPartition


class Clock:
    """Time that passes only while the loop waits; it stands for the module `time` too."""

    def __init__(self, until_s: float) -> None:
        self.now_s, self._until_s = 0.0, until_s
        self.worked_s = 0.0
        self.pauses: list[float] = []
        self.loop: EpochLoop | None = None

    def monotonic(self) -> float:
        return self.now_s

    time = monotonic

    def thread_time(self) -> float:
        return self.worked_s

    def wait(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds
        if self.now_s >= self._until_s:
            assert self.loop is not None
            self.loop.stop()

    def set(self) -> None: ...

    clear = set

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Driver:
    """Has an epoch to run at these looks, and notes when it is told that nothing is left."""

    def __init__(self, clock: Clock, epochs_at: tuple[int, ...] = ()) -> None:
        self._clock, self._epochs_at = clock, epochs_at
        self.looks = 0
        self.look_s = 0.0
        self.runs_epoch = False
        self.noted_s: list[float] = []
        self.strays_s: list[float] = []

    def run_next(self, source: object) -> bool:
        self.looks += 1
        self._clock.worked_s += self.look_s
        return self.looks in self._epochs_at

    def end(self) -> None:
        self.noted_s.append(self._clock.now_s)

    def abort_strays(self) -> None:
        self.strays_s.append(self._clock.now_s)


class Source:
    is_behind = True


def idle(
    monkeypatch: pytest.MonkeyPatch,
    until_s: float,
    epochs_at: tuple[int, ...] = (),
    strays_live_s: float = 0.0,
    look_s: float = 0.0,
    interval_ms: int = 0,
) -> tuple[Clock, Driver]:
    clock = Clock(until_s)
    driver: Any = Driver(clock, epochs_at)
    driver.look_s = look_s
    source: Any = Source()
    loop: Any = EpochLoop(driver, source, Trigger(interval_ms), lambda _: None, strays_live_s)
    loop._woken = clock
    clock.loop = loop
    monkeypatch.setattr(epoch_loop, "time", clock)
    loop.run()
    return clock, driver


def test_records_that_come_soon_are_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a quarter of the time that they took to come is lost by waiting between looks."""
    clock, _ = idle(monkeypatch, until_s=10)

    at_s = 0.0
    for pause in clock.pauses:
        assert IDLE_MIN_S <= pause <= IDLE_MAX_S
        assert pause <= max(IDLE_MIN_S, at_s / 4)
        at_s += pause
    assert clock.pauses[-1] == IDLE_MAX_S
    assert len(clock.pauses) < 10 / IDLE_MAX_S + 20, "Kafka is not asked for ever at short notice"


def test_a_look_comes_when_the_trigger_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, driver = idle(monkeypatch, until_s=60, interval_ms=10_000)

    assert clock.pauses == [10.0] * 6
    assert driver.looks == 6


def test_looks_that_cost_much_come_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a tenth of a core at most; the first pause does not know yet what one costs."""
    cheap, _ = idle(monkeypatch, until_s=10, look_s=0.0004)
    clock, driver = idle(monkeypatch, until_s=10, look_s=0.044)

    assert cheap.pauses[0] == clock.pauses[0] == IDLE_MIN_S
    assert cheap.pauses[-1] == IDLE_MAX_S
    assert clock.pauses[1:] == pytest.approx([0.44] * (driver.looks - 1))


def test_an_epoch_makes_the_loop_quick_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, _ = idle(monkeypatch, until_s=10, epochs_at=(30,))

    assert clock.pauses[28] == IDLE_MAX_S
    assert clock.pauses[29] == IDLE_MIN_S


def test_that_nothing_is_left_is_noted_once_per_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    _, driver = idle(monkeypatch, until_s=10, epochs_at=(60,))

    first, second, at_the_end = driver.noted_s
    assert IDLE_MAX_S <= first < 1.5 * IDLE_MAX_S
    assert first + 1 < second < at_the_end


def test_that_nothing_is_left_is_noted_before_a_long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands on the checkpoint would wait for the second look: an hour after the first."""
    _, driver = idle(monkeypatch, 7200, epochs_at=(1,), interval_ms=3_600_000)

    first, _ = driver.noted_s
    assert first == 0.0, "at the first look that finds nothing"


def test_whoever_waits_for_all_records_does_not_wait_for_the_trigger() -> None:
    driver: Any = Driver(Clock(0))
    source: Any = Source()
    query = Query(
        *("p", "query", "run"),
        loop=lambda _: EpochLoop(driver, source, Trigger(3_600_000), lambda _: None),
        prepare=lambda: None,
        cancel=lambda: None,
        close=lambda: None,
        describe=lambda _: {},
        rescale=lambda _: None,
    )
    query.begin()
    waiting = Thread(target=query.processAllAvailable, daemon=True)
    waiting.start()
    waiting.join(60)
    has_returned = not waiting.is_alive()
    query.stop()

    assert has_returned, "it waits for two looks, an hour each"


@pytest.mark.parametrize(
    ("epochs_at", "strays_live_s", "strays_s"),
    [((60,), 2.5, [12.5]), ((60,), 0, []), ((), 2.5, [])],
)
def test_strays_are_aborted_at_the_end_when_none_can_begin_any_more(
    monkeypatch: pytest.MonkeyPatch,
    epochs_at: tuple[int, ...],
    strays_live_s: float,
    strays_s: list[float],
) -> None:
    _, driver = idle(monkeypatch, 10, epochs_at, strays_live_s)

    assert driver.strays_s == pytest.approx(strays_s, abs=IDLE_MAX_S)
    assert driver.noted_s[-1] >= sum(strays_s), "then nothing is left"


def test_a_loop_whose_epoch_hangs_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the look before that epoch found nothing: the page must not say that it waits."""
    clock, driver = idle(monkeypatch, 5)
    assert clock.loop.is_idle
    assert clock.loop.idle_since_s is not None
    driver.runs_epoch = True
    assert not clock.loop.is_idle
    assert clock.loop.idle_since_s is None


def failed_query(explain: Any = lambda error: error) -> Query:
    """A query whose run has failed."""

    def fail() -> None:
        raise FencedError("another run has taken over")

    loop: Any = EpochLoop(cast(Any, Driver(Clock(0))), cast(Any, Source()), Trigger(), print)
    query = Query(
        *("late", "query", "run"),
        loop=lambda _: loop,
        prepare=fail,
        cancel=lambda: None,
        close=lambda: None,
        describe=lambda _: {},
        rescale=lambda _: None,
        explain=explain,
    )
    query.begin()
    return query


def test_an_error_is_raised_without_the_frames_of_the_run_and_as_it_was_explained() -> None:
    query = failed_query(lambda error: OptionError(f"why: {error}"))
    for _ in range(2):
        with pytest.raises(OptionError, match=r"^why: another run") as caught:
            query.awaitTermination(10)
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 4, (
        "this call, and three of ours at most"
    )
    assert "late: failed: why: another run" in repr(query)
    assert "<pre>late: failed" in query._repr_html_()


@pytest.mark.parametrize("is_asked", [False, True])
def test_without_logging_the_end_is_logged_only_if_nobody_asks_for_the_error(
    monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(query_module, "is_logging_set_up", lambda: False)
    monkeypatch.setattr(
        query_module.logger, "error", lambda text, *words: lines.append(text % words)
    )
    monkeypatch.setattr(query_module, "TOLD_SOON_S", 60.0 if is_asked else 0.0)
    query = failed_query()
    if is_asked:
        with pytest.raises(FencedError):
            query.awaitTermination(10)
    query._thread.join(10)
    assert not query._thread.is_alive()
    end = "pipeline late ends: FencedError: another run has taken over"
    assert lines == ([] if is_asked else [end])


def test_a_query_shows_its_epoch_and_how_far_it_is_behind() -> None:
    query = failed_query()
    query._thread.join(10)
    end, latest = (
        json.dumps(SourceOffsets("c", "g", {TopicPartition("in", 0): offset}).to_json())
        for offset in (70, 1100)
    )
    query._progress.append({"batchId": 7, "sources": [{"endOffset": end, "latestOffset": latest}]})
    assert query.lag == 1030
    assert repr(query).endswith("; epoch 7, 1,030 records behind>")
    query._progress.append({"batchId": 8, "sources": [{"endOffset": end, "latestOffset": None}]})
    assert query.lag is None
