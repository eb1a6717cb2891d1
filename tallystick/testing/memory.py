"""Ports in memory: topics, the files of a checkpoint, copies of state, and sinks.

They outlive the runs of a `driver.Driver`, as Kafka, a disk and other systems outlive a process.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from tallystick.codec.records.decoder import RECORD_SCHEMA_WITH_HEADERS
from tallystick.codec.rows import HEADERS_TYPE, RowLayout
from tallystick.epoch.two_phase import Committable, Outcome, Owner, Place, RunFacts
from tallystick.kafka.output import KafkaOutput
from tallystick.source.subscription import LossPolicy
from tallystick.state.key_groups import KeyGroupRange
from tallystick.storage.file_storage import SYSTEM_CLOCK
from tallystick.testing.memory_state import MemoryStore
from tallystick.values import SplitRange, TopicPartition

SENT = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("timestamp", pa.int64()),
        pa.field("headers", HEADERS_TYPE),
    ]
)
"""The columns of records before they have offsets."""
RECORDS = pa.schema(
    [pa.field("topic", pa.string()), pa.field("partition", pa.int32()), *RECORD_SCHEMA_WITH_HEADERS]
)
"""The columns of records as a consumer gets them."""


class Topics:
    """Topics with their records.

    Args:
        partition_counts: of topics that have more partitions than records need.
    """

    def __init__(self, partition_counts: Mapping[str, int]) -> None:
        self._counts = dict(partition_counts)
        self._logs = defaultdict[TopicPartition, list[pa.RecordBatch]](list)

    def partition_count(self, topic: str) -> int:
        """Return the number of a topic's partitions; 1 of a topic without records."""
        return self._counts.get(topic, 1)

    @property
    def names(self) -> list[str]:
        """The topics that exist."""
        return sorted(self._counts)

    def add(self, topic: str, partition_count: int = 1) -> None:
        """Make a topic have so many partitions at least."""
        self._counts[topic] = max(self._counts.get(topic, 1), partition_count)

    def append(self, partition: TopicPartition, records: pa.RecordBatch) -> None:
        """Append records with the columns of `SENT` to a partition."""
        self.add(partition.topic, partition.partition + 1)
        first, count = self.end(partition), records.num_rows
        columns = {
            **{name: records.column(name) for name in SENT.names},
            "offset": pa.array(np.arange(first, first + count)),
            "timestampType": pa.repeat(pa.scalar(0, pa.int32()), count),
        }
        batch = pa.RecordBatch.from_pydict(columns).select(RECORD_SCHEMA_WITH_HEADERS.names)
        self._logs[partition].append(batch.cast(RECORD_SCHEMA_WITH_HEADERS))

    def append_columns(self, partition: TopicPartition, rows: pa.RecordBatch, now_ms: int) -> None:
        """Append rows whose columns are the value: nobody has to write and parse bytes."""
        if not rows.num_rows:
            return
        first, count = self.end(partition), rows.num_rows
        offsets = np.arange(first, first + count)
        # Each array is made without `pa.array`, which would import pandas.
        columns = {
            "key": pa.nulls(count, pa.binary()),
            "value": pa.StructArray.from_arrays(rows.columns, fields=list(rows.schema)),
            "timestamp": pa.repeat(pa.scalar(now_ms, pa.int64()), count),
            "headers": pa.nulls(count, HEADERS_TYPE),
            "offset": pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(offsets)]),
            "timestampType": pa.repeat(pa.scalar(0, pa.int32()), count),
        }
        names = RECORD_SCHEMA_WITH_HEADERS.names
        batch = pa.RecordBatch.from_arrays([columns[name] for name in names], names=names)
        self._logs[partition].append(batch)

    def forget(self, partition: TopicPartition, offset: int) -> None:
        """Drop batches of records before an offset, but for the last one, which has the end."""
        log = self._logs[partition]
        while len(log) > 1 and log[1].column("offset")[0].as_py() <= offset:
            del log[0]

    def end(self, partition: TopicPartition) -> int:
        """Return the offset of the next record."""
        log = self._logs[partition]
        return int(log[-1].column("offset")[-1].as_py()) + 1 if log else 0

    def between(self, split: SplitRange) -> Iterator[pa.RecordBatch]:
        """Yield the records of a split."""
        for batch in self._logs[split.topic_partition]:
            first = batch.column("offset")[0].as_py()
            start = max(split.start_offset - first, 0)
            stop = min(split.stop_offset - first, batch.num_rows)
            if start < stop:
                yield batch.slice(start, stop - start)

    def table(self, topic: str) -> pa.Table:
        """Return all records of a topic, partition by partition."""
        batches = []
        for number in range(self.partition_count(topic)):
            for batch in self._logs[TopicPartition(topic, number)]:
                place = [
                    pa.repeat(pa.scalar(value, column.type), batch.num_rows)
                    for value, column in zip((topic, number), RECORDS, strict=False)
                ]
                batches.append(pa.RecordBatch.from_arrays([*place, *batch.columns], schema=RECORDS))
        return pa.Table.from_batches(batches, RECORDS)


@dataclass(frozen=True)
class MemoryFetch:
    """The Fetch port over topics in memory."""

    topics: Topics

    def read(
        self, splits: Iterable[SplitRange], *, headers: bool, policy: LossPolicy
    ) -> Iterator[tuple[SplitRange, pa.RecordBatch]]:
        """Yield the records of all splits, in order within each; see `ports.Fetch.read`."""
        for split in splits:
            for batch in self.topics.between(split):
                yield split, batch if headers else batch.drop_columns(["headers"])


class MemoryStorage:
    """The Storage port: files in a dictionary."""

    location = "memory"

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def put(self, path: str, data: bytes) -> None:
        """Write a file."""
        self._files[path] = data

    def put_new(self, path: str, data: bytes) -> bool:
        """Write a file that must not exist yet; return False if it does."""
        return self._files.setdefault(path, data) is data

    def get(self, path: str) -> bytes | None:
        """Read a file; None if there is none."""
        return self._files.get(path)

    def get_range(self, path: str, offset: int, length: int) -> bytes | None:
        """Read a part of a file; see `ports.Storage.get_range`."""
        data = self._files.get(path)
        if data is None:
            return None
        start = offset if offset >= 0 else max(0, len(data) + offset)
        return data[start : start + length]

    def names(self, folder: str) -> list[str]:
        """Return the paths of the files in a folder, sorted."""
        return sorted(path for path in self._files if path.rpartition("/")[0] == folder)

    def delete(self, path: str) -> None:
        """Remove a file, if it exists."""
        self._files.pop(path, None)

    def sync(self, path: str) -> None:
        """Do nothing: every file is as durable as this process."""


@dataclass(frozen=True)
class MemoryHost:
    """A task's access to the checkpoint and to copies of state; see `keyed.WorkerHost`."""

    files: MemoryStorage
    copies: dict[tuple[str, KeyGroupRange], MemoryStore] = field(default_factory=dict)

    def storage(self) -> MemoryStorage:
        """Return the checkpoint's files."""
        return self.files

    def store(self, uid: str, groups: KeyGroupRange) -> MemoryStore:
        """Return the copy of a step's key groups."""
        return self.copies.setdefault((uid, groups), MemoryStore())


class _EveryTopic(dict[str, int]):
    """The partitions of topics, of which each exists that a row names."""

    def __contains__(self, topic: object) -> bool:
        return True

    def __missing__(self, topic: str) -> int:
        return 1


Written = list[tuple[TopicPartition, pa.RecordBatch]]


class MemorySink:
    """A sink in memory, of rows and of the records that a `KafkaSink` makes of rows.

    It is a `Sink`, the `TwoPhaseCommitSink` of all runs, and the `TransactionPlan` of all epochs.

    Args:
        topics: the destination of committed records.
        clock: the timestamp of records that have none.
        output: of the `KafkaSink` that it stands for; None: it keeps rows only.
        dead_letter_topic: the destination of malformed records; None: there is none.
    """

    kind = "memory"
    uid = None
    timeout = None

    def __init__(
        self,
        topics: Topics,
        clock: "Clock",
        output: KafkaOutput | None = None,
        dead_letter_topic: str | None = None,
    ) -> None:
        self.topics, self.clock = topics, clock
        self.output, self.dead_letter_topic = output, dead_letter_topic
        self.rows: list[pa.RecordBatch] = []
        self.prepared: dict[str, tuple[Committable, list[pa.RecordBatch], Written]] = {}
        self._committed: set[str] = set()

    def take_over(self, before: "MemorySink") -> None:
        """Hold what the sink of a run before held, as a server would."""
        self.rows, self.prepared, self._committed = before.rows, before.prepared, before._committed

    def open(self, owner: Owner, facts: RunFacts) -> "MemorySink":
        """Return the sink: it has no connection."""
        return self

    def plan(self) -> "MemorySink":
        """Return the sink: nothing of the plan is an epoch's own."""
        return self

    def begin(self, place: Place) -> "MemoryTransaction":
        """Begin the transaction of a task."""
        return MemoryTransaction(self, place)

    def counts(self) -> Mapping[str, int]:
        """Return the partitions of the topics."""
        topics = self.topics
        return _EveryTopic({name: topics.partition_count(name) for name in topics.names})

    def commit(self, committable: Committable) -> Outcome:
        """Make prepared rows and records visible."""
        if committable.name in self._committed:
            return Outcome.COMMITTED
        if committable.name not in self.prepared:
            return Outcome.LOST
        _, rows, written = self.prepared.pop(committable.name)
        self._committed.add(committable.name)
        self.rows += rows
        for partition, records in written:
            self.topics.append(partition, records)
        return Outcome.COMMITTED

    def abort(self, committable: Committable) -> None:
        """Forget prepared rows."""
        self.prepared.pop(committable.name, None)

    def lingering(self, owner: Owner) -> Sequence[Committable]:
        """Return all that is prepared."""
        return [committable for committable, *_ in self.prepared.values()]

    def describe(self, committable: Committable) -> str:
        """Name a transaction."""
        return f"{committable.record_count} rows in memory"

    def close(self) -> None:
        """Do nothing: there is no connection."""


class Clock:
    """The clock of a test.

    Args:
        now_ms: the first time, in ms since 1970.
    """

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def sleep(self, seconds: float) -> None:
        """Let time pass, without a wait: the pause of the driver before another try."""
        self.now_ms += round(1000 * seconds)

    def nonce(self) -> str:
        """Return a name that no other run will draw."""
        return SYSTEM_CLOCK.nonce()


class MemoryTransaction:
    """The transaction of a task in a `MemorySink`."""

    def __init__(self, sink: MemorySink, place: Place) -> None:
        self._sink, self._place = sink, place
        output = sink.output
        self._layout = None if output is None else output.rows(sink.counts(), registers=False)
        self._rows: list[pa.RecordBatch] = []
        self._written: Written = []

    def write(self, rows: pa.RecordBatch) -> None:
        """Keep rows, and make records of them."""
        self._rows.append(rows)
        if self._layout is not None:
            self._write(rows, self._layout)

    def write_dead_letters(self, records: pa.RecordBatch) -> None:
        """Keep malformed records for the dead-letter topic."""
        self._write(records, RowLayout(self._sink.counts(), self._sink.dead_letter_topic))

    def _write(self, rows: pa.RecordBatch, layout: RowLayout) -> None:
        for partition, records in layout.split(rows, len(self._written)):
            self._written.append((partition, sent(records, self._sink.clock())))

    def prepare(self) -> Sequence[Committable]:
        """Hand over what was written."""
        place = self._place
        count = sum(rows.num_rows for rows in self._rows)
        name = f"{place.checkpoint_id}-{place.task}-{place.nonce}"
        committable = Committable(
            place.owner.sink, place.checkpoint_id, place.task, name, count, self._sink.clock()
        )
        self._sink.prepared[name] = (committable, self._rows, self._written)
        return [committable]

    def abort(self) -> None:
        """Do nothing: what was written is the transaction's own."""


def sent(records: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
    """Return records with the columns of `SENT`; a missing timestamp is the clock's."""
    columns = []
    for column in SENT:
        if column.name in records.schema.names:
            values = records.column(column.name).cast(column.type)
        else:
            values = pa.nulls(records.num_rows, column.type)
        columns.append(values.fill_null(now_ms) if column.name == "timestamp" else values)
    return pa.RecordBatch.from_arrays(columns, schema=SENT)
