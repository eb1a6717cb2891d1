"""Micro-batches as epochs: what Spark's log is compared with, and that each is called for once."""

from pathlib import Path
from typing import Any

import pytest

from tallystick.checkpoint.decision_log import DecisionLog
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.spark_log import SparkLog
from tallystick.epoch import manifest as m
from tallystick.epoch import protocol as c
from tallystick.epoch.protocol import EpochRan
from tallystick.errors import DataLossError, FencedError, SecondCallError, SparkLogError
from tallystick.run import driver as driver_module
from tallystick.spark.streaming.micro_batch import run_micro_batch
from tallystick.storage.file_storage import FileStorage, SystemClock


class Engine:
    def run_epoch(self, *_: Any) -> EpochRan:
        return EpochRan(())


class Checkpoint:
    """A query whose epoch N ends at N, and runs of it whose decisions the checkpoint keeps."""

    def __init__(self, folder: Path) -> None:
        self.storage = FileStorage(str(folder))
        self.storage.put("metadata", b"{}")

    def plan(self, epoch: int, end: int) -> None:
        """As Spark does."""
        self.storage.put(f"offsets/{epoch}", f"v1\n{{}}\nends {end}".encode())

    def run(
        self, epoch: int, listener: driver_module.Listener = lambda _: None, calls: int = 1
    ) -> None:
        """Start anew, with the planned epoch."""
        identity = driver_module.Identity("q", "lineage", self.storage.location, frozenset())
        log = DecisionLog(self.storage, SystemClock(), "id")
        driver = driver_module.Driver(
            identity,
            log,
            self.storage,
            SystemClock(),
            listener=listener,
        )
        folder = CheckpointFolder(self.storage)
        request = driver_module.Request(epoch, folder.log.batch(epoch).sources, may_skip=False)
        for _ in range(calls):
            run_micro_batch(driver, folder, request, Engine())
        self.storage.put(f"commits/{epoch}", b"v1\n{}")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Two epochs; then the entry of the last one is replaced, and the next is planned after it."""
    checkpoint_at = Checkpoint(tmp_path)
    for epoch in range(2):
        checkpoint_at.plan(epoch, epoch)
        checkpoint_at.run(epoch)
    checkpoint_at.plan(1, 70)
    checkpoint_at.plan(2, 99)
    return checkpoint_at


def test_what_a_successor_has_committed_meanwhile_is_left_alone(checkpoint):
    reads = []

    def successors(event: c.Event) -> None:
        """After this run's last question, and so after its last proof that it is the owner."""
        if isinstance(event, c.CommittedRead):
            reads.append(event)
        if isinstance(event, c.CommittedRead) and len(reads) == 2:
            with pytest.raises(SparkLogError):
                checkpoint.run(2)
            checkpoint.plan(2, 2)
            checkpoint.run(2)
            checkpoint.plan(3, 3)

    with pytest.raises(FencedError):
        checkpoint.run(2, successors)

    assert len(reads) == 2
    epochs = [m.epoch_of(path) for path in m.manifests(checkpoint.storage.names(m.FOLDER))]
    assert sorted(epochs) == [0, 1, 2]
    log = SparkLog(checkpoint.storage)
    assert [log.sources(epoch) for epoch in range(4)] == [(f"ends {epoch}",) for epoch in range(4)]
    checkpoint.run(3)


def test_a_second_call_in_a_micro_batch_is_refused_and_the_next_start_sees_it(tmp_path):
    checkpoint = Checkpoint(tmp_path)
    checkpoint.plan(0, 0)
    checkpoint.plan(1, 1)

    with pytest.raises(SecondCallError, match=r"pipeline 'q'.*micro-batch 0"):
        checkpoint.run(0, calls=2)

    for _ in range(2):
        with pytest.raises(DataLossError, match="accept='partial-epoch-0'"):
            checkpoint.run(1)
