"""Sinks for files and tables without Spark and Kafka: CPU, commits, sizes of files, a long history.

    python benchmarks/table_sinks.py [--epochs 300] [--rows 10000]     CPU of an epoch
    python benchmarks/table_sinks.py --minutes 3                       20 epochs a second
    python benchmarks/table_sinks.py --commits 10000                   a publish after so many

Each epoch has two tasks, which write a file each; its commit follows. Sinks for tables commit the
table when `commit_every` has passed, as by default, and at the end. CPU times are of the whole
process, compaction included: other load does not count. Each ratio is of the same run.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

import tallystick as ts
from tallystick.epoch.two_phase import Owner, Place, RunFacts

COLUMNS = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64())])
SETTINGS: dict[str, Any] = {"create": True, "schema": COLUMNS}
EPOCHS_PER_S = 20
BATCHES = 8
TARGET = 64 << 20
MIB = 1 << 20


class Figures(NamedTuple):
    """A run's times, in seconds.

    Args:
        running: of CPU, for all epochs.
        ending: of CPU, at the end, which publishes.
        epochs: of the clock, sorted; without pauses.
    """

    running: float
    ending: float
    epochs: Sequence[float]

    @property
    def per_epoch_ms(self) -> float:
        """The CPU time of an epoch, with its part of the end."""
        return 1000 * (self.running + self.ending) / len(self.epochs)


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


def run(
    sink: Any, epochs: Iterable[int], batch_rows: int, lineage: str, *, is_paced: bool = False
) -> Figures:
    """Run epochs, one after the other or twenty a second, and end the run."""
    owner = Owner("benchmark", "sink", lineage)
    opened = sink.open(owner, RunFacts())
    batches = {epoch: rows_of(epoch, batch_rows) for epoch in range(BATCHES)}
    took, next_at = list[float](), time.monotonic()
    began = time.process_time()
    for epoch in epochs:
        epoch_began = time.monotonic()
        committables, plan = [], opened.plan()
        for task in range(2):
            transaction = plan.begin(Place(owner, epoch, task, 0, f"{epoch}{task}"))
            transaction.write(batches[epoch % BATCHES])
            committables += transaction.prepare()
        if hasattr(opened, "commit_together"):
            opened.commit_together(committables)
        else:
            for committable in committables:
                opened.commit(committable)
        took.append(time.monotonic() - epoch_began)
        if is_paced:
            next_at += 1 / EPOCHS_PER_S
            time.sleep(max(0.0, next_at - time.monotonic()))
    running = time.process_time() - began
    began = time.process_time()
    opened.close()
    return Figures(running, time.process_time() - began, sorted(took))


def commits_of(kind: str, sink: Any) -> Iterator[list[int]]:
    """Yield the sizes of the files of each commit of a table, the oldest commit first."""
    if kind == "IcebergSink":
        from pyiceberg.catalog import load_catalog

        table = load_catalog(**sink.catalog).load_table(sink.table)
        for snapshot in table.snapshots():
            manifests = snapshot.manifests(table.io)
            yield [
                entry.data_file.file_size_in_bytes
                for manifest in manifests
                if manifest.added_snapshot_id == snapshot.snapshot_id
                for entry in manifest.fetch_manifest_entry(table.io)
            ]
        return
    for commit in sorted(Path(sink.table, "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        if sizes := [action["add"]["size"] for action in actions if "add" in action]:
            yield sizes


def pace(folder: Path, minutes: float, batch_rows: int) -> None:
    """Print commits, sizes of files, times and CPU at twenty epochs a second."""
    base, epochs = None, int(minutes * 60 * EPOCHS_PER_S)
    for kind, sink in list(sinks_in(folder))[:3]:
        figures = run(sink, range(epochs), batch_rows, "measured", is_paced=True)
        base = base or figures.per_epoch_ms
        middle, late = (1000 * figures.epochs[int(share * epochs)] for share in (0.5, 0.99))
        print(
            f"{kind:12} {figures.per_epoch_ms:5.2f} ms of CPU an epoch, "
            f"{figures.per_epoch_ms / base:4.2f} of FileSink's; an epoch takes {middle:.0f} ms, "
            f"1 % more than {late:.0f}, the longest {1000 * figures.epochs[-1]:.0f}"
        )
        for sizes in [] if kind == "FileSink" else commits_of(kind, sink):
            small = [size for size in sizes if size < TARGET]
            print(
                f"    a commit of {len(sizes)} files, {sum(sizes) / MIB:.0f} MiB: "
                f"{len(sizes) - len(small)} of at least 64 MiB, {len(small)} of "
                f"{min(small, default=0) / MIB:.1f} to {max(small, default=0) / MIB:.1f} MiB"
            )


def with_commits(table: Path, count: int) -> None:
    """Give a Delta table commits of files that are not there, and a checkpoint of its log."""
    from deltalake import DeltaTable

    first = {"partitionValues": {}, "size": 1, "modificationTime": 0, "dataChange": True}
    start = DeltaTable(table).version() + 1
    for version in range(start, start + count):
        add = {"path": f"part-{version}.parquet", **first, "stats": '{"numRecords":1}'}
        lines = {"commitInfo": {"timestamp": version}}, {"add": add}
        commit = table / "_delta_log" / f"{version:020d}.json"
        commit.write_text("".join(json.dumps(line) + "\n" for line in lines))
    DeltaTable(table).create_checkpoint()  # as delta-rs does with every hundredth commit


def history(folder: Path, commits: int, batch_rows: int) -> None:
    """Print the times of a start and of publishes, for a Delta table with many commits and a new.

    Among the publishes is one after which delta-rs writes a checkpoint of the log.
    """
    for name, count in (("a new table", 0), (f"{commits} commits", commits)):
        sink = ts.DeltaSink(folder / name, **{**SETTINGS, "commit_every": 0})
        owner = Owner("benchmark", "sink", "measured")
        sink.open(owner, RunFacts()).close()
        if count:
            with_commits(folder / name, count)
        began = time.monotonic()
        sink.open(owner, RunFacts()).close()
        start_ms = 1000 * (time.monotonic() - began)
        figures = run(sink, range(120), batch_rows, "measured")
        checkpoints = len([*(folder / name / "_delta_log").glob("*.checkpoint.parquet")])
        print(
            f"{name}: a start takes {start_ms:.0f} ms, an epoch with its commit "
            f"{1000 * figures.epochs[60]:.0f} ms, the longest {1000 * figures.epochs[-1]:.0f}; "
            f"{checkpoints} checkpoints of the log; {figures.per_epoch_ms:.1f} ms of CPU an epoch"
        )


def cpu(folder: Path, epochs: int, batch_rows: int) -> None:
    """Print the CPU time of an epoch for each sink."""
    base = None
    for kind, sink in sinks_in(folder):
        run(sink, range(5), batch_rows, "warm")
        figures = run(sink, range(epochs), batch_rows, "measured")
        base = base or figures.per_epoch_ms
        print(
            f"{kind:16} {figures.per_epoch_ms:6.2f} ms of CPU an epoch, "
            f"{figures.per_epoch_ms / base:4.2f} of FileSink's; of it the publish at the end "
            f"{1000 * figures.ending:6.0f} ms in all"
        )


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--commits", type=int, default=0)
    parser.add_argument("--folder", help="for the tables; by default that of temporary files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        if arguments.minutes:
            pace(Path(name), arguments.minutes, arguments.rows)
        elif arguments.commits:
            history(Path(name), arguments.commits, arguments.rows)
        else:
            cpu(Path(name), arguments.epochs, arguments.rows)


if __name__ == "__main__":
    main()
