"""Vectorised functions against plain Python, epoch after epoch."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_keyed_task import OneTask

from tallystick.errors import OptionError
from tallystick.state.functions.keyed_batch import KeyedBatch, Update
from tallystick.state.functions.processing import EVENT_TIME, PROCESSING_TIME
from tallystick.state.functions.vectorised import vectorised
from tests.examples import drawn

KEYS = st.sampled_from([None, "", "a", "b", "ü", "a\0", "😀"])
NUMBERS = st.none() | st.integers(-5, 5)
EPOCHS = st.lists(st.lists(st.tuples(KEYS, st.integers(0, 2), NUMBERS), max_size=12), max_size=5)
SCHEMA = pa.schema([("key", pa.string()), ("part", pa.int32()), ("x", pa.int64())])
KEY = pa.schema([SCHEMA.field("key"), SCHEMA.field("part")])


def rows_of(records: list[tuple[Any, ...]], schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    columns = [[record[at] for record in records] for at in range(len(schema))]
    arrays = [pa.array(c, field.type) for c, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@drawn(50)
@given(EPOCHS)
def test_state_of_numbers_and_strings_over_epochs(epochs: list[list[tuple[Any, ...]]]) -> None:
    """Count and text of all values seen; a key whose last value is -5 loses its state."""

    def function(batch: KeyedBatch) -> Update:
        order = batch.by_key()
        texts = [text or "" for text in batch.state.column("text").to_pylist()]
        xs = batch.rows.column("x").to_pylist()
        for row in order.tolist():
            texts[batch.codes[row]] += str(xs[row])
        n = batch.held("n") + batch.count()
        dropped = np.array([xs[row] == -5 for row in batch.last_rows()])
        output = pa.record_batch({"key": batch.keys.column("key"), "n": n, "text": texts})
        state = {"n": pa.array(n, mask=dropped), "text": pa.array(texts, mask=dropped)}
        return Update(output, state)

    task = OneTask(vectorised(function, state="n bigint, text string"), KEY)
    oracle: dict[Any, tuple[int, str]] = {}
    for records in epochs:
        rows_out = task.epoch(rows_of(records))

        expected, last = {}, {}
        for key, part, x in records:
            n, text = expected.get((key, part), oracle.get((key, part), (0, "")))
            expected[key, part] = (n + 1, text + str(x))
            last[key, part] = x
        values = [{"key": k, "n": n, "text": t} for (k, _), (n, t) in expected.items()]
        assert Counter(map(str, rows_out)) == Counter(map(str, values))
        oracle.update(expected)
        for key in [key for key, x in last.items() if x == -5]:
            del oracle[key]
        assert len(task.entries) == len(oracle)


def test_rows_are_in_the_order_of_arrival_and_keys_are_told_apart() -> None:
    seen: list[KeyedBatch] = []

    def function(batch: KeyedBatch) -> Update:
        seen.append(batch)
        return Update()

    records = [("b", 1, 1), ("a", 1, 2), ("b", 1, 3), (None, 1, 4), ("b", 2, 5)]
    OneTask(vectorised(function, state=""), KEY).epoch(rows_of(records))

    (batch,) = seen
    assert batch.rows.column("x").to_pylist() == [1, 2, 3, 4, 5]
    keys = [tuple(row.values()) for row in batch.keys.to_pylist()]
    assert [keys[code] for code in batch.codes] == [record[:2] for record in records]
    assert len(set(keys)) == len(batch) == 4
    assert [keys[code] for code in batch.codes[batch.by_key()]] == sorted(
        (record[:2] for record in records), key=keys.index
    )
    assert batch.rows.column("x").take(pa.array(batch.first_rows())).to_pylist() == [
        next(x for k, p, x in records if (k, p) == key) for key in keys
    ]


def test_zeros_and_nans_are_one_key_each() -> None:
    def function(batch: KeyedBatch) -> Update:
        n = batch.count(start=pa.array(batch.held("n")))
        columns = {"key": batch.keys.column("key"), "n": n}
        return Update(pa.record_batch(columns), {"n": n})

    schema = pa.schema([("key", pa.float64())])
    task = OneTask(vectorised(function, state="n bigint"), schema)
    first = task.epoch(rows_of([(0.0,), (-0.0,), (math.nan,), (None,)], schema))
    second = task.epoch(rows_of([(-0.0,), (-math.nan,)], schema))

    assert sorted(map(str, (row.values() for row in first))) == sorted(
        ["dict_values([0.0, 2])", "dict_values([nan, 1])", "dict_values([None, 1])"]
    )
    assert sorted(row["n"] for row in second) == [2, 3]
    assert task.written == 2


@pytest.mark.parametrize("kind", [pa.int64(), pa.int8(), pa.float64(), pa.float32()], ids=str)
@drawn(30)
@given(data=st.data())
def test_helpers_agree_with_python(kind: pa.DataType, data: st.DataObject) -> None:
    is_float = pa.types.is_floating(kind)
    values = st.floats(width=16) if is_float else st.integers(-100, 100)
    records = data.draw(
        st.lists(st.tuples(st.sampled_from("ab"), values | st.none()), min_size=1, max_size=9)
    )
    starts = data.draw(st.tuples(*[st.none() | values] * 2))
    schema = pa.schema([("key", pa.string()), ("x", kind)])
    done = []

    def order(value: float) -> tuple[bool, float]:
        return (value != value, 0.0 if value != value else value)

    operations = {
        "sum": lambda one, two: one + two,
        "min": lambda one, two: min(one, two, key=order),
        "max": lambda one, two: max(one, two, key=order),
    }

    def function(batch: KeyedBatch) -> Update:
        begin = list(starts[: len(batch)])
        for name, both in operations.items():
            totals, after = list(begin), []
            for code, (_, x) in zip(batch.codes.tolist(), records, strict=True):
                if x is not None:
                    totals[code] = x if totals[code] is None else both(totals[code], x)
                after.append(totals[code])
            start = pa.array(begin, kind)
            assert str(getattr(batch, name)("x", start).to_pylist()) == str(totals)
            columns = getattr(batch, f"running_{name}")("x", start)
            assert [str(column.to_pylist()) for column in columns] == [str(after), str(totals)]
        running, totals = batch.running_count("x", start=np.full(len(batch), 7))
        counts = batch.count("x", start=np.full(len(batch), 7)).tolist()
        for code in range(len(batch)):
            xs = [x for c, (_, x) in zip(batch.codes, records, strict=True) if c == code]
            assert counts[code] == totals[code] == 7 + sum(x is not None for x in xs)
            assert running[batch.last_rows()[code]] == totals[code]
        done.append(True)
        return Update()

    OneTask(vectorised(function, state=""), schema.remove(1)).epoch(rows_of(records, schema))
    assert done


def reminder(batch: KeyedBatch) -> Update:
    """Says what it has when a key's time comes: the greatest x of a key is its timer."""
    n = pa.array(batch.held("n") + batch.count())
    output = pa.record_batch(
        {"key": batch.keys.column("key"), "n": n, "due": [batch.is_due] * len(n)}
    )
    if not batch.is_due:
        return Update(None, {"n": n}, batch.max("x", start=batch.timers))
    assert not batch.timers.is_null().to_pylist().count(True)
    return Update(output, {"n": pa.nulls(len(n), pa.int64())})


@pytest.mark.parametrize("mode", [PROCESSING_TIME, EVENT_TIME])
@drawn(50)
@given(epochs=st.lists(st.tuples(EPOCHS.map(lambda e: e[0] if e else []), st.integers(-6, 6))))
def test_timers_over_epochs(mode: str, epochs: list[tuple[list[tuple[Any, ...]], int]]) -> None:
    """A timer is one per key: moved by rows, gone when it was due, also without rows."""
    task = OneTask(vectorised(reminder, state="n bigint", time_mode=mode), KEY)
    oracle: dict[Any, tuple[int, int | None]] = {}
    for records, now in epochs:
        times = {"timestamp_ms": now, "watermark_ms": 99}
        if mode == EVENT_TIME:
            times = {"timestamp_ms": 99, "watermark_ms": now}
        rows_out = task.epoch(rows_of(records), **times)

        for key, part, x in records:
            n, timer = oracle.get((key, part), (0, None))
            xs = [number for number in (x, timer) if number is not None]
            oracle[key, part] = (n + 1, max(xs, default=None))
        due = {k: n for k, (n, timer) in oracle.items() if timer is not None and timer <= now}
        expected = [{"key": k, "n": n, "due": True} for (k, _), n in due.items()]
        assert Counter(map(str, rows_out)) == Counter(map(str, expected))
        for key in due:
            del oracle[key]
        timers = sum(timer is not None for _, timer in oracle.values())
        assert len(task.entries) == len(oracle) + timers


def test_a_timer_set_while_due_waits_for_the_next_epoch() -> None:
    """As in Spark: the list of due timers is fixed when firing starts."""

    def function(batch: KeyedBatch) -> Update:
        output = pa.record_batch({"due": [batch.is_due] * len(batch)})
        return Update(output, timers=np.zeros(len(batch), np.int64))

    task = OneTask(vectorised(function, state="", time_mode=PROCESSING_TIME), KEY)
    nothing = rows_of([])

    assert task.epoch(rows_of([("a", 1, 1)])) == [{"due": False}, {"due": True}]
    assert task.epoch(nothing) == [{"due": True}]
    assert task.epoch(nothing, timestamp_ms=-1) == []


def test_without_a_watermark_nothing_is_due() -> None:
    task = OneTask(vectorised(reminder, state="n bigint", time_mode=EVENT_TIME), KEY)
    assert task.epoch(rows_of([("a", 1, -5)]), timestamp_ms=10) == []
    assert len(task.entries) == 2


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (None, r"<lambda> returned None: expected ts.Update\(.*Has it no return"),
        (Update(output={"a": [1]}), r"Update.output is a dict: expected a pyarrow.RecordBatch"),
        (Update(state={"m": [1]}), r"has the columns \['m'\]: .* declared with \['n'\]"),
        (Update(state={"n": [1, 2]}), "'n' has 2 values, but the batch has 1 keys"),
        (Update(state={"n": ["x"]}), "'n' does not fit its type int64"),
        (Update(state={"n": None}), "one value per key, null for a key that is to have none"),
        (Update(state={"n": 5}), "one value per key, null for a key that is to have none"),
        (Update(timers=[1]), "made without timers: give vectorised"),
    ],
)
def test_what_a_function_cannot_return(update: Any, message: str) -> None:
    task = OneTask(vectorised(lambda _: update, state="n bigint"), KEY)
    with pytest.raises(OptionError, match=message):
        task.epoch(rows_of([("a", 1, 1)]))


def test_what_cannot_be_declared() -> None:
    with pytest.raises(OptionError, match=r"time_mode='Eventually'.: expected 'None'"):
        vectorised(lambda _: Update(), state="", time_mode="Eventually")
    with pytest.raises(OptionError, match=r"'[$]timer' is taken"):
        vectorised(lambda _: Update(), state="`$timer` bigint")


def test_a_missing_column_is_named() -> None:
    task = OneTask(vectorised(lambda batch: Update(timers=batch.sum("y")), state=""), KEY)
    with pytest.raises(OptionError, match=r"no column 'y'\. The rows have key, part, x"):
        task.epoch(rows_of([("a", 1, 1)]))
