"""What `inspect` says of a checkpoint: all that is there, and nothing that is not."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tallystick.checkpoint.folder import Integrity
from tallystick.checkpoint.state_files import FOLDER
from tallystick.epoch import manifest as m
from tallystick.epoch.manifest import EPOCHS_RETAINED
from tallystick.errors import OptionError
from tallystick.ops import savepoints
from tallystick.ops.inspection import inspect
from tallystick.state.catalog import StateField
from tallystick.state.schema import text_of
from tallystick.storage.file_storage import FileStorage
from tests.checkpoint_on_disk import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path / "checkpoint")
    job.run(4)
    return job


def test_a_whole_checkpoint(job):
    report = inspect(job.storage, verify=True)

    assert (report.pipeline, report.lineage, report.epoch) == ("job", "first-lineage", 3)
    assert report.is_whole
    assert [epoch.number for epoch in report.epochs] == [0, 1, 2, 3]
    assert all(epoch.problems == () for epoch in report.epochs)
    assert report.positions == ({"in-0": 30},)
    assert report.rubbish == ()
    (step,) = report.steps
    assert (step.uid, step.changelogs, step.snapshots, step.entries) == ("counts", 4, 0, 8)
    assert step.size == sum(file.size for file in job.state.files)


def test_sizes_are_those_of_the_key_groups(job):
    """All entries are in groups 3 and 5: the first of two tasks has everything."""
    (step,) = inspect(job.storage).steps

    assert [(part.first, part.last) for part in step.parts] == [(0, 63), (64, 127)]
    assert [part.files for part in step.parts] == [4, 0]
    assert step.parts[0].size > 0
    assert step.parts[1].size == 0
    assert step.skew == 2.0


@pytest.mark.parametrize("verify", [False, True])
def test_a_missing_file_is_named_and_so_is_the_newest_whole_epoch(job, verify):
    missing = job.state.files[2].path
    (job.folder / missing).unlink()

    report = inspect(job.storage, verify=verify)

    assert not report.is_whole
    assert report.newest_whole == 1
    problems = {epoch.number: epoch.problems for epoch in report.epochs}
    assert problems[0] == problems[1] == ()
    for epoch in (2, 3):
        (problem,) = problems[epoch]
        assert missing in problem
        assert "key groups 3 to 5 is missing" in problem


def test_damage_is_found_when_every_byte_is_read(job):
    file = job.state.files[0]
    path = job.folder / file.path
    data = path.read_bytes()
    at = file.size - file.index_size - 20
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])

    assert inspect(job.storage).is_whole
    report = inspect(job.storage, verify=True)

    assert report.newest_whole is None
    assert all("damaged" in epoch.problems[0] for epoch in report.epochs)


def test_what_would_be_collected(job):
    job.run(EPOCHS_RETAINED + 1)
    orphan = f"{FOLDER}/counts/{2:012d}-0-failed.changelog"
    later = f"{FOLDER}/counts/{job.epoch + 1:012d}-0-underway.changelog"
    for path in (orphan, later):
        job.storage.put(path, b"")

    report = inspect(job.storage)

    assert orphan in report.rubbish
    assert later not in report.rubbish
    assert {path for path in report.rubbish if path.endswith(".json")} == {
        f"tallystick/{epoch:012d}-{epoch}-n{epoch}.json" for epoch in range(5)
    }
    assert [epoch.number for epoch in report.epochs] == list(range(5, 15))


def test_an_epoch_under_way_and_a_failed_attempt_are_told(job):
    job.storage.put("offsets/4", b"v1")
    job.storage.put(job.manifest_path("left"), job.manifest().encode())

    report = inspect(job.storage)

    assert (report.epoch, report.logged) == (3, 4)
    assert "2 manifests" in report.notes[0]


def test_an_epoch_is_whole_only_if_each_of_its_manifests_is(job):
    """A failed attempt's may be, where the committed one is not: which counts, Kafka knows."""
    (path,) = (name for name in job.storage.names(m.FOLDER) if m.epoch_of(name) == 2)
    failed = replace(m.decode(job.storage.get(path) or b"", path), checkpoint_id=3)
    job.storage.put(m.manifest_path(failed, "failed"), failed.encode())
    assert inspect(job.storage).is_whole
    (job.folder / job.state.files[3].path).unlink()

    report = inspect(job.storage)

    assert not report.is_whole
    assert report.newest_whole == Integrity(job.storage).newest_whole(3) == 2


def test_a_strange_file_among_the_manifests_is_passed_over(job, tmp_path):
    for name in ("README.txt", "7", "notes-of-3.json", "3-x-y.json"):
        job.storage.put(f"{m.FOLDER}/{name}", b"x")

    assert inspect(job.storage).is_whole
    assert savepoints.create(job.storage, FileStorage(str(tmp_path / "saved"))).manifest.state


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(OptionError, match="no committed epoch"):
        inspect(FileStorage(str(tmp_path)))


def test_states_are_shown_with_the_columns_of_vectorised_functions(job):
    columns = text_of(pa.schema([("n", pa.int64()), ("tags", pa.list_(pa.string()))]))
    fields = (
        StateField("state", 1, "columns", "", columns),
        StateField("seen", 2, "list", "", "{}"),
    )
    job.state = replace(job.state, fields=fields, next_id=3)
    job.run()

    (step,) = inspect(job.storage).steps

    assert step.states == ("n bigint, tags array<string>", "seen (list)")
