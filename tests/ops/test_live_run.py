"""The facts that a running pipeline tells, in the order in which they come to be known."""

from dataclasses import replace
from typing import Any

import pytest

from tallystick.epoch import protocol
from tallystick.epoch.manifest import epoch_of
from tallystick.host.stopwatch import (
    FUNCTIONS,
    READ,
    READ_RECORDS,
    ROWS_IN,
    ROWS_OUT,
    WAIT,
    TaskTimes,
)
from tallystick.ops.ui import rendering
from tallystick.ops.ui.facts import (
    EpochFact,
    EventTimesFact,
    PageFacts,
    PartitionFact,
    StepFact,
    TransactionFact,
)
from tallystick.ops.ui.page import BEGINS, LiveRun
from tallystick.pipeline.listeners import PIPELINES, PipelineCounts
from tallystick.run.part_times import PartTimes
from tallystick.run.query import PROGRESS_COUNT
from tallystick.state.overlay import FINAL_WATERMARK_MS
from tallystick.values import (
    SINK,
    SOURCE,
    TASKS,
    CheckFinding,
    GraphNode,
    ProducedRange,
    Producer,
    Severity,
)
from tests.ops.test_metrics import offsets

EMPTY = CheckFinding(Severity.WARNING, "checkpoint", "it holds no committed epoch")
LOOKED = PageFacts("", "checkpoint", looked_ms=0, findings=(EMPTY,), kafka=True)
MANIFEST = protocol.ManifestWritten("0-a.json")
EPOCH = [
    protocol.EpochPlanned(("end",)), protocol.EpochRan(()), MANIFEST,
    protocol.TransactionCommitted(Producer("t", 1, 0)),
]  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time of the page; a test sets it."""
    now = [1000]
    monkeypatch.setattr("tallystick.ops.ui.page.now_ms", lambda: now[0])
    return now


def test_a_checkpoint_looked_at_before_the_first_epoch_ended_is_no_error(clock):
    live = LiveRun(None)
    facts = replace(LOOKED, looked_ms=900)

    assert live.add_to(facts).findings == (BEGINS,)
    for event in EPOCH:
        live(event)
    assert live.add_to(facts).findings == (BEGINS,), "what was looked at is older than the epoch"
    for number in (-1, next(iter(live._decided))):
        midway = replace(facts, decided=EpochFact(number, decided_ms=950, offsets=0, rows=0))
        assert live.add_to(midway).findings == (BEGINS,), "decided in the middle of the look"


def test_kafka_may_say_that_the_first_epoch_is_decided_before_the_driver_is_told(clock):
    live = LiveRun(None)
    fact = EpochFact(epoch_of(MANIFEST.path), decided_ms=950, offsets=0, rows=0)
    facts = replace(LOOKED, looked_ms=900, decided=fact)

    assert live.add_to(facts).findings == (EMPTY,), "an epoch of an earlier run"
    for event in EPOCH[:-1]:
        live(event)
    assert live.add_to(facts).findings == (BEGINS,)


def test_a_checkpoint_that_is_empty_after_an_epoch_is_an_error(clock):
    live = LiveRun(None)
    for event in EPOCH:
        live(event)

    assert live.add_to(replace(LOOKED, looked_ms=1001)).findings == (EMPTY,)


def test_what_was_found_counts_where_kafka_was_not_asked(clock):
    assert LiveRun(None).add_to(replace(LOOKED, kafka=False)).findings == (EMPTY,)


@pytest.mark.parametrize(
    ("watermark_ms", "words"),
    [
        (FINAL_WATERMARK_MS, "Watermark at the end of all inputs."),
        (1_764_000_000_000_000, "1764000000000000 ms since 1970, after the year 9999"),
        (-70_000_000_000_000, "-70000000000000 ms since 1970, before the year 1"),
        (253_402_300_799_999, "9999-12-31 23:59:59 UTC"),
    ],
)
def test_the_page_is_shown_whatever_watermark_a_checkpoint_holds(watermark_ms, words):
    step = StepFact("s", watermark_ms, 0, 0, 128, (), 0.0)
    assert words in rendering.page(PageFacts("p", "/tmp/x", 1_700_000_000_000, steps=(step,)))


def test_the_page_says_what_the_watermark_waits_for_what_idles_and_what_is_not_read_on():
    times = EventTimesFact(3, "bids-0", 12, ("people-0", "people-1"), 1, 2, ("bids-1", "bids-2"))
    shown = rendering.page(PageFacts("p", "/tmp/x", 0, event_times=times))
    assert "waits for 3, bids-0 is the slowest; 12 idle, and not waited for: people-0" in shown
    assert "1 at the end of their stream; 2 not read on because of max_drift: bids-1" in shown


class Running:
    """A query as the page asks it, with 100 records and 50 rows in each epoch of a run."""

    name, runId, isActive = "p", "r", True  # noqa: N815
    status = {"message": "Running"}  # noqa: RUF012

    def __init__(self, live: LiveRun) -> None:
        self.live = live
        self.tasks: list[dict[str, Any]] = []
        self.progress: list[dict[str, Any]] = []
        live.show(self)  # type: ignore[arg-type]

    @property
    def recentProgress(self) -> list[dict[str, Any]]:
        return self.progress[-PROGRESS_COUNT:]

    @property
    def lastProgress(self) -> dict[str, Any]:
        return self.progress[-1]

    def exception(self) -> None:
        return None

    def epoch(self) -> None:
        number = len(self.progress)
        manifest = protocol.ManifestWritten(f"{number}-1-a.json")
        rows = (ProducedRange("out", 0, 50, 0, 49),)
        for event in (EPOCH[0], protocol.EpochRan(rows), manifest, EPOCH[-1]):
            self.live(event)
        at = offsets(100 * number)
        source = {"startOffset": at, "endOffset": at, "latestOffset": at}
        self.progress.append(
            {
                "batchId": number, "epochSize": None, "numInputRows": 100, "sources": [source],
                "tasks": self.tasks, "durationMs": {"tasks": 20},
            }
        )  # fmt: skip


@pytest.mark.parametrize("epoch_ms", [50, 500])
def test_rates_are_those_of_the_last_seconds_and_not_of_the_time_in_epochs(clock, epoch_ms):
    """Also where the progress that is kept reaches less far back: it has 100 epochs."""
    live = LiveRun(None)
    query = Running(live)
    for _ in range(20_000 // epoch_ms):
        clock[0] += epoch_ms
        query.epoch()

    run = live.add_to(LOOKED).run
    assert run is not None
    assert run.records_per_s == pytest.approx(100 * 1000 / epoch_ms)
    assert run.rows_per_s == pytest.approx(50 * 1000 / epoch_ms)
    assert run.records_per_busy_s == pytest.approx(100 / 0.020)
    clock[0] += 60_000
    run = live.add_to(LOOKED).run
    assert run is not None
    assert (run.records_per_s, run.rows_per_s) == (0, 0)


def test_the_lag_is_not_known_while_kafka_is_away_and_no_epoch_ends(clock):
    live = LiveRun(None)
    query = Running(live)
    query.epoch()
    away = replace(LOOKED, kafka=False, partitions=(PartitionFact("t", 0, 0, None),))

    assert live.add_to(away).lag == 0, "an epoch has just seen the ends"
    clock[0] += 11_000
    assert live.add_to(away).lag is None
    assert '<dd id="lag">not known</dd>' in rendering.page(live.add_to(away))
    assert live.add_to(replace(away, kafka=True)).lag == 0


def test_the_transaction_of_an_epoch_at_work_is_not_called_open(clock):
    live = LiveRun(None)
    Running(live).epoch()

    def shown(age_ms: int) -> tuple[TransactionFact, ...]:
        at_work = TransactionFact("t", "Ongoing", age_ms, 900_000, (), "a whole epoch's")
        return live.add_to(replace(LOOKED, transactions=(at_work,))).transactions

    assert len(shown(200)) == 1, "older than the run"
    clock[0] += 60_000
    assert shown(200) == ()
    assert len(shown(20_000)) == 1, "open for long"


def test_the_graph_has_rates_and_shares_of_the_last_seconds(clock, monkeypatch):
    """Two tasks each work for 30 ms and wait for 20 of the 100 ms of an epoch."""
    counts = PipelineCounts()
    monkeypatch.setitem(PIPELINES, "p", counts)
    counts.graph = (
        (GraphNode(SOURCE, "in", ("orders",)),),
        (GraphNode(TASKS, "read", ("clean",)),),
        (GraphNode(TASKS, "counts", ("by k",)),),
        (GraphNode(SINK, "sink", ("out",)),),
    )
    counts.tasks = (
        TaskTimes(1, {WAIT: 20.0, FUNCTIONS: 30.0}, {ROWS_IN: 60, ROWS_OUT: 5}, 1, "b"),
        TaskTimes(0, {READ: 5.0}, {READ_RECORDS: 100, ROWS_OUT: 90}, 0, "a"),
        TaskTimes(1, {WAIT: 20.0, FUNCTIONS: 30.0}, {ROWS_IN: 30, ROWS_OUT: 5}, 0, "a"),
    )
    live = LiveRun(None)
    query = Running(live)
    parts = PartTimes(lambda _: None)
    parts.note_tasks(counts.tasks)
    query.tasks = parts.tasks(["counts"])
    step = StepFact("counts", 7_000, 0, 0, 128, (), 0.0)
    looked = replace(LOOKED, steps=(step,), partitions=(PartitionFact("orders", 0, 5, 15),))
    for _ in range(150):
        clock[0] += 100
        query.epoch()

    facts = live.add_to(looked)
    read, keyed, sink = (layer[0] for layer in facts.graph[1:])
    assert (read.tasks, read.in_per_s, read.out_per_s) == (1, 1000, 900)
    assert (keyed.tasks, keyed.in_per_s, keyed.out_per_s) == (2, 900, 100)
    assert (keyed.busy, keyed.waiting) == (pytest.approx(0.3), pytest.approx(0.2))
    assert (keyed.watermark_ms, read.watermark_ms) == (7_000, None)
    assert sink.in_per_s == 500
    assert facts.graph[0][0].lag == facts.lag
    assert [(task.step, task.number, task.host, task.rows_in) for task in facts.tasks] == [
        ("read", 0, "a", 100), ("counts", 0, "a", 30), ("counts", 1, "b", 60),
    ]  # fmt: skip
    page = rendering.page(facts)
    assert "900 rows/s in<br>100 rows/s out" in page
    assert "busy 30 %<br>waiting 20 %" in page
    clock[0] += 60_000
    idle = live.add_to(looked).graph[2][0]
    assert (idle.in_per_s, idle.busy, idle.waiting) == (0, 0, 0)


def test_a_step_whose_epochs_take_long_is_not_shown_as_idle(clock, monkeypatch):
    counts = PipelineCounts(graph=((GraphNode(SOURCE, "in"),), (GraphNode(TASKS, "read"),)))
    monkeypatch.setitem(PIPELINES, "p", counts)
    live = LiveRun(None)
    query = Running(live)
    parts = PartTimes(lambda _: None)
    parts.note_tasks([TaskTimes(0, {READ: 40_000.0}, {READ_RECORDS: 100})])
    query.tasks = parts.tasks([])
    for _ in range(3):
        clock[0] += 40_000
        query.epoch()
        query.progress[-1]["durationMs"] = {"tasks": 40_000}
    clock[0] += 20_000  # in the midst of the next one
    read = live.add_to(LOOKED).graph[1][0]
    assert read.in_per_s == pytest.approx(100 / 60)
    assert read.busy == pytest.approx(40 / 60)


def test_the_history_has_bytes_and_duration(clock):
    live = LiveRun(None)
    query = Running(live)
    query.epoch()
    query.progress[-1] |= {"bytes": {"read": 2048, "written": 512}, "files": {"bytes": 1024}}
    facts = live.add_to(LOOKED)
    epoch = facts.epochs[-1]
    assert (epoch.read_bytes, epoch.written_bytes, epoch.took_ms) == (2048, 1536, 20)
    assert "<td>2.0 KiB</td><td>1.5 KiB</td><td>20</td>" in rendering.sections(facts)["epochs"]
