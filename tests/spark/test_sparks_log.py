"""Spark's log of a query after `KafkaSink`: a power cut takes of it, or it is replaced."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

from tallystick.epoch import protocol as c
from tallystick.epoch.coordinator import Coordinator
from tallystick.storage.file_storage import FileStorage
from tests.spark.flow import Flow, finish
from tests.spark.test_foreach_batch_sink import stream
from tests.spark.topics import read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]


def run(
    flow: Flow, function: Any = None, *, checkpoint: Path | None = None, **options: str
) -> None:
    """Write all that is there by a query of the user's own."""
    finish(
        stream(flow, **options)
        .select("key", "value")
        .writeStream.queryName(flow.name)
        .option("checkpointLocation", str(checkpoint or flow.checkpoint))
        .trigger(availableNow=True)
        .foreachBatch(function or flow.sink())
        .start
    )


def newest(folder: Path) -> Path:
    """The last entry of a log."""
    return max(folder.glob("[0-9]*"), key=lambda path: int(path.name))


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
    sync, step = FileStorage.sync, Coordinator.step

    def synced_too(storage: FileStorage, path: str) -> None:
        sync(storage, path)
        assert (flow.checkpoint / path).stat().st_size > 0
        synced.append(path)

    def note(coordinator: Coordinator, event: c.Event) -> c.Action:
        if isinstance(event, c.TransactionCommitted):
            synced.append("decided")
        return step(coordinator, event)

    monkeypatch.setattr(FileStorage, "sync", synced_too)
    monkeypatch.setattr(Coordinator, "step", note)
    for _ in range(3):
        flow.feed(30)
        run(flow)
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
        run(flow, checkpoint=after_the_cut)  # there is nothing new: none gets ahead of the others
        assert newest(after_the_cut / "commits").name == "2"
        assert len(read_committed(flow.confluent, flow.topic_out)) == 90

    flow.feed(30)
    run(flow, checkpoint=after_the_cut)
    flow.assert_exact()


def test_an_entry_of_sparks_log_that_is_torn_is_written_from_the_manifests(
    flow: Flow,
) -> None:
    """One that is half there; all other ways are in `tests/checkpoint/test_spark_log.py`."""
    flow.feed(100)
    run(flow, maxOffsetsPerTrigger="50")
    entry = newest(flow.checkpoint / "offsets")
    assert int(entry.name) > 0
    whole = entry.read_bytes()
    lose(flow.checkpoint / "commits" / entry.name, "gone")
    lose(entry, "gone")
    entry.write_bytes(whole[: len(whole) // 2])
    flow.feed(10)
    run(flow)
    flow.assert_exact()


@pytest.mark.parametrize("step", [10, -10], ids=["longer", "shorter"])
def test_an_entry_of_sparks_log_that_was_replaced_is_put_right_before_anything_is_lost(
    flow: Flow, step: int
) -> None:
    """By the late rename of another driver, or by a copy of another time."""
    flow.partitions = 1

    def replace_newest() -> None:
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
        run(flow)
    flow.feed(60)
    replace_newest()
    with pytest.raises(StreamingQueryException, match=r"SparkLogError.*start the query again"):
        run(flow)
    run(flow)
    flow.assert_exact()

    # While the query runs: the next epoch would begin where the entry ends now.
    sink, replaced = flow.sink(), []

    def behind_it(rows: DataFrame, batch_id: int) -> None:
        sink(rows, batch_id)
        if not replaced:
            replace_newest()
            replaced.append(batch_id)

    flow.feed(120)
    with pytest.raises(StreamingQueryException, match=r"SparkLogError.*start the query again"):
        run(flow, behind_it, maxOffsetsPerTrigger="60")
    run(flow)
    flow.assert_exact()
