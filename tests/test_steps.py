"""Where each step runs."""

import pytest

from tallystick.errors import OptionError
from tallystick.steps import MapBatches, Transform, arrange


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
    ("steps", "told"),
    [
        ((MapBatches(first), Transform(frame)), "needs schema="),
        ((Transform(frame), MapBatches(first), Transform(frame)), "between two transform"),
    ],
)
def test_what_spark_could_not_plan_is_refused(steps, told):
    with pytest.raises(OptionError, match=told):
        arrange(steps, "a int")
