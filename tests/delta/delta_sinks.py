"""Helpers for tests of the Delta sink: owners, numbered rows, and two readers of a table."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from pyarrow import fs

from tallystick.delta.sink import DeltaSink
from tallystick.epoch.two_phase import Committable, Outcome, Owner, Place, RunFacts
from tallystick.tables.sink import OpenTableSink
from tests.tables import before_a_commit, duck

OWNER = Owner("a/b pipeline", "delta-0", "f00d")
COLUMNS = pa.schema([pa.field("n", pa.int64()), pa.field("dest", pa.string())])


def place(
    checkpoint_id: int = 1, task: int = 0, nonce: str = "ab12", owner: Owner = OWNER
) -> Place:
    return Place(owner, checkpoint_id, task, 0, nonce)


def rows(start: int, stop: int) -> pa.RecordBatch:
    numbers = range(start, stop)
    dest = pa.array([("ORD", "a/b", None)[n % 3] for n in numbers], pa.string())
    return pa.record_batch({"n": pa.array(numbers, pa.int64()), "dest": dest})


def opened(path: Any, owner: Owner = OWNER, **settings: Any) -> OpenTableSink:
    settings = {"commit_every": 0, "create": True, "schema": COLUMNS, **settings}
    return DeltaSink(str(path), **settings).open(owner, RunFacts())


def prepared(sink: OpenTableSink, at: Place, *batches: pa.RecordBatch) -> list[Committable]:
    """The committables of one attempt."""
    transaction = sink.plan().begin(at)
    for batch in batches:
        transaction.write(batch)
    return list(transaction.prepare())


def visible(path: Path | str) -> list[int]:
    """The numbers that delta-rs finds, which are those of the log as Delta's protocol has it."""
    numbers = sorted(DeltaTable(str(path)).to_pyarrow_table()["n"].to_pylist())
    assert numbers == numbers_of_log(Path(path))
    return numbers


def added_files(path: Path) -> list[dict[str, Any]]:
    """Read what the log says of the table's files by hand: twice of one that was added twice."""
    files: list[dict[str, Any]] = []
    for commit in sorted((path / "_delta_log").glob("*.json")):
        for line in commit.read_text().splitlines():
            action = json.loads(line)
            if "add" in action:
                files.append(action["add"])
            if "remove" in action:
                files = [file for file in files if file["path"] != action["remove"]["path"]]
    return files


def numbers_of_log(path: Path, column: str = "n") -> list[Any]:
    """Read the files that the log names by DuckDB: no code of the writer."""
    paths = sorted(str(path / file["path"]) for file in added_files(path))
    assert len({*paths}) == len(paths), "a file was added twice"
    if not paths:
        return []
    values = duck.query(f"SELECT {column} FROM read_parquet($1)", paths).fetchall()
    return sorted(value for (value,) in values)


def unnamed(path: Path) -> list[str]:
    """The Parquet files that no version of the table names."""
    text = "".join(commit.read_text() for commit in (path / "_delta_log").glob("*.json"))
    return [file.name for file in path.glob("part-*.parquet") if file.name not in text]


def commits(path: Path) -> Counter[str]:
    """How often each epoch, or range of epochs, was committed."""
    history = DeltaTable(str(path)).history()
    return Counter(one["tallystick.epochs"] for one in history if "tallystick.epochs" in one)


def before_the_commit(monkeypatch: pytest.MonkeyPatch, first: Callable[[], None]) -> list[str]:
    """Call a function once between a publisher's look at the table and its commit.

    Returns:
        What the table says to commits that it refuses from then on.
    """
    return before_a_commit.before_the_commit(
        monkeypatch, DeltaTable, "create_write_transaction", CommitFailedError, first
    )


def check_epochs_are_there_once(
    monkeypatch: pytest.MonkeyPatch,
    uri: str,
    seen: Callable[[], list[int]],
    files: fs.FileSystem,
    folder: str,
    every: Any,
) -> None:
    """Let a zombie and its successor race for a version of a table on an object store.

    Args:
        monkeypatch: of the test.
        uri: of the table, with all that the sink is to know.
        seen: returns the table's numbers, with settings of the test's own.
        files: an independent view of the store.
        folder: of the table, in that view.
        every: the sinks' `commit_every`.
    """
    by = ["dest"]
    opened(uri, Owner(OWNER.pipeline, OWNER.sink, ""), partition_by=by).close()  # the first check
    zombie = opened(uri, commit_every=every, partition_by=by)
    epoch = prepared(zombie, place(), rows(0, 9), rows(9, 12))
    (stray,) = prepared(zombie, place(nonce="bb"), rows(0, 9))
    assert {one.name for one in zombie.lingering(OWNER)} == {epoch[0].name, stray.name}
    hits = []

    def successor_commits() -> None:
        successor = opened(uri, commit_every=every)
        assert successor.commit_together(epoch) is Outcome.COMMITTED
        successor.close()
        hits.append(seen())

    refused = before_the_commit(monkeypatch, successor_commits)
    assert zombie.commit_together(epoch) is Outcome.COMMITTED
    zombie.close()
    assert hits == [list(range(12))]
    assert seen() == list(range(12))
    for lingering in zombie.lingering(OWNER):
        assert lingering.name == stray.name
        zombie.abort(lingering)
    listed = files.get_file_info(fs.FileSelector(folder, recursive=True))
    assert [info for info in listed if "_delta_log" in info.path]
    assert not [info.path for info in listed if stray.name in info.path]
    assert not [info.path for info in listed if re.search("/(due|pending)/.", info.path)]
    assert len(refused) == 1
