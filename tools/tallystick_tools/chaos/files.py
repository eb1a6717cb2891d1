"""The Parquet files written by a program, read with pyarrow."""

import json
import os
from pathlib import Path

from pyarrow.parquet import ParquetFile

from tallystick_tools.chaos.cluster import NO_OFFSET, OutputRecord

TOPIC = "files"
"""Stands for the topic in rows of files, followed by the folders below."""


class ParquetFiles:
    """Files below a folder.

    Args:
        folder: The folder given to the program. Spark, Hive and pyarrow do not look into folders
            below whose names begin with an underscore or a dot.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def look(self) -> list[Path] | None:
        """Return the files that readers see, sorted; None: drafts still wait for a commit."""
        # `os.walk`, since `rglob` fails where a folder goes away meanwhile
        walk = os.walk(self._folder)
        paths = [Path(parent, name) for parent, _, names in walk for name in names]
        if any(path.suffix == ".draft" for path in paths):
            return None
        return sorted(
            path
            for path in paths
            if path.suffix == ".parquet"
            and not any(part[0] in "_." for part in path.relative_to(self._folder).parts)
        )

    def rows(self) -> list[OutputRecord]:
        """Return the rows of all files that readers see, as JSON; folders are part of the topic.

        Raises:
            TimeoutError: Drafts still wait for a commit.
        """
        paths = self.look()
        if paths is None:
            raise TimeoutError(f"drafts below {self._folder} still wait for a commit")
        return [
            OutputRecord(
                (Path(TOPIC) / path.parent.relative_to(self._folder)).as_posix(),
                -1,
                NO_OFFSET,
                None,
                json.dumps(row, sort_keys=True, default=str).encode(),
            )
            for path in paths
            for row in ParquetFile(path).read().to_pylist()
        ]

    def close(self) -> None:
        """Do nothing: nothing is open."""
