"""Streams with an end, and event times from the future, on Spark and a real broker."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.streaming import StatefulProcessor

import tallystick as ts
from tallystick.epoch import manifest as m
from tallystick.pipeline.listeners import PIPELINES
from tallystick.state.overlay import FINAL_WATERMARK_MS
from tests.spark.flow import Flow
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

COLUMNS = "k string, at bigint"
NOW_MS = 1_700_000_000_000
COUNTS = {"n": ts.count()}


def feed(flow: Flow, times: list[int], partition: int = 0, topic: str | None = None) -> None:
    records = [("k", json.dumps({"k": "k", "at": at})) for at in times]
    produce(flow.confluent, topic or flow.topic_in, records, partition=partition)


def output(flow: Flow, topic: str | None = None) -> list[dict[str, Any]]:
    records = read_committed(flow.confluent, topic or flow.topic_out)
    return [json.loads(record.value or "") for record in records]


def watermarks(flow: Flow) -> list[int | None]:
    """The watermark of the first step after each epoch."""
    paths = sorted((flow.checkpoint / m.FOLDER).glob("0*.json"))
    manifests = [m.decode(path.read_bytes(), str(path)) for path in paths]
    return [manifest.state[0].watermark_ms for manifest in manifests if manifest.state]


def remembering() -> Any:
    """Made here, so that workers need no tests."""

    class Remember(StatefulProcessor):
        """Tells of each key, once, when its timer is due: far beyond every event time."""

        def init(self, handle: Any) -> None:
            self._handle = handle

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            self._handle.registerTimer(1 << 62)
            return iter(())

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
            from pyspark.sql import Row

            self._handle.registerTimer(timerValues.getCurrentWatermarkInMs() + 60_000)
            yield Row(k=key[0], n=1)

        def close(self) -> None:
            return

    return Remember()


def keyed(flow: Flow, what: str, source: Any, **settings: Any) -> ts.Pipeline:
    read = ts.Pipeline(flow.name).read(source)
    if what == "transform":
        read = read.transform(lambda rows: rows.where("k is not null"))
    by_key = read.key_by("k")
    if what == "processor":
        step = by_key.process(
            remembering(), output="k string, n bigint", time_mode="EventTime", event_time="at"
        )
    else:
        windows = ts.session("5 seconds") if what == "sessions" else ts.tumbling("10 seconds")
        step = by_key.process(ts.windowed(windows, COUNTS), event_time="at", **settings)
    return step.write(flow.sink(key="k", value=ts.Json()))


@pytest.mark.parametrize(
    ("what", "settings", "execution"),
    [
        ("windows", {"watermark_column": "at"}, "jobs"),
        ("windows", {"idle_after": "1 hour"}, "resident"),
        ("sessions", {"idle_after": "1 hour", "idle_advance": True}, "jobs"),
        ("processor", {}, "jobs"),
        ("transform", {}, "jobs"),
    ],
)
def test_at_the_end_of_a_stream_with_an_end_everything_comes_out_once(
    flow: Flow, what: str, settings: dict[str, Any], execution: str
) -> None:
    flow.execution = execution
    feed(flow, [NOW_MS + 1000 * i for i in range(5)], 0)
    feed(flow, [NOW_MS + 1000 * i for i in range(100)], 1)
    ends = {flow.topic_in: {0: 5, 1: 100, 2: 0}}
    # Behind a transform nobody knows the partitions: rows of one that lags would be late.
    size = {} if what == "transform" else {"max_offsets_per_trigger": 40}
    source = flow.source(value=ts.Json(COLUMNS), ending_offsets=ends, **size)
    pipeline = keyed(flow, what, source, **settings)
    flow.run(pipeline, execution=execution)
    assert watermarks(flow)[-1] == FINAL_WATERMARK_MS
    rows = output(flow)
    assert sum(row["n"] for row in rows) == (1 if what == "processor" else 105)
    feed(flow, [NOW_MS + 500_000], 0)  # beyond the end
    epochs = len(watermarks(flow))
    flow.run(pipeline, execution=execution)
    query = pipeline.start(flow.spark, checkpoint=str(flow.checkpoint), execution=execution)
    query.processAllAvailable()
    query.stop()
    query.awaitTermination()
    assert output(flow) == rows
    assert len(watermarks(flow)) == epochs, "a start after the end has nothing to do"


def test_a_run_over_what_is_there_keeps_windows_open_until_the_stream_is_at_its_end(
    flow: Flow,
) -> None:
    """`availableNow` before the end of the stream is not the end."""
    feed(flow, [NOW_MS, NOW_MS + 25_000], 0)
    ends = {flow.topic_in: {0: 3, 1: 0, 2: 0}}
    pipeline = keyed(flow, "windows", flow.source(value=ts.Json(COLUMNS), ending_offsets=ends))
    flow.run(pipeline)
    assert len(output(flow)) == 1
    assert watermarks(flow)[-1] == NOW_MS + 25_000
    feed(flow, [NOW_MS + 26_000], 0)
    flow.run(pipeline)
    assert [row["n"] for row in output(flow)] == [1, 2]
    assert watermarks(flow)[-1] == FINAL_WATERMARK_MS


@pytest.mark.parametrize("where", ["dead letters", "late output", "dropped"])
def test_a_row_from_the_future_moves_no_watermark_and_is_not_lost_without_a_word(
    flow: Flow, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one in microseconds, whose year is 57,868."""
    dead = f"{flow.name}-dead"
    flow.kafka.create_topic(dead, 1)
    value = ts.Json(COLUMNS, mode="deadletter" if where == "dead letters" else "failfast")
    late = {"late": "late"} if where == "late output" else {}
    sinks = [
        flow.sink(
            key="k",
            value=ts.Json(),
            **({"dead_letter_topic": dead} if where == "dead letters" else {}),
        )
    ]
    aside_sink = {}
    if where == "late output":
        aside_sink["late"] = flow.sink(topic=dead, key="k", value=ts.Json())
    pipeline = (
        ts.Pipeline(flow.name)
        .read(flow.source(value=value))
        .key_by("k")
        .process(
            ts.windowed(ts.tumbling("10 seconds"), COUNTS, **late),
            event_time="at",
            event_time_max_ahead="1 hour",
        )
        .write(*sinks, **aside_sink)
    )
    feed(flow, [NOW_MS, 4_000_000_000_000, NOW_MS * 1000])
    with caplog.at_level(logging.WARNING, logger="tallystick"):
        flow.run(pipeline)
        feed(flow, [NOW_MS + 1, NOW_MS + 60_000])
        flow.run(pipeline)
    assert [row["n"] for row in output(flow)] == [2]
    assert watermarks(flow)[-1] == NOW_MS + 60_000
    aside = read_committed(flow.confluent, dead)
    if where == "dropped":
        assert "2 rows were further ahead of the clock than event_time_max_ahead" in caplog.text
        assert PIPELINES[flow.name].late_rows["process-1"] == 2
    else:
        assert sorted(json.loads(record.value or "")["at"] for record in aside) == [
            *(4_000_000_000_000, NOW_MS * 1000)
        ]
