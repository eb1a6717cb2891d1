"""A step's uid changes, and its state goes on under the new one, once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tallystick as ts
from tallystick.state.catalog import StepState
from tallystick.state.compatibility import Succession, check
from tallystick.state.file_sets import renamed
from tallystick.tasks import epoch_plan
from tallystick.testing import Driver
from tests.testing.test_changed_programs import (
    ELEMENT,
    END_MS,
    ENTRY,
    ROWS,
    TIMED,
    VALUE,
    Habits,
    as_rows,
    fed,
    pipeline,
    restarted,
    results,
    state_by_key,
    summing,
)

MOVED: dict[str, Callable[..., ts.Pipeline]] = {
    "aggregate": lambda **step: pipeline(
        ts.aggregate({"n": ts.count(), "sum": ts.sum("n")}), **step
    ),
    "columns": lambda **step: pipeline(summing(a="int"), **step),
    "windows": lambda **step: pipeline(
        ts.windowed(ts.tumbling(10), {"rows": ts.count(), "n": ts.sum("n")}), **TIMED, **step
    ),
    "a processor": lambda **step: pipeline(
        Habits(VALUE[0], ELEMENT[0], ENTRY[0]),
        output="k string",
        time_mode="ProcessingTime",
        **step,
    ),
}


@pytest.mark.parametrize("name", MOVED)
@settings(max_examples=3, deadline=None, phases=[Phase.generate])
@given(
    before=ROWS,
    after=ROWS,
    cuts=st.lists(st.integers(1, 6), max_size=4),
    tasks=st.integers(1, 4),
    kills=st.booleans(),
)
def test_state_goes_on_under_another_uid(
    name: str, before: Any, after: Any, cuts: list[int], tasks: int, kills: bool
) -> None:
    """In the end without the argument; `kills`: in the first epoch of the new program."""
    rows, more = as_rows(before), as_rows(after, 100)
    test = Driver(MOVED[name](uid="s"))
    fed(test, rows, cuts)
    test.restart(tasks, pipeline=MOVED[name](uid="t", previous_uid="s"))
    if kills:
        test.feed("in", more)
        test.crash()
        test.restart(pipeline=MOVED[name](uid="s"))  # it counts from the first epoch on
        test.restart(pipeline=MOVED[name](uid="t", previous_uid="s"))
        test.drain()
    else:
        fed(test, more, cuts)
    assert uids_of(test) == ["t"]
    end = [{"k": "end", "n": 0, "at": END_MS}]
    for again in ({"previous_uid": "s"}, {}):
        test.restart(pipeline=MOVED[name](uid="t", **again))
        fed(test, end, [])

    alone = Driver(MOVED[name](uid="t", previous_uid="s"))  # without harm where nothing is there
    for some in (rows, more, end, end):
        fed(alone, some, [])
    assert state_by_key(test) == state_by_key(alone)
    if name == "windows":
        assert results(test) == results(alone)


def uids_of(test: Driver) -> list[str]:
    """The uids of state in the newest committed epoch."""
    return [step.uid for step in committed(test)]


def committed(test: Driver) -> tuple[StepState, ...]:
    """The state in the newest committed epoch."""
    manifest = test._driver.coordinator.committed_manifest
    assert manifest is not None
    return manifest.state


def counting(uid: str, *more: str, **step: Any) -> ts.Pipeline:
    """A pipeline that counts under a uid, and then under more uids."""
    whole = pipeline(ts.aggregate({"n": ts.count()}), uid=uid, **step)
    steps = list(whole.steps)
    for other in more:
        name, _, previous = other.partition("<")
        succession = Succession(previous_uid=previous or None)
        steps += [replace(steps[-1], uid=name, succession=succession)]
    return replace(whole, steps=tuple(steps))


def test_a_copy_of_a_step_that_had_the_uid_before_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copies of `t` on this host, of an epoch that the state of `s` has too, are another's."""
    test = Driver(counting("s", "t"), parallelism=1)
    fed(test, as_rows([("b", 1), ("b", 1)]), [])  # one row of output, so `t` counts 1
    fed(test, as_rows([("a", 1)]), [])  # begins with copies of the epoch before
    monkeypatch.setattr(epoch_plan, "check", lambda wanted, state, _: check(wanted, state, ["t"]))
    test.restart(pipeline=counting("s"))
    fed(test, as_rows([("a", 1)]), [])
    test.restart(pipeline=counting("t", previous_uid="s"))
    fed(test, as_rows([("b", 1)]), [])
    assert {key: row["n"] for key, row in state_by_key(test).items()} == {"a": 2, "b": 3}


def test_a_rename_that_is_followed_by_many_epochs_keeps_all_files() -> None:
    test = Driver(counting("s"), parallelism=1)
    fed(test, as_rows([("a", 1), ("b", 1)]), [])
    test.restart(pipeline=counting("t", previous_uid="s"))
    for at in range(40):  # files are merged, and removed
        fed(test, as_rows([("a", at)]), [])
    test.restart(3, pipeline=counting("u", previous_uid="t"))
    fed(test, as_rows([("b", 1)]), [])
    assert {key: row["n"] for key, row in state_by_key(test).items()} == {"a": 41, "b": 2}


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (("s", "t"), ("t<s",), "step t: previous_uid='s': .* under 's' and under 't'"),
        (("s",), ("t<r",), "step t: previous_uid='r': .* neither of the two, but under 's'"),
        (("s",), ("s", "t<s"), "step t: previous_uid='s': the program has a step"),
        (("s",), ("t<s", "u<s"), "step u: previous_uid='s': step t names it too"),
        (("s",), ("t",), "previous_uid='s'"),
    ],
)
def test_a_previous_uid_that_fits_nothing_is_refused_by_name(
    before: tuple[str, ...], now: tuple[str, ...], words: str
) -> None:
    test = Driver(counting(*before))
    fed(test, as_rows([("a", 1)]), [])
    uid, _, previous = now[0].partition("<")
    with pytest.raises(ts.OptionError, match=words):
        restarted(test, counting(uid, *now[1:], previous_uid=previous or None))
    restarted(test, counting(*before))  # nothing was changed
    assert uids_of(test) == list(before)


def test_the_uid_of_before_is_no_harm_to_the_names_of_columns() -> None:
    """Another uid and other columns in one start."""
    test = Driver(pipeline(summing(a="int", b="int")))
    fed(test, as_rows([("a", 3)]), [])
    new = pipeline(summing(c="bigint"), uid="t", previous_uid="s", renamed={"c": "a"})
    test.restart(2, pipeline=new, accept=["dropped-column-t-b"])
    fed(test, as_rows([("a", 4)]), [])
    assert state_by_key(test)["a"]["c"] == 7


def test_the_start_says_which_state_is_taken_up() -> None:
    test = Driver(counting("s"))
    fed(test, as_rows([("a", 1)]), [])
    state = committed(test)
    test.restart(pipeline=counting("t", previous_uid="s"))
    assert test._run.keyed.state_changes(state) == [
        "step t takes up the state of 's' with the next epoch"
    ]
    fed(test, as_rows([("a", 1)]), [])
    assert not test._run.keyed.state_changes(committed(test))


def test_files_that_go_on_under_another_uid_are_not_gone() -> None:
    """Else the files of the whole state would be removed, as those of a step that is gone."""
    test = Driver(counting("s"))
    fed(test, as_rows([("a", 1)]), [])
    state = committed(test)
    assert state[0].files
    added, gone = renamed(state, [replace(state[0], uid="t")])
    assert not gone
    assert added == [file.path for file in state[0].files]
