"""The same processors under Spark's real transformWithState and under us: the same rows per batch.

Ours gets the batches, clocks and watermarks that Spark's log names. Where Spark promises no order
the processors sort; apart from that the order of the rows counts too.
"""

import datetime
import decimal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StatefulProcessor

from tallystick.state.keys import KeyCodec
from tallystick.state.pyspark.processor import row_processor
from tests.state.pyspark import spark_processors as ours
from tests.state.pyspark.conftest import TIMEZONE
from tests.state.pyspark.epochs import Epochs
from tests.state.pyspark.spark_run import OUTPUT, Batch, Stream

pytestmark = pytest.mark.spark

ROWS = pa.schema(
    [
        ("k", pa.string()),
        ("n", pa.int32()),
        ("v", pa.string()),
        ("ms", pa.int64()),
        ("ts", pa.timestamp("us", tz="UTC")),
        ("x", pa.float64()),
        ("day", pa.date32()),
        ("amount", pa.decimal128(10, 2)),
        ("tags", pa.list_(pa.string())),
    ]
)


def row(k: str | None, v: str, ms: int, n: int | None = 1) -> dict[str, Any]:
    """A row of the input, as JSON has it."""
    moment = datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)
    return {
        "k": k,
        "n": n,
        "v": v,
        "ms": ms,
        "ts": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "x": ms / 4000,
        "day": f"2024-02-{1 + ms % 29:02d}",
        "amount": f"{ms % 997}.25",
        "tags": [v, None] if ms % 2 else [],
    }


FILES = [
    [row("a", "a1", 1000), row("b", "b1", 5001), row("a", "a2", 7000), row(None, "null", 7500)],
    [row("b", "b2", 30000), row("c", "c1", 12000), row("a", "a0", 6500), row("a", "a3", 11000)],
    [row("c", "clear", 31000), row("a", "a1", 32000), row("b", "late", 2000)],
    [row("d", "d1", 50000), row("a", "a5", 51000), row("c", "c3", 50500), row("é", "ü", 52000)],
]
FEW = [FILES[0] + FILES[1], FILES[2], FILES[3]]
"""The same where time does not count: each batch takes Spark a while."""
TWO_KEYS = [
    [row("b", "1", 1000, 2), row("a", "2", 1000, -5), row("b", "3", 2000, None)],
    [row("b", "4", 1000, 10), row(None, "5", 1000, 2), row("b", "6", 5000, 2), row("b", "7", 1, 2)],
    [row("b", "8", 4000, None), row("", "9", 1000, 3), row("B", "10", 5000, -1)],
]


@pytest.fixture
def stream(tws_session: SparkSession, tmp_path: Path) -> Any:
    """Makes streams."""
    return lambda mode="None": Stream(tws_session, tmp_path, mode)


def record_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """The rows as our reader gives them."""
    typed = [
        {
            **event,
            "ts": event["ms"] * 1000,
            "day": datetime.date.fromisoformat(event["day"]),
            "amount": decimal.Decimal(event["amount"]),
        }
        for event in rows
    ]
    return pa.RecordBatch.from_pylist(typed, schema=ROWS)


def replayed(
    processors: list[tuple[StatefulProcessor, int]],
    batches: list[Batch],
    files: list[list[dict[str, Any]]],
    *,
    mode: str = "None",
    keys: tuple[str, ...] = ("k",),
    **given: Any,
) -> list[list[tuple[Any, ...]]]:
    """What we give for Spark's batches.

    Args:
        processors: each with the number of the batch that it starts with.
        batches: Spark's.
        files: the input.
        mode: timeMode.
        keys: columns.
        given: to `row_processor`.
    """
    processors_made = {
        start: row_processor(one, output=OUTPUT, time_mode=mode, timezone=TIMEZONE, **given)
        for one, start in processors
    }
    key = KeyCodec(pa.schema([ROWS.field(name) for name in keys]))
    epochs = Epochs(processors_made[0], key=key)
    outputs = []
    watermark_before = 0
    for number, batch in enumerate(batches):
        if number in processors_made:
            epochs.restart(processors_made[number])
        rows = [event for file in batch.files for event in files[file]]
        if mode == "EventTime":
            rows = [event for event in rows if event["ms"] > watermark_before]
        watermark_before = batch.watermark
        outputs.append(epochs.run(record_batch(rows), batch.now, batch.watermark))
    return outputs


def check(outputs: list[list[tuple[Any, ...]]], batches: list[Batch]) -> None:
    """Compare batch by batch; and that there was something to compare."""
    assert sum(len(batch.rows) for batch in batches) >= 2
    expected = [batch.rows for batch in batches]
    if int(pd.__version__.split(".")[0]) >= 3:  # Spark takes a null key from a frame: ours is None
        nulls = {"(nan,)": "(None,)", "Row(k='NaN')": "Row(k=None)"}
        expected = [
            [
                tuple(
                    # A column without values may have another type there, too.
                    nulls.get(text, text.replace("'tags'] ['float64'", "'tags'] ['str'"))
                    for text in row
                )
                for row in rows
            ]
            for rows in expected
        ]
    assert outputs == expected


@pytest.mark.parametrize(
    ("processor", "mode", "kind", "files", "keys"),
    [
        (ours.Count(), "None", "row", FEW, ("k",)),
        (ours.PandasCount(), "None", "pandas", FEW, ("k",)),
        (ours.Recent(), "None", "row", FEW, ("k",)),
        (ours.Seen(), "None", "row", FEW, ("k",)),
        (ours.Nested(), "None", "row", FILES[:2], ("k",)),
        (ours.EventTimers(), "EventTime", "row", FILES, ("k",)),
        (ours.Sessions(), "EventTime", "row", FILES, ("k",)),
        (ours.PandasTimers(), "EventTime", "pandas", FILES, ("k",)),
        (ours.FirstOfTwoKeys(), "None", "row", TWO_KEYS, ("k", "n")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, StatefulProcessor) else "",
)
def test_the_same_rows_in_each_batch(stream, processor, mode, kind, files, keys):
    theirs = stream(mode)
    theirs.run(processor, files, is_pandas=kind == "pandas", keys=keys)
    batches = theirs.batches()

    check(replayed([(processor, 0)], batches, files, mode=mode, keys=keys, rows=kind), batches)


def test_the_same_by_the_clock(tws_session, tmp_path):
    """All at a time: most of what one takes is waiting for its clock."""
    files = [[row("a", f"v{n}", 1000), row("b" if n % 2 else "c", "w", 1)] for n in range(4)]
    processors = [
        ours.DueWhileFiring(),
        ours.ValueThatExpires(),
        ours.ListThatExpires(),
        ours.MapThatExpires(),
    ]

    def run(processor: StatefulProcessor) -> list[Batch]:
        theirs = Stream(tws_session, tmp_path / type(processor).__name__, "ProcessingTime")
        theirs.run(processor, files)
        return theirs.batches()

    with ThreadPoolExecutor(len(processors)) as pool:
        outputs = list(pool.map(run, processors))
    for processor, batches in zip(processors, outputs, strict=True):
        check(replayed([(processor, 0)], batches, files, mode="ProcessingTime"), batches)


def test_the_same_from_an_initial_state(stream, tws_session):
    initial = tws_session.createDataFrame(
        [("a", 100), ("q", 7), ("a", 200), (None, 5)], "k string, start bigint"
    )
    theirs = stream()
    theirs.run(ours.WithInitialState(), FEW[:2], initial=initial)
    batches = theirs.batches()

    processor = [(ours.WithInitialState(), 0)]
    check(replayed(processor, batches, FEW, initial_state=initial), batches)


def test_the_same_after_a_state_was_deleted(stream):
    theirs, starts = stream(), []
    for processor, file in zip((ours.Old(), ours.WithoutOld(), ours.Old()), FILES, strict=False):
        starts.append((processor, len(theirs.batches())))
        theirs.run(processor, [file])
    batches = theirs.batches()

    check(replayed(starts, batches, FILES), batches)
