"""Rows go into files that nobody sees before the commit, and everybody once after it."""

import dataclasses
import datetime
import decimal
import json
import os
import pickle
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from tallystick.api.file_sink import FileSink
from tallystick.epoch.two_phase import Committable, Outcome, Owner
from tallystick.errors import (
    DataLossError,
    ManifestError,
    OptionError,
    RecordError,
    StorageError,
)
from tallystick.files import drafts as file_drafts
from tallystick.files import writing
from tallystick.files.drafts import name_of, parse_draft, parse_name
from tallystick.files.folder import KEY_BYTES_MAX, LOCAL_BYTES_MAX, Folder
from tallystick.host.stopwatch import WRITTEN_FILE_BYTES, WRITTEN_FILES, stopwatch
from tallystick.run import participants
from tallystick.run.participants import OpenSinks
from tests.files.file_sinks import (
    OWNER,
    files_below,
    final,
    opened,
    place,
    prepared,
    rows,
    visible,
)


def drafts_of(path):
    return sorted(path.rglob("*.draft"))


def test_rows_are_hidden_until_the_commit_and_there_once_after_it(tmp_path):
    sink = opened(tmp_path)
    first = prepared(sink, place(task=0), rows(0, 5), rows(5, 9))
    second = prepared(sink, place(task=1, nonce="cd34"), rows(9, 12))
    assert visible(tmp_path) == []
    assert not list(tmp_path.glob("**/*.parquet")), "DuckDB looks into hidden folders"

    (committable,) = first
    assert committable.record_count == 9
    assert Committable.from_fields(committable.to_fields()) == committable
    assert sink.commit(committable) is Outcome.COMMITTED
    assert visible(tmp_path) == list(range(9))

    again = pickle.loads(pickle.dumps(opened(tmp_path)._plan))  # noqa: S301  as Spark does
    assert file_drafts.Commits(again.folder).commit(second[0]) is Outcome.COMMITTED
    assert visible(tmp_path) == list(range(12))
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == [
        final(place(task=0)),
        final(place(task=1, nonce="cd34")),
    ]
    assert list(sink.lingering(OWNER)) == []


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once", "none"])
def test_a_task_counts_the_files_that_it_wrote_and_their_bytes(tmp_path, guarantee):
    sink = opened(tmp_path, guarantee=guarantee, partition_by=["dest"])
    with stopwatch() as watch:
        for committable in prepared(sink, place(), rows(0, 9)):
            sink.commit(committable)

    sizes = [path.stat().st_size for path in tmp_path.rglob("*.parquet")]
    assert watch.counts == {WRITTEN_FILES: len(sizes), WRITTEN_FILE_BYTES: sum(sizes)}
    assert len(sizes) == 3


def test_committing_twice_changes_nothing(tmp_path):
    sink = opened(tmp_path)
    (committable,) = prepared(sink, place(), rows(0, 5))
    sink.commit(committable)
    before = files_below(tmp_path)

    assert sink.commit(committable) is Outcome.COMMITTED
    sink.abort(committable)
    sink.abort(committable)
    assert sink.commit(committable) is Outcome.COMMITTED
    assert visible(tmp_path) == list(range(5))
    assert files_below(tmp_path) == before


def test_aborting_leaves_nothing_and_is_lost_for_good(tmp_path):
    sink = opened(tmp_path)
    (committable,) = prepared(sink, place(), rows(0, 5))
    sink.abort(committable)
    sink.abort(committable)

    assert files_below(tmp_path) == []
    assert sink.commit(committable) is Outcome.LOST
    assert sink.commit(committable) is Outcome.LOST
    assert list(sink.lingering(OWNER)) == []


def test_a_commit_that_has_begun_is_not_aborted(tmp_path, monkeypatch):
    """The marker is there and no file is visible yet: a killed driver, and a tool that aborts."""
    sink = opened(tmp_path)
    (committable,) = prepared(sink, place(), rows(0, 5))
    with monkeypatch.context() as killed:
        killed.setattr(Folder, "reveal", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sink.commit(committable)

    sink.abort(committable)
    (lingering,) = sink.lingering(OWNER)
    sink.abort(lingering)
    assert visible(tmp_path) == []
    assert sink.commit(committable) is Outcome.COMMITTED
    assert visible(tmp_path) == list(range(5))


def test_what_a_reader_took_away_is_not_lost(tmp_path):
    """Readers that move files on, and VACUUM: the marker says that they were visible."""
    sink = opened(tmp_path, partition_by=["dest"])
    (committable,) = prepared(sink, place(), rows(0, 6))
    sink.commit(committable)
    for file in tmp_path.rglob("*.parquet"):
        file.unlink()

    assert opened(tmp_path).commit(committable) is Outcome.COMMITTED
    assert visible(tmp_path) == []


def test_drafts_of_which_some_are_gone_stop_the_job_and_are_named(tmp_path):
    sink = opened(tmp_path, partition_by=["dest"])
    (committable,) = prepared(sink, place(), rows(0, 6))
    gone = drafts_of(tmp_path)[0]
    content = gone.read_bytes()
    gone.unlink()

    for _ in range(2):
        with pytest.raises(DataLossError, match=r"3 files of task 0, 1 are gone.*dest=") as raised:
            sink.commit(committable)
        assert gone.name.removesuffix(".draft") in str(raised.value)
        assert visible(tmp_path) == []
    gone.write_bytes(content)
    assert sink.commit(committable) is Outcome.COMMITTED
    assert visible(tmp_path) == list(range(6))


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_draft_that_was_changed_stops_the_job(tmp_path, has_begun):
    sink = opened(tmp_path)
    (committable,) = prepared(sink, place(), rows(0, 6))
    (draft,) = drafts_of(tmp_path)
    content = draft.read_bytes()
    if has_begun:
        sink.commit(committable)
        draft.parent.mkdir(parents=True)
    draft.write_bytes(content[:-1])

    with pytest.raises(DataLossError, match=f"{len(content) - 1} bytes.*wrote {len(content)}"):
        sink.commit(committable)


def test_markers_are_kept_for_some_epochs_and_what_is_older_is_no_guess(tmp_path):
    sink = opened(tmp_path)
    committables = []
    for epoch in range(1, 33):
        (committable,) = prepared(sink, place(epoch, nonce=f"{epoch:04x}"), rows(epoch, epoch + 1))
        assert sink.commit(committable) is Outcome.COMMITTED
        committables.append(committable)
    markers = [path for path in files_below(tmp_path) if "/committed/" in path]
    assert 10 <= len(markers) <= 22
    assert all(sink.commit(committable) is Outcome.COMMITTED for committable in committables[3:])
    assert visible(tmp_path) == list(range(1, 33))

    for file in tmp_path.glob("*.parquet"):
        file.unlink()
    assert all(sink.commit(committable) is Outcome.COMMITTED for committable in committables[-10:])
    with pytest.raises(DataLossError, match=r"ever visible cannot be known.*from epoch 21 on"):
        sink.commit(committables[0])


def test_what_was_forgotten_once_stays_so_when_epochs_repeat(tmp_path):
    """A savepoint sets them back: the markers of the epochs in between are gone all the same."""
    sink = opened(tmp_path)
    first, late, again = (
        prepared(sink, place(epoch, nonce=nonce), rows(0, 1))[0]
        for epoch, nonce in ((15, "a"), (40, "b"), (12, "c"))
    )
    for committable in (first, late, again):
        assert opened(tmp_path).commit(committable) is Outcome.COMMITTED
    for file in tmp_path.glob("*.parquet"):
        file.unlink()

    with pytest.raises(DataLossError, match="ever visible cannot be known"):
        sink.commit(first)


def test_a_run_of_one_epoch_prunes_too(tmp_path):
    for epoch in (1, 30, 60):
        sink = opened(tmp_path)
        sink.commit(prepared(sink, place(epoch), rows(0, 1))[0])

    markers = [path for path in files_below(tmp_path) if "/committed/" in path]
    assert [Path(path).name for path in markers] == [
        name_of(place(60)),
        "kept-from",
    ]


@pytest.mark.parametrize("content", [b"", b"1", b"10", b"x\n"])
def test_a_note_that_was_cut_proves_nothing(tmp_path, content):
    """A crash on a file system without atomic writes; what it says is known again later."""
    sink = opened(tmp_path)
    for epoch in (1, 20):
        (committable,) = prepared(opened(tmp_path), place(epoch), rows(epoch, epoch + 1))
        opened(tmp_path).commit(committable)
    (note,) = tmp_path.rglob("kept-from")
    assert note.read_bytes() == b"10\n"
    note.write_bytes(content)
    lost, due = (prepared(sink, place(epoch, nonce=f"b{epoch}"), rows(0, 1))[0] for epoch in (2, 3))
    sink.abort(lost)

    with pytest.raises(DataLossError, match="noted from an epoch that cannot be read on only"):
        sink.commit(lost)
    assert opened(tmp_path).commit(due) is Outcome.COMMITTED
    assert note.read_bytes() == b"20\n"
    with pytest.raises(DataLossError, match="noted from epoch 20 on only"):
        sink.commit(lost)


def test_two_sinks_with_one_path_have_files_of_their_own(tmp_path):
    """All sinks of a task share its nonce."""
    owners = [Owner(OWNER.pipeline, uid, OWNER.lineage) for uid in ("files-1", "files-2")]
    for number, owner in enumerate(owners):
        sink = opened(tmp_path, owner=owner)
        (committable,) = prepared(sink, place(owner=owner), rows(number, number + 1))
        assert sink.commit(committable) is Outcome.COMMITTED

    assert visible(tmp_path) == [0, 1]
    assert len({name_of(place(owner=owner)) for owner in owners}) == 2
    for name in ("00000012-00003-ab12-0123456789ab", "00000012-00003-ab12"):
        assert parse_name(name) == (12, 3)
        assert parse_draft(f"dest=ORD/part-{name}.7.parquet.draft", 5) == ("dest=ORD", 7, 5)


def test_leftovers_of_tasks_and_runs_that_are_no_more_are_found_and_aborted(tmp_path):
    before = opened(tmp_path)
    committables = [
        prepared(before, place(3, task, nonce=f"aa{task}"), rows(task, task + 1))[0]
        for task in range(4)
    ]
    killed = before.plan().begin(place(3, 7, nonce="dead"))
    killed.write(rows(0, 100))
    killed._parts[""].flush()
    other = Owner("other", "files-0", "f00d")
    prepared(opened(tmp_path, owner=other), place(3, 9, nonce="bb", owner=other), rows(7, 8))

    after = opened(tmp_path)
    lingering = list(after.lingering(OWNER))
    assert [(committable.checkpoint_id, committable.task) for committable in lingering] == [
        (3, task) for task in (0, 1, 2, 3, 7)
    ]
    assert {committable.name for committable in committables} < {
        committable.name for committable in lingering
    }
    assert all("_tallystick" in after.describe(committable) for committable in lingering)
    for committable in lingering:
        after.abort(committable)
    assert list(after.lingering(OWNER)) == []
    assert [committable.task for committable in after.lingering(other)] == [9]
    assert visible(tmp_path) == []


def test_a_person_may_commit_what_a_listing_found_if_it_is_whole(tmp_path):
    sink = opened(tmp_path, partition_by=["dest"])
    prepared(sink, place(), rows(0, 6))
    (committable,) = sink.lingering(OWNER)

    assert sink.commit(committable) is Outcome.COMMITTED
    assert sink.commit(committable) is Outcome.COMMITTED
    assert visible(tmp_path) == list(range(6))

    killed = sink.plan().begin(place(2))
    killed.write(rows(0, 100))
    next(iter(killed._parts.values())).flush()
    (committable,) = sink.lingering(OWNER)
    with pytest.raises(DataLossError, match="is not whole"):
        sink.commit(committable)


def test_two_attempts_of_a_task_at_once_share_nothing(tmp_path):
    plan = opened(tmp_path).plan()
    attempts = [plan.begin(place(attempt=number, nonce=f"aa{number}")) for number in range(3)]
    for number in range(10):
        for attempt in attempts:
            attempt.write(rows(number, number + 1))
    winner = attempts[1].prepare()[0]
    attempts[0].abort()
    late = attempts[2].prepare()[0]

    sink = opened(tmp_path)
    assert sink.commit(winner) is Outcome.COMMITTED
    sink.abort(late)
    assert visible(tmp_path) == list(range(10))


def test_a_sink_that_moved_settles_what_lies_at_the_old_place(tmp_path):
    (first, second) = (
        prepared(opened(tmp_path / "old"), place(nonce=nonce), rows(0, 3))[0] for nonce in "ab"
    )
    moved = opened(tmp_path / "new", partition_by=["dest"], guarantee="none")

    assert moved.commit(first) is Outcome.COMMITTED
    moved.abort(second)
    assert visible(tmp_path / "old") == [0, 1, 2]
    assert not drafts_of(tmp_path)


@pytest.mark.parametrize("guarantee", ["at_least_once", "none"])
def test_below_exactly_once_files_are_visible_when_their_task_is_done(tmp_path, guarantee):
    sink = opened(tmp_path, guarantee=guarantee, partition_by=["dest"])
    transaction = sink.plan().begin(place())
    transaction.write(rows(0, 6))
    assert visible(tmp_path) == []

    assert list(transaction.prepare()) == []
    assert visible(tmp_path) == list(range(6))
    assert list(sink.lingering(OWNER)) == []


def test_an_attempt_without_rows_leaves_nothing(tmp_path):
    sink = opened(tmp_path)

    assert prepared(sink, place()) == []
    assert files_below(tmp_path) == []


def test_a_disk_that_the_driver_does_not_see_is_refused_in_the_task(tmp_path):
    plan = opened(tmp_path / "drivers").plan()
    elsewhere = dataclasses.replace(plan, folder=Folder(str(tmp_path / "executors")))

    with pytest.raises(OptionError, match="expected one disk that the driver and all executors"):
        elsewhere.begin(place())


# Partitions and schemas
def test_rows_keep_their_order_in_each_partition(tmp_path):
    sink = opened(tmp_path, partition_by=["dest"])
    sink.commit(prepared(sink, place(), rows(0, 5000), rows(5000, 9000))[0])

    files = list(tmp_path.rglob("*.parquet"))
    assert len(files) == 3
    for file in files:
        numbers = pq.ParquetFile(file).read()["n"].to_pylist()
        assert numbers == sorted(numbers)


@pytest.mark.spark
def test_partitions_are_named_as_spark_names_them(tmp_path, shared_spark):
    """Spark writes the same rows: same folders; and Spark reads ours: same rows."""
    texts = ["a b", "a/b", "a=b", "50%", "ü", "#[x]^{", "", None, "a:b?*'\"\\", "\t.", ".."]
    data = {
        "text": pa.array(texts).dictionary_encode(),
        "day": pa.array([datetime.date(2024, 2, 29), None] * 5 + [datetime.date(1, 1, 1)]),
        "flag": [True, False, None] * 3 + [True, False],
        "number": pa.array([-1, 2**40, None, 0] * 2 + [5, 6, 7], pa.int64()),
        "n": range(11),
    }
    table = pa.table(data)
    by = ["text", "day", "flag", "number"]
    sink = opened(tmp_path / "ours", partition_by=by)
    for committable in prepared(sink, place(), *table.to_batches(max_chunksize=4)):
        sink.commit(committable)
    shared_spark.createDataFrame(
        list(zip(*(column.to_pylist() for column in table.columns), strict=True)),
        "text string, day date, flag boolean, number bigint, n bigint",
    ).write.partitionBy(*by).parquet(str(tmp_path / "theirs"))

    def folders(path):
        folders_of_parts = {
            str(file.parent.relative_to(path)) for file in path.rglob("part-*.parquet")
        }
        return {folder for folder in folders_of_parts if not folder.startswith("_")}

    assert folders(tmp_path / "ours") == folders(tmp_path / "theirs")
    reader = shared_spark.read
    ours, theirs = (
        sorted(reader.parquet(str(tmp_path / who)).collect(), key=lambda row: row.n)
        for who in ("ours", "theirs")
    )
    assert ours == theirs


@pytest.mark.spark
def test_spark_sees_nothing_of_what_is_pending(tmp_path, shared_spark):
    sink = opened(tmp_path)
    (decided,) = prepared(sink, place(1), rows(0, 5))
    (pending,) = prepared(sink, place(2), rows(5, 9))
    sink.commit(decided)
    killed = sink.plan().begin(place(2, 1))
    killed.write(rows(0, 100))
    killed._parts[""].flush()

    def count():
        return shared_spark.read.parquet(str(tmp_path)).count()

    assert count() == 5
    assert ds.dataset(str(tmp_path)).count_rows() == 5
    sink.commit(pending)
    assert count() == 9


def test_a_type_that_has_no_one_text_is_refused_as_a_partition(tmp_path):
    for value in (1.5, decimal.Decimal("1.5"), datetime.datetime(2024, 1, 1)):  # noqa: DTZ001
        batch = pa.record_batch({"n": [1], "key": [value]})
        with pytest.raises(RecordError, match=r"'key' is .*Partition by a column made of it"):
            prepared(opened(tmp_path, partition_by=["key"]), place(), batch)
    with pytest.raises(RecordError, match="names column 'none', and the rows have n, dest"):
        prepared(opened(tmp_path, partition_by=["none"]), place(), rows(0, 1))
    long = pa.record_batch({"n": [1], "key": ["x" * 252]})
    with pytest.raises(RecordError, match="too long for a folder's name: 256 bytes"):
        prepared(opened(tmp_path, partition_by=["key"]), place(), long)


def test_rows_of_which_no_column_is_left_are_refused(tmp_path):
    """A file without columns has no rows: they were gone, without a word."""
    sink = opened(tmp_path, partition_by=["dest"])
    transaction = sink.plan().begin(place())
    with pytest.raises(OptionError, match="no column is left"):
        transaction.write(rows(0, 3).select(["dest"]))
    transaction.abort()


def test_a_path_that_is_too_long_is_an_error_of_the_rows(tmp_path):
    """Each folder's name is within bounds."""
    names = [f"key{number}" for number in range(20)]
    batch = pa.record_batch({"n": [1], **{name: ["x" * 240] for name in names}})

    with pytest.raises(RecordError, match=r"bytes longer than its file system allows.*key0=xxx"):
        prepared(opened(tmp_path, partition_by=names), place(), batch)
    assert visible(tmp_path) == []
    short = batch.select(["n", *names[:14]])
    (committable,) = prepared(opened(tmp_path, partition_by=names[:14]), place(2), short)
    assert opened(tmp_path).commit(committable) is Outcome.COMMITTED
    assert Folder("/a").room_for("b") == LOCAL_BYTES_MAX - len("/a/b")
    assert Folder("s3://bucket/a?region=eu").room_for("é") == KEY_BYTES_MAX - len("a/__")


def test_too_many_partitions_are_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "OPEN_PARTITIONS_MAX", 10)
    sink = opened(tmp_path, partition_by=["n"])
    prepared(sink, place(), rows(0, 10), rows(0, 10))

    with pytest.raises(RecordError, match=r"more than 10 partitions of n .*coarser"):
        prepared(sink, place(2), rows(0, 11))


def test_batches_that_differ_in_nullability_share_a_file(tmp_path):
    sink = opened(tmp_path)
    batches = [
        pa.record_batch(
            [pa.array([1], pa.int64()), pa.array([[{"x": 1}]], pa.list_(item)), map_of],
            schema=pa.schema(
                [
                    pa.field("n", pa.int64(), nullable=is_nullable),
                    ("items", pa.list_(item)),
                    ("map", map_of.type),
                ],
                metadata={"from": str(is_nullable)},
            ),
        )
        for is_nullable in (False, True)
        for item in [pa.field("item", pa.struct([pa.field("x", pa.int32(), is_nullable)]))]
        for map_of in [
            pa.array([[("k", 1)]], pa.map_(pa.string(), pa.field("v", pa.int8(), is_nullable)))
        ]
    ]
    for committable in prepared(sink, place(), *batches):
        sink.commit(committable)

    table = ds.dataset(str(tmp_path)).to_table()
    assert table.to_pylist() == [{"n": 1, "items": [{"x": 1}], "map": [("k", 1)]}] * 2


def test_batches_that_differ_in_more_are_refused_with_both_schemas(tmp_path):
    sink = opened(tmp_path)
    with pytest.raises(RecordError, match=r"expected n int64, dest string; found n string"):
        prepared(sink, place(), rows(0, 1), pa.record_batch({"n": ["1"]}))
    stated = opened(tmp_path, schema=pa.schema([("n", pa.int32())]))
    with pytest.raises(RecordError, match=r"expected n int32; found n int64, dest string"):
        prepared(stated, place(), rows(0, 1))


# Sizes
def test_row_groups_are_filled_from_small_batches_and_memory_is_bounded(tmp_path, monkeypatch):
    sink = opened(tmp_path, row_group_rows=1000, compression="none")
    batches = [rows(start, start + 10) for start in range(0, 5000, 10)]
    sink.commit(prepared(sink, place(), *batches)[0])
    (file,) = tmp_path.glob("*.parquet")
    groups = pq.ParquetFile(file).metadata
    assert [groups.row_group(place).num_rows for place in range(groups.num_row_groups)] == [
        1000
    ] * 5

    monkeypatch.setattr(writing, "BUFFER_BYTES_MAX", 1 << 12)
    transaction = opened(tmp_path, partition_by=["dest"]).plan().begin(place(2))
    for batch in batches:
        transaction.write(batch)
        byte_count = sum(part.waiting.byte_count for part in transaction._parts.values())
        assert byte_count == transaction._buffered <= 1 << 12
    sink.commit(transaction.prepare()[0])
    assert visible(tmp_path) == sorted([*range(5000)] * 2)


def test_a_long_file_is_followed_by_another(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "FILE_BYTES_MAX", 1 << 10)
    sink = opened(tmp_path, row_group_rows=100, partition_by=["dest"])
    (committable,) = prepared(sink, place(), *(rows(n, n + 100) for n in range(0, 3000, 100)))
    sink.commit(committable)

    assert len(list(tmp_path.rglob("part-*.1.parquet"))) == 3
    assert visible(tmp_path) == list(range(3000))


FULL = textwrap.dedent(
    """
    import resource, sys
    import pyarrow as pa
    from tallystick.errors import StorageError
    from tests.files.file_sinks import opened, place, rows, prepared

    sink = opened(sys.argv[1], guarantee=sys.argv[2], compression="none", row_group_rows=1000)
    prepared(sink, place(1), rows(0, 10))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    transaction = sink.plan().begin(place(2, task=3))
    try:
        for start in range(0, 100_000, 1000):
            transaction.write(rows(start, start + 1000))
        transaction.prepare()
    except StorageError as error:
        print(error)
        transaction.abort()
    """
)


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once", "none"])
def test_a_full_disk_leaves_nothing_visible(tmp_path, guarantee):
    process = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), guarantee],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    if guarantee == "none":
        assert "100000 rows of epoch 2, task 3 are lost" in process.stderr
        assert not process.stdout
    else:
        assert f"writing {final(place(2, task=3))} failed" in process.stdout
        assert "File too large" in process.stdout
    assert not [path for path in files_below(tmp_path) if "00000002" in path]
    assert visible(tmp_path) == ([] if guarantee == "exactly_once" else list(range(10)))


def test_what_parquet_cannot_hold_is_an_error_of_the_rows(tmp_path):
    strange = pa.record_batch({"n": pa.array([None], pa.month_day_nano_interval())})
    transaction = opened(tmp_path).plan().begin(place())
    transaction.write(strange)

    with pytest.raises(RecordError, match="Parquet has no place for these columns"):
        transaction.prepare()
    transaction.abort()
    assert files_below(tmp_path) == []


# Settings
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guarantee": "twice"}, "expected .exactly_once"),
        ({"compression": "zip"}, "expected .none., .snappy"),
        ({"row_group_rows": 0}, "at least 1"),
        ({"partition_by": "dest"}, r"expected a list, \[text, …\]: \['dest'\]"),
        ({"partition_by": ["a", "a"]}, "named twice"),
        ({"partition_by": ["a"], "schema": pa.schema([("b", pa.int8())])}, "not in schema="),
        ({"partition_by": ["a"], "schema": pa.schema([("a", pa.float32())])}, "is float"),
        ({"partition_by": ["a"], "schema": pa.schema([("a", pa.int8())])}, "no column is left"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(OptionError, match=message):
        FileSink("/data", **settings)


def test_a_path_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OptionError, match=r"file/out.*must be writable"):
        opened(tmp_path / "file" / "out")
    with pytest.raises(OptionError, match=r"path of a file sink ftp://host/out: the scheme"):
        opened("ftp://key:hunter2@host/out")


def test_secrets_are_not_shown_nor_handed_over():
    sink = FileSink("s3://key:hunter2@bucket/out?region=eu&scheme=hunter2")
    assert repr(sink) == "FileSink('s3://bucket/out', guarantee='exactly_once')"


def test_a_relative_path_is_the_drivers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = opened("out").plan()
    monkeypatch.chdir("/")

    (committable,) = pickle.loads(pickle.dumps(plan)).begin(place()).prepare() or [None]  # noqa: S301
    assert committable is None
    assert plan.folder.location == str(tmp_path / "out")


@pytest.mark.parametrize(
    "edit",
    [
        {"name": "../../../../home"},
        {"name": ""},
        {"hidden": "../home"},
        {"hidden": "_tallystick/../../home"},
        {"hidden": "_tallystick/.."},
        {"files": [["../../home", 0, 4]]},
        {"files": [["", "0", 4]]},
        {"files": 7},
    ],
)
def test_a_manifest_of_somebody_else_moves_and_removes_nothing_elsewhere(tmp_path, edit):
    """It names what is committed, and so which folder is removed after that."""
    home = tmp_path / "home"
    (home / "pending").mkdir(parents=True)
    (home / "pending" / "precious").write_text("mine")
    path = tmp_path / "sink"
    path.mkdir()
    sink = opened(path)
    (committable,) = prepared(sink, place(), rows(0, 5))
    details = json.loads(committable.details) | {k: v for k, v in edit.items() if k != "name"}
    edited = dataclasses.replace(
        committable, name=edit.get("name", committable.name), details=json.dumps(details)
    )
    before = sorted(tmp_path.rglob("*"))

    for act in (sink.commit, sink.abort):
        with pytest.raises(ManifestError, match="which no release writes"):
            act(edited)
    assert sorted(tmp_path.rglob("*")) == before
    assert sink.commit(committable) is Outcome.COMMITTED


@pytest.mark.parametrize("below", [0, 1, 2, 3, 4])
def test_nothing_of_a_sink_is_written_moved_or_removed_through_a_symbolic_link(tmp_path, below):
    """A recovery removes what it finds pending: through a link, somebody else's folders."""
    sink = opened(tmp_path / "out")
    (committable,) = prepared(sink, place(), rows(0, 5))
    (draft,) = drafts_of(tmp_path / "out")
    folder = tmp_path / "out" / Path(*draft.relative_to(tmp_path / "out").parts[: below + 1])
    folder.rename(tmp_path / "theirs")
    folder.symlink_to(tmp_path / "theirs")
    before = files_below(tmp_path / "theirs")

    for act in (
        sink.abort,
        sink.commit,
        lambda _: prepared(sink, place(2), rows(5, 9)),
        lambda _: opened(tmp_path / "out"),
    )[: 3 if below == 4 else 4]:
        with pytest.raises(OptionError, match=f"{folder.name} is a symbolic link"):
            act(committable)
    assert files_below(tmp_path / "theirs") == before
    assert visible(tmp_path / "out") == []


def test_what_strays_among_the_drafts_is_removed_and_of_a_link_nothing_else(tmp_path):
    """Else each recovery would find it, fail, and the job would never start again."""
    sink = opened(tmp_path)
    (committable,) = prepared(sink, place(), rows(0, 5))
    pending = drafts_of(tmp_path)[0].parents[1]
    theirs = tmp_path / "theirs"
    (theirs / "precious").mkdir(parents=True)
    (theirs / "file").write_text("mine")
    (pending / "00000001-00000-ab").write_text("stray")
    (pending / "00000001-00001-ab").symlink_to(theirs)
    (pending / "00000001-00002-ab").symlink_to(theirs / "file")
    (pending / "00000001-00003-ab").symlink_to("nowhere")  # in nobody's way
    os.mkfifo(pending / "00000001-00004-ab")

    for lingering in sink.lingering(OWNER):
        sink.abort(lingering)

    assert [path.name for path in pending.iterdir()] == ["00000001-00003-ab"]
    assert sorted(path.name for path in theirs.iterdir()) == ["file", "precious"]
    assert (theirs / "file").read_text() == "mine"
    assert sink.commit(committable) is Outcome.LOST


def test_a_store_that_hangs_holds_up_an_epoch_for_one_deadline(tmp_path, monkeypatch):
    """Each request gives up by itself, after a while; sixteen of them must not add up."""
    sink, listed = opened(tmp_path), []
    sinks = OpenSinks({OWNER.sink: sink}, {OWNER.sink: OWNER})
    batches = [prepared(sink, place(task=task), rows(task, task + 1)) for task in range(18)]
    many = tuple(committable for (committable,) in batches)

    def hang(self, path):
        listed.append(path)
        time.sleep(0.1)
        raise StorageError("the store does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(participants, "PATIENCE_S", 0.3)
        patched.setattr(Folder, "get", hang)
        for act in (sinks.commit, sinks.abort):
            listed.clear()
            with pytest.raises(StorageError, match="does not answer"):
                act(many)
            assert 2 <= len(listed) <= 4

    assert sinks.commit(many[:16]) == ()
    sinks.abort(many[16:])
    assert visible(tmp_path) == list(range(16))
    assert sinks.lingering() == ()
