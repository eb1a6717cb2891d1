"""A pipeline goes on from a state only where each entry stays where it is, and has an owner."""

from dataclasses import replace

import pytest

from tallystick.errors import OptionError
from tallystick.state.catalog import StateFile, StepState, Version
from tallystick.state.compatibility import StepRequirement, check, starting_point
from tallystick.state.functions.processing import EVENT_TIME, NO_TIME, PROCESSING_TIME
from tallystick.state.keys import HASH_VERSION

KEY = '[["user","string"]]'
FILE = StateFile("keyed-state/count/0.changelog", "changelog", 0, 0, 127, 100, 10, 1, 3)
HELD = StepState("count", 128, 2, KEY, HASH_VERSION, files=(FILE,), trail=(Version(0, "x"),))
COUNT = StepRequirement("count", KEY)


def test_a_step_goes_on_from_the_state_with_its_uid_and_a_new_one_from_none():
    assert check([StepRequirement("new", KEY), COUNT], [HELD]) == {"count": HELD}


@pytest.mark.parametrize("parallelism", [1, 5, 128])
def test_any_parallelism_up_to_the_key_groups_goes_on(parallelism):
    step = replace(COUNT, parallelism=parallelism)

    assert starting_point(step, HELD, 2) == replace(HELD, parallelism=parallelism)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (replace(COUNT, max_parallelism=256), r"max_parallelism=256.*128 key groups.*migrate"),
        (replace(COUNT, key_schema='[["user","int64"]]'), r"its key is now .*int64.*string.*uid"),
    ],
)
def test_what_would_move_entries_is_refused(wanted, message):
    with pytest.raises(OptionError, match=message):
        check([wanted], [HELD])


def test_the_time_that_timers_go_by_stays():
    timed = starting_point(replace(COUNT, time_mode=EVENT_TIME), HELD, 2)
    assert timed.time_mode == EVENT_TIME, "there were no timers before"
    assert check([replace(COUNT, time_mode=EVENT_TIME)], [timed])

    for mode in (PROCESSING_TIME, NO_TIME):
        with pytest.raises(OptionError, match=rf"now '{mode}', but .* by 'EventTime'.*Set it back"):
            check([replace(COUNT, time_mode=mode)], [timed])


def test_another_hash_is_refused():
    with pytest.raises(OptionError, match="hash version 0, and this release has version 1"):
        check([COUNT], [replace(HELD, hash_version=0)])


def test_state_of_a_step_that_is_gone_is_given_up_only_when_told():
    with pytest.raises(OptionError, match=r"'count' \(100 bytes in 1 files\).*=\['count'\]"):
        check([], [HELD])
    with pytest.raises(OptionError, match=r"renamed, set uid='count' on 'counts'"):
        check([replace(COUNT, uid="counts")], [HELD])
    assert check([replace(COUNT, uid="counts")], [HELD], ["count"]) == {}


def test_a_new_step_has_flinks_number_of_key_groups():
    first = starting_point(COUNT, None, 100)

    assert (first.max_parallelism, first.parallelism, first.version) == (256, 100, None)
    assert starting_point(replace(COUNT, parallelism=3), None, 100).max_parallelism == 128


def test_spark_may_run_more_tasks_than_there_are_key_groups():
    narrow = replace(HELD, max_parallelism=4)

    assert starting_point(COUNT, narrow, 16).parallelism == 4
    with pytest.raises(OptionError, match=r"parallelism=16, but its state has 4 key groups"):
        starting_point(replace(COUNT, parallelism=16), narrow, 2)
