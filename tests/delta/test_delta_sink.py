"""The Delta sink against a real table, read by delta-rs and by DuckDB from the log itself."""

import json
from datetime import UTC, date, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema, write_deltalake

from tallystick.delta.sink import DeltaSink
from tallystick.delta.table import statistics
from tallystick.epoch.two_phase import Committable, Outcome, Owner, RunFacts
from tallystick.errors import (
    DataLossError,
    FencedError,
    ManifestError,
    OptionError,
    RecordError,
    StorageError,
)
from tallystick.host.stopwatch import now_ms
from tallystick.ops.transactions import lingering_in_files
from tallystick.tables import publishing
from tests.delta.delta_sinks import (
    COLUMNS,
    OWNER,
    before_the_commit,
    commits,
    opened,
    place,
    prepared,
    rows,
    unnamed,
    visible,
)
from tests.waiting import wait_for


class Died(BaseException):
    """A driver is killed: nothing is tidied up."""


def two_tasks(sink: Any, epoch: int = 1, start: int = 0) -> list[Committable]:
    at = [place(epoch, task, f"a{epoch}") for task in (0, 1)]
    return [
        *prepared(sink, at[0], rows(start, start + 5), rows(start + 5, start + 9)),
        *prepared(sink, at[1], rows(start + 9, start + 12)),
    ]


@pytest.mark.parametrize("by", [[], ["dest"]])
def test_an_epoch_of_several_tasks_is_one_commit_and_is_there_once(
    tmp_path: Path, by: list[str]
) -> None:
    sink = opened(tmp_path, partition_by=by)
    epoch = two_tasks(sink)
    assert visible(tmp_path) == []
    assert [one.name for one in sink.lingering(OWNER)] == [one.name for one in epoch]

    for again in (sink, sink, opened(tmp_path)):
        assert again.commit_together(epoch) is Outcome.COMMITTED
        assert visible(tmp_path) == list(range(12))
    assert commits(tmp_path) == {"1-1": 1}
    assert list(sink.lingering(OWNER)) == []
    table = DeltaTable(tmp_path).to_pyarrow_table(columns=["dest", "n"])
    assert sorted(table.to_pylist(), key=lambda row: row["n"]) == [
        {"dest": row["dest"], "n": row["n"]} for row in rows(0, 12).to_pylist()
    ]
    if by:
        only = DeltaTable(tmp_path).to_pyarrow_table(filters=[("dest", "=", "a/b")])
        assert sorted(only["n"].to_pylist()) == [1, 4, 7, 10]


def test_what_was_not_decided_is_removed_and_what_was_is_not(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    epoch = two_tasks(sink)
    (stray,) = prepared(sink, place(1, 0, "bb"), rows(0, 9))
    assert sink.commit_together(epoch) is Outcome.COMMITTED
    (found,) = sink.lingering(OWNER)
    assert found.name == stray.name
    (shown,) = lingering_in_files(str(tmp_path), [OWNER])  # what `tallystick inspect` lists
    assert (shown.name, shown.state) == (stray.name, "hidden")

    for committable in (found, found, *epoch):
        sink.abort(committable)
    assert visible(tmp_path) == list(range(12))
    assert unnamed(tmp_path) == []
    assert list(sink.lingering(OWNER)) == []


def test_an_epoch_whose_files_are_all_gone_is_lost_and_a_part_is_an_error(tmp_path: Path) -> None:
    """As after a VACUUM with a retention shorter than the time that the pipeline was down."""
    sink = opened(tmp_path)
    lost, torn = two_tasks(sink, 1), two_tasks(sink, 2)
    table = DeltaTable(tmp_path)
    assert table.vacuum(retention_hours=168, dry_run=False) == [], "younger than its retention"
    files = sorted(tmp_path.glob("part-*.parquet"))
    for file in files[:3]:
        file.unlink()
    assert sink.commit_together(lost) is Outcome.LOST
    with pytest.raises(DataLossError, match=r"epoch 2 was decided.* 1 are gone.* VACUUM"):
        sink.commit_together(torn)
    assert visible(tmp_path) == []


def test_files_survive_a_vacuum_beside_them(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    epoch = two_tasks(sink)
    DeltaTable(tmp_path).vacuum(retention_hours=168, dry_run=False)
    assert sink.commit_together(epoch) is Outcome.COMMITTED
    DeltaTable(tmp_path).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    assert visible(tmp_path) == list(range(12))


@pytest.mark.parametrize("beside", ["append", "optimize"])
def test_other_writers_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    """Another commits between this one's look at the table and its commit."""
    sink = opened(tmp_path)
    for epoch in (1, 2):
        sink.commit_together(two_tasks(sink, epoch, 100 * epoch))
    before = visible(tmp_path)
    hits = []

    def other_commits() -> None:
        hits.append(beside)
        if beside == "append":
            write_deltalake(tmp_path, pa.Table.from_batches([rows(0, 3)]), mode="append")
        else:
            assert DeltaTable(tmp_path).optimize.compact()["numFilesRemoved"] == 4

    before_the_commit(monkeypatch, other_commits)
    assert sink.commit_together(two_tasks(sink, 3, 300)) is Outcome.COMMITTED
    added = list(range(3)) if beside == "append" else []
    assert visible(tmp_path) == sorted([*added, *before, *range(300, 312)])
    assert hits == [beside]


@pytest.mark.parametrize("every", [0, "1 hour"])
def test_a_zombie_that_wakes_in_the_middle_of_a_publish_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: Any
) -> None:
    """It has asked for the version, and sleeps; its successor publishes that epoch and the next."""
    zombie = opened(tmp_path, commit_every=every)
    epoch = two_tasks(zombie, 1)

    def successor_commits() -> None:
        successor = opened(tmp_path, commit_every=every)
        successor.commit_together(epoch)
        successor.commit_together(two_tasks(successor, 2, 50))
        successor.close()

    refused = before_the_commit(monkeypatch, successor_commits)
    assert zombie.commit_together(epoch) is Outcome.COMMITTED
    zombie.close()
    assert len(refused) == 1
    assert visible(tmp_path) == [*range(12), *range(50, 62)]
    with pytest.raises(FencedError, match="has epoch 2 of this checkpoint"):
        zombie.check_newest(epoch[0])


@pytest.mark.parametrize("every", [0, "1 hour"])
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("step", ["put", "create_write_transaction", "remove_files"])
def test_a_driver_that_dies_in_a_publish_leaves_it_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, is_after: bool, every: Any
) -> None:
    """Before and after each thing that it does, in turn."""
    if step == "put" and not every:
        return
    whose: Any = DeltaTable if step == "create_write_transaction" else publishing.Folder
    original, hits = getattr(whose, step), []
    for number in range(10):
        path = tmp_path / str(number)
        sink = opened(path, commit_every=every)
        epoch = two_tasks(sink)
        remaining = [number]

        def dying(*args: Any, remaining: list[int] = remaining, **rest: Any) -> Any:
            dies, remaining[0] = remaining[0] == 0, remaining[0] - 1
            if dies and not is_after:
                raise Died
            result = original(*args, **rest)
            if dies:
                raise Died
            return result

        monkeypatch.setattr(whose, step, dying)
        try:
            sink.commit_together(epoch)
            sink.close()
            died = False
        except Died:
            died = True
        monkeypatch.setattr(whose, step, original)
        hits.append(died)

        successor = opened(path, commit_every=every)
        assert successor.commit_together(epoch) is Outcome.COMMITTED
        successor.check_newest(epoch[0])
        assert list(successor.lingering(OWNER)) == []
        successor.close()
        assert visible(path) == list(range(12)), (number, step)
        assert not [*path.glob("_tallystick/*/*/*/due/*")]
        if not died:
            break
    assert hits[0], "nobody died"
    assert not hits[-1], "all moments were not tried"


def test_due_epochs_are_listed_until_they_are_in_the_table(tmp_path: Path) -> None:
    """Due epochs of an earlier lineage are listed as well: the next start publishes them."""
    earlier = opened(tmp_path, commit_every="1 hour")
    other = Owner(OWNER.pipeline, "another", OWNER.lineage)
    after = Owner(OWNER.pipeline, OWNER.sink, "after-a-savepoint")
    begun_ms = now_ms()
    for epoch in (1, 2):
        assert earlier.commit_together(two_tasks(earlier, epoch)) is Outcome.COMMITTED
    assert len([*tmp_path.glob("_tallystick/*/*/*/due/*")]) == 2, "they wait"
    assert lingering_in_files(str(tmp_path), [other]) == ()

    for owner in (OWNER, after):
        due = lingering_in_files(str(tmp_path), [other, owner])
        assert [(one.state, one.sink, int(one.transactional_id[-8:])) for one in due] == [
            ("due", OWNER.sink, epoch) for epoch in (1, 2)
        ]
        assert all(begun_ms - 1000 <= one.begun_ms <= now_ms() + 1000 for one in due)

    opened(tmp_path, after, commit_every="1 hour").close()
    assert visible(tmp_path), "published"
    assert lingering_in_files(str(tmp_path), [OWNER, after]) == ()


def test_due_epochs_become_one_commit(tmp_path: Path) -> None:
    sink = opened(tmp_path, commit_every="1 hour")
    for epoch in range(1, 21):
        assert sink.commit_together(two_tasks(sink, epoch, 100 * epoch)) is Outcome.COMMITTED
    assert visible(tmp_path) == []
    assert list(sink.lingering(OWNER)) == [], "what is due is decided"
    sink.close()
    assert len(visible(tmp_path)) == 20 * 12
    assert commits(tmp_path) == {"1-20": 1}


def test_due_epochs_are_published_in_time_without_another_epoch(tmp_path: Path) -> None:
    sink = opened(tmp_path, commit_every="200 milliseconds")
    sink.commit_together(two_tasks(sink))
    wait_for(lambda: sink._publisher.due, (), "a publish")
    assert visible(tmp_path) == list(range(12))


def test_many_due_epochs_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "DUE_MAX", 3)
    sink = opened(tmp_path, commit_every="1 hour")
    for epoch in range(1, 5):
        sink.commit_together(two_tasks(sink, epoch))
    assert commits(tmp_path) == {"1-3": 1}
    assert sink._publisher.due == (4,)


@pytest.mark.parametrize("lineage", ["f00d", "restored"])
def test_the_next_start_publishes_what_a_killed_run_has_left_due(
    tmp_path: Path, lineage: str
) -> None:
    """The same checkpoint, or one that was restored from its savepoint."""
    killed = opened(tmp_path, commit_every="1 hour")
    killed.commit_together(two_tasks(killed))
    assert visible(tmp_path) == []

    sink = opened(tmp_path, Owner(OWNER.pipeline, OWNER.sink, lineage), commit_every="1 hour")
    assert visible(tmp_path) == list(range(12))
    killed.close()  # a zombie
    sink.close()
    assert visible(tmp_path) == list(range(12))


def test_a_publish_that_fails_in_its_own_time_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = opened(tmp_path, commit_every="1 hour")
    sink.commit_together(two_tasks(sink))

    def away(*_: Any) -> None:
        raise OSError("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(DeltaTable, "update_incremental", away)
        sink._publisher._publish_in_time()  # asks an epoch to compact
        sink._publisher._publish_in_time()
        assert "1 epochs wait for the next try" in caplog.text
        with pytest.raises(StorageError, match=r"Delta table .*the store is away"):
            sink._publisher.publish()
    assert sink._publisher._timer is not None
    sink.close()
    assert visible(tmp_path) == list(range(12))


def test_a_table_that_was_replaced_is_an_error(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    epoch = two_tasks(sink)
    for file in (tmp_path / "_delta_log").iterdir():
        file.unlink()
    other = opened(tmp_path)
    with pytest.raises(DataLossError, match="the table was replaced"):
        other.commit_together(epoch)
    assert visible(tmp_path) == []


# --- tables and rows that do not fit ------------------------------------------------------------


def has_constraint(path: Path) -> None:
    table = DeltaTable.create(path, Schema.from_arrow(COLUMNS))
    table.alter.add_constraint({"positive": "n > 0"})


def has(**settings: str) -> Any:
    names = {f"delta.{name.replace('_', '.')}": value for name, value in settings.items()}
    return lambda path: DeltaTable.create(path, Schema.from_arrow(COLUMNS), configuration=names)


def edit_log(path: Path, change: Any) -> None:
    """Write into the first commit what delta-rs does not create."""
    DeltaTable.create(path, Schema.from_arrow(COLUMNS), configuration={"delta.appendOnly": "true"})
    first = path / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in first.read_text().splitlines()]
    for action in actions:
        change(action)
    first.write_text("\n".join(map(json.dumps, actions)))


def has_feature(path: Path) -> None:
    def change(action: dict[str, Any]) -> None:
        if "protocol" in action:
            action["protocol"] = {
                "minReaderVersion": 1,
                "minWriterVersion": 7,
                "writerFeatures": ["rowTracking", "domainMetadata"],
            }

    edit_log(path, change)


def has_column(rule: str, value: Any) -> Any:
    def change(action: dict[str, Any]) -> None:
        if "metaData" in action:
            schema = json.loads(action["metaData"]["schemaString"])
            schema["fields"][0]["metadata"] = {rule: value}
            action["metaData"]["schemaString"] = json.dumps(schema)

    return lambda path: edit_log(path, change)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (has_constraint, r"CHECK constraint 'positive' \(n > 0\)"),
        (has(columnMapping_mode="name"), r"column mapping \(delta.columnMapping.mode=name\)"),
        (has(setTransactionRetentionDuration="interval 1 days"), "forgets application transac"),
        (has_feature, "writer feature 'rowTracking'"),
        (has_column("delta.generationExpression", "1 + 1"), r"'n' is a generated column \(1 \+ 1"),
        (has_column("delta.identity.start", 1), "'n' is an identity column"),
        (has_column("delta.invariants", '{"expression":{"expression":"n>1"}}'), "an invariant"),
        (lambda path: None, "does not exist. Create it, or say so"),
    ],
)
def test_a_table_that_asks_for_more_is_refused_by_name(
    tmp_path: Path, make: Any, problem: str
) -> None:
    path = tmp_path / "table"
    make(path)
    with pytest.raises(OptionError, match=problem):
        opened(path, create=False)


@pytest.mark.parametrize("setting", ["enableDeletionVectors", "enableChangeDataFeed", "appendOnly"])
def test_a_table_with_a_feature_that_appends_keep_is_written(tmp_path: Path, setting: str) -> None:
    has(**{setting: "true"})(tmp_path)
    sink = opened(tmp_path, create=False)
    sink.commit_together(two_tasks(sink))
    assert pa.table(DeltaTable(tmp_path).get_add_actions())["num_records"].to_pylist() == [9, 3]


def test_a_constraint_that_comes_later_stops_the_next_commit(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    epoch = two_tasks(sink)
    DeltaTable(tmp_path).alter.add_constraint({"small": "n < 5"})
    with pytest.raises(OptionError, match="CHECK constraint 'small'"):
        sink.commit_together(epoch)
    assert visible(tmp_path) == []
    DeltaTable(tmp_path).alter.drop_constraint("small")
    assert sink.commit_together(epoch) is Outcome.COMMITTED


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"n": pa.array(["1"])}, "column 'n' is string: the table has int64"),
        ({"n": pa.array([1], pa.int32())}, "column 'n' is int32: the table has int64"),
        ({"n": [1], "dst": ["ORD"]}, r"the table has no column 'dst' \(string\)"),
        ({"dest": ["ORD"]}, "column 'n' is missing, and the table has it NOT NULL"),
        ({"n": pa.array([None, 1], pa.int64())}, "column 'n' is null in 1 rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_column(
    tmp_path: Path, columns: dict[str, Any], problem: str
) -> None:
    wanted = pa.schema([pa.field("n", pa.int64(), nullable=False), COLUMNS.field("dest")])
    sink = opened(tmp_path, schema=wanted)
    batch = pa.record_batch(columns)
    with pytest.raises(RecordError, match=problem):
        prepared(sink, place(), batch)
    if "null in" not in problem:
        with pytest.raises(OptionError, match=problem):
            DeltaSink(tmp_path).check_columns(batch.schema)
        with pytest.raises(OptionError, match=problem):
            opened(tmp_path, create=False, schema=batch.schema)


def test_columns_are_added_only_if_told_to(tmp_path: Path) -> None:
    opened(tmp_path).close()
    more = pa.schema([*COLUMNS, pa.field("at", pa.timestamp("us", "UTC"))])
    with pytest.raises(OptionError, match="the table has no column 'at'"):
        opened(tmp_path, schema=more)
    sink = opened(tmp_path, schema=more, evolve=True)
    at = datetime(2026, 11, 27, 12, 0, 0, 123456, tzinfo=UTC)
    batch = pa.record_batch({"at": pa.array([at], pa.timestamp("us", "Europe/Paris")), "n": [7]})
    sink.commit_together(prepared(sink, place(), batch))
    (row,) = DeltaTable(tmp_path).to_pyarrow_table().to_pylist()
    assert row == {"n": 7, "dest": None, "at": at}


def test_partitions_must_be_the_tables(tmp_path: Path) -> None:
    opened(tmp_path, partition_by=["dest"]).close()
    with pytest.raises(OptionError, match=r"and the table is partitioned by \['dest'\]"):
        opened(tmp_path, partition_by=["n"])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"create": True}, "create=True needs schema="),
        ({"evolve": True}, "evolve=True needs schema="),
        ({"partition_by": ["dest", "dest"]}, "a column is named twice"),
        ({"compression": "zip"}, "compression='zip'"),
        ({"commit_every": "soon"}, "commit_every='soon'"),
    ],
)
def test_settings_are_refused_where_they_are_written(
    settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(OptionError, match=problem):
        DeltaSink("out", **settings)


def test_edited_details_lead_to_no_other_file(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    (committable, _) = two_tasks(sink)
    details = json.loads(committable.details)
    details["files"][0][0] = "../secrets.parquet"
    fields = committable.to_fields() | {"details": json.dumps(details)}
    with pytest.raises(ManifestError, match="which no release writes"):
        sink.commit(Committable.from_fields(fields))


def test_statistics_bound_every_value(tmp_path: Path) -> None:
    """Readers skip files by their statistics: a missing one is harmless, a wrong one loses rows."""
    at = [datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC), datetime(2026, 1, 1, 0, 0, 0, 1, UTC)]
    table = pa.table(
        {
            "n": [3, None],
            "x": [1.0, float("nan")],
            "day": [date(2026, 1, 2), date(1969, 1, 1)],
            "at": pa.array(at, pa.timestamp("us", "UTC")),
            "long": ["a" * 33, "b"],
            "short": ["é", "b"],
            "nested": [{"n": 1}, None],
            "only null": pa.array([None, None], pa.int64()),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    facts = json.loads(statistics(pq.read_metadata(tmp_path / "a.parquet")))
    assert facts["numRecords"] == 2
    assert facts["minValues"] == {
        "n": 3,
        "day": "1969-01-01",
        "at": "1969-12-31T23:59:59.999Z",
        "short": "b",
    }
    assert facts["maxValues"] == {
        "n": 3,
        "day": "2026-01-02",
        "at": "2026-01-01T00:00:00.001Z",
        "short": "é",
    }
    assert facts["nullCount"] == {
        "n": 1, "x": 0, "day": 0, "at": 0, "long": 0, "short": 0, "only null": 2,
    }  # fmt: skip


def test_a_table_with_a_long_history_is_checkpointed(tmp_path: Path) -> None:
    """delta-rs writes checkpoints of the log at the table's own interval."""
    has(checkpointInterval="10")(tmp_path)
    sink = opened(tmp_path, create=False)
    for epoch in range(1, 25):
        sink.commit_together(
            prepared(sink, place(epoch, 0, f"c{epoch:02d}"), rows(epoch, epoch + 1))
        )
    assert len([*(tmp_path / "_delta_log").glob("*.checkpoint.parquet")]) >= 2
    fresh = DeltaSink(tmp_path, commit_every=0).open(OWNER, RunFacts())
    assert fresh._publisher.newest_epoch() == 24
    assert len(visible(tmp_path)) == 24


@pytest.mark.parametrize("key", [[], ["n"]])
def test_old_logs_are_looked_for_with_a_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: list[str]
) -> None:
    """Looking for them lists the whole log; commits older than the table's retention go."""
    settings = {"checkpointInterval": "5", "logRetentionDuration": "interval 0 seconds"}
    has(**settings)(tmp_path)
    sink, remaining = opened(tmp_path, create=False, key=key), list[int]()
    for epoch in range(1, 8):
        sink.commit_together(
            prepared(sink, place(epoch, 0, f"c{epoch:02d}"), rows(epoch, epoch + 1))
        )
        remaining.append(len([*(tmp_path / "_delta_log").glob("*.json")]))
    version = DeltaTable(tmp_path).version()
    dropped = [at for at, (before, now) in enumerate(pairwise(remaining)) if now <= before]
    assert len(dropped) == 1, remaining
    assert (version - 7 + 2 + dropped[0]) % 5 == 0
    assert len(DeltaTable(tmp_path).to_pyarrow_table()) == 7
