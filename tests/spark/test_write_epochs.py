"""What Spark's helper processes read of a checkpoint, and what travels between them."""

import json
from pathlib import Path

import pytest

from tallystick.checkpoint.decision_log import Hold, claim, newest_entry
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch.manifest import KAFKA, DeciderName
from tallystick.epoch.two_phase import Committable, Lost
from tallystick.errors import DataLossError, OptionError, TallystickError
from tallystick.spark.streaming.stream_writer import PreparedMessage, read_messages
from tallystick.spark.streaming.write_epochs import (
    PlannedEpoch,
    WriteEpochs,
    digest_of,
    newest_batch,
    stored_lineage,
)
from tallystick.storage.file_storage import FileStorage

PREPARED = Committable("kafka", 7, 0, "counts/kafka/0/0:12:3", 5, 1_700_000_000_000, "{}")


@pytest.mark.parametrize(
    "planned",
    [
        PlannedEpoch(7, None, digest_of(("{}", "-"))),
        PlannedEpoch(7, Hold("run", 12), digest_of(("{}",))),
        PlannedEpoch(7, Hold("run", 12), "", (Lost(PREPARED, "transaction 'counts/kafka/0/0'"),)),
    ],
)
def test_what_tasks_say_comes_back_as_it_was(planned: PlannedEpoch) -> None:
    other = Committable("kafka", 7, 1, "counts/kafka/1/0:13:0", 1, 1_700_000_000_001, "{}")
    messages = [PreparedMessage.of(planned, [PREPARED]), None, PreparedMessage.of(planned, [other])]

    assert read_messages(messages) == (planned, (PREPARED, other))
    assert read_messages([None, None]) == (None, ())


def test_the_newest_micro_batch_is_the_one_to_run(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))
    with pytest.raises(DataLossError, match="offsets/ should hold the micro-batch"):
        newest_batch(CheckpointFolder(storage))
    folder = tmp_path / "offsets"
    folder.mkdir()
    for name in ("8", "9", "10", ".11.crc", ".11.4f.tmp", "notes"):
        (folder / name).touch()

    assert newest_batch(CheckpointFolder(storage)) == 10


def test_an_entry_that_was_replaced_since_the_plan_is_not_decided(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))
    storage.put("metadata", b'{"id": "an-id"}')
    storage.put("offsets/0", b'v1\n{}\n{"in": 5}')
    epochs = WriteEpochs(storage, "counts", frozenset(), None, open_sink=pytest.fail)

    with pytest.raises(TallystickError, match=r'offsets/0 has .*"in": 5.*other offsets'):
        epochs.decide(PlannedEpoch(0, Hold("run", 1), digest_of(('{"in": 4}',))), ())
    assert storage.names("tallystick") == [], "nothing is decided"


def test_where_kafka_decides_nothing_is_run(tmp_path: Path) -> None:
    """A `foreachBatch` with one transaction per epoch died; what it committed is not asked here."""
    storage = FileStorage(str(tmp_path))
    storage.put("metadata", b'{"id": "an-id"}')
    storage.put("offsets/0", b'v1\n{}\n{"in": 5}')
    claim(storage, DeciderName(KAFKA, "tallystick-counts", "cluster"))
    epochs = WriteEpochs(storage, "counts", frozenset(), None, open_sink=lambda *_: Nothing())

    for _ in range(2):
        with pytest.raises(OptionError, match=r"are decided by Kafka .*'tallystick-counts'"):
            epochs.plan()
    assert newest_entry(storage) is None, "nothing is fenced"


class Nothing:
    """A sink in which nothing is open."""

    def lingering(self, _: object) -> tuple[()]:
        return ()


def test_the_lineage_is_the_id_that_spark_stored(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))
    with pytest.raises(OptionError, match="Name the place by a whole URI"):
        stored_lineage(CheckpointFolder(storage))
    (tmp_path / "metadata").write_text("{}")
    with pytest.raises(DataLossError, match="should hold the query's id, found 2 bytes"):
        stored_lineage(CheckpointFolder(storage))
    (tmp_path / "metadata").write_text(json.dumps({"id": "an-id"}))

    assert stored_lineage(CheckpointFolder(storage)) == "an-id"
