"""DuckDB, the reader that shares no code with those who write tables: one for all of a process.

To make a database for each look took 20 ms of a core, most of it for threads without work. It keeps
nothing of files: each look reads what is there.
"""

from functools import cache
from typing import Any

import duckdb


@cache
def _database() -> duckdb.DuckDBPyConnection:
    return duckdb.connect(config={"threads": 1, "enable_external_file_cache": False})


def query(text: str, *arguments: Any) -> duckdb.DuckDBPyConnection:
    """Return a cursor over the rows of a query."""
    return _database().cursor().execute(text, list(arguments))
