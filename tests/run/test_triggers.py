"""Spark's words for when an epoch begins."""

import pytest

from tallystick.errors import OptionError
from tallystick.run.epoch_loop import Trigger


@pytest.mark.parametrize(
    ("arguments", "trigger"),
    [
        (None, Trigger()),
        ({"availableNow": True}, Trigger(is_available_now=True)),
        ({"once": True}, Trigger(is_available_now=True)),
        ({"processingTime": "1 second"}, Trigger(1_000)),
        ({"processingTime": "500 milliseconds"}, Trigger(500)),
        ({"processingTime": "250ms"}, Trigger(250)),
        ({"processingTime": "interval 2 minutes 30 seconds"}, Trigger(150_000)),
        ({"processingTime": "0 seconds"}, Trigger(0)),
    ],
)
def test_a_trigger_is_what_spark_would_take_it_for(arguments, trigger):
    assert Trigger.of(arguments) == trigger


@pytest.mark.parametrize(
    "arguments",
    [
        {"processingTime": "soon"},
        {"processingTime": "1 parsec"},
        {"processingTime": ""},
        {"continuous": "1 second"},
        {"availableNow": False},
        {"availableNow": True, "once": True},
    ],
)
def test_what_is_no_trigger_is_refused_with_what_would_be_one(arguments):
    with pytest.raises(OptionError, match="processingTime"):
        Trigger.of(arguments)
