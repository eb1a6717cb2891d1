"""Epochs in metrics: what they counted, once, when they are committed."""

import time

import pytest
from prometheus_client import CollectorRegistry

from tallystick.epoch import protocol as c
from tallystick.epoch.facts import CommittedEpoch
from tallystick.epoch.tokens import Token
from tallystick.epoch.two_phase import Committable, Outcome
from tallystick.errors import FencedError
from tallystick.ops import metrics
from tallystick.pipeline.listeners import PIPELINES, EpochCounts
from tallystick.values import ProducedRange, Producer

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
    events_received: list[c.Event] = []
    listener = EpochCounts("job", events_received.append)

    for event in events:
        listener(event)

    labels = {"query": "job", "step": "visits"}
    assert registry.get_sample_value("tallystick_late_rows_total", labels) == count
    assert events_received == events


SEED = [c.EpochPlanned(("end",)), c.ManifestWritten("seed"), COMMITTED, FENCED]


@pytest.mark.parametrize(
    ("events", "started", "aborted"),
    [
        ([c.EpochWanted(), FENCED, c.EpochPlanned(None)], 0, 0),
        ([FAILED, FENCED], 0, 0),
        ([c.EpochPlanned(("end",))], 1, 0),
        ([*SEED, c.EpochPlanned(("end",)), RAN, COMMITTED], 1, 0),
        ([c.EpochPlanned(("end",)), FAILED, FENCED, c.EpochPlanned(("end",))], 2, 1),
        ([c.EpochPlanned(("end",)), RAN, FAILED, c.EpochPlanned(("end",)), RAN, COMMITTED], 2, 1),
        ([RAN, COMMITTED], 1, 0),
        ([RAN, FAILED, RAN, COMMITTED], 2, 1),
    ],
)
def test_each_epoch_that_is_started_is_committed_or_aborted_or_in_flight(events, started, aborted):
    """The first one of a lineage is planned twice; one whose output is lost runs without a plan."""
    listener = EpochCounts("job", None, 1000)

    for event in events:
        listener(event)

    counts = PIPELINES["job"]
    assert (counts.epochs_started, counts.aborted.total()) == (started, aborted)


def test_open_transactions_are_those_of_the_reports_and_the_one_that_decides():
    registry = CollectorRegistry()
    metrics.register(registry)
    begun_ms = (time.time_ns() // 1_000_000) - 60_000
    files = [Committable("files", 3, task, f"part-{task}", 5, begun_ms) for task in (0, 1)]
    unknown = Committable("files", 3, 2, "part-2", 5, begun_ms=0)
    listener = EpochCounts("job", None, 1000, None, "kafka", ["kafka", "files"])

    def look(sink: str) -> tuple[float | None, float | None]:
        labels = {"query": "job", "sink": sink}
        names = "tallystick_open_transactions", "tallystick_oldest_transaction_seconds"
        count, age_s = (registry.get_sample_value(name, labels) for name in names)
        return count, age_s

    assert (look("kafka"), look("files")) == ((0, 0), (0, 0))
    listener(c.EpochPlanned(("end",)))
    assert look("kafka") == (1, pytest.approx(0, abs=5))
    listener(c.EpochRan((), committables=(*files, unknown)))
    assert look("files") == (3, pytest.approx(60, abs=5))
    listener(COMMITTED)
    assert (look("kafka"), look("files")[0]) == ((0, 0), 3), "decided, and not yet visible"
    open_now = PIPELINES["job"].transactions
    open_now.note(files[0], OSError("no answer"))
    for file in files:
        open_now.note(file, Outcome.COMMITTED)
    assert look("files") == (1, 0), "its age is not known"
    listener(c.ActionFailed(FencedError("a newer run")))
    assert look("files") == (0, 0)


ROWS = c.EpochRan((ProducedRange("out", 0, 6, 0, 5),))
PATH = "manifests/1-a.json"
LOST_REPLY = [
    c.EpochPlanned(("end",)), ROWS, c.ManifestWritten(PATH), c.OutputCounted({}), FAILED, FENCED,
]  # fmt: skip


def committed_read(path: str) -> c.CommittedRead:
    token = Token(1, "lineage", "checkpoint", path)
    return c.CommittedRead(CommittedEpoch(token, manifest=None, manifest_exists=True))


@pytest.mark.parametrize(
    ("events", "rows", "aborted"),
    [
        ([committed_read(PATH), c.OutputConfirmed({}), c.EpochPlanned(None)], 6, 0),
        ([committed_read("manifests/0-a.json")], 0, 1),
        ([FAILED, FENCED, committed_read(PATH)], 6, 0),
        ([committed_read("manifests/0-a.json"), ROWS, COMMITTED], 6, 1),
    ],
)
def test_an_epoch_whose_commit_got_no_answer_counts_once_kafka_was_asked(events, rows, aborted):
    """The order of `tests/run/scenarios/lost_reply_to_the_commit.txt`."""
    listener = EpochCounts("job", None, 1000)

    for event in [*LOST_REPLY, *events]:
        listener(event)

    counts = PIPELINES["job"]
    assert (counts.rows_written, counts.aborted.total()) == (rows, aborted)
    assert bool(counts.committed_ms) == (rows > 0)
    assert counts.failures["OSError"] >= 1
