"""The columns that a reader yields: Spark's Kafka columns, or typed ones from the value.

    raw    key, value, topic, partition, offset, timestamp, timestampType [, headers]
    json   the fields of the schema, then key, topic, partition, … [, _corrupt_record]

Names, types and order of the raw form are those of Spark's Kafka source. With a value format the
Kafka columns may carry a prefix, for values that have a field of the same name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.errors import OptionError
from tallystick.json_format import FAILFAST, PERMISSIVE
from tallystick.source.json_reader import check_schema, parse_json
from tallystick.topic_partition import TopicPartition

HEADERS_TYPE = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
TIMESTAMP_TYPE = pa.timestamp("us", tz="UTC")
CORRUPT_COLUMN = "_corrupt_record"

KAFKA_FIELDS = (
    pa.field("key", pa.binary()),
    pa.field("value", pa.binary()),
    pa.field("topic", pa.string()),
    pa.field("partition", pa.int32()),
    pa.field("offset", pa.int64()),
    pa.field("timestamp", TIMESTAMP_TYPE),
    pa.field("timestampType", pa.int32()),
)
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


def ddl(value_ddl: str | None, *, mode: str, prefix: str, headers: bool) -> str:
    """The schema of the columns as Spark's DDL text; `value_ddl` are the fields of a JSON value."""
    names = [field.name for field in KAFKA_FIELDS] + (["headers"] if headers else [])
    if value_ddl is None:
        return ", ".join(f"`{name}` {_DDL_TYPES[name]}" for name in names)
    names.remove("value")
    kafka = [f"`{prefix}{name}` {_DDL_TYPES[name]}" for name in names]
    corrupt = [f"`{CORRUPT_COLUMN}` binary"] if mode == PERMISSIVE else []
    return ", ".join([value_ddl.strip().rstrip(","), *kafka, *corrupt])


@dataclass(frozen=True)
class Layout:
    """How decoded records become the rows that a user sees.

    Args:
        value_schema: the fields of the JSON value; None: the value stays binary.
        mode: what to do about a malformed value: failfast, permissive, dropmalformed.
        prefix: put before the names of the Kafka columns when there is a value schema.
        headers: whether there is a `headers` column.

    Raises:
        OptionError: a field has a type that the JSON reader lacks, or the name of another column.
    """

    value_schema: pa.Schema | None = None
    mode: str = FAILFAST
    prefix: str = ""
    headers: bool = False

    def __post_init__(self) -> None:
        if self.value_schema is not None:
            check_schema(self.value_schema)
        names = self.schema.names
        for name in sorted({name for name in names if names.count(name) > 1}):
            raise OptionError(
                f"column {name!r} is both a field of the value's schema and a column of Kafka's: "
                f"set metadata.prefix, e.g. to 'kafka_', to rename Kafka's columns"
            )

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of what `build` returns."""
        headers = [pa.field("headers", HEADERS_TYPE)] if self.headers else []
        fields = [*KAFKA_FIELDS, *headers]
        if self.value_schema is None:
            return pa.schema(fields)
        kafka = [f.with_name(self.prefix + f.name) for f in fields if f.name != "value"]
        corrupt = [pa.field(CORRUPT_COLUMN, pa.binary())] if self.mode == PERMISSIVE else []
        return pa.schema([*self.value_schema, *kafka, *corrupt])

    def build(self, records: pa.RecordBatch, topic_partition: TopicPartition) -> pa.RecordBatch:
        """Rows in this layout from decoded records of one partition.

        Raises:
            RecordError: a value is malformed, in mode failfast.
        """
        if self.value_schema is None:
            return _batch(self._kafka(records, topic_partition, keep_value=True), self.schema)
        offsets = records.column("offset")

        def where(row: int) -> str:
            return (
                f"topic {topic_partition.topic}, partition {topic_partition.partition}, offset "
                + str(offsets[row])
            )

        values = records.column("value")
        parsed = parse_json(values, self.value_schema, self.mode, where)
        if parsed.rows is not None:
            records = records.take(pa.array(parsed.rows))
        columns = [*parsed.columns.columns, *self._kafka(records, topic_partition, False)]
        if self.mode == PERMISSIVE:
            columns.append(_corrupt(values, parsed.malformed))
        return _batch(columns, self.schema)

    def _kafka(
        self, records: pa.RecordBatch, topic_partition: TopicPartition, keep_value: bool
    ) -> list[pa.Array]:
        rows = records.num_rows
        micros = records.column("timestamp").to_numpy() * 1000
        columns = [
            records.column("key"),
            *([records.column("value")] if keep_value else []),
            pa.repeat(pa.scalar(topic_partition.topic, pa.string()), rows),
            pa.array(np.full(rows, topic_partition.partition, np.int32)),
            records.column("offset"),
            pa.array(micros, pa.int64()).cast(TIMESTAMP_TYPE),
            records.column("timestampType"),
        ]
        return [*columns, records.column("headers")] if self.headers else columns


def _corrupt(values: pa.Array, malformed: pa.Array | None) -> pa.Array:
    """The raw bytes of the malformed values, null elsewhere."""
    if malformed is None:
        return pa.nulls(len(values), pa.binary())
    return pc.if_else(malformed, values, pa.scalar(None, values.type))


def _batch(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns), schema=schema)
