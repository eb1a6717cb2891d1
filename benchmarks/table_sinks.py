"""The CPU time of an epoch in sinks for files and tables, without Spark and Kafka.

    python benchmarks/table_sinks.py [--epochs 300] [--rows 10000] [--commits 0]

Each epoch has two tasks, which write a file each; its commit follows. Sinks for tables commit the
table when `commit_every` has passed, as by default, and at the end. `--commits` gives the tables a
history of that many commits first. CPU times are of the whole process: other load does not count.
"""

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

import tallystick as ts
from tallystick.epoch.two_phase import Owner, Place, RunFacts

COLUMNS = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64())])
SETTINGS: dict[str, Any] = {"create": True, "schema": COLUMNS}


def rows_of(epoch: int, count: int) -> pa.RecordBatch:
    """Return the rows of a task."""
    ids = range(epoch * count, (epoch + 1) * count)
    names = [f"name-{number % 1000}" for number in ids]
    amounts = [number / 7 for number in ids]
    return pa.record_batch([pa.array(ids, pa.int64()), pa.array(names), pa.array(amounts)], COLUMNS)


def sinks_in(folder: Path) -> Iterable[tuple[str, Any]]:
    """Yield the name and the sink of each kind."""
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/warehouse",
    }
    yield "FileSink", ts.FileSink(folder / "files", compression="snappy")
    yield "DeltaSink", ts.DeltaSink(folder / "delta", **SETTINGS)
    yield "IcebergSink", ts.IcebergSink(catalog, "a.b", compression="snappy", **SETTINGS)
    yield "DeltaSink(key=)", ts.DeltaSink(folder / "upserts", key=["id"], **SETTINGS)


def run(sink: Any, epochs: Iterable[int], batch_rows: int, lineage: str) -> tuple[float, float]:
    """Return the CPU seconds of epochs, and those of the end of the run, which publishes."""
    owner = Owner("benchmark", "sink", lineage)
    opened = sink.open(owner, RunFacts())
    plan = opened.plan()
    batches = {epoch: rows_of(epoch, batch_rows) for epoch in range(8)}
    began = time.process_time()
    for epoch in epochs:
        committables = []
        for task in range(2):
            transaction = plan.begin(Place(owner, epoch, task, 0, f"{epoch}{task}"))
            transaction.write(batches[epoch % 8])
            committables += transaction.prepare()
        if hasattr(opened, "commit_together"):
            opened.commit_together(committables)
        else:
            for committable in committables:
                opened.commit(committable)
    running = time.process_time() - began
    began = time.process_time()
    opened.close()
    return running, time.process_time() - began


def main() -> None:
    """Print a line for each sink."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--commits", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        base = None
        for kind, sink in sinks_in(Path(name)):
            if arguments.commits and kind in ("DeltaSink", "IcebergSink"):
                from dataclasses import replace

                often = replace(sink, commit_every=0)
                run(often, range(arguments.commits), 1, "history")
            run(sink, range(5), arguments.rows, "warm")
            running, ending = run(sink, range(arguments.epochs), arguments.rows, "measured")
            per_epoch = 1000 * (running + ending) / arguments.epochs
            base = base or per_epoch
            print(
                f"{kind:16} {per_epoch:6.2f} ms of CPU an epoch, {per_epoch / base:4.2f} of "
                f"FileSink's; of it the publish at the end {1000 * ending:6.0f} ms in all"
            )


if __name__ == "__main__":
    main()
