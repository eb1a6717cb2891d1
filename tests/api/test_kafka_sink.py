"""Arguments of a sink are checked like the options of the same meaning, under their own names."""

import re

import pytest

import tallystick as ts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"topic": " "}, "topic=' ': expected a topic's name"),
        ({"compression": "brotli"}, "compression='brotli': expected one of none, gzip"),
        ({"batch_bytes": 10}, "batch_bytes=10: expected a whole number from 1024"),
        ({"transaction_timeout_ms": 999}, "transaction_timeout_ms=999: expected a whole number"),
        ({"transactions": "task", "max_recovery_ms": -1}, "max_recovery_ms=-1: expected"),
        ({"options": {"kafka.acks": "1"}}, "kafka.acks is '1': it must be one of all, -1"),
    ],
)
def test_an_argument_that_cannot_work_is_named(settings, message):
    with pytest.raises(ts.OptionError, match=re.escape(message)):
        ts.KafkaSink("host:9092", **{"topic": "out", **settings})


def test_words_are_taken_in_any_case_as_in_options():
    assert ts.KafkaSink("host:9092", topic="out", compression="ZSTD").output.compression == "zstd"
