"""The numbers of the page's charts: what is cut off is named, and nothing is made up."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.ops.ui.facts import EpochFact, PageFacts
from tallystick.ops.ui.rendering import charts, end_of

EPOCHS = st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, 500), st.integers(0, 500)))


def of(*epochs: EpochFact) -> dict:
    return charts(PageFacts("", "", 0, epochs=epochs))


def epoch(number: int, took_ms: float = 50, decided_ms: int | None = None) -> EpochFact:
    parts = (("plan", 1.0), ("read", took_ms - 1))
    return EpochFact(number, decided_ms, 12, 3, records=10, parts_ms=parts)


def test_the_first_epoch_does_not_flatten_the_others():
    parts = of(epoch(0, 2700), *(epoch(number, 40 + number) for number in range(1, 30)))["parts"]

    assert parts["end"] == pytest.approx(1.2 * 69)
    assert parts["cut"] == "epoch 0: 2,700 ms"
    assert parts["ms"]["read"][0] == 2699


def test_nothing_is_cut_off_where_nothing_stands_out():
    parts = of(*(epoch(number, 40 + number) for number in range(30)))["parts"]

    assert (parts["end"], parts["cut"]) == (None, "")


@given(st.lists(st.none() | st.integers(0, 10_000)))
def test_at_most_one_in_twenty_is_cut_off_and_one(values):
    end = end_of(values)
    known = [value for value in values if value is not None]

    if end is not None:
        assert 1 <= sum(value > end for value in known) <= max(1, len(known) // 20)
        assert max(known) > 2 * end / 1.2


@given(EPOCHS)
def test_throughput_times_time_is_what_was_read_and_put_out(epochs_read):
    """The first epoch's time is not known: nobody knows when what it read began to come."""
    at, epochs = 1_000, []
    for number, (took_ms, read, rows) in enumerate(epochs_read):
        at += took_ms
        epochs.append(EpochFact(number, at, 0, rows, records=read))
    chart = of(*epochs)["throughput"]

    times = [(epochs[0].decided_ms or 0) / 1000, *chart["x"]] if epochs else []
    spans = [after - before for before, after in pairwise(times)]
    for name, index in (("in", 1), ("out", 2)):
        total = sum(rate * span for rate, span in zip(chart[name], spans, strict=True))
        assert total == pytest.approx(sum(figures[index] for figures in epochs_read[1:]), abs=1e-3)


def test_offsets_are_called_offsets_where_no_run_told_the_records():
    epoch_charts = of(epoch(0), epoch(1))
    untold = of(EpochFact(0, 0, None, 0), EpochFact(1, 5, 12, 3))

    assert (epoch_charts["readName"], epoch_charts["counts"]["in"]) == ("Records in", [10, 10])
    assert (untold["readName"], untold["counts"]["in"]) == ("Offsets in", [None, 12])
    assert untold["parts"] is None
