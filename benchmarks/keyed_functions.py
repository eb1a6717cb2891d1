"""What the vectorised keyed functions cost per row, and where the time goes.

    python benchmarks/keyed_functions.py              1 M rows of 100 k string keys
    python benchmarks/keyed_functions.py 100000       100 k rows: one per key

An epoch is all that its task does between getting its rows and handing over its output: keys told
apart, state read from LMDB, the function, state written, changes sorted and encoded as a changelog
file. After it, on its own, the changes' way into LMDB for the next epoch. CPU time of this process
(one thread), the best of several epochs after the first, in which all keys are new.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.checkpoint.local.store import open_store
from tallystick.host import kernel_cache
from tallystick.state import changelog
from tallystick.state.catalog import Version
from tallystick.state.compatibility import settle
from tallystick.state.functions import aggregates
from tallystick.state.functions import ready_made as ready
from tallystick.state.functions.keyed_batch import KeyedBatch, Update
from tallystick.state.functions.processing import Processor, Work
from tallystick.state.functions.ready_made import sessions
from tallystick.state.functions.vectorised import vectorised
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import EpochTime, Overlay

KEY_COUNT = 100_000
EPOCHS = 5
MAX_PARALLELISM = 128
GROUPS = KeyGroupRange(0, MAX_PARALLELISM - 1)


def running_totals(batch: KeyedBatch) -> Update:
    """As a user would write it: count and sum after each record."""
    after, n = batch.running_count(start=batch.held("n"))
    sums, total = batch.running_sum("amount", start=batch.state["total"])
    user, ts = batch.rows["user"], batch.rows["ts"]
    output = pa.record_batch({"user": user, "count": after, "sum": sums, "ts": ts})
    return Update(output, {"n": n, "total": total})


COUNT_AND_SUM = {"count": aggregates.count(), "sum": aggregates.sum("amount", "double")}
FUNCTIONS: dict[str, tuple[list[str], Callable[[], Processor]]] = {
    "count, sum per epoch": (["user"], lambda: ready.aggregate(COUNT_AND_SUM, keep=["ts"])),
    "count, sum per record": (
        ["user"],
        lambda: ready.aggregate(COUNT_AND_SUM, each="record", keep=["ts"]),
    ),
    "the same, a function": (
        ["user"],
        lambda: vectorised(running_totals, state="n bigint, total double"),
    ),
    "the same, two key columns": (
        ["user", "day"],
        lambda: ready.aggregate(COUNT_AND_SUM, each="record"),
    ),
    "last string": (
        ["user"],
        lambda: ready.aggregate({"item": aggregates.last_value("item", "string")}),
    ),
    "duplicates": (["user"], lambda: ready.deduplicate()),
    "top 3": (["user"], lambda: ready.top_n(3, "amount", "double")),
    "sessions": (["user"], lambda: sessions(1000, "ts")),
}


def rows_of(count: int, epoch: int) -> pa.RecordBatch:
    """Rows like those of the benchmark beside Flink."""
    chance = np.random.default_rng(epoch)
    texts = pa.array([f"u{number}" for number in range(KEY_COUNT)])
    # Each key has rows in each epoch, so that costs per key are those of KEY_COUNT keys.
    numbers = np.concatenate([np.arange(KEY_COUNT), chance.integers(0, KEY_COUNT, count)])[:count]
    chance.shuffle(numbers)
    items = pa.array([f"i{number}" for number in range(1000)])
    return pa.record_batch(
        {
            "user": texts.take(pa.array(numbers)),
            "item": items.take(pa.array(chance.integers(0, 1000, count))),
            "amount": chance.random(count).round(2),
            "ts": 1_700_000_000_000 + epoch * 10_000 + np.arange(count) * 10_000 // count,
            "day": pa.array(np.full(count, 7, np.int32)),
        }
    )


def measure(
    processor: Processor, key_columns: list[str], row_count: int, root: Path
) -> list[float]:
    """The least seconds of an epoch's parts: processing, changelog, LMDB; and bytes per key."""
    batches = [rows_of(row_count, epoch) for epoch in range(EPOCHS)]
    key = KeyCodec(pa.schema([batches[0].schema.field(name) for name in key_columns]))
    fields, _ = settle("step", processor.declared(key), None)
    store = open_store(root, "lineage", "step", GROUPS)
    version = None
    parts = []
    for epoch, rows in enumerate(batches):
        with store.view(version) as view:
            assert view is not None
            overlay = Overlay(view)
            time_of_epoch = EpochTime(0, 1_700_000_000_000 + epoch * 10_000)
            by_name = {field.name: field for field in fields}
            start = time.process_time()
            work = Work(rows, key, MAX_PARALLELISM, GROUPS, by_name, overlay, time_of_epoch)
            for _ in processor.run(work):
                pass
            processed = time.process_time()
            changes = overlay.changes()
            file = changelog.encode(changes, GROUPS) if changes.num_rows else None
        encoded = time.process_time()
        before, version = version, Version(epoch, "token")
        assert store.apply(before, version, changes.to_batches())
        applied = time.process_time()
        size = len(file.data) / KEY_COUNT if file else 0.0
        parts.append([processed - start, encoded - processed, applied - encoded, size])
    return [min(part) for part in zip(*parts[1:], strict=True)]


def main() -> None:
    """Print a line per function."""
    row_count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    kernel_cache.warm_up()
    pa.set_cpu_count(1)
    assert pc.sum(pa.array([1])).as_py() == 1  # Arrow's functions are loaded
    print(f"{row_count} rows, {KEY_COUNT} keys; µs per row")
    print(f"{'':28}{'process':>9}{'changelog':>11}{'epoch':>8}{'then LMDB':>11}{'B/key':>8}")
    for name, (key_columns, make) in FUNCTIONS.items():
        with tempfile.TemporaryDirectory() as root:
            *seconds, size = measure(make(), key_columns, row_count, Path(root))
        process, encode, apply = (second_count / row_count * 1e6 for second_count in seconds)
        total = process + encode
        print(f"{name:28}{process:9.3f}{encode:11.3f}{total:8.3f}{apply:11.3f}{size:8.0f}")


if __name__ == "__main__":
    main()
