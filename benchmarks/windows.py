"""What windows cost per row: keys told apart, panes read, rows added, state written.

    python benchmarks/windows.py              1 M rows an epoch, 10 k string keys
    python benchmarks/windows.py 100000

An epoch is as in `keyed_functions.py`: all that its task does between getting its rows and handing
over its output, with state in LMDB. CPU time of this process (one thread), the best of several
epochs after the first. Rows are in time but for a second; an epoch is ten seconds of them.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

import tallystick as ts
from tallystick.checkpoint.local.store import open_store
from tallystick.host import kernel_cache
from tallystick.state import changelog
from tallystick.state.catalog import Version
from tallystick.state.compatibility import settle
from tallystick.state.functions.processing import Work
from tallystick.state.functions.vectorised import ByColumns
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import EpochTime, Overlay

KEY_COUNT = 10_000
EPOCHS = 6
EPOCH_MS = 10_000
START_MS = 1_700_000_000_000
MAX_PARALLELISM = 128
GROUPS = KeyGroupRange(0, MAX_PARALLELISM - 1)

COUNT_AND_SUM = {"n": ts.count(), "total": ts.sum("amount")}
ALL = COUNT_AND_SUM | {"low": ts.minimum("amount"), "last": ts.last_value("item")}
FUNCTIONS: dict[str, ByColumns] = {
    "tumbling 10 s": ts.windowed(ts.tumbling("10 seconds"), COUNT_AND_SUM),
    "the same, with updates": ts.windowed(ts.tumbling("10 seconds"), COUNT_AND_SUM, emit="update"),
    "the same, 4 aggregates": ts.windowed(ts.tumbling("10 seconds"), ALL),
    "hopping 1 min every 10 s": ts.windowed(
        ts.hopping("1 minute", every="10 seconds"), COUNT_AND_SUM
    ),
    "cumulative 1 min by 10 s": ts.windowed(
        ts.cumulative("1 minute", step="10 seconds"), COUNT_AND_SUM
    ),
    "session 2 s": ts.windowed(ts.session("2 seconds"), COUNT_AND_SUM),
    "of 1000 rows": ts.windowed(ts.count_window(1000), COUNT_AND_SUM),
    "of 1000 rows every 100": ts.windowed(ts.count_window(1000, every=100), COUNT_AND_SUM),
    "of 100 rows every 10": ts.windowed(ts.count_window(100, every=10), COUNT_AND_SUM),
    "distinct count": ts.windowed(
        ts.tumbling("1 minute"), {"n": ts.approximate_distinct_count("item")}
    ),
    "quantiles": ts.windowed(ts.tumbling("1 minute"), {"q": ts.quantiles("amount", at=[0.5])}),
}


def rows_of(count: int, epoch: int) -> pa.RecordBatch:
    """Rows of one epoch."""
    chance = np.random.default_rng(epoch)
    users = pa.array([f"u{number}" for number in range(KEY_COUNT)])
    items = pa.array([f"i{number}" for number in range(1000)])
    times = START_MS + epoch * EPOCH_MS + np.arange(count) * EPOCH_MS // count
    return pa.record_batch(
        {
            "user": users.take(pa.array(chance.integers(0, KEY_COUNT, count))),
            "item": items.take(pa.array(chance.integers(0, 1000, count))),
            "amount": chance.random(count).round(2),
            "ts": pa.array(times - chance.integers(0, 1000, count)),
        }
    )


def measure(function: ByColumns, batches: list[pa.RecordBatch], root: Path) -> tuple[float, int]:
    """Return the least CPU seconds of an epoch, and the number of windows put out."""
    key = KeyCodec(pa.schema([batches[0].schema.field("user")]))
    processor = function.make(batches[0].schema)
    fields, _ = settle("step", processor.declared(key), None)
    by_name = {field.name: field for field in fields}
    store = open_store(root, "lineage", "step", GROUPS)
    version, taken, windows = None, [], 0
    for epoch, rows in enumerate(batches):
        with store.view(version) as view:
            assert view is not None
            overlay = Overlay(view)
            clock = EpochTime(0, START_MS + epoch * EPOCH_MS - 1000)
            start = time.process_time()
            work = Work(
                rows, key, MAX_PARALLELISM, GROUPS, by_name, overlay, clock, event_time="ts"
            )
            windows += sum(batch.num_rows for batch in processor.run(work))
            changes = overlay.changes()
            changelog.encode(changes, GROUPS)
            taken.append(time.process_time() - start)
        before, version = version, Version(epoch, "token")
        assert store.apply(before, version, changes.to_batches())
    return min(taken[1:]), windows


def main() -> None:
    """Print a line per function."""
    row_count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    kernel_cache.warm_up()
    pa.set_cpu_count(1)
    batches = [rows_of(row_count, epoch) for epoch in range(EPOCHS)]
    print(f"{row_count} rows an epoch, {KEY_COUNT} keys")
    print(f"{'':28}{'µs per row':>12}{'M rows/s':>10}{'windows':>10}")
    for name, function in FUNCTIONS.items():
        with tempfile.TemporaryDirectory() as root:
            seconds, windows = measure(function, batches, Path(root))
        print(
            f"{name:28}{seconds / row_count * 1e6:12.3f}{row_count / seconds / 1e6:10.2f}"
            f"{windows:10}"
        )


if __name__ == "__main__":
    main()
