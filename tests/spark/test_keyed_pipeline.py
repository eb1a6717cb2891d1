"""Keyed steps on Spark and a real broker: each key's rows meet its state, exactly once."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import tallystick as ts
from tallystick.epoch import manifest as m
from tallystick.state.functions.keyed_batch import KeyedBatch, Update
from tallystick.state.functions.processing import EVENT_TIME
from tallystick.state.functions.vectorised import vectorised
from tests.spark.flow import Facts, Flow
from tests.spark.numbering import numbering, picked
from tests.spark.topics import (
    produce,
    read_committed,
    wait_until_nothing_is_pending,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.spark]

COLUMNS = "k string, n bigint"
NUMBERED = "k string, n bigint, seen bigint"


def numbering_by_row() -> StatefulProcessor:
    """The same, as it is written for `transformWithState`."""

    class Numbering(StatefulProcessor):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self._seen = handle.getValueState("seen", "seen bigint")

        def handleInputRows(
            self, key: Any, rows: Iterator[Row], timer_values: Any
        ) -> Iterable[Row]:
            seen = self._seen.get()[0] if self._seen.exists() else 0
            for row in rows:
                seen += 1
                yield Row(k=key[0], n=row.n, seen=seen)
            self._seen.update((seen,))

        def close(self) -> None:
            pass

    return Numbering()


class Fed:
    """Writes records with a key and a number, and knows what each key got."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._count = 0
        self.by_key: dict[str, list[int]] = {}

    def feed(self, count: int, *, poison: int = 0) -> None:
        """Append records; some of them cannot be parsed."""
        numbers = range(self._count, self._count + count)
        records = [(f"k{n % 23}", json.dumps({"k": f"k{n % 23}", "n": n})) for n in numbers]
        records += [(f"k{n}", f"poison {n}") for n in range(poison)]
        produce(self._flow.confluent, self._flow.topic_in, records)
        self._count += count
        for n in numbers:
            self.by_key.setdefault(f"k{n % 23}", []).append(n)

    def assert_numbered(self) -> None:
        """Each row came out once, with its number among those of its key, in order."""
        wait_until_nothing_is_pending(self._flow.confluent, self._flow.topic_out)
        rows_by_key: dict[str, list[tuple[int, int]]] = {}
        for row in values(self._flow):
            rows_by_key.setdefault(row["k"], []).append((row["n"], row["seen"]))
        assert rows_by_key == {
            key: list(zip(numbers, range(1, len(numbers) + 1), strict=True))
            for key, numbers in self.by_key.items()
        }


def values(flow: Flow) -> list[dict[str, Any]]:
    """The output."""
    records = read_committed(flow.confluent, flow.topic_out)
    return [json.loads(record.value or "") for record in records]


def reading(flow: Flow, **settings: Any) -> ts.Pipeline:
    """A pipeline up to its keyed steps."""
    mode = settings.pop("mode", "failfast")
    source = flow.source(value=ts.Json(COLUMNS, mode=mode), **settings)
    return ts.Pipeline(flow.name).read(source).map_batches(picked(), schema=COLUMNS)


def copies(flow: Flow) -> Path:
    """Where this host keeps copies of state."""
    assert flow.spark is not None
    return Path(flow.spark.sparkContext.environment["TALLYSTICK_STATE_DIR"])


def newest(flow: Flow) -> m.Manifest:
    """What the newest epoch left."""
    path = max((flow.checkpoint / m.FOLDER).glob("0*.json"))
    return m.decode(path.read_bytes(), str(path))


def test_counts_are_exact_over_epochs_and_restarts_with_any_parallelism_and_lost_copies(
    flow: Flow,
) -> None:
    fed = Fed(flow)
    sink = flow.sink(key="k", value=ts.Json())

    def pipeline(function: Any, parallelism: int, uid: str | None = None) -> ts.Pipeline:
        # About three epochs a run.
        keyed = reading(flow, max_offsets_per_trigger=100).key_by("k", max_parallelism=16)
        step = keyed.process(function, output=NUMBERED, parallelism=parallelism, uid=uid)
        return step.write(sink)

    def lose(_: object) -> None:
        shutil.rmtree(copies(flow))

    for parallelism in (1, 2, 3, 2):
        fed.feed(300)
        facts = Facts("EpochRan", lose) if parallelism == 3 else Facts()
        flow.run(pipeline(numbering_by_row(), parallelism), listener=facts)
        assert facts.names.count("TransactionCommitted") >= 3
        assert not facts.errors

    fed.assert_numbered()
    (state,) = newest(flow).state
    assert (state.uid, state.max_parallelism, state.parallelism) == ("process-1", 16, 2)

    with pytest.raises(ts.OptionError, match=r"'process-1' .*renamed, set uid='process-1'"):
        flow.run(pipeline(numbering_by_row(), 1, uid="renamed"))
    with pytest.raises(ts.OptionError, match=r"step 'process-1'.*allow_dropped_state"):
        flow.run(flow.pipeline())
    wider = reading(flow).key_by("k", max_parallelism=32)
    with pytest.raises(ts.OptionError, match=r"max_parallelism=32, but its state has 16"):
        flow.run(wider.process(numbering_by_row(), output=NUMBERED).write(sink))
    other_key = reading(flow).key_by("n").process(numbering_by_row(), output=NUMBERED)
    with pytest.raises(ts.OptionError, match=r"its key is now .*int64.*belongs to"):
        flow.run(other_key.write(sink))

    flow.run(flow.pipeline(), allow_dropped_state=["process-1"])
    fed.assert_numbered()  # there was nothing left to read, and no epoch
    assert newest(flow).state == (state,)
    produce(flow.confluent, flow.topic_in, [("k", "v")])
    flow.run(flow.pipeline(), allow_dropped_state=["process-1"])
    assert newest(flow).state == ()


def test_steps_follow_each_other_with_functions_between_and_dead_letters_pass_by(
    flow: Flow,
) -> None:
    fed = Fed(flow)
    dead = f"{flow.name}-dead"
    flow.kafka.create_topic(dead, 2)

    def parity(rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"k": rows["k"], "n": pc.bit_wise_and(rows["seen"], 1)})

    pipeline = (
        reading(flow, mode="deadletter", max_offsets_per_trigger=150)
        .key_by("k")
        .process(numbering(), output=NUMBERED, uid="first")
        .map_batches(parity, schema=COLUMNS)
        .key_by("n", max_parallelism=4)
        .process(numbering(), output=NUMBERED, uid="second", parallelism=3)
        .write(flow.sink(key="k", value=ts.Json(), dead_letter_topic=dead))
    )
    for _ in range(2):
        fed.feed(230, poison=5)
        flow.run(pipeline)

    odd = sum((len(numbers) + 1) // 2 for numbers in fed.by_key.values())
    rows_out = values(flow)
    for n, count in ((1, odd), (0, 460 - odd)):
        assert sorted(row["seen"] for row in rows_out if row["n"] == n) == [*range(1, count + 1)]
    letters = [record.value for record in read_committed(flow.confluent, dead)]
    assert sorted(letters) == sorted(2 * [f"poison {n}" for n in range(5)])
    assert {s.uid: s.max_parallelism for s in newest(flow).state} == {"first": 128, "second": 4}


def test_dataframe_code_may_stand_before_a_keyed_step(flow: Flow) -> None:
    fed = Fed(flow)
    dead = f"{flow.name}-dead"
    flow.kafka.create_topic(dead, 1)

    def kept(rows: DataFrame) -> DataFrame:
        return rows.where("n < 60").select("k", "n")

    pipeline = (
        ts.Pipeline(flow.name)
        .read(flow.source(value=ts.Json(COLUMNS, mode="deadletter"), topics=[flow.topic_in]))
        .transform(kept)
        .key_by("k")
        .process(numbering(), output=NUMBERED)
        .write(flow.sink(key="k", value=ts.Json(), dead_letter_topic=dead))
    )
    fed.feed(60, poison=3)
    flow.run(pipeline)
    flow.run(pipeline)
    fed.assert_numbered()
    extra = Fed(flow)
    extra.feed(100, poison=1)  # 60 of them pass
    flow.run(pipeline)

    rows_out = values(flow)
    assert len(rows_out) == 120
    assert {row["seen"] for row in rows_out if row["k"] == "k0"} == {1, 2, 3, 4, 5, 6}
    assert len(read_committed(flow.confluent, dead)) == 4


def test_event_time_timers_fire_once_the_watermark_passed_them_in_the_same_run(flow: Flow) -> None:
    """As in Spark, an epoch without records follows one that moved the watermark."""

    def remind(batch: KeyedBatch) -> Update:
        if batch.is_due:
            past = pa.array([batch.time.watermark_ms] * len(batch), pa.int64())
            return Update(pa.record_batch({"k": batch.keys["k"], "n": past}), {"at": past})
        at = batch.max("n", start=batch.state["at"])
        return Update(state={"at": at}, timers=pc.add(at, 50))

    pipeline = (
        reading(flow)
        .key_by("k")
        .process(
            vectorised(remind, state="at bigint", time_mode=EVENT_TIME),
            output=COLUMNS,
            event_time="n",
            watermark_delay="0 seconds",
        )
        .write(flow.sink(key="k", value=ts.Json()))
    )

    def feed(key: str, at: int) -> None:
        record = (key, json.dumps({"k": key, "n": at}))
        produce(flow.confluent, flow.topic_in, [record])

    feed("a", 100)
    flow.run(pipeline)
    assert values(flow) == []
    feed("b", 300)
    flow.run(pipeline)
    assert values(flow) == [{"k": "a", "n": 300}]
    feed("a", 200)  # late
    flow.run(pipeline)
    assert values(flow) == [{"k": "a", "n": 300}]


def test_processing_time_timers_fire_without_records(flow: Flow) -> None:
    class Reminding(StatefulProcessor):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self._handle = handle

        def handleInputRows(
            self, key: Any, rows: Iterator[Row], timer_values: Any
        ) -> Iterable[Row]:
            self._handle.registerTimer(timer_values.getCurrentProcessingTimeInMs() + 100)
            return iter([])

        def handleExpiredTimer(
            self, key: Any, timerValues: Any, expiredTimerInfo: Any
        ) -> Iterable[Row]:
            yield Row(k=key[0], n=expiredTimerInfo.getExpiryTimeInMs())

        def close(self) -> None:
            pass

    step = (
        reading(flow).key_by("k").process(Reminding(), output=COLUMNS, time_mode="ProcessingTime")
    )
    fed = Fed(flow)
    fed.feed(5)
    query = step.write(flow.sink(key="k", value=ts.Json())).start(
        flow.spark, checkpoint=str(flow.checkpoint), trigger={"processingTime": "0 seconds"}
    )
    try:

        def is_written() -> bool:
            assert query.isActive, query.exception()
            return len(values(flow)) >= 5

        wait_until(is_written, lambda: f"5 values are expected, found {values(flow)}")
    finally:
        query.stop()

    assert sorted(row["k"] for row in values(flow)) == sorted(fed.by_key)
    (end,) = newest(flow).sources
    assert json.loads(end)["tick"] >= 1, "an epoch without records was run"
