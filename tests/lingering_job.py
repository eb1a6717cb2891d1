"""A checkpoint whose epochs prepare transactions, without the pipeline that it is of."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from tallystick.checkpoint.decision_log import DecisionLog
from tallystick.epoch import manifest as m
from tallystick.epoch.manifest import CHECKPOINT, Manifest
from tallystick.epoch.micro_batches import settled_path
from tallystick.epoch.tokens import Token, encode_token
from tallystick.epoch.two_phase import Committable
from tallystick.storage.file_storage import FileStorage, SystemClock
from tallystick.values import Producer


class LingeringJob:
    """Plans, prepares, decides and logs epochs, each when it is told to.

    Args:
        folder: of the checkpoint.
        pipeline: its name.
        lineage: of the checkpoint.
        is_loops: it is one of a loop of our own, which keeps no log of Spark's.
    """

    def __init__(
        self, folder: Path, pipeline: str, lineage: str, *, is_loops: bool = False
    ) -> None:
        self.is_loops = is_loops
        self.folder, self.pipeline, self.lineage = folder, pipeline, lineage
        self.storage = FileStorage(str(folder))
        self.storage.put("metadata", json.dumps({"id": lineage}).encode())
        self.log = DecisionLog(self.storage, SystemClock(), f"tallystick-{pipeline}")
        self.producer = self.log.fence(None)
        self._decided: dict[int, str] = {}

    def plan(self, epoch: int, *, ago_s: float = 0) -> None:
        """As Spark does before an epoch runs."""
        if self.is_loops:
            return
        planned_ms = int((time.time() - ago_s) * 1000)
        line = json.dumps({"batchTimestampMs": planned_ms})
        self.storage.put(f"offsets/{epoch}", f"v1\n{line}\n{{}}".encode())

    def prepare(
        self,
        epoch: int,
        committables: Sequence[Committable] = (),
        nonce: str = "aa",
        decided_by: str = CHECKPOINT,
    ) -> str:
        """Write the epoch's manifest; its path."""
        manifest = Manifest(
            checkpoint_id=epoch,
            pipeline=self.pipeline,
            lineage=self.lineage,
            sources=("{}",),
            produced=(),
            producer=Producer(f"tallystick-{self.pipeline}", 1, self.producer.producer_epoch),
            committables=tuple(sorted(committables)),
            decided_by=decided_by,
            base_path=self._decided.get(epoch - 1, ""),
        )
        path = m.manifest_path(manifest, nonce)
        self.storage.put(path, manifest.encode())
        return path

    def token(self, epoch: int, path: str) -> tuple[int, str]:
        """What says that an epoch is decided."""
        return encode_token(Token(epoch, self.lineage, self.storage.location, path))

    def decide(self, epoch: int, path: str) -> None:
        """As the driver does, in the log of decisions."""
        token = Token(epoch, self.lineage, self.storage.location, path)
        self.producer = self.log.decide(self.producer, token)
        self._decided[epoch] = path

    def finish(self, epoch: int) -> None:
        """As Spark does when all of an epoch is settled, or a loop that ends in order."""
        if self.is_loops:
            self.storage.put(settled_path(self._decided[epoch]), b"")
            return
        self.storage.put(f"commits/{epoch}", b"v1\n{}")

    def run(self, epochs: int, *, first: int = 0) -> None:
        """Whole epochs that prepare nothing."""
        for epoch in range(first, first + epochs):
            self.plan(epoch)
            self.decide(epoch, self.prepare(epoch))
            self.finish(epoch)
