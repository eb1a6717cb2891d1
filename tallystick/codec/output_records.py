"""Rows to record batches within the topic's limit; errors or dead letters for larger records.

The limit of a topic, `max.message.bytes`, applies to batches as they are sent: compressed, with
their header. A batch beyond it is cut in two until it fits; `divided` does so with a batch that a
broker has refused (KIP-126). A single record beyond it cannot be written: it becomes an error that
names the record, or a dead letter. A `PartitionLog` gives the batches of a partition their places
in the sequence of their producer; the pieces of one that is cut take the numbers of the whole.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from tallystick.codec.layout import (
    ERROR_HEADER,
    OFFSET_HEADER,
    PARTITION_HEADER,
    REASON_LENGTH_MAX,
    TOPIC_HEADER,
)
from tallystick.codec.records.batch_header import CHECKED_FROM, TRANSACTIONAL, batch_headers
from tallystick.codec.records.compression import CODEC_IDS
from tallystick.codec.records.decoder import decode
from tallystick.codec.records.encoder import EncodedBatch, RecordBeyondLimitError, encode, stamp
from tallystick.codec.rows import HEADERS_TYPE, RowLayout
from tallystick.errors import RecordError
from tallystick.host.origin import Place, place_of
from tallystick.values import Producer, TopicPartition

CUT_BYTES = 200
"""The bytes that a dead letter keeps of the key, and of the value, of a record too large."""
CUT_HEADER = "tallystick.cut"
"""The header that states the bytes kept in a dead letter: `value 200 of 2000000, key 12 of 12`."""
SEQUENCE_MASK = 0x7FFFFFFF


@dataclass
class OutputRecords:
    """The encoding of rows for one sink.

    Args:
        layout: makes records of the rows, and knows the limits of topics.
        compression: as `KafkaSink` names it; for topics that have none of their own.
        batch_bytes: the size of a record batch before compression.
        letters: gets a dead letter for each record that is too large; None: such a record is an
            error.
    """

    layout: RowLayout
    compression: str
    batch_bytes: int
    letters: list[pa.RecordBatch] | None = None
    _wrong: list[tuple[int, RecordBeyondLimitError]] = field(default_factory=list, init=False)

    def encode(
        self, rows: pa.RecordBatch, *, spread: int, now_ms: int
    ) -> Iterator[tuple[TopicPartition, EncodedBatch]]:
        """Yield the record batches of each partition, in the order of the rows.

        Args:
            rows: the output of the pipeline.
            spread: see `RowLayout.split`.
            now_ms: the timestamp of records that have none.

        Raises:
            RecordError: a record is larger than its topic takes, and there are no dead letters.
        """
        for number, (partition, records) in enumerate(self.layout.split(rows, spread)):
            self._wrong.clear()
            limit = self.layout.batch_limits.get(partition.topic)
            batches = encode(
                records,
                compression=self._compression(partition),
                batch_bytes=self.batch_bytes,
                batch_limit=None if limit is None else limit.batch_bytes,
                beyond_limit=self._note if self.letters is not None else None,
                now_ms=now_ms,
            )
            try:
                for encoded in batches:
                    yield partition, encoded
            except RecordBeyondLimitError as error:
                place = self._place(rows, spread, number, error.row)
                raise RecordError(
                    self._reason(partition, records, error, place),
                    without_values=self._reason(partition, None, error, place),
                ) from None
            for row, wrong in self._wrong:
                place = self._place(rows, spread, number, row)
                assert self.letters is not None, "they were noted for it"
                self.letters.append(self._letter(partition, records, wrong, place))

    def _compression(self, partition: TopicPartition) -> str:
        """Return the compression of a topic's batches: the sink's, unless the topic has its own.

        The broker would compress them again, and hold the result against the limit.
        """
        limit = self.layout.batch_limits.get(partition.topic)
        return (limit and limit.compression) or self.compression

    def _note(self, error: RecordBeyondLimitError) -> None:
        self._wrong.append((error.row, error))

    def _place(self, rows: pa.RecordBatch, spread: int, number: int, row: int) -> Place:
        """Return the origin of a record: the rows are split again, with row numbers."""
        for at, (_, records) in enumerate(self.layout.split(rows, spread, numbered=True)):
            if at == number:
                return place_of(rows, records.column("row")[row].as_py())
        return Place()

    def _reason(
        self,
        partition: TopicPartition,
        records: pa.RecordBatch | None,
        error: RecordBeyondLimitError,
        place: Place,
    ) -> str:
        values = "" if records is None else place.values
        made_of = f", made of {place.words}{values}," if place.words else ""
        key = "" if records is None else f" with key {_shown(records, error.row)}"
        return (
            f"{partition}: a record{key}{made_of} takes {error.size} bytes as a record batch "
            f"(compression {self._compression(partition)}; {error.plain_size} bytes without), and "
            f"the topic takes {error.limit} (its max.message.bytes). Raise that, make the record "
            f"smaller in a map_batches, or compress it better; with mode='deadletter' and a "
            f"dead_letter_topic such records go there, cut"
        )

    def _letter(
        self,
        partition: TopicPartition,
        records: pa.RecordBatch,
        error: RecordBeyondLimitError,
        place: Place,
    ) -> pa.RecordBatch:
        """Return the dead letter of a record: the beginnings of key and value, and our headers."""
        key, value = (_bytes_of(records, name, error.row) for name in ("key", "value"))
        own = None
        if "headers" in records.schema.names:
            own = records.column("headers")[error.row].as_py()
        given = {ERROR_HEADER: self._reason(partition, None, error, place)[:REASON_LENGTH_MAX]}
        if place.topic:
            given[TOPIC_HEADER] = place.topic
            given[PARTITION_HEADER], given[OFFSET_HEADER] = str(place.partition), str(place.offset)
        before = {header["key"]: header["value"] for header in own or ()}
        for name in (TOPIC_HEADER, PARTITION_HEADER, OFFSET_HEADER):
            if name in before and name not in given:  # it was a dead letter before
                given[name] = (before[name] or b"").decode(errors="replace")
        if ERROR_HEADER in before:
            given[ERROR_HEADER] = (before[ERROR_HEADER] or b"").decode(errors="replace")
        given[CUT_HEADER] = (
            f"value {_kept(value)}, key {_kept(key)}, headers of the record 0 of "
            f"{len(before.keys() - given.keys())}"
        )
        headers = [{"key": name, "value": text.encode()} for name, text in given.items()]
        return pa.RecordBatch.from_pydict(
            {
                "key": pa.array([_cut(key)], pa.binary()),
                "value": pa.array([_cut(value)], pa.binary()),
                "headers": pa.array([headers], HEADERS_TYPE),
            }
        )


def _bytes_of(records: pa.RecordBatch, name: str, row: int) -> bytes | None:
    value: bytes | str | None = records.column(name)[row].as_py()
    return value.encode() if isinstance(value, str) else value


def _shown(records: pa.RecordBatch, row: int) -> str:
    key = _bytes_of(records, "key", row)
    return "null" if key is None else repr(_cut(key))[1:]


def _cut(data: bytes | None) -> bytes | None:
    return None if data is None else data[:CUT_BYTES]


def _kept(data: bytes | None) -> str:
    return "null" if data is None else f"{min(len(data), CUT_BYTES)} of {len(data)}"


def letters_of(letters: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return dead letters as a single batch."""
    (batch,) = pa.Table.from_batches(letters).combine_chunks().to_batches()
    return batch


def told_of(letters: pa.RecordBatch) -> str:
    """Return the warning of dead letters that stand for records too large."""
    first = {header["key"]: header["value"] for header in letters.column("headers")[0].as_py()}
    reason = (first[ERROR_HEADER] or b"").decode(errors="replace")
    return (
        f"{letters.num_rows} records larger than their topic takes left to the dead-letter topic, "
        f"cut; the first: {reason}"
    )


# ---- division of a batch that a broker has refused -----------------------------------------------

BATCH_BYTES_MIN = 1024
_NAMES = {number: name for name, number in CODEC_IDS.items()}


def divided(
    data: bytes, topic_partition: TopicPartition, batch_limit: int | None
) -> list[EncodedBatch]:
    """Return the records of a batch in smaller batches, in order, that no producer owns yet.

    Args:
        data: one stamped batch of several records.
        topic_partition: the batch's destination, for errors.
        batch_limit: the largest batch that the topic takes; None: not known, or larger than the
            batch, which the broker has compressed otherwise: then it is cut in two.

    Raises:
        RecordBeyondLimitError: a single record is larger than the limit.
    """
    (header,) = batch_headers(data)
    assert header.record_count > 1, header
    records = decode(
        data,
        topic_partition=topic_partition,
        start_offset=header.base_offset,
        stop_offset=header.last_offset + 1,
        aborted=None,
        headers=True,
    ).batch
    known = batch_limit is not None and batch_limit < len(data)
    pieces = encode(
        records,
        compression=_NAMES[header.compression],
        batch_bytes=max(BATCH_BYTES_MIN, records.nbytes),  # the limits below say where to cut
        batch_records=header.record_count if known else (header.record_count + 1) // 2,
        batch_limit=batch_limit if known else None,
        now_ms=0,  # each has its own time
    )
    return [piece if header.is_transactional else plain(piece) for piece in pieces]


def plain(encoded: EncodedBatch) -> EncodedBatch:
    """Return a batch without the mark of a transaction; the checksum is set at sending."""
    at = CHECKED_FROM + 1  # attributes are two bytes
    mark = bytes([encoded.data[at] & ~TRANSACTIONAL])
    data = b"".join((encoded.data[:at], mark, encoded.data[at + 1 :]))
    return EncodedBatch(encoded.record_count, data)


@dataclass(frozen=True, slots=True)
class NumberedBatch:
    """A batch with a place in the producer's sequence; the bytes never change again."""

    sequence: int
    record_count: int
    data: bytes = field(repr=False)


@dataclass(slots=True)
class PartitionLog:
    """The batches of one partition: written, and still to be written."""

    pending: deque[NumberedBatch] = field(default_factory=deque)
    next_sequence: int = 0
    record_count: int = 0
    first_offset: int | None = None
    last_batch: NumberedBatch | None = None
    last_base_offset: int = -1

    def add(self, producer: Producer, encoded: EncodedBatch) -> None:
        """Assign its sequence number to a batch."""
        data = stamp(encoded.data, producer, self.next_sequence)
        self.pending.append(NumberedBatch(self.next_sequence, encoded.record_count, data))
        self.next_sequence = (self.next_sequence + encoded.record_count) & SEQUENCE_MASK

    def divide(self, producer: Producer, partition: TopicPartition, limit: int | None) -> None:
        """Put smaller batches in the place of those that are beyond a limit, the first in any case.

        Raises:
            RecordBeyondLimitError: a single record is.
        """
        for index, batch in enumerate([*self.pending]):
            self.pending.popleft()
            is_beyond = limit is not None and len(batch.data) > limit
            if batch.record_count == 1 or not (index == 0 or is_beyond):
                self.pending.append(batch)
                continue
            sequence = batch.sequence
            for piece in divided(batch.data, partition, limit):
                data = stamp(piece.data, producer, sequence)
                self.pending.append(NumberedBatch(sequence, piece.record_count, data))
                sequence = (sequence + piece.record_count) & SEQUENCE_MASK

    def acknowledge(self, base_offset: int) -> None:
        """Note that the first pending batch is in the log; at -1 it is not known where."""
        batch = self.pending.popleft()
        if self.last_batch is None:
            self.first_offset = base_offset if base_offset >= 0 else None
        self.record_count += batch.record_count
        self.last_batch, self.last_base_offset = batch, base_offset
