"""What the user did not set follows from what he set, so that one setting alone can always work."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_preflight import FACTS

import tallystick as ts
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import (
    CALL_TIMEOUT_MS,
    REQUEST_TIMEOUT_MS,
    SESSION_TIMEOUT_MS,
    TRANSACTION_TIMEOUT_MIN_MS,
    TRANSACTION_TIMEOUT_MS,
    KafkaConfig,
    call_timeouts,
    failover_ms,
)
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.preflight import check

LONGEST_MS = 2**31 - 1
transaction_timeouts = st.integers(TRANSACTION_TIMEOUT_MIN_MS, LONGEST_MS) | st.integers(
    TRANSACTION_TIMEOUT_MIN_MS, 200_000
)


@settings(deadline=None)
@given(transaction_timeouts)
@example(TRANSACTION_TIMEOUT_MIN_MS)
@example(failover_ms(SESSION_TIMEOUT_MS))
@example(failover_ms(SESSION_TIMEOUT_MS) + 2)
@example(15_000)
@example(TRANSACTION_TIMEOUT_MS)
def test_any_transaction_timeout_works_with_nothing_else_set(transaction_ms):
    facts = replace(FACTS, transaction_timeout_max_ms=transaction_ms)
    sink = ts.KafkaSink("host:9092", topic="out", transaction_timeout_ms=transaction_ms)

    config = sink.output.config
    call_ms = config.delivery_timeout_ms
    assert config.request_timeout_ms < call_ms < transaction_ms
    findings = check(facts, sink.output, trigger_interval_ms=None)
    assert findings.problems == ()
    survives = transaction_ms >= failover_ms(SESSION_TIMEOUT_MS) + 2
    assert (call_ms > failover_ms(SESSION_TIMEOUT_MS)) == survives
    assert any("failover of a broker" in warning for warning in findings.warnings) == (not survives)


@given(
    st.none() | st.integers(TRANSACTION_TIMEOUT_MIN_MS, LONGEST_MS),
    st.none() | st.integers(1, LONGEST_MS),
    st.none() | st.integers(2, LONGEST_MS),
)
def test_what_is_set_stays_and_what_is_not_contradicts_nothing_that_is(transaction, request, call):
    timeouts = call_timeouts(transaction, request, call)

    assert request in (None, timeouts.request_ms)
    assert call in (None, timeouts.call_ms)
    own = [timeout_ms for timeout_ms in (request, call, transaction) if timeout_ms is not None]
    if all(lower + 1 < upper for lower, upper in pairwise(own)):
        assert timeouts.request_ms < timeouts.call_ms
        assert transaction is None or timeouts.call_ms < transaction


def test_there_is_one_default_and_it_is_not_shortened():
    output = ts.KafkaSink("host:9092", topic="out").output

    assert output.transaction_timeout_ms == TRANSACTION_TIMEOUT_MS
    assert output == KafkaOutput(output.config, "out", "out")
    assert KafkaBroker(output.config)._transaction_timeout_ms == TRANSACTION_TIMEOUT_MS
    for config in (output.config, KafkaConfig("host:9092")):
        assert config.request_timeout_ms == REQUEST_TIMEOUT_MS
        assert config.delivery_timeout_ms == CALL_TIMEOUT_MS


def test_a_contradiction_of_the_users_own_is_refused():
    with pytest.raises(ts.OptionError, match=r"transaction_timeout_ms.*whole number from 1000"):
        ts.KafkaSink("host:9092", topic="out", transaction_timeout_ms=999)
    sink = ts.KafkaSink(
        "host:9092",
        topic="out",
        transaction_timeout_ms=15_000,
        options={"kafka.delivery.timeout.ms": "120000"},
    )
    (problem,) = check(FACTS, sink.output, trigger_interval_ms=None).problems
    assert "kafka.delivery.timeout.ms is 120000, transaction_timeout_ms 15000" in problem
    assert "leave it out" in problem
