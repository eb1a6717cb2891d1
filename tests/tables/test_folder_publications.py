"""`FileSink(commit_every=…)`: files of many epochs become visible together, exactly once."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from pyarrow import fs

import tallystick as ts
from tallystick.epoch.two_phase import Committable, Owner, RunFacts
from tallystick.errors import ManifestError, OptionError, StorageError
from tallystick.files.folder import Folder
from tallystick.tables.folder import KEPT
from tallystick.tables.sink import OpenTableSink
from tallystick.tables.writing import TablePlan
from tests.delta.delta_sinks import COLUMNS, OWNER, place, rows
from tests.storage.test_storage_s3 import Server
from tests.tables.test_table_guarantees import Delta, Files, Iceberg


def opened(path: Path, owner: Owner = OWNER, **settings: Any) -> OpenTableSink:
    settings = {"commit_every": "1 hour", "schema": COLUMNS, **settings}
    sink = ts.FileSink(path, **settings).open(owner, RunFacts())
    assert isinstance(sink, OpenTableSink)
    return sink


def epoch_of(sink: Any, number: int) -> list[Committable]:
    """The committables of an epoch of ten rows."""
    transaction = sink.plan().begin(place(number, 0, f"a{number:04d}"))
    transaction.write(rows(10 * number, 10 * number + 10))
    return list(transaction.prepare())


def visible(path: Path) -> list[int]:
    files = ds.dataset(path, format="parquet", partitioning="hive")
    return sorted(files.to_table()["n"].to_pylist()) if files.files else []


def drafts(path: Path) -> list[Path]:
    return [*path.glob("_tallystick/**/*.draft")]


class Died(BaseException):
    """The driver is no more."""


def die(*_: Any, **__: Any) -> None:
    raise Died


def test_partitions_are_folders(tmp_path: Path) -> None:
    sink = opened(tmp_path, partition_by=["dest"])
    for number in range(3):
        sink.commit_together(epoch_of(sink, number))
    assert visible(tmp_path) == []
    sink.close()
    assert visible(tmp_path) == list(range(30))
    assert {path.parent.name for path in tmp_path.glob("dest=*/*.parquet")} == {
        "dest=ORD",
        "dest=a%2Fb",
        "dest=__HIVE_DEFAULT_PARTITION__",
    }
    assert drafts(tmp_path) == []


@pytest.mark.parametrize("step", ["put_new", "reveal", "remove_files"])
@pytest.mark.parametrize("is_after", [False, True])
def test_a_driver_that_dies_in_a_publication_leaves_the_rest_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, is_after: bool
) -> None:
    sink, original = opened(tmp_path), getattr(Folder, step)
    for number in range(3):
        sink.commit_together(epoch_of(sink, number))

    def dying(*args: Any) -> Any:
        if is_after:
            original(*args)
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(Folder, step, dying)
        with pytest.raises(Died):
            sink.close()
    successor = opened(tmp_path)
    assert visible(tmp_path) == list(range(30))
    successor.close()
    assert visible(tmp_path) == list(range(30))
    assert drafts(tmp_path) == []


def test_half_of_the_files_are_visible_when_a_driver_dies_and_the_next_shows_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader takes away what it sees meanwhile, and gets nothing twice."""
    sink, reveal = opened(tmp_path), Folder.reveal
    for number in range(4):
        sink.commit_together(epoch_of(sink, number))

    def half(folder: Folder, moves: Any) -> None:
        reveal(folder, sorted(moves)[:2])
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "reveal", half)
        with pytest.raises(Died):
            sink.close()
    assert visible(tmp_path) == list(range(20))
    for file in tmp_path.glob("*.parquet"):
        file.unlink()
    opened(tmp_path).close()
    assert visible(tmp_path) == list(range(20, 40))


@pytest.mark.parametrize("later", [1, KEPT + 3])
def test_a_zombie_that_wakes_in_its_publication_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: int
) -> None:
    """Also after so many publications that the one under its number is gone."""
    zombie, put_new, hits = opened(tmp_path), Folder.put_new, list[bool]()
    for number in range(2):
        zombie.commit_together(epoch_of(zombie, number))

    def slow(folder: Folder, path: str, data: bytes) -> bool:
        monkeypatch.setattr(Folder, "put_new", put_new)
        successor = opened(tmp_path)
        for number in range(2, 2 + later):
            successor.commit_together(epoch_of(successor, number))
            successor._publisher.publish()
        successor.close()
        hits.append(put_new(folder, path, data))
        return hits[-1]

    monkeypatch.setattr(Folder, "put_new", slow)
    zombie._publisher.publish()
    assert hits == [later > KEPT], "its number was taken, or free again"
    assert visible(tmp_path) == list(range(10 * (2 + later)))
    assert zombie._publisher.due == ()
    assert opened(tmp_path)._publisher.newest_epoch() == 1 + later


def test_an_unknown_publication_is_asked_for_and_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, put_new = opened(tmp_path), Folder.put_new
    sink.commit_together(epoch_of(sink, 0))

    def unanswered(folder: Folder, path: str, data: bytes) -> bool:
        assert put_new(folder, path, data)
        raise StorageError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "put_new", unanswered)
        with pytest.raises(StorageError, match="no answer"):
            sink._publisher.publish()
    assert visible(tmp_path) == []
    sink.close()
    assert visible(tmp_path) == list(range(10))
    assert drafts(tmp_path) == []


def test_old_publications_are_removed(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    for number in range(KEPT + 5):
        sink.commit_together(epoch_of(sink, number))
        sink._publisher.publish()
    (log,) = tmp_path.glob("_tallystick/**/published")
    assert len([*log.iterdir()]) == KEPT
    assert visible(tmp_path) == list(range(10 * (KEPT + 5)))


@pytest.mark.parametrize("kind", ["due", "prepared"])
def test_a_change_of_commit_every_while_files_wait_is_refused_with_the_way_back(
    tmp_path: Path, kind: str
) -> None:
    late, at_once = {"commit_every": "1 hour"}, {"commit_every": 0}
    sink = opened(tmp_path)
    waiting = epoch_of(sink, 0)
    if kind == "due":
        sink.commit_together(waiting)
    with pytest.raises(OptionError, match=r"run with commit_every= wait in .* as it was and stop"):
        ts.FileSink(tmp_path, schema=COLUMNS, **at_once).open(OWNER, RunFacts())
    sink.commit_together(waiting)
    sink.close()
    plain = ts.FileSink(tmp_path, schema=COLUMNS, **at_once).open(OWNER, RunFacts())
    waiting = epoch_of(plain, 1)
    with pytest.raises(OptionError, match="run without commit_every= wait in "):
        opened(tmp_path, **late)
    for committable in waiting:
        plain.commit(committable)
    opened(tmp_path, **late).close()
    assert visible(tmp_path) == list(range(20))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"commit_every": "1 minute"}, "commit_every='1 minute' needs schema="),
        ({"commit_every": "soon"}, "commit_every"),
        (
            {"commit_every": 1, "schema": COLUMNS, "guarantee": "none"},
            "commit_every=1 with guarantee='none': expected 'exactly_once'",
        ),
        ({"target_file_size": 0}, "target_file_size=0: expected at least 1"),
    ],
)
def test_settings_are_refused_where_they_are_written(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        ts.FileSink("/tmp/files", **settings)


def test_a_damaged_publication_is_named(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.commit_together(epoch_of(sink, 0))
    sink.close()
    (publication,) = tmp_path.glob("_tallystick/**/published/*")
    publication.write_text(json.dumps({"newest": 7}))
    with pytest.raises(ManifestError, match=r"publication .*published/00000000"):
        opened(tmp_path)


def test_publications_on_s3_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a real server process; a zombie wakes up in the middle of its publication."""
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    server, put_new, hits = Server(tmp_path), Folder.put_new, list[bool]()
    try:
        server.create_bucket("files", access_key="key", secret_key="hunter2")
        uri = f"s3a://key:hunter2@files/out?{server.query}"
        settings: Any = {"schema": COLUMNS, "commit_every": "1 hour", "partition_by": ["dest"]}
        ts.FileSink(uri, **settings).open(Owner(OWNER.pipeline, OWNER.sink, ""), RunFacts())

        def opened_on_s3() -> Any:
            return ts.FileSink(uri, **settings).open(OWNER, RunFacts())

        zombie = opened_on_s3()
        for number in range(3):
            zombie.commit_together(epoch_of(zombie, number))

        def slow(folder: Folder, path: str, data: bytes) -> bool:
            monkeypatch.setattr(Folder, "put_new", put_new)
            opened_on_s3().close()
            hits.append(put_new(folder, path, data))
            return hits[-1]

        monkeypatch.setattr(Folder, "put_new", slow)
        zombie.close()
        assert hits == [False]
        store = fs.S3FileSystem(
            access_key="key",
            secret_key="hunter2",
            endpoint_override=server.host,
            scheme="http",
            region="us-east-1",
        )
        files = ds.dataset("files/out", filesystem=store, format="parquet", partitioning="hive")
        assert sorted(files.to_table()["n"].to_pylist()) == list(range(30))
        infos = store.get_file_info(fs.FileSelector("files/out", recursive=True))
        assert [info.path for info in infos if info.path.endswith(".draft")] == []
    finally:
        server.stop()


def test_a_store_without_exclusive_creation_is_told_of_as_a_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    folder = Folder("s3://bucket/files?region=eu-west-1&endpoint_override=http://127.0.0.1:9")
    with pytest.raises(OptionError) as raised:
        folder.put_new("x", b"")
    assert str(raised.value).startswith("file sink s3://bucket/files: a file that must be new")
    assert "checkpoint" not in str(raised.value)
    assert "or write without commit_every=" in str(raised.value)


@pytest.mark.parametrize("kind", [Delta, Iceberg, Files])
def test_a_disk_that_the_driver_does_not_see_is_refused_in_tasks_of_tables(
    kind: type[Delta | Iceberg | Files], tmp_path: Path
) -> None:
    sink = kind().sink(tmp_path / "table", commit_every="1 hour")
    opened_sink = sink.open(OWNER, RunFacts())
    plan = opened_sink.plan()
    assert isinstance(plan, TablePlan)
    plan.begin(place()).abort()
    elsewhere = replace(plan, folder=Folder(str(tmp_path / "executors")))
    with pytest.raises(OptionError, match="expected one disk that the driver and all executors"):
        elsewhere.begin(place())
    opened_sink.close()
