"""An Iceberg table as pyiceberg reads and commits it, and the features that are refused.

The newest epoch of a sink is a property of the table, set by the commit that appends the files: so
one look at the metadata tells it, and `expire_snapshots` does not remove it. A commit asserts the
branch's snapshot that was there when the property was read, so no other run has committed since.
pyiceberg's own commit is not used: it repeats an append on top of commits that it has not looked at
(https://iceberg.apache.org/spec/#optimistic-concurrency).
"""

import base64
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tallystick.errors import OptionError
from tallystick.iceberg.order import in_order
from tallystick.tables.port import PARQUET, DataFile

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.table.sorting import SortOrder

FORMAT_VERSIONS = (1, 2)
EPOCH_PROPERTY = "tallystick.epoch."
"""The beginning of a property's name; the id of the sink in its checkpoint follows."""
_BOUNDS = ("lower_bounds", "upper_bounds")
_ID = b"PARQUET:field_id"
_ERRORS_BELOW = {
    "sqlalchemy.exc": ("SQLAlchemyError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "thrift.Thrift": ("TException",),
    "google.api_core.exceptions": ("GoogleAPIError",),
}
"""Errors of the clients of catalogs: SQL, Glue and DynamoDB, Hive, BigQuery."""


def failures() -> tuple[type[Exception], ...]:
    """Return the errors of pyiceberg, and of the libraries by which it reaches a catalog and files.

    `OSError` has those of requests, and of pyarrow's file systems.
    """
    from pyiceberg import exceptions

    own = [kind for kind in vars(exceptions).values() if isinstance(kind, type)]
    below = [
        getattr(sys.modules[module], name)
        for module, names in _ERRORS_BELOW.items()
        for name in names
        if module in sys.modules  # as they are if the catalog needs them
    ]
    return (OSError, pa.ArrowException, *own, *below)


def table_problems(table: "Table") -> Iterator[str]:
    """Yield the features of a table that the sink cannot keep, by name."""
    from pyiceberg.table.sorting import SortOrder

    if table.format_version not in FORMAT_VERSIONS:
        yield f"its format version is {table.format_version}: expected 1 or 2"
    schema = table.schema()
    sources = [field.source_id for field in table.spec().fields]
    for field in table.spec().fields:
        name = schema.find_column_name(field.source_id)
        if sources.count(field.source_id) > 1:
            yield f"column {name!r} is in more than one partition field"
        try:
            field.transform.pyarrow_transform(schema.find_type(field.source_id))
        except Exception as error:  # of any kind, and for bucket and truncate an extension lacks
            yield f"partition field {field.name!r} ({field.transform} of {name!r}): {error}"
    no_rows = columns_of(schema).empty_table()
    for key in table.sort_order().fields:
        try:
            in_order(no_rows, SortOrder(key), schema)
        except Exception as error:  # of any kind, as above
            name = schema.find_column_name(key.source_id)
            yield f"sort field {key.transform!r} of {name!r}: {error!r}"


def columns_of(schema: "Schema") -> pa.Schema:
    """Return the columns of a table as Arrow has them, with Iceberg's field ids."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    columns = schema_to_pyarrow(schema, include_field_ids=True)
    return pa.schema([_optional(field).with_nullable(field.nullable) for field in columns])


def _optional(field: pa.Field) -> pa.Field:
    """Return a field that may be null, as may all inside, with ids; large types are plain ones."""
    kind = field.type
    if pa.types.is_struct(kind):
        kind = pa.struct([_optional(kind.field(place)) for place in range(kind.num_fields)])
    elif pa.types.is_map(kind):
        kind = pa.map_(_optional(kind.key_field).with_nullable(False), _optional(kind.item_field))
    elif pa.types.is_large_list(kind) or pa.types.is_list(kind):
        kind = pa.list_(_optional(kind.value_field))
    elif pa.types.is_large_string(kind):
        kind = pa.string()
    elif pa.types.is_large_binary(kind):
        kind = pa.binary()
    ids = {_ID: field.metadata[_ID]} if field.metadata and _ID in field.metadata else None
    return pa.field(field.name, kind, nullable=True, metadata=ids)


@dataclass(frozen=True)
class IcebergLayout:
    """The files of an Iceberg table: in `data`, with all columns and their field ids.

    Args:
        schema_json: the table's schema.
        spec_json: its partition spec.
        order_json: its sort order.
        properties: of the table; they say which columns have statistics.
    """

    schema_json: str
    spec_json: str
    order_json: str
    properties: dict[str, str]

    def __reduce__(self) -> tuple[type["IcebergLayout"], tuple[Any, ...]]:
        """Pickle the texts alone: parts of pyiceberg's statistics are of no use when unpickled."""
        return IcebergLayout, (self.schema_json, self.spec_json, self.order_json, self.properties)

    @cached_property
    def _schema(self) -> "Schema":
        from pyiceberg.schema import Schema

        return Schema.model_validate_json(self.schema_json)

    @cached_property
    def _spec(self) -> "PartitionSpec":
        from pyiceberg.partitioning import PartitionSpec

        return PartitionSpec.model_validate_json(self.spec_json)

    @cached_property
    def _order(self) -> "SortOrder":
        from pyiceberg.table.sorting import SortOrder

        return SortOrder.model_validate_json(self.order_json)

    @cached_property
    def _columns(self) -> pa.Schema:
        return pa.schema([field.with_nullable(True) for field in columns_of(self._schema)])

    @cached_property
    def _of_statistics(self) -> tuple[Any, Any]:
        """The statistics that the table asks for, and the field ids of columns in files."""
        from pyiceberg.io.pyarrow import compute_statistics_plan, parquet_path_to_id_mapping

        plan = compute_statistics_plan(self._schema, self.properties)
        return plan, parquet_path_to_id_mapping(self._schema)

    @property
    def folder(self) -> str:
        """See `Layout.folder`."""
        return "data"

    @property
    def ending(self) -> str:
        """See `Layout.ending`."""
        return PARQUET

    @property
    def partitioned_by(self) -> str:
        """See `Layout.partitioned_by`."""
        return ", ".join(field.name for field in self._spec.fields)

    def split(self, rows: pa.RecordBatch) -> Iterator[tuple[dict[str, str | None], pa.RecordBatch]]:
        """See `Layout.split`; a value is as Iceberg's metadata have it, in Base64."""
        from pyiceberg.conversions import to_bytes
        from pyiceberg.io.pyarrow import _determine_partitions

        rows = pa.RecordBatch.from_arrays(rows.columns, schema=self._columns)
        if self._spec.is_unpartitioned():
            yield {}, rows
            return
        kinds = _kinds(self._spec, self._schema)
        table = pa.Table.from_batches([rows])
        for part in _determine_partitions(self._spec, self._schema, table):
            record = part.partition_key.partition
            values = {
                name: None
                if record[place] is None
                else base64.b64encode(to_bytes(kind, record[place])).decode()
                for place, (name, kind) in enumerate(kinds)
            }
            for batch in part.arrow_table_partition.to_batches():
                yield values, pa.RecordBatch.from_arrays(batch.columns, schema=self._columns)

    @property
    def order(self) -> Callable[[pa.Table], pa.Table] | None:
        """See `FileSettings.order`."""
        return None if self._order.is_unsorted else self._in_order

    def _in_order(self, rows: pa.Table) -> pa.Table:
        return in_order(rows, self._order, self._schema)

    def statistics(self, footer: pq.FileMetaData) -> str:
        """See `Layout.statistics`: what pyiceberg computes of a footer; bounds are in Base64."""
        from pyiceberg.io.pyarrow import data_file_statistics_from_parquet_metadata

        facts = data_file_statistics_from_parquet_metadata(
            footer,
            *self._of_statistics,
        ).to_serialized_dict()
        for name in _BOUNDS:
            facts[name] = {
                column: base64.b64encode(bound).decode() for column, bound in facts[name].items()
            }
        ids = {"spec_id": self._spec.spec_id, "sort_order_id": self._order.order_id or None}
        return json.dumps(facts | ids, separators=(",", ":"))


class IcebergCommits:
    """An Iceberg table as the driver commits to it. See `tables.port.Table`.

    Args:
        table: the table.
        branch: that gets the rows.
        owner: the id of the sink in its checkpoint.
    """

    def __init__(self, table: "Table", branch: str, owner: str) -> None:
        self._table, self._branch = table, branch
        self._property = EPOCH_PROPERTY + owner

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """See `Table.failures`."""
        return failures()

    @property
    def staged_bytes_max(self) -> int | None:
        """See `Table.staged_bytes_max`."""
        return None

    @property
    def table_id(self) -> str:
        """See `Table.table_id`."""
        return str(self._table.metadata.table_uuid)

    @property
    def newest_epoch(self) -> int:
        """See `Table.newest_epoch`."""
        return int(self._table.properties.get(self._property, -1))

    def refresh(self) -> None:
        """See `Table.refresh`."""
        # Not the table's own refresh, which refuses a table that replaced it without naming it.
        self._table = self._table.catalog.load_table(self._table.name())

    def problems(self) -> list[str]:
        """See `Table.problems`."""
        return list(table_problems(self._table))

    def append(self, files: Sequence[DataFile], first: int, newest: int) -> bool:
        """See `Table.append`."""
        from pyiceberg.exceptions import CommitFailedException
        from pyiceberg.table import Transaction
        from pyiceberg.table.update import AssertTableUUID, SetPropertiesUpdate

        table = self._table
        facts: list[dict[str, Any]] = [json.loads(file.statistics) for file in files]
        self._check_specs({one["spec_id"] for one in facts}, f"epochs {first} to {newest}")
        summary = {"tallystick.epochs": f"{first}-{newest}", self._property: str(newest)}
        # Merges manifests if the table says so.
        producer = Transaction(table)._append_snapshot_producer(summary, self._branch)
        for file, facts_of_file in zip(files, facts, strict=True):
            producer.append_data_file(self._described(file, facts_of_file))
        try:
            updates, requirements = producer._commit()
            table.catalog.commit_table(
                table,
                (AssertTableUUID(uuid=table.metadata.table_uuid), *requirements),
                (*updates, SetPropertiesUpdate(updates={self._property: str(newest)})),
            )
        except CommitFailedException:
            producer._clean_all_uncommitted()
            return False
        return True

    def _check_specs(self, written_by: set[int], what: str) -> None:
        now = self._table.spec().spec_id
        if others := written_by - {now}:
            raise OptionError(
                f"Iceberg table {'.'.join(self._table.name())}: {what} were written by the "
                f"partition spec {others.pop()}, and the table has {now} now. Set the old one "
                f"back, start the pipeline and stop it, which publishes them; then change the spec."
            )

    def _described(self, file: DataFile, facts: dict[str, Any]) -> "IcebergFile":
        from pyiceberg.conversions import from_bytes
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
        from pyiceberg.typedef import Record

        table = self._table
        for name, value in facts.items():
            if isinstance(value, dict):
                facts[name] = {
                    int(column): base64.b64decode(one) if name in _BOUNDS else one
                    for column, one in value.items()
                }
        kinds = _kinds(table.specs()[facts["spec_id"]], table.schema())
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=f"{table.location().rstrip('/')}/{file.path}",
            file_format=FileFormat.PARQUET,
            partition=Record(
                *(
                    None if value is None else from_bytes(kind, base64.b64decode(value))
                    for value, kind in ((file.values[name], kind) for name, kind in kinds)
                )
            ),
            file_size_in_bytes=file.size,
            equality_ids=None,
            key_metadata=None,
            **{"sort_order_id": None} | facts,  # files of an earlier release may be due
        )

    def names(self) -> set[str]:
        """See `Table.names`."""
        snapshot = self._table.snapshot_by_name(self._branch)
        if snapshot is None:
            return set()
        tasks = self._table.scan(snapshot_id=snapshot.snapshot_id).plan_files()
        return {task.file.file_path.rpartition("/")[2] for task in tasks}


def _kinds(spec: "PartitionSpec", schema: "Schema") -> list[tuple[str, Any]]:
    """Return the name and type of each partition value."""
    return [(field.name, field.field_type) for field in spec.partition_type(schema).fields]
