"""Upserts into a Delta table: the last row of each key, once, whoever publishes it."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema, write_deltalake

import tallystick as ts
from tallystick.delta import merging
from tallystick.epoch.two_phase import Outcome, RunFacts
from tallystick.errors import FencedError, OptionError, RecordError
from tallystick.tables.sink import OpenTableSink
from tests.delta.delta_sinks import OWNER, place, prepared

COLUMNS = pa.schema([("id", pa.int64()), ("name", pa.string()), ("n", pa.int64())])
ROWS = COLUMNS.append(pa.field("gone", pa.bool_()))


def opened(path: Path, **settings: Any) -> OpenTableSink:
    settings = {"commit_every": 0, "create": True, "schema": COLUMNS, "key": ["id"], **settings}
    return ts.DeltaSink(path, **{"delete": "gone", **settings}).open(OWNER, RunFacts())


def batch(*rows: tuple[int, str | None, int, bool]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [dict(zip(ROWS.names, row, strict=True)) for row in rows], schema=ROWS
    )


def commit(sink: OpenTableSink, epoch: int, *rows: tuple[int, str | None, int, bool]) -> Outcome:
    return sink.commit_together(prepared(sink, place(epoch), batch(*rows)))


def seen(path: Path) -> dict[int, tuple[str | None, int]]:
    rows = DeltaTable(path).to_pyarrow_table().to_pylist()
    table = {row["id"]: (row["name"], row["n"]) for row in rows}
    assert len(table) == len(rows), "a key is there twice"
    return table


@pytest.mark.parametrize("every", [0, "1 hour"])
def test_the_last_row_of_a_key_is_in_the_table_and_what_was_deleted_is_not(
    tmp_path: Path, every: Any
) -> None:
    sink = opened(tmp_path, commit_every=every)
    commit(sink, 1, (1, "a", 1, False), (2, "b", 1, False), (1, None, 2, False))
    commit(sink, 2, (2, None, 0, True), (3, "c", 3, False), (4, "d", 4, True))
    commit(sink, 3, (3, None, 0, True), (3, "again", 5, False))
    sink.close()
    assert seen(tmp_path) == {1: (None, 2), 3: ("again", 5)}
    assert not [*tmp_path.glob("_tallystick/staged/*")]
    fresh = opened(tmp_path)
    commit(fresh, 4, (1, "z", 9, False), (2, "back", 9, False))
    assert seen(tmp_path) == {1: ("z", 9), 2: ("back", 9), 3: ("again", 5)}


@pytest.mark.parametrize("by", [(), ("name",)])
def test_random_changes_end_as_a_dictionary_does(tmp_path: Path, by: Any) -> None:
    """Cut into epochs and publishes at random; rows move from partition to partition."""
    chance, wanted = random.Random(7), dict[int, tuple[str, int]]()
    sink = opened(tmp_path, commit_every="1 hour", partition_by=by)
    for epoch in range(1, 15):
        rows = []
        for n in range(chance.randrange(1, 30)):
            key, name, gone = chance.randrange(12), chance.choice("abc"), chance.random() < 0.3
            rows.append((key, name, n, gone))
            wanted.pop(key, None)
            wanted |= {} if gone else {key: (name, n)}
        commit(sink, epoch, *rows)
        if chance.random() < 0.3:
            sink._publisher.publish()
    sink.close()
    assert seen(tmp_path) == wanted


def test_a_zombie_merges_nothing_over_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read the table, and sleeps; its successor goes on to the next epoch."""
    zombie = opened(tmp_path)
    epoch = prepared(zombie, place(), batch((1, "old", 1, False)))
    merge, hits = merging.last_of_each_key, []

    def asleep(*args: Any) -> Any:
        monkeypatch.setattr(merging, "last_of_each_key", merge)
        hits.append(True)
        successor = opened(tmp_path)
        assert successor.commit_together(epoch) is Outcome.COMMITTED
        commit(successor, 2, (1, "new", 2, False))
        return merge(*args)

    monkeypatch.setattr(merging, "last_of_each_key", asleep)
    assert zombie.commit_together(epoch) is Outcome.COMMITTED
    assert hits == [True]
    assert seen(tmp_path) == {1: ("new", 2)}
    with pytest.raises(FencedError, match="has epoch 2"):
        zombie.check_newest(epoch[0])


@pytest.mark.parametrize("is_after", [False, True])
def test_a_driver_that_dies_in_a_merge_leaves_it_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_after: bool
) -> None:
    sink = opened(tmp_path)
    commit(sink, 1, (1, "a", 1, False))
    epoch = prepared(sink, place(2), batch((1, None, 0, True), (2, "b", 2, False)))
    append = merging.DeltaMerges.append

    class Died(BaseException):
        pass

    def dying(*args: Any) -> Any:
        if is_after:
            append(*args)
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(merging.DeltaMerges, "append", dying)
        with pytest.raises(Died):
            sink.commit_together(epoch)
    successor = opened(tmp_path)
    assert successor.commit_together(epoch) is Outcome.COMMITTED
    assert seen(tmp_path) == {2: ("b", 2)}
    assert not [*tmp_path.glob("_tallystick/staged/*")]


def test_others_append_between_the_look_and_the_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = opened(tmp_path)
    commit(sink, 1, (1, "a", 1, False))
    last = merging.last_of_each_key

    def beside(*args: Any) -> Any:
        monkeypatch.setattr(merging, "last_of_each_key", last)
        other = pa.table({"id": [77], "name": ["other"], "n": [7]}, schema=COLUMNS)
        write_deltalake(tmp_path, other, mode="append")
        return last(*args)

    monkeypatch.setattr(merging, "last_of_each_key", beside)
    commit(sink, 2, (1, "b", 2, False))
    assert seen(tmp_path) == {1: ("b", 2), 77: ("other", 7)}


def test_much_that_is_due_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "STAGED_BYTES_MAX", 2_000)
    sink = opened(tmp_path, commit_every="1 hour")
    commit(sink, 1, (1, "a", 1, False))
    assert sink._publisher.due == (1,)
    commit(sink, 2, (2, "b", 1, False))
    assert sink._publisher.due == ()


def test_key_is_changed_only_when_nothing_is_due(tmp_path: Path) -> None:
    killed = opened(tmp_path, commit_every="1 hour")
    commit(killed, 1, (1, "a", 1, False))
    with pytest.raises(OptionError, match=r"epochs 1 to 1 were written .* had a key="):
        opened(tmp_path, key=(), delete=None)
    opened(tmp_path).close()
    opened(tmp_path, key=(), delete=None).close()
    assert seen(tmp_path) == {1: ("a", 1)}


def test_rows_and_tables_that_do_not_fit(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    null = pa.RecordBatch.from_pylist([{"id": None, "gone": False}], schema=ROWS)
    with pytest.raises(RecordError, match=r"column 'id' of the key is null in 1 rows"):
        sink.plan().begin(place()).write(null)
    unknown = pa.RecordBatch.from_pylist([{"id": 1, "gone": None}], schema=ROWS)
    with pytest.raises(RecordError, match="'gone' is null in 1 rows"):
        sink.plan().begin(place()).write(unknown)
    with pytest.raises(OptionError, match="it has no column 'uid' of key="):
        opened(tmp_path, key=["uid"])
    with pytest.raises(OptionError, match="delete='n' is a column of it"):
        opened(tmp_path, delete="n")
    with pytest.raises(OptionError, match="delete='gone' needs key="):
        opened(tmp_path, key=())
    only = tmp_path / "appends"
    DeltaTable.create(only, Schema.from_arrow(COLUMNS), configuration={"delta.appendOnly": "true"})
    with pytest.raises(OptionError, match=r"it only takes appends \(delta\.appendOnly=true\)"):
        opened(only)
