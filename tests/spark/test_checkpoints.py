"""Checkpoints that are damaged, old, another's or full: the pipeline says so and writes nothing."""

import errno
import json
import os
import resource
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

import tallystick as ts
from tallystick.checkpoint import protocol as c
from tallystick.storage import FileStorage
from tests.spark.flow import Facts, Flow
from tests.spark.topics import read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]


def newest(folder: Path) -> Path:
    """The last file of a log folder, by name."""
    names = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return max(names, key=lambda path: (len(path.name), path.name))


def output_count(flow: Flow) -> int:
    """How many records the output has."""
    return len(read_committed(flow.confluent, flow.topic_out))


def test_a_damaged_checkpoint_is_refused_and_goes_on_exactly_once_it_is_whole_again(
    flow: Flow,
) -> None:
    flow.feed(100)
    flow.run()
    flow.feed(50)
    manifest = newest(flow.checkpoint / "tallystick")
    whole = manifest.read_bytes()

    for damaged in (whole[:-20], whole.replace(b'"record_count": ', b'"record_count": 1'), b""):
        manifest.write_bytes(damaged)
        with pytest.raises(ts.ManifestError, match=f"{manifest.name}.* torn or was edited"):
            flow.run()
    manifest.unlink()
    with pytest.raises(StreamingQueryException, match=r"ManifestError.*is missing from checkpoint"):
        flow.run()
    manifest.write_bytes(whole)
    with pytest.raises(ts.DataLossError, match=f"belongs to pipeline '{flow.name}'"):
        flow.run(flow.pipeline(name="another"))
    assert output_count(flow) == 100

    flow.run()
    flow.assert_exact()


def lose(path: Path, how: str) -> None:
    """What a power cut makes of a file that was not synced."""
    if how == "gone":
        path.unlink(missing_ok=True)
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    elif how == "empty":
        path.write_bytes(b"")


def test_a_query_goes_on_whatever_a_power_cut_takes_of_sparks_log(
    flow: Flow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is not synced at the decision, in every combination; and that the rest is."""
    synced: list[str] = []
    sync = FileStorage.sync

    def synced_too(storage: FileStorage, path: str) -> None:
        sync(storage, path)
        assert (flow.checkpoint / path).stat().st_size > 0
        synced.append(path)

    def note(event: c.Event) -> None:
        if isinstance(event, c.TransactionCommitted):
            synced.append("decided")

    monkeypatch.setattr(FileStorage, "sync", synced_too)
    for _ in range(3):
        flow.feed(30)
        flow.run(listener=note)
    runs = " ".join(synced).split(" decided")
    assert runs[2:4] == [
        " metadata offsets/0 offsets/1",
        " metadata offsets/1 offsets/2",
    ], "before the decision; the first run opens its lineage with a decision of its own"

    monkeypatch.undo()
    for number, (before, last) in enumerate(product(("kept", "gone", "empty"), repeat=2)):
        after_the_cut = tmp_path / f"cut {number}"
        shutil.copytree(flow.checkpoint, after_the_cut)
        lose(after_the_cut / "commits/1", before)
        lose(after_the_cut / "commits/2", last)
        (after_the_cut / "offsets/3").write_bytes(b"")  # planned, and nothing of it is decided
        flow.run(checkpoint=after_the_cut)  # there is nothing new: none gets ahead of the others
        assert newest(after_the_cut / "commits").name == "2"
        assert output_count(flow) == 90

    flow.feed(30)
    flow.run(checkpoint=after_the_cut)
    flow.assert_exact()


def test_entries_of_sparks_log_that_are_gone_or_torn_are_written_from_the_manifests(
    flow: Flow,
) -> None:
    for _ in range(2):
        flow.feed(50)
        flow.run()
    entry = newest(flow.checkpoint / "offsets")
    whole = entry.read_bytes()
    for remains in (None, whole[: len(whole) // 2], bytes(len(whole))):
        lose(flow.checkpoint / "commits" / entry.name, "gone")
        lose(entry, "gone")
        if remains is not None:
            entry.write_bytes(remains)
        flow.feed(10)
        flow.run()
        flow.assert_exact()
        entry = newest(flow.checkpoint / "offsets")
        whole = entry.read_bytes()


@pytest.mark.parametrize("step", [10, -10], ids=["longer", "shorter"])
def test_an_entry_of_sparks_log_that_was_replaced_is_put_right_before_anything_is_lost(
    flow: Flow, step: int
) -> None:
    """By the late rename of another driver, or by a copy of another time."""
    flow.partitions = 1

    def replace_newest(_: Any = None) -> None:
        entry = newest(flow.checkpoint / "offsets")
        *head, line = entry.read_text().splitlines()
        planned = json.loads(line)
        planned["topics"] = {
            topic: [offset + step for offset in offsets]
            for topic, offsets in planned["topics"].items()
        }
        lose(entry, "gone")
        entry.write_text("\n".join([*head, json.dumps(planned)]))

    for _ in range(2):
        flow.feed(60)
        flow.run()
    flow.feed(60)
    replace_newest()
    with pytest.raises(StreamingQueryException, match=r"SparkLogError.*start the query again"):
        flow.run()
    flow.run()
    flow.assert_exact()

    # While the query runs: the next epoch would begin where the entry ends now.
    facts = Facts("TransactionCommitted", replace_newest)
    flow.feed(120)
    with pytest.raises(StreamingQueryException, match=r"SparkLogError.*start the query again"):
        flow.run(flow.pipeline(max_offsets_per_trigger=60), listener=facts)
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

    with pytest.raises(StreamingQueryException, match=r"DataLossError.*was set back"):
        flow.run()
    assert output_count(flow) == 150

    shutil.rmtree(flow.checkpoint)
    newer.rename(flow.checkpoint)
    flow.feed(50)
    flow.run()
    flow.assert_exact()


def test_a_new_checkpoint_under_an_old_name_takes_over_only_when_a_person_says_so(
    flow: Flow, tmp_path: Path
) -> None:
    flow.feed(50)
    flow.run()
    new = tmp_path / "new"
    latest = flow.pipeline(starting_offsets="latest")

    with pytest.raises(StreamingQueryException, match="DataLossError") as refused:
        flow.run(latest, checkpoint=new)
    word = str(refused.value).split("accept='")[1].split("'")[0]
    flow.feed(50)
    flow.run(latest, checkpoint=new, accept=[word])
    flow.feed(50)
    with pytest.raises(StreamingQueryException, match="new-lineage-after-"):
        flow.run()  # the old checkpoint has lost the name

    flow.run(latest, checkpoint=new)  # and the new one needs no word any more
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

        with pytest.raises(StreamingQueryException, match=r"StorageError.*Make room") as failed:
            flow.run(listener=full)

    reason = errno.EFBIG if limit == "kernel" else errno.ENOSPC
    assert os.strerror(reason) in str(failed.value)
    assert full.facts.names[-1] == "TransactionAborted"
    assert output_count(flow) == 50
    manifests = list((flow.checkpoint / "tallystick").glob("*.json"))
    assert len(manifests) == 1, "no half-written manifest"
    flow.run()
    flow.assert_exact()
