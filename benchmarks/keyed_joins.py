"""The cost of joins per row, of both sides, for keys with few rows, many, and all of them.

    python benchmarks/keyed_joins.py

An epoch is as in `keyed_functions.py`: all that its task does between getting its rows and handing
over its output, with state in LMDB and the changelog file encoded. CPU time of this process (one
thread), over the epochs after the first.
"""

import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from tallystick.checkpoint.local.store import open_store
from tallystick.codec.layout import KAFKA_FIELDS, TIMESTAMP_TYPE
from tallystick.host import kernel_cache
from tallystick.state import changelog
from tallystick.state.catalog import Version
from tallystick.state.compatibility import settle
from tallystick.state.functions.inputs import KeyedInput, KeyedInputs
from tallystick.state.functions.joins import interval_join, temporal_join
from tallystick.state.functions.processing import Work
from tallystick.state.functions.vectorised import ByColumns
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import EpochTime, Overlay

MAX_PARALLELISM = 128
GROUPS = KeyGroupRange(0, MAX_PARALLELISM - 1)
COLUMNS = pa.schema([("id", pa.string()), ("amount", pa.int64()), ("at", pa.int64())])
KAFKAS = pa.schema([*COLUMNS, *(field for field in KAFKA_FIELDS if field.name != "value")])
"""Rows as they come from Kafka, with a column for all that it knows of a record."""


def inputs(columns: pa.Schema, carried: tuple[str, ...] | None = None) -> KeyedInputs:
    """Both inputs, with the same columns."""
    return KeyedInputs(
        [KeyedInput(name, columns, ("id",), "at", carried) for name in ("left", "right")]
    )


EPOCHS = 4


def near(reach_ms: int, how: str = "inner") -> ByColumns:
    """An interval join."""
    return interval_join("left", "right", lower=-reach_ms, upper=reach_ms, how=how)


# Name: the function, rows of a side in an epoch, keys, and the ms that an epoch spans.
CASES: dict[str, tuple[ByColumns, int, int, int]] = {
    "a row per key and side, inner": (near(1000), 100_000, 100_000, 1000),
    "a row per key and side, full": (near(1000, "full"), 100_000, 100_000, 1000),
    "ten rows": (near(1000), 100_000, 10_000, 1000),
    "a thousand rows": (near(10), 100_000, 100, 10_000),
    "one key has all 200,000": (near(5), 200_000, 1, 200_000),
    "temporal, ten rows": (temporal_join("left", "right"), 100_000, 10_000, 1000),
}


WIDTHS = {
    "ten rows, all Kafka's columns": inputs(KAFKAS),
    "ten rows, without them": inputs(KAFKAS, tuple(COLUMNS.names)),
    "ten rows, one column": inputs(KAFKAS, ("amount",)),
}


def rows_of(
    keyed_inputs: KeyedInputs, count: int, key_count: int, span_ms: int, epoch: int
) -> pa.RecordBatch:
    """Rows of both sides, in the order of their times."""
    chance = np.random.default_rng(epoch)
    parts = []
    for number in range(2):
        columns = [
            pa.array(chance.integers(0, key_count, count)).cast(pa.string()),
            pa.array(np.arange(count)),
            pa.array(epoch * span_ms + np.sort(chance.integers(0, span_ms, count))),
        ]
        if len(keyed_inputs.inputs[number].columns) > len(columns):
            columns += [
                columns[0].cast(pa.binary()),
                pa.array(["a-topic"]).take(pa.array(np.zeros(count, np.int64))),
                pa.array(np.full(count, 3, np.int32)),
                pa.array(np.arange(count) + epoch * count),
                pa.array(np.arange(count) + epoch * count).cast(TIMESTAMP_TYPE),
                pa.array(np.zeros(count, np.int32)),
            ]
        rows = pa.RecordBatch.from_arrays(columns, schema=keyed_inputs.inputs[number].columns)
        parts.append(keyed_inputs.numbered(number, rows))
    (together,) = pa.Table.from_batches(parts).combine_chunks().to_batches()
    return together


def measure(
    keyed_inputs: KeyedInputs, join: ByColumns, count: int, key_count: int, span_ms: int, root: Path
) -> list[float]:
    """The seconds of the epochs, those of their way into LMDB, the pairs, and bytes.

    These are of the rows on their way to the task, and of the changelog.
    """
    processor, key = join.make(keyed_inputs.columns), KeyCodec(pa.schema([COLUMNS.field("id")]))
    fields, _ = settle("step", processor.declared(key), None)
    by_name = {field.name: field for field in fields}
    store, version = open_store(root, "lineage", "step", GROUPS), None
    totals = np.zeros(5)
    for epoch in range(EPOCHS):
        rows = rows_of(keyed_inputs, count, key_count, span_ms, epoch)
        with store.view(version) as view:
            assert view is not None
            overlay = Overlay(view)
            moment = EpochTime(0, epoch * span_ms - 1 if epoch else None)
            start = time.process_time()
            work = Work(rows, key, MAX_PARALLELISM, GROUPS, by_name, overlay, moment)
            pairs = sum(batch.num_rows for batch in processor.run(work))
            changes = overlay.changes()
            written = len(changelog.encode(changes, GROUPS).data)
            encoded = time.process_time()
        before, version = version, Version(epoch, "token")
        assert store.apply(before, version, changes.to_batches())
        applied = time.process_time()
        if epoch:
            sizes = [rows.nbytes, written]
            totals += [encoded - start, applied - encoded, pairs, *sizes]
    return totals.tolist()


def main() -> None:
    """Print a line per case."""
    kernel_cache.warm_up()
    pa.set_cpu_count(1)
    print(
        f"{'':32}{'µs a row':>9}{'rows/s':>11}{'pairs/s':>11}{'then LMDB, µs':>15}"
        f"{'sent, B':>9}{'state, B':>10}"
    )
    cases = [(name, inputs(COLUMNS), *case) for name, case in CASES.items()]
    cases += [
        (name, keyed_inputs, near(1000), 100_000, 10_000, 1000)
        for name, keyed_inputs in WIDTHS.items()
    ]
    for name, keyed_inputs, join, count, key_count, span_ms in cases:
        with tempfile.TemporaryDirectory() as root:
            measure(keyed_inputs, near(5), 1000, 10, 1000, Path(root, "warm"))
            figures = measure(keyed_inputs, join, count, key_count, span_ms, Path(root))
        spent, applied, pairs, sent, written = figures
        row_count = 2 * count * (EPOCHS - 1)
        cost, later = spent / row_count * 1e6, applied / row_count * 1e6
        print(
            f"{name:32}{cost:9.2f}{row_count / spent:11,.0f}{pairs / spent:11,.0f}{later:15.2f}"
            f"{sent / row_count:9.0f}{written / row_count:10.0f}"
        )


if __name__ == "__main__":
    main()
