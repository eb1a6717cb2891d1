"""Spans of time have one grammar, which takes whatever one of the three before it took."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import OptionError
from tallystick.options.source import parse_source_options
from tallystick.run.epoch_loop import interval_ms
from tallystick.text import duration_ms, signed_duration_ms, span_ms

MS = {
    **dict.fromkeys(["ms", "msec", "millisecond"], 1),
    **dict.fromkeys(["s", "sec", "second"], 1_000),
    **dict.fromkeys(["m", "min", "minute"], 60_000),
    **dict.fromkeys(["h", "hour"], 3_600_000),
    "day": 86_400_000,
}
WHOLE = st.integers(0, 10**4)  # a hundred thousand days are refused where they are waited for
SPACE = st.sampled_from(["", " ", "  ", "\t"])
OF_SPARK = ("millisecond", "msec", "ms", "second", "sec", "minute", "min", "hour", "day")


def cased(texts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return texts.flatmap(lambda text: st.sampled_from([text, text.upper(), text.title()]))


@given(
    st.integers(0, 10**7),  # more days are refused
    st.sampled_from(["millisecond", "second", "minute", "hour", "day"]),
    st.data(),
)
def test_two_words_as_for_the_watermark_of_spark(number, unit, data):
    text = f"{number} {data.draw(cased(st.sampled_from([unit, f'{unit}s'])))}"

    assert duration_ms("delay", text) == span_ms(f" {text} ") == number * MS[unit]
    assert signed_duration_ms("lower", "-5 minutes") == -300_000


@given(WHOLE, st.sampled_from(["ms", "s", "m", "min", "h"]), st.sampled_from(["", " "]), st.data())
def test_a_number_and_a_letter_as_for_a_delay_of_triggers(number, unit, space, data):
    text = data.draw(cased(st.just(f"{number}{space}{unit}")))

    options = {
        "kafka.bootstrap.servers": "host:9092",
        "subscribe": "t",
        "maxTriggerDelay": text,
    }
    assert parse_source_options(options).trigger_delay_max_ms == number * MS[unit]


@given(
    st.lists(
        st.tuples(
            SPACE,
            WHOLE | st.decimals(0, 10**4, places=2).map(abs),
            SPACE,
            st.sampled_from(OF_SPARK),
            cased(st.sampled_from(["", "s"])),
            SPACE,
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["", "interval "]),
)
def test_parts_that_add_up_as_for_a_trigger_of_spark(parts, prefix):
    text = prefix + "".join(
        f"{before}{number}{between}{unit}{plural}{after}"
        for before, number, between, unit, plural, after in parts
    )

    total = sum(float(number) * MS[unit] for _, number, _, unit, _, _ in parts)
    assert interval_ms(text) == pytest.approx(total, abs=1)


def test_whole_numbers_are_exact_however_large():
    assert span_ms(f"{2**53 + 1} ms") == 2**53 + 1


@pytest.mark.parametrize(
    "text",
    ["", " ", "5", "ms", "-5 s", "1.5", "1. s", ".5 s", "5 parsec", "5 s x", "s 5", "interval "],
)
def test_what_is_no_span_of_time_is_refused_where_it_is_given(text):
    assert span_ms(text) is None
    with pytest.raises(OptionError, match=re.escape(f"delay={text!r}: expected whole ms from 0")):
        duration_ms("delay", text)
    with pytest.raises(OptionError, match="is no interval: expected a number and a unit"):
        interval_ms(text)
    with pytest.raises(OptionError, match="is no interval"):
        interval_ms(5)


@pytest.mark.parametrize("span", [(1 << 52) + 1, "1000000000 days", 10**30])
def test_no_span_is_longer_than_an_event_time_can_be_moved(span):
    for check in (duration_ms, signed_duration_ms):
        assert check("delay", 1 << 52) == 1 << 52
        with pytest.raises(OptionError, match=r"delay=.* more than 140,000 years"):
            check("delay", span)
