"""The rows of Delta and Iceberg tables written by a program, read with delta-rs and pyiceberg."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tallystick_tools.chaos.cluster import NO_OFFSET, OutputRecord

CATALOG = "catalog.db"
"""The SQLite catalog of Iceberg tables, in the folder given to the program."""


class LakeTables:
    """Tables below a folder.

    Args:
        folder: The folder given to the program.
        delta: The names of Delta tables' folders in it.
        iceberg: The names of Iceberg tables, with namespaces, in the catalog in it.
    """

    def __init__(self, folder: Path, delta: Sequence[str], iceberg: Sequence[str]) -> None:
        self._folder, self._delta, self._iceberg = folder, delta, iceberg

    def look(self) -> object:
        """Return the versions of the tables; None: decided epochs wait, or a table is not there."""
        try:
            delta = [self._delta_table(name) for name in self._delta]
            iceberg = [self._iceberg_table(name) for name in self._iceberg]
        except Exception:  # of two libraries, while a table is made
            return None
        versions = [table.version() for table in delta]
        places = [table.metadata_location for table in iceberg]
        # Looked for last: what was due and is not any more is in a version seen later.
        if any(self._folder.rglob("_tallystick/*/*/*/due/*")):
            return None
        return versions, places

    def rows(self) -> list[OutputRecord]:
        """Return the rows of all tables, as JSON.

        Raises:
            TimeoutError: Decided epochs still wait for a commit.
        """
        if self.look() is None:
            raise TimeoutError(f"tables in {self._folder} are missing, or wait for a commit")
        return [
            OutputRecord(
                topic,
                -1,
                NO_OFFSET,
                None,
                json.dumps(row, sort_keys=True, default=str).encode(),
            )
            for topic, rows in self._tables()
            for row in rows
        ]

    def _tables(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        for name in self._delta:
            yield f"delta {name}", self._delta_table(name).to_pyarrow_table().to_pylist()
        for name in self._iceberg:
            yield f"iceberg {name}", self._iceberg_table(name).scan().to_arrow().to_pylist()

    def _delta_table(self, name: str) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(str(self._folder / name))

    def _iceberg_table(self, name: str) -> Any:
        from pyiceberg.catalog import load_catalog

        catalog = {"type": "sql", "uri": f"sqlite:///{self._folder / CATALOG}"}
        return load_catalog("default", **catalog).load_table(name)

    def close(self) -> None:
        """Do nothing: nothing is open."""
