"""Values that all layers share: partitions, offsets, producers, rows, findings, the job's graph."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class TopicPartition(NamedTuple):
    """A partition of a Kafka topic.

    A named tuple, because plans sort and look up tens of thousands of them per epoch.
    """

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True, order=True)
class SplitRange:
    """The records `start_offset <= offset < stop_offset` of one topic partition.

    `topic_id` is Kafka's id of the topic (KIP-516): a topic that is created under the same name
    later has other records at these offsets. "" means any.
    """

    topic: str
    partition: int
    start_offset: int
    stop_offset: int
    topic_id: str = ""

    def __post_init__(self) -> None:
        assert self.partition >= 0, self
        assert 0 <= self.start_offset <= self.stop_offset, self

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition that the range belongs to."""
        return TopicPartition(self.topic, self.partition)

    @property
    def offset_count(self) -> int:
        """The number of offsets in the range; there may be fewer records (markers, compaction)."""
        return self.stop_offset - self.start_offset

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}[{self.start_offset},{self.stop_offset})"


class TopicLimit(NamedTuple):
    """The record batches that a topic takes.

    Args:
        batch_bytes: the size of the largest one, as it is stored.
        compression: the topic's own, which the broker applies to what is compressed otherwise;
            None: batches are stored as they come.
    """

    batch_bytes: int
    compression: str | None = None


@dataclass(frozen=True, slots=True)
class Producer:
    """A producer that Kafka admitted; any higher `producer_epoch` of the same id fences it.

    Every transaction has a `Producer` of its own: the broker port hands out a fresh producer epoch
    after each commit and each fence (Kafka does so itself from transaction.version 2 on, KIP-890).
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int

    @property
    def transaction_name(self) -> str:
        """The name of the producer's transaction, unique in the cluster."""
        return f"{self.transactional_id}:{self.producer_id}:{self.producer_epoch}"


@dataclass(frozen=True, slots=True, order=True)
class ProducedRange:
    """The rows that a task wrote to an output partition in a transaction.

    The sequence numbers of a partition start at 0 with each producer epoch, so the last one is
    `record_count - 1`. `last_offset` is where the last record stands in the log; records of other
    producers may lie between first and last.
    """

    topic: str
    partition: int
    record_count: int
    first_offset: int
    last_offset: int

    def __post_init__(self) -> None:
        assert self.record_count > 0, self
        assert 0 <= self.first_offset <= self.last_offset, self

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition that holds the rows."""
        return TopicPartition(self.topic, self.partition)

    @property
    def last_sequence(self) -> int:
        """The sequence number that Kafka must report for the last record (it wraps at 2^31)."""
        return (self.record_count - 1) & 0x7FFFFFFF


class Severity(IntEnum):
    """The weight of a finding, which is the exit code too."""

    INFO = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """A check's observation, with the consequence and the remedy.

    A start logs warnings and errors; `tallystick doctor` and the page show all findings.

    Args:
        severity: how bad it is.
        check: the name of the check.
        found: the observation.
        meaning: the consequence; "": the observation speaks for itself.
        remedy: what to type or to change; "": nothing.
    """

    severity: Severity
    check: str
    found: str
    meaning: str = ""
    remedy: str = ""

    @property
    def is_logged(self) -> bool:
        """True if a start logs it."""
        return self.severity > Severity.INFO

    def __str__(self) -> str:
        """Return observation, consequence and remedy as one line, for a log."""
        sentences = (f"{self.check}: {self.found}", self.meaning, self.remedy)
        return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence)


SOURCE, TASKS, SINK = "source", "tasks", "sink"


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A source, the tasks of a step, or a sink.

    Args:
        kind: `source`, `tasks` or `sink`.
        name: the input's uid, the step as a progress has it, or the sink's uid.
        texts: what a user reads about the node: topics, functions, keys.
    """

    kind: str
    name: str
    texts: tuple[str, ...] = ()


JobGraph = tuple[tuple[GraphNode, ...], ...]
"""The layers of a job: each node of a layer hands rows to all of the next."""
