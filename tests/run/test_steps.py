"""Where each step runs."""

import pytest

from tallystick.errors import OptionError
from tallystick.tasks.steps import MapBatches, Process, Transform, arrange


def first(batch):
    return batch


def second(batch):
    return batch


def frame(rows):
    return rows


def test_without_dataframe_code_everything_runs_in_the_reader():
    stages = arrange((MapBatches(first), MapBatches(second)), "a int")

    assert (stages.before, stages.frames, stages.after) == ((first, second), None, ())


def test_dataframe_code_splits_the_functions():
    stages = arrange((MapBatches(first, "b int"), Transform(frame), MapBatches(second)), "a int")

    assert stages.before == (first,)
    assert stages.frames is not None
    assert stages.frames.ddl == "b int"
    assert stages.after == (second,)


def test_a_transform_right_behind_the_reader_has_the_columns_of_the_source():
    stages = arrange((Transform(frame),), "a int")

    assert stages.frames is not None
    assert stages.frames.ddl == "a int"


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((MapBatches(first), Transform(frame)), "needs schema="),
        ((Transform(frame), MapBatches(first), Transform(frame)), "between two transform"),
    ],
)
def test_what_spark_could_not_plan_is_refused(steps, message):
    with pytest.raises(OptionError, match=message):
        arrange(steps, "a int")


def process(uid=None, **settings):
    return Process(uid, ("a",), processor=None, output="b int", **settings)


def test_keyed_steps_know_the_columns_that_come_to_them_and_their_own_functions():
    stages = arrange(
        (
            MapBatches(first, "a int"),
            process("first"),
            MapBatches(second),
            MapBatches(first, "a int, c int"),
            process("second"),
            process("named"),
            MapBatches(second),
        ),
        "source int",
    )

    assert (stages.before, stages.frames, stages.after) == ((first,), None, ())
    assert [(stage.uid, stage.columns, stage.functions) for stage in stages.keyed] == [
        ("first", "a int", (second, first)),
        ("second", "a int, c int", ()),
        ("named", None, (second,)),
    ]


def test_the_only_keyed_step_needs_no_uid_and_keeps_its_state_when_it_gets_one():
    """Else a checkpoint of before could not go on with a second step."""
    (alone,) = arrange((process(),), "a int").keyed
    steps = (process("new"), MapBatches(first, "a int"), process(alone.uid))

    assert [stage.uid for stage in arrange(steps, "a int").keyed] == ["new", alone.uid]


def test_behind_dataframe_code_the_columns_are_the_dataframes():
    stages = arrange((Transform(frame), process()), "a int")

    assert [stage.columns for stage in stages.keyed] == [None]
    stages = arrange((Transform(frame), MapBatches(first, "c int"), process()), "a int")
    assert stages.after == (first,)
    assert [stage.columns for stage in stages.keyed] == ["c int"]


def test_a_keyed_step_behind_the_reader_has_the_columns_of_the_source():
    assert arrange((process(),), "a int").keyed[0].columns == "a int"


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((process(), Transform(frame)), "DataFrame code would drop it"),
        ((MapBatches(first), process()), r"before key_by\('a'\) needs schema="),
        ((process("x"), process("x")), "two process steps have uid 'x'"),
        ((process(), process("x")), r"process step 1, after key_by\('a'\), has no uid"),
        ((process("x"), MapBatches(first, "a int"), process()), "process step 2, .* has no uid"),
        ((process(), process()), "process step 1, .* was the only one is under uid='process-1'"),
    ],
)
def test_what_state_could_not_follow_is_refused(steps, message):
    with pytest.raises(OptionError, match=message):
        arrange(steps, "a int")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"uid": "a/b"}, "uid='a/b'.*it names files"),
        ({"parallelism": 0}, "parallelism=0"),
        ({"max_parallelism": 40_000}, "max_parallelism=40000: expected 1 to 32768"),
        ({"parallelism": 9, "max_parallelism": 8}, "there are 8 key groups"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(OptionError, match=message):
        process(**settings)
