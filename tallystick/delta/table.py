"""A Delta table as delta-rs reads and commits it, and the features that are refused.

The newest epoch of a sink is the version of an application transaction, whose app id is that of the
sink in its checkpoint. Delta refuses a commit whose app id another commit wrote since the table was
read; it does not compare versions.

What this sink writes are plain files with plain columns. A table that asks its writers for more is
refused by the feature's name: delta-rs commits `AddAction`s without looking at the files.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tallystick.files.writing import bare_field, is_possible, split_by_values
from tallystick.tables.port import PARQUET, DataFile

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties

WRITER_FEATURES = {
    "appendOnly",
    "changeDataFeed",  # a commit that only adds files needs no files of changes
    "checkConstraints",
    "columnMapping",
    "deletionVectors",
    "generatedColumns",
    "identityColumns",
    "invariants",
    "timestampNtz",
    "variantType",
}
"""The features that this sink keeps, or whose use in the table is refused by name."""
_COLUMN_RULES = {
    "delta.generationExpression": "a generated column",
    "delta.identity.start": "an identity column",
    "delta.invariants": "a column with an invariant",
    "CURRENT_DEFAULT": "a column with a default",
}
_CONSTRAINT = "delta.constraints."
_LEGACY_VERSION_MAX = 6
"""Up to this writer version, features follow from the version and are in use by settings only."""
CHECKPOINT_INTERVAL = 100
"""The commits from one checkpoint of the log to the next, in tables that do not say it."""
TEXT_MAX = 32
"""A bound that is longer is left out of the statistics; Spark cuts texts at this length."""
INDEXED_COLUMNS = 32
"""The columns with statistics, as many as `delta.dataSkippingNumIndexedCols` says by default."""


def table_problems(table: "DeltaTable") -> Iterator[str]:
    """Yield the features of a table that the sink cannot keep, by name."""
    protocol, metadata = table.protocol(), table.metadata()
    settings = metadata.configuration
    if protocol.min_writer_version > _LEGACY_VERSION_MAX:
        for feature in sorted({*(protocol.writer_features or ())} - WRITER_FEATURES):
            yield f"it has the writer feature {feature!r}"
    mapping = settings.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        yield f"it has column mapping (delta.columnMapping.mode={mapping})"
    for name, value in settings.items():
        if name.startswith(_CONSTRAINT):
            yield f"it has the CHECK constraint {name.removeprefix(_CONSTRAINT)!r} ({value})"
    if "delta.setTransactionRetentionDuration" in settings:
        yield (
            "it forgets application transactions (delta.setTransactionRetentionDuration), by which "
            "a commit is known to have happened"
        )
    for field in table.schema().fields:
        for rule, meaning in _COLUMN_RULES.items():
            if rule in field.metadata:
                yield f"{field.name!r} is {meaning} ({field.metadata[rule]})"
    for name in metadata.partition_columns:
        kind = columns_of(table).field(name).type
        if not is_possible(kind):
            yield f"partition column {name!r} is {kind}: expected text, integers, booleans or dates"
    if len(metadata.partition_columns) == len(table.schema().fields):
        yield "all its columns are partition columns"


def columns_of(table: "DeltaTable") -> pa.Schema:
    """Return the columns of a table as Arrow has them."""
    return pa.schema(table.schema().to_arrow())


def add_columns(table: "DeltaTable", columns: pa.Schema) -> None:
    """Add the columns that a table does not have, as columns that may be null."""
    from deltalake import Field, Schema

    missing = [bare_field(field) for field in columns if field.name not in columns_of(table).names]
    if missing:
        fields: list[Any] = [
            Field(field.name, field.type, nullable=True)
            for field in Schema.from_arrow(pa.schema(missing)).fields
        ]
        table.alter.add_columns(fields)
        table.update_incremental()


@dataclass(frozen=True)
class DeltaLayout:
    """The files of a Delta table: in its own folder, without the partition columns.

    Args:
        partition_by: the table's partition columns.
    """

    partition_by: tuple[str, ...]

    @property
    def folder(self) -> str:
        """See `Layout.folder`."""
        return ""

    @property
    def ending(self) -> str:
        """See `Layout.ending`."""
        return PARQUET

    @property
    def partitioned_by(self) -> str:
        """See `Layout.partitioned_by`."""
        return ", ".join(self.partition_by)

    def split(self, rows: pa.RecordBatch) -> Iterator[tuple[dict[str, str | None], pa.RecordBatch]]:
        """See `Layout.split`; null and "" are both None."""
        if not self.partition_by:
            yield {}, rows
            return
        for values, part in split_by_values(rows, self.partition_by):
            texts = (value or None for value in values)
            yield dict(zip(self.partition_by, texts, strict=True)), part

    def statistics(self, footer: pq.FileMetaData) -> str:
        """See `Layout.statistics`."""
        return statistics(footer)


class DeltaCommits:
    """A Delta table as the driver commits to it. See `tables.port.Table`.

    Args:
        table: the table.
        app_id: of the application transactions.
    """

    def __init__(self, table: "DeltaTable", app_id: str) -> None:
        self._table, self._app_id = table, app_id

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """See `Table.failures`."""
        from deltalake.exceptions import DeltaError

        return (OSError, DeltaError)

    @property
    def staged_bytes_max(self) -> int | None:
        """See `Table.staged_bytes_max`."""
        return None

    @property
    def table_id(self) -> str:
        """See `Table.table_id`."""
        return str(self._table.metadata().id)

    @property
    def newest_epoch(self) -> int:
        """See `Table.newest_epoch`."""
        version = self._table.transaction_version(self._app_id)
        return -1 if version is None else int(version)

    def refresh(self) -> None:
        """See `Table.refresh`."""
        self._table.update_incremental()

    def problems(self) -> list[str]:
        """See `Table.problems`."""
        return list(table_problems(self._table))

    def append(self, files: Sequence[DataFile], first: int, newest: int) -> bool:
        """See `Table.append`."""
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import AddAction

        added = [
            AddAction(file.path, file.size, file.values, file.modified_ms, True, file.statistics)
            for file in files
        ]
        try:
            self._table.create_write_transaction(
                added,
                "append",
                self._table.schema(),
                partition_by=list(self._table.metadata().partition_columns),
                commit_properties=self._commit_properties(first, newest),
                post_commithook_properties=self._afterwards(),
            )
        except CommitFailedError:
            return False
        return True

    def _commit_properties(self, first: int, newest: int) -> "CommitProperties":
        from deltalake import CommitProperties, Transaction

        return CommitProperties(
            custom_metadata={"tallystick.epochs": f"{first}-{newest}"},
            app_transactions=[Transaction(self._app_id, newest)],
        )

    def _afterwards(self) -> "PostCommitHookProperties":
        """Return the work after a commit: old logs are looked for with a checkpoint alone.

        That lists the whole log: in a table of 10,000 commits it takes longer than the commit.
        """
        from deltalake import PostCommitHookProperties

        settings = self._table.metadata().configuration
        interval = int(settings.get("delta.checkpointInterval", CHECKPOINT_INTERVAL))
        has_checkpoint = (self._table.version() + 1) % interval == 0
        return PostCommitHookProperties(
            create_checkpoint=True,
            cleanup_expired_logs=None if has_checkpoint else False,
        )

    def names(self) -> set[str]:
        """See `Table.names`."""
        return {path.rpartition("/")[2] for path in self._table.file_uris()}


def statistics(footer: pq.FileMetaData) -> str:
    """Return what a file's footer says about columns without fields, as Delta's log has it.

    Left out are bounds of floats, which a NaN makes wrong, of decimals, and of long texts.
    """
    bounds: dict[str, list[Any]] = {}
    nulls: dict[str, int] = {}
    for place in range(min(footer.num_columns, INDEXED_COLUMNS)):
        groups = [footer.row_group(n).column(place) for n in range(footer.num_row_groups)]
        name = groups[0].path_in_schema if groups else ""
        column = footer.schema.column(place)
        if not groups or column.max_repetition_level or column.max_definition_level > 1:
            continue
        if "." in name or any(group.statistics is None for group in groups):
            continue
        facts = [group.statistics for group in groups]
        if all(fact.has_null_count for fact in facts):
            nulls[name] = sum(fact.null_count for fact in facts)
        limits = [(fact.min, fact.max) for fact in facts if fact.has_min_max]
        with_rows = [fact for fact in facts if fact.num_values]
        if limits and len(limits) == len(with_rows):
            lowest, highest = min(low for low, _ in limits), max(high for _, high in limits)
            texts = _bound(lowest, is_upper=False), _bound(highest, is_upper=True)
            if None not in texts:
                bounds[name] = list(texts)
    return json.dumps(
        {
            "numRecords": footer.num_rows,
            "minValues": {name: low for name, (low, _) in bounds.items()},
            "maxValues": {name: high for name, (_, high) in bounds.items()},
            "nullCount": nulls,
        },
        separators=(",", ":"),
    )


def _bound(value: Any, *, is_upper: bool) -> int | str | None:
    """Return a bound as JSON has it in Delta; None: it is left out."""
    if type(value) is int:
        return value
    if type(value) is str and len(value) <= TEXT_MAX:
        return value
    if isinstance(value, datetime):
        at = value if value.tzinfo else value.replace(tzinfo=UTC)
        us = round((at - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1_000_000)
        ms = math.ceil(us / 1000) if is_upper else us // 1000
        text = datetime.fromtimestamp(ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        suffix = "Z" if value.tzinfo else ""
        return f"{text}.{ms % 1000:03d}{suffix}" if 1900 <= value.year <= 9000 else None
    if type(value) is date:
        return value.isoformat()
    return None
