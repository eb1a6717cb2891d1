"""Spark's words for when an epoch begins."""

import threading
from datetime import timedelta

import pytest

from tallystick.errors import OptionError
from tallystick.kafka.config import KafkaConfig
from tallystick.options.source import parse_source_options
from tallystick.run.epoch_loop import Trigger
from tallystick.run.query import Query
from tallystick.text import WAIT_MAX_MS


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


@pytest.mark.parametrize("interval", ["200000 days", f"{10**30} ms", timedelta(days=200_000)])
def test_an_interval_that_no_process_can_wait_for_is_refused_by_name(interval):
    over = threading.Event()
    over.set()
    assert over.wait(WAIT_MAX_MS / 1000), "Python can wait for it"
    with pytest.raises(OptionError, match=r"processingTime=.*: expected at most 285 years"):
        Trigger.of({"processingTime": interval})


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


def test_so_is_any_other_time_that_is_waited_for():
    query = object.__new__(Query)  # nothing is asked of it: the arguments are looked at first
    with pytest.raises(OptionError, match=r"awaitTermination\(timeout=1.*\): .*285 years"):
        query.awaitTermination(1e11)
    for wrong in (1e11, float("nan"), "soon", None):
        with pytest.raises(OptionError, match=r"stop\(timeout="):
            query.stop(drain=True, timeout=wrong)
    with pytest.raises(OptionError, match=r"stop\(savepoint=5\)"):
        query.stop(savepoint=5)
    with pytest.raises(OptionError, match=r"stop\(drian=…\).* Did you mean .drain."):
        query.stop(drian=True)

    servers = {"bootstrap.servers": "localhost:9092"}
    with pytest.raises(OptionError, match=r"delivery.timeout.ms is '99999999999999'.*285 years"):
        KafkaConfig.from_options({**servers, "delivery.timeout.ms": "99999999999999"})
    with pytest.raises(OptionError, match=r"maxTriggerDelay.*285 years"):
        parse_source_options({"subscribe": "t", "maxTriggerDelay": "200000 days"})
