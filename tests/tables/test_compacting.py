"""Small files of due epochs become large ones, in tasks, and no row is there twice or never."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyiceberg.table.sorting import NullOrder
from pyiceberg.transforms import IdentityTransform

import tallystick as ts
from tallystick.epoch import protocol as c
from tallystick.epoch.two_phase import Committable, Owner, RunFacts
from tallystick.errors import ManifestError
from tallystick.tables import background
from tallystick.tables.compacting import SILENT_EPOCHS, Compactor, Phase
from tallystick.tables.due import Compaction, DueEpoch
from tallystick.tables.port import DataFile
from tallystick.tables.publishing import Publisher
from tallystick.tables.sink import OpenTableSink
from tests.delta.delta_sinks import (
    OWNER,
    before_the_commit,
    commits,
    opened,
    place,
    rows,
    unnamed,
    visible,
)
from tests.failover.sink_job import SinkJob, flat, read_files
from tests.iceberg.iceberg_sinks import orders_in, rows_by_file, sort_by
from tests.tables.jobs import at_once
from tests.tables.test_table_guarantees import FACTS, Delta, Files, Iceberg, Kind, killed
from tests.waiting import wait_for

SMALL = 4_000
"""A file of a task has some 1,300 bytes here: five of them are enough for one file."""


@pytest.fixture(autouse=True)
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch)


def publisher_of(job: SinkJob) -> Publisher:
    assert job._open is not None
    (publisher,) = (
        sink._publisher for sink in job._open[0]._open.values() if isinstance(sink, OpenTableSink)
    )
    assert isinstance(publisher, Publisher)
    return publisher


def compaction_count(job: SinkJob) -> int:
    return sum(len(due.compactions) for due in publisher_of(job)._due.values())


def run_until_compacted(job: SinkJob) -> None:
    while not job.logged or not compaction_count(job):
        job.run_next()
        assert job.logged < 30


def files_in(kind: Kind, table: Path) -> list[str]:
    if isinstance(kind, Files):
        return sorted(path.name for path in table.glob("*.parquet"))
    if isinstance(kind, Iceberg):
        return sorted(path.name for path in table.glob("**/data/*.parquet"))
    return sorted(path.rpartition("/")[2] for path in DeltaTable(table).file_uris())


def test_a_publish_names_large_files_and_none_of_their_sources(
    kind: Kind, run: Callable[..., SinkJob], tmp_path: Path
) -> None:
    job = run(kind.sink(tmp_path / "table", commit_every="1 hour", target_file_size=SMALL))
    job.run_until(20)
    assert compaction_count(job) >= 1
    waits = publisher_of(job).due_output()
    assert waits.files < 40, "each of 20 epochs has two"
    assert waits.rows == flat(job.expected()).total()
    job.close()

    assert kind.seen(tmp_path / "table") == flat(job.expected())
    assert len(files_in(kind, tmp_path / "table")) == waits.files
    assert kind.unnamed(tmp_path / "table") == []


def test_one_file_remains_of_little_when_the_time_has_come(
    kind: Kind, run: Callable[..., SinkJob], tmp_path: Path
) -> None:
    job = run(kind.sink(tmp_path / "table", commit_every="1 hour"))
    job.run_until(5)
    publisher = publisher_of(job)
    publisher._publish_in_time()
    assert publisher._compactor._phase is Phase.ASKED
    assert kind.seen(tmp_path / "table") == Counter()

    job.run_next()
    wait_for(lambda: publisher.due, (5,), "a publish of all but the epoch that compacted")
    wait_for(lambda: publisher._compactor._phase, Phase.WAITING, "the end of the publish")
    assert kind.seen(tmp_path / "table") == flat(job.expected(range(5)))
    assert len(files_in(kind, tmp_path / "table")) == 1 + 2 * isinstance(kind, Iceberg)
    job.run_until(7)
    job.close()
    assert kind.seen(tmp_path / "table") == flat(job.expected())
    assert kind.unnamed(tmp_path / "table") == []


@pytest.mark.parametrize("event", FACTS)
def test_wherever_a_driver_is_killed_after_compacting_rows_are_there_once(
    kind: Kind, run: Callable[..., SinkJob], tmp_path: Path, event: type
) -> None:
    table, files = tmp_path / "table", tmp_path / "files"
    sink = kind.sink(table, commit_every="1 hour", target_file_size=SMALL)
    job = run(sink, ts.FileSink(files))
    for _ in range(2):
        run_until_share(job)
        job = killed(job, event)
    job.run_until(job.logged + 5)
    job.close()

    assert kind.seen(table) == flat(job.expected()) == read_files(files)
    assert kind.unnamed(table) == []


def run_until_share(job: SinkJob) -> None:
    """Go on until the next epoch's tasks have something to compact."""
    start = job.logged
    while job._open is None or not publisher_of(job).shares():
        job.run_next()
        assert job.logged < start + 30


MOMENTS = ("before the commit", "after the commit", "sources are gone", "notes are rewritten")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_driver_that_dies_in_an_early_publish_of_a_compaction_leaves_each_row_once(
    kind: Kind,
    run: Callable[..., SinkJob],
    tmp_path: Path,
    moment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commit has the epochs before the one that compacted them."""

    class Died(BaseException):
        pass

    def die(*_: Any, **__: Any) -> None:
        raise Died

    job = run(kind.sink(tmp_path / "table", commit_every="1 hour"))
    job.run_until(4)
    publisher = publisher_of(job)
    monkeypatch.setattr(publisher, "_start_timer", lambda *_: None)
    publisher._publish_in_time()
    job.run_next()
    assert publisher._compactor._phase is Phase.PUBLISHING
    assert compaction_count(job) == 1
    if moment == MOMENTS[0]:
        monkeypatch.setattr(publisher, "_commit", die)
    elif moment == MOMENTS[1]:
        monkeypatch.setattr(publisher._folder, "remove_files", die)
    elif moment == MOMENTS[2]:
        monkeypatch.setattr(publisher, "_forget", die)
    else:
        monkeypatch.setattr(publisher, "_remove_staged", die)
    with pytest.raises(Died):
        publisher.publish(newest=3)
    has_committed = moment != MOMENTS[0]
    assert kind.seen(tmp_path / "table") == flat(job.expected(range(4 * has_committed)))

    successor = job.leave()
    successor.run_until(8)
    monkeypatch.undo()
    with pytest.raises(ts.FencedError):
        job.run_next()
    job.close()  # a zombie, which has the same epochs due
    successor.close()
    assert kind.seen(tmp_path / "table") == flat(successor.expected())
    assert kind.unnamed(tmp_path / "table") == []


def test_a_publish_while_tasks_compact_publishes_the_sources_alone(
    kind: Kind, run: Callable[..., SinkJob], tmp_path: Path
) -> None:
    """The compaction is decided after its sources are in the table: nobody needs it."""
    job = run(kind.sink(tmp_path / "table", commit_every="1 hour", target_file_size=SMALL))
    run_until_share(job)
    shown = list[Counter[str]]()

    def publish(task: int) -> None:
        if task == 0:
            publisher_of(job).publish()
            shown.append(kind.seen(tmp_path / "table"))

    job.midway = publish
    before = job.logged
    job.run_next()
    job.midway = lambda _: None
    assert shown == [flat(job.expected(range(before)))]
    is_made = compaction_count(job) == 1
    assert is_made or isinstance(kind, Files), "the fault has hit; files of folders have moved on"
    job.run_until(before + 2)
    job.close()
    assert kind.seen(tmp_path / "table") == flat(job.expected())
    assert kind.unnamed(tmp_path / "table") == []


def test_the_files_of_a_compaction_that_nobody_decided_are_removed(
    kind: Kind, run: Callable[..., SinkJob], tmp_path: Path
) -> None:
    job = run(kind.sink(tmp_path / "table", commit_every="1 hour", target_file_size=SMALL))
    run_until_share(job)
    due = {file.path for one in publisher_of(job)._due.values() for file in one.files}
    job.die_at(c.EpochRan)
    written = [*(tmp_path / "table").glob("**/part-*.parquet*")]
    assert len(written) == len(due) + 3, "two tasks' files, and a compacted one"

    successor = job.leave()
    successor.run_next()
    successor.close()
    assert kind.seen(tmp_path / "table") == flat(successor.expected())
    assert kind.unnamed(tmp_path / "table") == []


def test_sources_that_are_gone_are_not_compacted_and_no_epoch_fails(
    run: Callable[..., SinkJob], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = Delta()
    job = run(kind.sink(tmp_path / "table", commit_every="1 hour", target_file_size=SMALL))
    run_until_share(job)
    sources = publisher_of(job).shares()[0].groups[0]
    gone = tmp_path / "table" / sources[1].path
    content = gone.read_bytes()
    gone.unlink()

    job.run_next()
    assert f"files are not compacted: {sources[1].path}" in caplog.text
    assert compaction_count(job) == 0
    gone.write_bytes(content)
    job.close()
    assert kind.seen(tmp_path / "table") == flat(job.expected())
    assert kind.unnamed(tmp_path / "table") == []


def test_a_table_that_is_optimized_and_vacuumed_beside_keeps_each_row(
    run: Callable[..., SinkJob], tmp_path: Path
) -> None:
    kind = Delta()
    job = run(kind.sink(tmp_path / "table", commit_every="1 hour", target_file_size=SMALL))
    job.run_until(6)
    publisher_of(job).publish()
    for _ in range(3):
        job.run_until(job.logged + 4)
        beside = DeltaTable(tmp_path / "table")
        assert beside.optimize.compact()["numFilesRemoved"] > 1
        beside.vacuum(dry_run=False)
        publisher_of(job).publish()
    job.close()
    values = DeltaTable(tmp_path / "table").to_pyarrow_table()["value"].to_pylist()
    assert Counter(values) == flat(job.expected())
    assert sum(commits(tmp_path / "table").values()) == 4


def two_tasks(sink: OpenTableSink, epoch: int, owner: Owner = OWNER) -> list[Committable]:
    """The committables of an epoch of 12 rows, with what its tasks compact."""
    plan, committables = sink.plan(), list[Committable]()
    for task in (0, 1):
        transaction = plan.begin(place(epoch, task, f"a{epoch:04d}", owner))
        transaction.write(rows(12 * epoch + 6 * task, 12 * epoch + 6 * task + 6))
        committables += transaction.prepare()
    return committables


def asked_to_compact(sink: OpenTableSink, epoch: int) -> list[Committable]:
    """The committables of an epoch that compacts all that is due, whose publish does not begin."""
    publisher = sink._publisher
    publisher._start_timer = lambda *_: None  # type: ignore[method-assign]
    publisher._publish_in_time()
    committables = two_tasks(sink, epoch)
    assert [one for one in committables if "compactions" in json.loads(one.details)]
    return committables


@pytest.mark.parametrize("has_taken", [True, False])
def test_a_zombie_that_wakes_in_its_publish_of_a_compaction_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_taken: bool
) -> None:
    """It knows the epoch that compacted, or the sources alone."""
    zombie = opened(tmp_path, commit_every="1 hour")
    for epoch in range(4):
        zombie.commit_together(two_tasks(zombie, epoch))
    compacted = asked_to_compact(zombie, 4)
    if has_taken:
        zombie.commit_together(compacted)

    def successor_commits() -> None:
        successor = opened(tmp_path, commit_every="1 hour")
        successor.commit_together(compacted)
        successor.commit_together(two_tasks(successor, 5))
        successor.close()

    refused = before_the_commit(monkeypatch, successor_commits)
    zombie._publisher.publish(newest=3)
    assert len(refused) == 1
    zombie.commit_together(compacted)
    zombie.close()
    assert visible(tmp_path) == list(range(6 * 12))
    assert unnamed(tmp_path) == []


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("lineage", ["f00d", "restored"])
def test_a_savepoint_with_a_compaction_that_waits_loses_and_repeats_nothing(
    tmp_path: Path, lineage: str, is_early: bool
) -> None:
    """The same checkpoint, or one restored from its savepoint, before or after an early commit."""
    killed = opened(tmp_path, commit_every="1 hour")
    for epoch in range(4):
        killed.commit_together(two_tasks(killed, epoch))
    killed.commit_together(asked_to_compact(killed, 4))
    if is_early:
        killed._publisher.publish(newest=3)
        assert visible(tmp_path) == list(range(4 * 12))
    assert killed._publisher.due == ((4,) if is_early else (0, 1, 2, 3, 4))

    owner = Owner(OWNER.pipeline, OWNER.sink, lineage)
    successor = opened(tmp_path, owner, commit_every="1 hour")
    assert visible(tmp_path) == list(range(5 * 12))
    successor.commit_together(two_tasks(successor, 5, owner))
    killed.close()  # a zombie
    successor.close()
    assert visible(tmp_path) == list(range(6 * 12))
    assert unnamed(tmp_path) == []
    assert len(DeltaTable(tmp_path).file_uris()) == 1 + 2 + 2


def test_files_of_each_partition_are_compacted_apart(tmp_path: Path) -> None:
    sink = opened(tmp_path, commit_every="1 hour", partition_by=["dest"])
    for epoch in range(4):
        sink.commit_together(two_tasks(sink, epoch))
    sink.commit_together(asked_to_compact(sink, 4))
    sink._publisher.publish(newest=3)

    added = pa.table(DeltaTable(tmp_path).get_add_actions(flatten=True)).to_pydict()
    assert sorted(added["partition.dest"], key=str) == [None, "ORD", "a/b"]
    assert added["num_records"] == [16, 16, 16]
    assert sorted(DeltaTable(tmp_path).to_pyarrow_table()["n"].to_pylist()) == list(range(48))
    sink.close()


def test_rows_keep_the_order_of_epochs_and_tasks(tmp_path: Path) -> None:
    sink = opened(tmp_path, commit_every="1 hour")
    for epoch in range(4):
        sink.commit_together(two_tasks(sink, epoch))
    sink.commit_together(asked_to_compact(sink, 4))
    sink._publisher.publish(newest=3)
    (file,) = DeltaTable(tmp_path).file_uris()
    assert pq.read_table(file)["n"].to_pylist() == list(range(48))
    sink.close()


def file(name: str, size: int, value: str = "a") -> DataFile:
    return DataFile(f"part-{name}.parquet", size, 1, {"dest": value}, 0, "")


def due_of(*files: DataFile) -> DueEpoch:
    return DueEpoch("", files, (), 0, 1)


def test_large_files_are_left_as_they_are_and_each_task_has_one_share_under_load() -> None:
    compactor = Compactor(100)
    compactor.add(0, due_of(file("large", 50)))
    small = [file(f"s{number}", 40) for number in range(14)]
    for epoch, one in enumerate(small, 1):
        compactor.add(epoch, due_of(one))
    assert compactor.shares() == ()
    compactor.tasks = (3, 7)
    shares = compactor.shares()
    assert [(share.task, share.groups) for share in shares] == [
        (3, ((*small[:4],),)),
        (7, ((*small[4:8],),)),
    ]
    assert compactor.shares() == shares, "both have something to do"


def test_all_that_is_due_is_dealt_out_when_the_time_has_come() -> None:
    compactor = Compactor(100)
    compactor.tasks = (3, 7)
    files = [file(f"{value}{number}", 20, value) for number in range(2) for value in "abc"]
    for epoch, one in enumerate([*files, file("d", 20, "d")]):
        compactor.add(epoch, due_of(one))
    assert compactor.shares() == ()
    assert compactor.patience_s() > 0
    compactor.add(9, due_of(file("late", 20), file("later", 300)))
    shares = compactor.shares()
    assert [(share.task, share.groups) for share in shares] == [
        (3, ((files[0], files[3]), (files[2], files[5]))),
        (7, ((files[1], files[4]),)),
    ]
    first, second = (share.name for share in shares)
    assert compactor.hear([first, second], []) is None
    assert [share.groups for share in compactor.shares()] == [(), ()], "their processes know them"
    assert compactor.hear([first], [second]) is None
    done = Compaction((files[0].path,), 40, file(f"{first}-0", 30))
    compactor.add(10, due_of()._replace(compactions=(done,)))
    assert compactor.hear([], []) == 6


def test_a_share_that_no_task_speaks_of_goes_to_another_one() -> None:
    """The process that had it is gone, or its task has no rows any more."""
    compactor = Compactor(100)
    compactor.tasks = (0,)
    compactor.add(0, due_of(*[file(f"s{number}", 40) for number in range(4)]))
    (lost,) = compactor.shares()
    compactor.hear([lost.name], [])
    compactor.tasks = (1,)
    for _ in range(SILENT_EPOCHS):
        assert compactor.hear([], []) is None
        assert [share.name for share in compactor.shares()] == [lost.name]
    compactor.hear([], [])
    (share,) = compactor.shares()
    assert (share.task, share.groups) == (1, lost.groups)
    assert share.name != lost.name


@pytest.mark.parametrize("epochs", [200, 2_000])
def test_an_epoch_costs_the_same_however_many_are_due(epochs: int) -> None:
    """The files of an epoch are looked at once, and once more in a group."""

    class Counted(DataFile):
        looks = 0

        def __getattribute__(self, name: str) -> Any:
            Counted.looks += name == "size"
            return super().__getattribute__(name)

    compactor = Compactor(1 << 40)
    compactor.tasks = (0,)
    for epoch in range(epochs):
        compactor.add(epoch, due_of(Counted(*file(f"s{epoch}", 40))))
        assert compactor.shares() == ()
        assert compactor.hear([], []) is None
    assert Counted.looks <= 3 * epochs


@pytest.mark.parametrize("source", ["../../etc/passwd", "part-/../../x", "_delta_log/0.json"])
def test_edited_sources_lead_to_no_other_file(tmp_path: Path, source: str) -> None:
    sink = opened(tmp_path, commit_every="1 hour")
    for epoch in range(4):
        sink.commit_together(two_tasks(sink, epoch))
    others = asked_to_compact(sink, 4)
    (compacted,) = (one for one in others if "compactions" in one.details)
    others.remove(compacted)
    details = json.loads(compacted.details)
    details["compactions"][0][0][0] = source
    edited = replace(compacted, details=json.dumps(details))
    with pytest.raises(ManifestError, match="which no release writes"):
        sink.commit_together((edited, *others))


@pytest.mark.parametrize("at_once_max", [1 << 20, 2_000, 1])
def test_compacted_files_are_sorted_too(
    run: Callable[..., SinkJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once_max: int
) -> None:
    """With too little memory for a group several files become of it, and no copy of a file."""
    monkeypatch.setattr(background, "SORTED_BYTES_MAX", at_once_max)
    kind, table = Iceberg(), tmp_path / "table"
    job = run(sorted_sink(table))
    if at_once_max > 1:
        run_until_compacted(job)
        job.run_until(job.logged + 5)
    else:
        job.run_until(20)
    made = [done for due in publisher_of(job)._due.values() for done in due.compactions]
    counts = [len(done.sources) for done in made]
    assert min(counts, default=2) >= 2
    assert bool(counts) == (at_once_max > 1)
    shares = {done.file.path.rpartition("-")[0] for done in made}
    assert (len(shares) < len(made)) == (at_once_max == 2_000)
    job.close()
    assert kind.seen(table) == flat(job.expected())
    assert kind.unnamed(table) == []
    check_sorted(table)


@pytest.mark.parametrize("event", FACTS)
def test_wherever_a_driver_is_killed_with_several_files_of_a_share_rows_are_there_once(
    run: Callable[..., SinkJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: type
) -> None:
    monkeypatch.setattr(background, "SORTED_BYTES_MAX", 2_000)
    table = tmp_path / "table"
    job = run(sorted_sink(table))
    for _ in range(2):
        run_until_share(job)
        job = killed(job, event)
    run_until_compacted(job)
    made = [due.compactions for due in publisher_of(job)._due.values()]
    assert max(map(len, made)) > 1
    job.close()
    assert Iceberg().seen(table) == flat(job.expected())
    assert Iceberg().unnamed(table) == []
    check_sorted(table)


def sorted_sink(table: Path) -> ts.IcebergSink:
    """Make a table with a sort order; return a sink for it."""
    Iceberg().sink(table).open(OWNER, RunFacts()).close()
    sort_by(table, ("desc", "value", IdentityTransform(), NullOrder.NULLS_FIRST))
    return Iceberg().sink(table, commit_every="1 hour", target_file_size=8_000)


def check_sorted(table: Path) -> None:
    files = rows_by_file(table)
    assert max(map(len, files)) > 1
    for file in files:
        values = [row["value"] for row in file]
        assert values == sorted(values, reverse=True)
    assert orders_in(table) == {1}
