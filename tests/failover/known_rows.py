"""Epochs of rows that are known beforehand, so that a log can be checked to its last record."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from tallystick.codec.records.encoder import encode
from tallystick.epoch.protocol import EpochRan
from tallystick.state.catalog import StepState
from tallystick.tasks.frames import GROUP_FRAMES, Frame
from tallystick.tasks.read import WritePlan
from tallystick.values import Producer

TIMESTAMP_MS = 1_700_000_000_000
ZOMBIE = "zombie"
"""The value of every row that no epoch holds."""


def _ignore() -> None:
    return


@dataclass(frozen=True, slots=True)
class Shape:
    """What each epoch of a pipeline writes: the same to every one of its partitions."""

    pipeline: str
    topic: str
    partitions: tuple[int, ...]
    batch_count: int = 4
    batch_rows: int = 3

    @property
    def row_count(self) -> int:
        """Rows per partition and epoch."""
        return self.batch_count * self.batch_rows

    @property
    def midway(self) -> int:
        """How many frames a task has surely sent when it is asked for the next."""
        return GROUP_FRAMES + 1

    def spanning_groups(self) -> "Shape":
        """With so many batches that a task writes in two rounds, and stands between them once."""
        count = -(-(GROUP_FRAMES + 16) // len(self.partitions))
        return Shape(self.pipeline, self.topic, self.partitions, batch_count=count)

    def values(self, epoch: int, partition: int) -> list[str]:
        """The rows of one epoch in one partition, in order."""
        return [f"{self.pipeline}:{epoch}:{partition}:{row}" for row in range(self.row_count)]

    def expected(self, epochs: int) -> dict[int, list[str]]:
        """All rows of the first epochs."""
        return {
            partition: [row for epoch in range(epochs) for row in self.values(epoch, partition)]
            for partition in self.partitions
        }

    def frames(self, epoch: int, partitions: tuple[int, ...] | None = None) -> Iterator[Frame]:
        """An epoch as its tasks would exchange it."""
        parts = self.partitions if partitions is None else partitions
        encoded = {
            partition: list(
                encode(
                    pa.record_batch({"value": pa.array(self.values(epoch, partition))}),
                    compression="lz4",
                    batch_records=self.batch_rows,
                    now_ms=TIMESTAMP_MS,
                )
            )
            for partition in parts
        }
        for sequence in range(self.batch_count):
            for partition in parts:
                batch = encoded[partition][sequence]
                yield Frame(
                    0, 0, sequence, self.topic, partition, batch.record_count, batch.data, 0
                )


class RowsEngine:
    """The Engine port without Spark: one task, in this thread.

    Args:
        shape: what to write.
        write_plan: the driver's.
        midway: called in the middle of writing, when rows are in Kafka and others are not.
    """

    def __init__(
        self,
        shape: Shape,
        write_plan: Callable[[Producer], WritePlan],
        midway: Callable[[], None] = _ignore,
    ) -> None:
        self._shape = shape
        self._write_plan = write_plan
        self._midway = midway

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> EpochRan:
        report = self._write_plan(producer).write(self._frames(checkpoint_id), attempt_number=0)
        if report.failure is not None:
            raise report.failure.to_error()
        return EpochRan(report.produced)

    def _frames(self, epoch: int) -> Iterator[Frame]:
        for count, frame in enumerate(self._shape.frames(epoch), start=1):
            yield frame
            if count == self._shape.midway:
                self._midway()
