"""The page of one pipeline to which all has happened, its numbers compared with the truth.

Keyed state and event time, rows that come too late, records that are malformed, an epoch that is
aborted, and local copies of state that are not there when the pipeline is started again.
"""

import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import IsolationLevel
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.errors import EpochAbortedError
from tallystick.state.functions.keyed_batch import KeyedBatch, Update
from tallystick.state.functions.processing import EVENT_TIME
from tallystick.state.functions.vectorised import vectorised
from tallystick.testing import EmbeddedKafka
from tallystick.testing.process import free_ports
from tests.ops.browser import Browser
from tests.spark.flow import Flow
from tests.spark.page_look import MARKS, facts_of, number, shown
from tests.spark.topics import ends, produce, read_committed

pytestmark = MARKS
KEYS = 40
DELAY_MS = 10_000
STRIDE_MS = 20_000
"""The event times of a round begin so much after those of the round before."""
ROUNDS_BEFORE, ROUNDS = 3, 36
LATE_IN, POISON_IN, ABORTED_IN = (10, 20), (12, 25), 15
ABORT_REASON = "the test aborts this epoch"


class EventTimes:
    """A pipeline that counts the rows of each key by event time, and what it was fed."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.dead_letter_topic = f"{flow.name}-dead"
        flow.kafka.create_topic(self.dead_letter_topic, 1)
        self.abort = flow.folder / "abort the next epoch"
        self.begun_ms = int(time.time() * 1000) - (ROUNDS + 90) * STRIDE_MS
        self.last_ms = 0
        self.late = self.poison = self.good = 0

    def feed(self, index: int) -> None:
        """Write a round's records: some are late, or malformed, in the rounds named above."""
        at_ms = self.begun_ms + index * STRIDE_MS
        count = 40 + 30 * (index % 7)
        rows = [(f"k{n % KEYS}", at_ms + n % 5_000) for n in range(count)]
        self.last_ms = max(self.last_ms, *(at for _, at in rows))
        self.good += count
        if index in LATE_IN:
            rows += [(f"k{n}", at_ms - 3 * STRIDE_MS) for n in range(5)]
            self.late += 5
        records = [(key, json.dumps({"k": key, "n": at})) for key, at in rows]
        if index in POISON_IN:
            records += [(f"k{n}", f"poison {n}") for n in range(3)]
            self.poison += 3
        if index == ABORTED_IN:
            self.abort.touch()
        produce(self.flow.confluent, self.flow.topic_in, records)

    def pipeline(self, parallelism: int) -> ts.Pipeline:
        """Of so many tasks that hold the keys."""
        flow = self.flow
        source = flow.source(value=ts.Json("k string, n bigint", mode="deadletter"))
        return (
            ts.Pipeline(flow.name)
            .read(source)
            .map_batches(picked_or_aborted(str(self.abort)), schema="k string, n bigint")
            .key_by("k", max_parallelism=16)
            .process(
                counting(),
                output="k string, n bigint, seen bigint",
                event_time="n",
                watermark_delay=DELAY_MS,
                parallelism=parallelism,
                uid="counts",
            )
            .write(flow.sink(key="k", value=ts.Json(), dead_letter_topic=self.dead_letter_topic))
        )


def counting() -> Any:
    """Each row with its number among those of its key; late rows are dropped."""

    def count(batch: KeyedBatch) -> Update:
        seen, totals = batch.running_count(start=batch.held("seen"))
        columns = {"k": batch.rows["k"], "n": batch.rows["n"], "seen": seen}
        return Update(pa.record_batch(columns), {"seen": totals})

    return vectorised(count, state="seen bigint", time_mode=EVENT_TIME)


def picked_or_aborted(path: str) -> Any:
    """The columns of the value; where the file is there, an epoch is aborted, once."""
    reason = ABORT_REASON

    def pick(rows: pa.RecordBatch) -> pa.RecordBatch:
        try:
            Path(path).unlink()
        except FileNotFoundError:
            return rows.select(["k", "n"])
        raise EpochAbortedError(reason)

    return pick


def copies(flow: Flow) -> set[str]:
    """The local copies of state on this host, by their key groups."""
    assert flow.spark is not None
    root = Path(flow.spark.sparkContext.environment["TALLYSTICK_STATE_DIR"])
    lineage = json.loads((flow.checkpoint / "metadata").read_text())["id"]
    return {path.name for path in root.glob(f"*/{lineage}/counts/*") if path.is_dir()}


@pytest.fixture
def running(
    kafka: EmbeddedKafka, spark: SparkSession, tmp_path: Path
) -> Iterator[tuple[EventTimes, ts.Query, str, set[str]]]:
    """The pipeline in its second run, idle, when all has happened; and the new copies of state."""
    flow = Flow(kafka, spark, tmp_path, name="flights-by-the-hour")
    times, (port,) = EventTimes(flow), free_ports(1, "127.0.0.1")
    for index in range(ROUNDS_BEFORE):
        times.feed(index)
    flow.run(times.pipeline(parallelism=2))
    before = copies(flow)
    query = times.pipeline(parallelism=3).start(
        spark,
        checkpoint=str(flow.checkpoint),
        trigger={"processingTime": "200 milliseconds"},
        ui_port=port,
    )
    try:
        for index in range(ROUNDS_BEFORE, ROUNDS):
            times.feed(index)
            query.processAllAvailable()
        yield times, query, f"http://127.0.0.1:{port}/", copies(flow) - before
    finally:
        query.stop()


def test_all_that_can_happen_to_a_pipeline_is_on_its_page(
    running: tuple[EventTimes, ts.Query, str, set[str]], browser: Browser
) -> None:
    times, query, url, new_copies = running
    flow, done_ms = times.flow, time.time() * 1000
    browser.open(url)
    browser.wait_for(lambda: facts_of(url)["looked_ms"] > done_ms)
    browser.wait_for(lambda: utc(facts_of(url)["looked_ms"]) in browser.text("summary"))
    assert browser.text("lag") == "0"
    facts = facts_of(url)
    (step,) = facts["steps"]
    state, summary = browser.text("state"), browser.text("summary")

    # Event time: what was fed says it, and the clock.
    watermark_ms = times.last_ms - DELAY_MS
    assert step["watermark_ms"] == watermark_ms
    match = re.search(rf"Watermark {utc(watermark_ms)}, (\d+) min before now", state)
    assert match, state
    assert abs(int(match[1]) - (time.time() * 1000 - watermark_ms) / 60_000) < 2
    assert f"{times.late} late rows dropped in this run" in state
    assert times.late == 10

    # Topics: librdkafka read them.
    written = read_committed(flow.confluent, flow.topic_out)
    letters = read_committed(flow.confluent, times.dead_letter_topic)
    assert len(written) == times.good
    assert number(browser.text("dead-letters")) == len(letters) == times.poison == 6
    epochs = facts["epochs"]
    fed = sum(ends(flow.confluent, flow.topic_in, IsolationLevel.READ_COMMITTED).values())
    before = sum(40 + 30 * index for index in range(ROUNDS_BEFORE))
    assert len(epochs) == len(query.recentProgress) < 100, "the page has all epochs of the run"
    assert sum(epoch["records"] for epoch in epochs) == fed - before
    assert sum(epoch["rows"] for epoch in epochs) == len(written) - before + len(letters)
    table = browser.rows("epochs")
    assert [[number(cell) for cell in (row[0], *row[2:4])] for row in table] == [
        [epoch["number"], epoch["records"], epoch["rows"]] for epoch in reversed(epochs)
    ][:50]
    assert ["Rows to " + flow.topic_out, f"{len(written) - before:,} in this run"] in browser.rows(
        "summary"
    )

    # The one abort, its reason, and what to do about it.
    assert not times.abort.exists(), "the epoch was aborted"
    assert browser.text("aborted") == "1"
    assert "EpochAbortedError: 1" in summary
    errors = browser.text("errors")
    assert ABORT_REASON in errors
    assert "Nothing of it is visible, and the epoch runs again." in errors
    assert (
        f"transactions list --bootstrap-servers SERVERS --checkpoint '{flow.checkpoint}'" in errors
    )
    assert "Nothing is lost, and nothing is stuck." in summary

    # State: the files, and the folders of this host's copies.
    assert f"newest {len(epochs)} epochs: {len(new_copies)}." in state, new_copies
    assert len(new_copies) == 3
    tasks = [task for progress in query.recentProgress for task in progress["tasks"]]
    reused = sum(task.get("reusedCopies", 0) for task in tasks)
    assert reused > 0
    assert f"Reused: {reused}." in state
    sizes = [size for _, _, size in step["parts"]]
    assert f"skew {max(sizes) / (sum(sizes) / 3):.2f}" in state
    files = [path for path in (flow.checkpoint / "keyed-state").rglob("*.*") if path.is_file()]
    assert 0 < sum(sizes) <= sum(path.stat().st_size for path in files)

    look_at_charts(browser, epochs)
    look_at_it(browser, flow)


def utc(ms: int) -> str:
    """A moment as the page shows it."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def look_at_charts(browser: Browser, epochs: list[dict[str, Any]]) -> None:
    """Every epoch is drawn; one that is far longer than the others does not flatten them."""
    drawn = browser.script("return [newest.counts.x, newest.counts.in, newest.counts.out]")
    assert drawn == [[epoch[name] for epoch in epochs] for name in ("number", "records", "rows")]
    totals = [sum(ms for _, ms in epoch["parts_ms"]) for epoch in epochs]
    top = browser.script("return drawn.parts.plot.scales.y.max")
    assert isinstance(top, int | float)
    beyond = [total for total in totals if total > top]
    usual = sorted(totals)[-1 - max(1, len(totals) // 20)]
    assert top <= 2.2 * usual
    assert len(beyond) == browser.text("cut-parts").count("epoch ")
    heights = browser.script("return drawn.parts.data[1]")
    assert heights == pytest.approx(totals)
    assert browser.script("return !!document.querySelector('#chart-throughput canvas')")
    gap = browser.script(
        "const place = document.querySelector('#chart-throughput .u-legend');"
        "const table = document.querySelector('#epochs').closest('details');"
        "return table.getBoundingClientRect().top - place.getBoundingClientRect().bottom"
    )
    assert isinstance(gap, int | float)
    assert gap > 4, "the legend does not touch what is below it"


def look_at_it(browser: Browser, flow: Flow) -> None:
    """A look at the forms of the page, and pictures of them."""
    assert browser.complaints() == []
    browser.picture("page-live", shown(flow))
    browser.prefer("dark")
    browser.picture("page-dark", shown(flow))
    browser.prefer("light")
    browser.resize(400)
    browser.wait_for(lambda: browser.script("return document.documentElement.scrollWidth") == 400)
    browser.picture("page-narrow", shown(flow), width=400)
    browser.resize(1100)
