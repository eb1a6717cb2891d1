"""Upserts into a Delta table: the rows of due epochs, the last one of each key, by one MERGE.

Files of rows wait in the hidden folder, since none of them is a file of the table: a publish reads
them in the order of epochs, keeps the last row of each key, and hands these to delta-rs. The MERGE
is one commit, and carries the application transaction as an append does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tallystick.delta.table import DeltaCommits
from tallystick.errors import RecordError
from tallystick.files.folder import HIDDEN, Folder
from tallystick.tables.port import PARQUET, DataFile

if TYPE_CHECKING:
    from deltalake import DeltaTable

STAGED = f"{HIDDEN}/staged"
STAGED_BYTES_MAX = 64 << 20
"""The size of due files at which they are published: a MERGE has their rows in memory."""


@dataclass(frozen=True)
class StagedLayout:
    """Files of rows that wait for a MERGE.

    Args:
        key: the columns that say which row of the table is meant.
        location: of the table, for errors.
    """

    key: tuple[str, ...]
    location: str

    @property
    def folder(self) -> str:
        """See `Layout.folder`."""
        return STAGED

    @property
    def ending(self) -> str:
        """See `Layout.ending`."""
        return PARQUET

    @property
    def partitioned_by(self) -> str:
        """See `Layout.partitioned_by`."""
        return ""

    def split(self, rows: pa.RecordBatch) -> Iterator[tuple[dict[str, str | None], pa.RecordBatch]]:
        """See `Layout.split`: one file for all.

        Raises:
            RecordError: a column of the key is null, which no row of the table could match.
        """
        for name in self.key:
            if nulls := rows[name].null_count:
                raise RecordError(
                    f"Delta table {self.location}: column {name!r} of the key is null in {nulls} "
                    f"rows: filter them out, or name other columns in key="
                )
        yield {}, rows

    def statistics(self, footer: pq.FileMetaData) -> str:
        """See `Layout.statistics`: nobody asks for them."""
        return ""


class DeltaMerges(DeltaCommits):
    """A Delta table as the driver merges rows into it. See `tables.port.Table`.

    Args:
        table: the table.
        app_id: of the application transactions.
        folder: of the table.
        key: the columns that say which row of the table is meant.
        delete: a column of the rows that says that the row goes; None: no row does.
    """

    def __init__(
        self,
        table: "DeltaTable",
        app_id: str,
        folder: Folder,
        key: tuple[str, ...],
        delete: str | None,
    ) -> None:
        super().__init__(table, app_id)
        self._folder, self._key, self._delete = folder, key, delete

    @property
    def staged_bytes_max(self) -> int | None:
        """See `Table.staged_bytes_max`."""
        return STAGED_BYTES_MAX

    def problems(self) -> list[str]:
        """See `Table.problems`."""
        settings = self._table.metadata().configuration
        problems = super().problems()
        for setting, meaning in (
            ("delta.appendOnly", "it only takes appends"),
            ("delta.enableDeletionVectors", "it has deletion vectors"),
        ):
            if settings.get(setting, "false").lower() == "true":
                problems.append(f"key= rewrites rows, and {meaning} ({setting}=true)")
        return problems

    def append(self, files: Sequence[DataFile], first: int, newest: int) -> bool:
        """See `Table.append`: merge instead."""
        from deltalake.exceptions import CommitFailedError

        rows = last_of_each_key(self._rows(files), self._key)
        columns = {f'"{name}"': f's."{name}"' for name in rows.column_names if name != self._delete}
        merge = self._table.merge(
            rows,
            " AND ".join(f't."{name}" = s."{name}"' for name in self._key),
            source_alias="s",
            target_alias="t",
            commit_properties=self._commit_properties(first, newest),
            post_commithook_properties=self._afterwards(),
        )
        kept = None
        if self._delete is not None:
            kept = f'NOT s."{self._delete}"'
            merge = merge.when_matched_delete(f's."{self._delete}"')
        merge = merge.when_matched_update(columns, kept)
        try:
            merge.when_not_matched_insert(columns, kept).execute()
        except CommitFailedError:
            return False
        return True

    def _rows(self, files: Sequence[DataFile]) -> pa.Table:
        return pa.concat_tables(
            pq.read_table(pa.BufferReader(self._folder.get(file.path))) for file in files
        )

    def names(self) -> set[str]:
        """See `Table.names`: no staged file is ever one of the table's."""
        return set()


def last_of_each_key(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return the last row of each key, in the order of the rows."""
    place = "\0place"  # no column has this name
    places = pa.array(np.arange(rows.num_rows))
    last = rows.select(list(key)).append_column(place, places).group_by(list(key))
    kept = last.aggregate([(place, "max")])[f"{place}_max"]
    return rows.take(np.sort(kept.to_numpy()))
