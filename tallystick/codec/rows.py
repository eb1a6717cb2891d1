"""Encoding of a pipeline's output rows into the columns that Kafka stores, by partition.

Without a value format the columns are those of Spark's Kafka sink: `value`, and if present `key`,
`topic`, `partition`, `headers`, `timestamp`; others are ignored. With one, every column goes into
the value, and columns may be named as the key as well: one, as text, or several, in a format of
their own. A row whose key columns are all null has no key.

A record goes to the partition that Kafka's Java client would choose. Invariant: equal keys go to
equal partitions, from any writer, so readers that rely on it keep working.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.arguments import missing_column
from tallystick.codec.spans import spans_of
from tallystick.codec.values import ValueWriter, nulls
from tallystick.errors import OptionError, RecordError
from tallystick.values import TopicLimit, TopicPartition

Int32Array = NDArray[np.int32]

_SEED = np.uint32(0x9747B28C)
_MIX = np.uint32(0x5BD1E995)


def murmur2(keys: pa.Array) -> Int32Array:
    """Return Kafka's hash of each key, signed as in Java; 0 for a null key.

    Source: org.apache.kafka.common.utils.Utils.murmur2.
    """
    spans = spans_of(keys, "key")
    hashes = np.zeros(len(keys), np.int32)
    _murmur2(spans.data, spans.starts, spans.lengths, hashes)
    return hashes


def partition_of(keys: pa.Array, partition_count: int, spread: int) -> Int32Array:
    """Return the partition of each record.

    Keys go by hash. All records without a key go to partition `spread % partition_count`: like
    Java's sticky partitioner (KIP-480), which fills one batch before it turns to the next
    partition. The caller changes `spread` from call to call.

    Args:
        keys: binary or string; null where a record has no key.
        partition_count: how many partitions the topic has.
        spread: any number; it must not depend on the clock where an epoch may run again.
    """
    assert partition_count > 0, partition_count
    partitions = (murmur2(keys) & 0x7FFFFFFF) % np.int32(partition_count)
    if keys.null_count:
        partitions[keys.is_null().to_numpy(zero_copy_only=False)] = spread % partition_count
    return partitions


def group_by_partition(
    batch: pa.RecordBatch, partitions: Int32Array
) -> list[tuple[int, pa.RecordBatch]]:
    """Return the rows of each partition, partitions ascending, rows in the order that they had.

    Args:
        batch: the records.
        partitions: the partition of each row.
    """
    assert len(partitions) == batch.num_rows, (len(partitions), batch.num_rows)
    if batch.num_rows == 0:
        return []
    first = int(partitions[0])
    if (partitions == first).all():
        return [(first, batch)]
    assert partitions.min() >= 0, partitions.min()
    counts = np.bincount(partitions)
    ends = np.cumsum(counts)
    order = np.empty(len(partitions), np.int64)
    _counting_sort(partitions, ends - counts, order)
    grouped = batch.take(pa.array(order))
    return [
        (
            int(partition),
            grouped.slice(int(ends[partition] - counts[partition]), int(counts[partition])),
        )
        for partition in np.flatnonzero(counts)
    ]


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    keys = pa.array([b"a", b"b", None])
    group_by_partition(pa.record_batch([keys], names=["key"]), partition_of(keys, 2, 0))
    group_by_partition(pa.record_batch([keys], names=["key"]), np.array([0, 1, 0], np.int32))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _murmur2(data, starts, lengths, hashes):  # type: ignore[no-untyped-def]
    for row in range(len(hashes)):
        length = lengths[row]
        at = starts[row]
        if length < 0 or at < 0 or at + length > len(data):
            continue
        value = _SEED ^ np.uint32(length)
        end = at + (length & ~3)
        while at < end:
            word = (
                np.uint32(data[at])
                | np.uint32(data[at + 1]) << np.uint32(8)
                | np.uint32(data[at + 2]) << np.uint32(16)
                | np.uint32(data[at + 3]) << np.uint32(24)
            )
            word = np.uint32(word * _MIX)
            word ^= word >> np.uint32(24)
            value = np.uint32(value * _MIX) ^ np.uint32(word * _MIX)
            at += 4
        rest = length & 3
        if rest == 3:
            value ^= np.uint32(data[at + 2]) << np.uint32(16)
        if rest >= 2:
            value ^= np.uint32(data[at + 1]) << np.uint32(8)
        if rest >= 1:
            value = np.uint32((value ^ np.uint32(data[at])) * _MIX)
        value ^= value >> np.uint32(13)
        value = np.uint32(value * _MIX)
        value ^= value >> np.uint32(15)
        hashes[row] = np.int32(value)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _counting_sort(partitions, places, order):  # type: ignore[no-untyped-def]
    """Write the row numbers into `order`, grouped; `places` is where each group starts."""
    for row in range(len(partitions)):
        partition = partitions[row]
        order[places[partition]] = row
        places[partition] += 1


HEADERS_TYPE = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))


@dataclass(frozen=True)
class RowLayout:
    """The encoding of rows as records.

    Args:
        partition_counts: the partitions of each topic that may be written to.
        topic: where all rows go; None: each row names its topic in column `topic`.
        value: makes the value of all columns, without `topic` where that column names the row's
            topic; None: there is a column `value`.
        key: with `value`, the column whose text is the record's key, or the columns that
            `key_format` writes; None: no key.
        key_format: makes the key of the columns in `key`; None: the text of the single column.
        batch_limits: the record batches that a topic takes, where it is known.
    """

    partition_counts: Mapping[str, int]
    topic: str | None
    value: ValueWriter | None = None
    key: str | tuple[str, ...] | None = None
    key_format: ValueWriter | None = None
    batch_limits: Mapping[str, TopicLimit] = field(default_factory=dict)

    def split(
        self, rows: pa.RecordBatch, spread: int, *, numbered: bool = False
    ) -> Iterator[tuple[TopicPartition, pa.RecordBatch]]:
        """Yield the records of each output partition, in the order of the rows.

        Args:
            rows: the output of the pipeline.
            spread: picks the partition to which all rows without a key go together.
            numbered: whether the records get a column `row` too, with the number of their row.

        Raises:
            OptionError: a column is missing or of a type that Kafka cannot store.
            RecordError: a row names no topic, or a topic or partition that does not exist.
        """
        if rows.num_rows == 0:
            return
        records = self._records(rows)
        if numbered:
            records = records.append_column("row", pa.array(np.arange(rows.num_rows)))
        for topic, part, chosen in self._by_topic(rows, records):
            count = self._partition_count(topic)
            partitions = partition_of(part.column("key"), count, spread)
            if chosen is not None:
                partitions = _chosen(chosen, partitions, topic, count)
            for partition, batch in group_by_partition(part, partitions):
                yield TopicPartition(topic, partition), batch

    def check(self, columns: pa.Schema) -> None:
        """Refuse columns that cannot become records, before any rows come.

        Raises:
            OptionError: a column is missing or of a type that Kafka cannot store.
        """
        if self.value is not None:
            at = columns.get_field_index("topic") if self.topic is None else -1
            self.value.check(columns.remove(at) if at >= 0 else columns)
        rows = nulls(columns, 0)
        try:
            list(self._by_topic(rows, self._records(rows)))
        except pa.ArrowException as error:
            raise OptionError(
                f"the columns {columns.names} cannot be written: {error}. Make text, bytes or "
                f"numbers of them first, in a map_batches"
            ) from error

    def _records(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the columns key and value, and headers and timestamp where there are any."""
        if self.value is not None:
            # The column `topic` is an address then, and no data.
            is_address = self.topic is None and "topic" in rows.schema.names
            data = rows.drop_columns(["topic"]) if is_address else rows
            columns = {"key": self._key(rows), "value": self.value.write(data)}
            return pa.RecordBatch.from_pydict(columns)
        if "value" not in rows.schema.names:
            raise OptionError(
                f"the rows to write have no column 'value', only {rows.schema.names}: name the "
                f"record's bytes or text 'value', or set value=Json() to encode all columns"
            )
        columns = {"key": _bytes(rows, "key"), "value": _bytes(rows, "value")}
        if "headers" in rows.schema.names:
            columns["headers"] = _cast(rows, "headers", HEADERS_TYPE)
        if "timestamp" in rows.schema.names:
            columns["timestamp"] = _millis(rows)
        return pa.RecordBatch.from_pydict(columns)

    def _key(self, rows: pa.RecordBatch) -> pa.Array:
        names = [self.key] if isinstance(self.key, str) else list(self.key or ())
        if not names:
            return pa.nulls(rows.num_rows, pa.binary())
        for name in names:
            if name not in rows.schema.names:
                raise missing_column(f"key={name!r}", name, rows.schema.names)
        if self.key_format is not None:
            return _typed_key(rows.select(names), self.key_format)
        if pa.types.is_binary(rows.schema.field(names[0]).type):
            return rows.column(names[0])
        return _cast(rows, names[0], pa.string()).cast(pa.binary())

    def _by_topic(
        self, rows: pa.RecordBatch, records: pa.RecordBatch
    ) -> Iterator[tuple[str, pa.RecordBatch, pa.Array | None]]:
        """Yield each topic with its records and the partitions that rows ask for, if any."""
        chosen = None
        if self.value is None and "partition" in rows.schema.names:
            chosen = _cast(rows, "partition", pa.int32())
        if self.topic is not None:
            yield self.topic, records, chosen
            return
        if "topic" not in rows.schema.names:
            raise OptionError("no topic to write to: set topic=, or give the rows a column 'topic'")
        topics = _cast(rows, "topic", pa.string()).dictionary_encode()
        if topics.null_count:
            raise RecordError(f"{topics.null_count} rows to write name no topic: 'topic' is null")
        for index, topic in enumerate(topics.dictionary.to_pylist()):
            mine = pc.equal(topics.indices, index)
            part = chosen.filter(mine) if chosen is not None else None
            yield topic, records.filter(mine), part

    def _partition_count(self, topic: str) -> int:
        if topic not in self.partition_counts:
            raise RecordError(
                f"a row names topic {topic!r}, which did not exist when the epoch began "
                f"(known: {sorted(self.partition_counts)}): create it, or correct the column"
            )
        return self.partition_counts[topic]


def _typed_key(columns: pa.RecordBatch, form: ValueWriter) -> pa.Array:
    """Return the key that a format makes of columns; null where all columns are null."""
    try:
        form.check(columns.schema)
    except OptionError as error:
        raise OptionError(f"the record's key: {error}") from error
    is_given = np.zeros(columns.num_rows, np.bool_)
    for column in columns.columns:
        is_given |= column.is_valid().to_numpy(zero_copy_only=False)
    if is_given.all():
        return form.write(columns)
    written = form.write(columns.filter(pa.array(is_given)))
    places = np.cumsum(is_given) - 1
    return written.take(pa.array(places, mask=~is_given))


def _cast(rows: pa.RecordBatch, name: str, kind: pa.DataType) -> pa.Array:
    column = rows.column(name)
    try:
        return column.cast(kind)
    except pa.ArrowNotImplementedError as error:
        raise OptionError(
            f"column {name!r} to write is of type {column.type}: expected {kind}. Cast it in a "
            f"map_batches"
        ) from error
    except pa.ArrowInvalid as error:
        problem = f"column {name!r} to write, of type {column.type}, holds what is no {kind}"
        raise RecordError(f"{problem}: {error}", without_values=problem) from error


def _bytes(rows: pa.RecordBatch, name: str) -> pa.Array:
    if name not in rows.schema.names:
        return pa.nulls(rows.num_rows, pa.binary())
    column = rows.column(name)
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_null(kind):
        return column.cast(pa.binary())
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return column.cast(pa.large_binary())
    raise OptionError(
        f"column {name!r} to write is of type {kind}: expected string or binary; encode it first, "
        f"or set value=Json() to encode all columns"
    )


def _millis(rows: pa.RecordBatch) -> pa.Array:
    column = rows.column("timestamp")
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False).cast(pa.int64())
    if pa.types.is_integer(column.type):
        return _cast(rows, "timestamp", pa.int64())
    raise OptionError(
        f"column 'timestamp' to write is of type {column.type}: expected timestamp, or integer "
        f"milliseconds since 1970"
    )


def _chosen(chosen: pa.Array, by_key: np.ndarray, topic: str, count: int) -> np.ndarray:
    """Return the partitions that rows ask for, or else the partitions by key."""
    partitions = np.where(
        pc.is_valid(chosen).to_numpy(zero_copy_only=False),
        chosen.fill_null(0).to_numpy(zero_copy_only=False),
        by_key,
    ).astype(np.int32)
    wrong = partitions[(partitions < 0) | (partitions >= count)]
    if len(wrong):
        raise RecordError(
            f"{len(wrong)} rows ask for partitions of topic {topic!r} that do not exist (the first "
            f"is {int(wrong[0])}; it has {count}): drop the column 'partition' to partition by key"
        )
    return partitions
