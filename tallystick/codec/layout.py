"""The columns that a reader yields: Spark's Kafka columns, or typed columns of the value.

    raw          key, value, topic, partition, offset, timestamp, timestampType [, headers]
    string       the same, with the value as text [, _corrupt_record]
    json, avro   the fields of the value, then key, topic, partition, … [, _corrupt_record]

Names, types and order of the raw form are those of Spark's Kafka source. Where a value becomes
several columns, the Kafka columns may carry a prefix, for values with a field of the same name. A
key that is read becomes columns with a prefix of their own, in the place of `key`; in mode
permissive the bytes of a malformed key are in the last column, `_corrupt_key`.
Kafka's columns other than the value may be left out: each costs Spark a check and a copy per row.

Malformed records go unchanged to a topic of their own, with the reason: key, value, headers and
timestamp stay; but a timestamp too large to be in ms, which brokers refuse, becomes the time of
writing. After the headers of the record come ours, all of them text; a record that was a dead
letter before has them twice, the new ones last.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.codec.formats import DEADLETTER, FAILFAST, PERMISSIVE
from tallystick.codec.values import TextReader, ValueReader
from tallystick.errors import OptionError, RecordError
from tallystick.values import TopicPartition

ERROR_HEADER = "tallystick.error"
TOPIC_HEADER = "tallystick.topic"
PARTITION_HEADER = "tallystick.partition"
OFFSET_HEADER = "tallystick.offset"
OWN_HEADERS = (ERROR_HEADER, TOPIC_HEADER, PARTITION_HEADER, OFFSET_HEADER)

REASON_LENGTH_MAX = 500
"""A parser's message may quote the value; the dead letter must not become much larger than it."""
TIMESTAMP_MS_MAX = (2**63 - 1) // 1000
"""The largest timestamp in ms that fits 64 bits in microseconds."""
_HEADER_TYPE = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])


def dead_letters(
    records: pa.RecordBatch, reasons: Mapping[int, str], topic_partition: TopicPartition
) -> pa.RecordBatch:
    """Return malformed records as rows for the sink: key, value, headers, timestamp in ms.

    Args:
        records: as `records.decoder.decode` makes them, with headers; of one partition.
        reasons: the reason of each malformed record, by its row.
        topic_partition: where they come from.
    """
    bad = records.take(pa.array(list(reasons), pa.int64()))
    offsets = bad.column("offset").to_pylist()
    texts = [
        text
        for reason, offset in zip(reasons.values(), offsets, strict=True)
        for text in (
            reason[:REASON_LENGTH_MAX],
            topic_partition.topic,
            str(topic_partition.partition),
            str(offset),
        )
    ]
    own = pa.StructArray.from_arrays(
        [
            pa.array(OWN_HEADERS * len(reasons), pa.string()),
            pa.array([text.encode(errors="replace") for text in texts], pa.binary()),
        ],
        fields=list(_HEADER_TYPE),
    )
    times = bad.column("timestamp")
    numbers = times.to_numpy()
    fits = (numbers >= -TIMESTAMP_MS_MAX) & (numbers <= TIMESTAMP_MS_MAX)
    return pa.RecordBatch.from_pydict(
        {
            "key": bad.column("key"),
            "value": bad.column("value"),
            "headers": _appended(bad.column("headers"), own),
            "timestamp": pc.if_else(pa.array(fits), times, None),
        }
    )


def _appended(headers: pa.Array, own: pa.Array) -> pa.Array:
    """Append our headers to each list: an equal share of `own` to each."""
    lengths = pc.list_value_length(headers).fill_null(0).to_numpy()
    given = headers.flatten().cast(_HEADER_TYPE)
    count = len(OWN_HEADERS)
    # Where the entries of each list end, its own follow: an order to take the two arrays in.
    places = np.repeat(np.cumsum(lengths), count)
    order = np.insert(np.arange(len(given)), places, len(given) + np.arange(len(own)))
    entries = pa.concat_arrays([given, own]).take(pa.array(order))
    starts = np.concatenate(([0], np.cumsum(lengths + count))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(starts), entries, type=pa.list_(_HEADER_TYPE))


HEADERS_TYPE = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
TIMESTAMP_TYPE = pa.timestamp("us", tz="UTC")
CORRUPT_COLUMN = "_corrupt_record"
CORRUPT_KEY = "_corrupt_key"
_READ_KEY = "columns of the key"
"""The extra column of a decoded record that holds its key, once the key has been read."""

KAFKA_FIELDS = (
    pa.field("key", pa.binary()),
    pa.field("value", pa.binary()),
    pa.field("topic", pa.string()),
    pa.field("partition", pa.int32()),
    pa.field("offset", pa.int64()),
    pa.field("timestamp", TIMESTAMP_TYPE),
    pa.field("timestampType", pa.int32()),
)
METADATA = tuple(field.name for field in KAFKA_FIELDS if field.name != "value")
"""Kafka's columns beside the value, in their order."""
_DDL_TYPES = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key: string, value: binary>>",
}


def ddl(
    value_ddl: str | None,
    *,
    mode: str,
    prefix: str,
    headers: bool,
    text: bool = False,
    metadata: Collection[str] = METADATA,
    key_ddl: str | None = None,
) -> str:
    """Return the schema of the columns as Spark's DDL text.

    Args:
        value_ddl: the fields that a value becomes; None: the value stays one column.
        mode: the treatment of a malformed value.
        prefix: put before the names of the Kafka columns when there is a `value_ddl`.
        headers: whether there is a `headers` column.
        text: without a `value_ddl`, whether the value is read as text.
        metadata: which of Kafka's columns there are beside the value.
        key_ddl: the fields that a key becomes, with their prefix; None: the key stays one column.
    """
    names = [field.name for field in _kafka_fields(metadata)] + (["headers"] if headers else [])
    corrupt = [f"`{CORRUPT_COLUMN}` binary"] if mode == PERMISSIVE else []
    corrupt_key = [f"`{CORRUPT_KEY}` binary"] if mode == PERMISSIVE and key_ddl is not None else []
    keys = []
    if key_ddl is not None:
        names.remove("key")
        keys = [key_ddl]
    if value_ddl is None:
        types = _DDL_TYPES | {"value": "string"} if text else _DDL_TYPES
        columns = [*keys, *(f"`{name}` {types[name]}" for name in names)]
        return ", ".join([*columns, *(corrupt if text else []), *corrupt_key])
    names.remove("value")
    kafka = [f"`{prefix}{name}` {_DDL_TYPES[name]}" for name in names]
    return ", ".join([value_ddl.strip().rstrip(","), *keys, *kafka, *corrupt, *corrupt_key])


@dataclass(frozen=True, slots=True)
class LayoutRows:
    """Decoded records as rows, and the malformed ones.

    Args:
        rows: the well-formed records, in the layout; in mode permissive the malformed ones, too.
        reasons: the reason of each malformed record, by its offset.
        dead_letters: the malformed records as the sink takes them, in mode deadletter; None: none.
        problems: the same reasons, by the row of each record: a faulty producer may give several
            records the same offset.
        source: the records, where somebody may ask for the offset of a row.
    """

    rows: pa.RecordBatch
    reasons: Mapping[int, str] = field(default_factory=dict)
    dead_letters: pa.RecordBatch | None = None
    problems: Mapping[int, str] = field(default_factory=dict)
    source: pa.RecordBatch | None = None


@dataclass(frozen=True)
class Layout:
    """The way from decoded records to the rows that a user sees.

    Args:
        value: the reader of the value; None: the value stays binary.
        mode: what to do about a malformed value, or a timestamp too large for its column: one of
            `formats.MODES`.
        prefix: put before the names of the Kafka columns when a value becomes several.
        headers: whether there is a `headers` column.
        metadata: which of Kafka's columns there are beside the value.
        key: the reader of the key, where `metadata` has the key; None: the key stays binary.
        key_prefix: put before the names of the columns that a key becomes.

    Raises:
        OptionError: a field of the value or the key has the name of another column.
    """

    value: ValueReader | None = None
    mode: str = FAILFAST
    prefix: str = ""
    headers: bool = False
    metadata: tuple[str, ...] = METADATA
    key: ValueReader | None = None
    key_prefix: str = ""

    def __post_init__(self) -> None:
        assert self.key is None or "key" in self.metadata, self.metadata
        names = self.schema.names
        keys = {field.name for field in self._key_fields}
        for name in sorted({name for name in names if names.count(name) > 1}):
            if name in keys:
                raise OptionError(
                    f"column {name!r} is both a field of the key and another column: set "
                    f"key.prefix, e.g. to 'key_', to rename the columns of the key"
                )
            raise OptionError(
                f"column {name!r} is both a field of the value's schema and a column of Kafka's: "
                f"set metadata.prefix, e.g. to 'kafka_', to rename Kafka's columns"
            )

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows that `build` returns."""
        headers = [pa.field("headers", HEADERS_TYPE)] if self.headers else []
        fields = [*_kafka_fields(self.metadata), *headers]
        corrupt = [pa.field(CORRUPT_COLUMN, pa.binary())] if self.mode == PERMISSIVE else []
        keys, corrupt_key = [], []
        if self.key is not None:
            keys, fields = self._key_fields, [field for field in fields if field.name != "key"]
            corrupt_key = [pa.field(CORRUPT_KEY, pa.binary())] if self.mode == PERMISSIVE else []
        if self.value is None:
            return pa.schema([*keys, *fields, *corrupt_key])
        if isinstance(self.value, TextReader):
            (text,) = self.value.schema
            fields = [text if field.name == "value" else field for field in fields]
            return pa.schema([*keys, *fields, *corrupt, *corrupt_key])
        kafka = [f.with_name(self.prefix + f.name) for f in fields if f.name != "value"]
        return pa.schema([*self.value.schema, *keys, *kafka, *corrupt, *corrupt_key])

    @property
    def _key_fields(self) -> list[pa.Field]:
        if self.key is None:
            return []
        return [field.with_name(self.key_prefix + field.name) for field in self.key.schema]

    @property
    def fetches_headers(self) -> bool:
        """True if `build` needs records with headers: a dead letter keeps the record's headers."""
        return self.headers or self.mode == DEADLETTER

    def build(self, records: pa.RecordBatch, topic_partition: TopicPartition) -> LayoutRows:
        """Build rows in the layout from decoded records of a partition.

        Args:
            records: as `records.decoder.decode` makes them, with headers if `fetches_headers`.
            topic_partition: where they come from.

        Raises:
            RecordError: a value is malformed, or a timestamp too large for its column, in mode
                failfast.
        """
        built = self._checked(records, topic_partition)
        return replace(built, source=records)

    def _checked(self, records: pa.RecordBatch, topic_partition: TopicPartition) -> LayoutRows:
        """Return rows of records, after a check of the records' timestamps."""
        beyond = self._beyond(records)
        if beyond is None:
            return self._built(records, topic_partition)
        if self.mode == PERMISSIVE:
            times = pc.if_else(pa.array(beyond), None, records.column("timestamp"))
            at = records.schema.get_field_index("timestamp")
            return self._built(records.set_column(at, "timestamp", times), topic_partition)
        row = int(np.argmax(beyond))
        if self.mode == FAILFAST:
            raise RecordError(
                f"{_place(records, row, topic_partition)}: {_reason(records, row)}. Did the "
                f"producer give micro- or nanoseconds? Name the columns to read in "
                f"metadata.columns, without timestamp; or, with a value.format, choose a mode: "
                f"permissive makes such a timestamp null, dropmalformed leaves the record out and "
                f"counts it; deadletter, in a Pipeline, writes it to a topic of its own."
            )
        built = self._built(records.filter(pa.array(~beyond)), topic_partition)
        reasons = {row: _reason(records, row) for row in np.flatnonzero(beyond).tolist()}
        return self._together(built, np.flatnonzero(~beyond), records, reasons, topic_partition)

    def _together(
        self,
        built: LayoutRows,
        places: NDArray[np.int64],
        records: pa.RecordBatch,
        reasons: Mapping[int, str],
        topic_partition: TopicPartition,
    ) -> LayoutRows:
        """Return the rows built from some of the records, with the problems of all records."""
        others = {int(places[row]): reason for row, reason in built.problems.items()}
        merged = dict(sorted({**others, **reasons}.items()))
        return self._beside(built.rows, records, merged, topic_partition)

    def _beyond(self, records: pa.RecordBatch) -> NDArray[np.bool_] | None:
        """Return a mask of the records with a timestamp too large for the column; None: all fit."""
        if "timestamp" not in self.metadata or not records.num_rows:
            return None
        times = records.column("timestamp").to_numpy()
        if times.min() >= -TIMESTAMP_MS_MAX and times.max() <= TIMESTAMP_MS_MAX:
            return None
        beyond: NDArray[np.bool_] = (times < -TIMESTAMP_MS_MAX) | (times > TIMESTAMP_MS_MAX)
        return beyond

    def _built(self, records: pa.RecordBatch, topic_partition: TopicPartition) -> LayoutRows:
        """Return rows of records with timestamps that are null or fit."""
        if self.key is None:
            return self._valued(records, topic_partition)
        keys = records.column("key")
        parsed = self.key.parse(keys, PERMISSIVE, lambda row: _place(records, row, topic_partition))
        fields = list(parsed.columns.schema)
        columns = pa.StructArray.from_arrays(parsed.columns.columns, fields=fields)
        read = records.append_column(_READ_KEY, columns)
        reasons = {row: f"its key: {reason}" for row, reason in parsed.reasons.items()}
        if self.mode == PERMISSIVE:
            read = read.append_column(CORRUPT_KEY, _corrupt(keys, reasons))
        if not reasons:
            return self._valued(read, topic_partition)
        if self.mode == FAILFAST:
            row, reason = next(iter(reasons.items()))
            raise RecordError(
                f"{_place(records, row, topic_partition)}: {reason}. Read that offset without "
                f"key.format to see all of it. Mode permissive makes such a key nulls with its "
                f"bytes in {CORRUPT_KEY}; dropmalformed leaves the record out and counts it; "
                f"deadletter, in a Pipeline, writes it to a topic of its own."
            )
        good = np.ones(len(keys), np.bool_)
        if self.mode != PERMISSIVE:
            good[list(reasons)] = False
            read = read.filter(pa.array(good))
        built = self._valued(read, topic_partition)
        return self._together(built, np.flatnonzero(good), records, reasons, topic_partition)

    def _valued(self, records: pa.RecordBatch, topic_partition: TopicPartition) -> LayoutRows:
        """Return rows of records with keys already read, where keys are to be read."""
        values = records.column("value")
        if self.value is None:
            columns = self._kafka(records, topic_partition, values)
            return LayoutRows(_batch([*columns, *_corrupt_keys(records)], self.schema))

        def where(row: int) -> str:
            return _place(records, row, topic_partition)

        parsed = self.value.parse(values, self.mode, where)
        kept = records if parsed.rows is None else records.take(pa.array(parsed.rows))
        if isinstance(self.value, TextReader):
            columns = self._kafka(kept, topic_partition, parsed.columns.column("value"))
        else:
            columns = [*parsed.columns.columns, *self._kafka(kept, topic_partition, None)]
        if self.mode == PERMISSIVE:
            columns.append(_corrupt(values, parsed.reasons))
        rows = _batch([*columns, *_corrupt_keys(kept)], self.schema)
        if not parsed.reasons:
            return LayoutRows(rows)
        return self._beside(rows, records, parsed.reasons, topic_partition)

    def _beside(
        self,
        rows: pa.RecordBatch,
        records: pa.RecordBatch,
        reasons: Mapping[int, str],
        topic_partition: TopicPartition,
    ) -> LayoutRows:
        """Return rows with the problems of records and, in mode deadletter, the dead letters."""
        letters = None
        if self.mode == DEADLETTER:
            letters = dead_letters(records, reasons, topic_partition)
        offsets = records.column("offset")
        by_offset = {offsets[row].as_py(): why for row, why in reasons.items()}
        return LayoutRows(rows, by_offset, letters, reasons)

    def _kafka(
        self, records: pa.RecordBatch, topic_partition: TopicPartition, values: pa.Array | None
    ) -> list[pa.Array]:
        """Return the Kafka columns; `values` is the column `value`, None if there is none."""
        names = [field.name for field in _kafka_fields(self.metadata)]
        if self.headers:
            names.append("headers")
        keys = []
        if self.key is not None:
            names.remove("key")
            keys = records.column(_READ_KEY).flatten()
        return keys + [
            values if name == "value" else _kafka_column(name, records, topic_partition)
            for name in names
            if name != "value" or values is not None
        ]


def _kafka_fields(metadata: Collection[str]) -> list[pa.Field]:
    return [field for field in KAFKA_FIELDS if field.name == "value" or field.name in metadata]


def _kafka_column(name: str, records: pa.RecordBatch, topic_partition: TopicPartition) -> pa.Array:
    match name:
        case "topic":
            return pa.repeat(pa.scalar(topic_partition.topic, pa.string()), records.num_rows)
        case "partition":
            return pa.array(np.full(records.num_rows, topic_partition.partition, np.int32))
        case "timestamp":
            return pc.multiply(records.column("timestamp"), 1000).cast(TIMESTAMP_TYPE)
        case _:
            return records.column(name)


def _place(records: pa.RecordBatch, row: int, topic_partition: TopicPartition) -> str:
    return (
        f"topic {topic_partition.topic}, partition {topic_partition.partition}, offset "
        f"{records.column('offset')[row]}"
    )


def _reason(records: pa.RecordBatch, row: int) -> str:
    timestamp = records.column("timestamp")[row]
    return f"its timestamp, {timestamp} ms since 1970, is beyond a timestamp in microseconds"


def _corrupt_keys(records: pa.RecordBatch) -> list[pa.Array]:
    return [records.column(CORRUPT_KEY)] if CORRUPT_KEY in records.schema.names else []


def _corrupt(values: pa.Array, reasons: Mapping[int, str]) -> pa.Array:
    """Return the raw bytes of the malformed values, null elsewhere."""
    malformed = np.zeros(len(values), np.bool_)
    malformed[list(reasons)] = True
    return pc.if_else(pa.array(malformed), values, pa.scalar(None, values.type))


def _batch(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns), schema=schema)
