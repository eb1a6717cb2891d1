"""Windows on Spark and a real broker: each once, whatever the parallelism is in the meantime."""

import json
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import tallystick as ts
from tests.spark.flow import Facts, Flow
from tests.spark.numbering import picked
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

COLUMNS = "k string, n bigint"
SIZE, EVERY, JITTER = 1000, 500, 200
Window = tuple[str, int]


def pipeline(flow: Flow, windows: Any, parallelism: int, **settings: Any) -> ts.Pipeline:
    """Windows of records by the time `n`, into the output."""
    return windowed(flow, windows, parallelism, **settings).write(
        flow.sink(key="k", value=ts.Json())
    )


def windowed(flow: Flow, windows: Any, parallelism: int, **settings: Any) -> ts.Pipeline:
    """The same without a sink."""
    source = flow.source(value=ts.Json(COLUMNS), max_offsets_per_trigger=150)
    aggregates = {"n": ts.count(), "total": ts.sum("n"), "middle": ts.quantiles("n", at=[0.5])}
    aggregates |= settings.pop("other", {})
    return (
        ts.Pipeline(flow.name)
        .read(source)
        .map_batches(picked(), schema=COLUMNS)
        .key_by("k", max_parallelism=16)
        .process(
            ts.windowed(windows, aggregates, **settings),
            event_time="n",
            watermark_delay=JITTER,
            parallelism=parallelism,
            uid="windows",
        )
    )


def feed(flow: Flow, first: int, count: int) -> list[tuple[str, int]]:
    """Append records, a little out of order in time."""
    chance = random.Random(first)
    times = range(first, first + 10 * count, 10)
    late = sorted(times, key=lambda at: at + chance.randrange(JITTER))
    records = [(f"k{at // 10 % 13}", at) for at in late]
    values = [(key, json.dumps({"k": key, "n": at})) for key, at in records]
    produce(flow.confluent, flow.topic_in, values)
    return records


def put_out(flow: Flow) -> list[tuple[Window, dict[str, Any]]]:
    """The windows that are to be seen, in order for each key."""
    windows = []
    for record in read_committed(flow.confluent, flow.topic_out):
        row = json.loads(record.value or "")
        since = datetime.fromisoformat(row["window_start"]) - datetime(1970, 1, 1, tzinfo=UTC)
        windows.append(((row["k"], since // timedelta(milliseconds=1)), row))
    return windows


def test_hopping_windows_are_exact_over_epochs_and_restarts_with_any_parallelism(
    flow: Flow,
) -> None:
    records = []
    for number, parallelism in enumerate((2, 3, 1)):
        records += feed(flow, 6000 * number, 600)
        facts = Facts()
        windows = ts.hopping(SIZE, every=EVERY)
        flow.run(pipeline(flow, windows, parallelism), listener=facts)
        assert facts.names.count("TransactionCommitted") >= 3
        assert not facts.errors
    produce(flow.confluent, flow.topic_in, [("z", json.dumps({"k": "z", "n": 10**6}))])
    flow.run(pipeline(flow, windows, 2))

    expected: dict[Window, list[int]] = {}
    for key, at in records:
        for start in range(at - at % EVERY, at - SIZE, -EVERY):
            expected.setdefault((key, start), []).append(at)
    windows_out = put_out(flow)
    assert len(windows_out) == len(expected)
    assert {window: (row["n"], row["total"]) for window, row in windows_out} == {
        window: (len(times), sum(times)) for window, times in expected.items()
    }
    for window, row in windows_out:
        middle = sorted(expected[window])[(len(expected[window]) + 1) // 2 - 1]
        assert abs(row["middle"][0] - middle) <= 0.004 * middle
    assert flow.spark is not None
    (open_window,) = ts.read_state(flow.spark, str(flow.checkpoint)).collect()
    assert open_window["k"] == "z"
    assert [pane["n"] for pane in open_window["panes"]] == [1]

    with pytest.raises(ts.OptionError, match=r"hopping windows of 1000000 us every 500000 us"):
        flow.run(pipeline(flow, ts.tumbling(SIZE), 2))
    # 15 would come out for the maximum 7 of a window: as much is refused, by the argument.
    maximum = r'step windows: aggregates.total is now maximum\("n"\), .* with sum\("n"\)'
    with pytest.raises(ts.OptionError, match=maximum):
        flow.run(pipeline(flow, windows, 2, other={"total": ts.maximum("n")}))
    produce(flow.confluent, flow.topic_in, [("z", json.dumps({"k": "z", "n": 10**6 + 1}))])
    same = ts.hopping(SIZE, every=EVERY, offset=-3 * EVERY)
    flow.run(pipeline(flow, same, 2, other={"middle": ts.quantiles("n", at=[0.1, 0.9])}))
    (open_window,) = ts.read_state(flow.spark, str(flow.checkpoint)).collect()
    assert [(pane["n"], pane["total"]) for pane in open_window["panes"]] == [(2, 2 * 10**6 + 1)]


@pytest.mark.parametrize("every", [40, 16])
def test_count_windows_are_exact_over_epochs_and_restarts_with_any_parallelism(
    flow: Flow, every: int
) -> None:
    """Each key is in one partition: its windows are those of its rows in their order."""
    records: dict[str, list[int]] = {}
    for number, parallelism in enumerate((2, 3, 1)):
        for key, at in feed(flow, 6000 * number, 600):
            records.setdefault(key, []).append(at)
        aggregates = {"n": ts.count(), "all": ts.collect("n")}
        counted = (
            ts.Pipeline(flow.name)
            .read(flow.source(value=ts.Json(COLUMNS), max_offsets_per_trigger=150))
            .map_batches(picked(), schema=COLUMNS)
            .key_by("k", max_parallelism=16)
            .process(
                ts.windowed(ts.count_window(40, every=every), aggregates),
                parallelism=parallelism,
                uid="windows",
            )
            .write(flow.sink(key="k", value=ts.Json()))
        )
        facts = Facts()
        flow.run(counted, listener=facts)
        assert facts.names.count("TransactionCommitted") >= 3
        assert not facts.errors

    rows_by_key: dict[str, list[list[int]]] = {}
    for record in read_committed(flow.confluent, flow.topic_out):
        row = json.loads(record.value or "")
        assert row["n"] == len(row["all"])
        rows_by_key.setdefault(row["k"], []).append(row["all"])
    assert rows_by_key == {
        key: [numbers[max(0, end - 40) : end] for end in range(every, len(numbers) + 1, every)]
        for key, numbers in records.items()
    }


def test_late_rows_go_to_the_output_that_is_named(flow: Flow) -> None:
    late = flow.kafka.create_topic(f"{flow.name}-late", 3)

    def put_in(*times: int) -> None:
        records = [("a", json.dumps({"k": "a", "n": at})) for at in times]
        produce(flow.confluent, flow.topic_in, records, partition=0)
        without_sinks = windowed(flow, ts.tumbling(SIZE), 2, late="too_late")
        sinks = (flow.sink(key="k", value=ts.Json()), flow.sink(topic=late, value=ts.Json()))
        flow.run(without_sinks.write(sinks[0], too_late=sinks[1]))

    put_in(100, 1300)  # the watermark is 1100 then
    put_in(200, 1400, 300)
    put_in(1500, 999)
    put_in(5000)

    assert [(window[1], row["n"]) for window, row in put_out(flow)] == [(0, 1), (1000, 3)]
    rows = [json.loads(record.value or "") for record in read_committed(flow.confluent, late)]
    assert rows == [{"k": "a", "n": at} for at in (200, 300, 999)]


def test_rows_behind_the_watermark_count_while_their_window_is_open_and_late_ones_are_counted(
    flow: Flow,
) -> None:
    def put_in(*times: int) -> None:
        records = [("a", json.dumps({"k": "a", "n": at})) for at in times]
        produce(flow.confluent, flow.topic_in, records, partition=0)
        results: list[Any] = []
        facts = Facts("EpochRan", results.append)
        flow.run(pipeline(flow, ts.tumbling(SIZE), 2, allowed_lateness=300), listener=facts)
        late.append(sum(count for result in results for _, count in result.late))

    late: list[int] = []
    put_in(100, 1150)  # the watermark is 950
    put_in(200, 1300)  # 200 is behind it, and its window is open; then 1100
    put_in(300)  # its window was closed, and takes late rows until 1299
    put_in(1600)  # 1400
    put_in(400, 1700)
    put_in(5000)

    assert late == [0, 0, 0, 0, 1, 0]
    assert [(window[1], row["n"]) for window, row in put_out(flow)] == [
        (0, 2),
        (0, 3),
        (1000, 4),
    ]
