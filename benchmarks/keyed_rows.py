"""What a `StatefulProcessor` costs per key and per row, state on disk included; one core.

    python benchmarks/keyed_rows.py [key_count]

The processor is a running count and sum. An epoch is all of it: rows by key, the calls, the sorted
changes, the changelog's bytes written and synced, and the local store brought to the new version.
CPU time in microseconds, best of several epochs after the first, so that a busy machine disturbs
little.
"""

# ruff: noqa: N802, N803  the names are PySpark's

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from tallystick.checkpoint.local.store import LmdbStore, open_store
from tallystick.state import changelog
from tallystick.state.catalog import Version
from tallystick.state.compatibility import settle
from tallystick.state.functions.processing import Work
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import EpochTime, Overlay
from tallystick.state.pyspark.processor import RowProcessor, row_processor

MAX_PARALLELISM = 128
GROUPS = KeyGroupRange(0, MAX_PARALLELISM - 1)
OUTPUT = "k bigint, n bigint, total double"
EPOCHS = 4
MICRO = 1e6


class RunningSum(StatefulProcessor):
    """Count and sum per key."""

    def init(self, handle: Any) -> None:
        self.sums = handle.getValueState("sums", "n bigint, total double")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n, total = self.sums.get() or (0, 0.0)
        for row in rows:
            n += 1
            total += row.x
        self.sums.update((n, total))
        yield Row(k=key[0], n=n, total=total)


class RunningSumInPandas(RunningSum):
    """The same on frames."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        n, total = self.sums.get() or (0, 0.0)
        for frame in rows:
            n, total = n + len(frame), total + float(frame["x"].sum())
        self.sums.update((n, total))
        yield pd.DataFrame({"k": [key[0]], "n": [n], "total": [total]})


class Visits(StatefulProcessor):
    """A list that grows, a map and a timer per key."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.recent = handle.getListState("recent", "x double")
        self.seen = handle.getMapState("seen", "tenth int", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        xs = [row.x for row in rows]
        self.recent.appendList([(x,) for x in xs])
        tenth = (int(xs[0] * 10),)
        old = self.seen.getValue(tenth)
        self.seen.updateValue(tenth, (1 + (old.n if old else 0),))
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1000)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        return iter(())


def rows_of(key_count: int, rows_per_key: int, seed: int) -> pa.RecordBatch:
    """Each key so many times, shuffled."""
    random = np.random.default_rng(seed)
    keys = np.repeat(np.arange(key_count), rows_per_key)
    random.shuffle(keys)
    return pa.record_batch({"k": keys, "x": random.random(len(keys))})


def measure(name: str, processor: RowProcessor, key_count: int, rows_per_key: int) -> None:
    """Run epochs, and print the best."""
    codec = KeyCodec(pa.schema([("k", pa.int64())]))
    fields, _ = settle("bench", processor.declared(codec), None)
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "stores", "lineage", "bench", GROUPS)
        version: Version | None = None
        for epoch in range(EPOCHS):
            rows = rows_of(key_count, rows_per_key, epoch)
            start = time.process_time()
            with store.view(version) as view:
                assert view is not None
                overlay = Overlay(view)
                by_name = {field.name: field for field in fields}
                moment = EpochTime(epoch * 1000)
                for _ in processor.run(
                    Work(rows, codec, MAX_PARALLELISM, GROUPS, by_name, overlay, moment)
                ):
                    pass
            processed = time.process_time()
            changes = overlay.changes()
            blob = changelog.encode(changes, GROUPS)
            _write(Path(folder) / "changelog", blob.data)
            written = time.process_time()
            version = _applied(store, version, epoch, changes)
            end = time.process_time()
            took = {
                "process": processed - start,
                "changelog": written - processed,
                "apply": end - written,
                "all": end - start,
            }
            if epoch:
                best = {what: min(best.get(what, 9e9), took[what]) for what in took}
    per_key = "  ".join(f"{what} {s * MICRO / key_count:6.2f}" for what, s in best.items())
    per_row = best["all"] * MICRO / key_count / rows_per_key
    print(f"{name:28} {rows_per_key:3} rows a key | us per key: {per_key} | per row {per_row:6.2f}")


def _applied(store: LmdbStore, version: Version | None, epoch: int, changes: pa.Table) -> Version:
    following = Version(epoch, f"token-{epoch}")
    assert store.apply(version, following, changes.combine_chunks().to_batches())
    return following


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    """All of it."""
    key_count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    for rows_per_key in (1, 10):
        processor = row_processor(RunningSum(), output=OUTPUT)
        measure("value state, Row", processor, key_count, rows_per_key)
    visits = row_processor(Visits(), output=OUTPUT, time_mode="ProcessingTime")
    measure("list, map, timer, Row", visits, key_count // 4, 1)
    frames = row_processor(RunningSumInPandas(), output=OUTPUT, rows="pandas")
    measure("value state, pandas", frames, key_count // 20, 1)


if __name__ == "__main__":
    main()
