"""Batches, not rows, travel between tasks: finished Kafka record batches, routed to their writers.

A frame is one encoded record batch for one output partition. Every output partition has one writing
task per epoch. A writer gets frames sorted by (source, sequence): the task that encoded a frame,
and the number of the frame in that task. Rows of one input partition are read by one source task,
so the order per input partition, and with it per key, survives any reordering of blobs by Spark.

Between two steps the same frames carry rows to the tasks that own their key groups; such a frame
has no topic. Rows of side outputs pass by those tasks, with the output's name in the topic's place
(see `outputs.passing`). A step's tasks are sources for the next ones, with a stage number above
theirs.

All writers must see the same attempt of a source. When Spark runs a source again after some writers
are done (shuffle files were lost), the new attempt may route rows elsewhere: a function of the user
that is not deterministic, or rows without a key. So an attempt draws a number, says it to every
writer, also to those that get no rows, and `check_same_attempts` compares. With its number the
first writer gets the attempt's note: the files of state that the attempt left, and the attempts
from which it had rows itself. So the files that count are of the attempt whose rows are written.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tallystick.errors import EpochAbortedError
from tallystick.source.splits import assign
from tallystick.values import TopicPartition


class Frame(NamedTuple):
    """An encoded record batch on the way from its source task to its target task."""

    target: int
    source: int
    sequence: int
    topic: str
    partition: int
    record_count: int
    data: bytes
    attempt: int

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition that the batch is written to."""
        return TopicPartition(self.topic, self.partition)


FRAME_DDL = (
    "target int, source int, sequence int, topic string, partition int, record_count int, "
    "data binary, attempt bigint"
)
"""The columns of a frame where it travels as a row."""

GROUP_BYTES = 8 << 20
GROUP_FRAMES = 64


def target_of(topic_partition: TopicPartition, task_count: int) -> int:
    """Return the writing task of an output partition."""
    return assign(topic_partition.topic, topic_partition.partition, task_count)


NO_TOPIC = ""


def last_frames(
    source: int, sequence: int, attempt: int, task_count: int, notes: Iterable[str] = ()
) -> Iterator[Frame]:
    """Yield a source's last frame to every writer: the number of the attempt, and no rows.

    The first writer gets the notes too, a frame each.
    """
    for target in range(task_count):
        yield Frame(target, source, sequence, NO_TOPIC, 0, 0, b"", attempt)
    for number, note in enumerate(notes, start=1):
        yield Frame(0, source, sequence + number, NO_TOPIC, 0, 0, note.encode(), attempt)


class Attempt(NamedTuple):
    """An attempt of a task that sends frames."""

    stage: int
    source: int
    attempt: int


class FrameSources:
    """The attempts of sources from which a task had frames, and the notes of the attempts.

    Args:
        stage: of the sources: 0 reads, each keyed step is one more.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._attempts: set[Attempt] = set()
        self.notes: list[str] = []

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every attempt heard of, in order."""
        return tuple(sorted(self._attempts))

    def with_rows(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        """Yield the frames with rows; keep the attempts of all frames, and the notes."""
        for frame in frames:
            self._attempts.add(Attempt(self._stage, frame.source, frame.attempt))
            if frame.record_count:
                yield frame
            elif frame.data:
                self.notes.append(frame.data.decode())


def check_same_attempts(attempts_by_task: Iterable[Iterable[Attempt]]) -> None:
    """Check that all tasks got their rows from the same attempt of each source.

    Args:
        attempts_by_task: per task, the attempts of sources that sent its frames.

    Raises:
        EpochAbortedError: a source was run again in between.
    """
    attempts: dict[tuple[int, int], int] = {}
    for task_attempts in attempts_by_task:
        for stage, source, attempt in task_attempts:
            if attempts.setdefault((stage, source), attempt) != attempt:
                raise EpochAbortedError(
                    f"task {source} of stage {stage} ran a second time after some of its rows were "
                    f"used, and may have routed rows elsewhere: the epoch is aborted and runs again"
                )


def grouped(frames: Iterator[Frame]) -> Iterator[list[Frame]]:
    """Yield frames in groups that are worth a round trip, and small enough to hold."""
    group: list[Frame] = []
    size = 0
    for frame in frames:
        group.append(frame)
        size += len(frame.data)
        if size >= GROUP_BYTES or len(group) >= GROUP_FRAMES:
            yield group
            group, size = [], 0
    if group:
        yield group
