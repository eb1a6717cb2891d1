"""Late rows in metrics: those of committed epochs, once."""

import pytest
from prometheus_client import CollectorRegistry

from tallystick.epoch import protocol as c
from tallystick.ops import metrics
from tallystick.spark.listeners import PIPELINES, EpochCounts
from tallystick.values import Producer

RAN = c.EpochRan((), (), (("visits", 3), ("totals", 1)))
FENCED = c.ProducerFenced(Producer("t", 1, 0))
COMMITTED = c.TransactionCommitted(Producer("t", 1, 0))
FAILED = c.ActionFailed(OSError("no answer"))


@pytest.fixture(autouse=True)
def _no_counts_of_others() -> None:
    PIPELINES.clear()


@pytest.mark.parametrize(
    ("events", "count"),
    [
        ([RAN], None),
        ([RAN, COMMITTED], 3),
        ([RAN, COMMITTED, COMMITTED], 3),
        ([RAN, FAILED, FENCED, COMMITTED], None),
        ([RAN, FAILED, FENCED, RAN, COMMITTED, RAN, COMMITTED], 6),
    ],
)
def test_late_rows_count_when_their_epoch_is_committed(events, count):
    registry = CollectorRegistry()
    metrics.register(registry)
    heard: list[c.Event] = []
    listener = EpochCounts("job", heard.append)

    for event in events:
        listener(event)

    labels = {"query": "job", "step": "visits"}
    assert registry.get_sample_value("tallystick_late_rows_total", labels) == count
    assert heard == events
