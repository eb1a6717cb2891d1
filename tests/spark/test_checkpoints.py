"""Checkpoints that are damaged, old, another's or full: the pipeline says so and writes nothing."""

import errno
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tallystick as ts
from tallystick.epoch import manifest as m
from tallystick.errors import StorageError
from tallystick.storage.file_storage import FileStorage
from tests.spark.flow import Facts, Flow
from tests.spark.topics import read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]


def manifests(flow: Flow) -> list[Path]:
    """Those in the checkpoint, by epoch; the first is the seed, where the lineage begins."""
    names = FileStorage(str(flow.checkpoint)).names(m.FOLDER)
    return [flow.checkpoint / name for name in m.manifests(names)]


def output_count(flow: Flow) -> int:
    """How many records the output has."""
    return len(read_committed(flow.confluent, flow.topic_out))


def test_a_damaged_checkpoint_is_refused_and_goes_on_exactly_once_it_is_whole_again(
    flow: Flow,
) -> None:
    flow.feed(100)
    flow.run()
    flow.feed(50)
    manifest = manifests(flow)[-1]
    whole = manifest.read_bytes()

    for damaged in (whole[:-20], whole.replace(b'"record_count": ', b'"record_count": 1'), b""):
        manifest.write_bytes(damaged)
        with pytest.raises(ts.ManifestError, match=f"{manifest.name}.* torn or was edited"):
            flow.run()
    manifest.unlink()
    with pytest.raises(ts.ManifestError, match="is missing from checkpoint"):
        flow.run()
    manifest.write_bytes(whole)
    with pytest.raises(ts.DataLossError, match=f"belongs to pipeline '{flow.name}'"):
        flow.run(flow.pipeline(name="another"))
    assert output_count(flow) == 100

    flow.run()
    flow.assert_exact()


def test_a_checkpoint_older_than_what_kafka_committed_is_refused(
    flow: Flow, tmp_path: Path
) -> None:
    flow.feed(50)
    flow.run()
    shutil.copytree(flow.checkpoint, tmp_path / "copy")
    for _ in range(2):
        flow.feed(50)
        flow.run()
    newer = tmp_path / "newer"
    flow.checkpoint.rename(newer)
    (tmp_path / "copy").rename(flow.checkpoint)

    with pytest.raises(ts.DataLossError, match="was set back"):
        flow.run()
    assert output_count(flow) == 150

    shutil.rmtree(flow.checkpoint)
    newer.rename(flow.checkpoint)
    flow.feed(50)
    flow.run()
    flow.assert_exact()


def test_a_first_run_that_failed_and_its_checkpoint_may_be_forgotten(flow: Flow) -> None:
    def mistake(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(["dep_dely"])

    flow.feed(50)
    with pytest.raises(ts.FunctionError, match="dep_dely"):
        flow.run(flow.pipeline(mistake))
    assert [m.epoch_of(path.name) for path in manifests(flow)] == [0], "the lineage has begun"
    shutil.rmtree(flow.checkpoint)

    flow.run()
    flow.assert_exact()


def test_a_new_checkpoint_under_an_old_name_takes_over_only_when_a_person_says_so(
    flow: Flow, tmp_path: Path
) -> None:
    flow.feed(50)
    flow.run()
    new = tmp_path / "new"
    latest = flow.pipeline(starting_offsets="latest")

    with pytest.raises(ts.DataLossError) as refused:
        flow.run(latest, checkpoint=new)
    word = str(refused.value).split("accept='")[1].split("'")[0]
    flow.run(latest, checkpoint=new, accept=[word])  # the latest of now: there is nothing to read
    assert output_count(flow) == 50
    flow.feed(50)
    with pytest.raises(ts.DataLossError, match="new-lineage-after-"):
        flow.run()  # the old checkpoint has lost the name

    for _ in range(2):
        flow.run(latest, checkpoint=new)  # and the new one needs no word any more
        flow.assert_exact()
        flow.feed(50)
    flow.run(latest, checkpoint=new)
    flow.assert_exact()


class FullDisk:
    """Refuses what the driver writes while the manifest is due, as a full disk would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None) -> None:
        self.facts = Facts()
        self._monkeypatch = monkeypatch

    def __call__(self, event: Any) -> None:
        """Called by the driver."""
        self.facts(event)
        full = type(event).__name__ == "EpochRan"
        if self._monkeypatch is None:
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0 if full else most, most))
        elif full:
            self._monkeypatch.setattr(os, "fsync", _no_space)
        else:
            self._monkeypatch.undo()


def _no_space(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("limit", ["kernel", "fsync"])
def test_a_disk_full_at_the_manifest_aborts_the_epoch_and_it_runs_once_there_is_room(
    flow: Flow, limit: str
) -> None:
    flow.feed(50)
    flow.run()
    flow.feed(50)
    with pytest.MonkeyPatch.context() as monkeypatch:
        full = FullDisk(None if limit == "kernel" else monkeypatch)

        with pytest.raises(StorageError, match="Make room") as failed:
            flow.run(listener=full)

    reason = errno.EFBIG if limit == "kernel" else errno.ENOSPC
    assert os.strerror(reason) in str(failed.value)
    assert full.facts.names[-1] == "TransactionAborted"
    assert output_count(flow) == 50
    assert len(manifests(flow)) == 2, "the seed and the first epoch's: no half-written one"
    flow.run()
    flow.assert_exact()
