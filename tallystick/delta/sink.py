"""The sink that a user writes for a Delta table."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from tallystick.arguments import checked
from tallystick.delta.merging import DeltaMerges, StagedLayout
from tallystick.delta.table import (
    DeltaCommits,
    DeltaLayout,
    add_columns,
    columns_of,
)
from tallystick.epoch.two_phase import Owner, RunFacts
from tallystick.errors import OptionError
from tallystick.files.folder import Folder
from tallystick.host.installed import pip_install
from tallystick.storage.file_storage import shown
from tallystick.storage.places import Place, resolved
from tallystick.tables.columns import column_problems, refuse
from tallystick.tables.port import Layout
from tallystick.tables.publishing import TARGET_FILE_SIZE, Pace
from tallystick.tables.sink import OpenTableSink, open_sink, wrong_settings
from tallystick.tables.writing import TablePlan
from tallystick.text import duration_ms

if TYPE_CHECKING:
    from deltalake import DeltaTable

WHAT = "path of a Delta table"
logger = logging.getLogger(__name__)


@checked
@dataclass(frozen=True, repr=False)
class DeltaSink:
    """A Delta table to append to or to merge into, exactly once, with one commit for many epochs.

    Rows go into the columns of the same names; columns that rows do not have become null. Files lie
    in the table's folder as soon as a task has written them, and count when a commit names them.

    Args:
        table: the table's folder: a local path that all executors see, or a URI: `s3://`, `s3a://`,
            with credentials as for checkpoints.
        commit_every: decided epochs wait up to this long for a commit of the table, in ms or as
            "1 minute"; 0: a commit for each epoch. A stop publishes what waits.
        target_file_size: due files that are smaller are compacted by tasks before the commit, into
            files of this many bytes, or of less where less is due; not with `key`.
        create: create the table where there is none, with the columns of `schema`.
        schema: the columns of the table, checked at the start; those of a new table.
        evolve: columns of `schema` that the table does not have are added to it.
        partition_by: of a table that is created; else it must be the table's own, or be left out.
        key: a row replaces the one with the same values in these columns (an upsert, by MERGE); the
            later epoch counts, and within an epoch the later row of a task: key the rows by the
            same columns before the sink, if several tasks may have rows of one key.
        delete: with `key`, a column of the rows, not of the table, that is true where the row of
            the key is to go.
        compression: none, snappy, gzip, brotli, zstd or lz4.
        uid: names the sink in the pipeline, as long as files may be pending; None: by its place.

    Raises:
        OptionError: a setting is of the wrong type, or contradicts another.
    """

    table: Place
    _: KW_ONLY
    commit_every: str | int = "1 minute"
    target_file_size: int = TARGET_FILE_SIZE
    create: bool = False
    schema: pa.Schema | None = None
    evolve: bool = False
    partition_by: Sequence[str] = ()
    key: Sequence[str] = ()
    delete: str | None = None
    compression: str = "snappy"
    uid: str | None = None

    def __post_init__(self) -> None:
        problems = [*self._wrong_values()]
        try:
            object.__setattr__(self, "table", resolved(self.table, WHAT))
        except OptionError as error:
            problems.insert(0, str(error))
        if problems:
            raise OptionError(f"{self!r}: " + "; ".join(problems))

    def __repr__(self) -> str:
        return f"DeltaSink({shown(self.table)!r}, commit_every={self.commit_every!r})"

    @property
    def kind(self) -> str:
        """See `epoch.two_phase.Sink`."""
        return "delta"

    def check_columns(self, columns: pa.Schema) -> None:
        """Refuse the columns of the last step if the table, where it exists, cannot take them.

        Raises:
            OptionError: a column is unknown, of another type, or missing where it may not be null.
        """
        folder = Folder(str(self.table), "Delta table")
        with _telling(folder):
            table = self._existing(folder)
        wanted = self.schema if table is None else columns_of(table)
        if wanted is None:
            return
        if self.evolve and self.schema is not None:
            new = [field for field in self.schema if field.name not in wanted.names]
            wanted = pa.schema([*wanted, *new])
        refuse(folder.name, list(column_problems(columns, self._with_delete(wanted))))

    def _wrong_values(self) -> Iterable[str]:
        for setting in ("partition_by", "key"):
            names = getattr(self, setting)
            if len({*names}) < len(names):
                yield f"{setting}={list(names)!r}: a column is named twice"
        if self.delete is not None and not self.key:
            yield f"delete={self.delete!r} needs key=, which says which row is to go"
        if self.evolve and self.schema is None:
            yield "evolve=True needs schema=, the columns of the table"
        yield from wrong_settings(
            commit_every=self.commit_every,
            target_file_size=self.target_file_size,
            create=self.create,
            schema=self.schema,
            compression=self.compression,
        )

    def open(self, owner: Owner, facts: RunFacts) -> OpenTableSink:
        """See `epoch.two_phase.Sink`. Creates the table, or adds columns, if told to.

        Raises:
            OptionError: the table does not exist, or cannot be written to as asked.
            RetriableError: the table cannot be read now.
        """
        folder = Folder(str(self.table), "Delta table")
        with _telling(folder):
            table = self._table(folder)
            if self.evolve and self.schema is not None:
                add_columns(table, self.schema)
        by, key = tuple(table.metadata().partition_columns), tuple(self.key)
        columns = columns_of(table)
        layout: Layout = StagedLayout(key, folder.location) if key else DeltaLayout(by)

        def commits(app_id: str) -> DeltaCommits:
            if not key:
                return DeltaCommits(table, app_id)
            return DeltaMerges(table, app_id, folder, key, self.delete)

        problems = commits("").problems()
        if self.partition_by and tuple(self.partition_by) != by:
            problems.append(
                f"partition_by={list(self.partition_by)!r}, and the table is partitioned by "
                f"{list(by)!r}"
            )
        if self.schema is not None:
            problems += column_problems(self.schema, columns)
        problems += [f"it has no column {name!r} of key=" for name in {*key} - {*columns.names}]
        if self.delete in columns.names:
            problems.append(f"delete={self.delete!r} is a column of it: expected one of the rows")
        refuse(folder.name, problems)
        plan = TablePlan(
            folder=folder,
            table_id=str(table.metadata().id),
            columns=self._with_delete(columns),
            layout=layout,
            compression=self.compression,
        )
        pace = Pace(duration_ms("commit_every", self.commit_every), self.target_file_size)
        return open_sink(plan, owner, commits, pace)

    def _with_delete(self, columns: pa.Schema) -> pa.Schema:
        if self.delete is None:
            return columns
        return columns.append(pa.field(self.delete, pa.bool_(), nullable=False))

    def _existing(self, folder: Folder) -> "DeltaTable | None":
        try:
            from deltalake import DeltaTable
        except ImportError:
            raise OptionError(
                f"writing to a Delta table needs deltalake: {pip_install('delta')}"
            ) from None
        url, settings = folder.object_store()
        if not DeltaTable.is_deltatable(url, settings):
            return None
        return DeltaTable(url, storage_options=settings)

    def _table(self, folder: Folder) -> "DeltaTable":
        existing = self._existing(folder)
        if existing is not None:
            return existing
        if not self.create or self.schema is None:
            raise OptionError(
                f"Delta table {folder.location} does not exist. Create it, or say so: "
                f"DeltaSink(…, create=True, schema=pa.schema(…))"
            )
        from deltalake import DeltaTable, Schema

        url, settings = folder.object_store()
        return DeltaTable.create(
            url,
            schema=Schema.from_arrow(self.schema),
            mode="ignore",
            partition_by=list(self.partition_by),
            storage_options=settings,
        )


@contextmanager
def _telling(folder: Folder) -> Iterator[None]:
    """Raise errors of delta-rs as ours."""
    try:
        yield
    except ImportError:
        raise
    except OptionError:
        raise
    except (OSError, ValueError) as error:
        raise folder.failed("reading the table", error) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in {"_internal", "deltalake"}:
            raise
        raise folder.failed("reading the table", error) from None
