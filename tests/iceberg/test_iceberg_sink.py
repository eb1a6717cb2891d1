"""The Iceberg sink, attacked where Iceberg differs: snapshots, catalogs, partitions, branches."""

import datetime
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import requests
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, ServerError
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform, TruncateTransform
from sqlalchemy.exc import OperationalError

import tallystick as ts
from tallystick.epoch.two_phase import Committable, Outcome, Owner, RunFacts
from tallystick.errors import DataLossError, FencedError, OptionError, RecordError, StorageError
from tallystick.iceberg.sink import place_of
from tallystick.tables import publishing
from tallystick.tables.sink import OpenTableSink
from tests.delta.delta_sinks import place, prepared, rows
from tests.iceberg.iceberg_sinks import (
    COLUMNS,
    NAME,
    catalog_in,
    epochs_in,
    sink_in,
    table_in,
    unnamed_in,
    values_in,
)
from tests.tables import before_a_commit

OWNER = Owner("a/b pipeline", "iceberg-0", "f00d")


def opened(path: Path, owner: Owner = OWNER, **settings: Any) -> OpenTableSink:
    settings = {"commit_every": 0, "create": True, "schema": COLUMNS, **settings}
    return sink_in(path, **settings).open(owner, RunFacts())


def two_tasks(sink: OpenTableSink, epoch: int = 1, start: int = 0) -> list[Committable]:
    """Twelve rows from `start` on, of two tasks."""
    nonce = f"a{epoch}{start}"
    return [
        *prepared(sink, place(epoch, 0, nonce, OWNER), rows(start, start + 5)),
        *prepared(sink, place(epoch, 1, nonce, OWNER), rows(start + 5, start + 12)),
    ]


def numbers(path: Path, branch: str = "main") -> list[int]:
    values = values_in(path, "n", branch)
    assert set(values.values()) <= {1}, "a row is there twice"
    return sorted(values)


def before_the_commit(monkeypatch: pytest.MonkeyPatch, first: Callable[[], None]) -> list[str]:
    """Call a function once between a publisher's look at the table and its commit."""
    return before_a_commit.before_the_commit(
        monkeypatch, SqlCatalog, "commit_table", CommitFailedException, first
    )


def test_an_epoch_is_there_once_however_often_it_is_committed(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    epoch = two_tasks(sink)
    assert {one.name for one in sink.lingering(OWNER)} == {one.name for one in epoch}
    for again in (sink, sink, opened(tmp_path)):
        assert again.commit_together(epoch) is Outcome.COMMITTED
        assert numbers(tmp_path) == list(range(12))
    assert epochs_in(tmp_path) == ["1-1"]
    assert list(sink.lingering(OWNER)) == []


def test_what_was_not_decided_is_removed_and_what_was_is_not(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    epoch = two_tasks(sink)
    (stray,) = prepared(sink, place(1, 0, "bb", OWNER), rows(0, 9))
    sink.commit_together(epoch)
    assert len(unnamed_in(tmp_path)) == 1
    for committable in (stray, stray, *epoch):
        sink.abort(committable)
    assert unnamed_in(tmp_path) == []
    assert numbers(tmp_path) == list(range(12))


@pytest.mark.parametrize("every", [0, "1 hour"])
def test_a_zombie_that_wakes_in_the_middle_of_a_publish_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: Any
) -> None:
    """Pyiceberg's own commit puts the zombie's rows on top: 12 rows twice."""
    zombie = opened(tmp_path, commit_every=every)
    epoch = two_tasks(zombie)

    def successor_commits() -> None:
        successor = opened(tmp_path, commit_every=every)
        successor.commit_together(epoch)
        successor.commit_together(two_tasks(successor, 2, 50))
        successor.close()

    refused = before_the_commit(monkeypatch, successor_commits)
    assert zombie.commit_together(epoch) is Outcome.COMMITTED
    zombie.close()
    assert len(refused) == 1
    assert numbers(tmp_path) == [*range(12), *range(50, 62)]
    with pytest.raises(FencedError, match="has epoch 2 of this checkpoint"):
        zombie.check_newest(epoch[0])


@pytest.mark.parametrize("beside", ["append", "expire", "property"])
def test_other_writers_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    sink = opened(tmp_path)
    for epoch in (1, 2):
        sink.commit_together(two_tasks(sink, epoch, 100 * epoch))
    before, hits = numbers(tmp_path), []

    def other_commits() -> None:
        hits.append(beside)
        table = table_in(tmp_path)
        if beside == "append":
            table.append(pa.Table.from_batches([rows(0, 3)]))
        elif beside == "expire":
            oldest = table.snapshots()[0].snapshot_id
            table.maintenance.expire_snapshots().by_id(oldest).commit()
        else:
            with table.transaction() as change:
                change.set_properties({"owner": "somebody"})

    before_the_commit(monkeypatch, other_commits)
    assert sink.commit_together(two_tasks(sink, 3, 300)) is Outcome.COMMITTED
    added = list(range(3)) if beside == "append" else []
    assert numbers(tmp_path) == [*added, *before, *range(300, 312)]
    assert hits == [beside]


@pytest.mark.parametrize("happened", [True, False])
def test_an_unknown_commit_is_asked_for_and_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happened: bool
) -> None:
    sink = opened(tmp_path)
    epoch = two_tasks(sink)
    commit, hits = SqlCatalog.commit_table, []

    def unanswered(catalog: SqlCatalog, *args: Any) -> Any:
        hits.append(happened)
        if happened:
            commit(catalog, *args)
        raise CommitStateUnknownException("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(SqlCatalog, "commit_table", unanswered)
        with pytest.raises(StorageError, match=r"Iceberg table .*committing epoch 1.*no answer"):
            sink.commit_together(epoch)
    assert hits == [happened]
    for again in (sink, opened(tmp_path)):
        assert again.commit_together(epoch) is Outcome.COMMITTED
    assert numbers(tmp_path) == list(range(12))
    assert epochs_in(tmp_path) == ["1-1"]


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (OperationalError("SELECT 1", {}, OSError("the database is away")), True),
        (requests.ConnectionError("no route"), True),
        (ServerError("500"), True),
        (TypeError("a mistake of ours"), False),
    ],
)
def test_errors_of_libraries_are_tried_again_and_mistakes_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_retried: bool
) -> None:
    sink = opened(tmp_path, commit_every="1 hour")
    sink.commit_together(two_tasks(sink))

    def failing(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(SqlCatalog, "commit_table", failing)
        patched.setattr(sink._publisher._compactor, "patience_s", lambda: 0)
        sink._publisher._publish_in_time()
        expected = StorageError if is_retried else TypeError
        with pytest.raises(expected, match=re.escape(str(error).splitlines()[0])):
            sink._publisher.publish()
    if is_retried:
        sink.commit_together(two_tasks(sink, 2, 50))
    else:
        with pytest.raises(TypeError, match="a mistake of ours"):
            sink.commit_together(two_tasks(sink, 2, 50))
    assert sink._publisher.due[0] == 1
    sink.close()
    assert numbers(tmp_path)[:12] == list(range(12))


class Died(BaseException):
    """The driver is no more."""


@pytest.mark.parametrize("every", [0, "1 hour"])
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("step", ["put", "commit_table", "remove_files"])
def test_a_driver_that_dies_in_a_publish_leaves_it_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, is_after: bool, every: Any
) -> None:
    if step == "put" and not every:
        return
    whose: Any = SqlCatalog if step == "commit_table" else publishing.Folder
    original = getattr(whose, step)
    sink = opened(tmp_path, commit_every=every)
    epoch = two_tasks(sink)

    def dying(*args: Any) -> Any:
        if is_after:
            original(*args)
        raise Died

    monkeypatch.setattr(whose, step, dying)
    with pytest.raises(Died):
        [sink.commit_together(epoch), sink.close()]
    monkeypatch.setattr(whose, step, original)

    successor = opened(tmp_path, commit_every=every)
    assert successor.commit_together(epoch) is Outcome.COMMITTED
    successor.check_newest(epoch[0])
    assert list(successor.lingering(OWNER)) == []
    successor.close()
    assert numbers(tmp_path) == list(range(12))
    assert not [*tmp_path.rglob("due/*")]


def test_due_epochs_become_one_snapshot_also_after_a_kill(tmp_path: Path) -> None:
    killed = opened(tmp_path, commit_every="1 hour")
    for epoch in range(1, 21):
        killed.commit_together(two_tasks(killed, epoch, 100 * epoch))
    assert numbers(tmp_path) == []
    restored = Owner(OWNER.pipeline, OWNER.sink, "restored")
    opened(tmp_path, restored, commit_every="1 hour").close()
    killed.close()  # a zombie
    assert len(numbers(tmp_path)) == 20 * 12
    assert epochs_in(tmp_path) == ["1-20"]


def test_rows_lie_in_the_partitions_of_the_table_and_files_say_what_is_in_them(
    tmp_path: Path,
) -> None:
    columns = pa.schema(
        [
            pa.field("n", pa.int64(), nullable=False),
            pa.field("dest", pa.string()),
            pa.field("at", pa.timestamp("us", "UTC")),
            pa.field("codes", pa.list_(pa.int32())),
            pa.field("price", pa.decimal128(10, 2)),
            pa.field("who", pa.struct([pa.field("name", pa.string())])),
        ]
    )
    opened(tmp_path, schema=columns).close()
    with table_in(tmp_path).update_spec() as spec:
        spec.add_field("at", DayTransform())
        spec.add_field("dest", TruncateTransform(2))
        spec.add_field("n", BucketTransform(4))
    sink = opened(tmp_path, schema=columns)
    start = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
    written = [
        {
            "n": n,
            "dest": [None, "", "ORD", "a/b"][n % 4],
            "at": None if n == 7 else start + datetime.timedelta(hours=6 * n),
            "codes": [n, None],
            "price": None,
            "who": {"name": None if n % 2 else "x"},
        }
        for n in range(40)
    ]
    batch = pa.RecordBatch.from_pylist(written, schema=columns)
    sink.commit_together(prepared(sink, place(owner=OWNER), batch.slice(0, 30), batch.slice(30)))

    table = table_in(tmp_path)
    read = table.scan().to_arrow().sort_by("n").to_pylist()
    assert read == written
    assert numbers(tmp_path) == list(range(40))
    only = table.scan(row_filter="at >= '2026-01-03T00:00:00+00:00' and dest = 'ORD'")
    wanted = {row["n"] for row in written if row["dest"] == "ORD" and row["n"] >= 6}
    assert {*only.to_arrow()["n"].to_pylist()} == wanted
    files = table.inspect.files().to_pylist()
    assert len([*only.plan_files()]) < len(files), "partitions and bounds leave files out"
    assert all(file["readable_metrics"]["n"]["lower_bound"] is not None for file in files)
    assert sum(file["record_count"] for file in files) == 40


def test_a_spec_that_changes_while_epochs_are_due_is_named_with_the_way_back(
    tmp_path: Path,
) -> None:
    sink = opened(tmp_path, commit_every="1 hour")
    sink.commit_together(two_tasks(sink))
    with table_in(tmp_path).update_spec() as spec:
        spec.add_identity("dest")
    with pytest.raises(OptionError, match=r"epochs 1 to 1 .* partition spec 0, and .* has 1 now"):
        sink.close()
    with pytest.raises(OptionError, match="partition spec 0"):
        opened(tmp_path)
    assert numbers(tmp_path) == []
    with table_in(tmp_path).update_spec() as spec:
        spec.remove_field("dest")
    opened(tmp_path).close()
    assert numbers(tmp_path) == list(range(12))


def test_rows_go_to_a_branch_alone(tmp_path: Path) -> None:
    main = opened(tmp_path)
    main.commit_together(two_tasks(main))
    audit = opened(tmp_path, Owner("other", "iceberg-0", "a"), branch="audit")
    audit.commit_together(two_tasks(audit, 1, 50))
    assert numbers(tmp_path) == list(range(12))
    assert numbers(tmp_path, "audit") == [*range(50, 62)]


def test_a_table_that_was_replaced_is_an_error(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    epoch = two_tasks(sink)
    load_catalog("default", **catalog_in(tmp_path)).drop_table(NAME)
    for other in (sink, opened(tmp_path)):
        with pytest.raises(DataLossError, match="the table was replaced"):
            other.commit_together(epoch)
    assert numbers(tmp_path) == []


def test_files_that_are_gone_are_an_error_and_an_epoch_that_is_gone_runs_again(
    tmp_path: Path,
) -> None:
    """As after remove_orphan_files with an age shorter than the time of the pipeline's rest."""
    sink = opened(tmp_path)
    lost, torn = two_tasks(sink, 1), two_tasks(sink, 2)
    for file in sorted(tmp_path.rglob("part-*.parquet"))[:3]:
        file.unlink()
    assert sink.commit_together(lost) is Outcome.LOST
    with pytest.raises(DataLossError, match=r"epoch 2 was decided.* 1 are gone"):
        sink.commit_together(torn)
    assert numbers(tmp_path) == []


def changed(path: Path, change: Callable[[Table], Any]) -> None:
    opened(path).close()
    change(table_in(path))


def twice(table: Table) -> None:
    with table.update_spec() as spec:
        spec.add_field("n", IdentityTransform())
        spec.add_field("n", BucketTransform(4))


def tagged(table: Table) -> None:
    table.append(pa.Table.from_batches([rows(0, 3)]))
    snapshot = table.refresh().current_snapshot()
    assert snapshot is not None
    table.manage_snapshots().create_tag(snapshot.snapshot_id, "audit").commit()


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (twice, {}, "column 'n' is in more than one partition field"),
        (tagged, {"branch": "audit"}, "'audit' is a tag: expected a branch"),
        (
            lambda _: None,
            {"schema": pa.schema([*COLUMNS, pa.field("x", pa.int8())])},
            r"no column 'x' \(int8\)",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(
    tmp_path: Path, change: Any, settings: Any, message: str
) -> None:
    changed(tmp_path, change)
    with pytest.raises(OptionError, match=rf"Iceberg table sales\.orders cannot be .*{message}"):
        opened(tmp_path, **settings)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pyiceberg reads such tables, and cannot make one."""
    opened(tmp_path).close()
    monkeypatch.setattr(Table, "format_version", property(lambda _: 3))
    with pytest.raises(OptionError, match="its format version is 3: expected 1 or 2"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"table": "orders"}, "expected its name with its namespace"),
        ({"create": True, "schema": None}, "create=True needs schema="),
        ({"compression": "lz77"}, "lz77"),
        ({"branch": ""}, "branch=''"),
        ({"commit_every": "soon"}, "commit_every"),
    ],
)
def test_settings_are_refused_at_once(arguments: Any, message: str) -> None:
    settings = {"catalog": {"type": "sql", "secret": "hunter2"}, "table": NAME, **arguments}
    with pytest.raises(OptionError, match=message) as refused:
        ts.IcebergSink(**settings)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("catalog", "message"),
    [
        ("nowhere", r"pyiceberg refuses the settings: URI missing"),
        ({"type": "rest", "uri": "http://127.0.0.1:1"}, "the catalog cannot be asked"),
        ({"type": "sql", "uri": "sqlite:////nowhere/c.db"}, "the catalog cannot be asked"),
    ],
)
def test_a_catalog_that_is_not_there_is_named(catalog: Any, message: str) -> None:
    sink = ts.IcebergSink(catalog, NAME)
    with pytest.raises((OptionError, StorageError), match=rf"sales\.orders: {message}"):
        sink.open(OWNER, RunFacts())


def test_a_table_that_is_missing_is_created_only_if_asked(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"sales\.orders does not exist.* create=True"):
        opened(tmp_path, create=False)
    opened(tmp_path).close()
    opened(tmp_path, create=False).close()


def test_rows_of_another_type_are_refused(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    with pytest.raises(RecordError, match=r"Iceberg table /.*orders: column 'n' is string"):
        sink.plan().begin(place(owner=OWNER)).write(pa.record_batch({"n": ["1"]}))


def test_a_pipeline_writes_into_the_table(tmp_path: Path) -> None:
    pipeline = (
        ts.Pipeline("orders")
        .read(ts.RowsSource([{"n": 1, "dest": "ORD"}, {"n": 2, "dest": None}]))
        .write(sink_in(tmp_path, create=True, schema=COLUMNS))
    )
    pipeline.start().awaitTermination()
    assert values_in(tmp_path, "dest") == Counter(["ORD", None])


def test_settings_of_s3_reach_the_folder() -> None:
    settings = {
        "s3.endpoint": "http://127.0.0.1:9000",
        "s3.access-key-id": "key",
        "s3.secret-access-key": "a/b",
        "s3.region": "eu-west-1",
    }
    place = place_of("s3://bucket/table", settings)
    assert place.startswith("s3://key:a%2Fb@bucket/table?")
    assert re.search(r"region=eu-west-1&scheme=http&endpoint_override=127\.0\.0\.1%3A9000", place)
    assert place_of("s3://bucket/table", {}) == "s3://bucket/table"
    assert place_of("file:///a", settings) == "file:///a"
