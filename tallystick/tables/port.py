"""The two sides of a kind of table: layouts of files, for tasks, and commits, for the driver."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

PARQUET = ".parquet"


class DataFile(NamedTuple):
    """A file that a commit adds.

    Args:
        path: below the table's folder.
        size: in bytes.
        rows: the number of rows.
        values: of the partition's columns, as the kind of table writes them.
        modified_ms: when it was written, in ms since 1970.
        statistics: JSON, of the kind of table.
    """

    path: str
    size: int
    rows: int
    values: dict[str, str | None]
    modified_ms: int
    statistics: str


class Layout(Protocol):
    """The knowledge of tasks about a kind of table. Picklable."""

    @property
    def folder(self) -> str:
        """The folder of the files, below the table's; "": the table's own."""
        ...

    @property
    def ending(self) -> str:
        """The end of the files' names."""
        ...

    @property
    def partitioned_by(self) -> str:
        """The partition columns, for errors."""
        ...

    def split(self, rows: pa.RecordBatch) -> Iterator[tuple[dict[str, str | None], pa.RecordBatch]]:
        """Yield the values of each partition and its rows, in their order, as a file has them."""
        ...

    def statistics(self, footer: pq.FileMetaData) -> str:
        """Return what a file's footer says, for `DataFile.statistics`."""
        ...


class Table(Protocol):
    """The driver's side of a table, for one sink in one checkpoint.

    `refresh` and `append` raise errors of a library, which are those of `failures`.
    """

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """The errors after which the outcome is unknown for now."""
        ...

    @property
    def staged_bytes_max(self) -> int | None:
        """The size at which due files are published, and removed; None: the table keeps them."""
        ...

    @property
    def table_id(self) -> str:
        """The table's own id, at the last refresh: a table that replaced it has another."""
        ...

    @property
    def newest_epoch(self) -> int:
        """The newest epoch of this sink and checkpoint that the table had at the last refresh."""
        ...

    def refresh(self) -> None:
        """Look at the table."""
        ...

    def problems(self) -> list[str]:
        """Return the reasons why the table, as of the last refresh, cannot be written to."""
        ...

    def append(self, files: Sequence[DataFile], first: int, newest: int) -> bool:
        """Commit files of epochs, and that the newest of them is in the table, as one.

        Returns False, and has changed nothing, if another writer was first.
        """
        ...

    def names(self) -> set[str]:
        """Return the names of the files that the table had at the last refresh, without folders."""
        ...
