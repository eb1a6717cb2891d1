"""A comparison with Flink that nothing fails proves nothing: windows and joins broken on purpose.

Each is broken in one place, as a slip might do it, and some case of those that Flink answered finds
it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_joins_like_flink as joins
import test_like_flink as windows

from tallystick.state.functions import joins as join_functions
from tallystick.state.functions import window_engine

Judge = Callable[[dict[str, Any]], None]


def found_out(judge: Judge, *kinds: str) -> bool:
    """True if a case brings it to light."""
    for case in (case for case in windows.CASES if case["kind"] in kinds):
        try:
            judge(case)
        except AssertionError:
            return True
    return False


def joined(case: dict[str, Any]) -> None:
    if "how" in case:
        joins.test_rows_with_and_without_a_partner_are_those_of_flink(case, 1)


def _strictly_before(original: Any) -> Any:
    return lambda codes, lows, highs, *of_others: original(codes, lows, highs - 1, *of_others)


def _oldest(original: Any) -> Any:
    def ranges(*given: Any) -> Any:
        starts, stops = original(*given)
        return starts, np.minimum(stops, starts + 1)

    return ranges


def _of_a_later_watermark(original: Any) -> Any:
    def init(self: Any, *given: Any) -> None:
        original(self, *given)
        self._until += 1

    return init


JOINS = {
    "a version of the left row's own time is not seen": ("ranges", _strictly_before),
    "the oldest version counts": ("ranges", _oldest),
}


@pytest.mark.parametrize("sentence", JOINS)
def test_a_broken_temporal_join_is_found_out(
    sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, make = JOINS[sentence]
    monkeypatch.setattr(join_functions, name, make(getattr(join_functions, name)))
    assert found_out(joined, "temporal_join")


def test_a_temporal_join_that_does_not_wait_for_the_watermark_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visit = join_functions._TemporalVisit
    monkeypatch.setattr(visit, "__init__", _of_a_later_watermark(visit.__init__))
    assert found_out(joined, "temporal_join")


def test_a_temporal_join_that_keeps_no_version_before_the_watermark_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = join_functions._TemporalVisit._write

    def forgetful(self: Any, side: int, rows: Any, chunks: Any) -> Any:
        is_kept = rows.times > self._until if side else np.ones(len(rows), np.bool_)
        return write(self, side, rows.filter(is_kept), chunks)

    monkeypatch.setattr(join_functions._TemporalVisit, "_write", forgetful)
    assert found_out(joined, "temporal_join")


@pytest.mark.parametrize(("attribute", "by_us"), [("_gone", 1), ("_gone", -1), ("_closed", -1)])
@pytest.mark.parametrize("kind", ["tumbling", "hopping", "cumulative"])
def test_windows_judged_by_the_wrong_watermark_are_found_out(
    attribute: str, by_us: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One window further: a pane is freed, or a row is late, one too early or too late."""
    init = window_engine._Epoch.__init__

    def shifted(self: Any, *given: Any) -> None:
        init(self, *given)
        moved = getattr(self, attribute) + by_us * self._windows.every_us
        setattr(self, attribute, moved)

    monkeypatch.setattr(window_engine._Epoch, "__init__", shifted)
    assert found_out(windows.test_windows_are_those_of_flink, kind)


@pytest.mark.parametrize(
    ("kind", "where"),
    [("window_join", join_functions.Window), ("interval_join", join_functions.Interval)],
)
def test_a_join_whose_rows_leave_one_too_early_is_found_out(
    kind: str, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    partners = where.partners

    def shorter(self: Any, side: int, times: Any) -> Any:
        first, last = partners(self, side, times)
        return first, last - 1

    monkeypatch.setattr(where, "partners", shorter)
    assert found_out(joined, kind)
