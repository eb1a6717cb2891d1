"""The rows of PostgreSQL tables written by a program, read with psycopg."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from tallystick.errors import OptionError
from tallystick_tools.chaos.cluster import NO_OFFSET, OutputRecord

TOPIC = "table"
"""Stands before a table's name, where rows of topics have a topic."""
LOCK_WAIT = "30s"
PREPARED = """SELECT count(*) FROM pg_prepared_xacts
WHERE gid LIKE 'tallystick:%' AND database = current_database()"""
STAGING = """SELECT quote_ident(nspname) || '.' || quote_ident(relname)
FROM pg_class JOIN pg_namespace AS n ON n.oid = relnamespace
WHERE relkind IN ('r', 'p') AND relname LIKE 'tallystick\\_staged%'"""


class Tables:
    """The tables written by a program, which alone may write them or have prepared transactions.

    Args:
        dsn: Of their database, for the program's role or a superuser, who may read, empty and lock
            them, and see what is staged.
        names: As SQL has them: `schema.table`, quoted where need be.

    Raises:
        OptionError: The server cannot be reached, or a table cannot be emptied.
    """

    def __init__(self, dsn: str, names: Sequence[str]) -> None:
        import psycopg

        self._names = tuple(names)
        self._error = psycopg.Error
        try:
            self._connection = psycopg.connect(dsn, autocommit=True)
            self._ask(f"SET lock_timeout = '{LOCK_WAIT}'")
            for name in names:
                self._ask(f"TRUNCATE {name}")
        except psycopg.Error as error:
            raise OptionError(
                f"the output of PostgreSQL, {', '.join(names)}: {error}. Each run begins with "
                f"empty tables: they must exist, no transaction may hold them, and the role must "
                f"be one that may TRUNCATE them."
            ) from error

    def look(self) -> object:
        """Return a value that changes with the rows; None: rows wait for a commit, or no answer."""
        try:
            ((prepared,),) = self._ask(PREPARED)
            staging = [name for (name,) in self._ask(STAGING)]
            if prepared or any(self._ask(f"SELECT 1 FROM {name} LIMIT 1") for name in staging):
                return None
            sums = "count(*), coalesce(sum(hashtextextended(t::text, 0)), 0)"
            return [self._ask(f"SELECT {sums} FROM {name} AS t") for name in self._names]
        except self._error:
            return None

    def rows(self) -> list[OutputRecord]:
        """Return the rows of all tables, as JSON.

        Raises:
            TimeoutError: Rows still wait for a commit.
        """
        if self.look() is None:
            raise TimeoutError(f"rows of {', '.join(self._names)} still wait for a commit")
        return [
            OutputRecord(f"{TOPIC} {name}", -1, NO_OFFSET, None, text.encode())
            for name in self._names
            for (text,) in self._ask(f"SELECT to_jsonb(t)::text FROM {name} AS t")
        ]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _ask(self, text: str) -> list[tuple[Any, ...]]:
        with closing(self._connection.execute(text.encode())) as cursor:
            return [] if cursor.description is None else cursor.fetchall()
