"""One server for all modules; tests that kill one start their own."""

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psycopg
import pytest

from tallystick.postgres.connection import idle_connections
from tests.postgres.real_postgres import PostgresServer

_numbers = count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A running server with prepared transactions."""
    server = PostgresServer()
    yield server
    server.stop()


class Housekeeping:
    """A connection beside those of tests, for what is done before and after each of them.

    A session of the server's for each statement would cost more than the statements.
    """

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._connection = server.connect()

    def query(self, text: str) -> list[Any]:
        """The rows of one statement; once more if a test had ended all sessions."""
        try:
            cursor = self._connection.execute(text, prepare=False)
        except psycopg.OperationalError:
            self.close()
            self._connection = self._server.connect()
            cursor = self._connection.execute(text, prepare=False)
        return [] if cursor.description is None else cursor.fetchall()

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="session")
def housekeeping(postgres: PostgresServer) -> Iterator[Housekeeping]:
    connection = Housekeeping(postgres)
    yield connection
    connection.close()


@pytest.fixture
def table(housekeeping: Housekeeping) -> Iterator[Callable[[str], str]]:
    """Creates a table of its own in a schema of its own, of which nothing stays."""
    schema = f"s{next(_numbers)}"
    housekeeping.query(f"CREATE SCHEMA {schema}")

    def create(columns: str, name: str = "t") -> str:
        housekeeping.query(f"CREATE TABLE {schema}.{name} ({columns})")
        return f"{schema}.{name}"

    yield create
    idle_connections.close()
    for (gid,) in housekeeping.query("SELECT gid FROM pg_prepared_xacts"):
        housekeeping.query(f"ROLLBACK PREPARED '{gid}'")
    housekeeping.query(f"DROP SCHEMA {schema} CASCADE")
    for (own,) in housekeeping.query(
        "SELECT quote_ident(nspname) FROM pg_namespace WHERE starts_with(nspname, 'tallystick_')"
    ):
        housekeeping.query(f"DROP SCHEMA {own} CASCADE")


@pytest.fixture(autouse=True)
def _no_connection_is_left(housekeeping: Housekeeping, table: object) -> Iterator[None]:
    """After each test, when what a process keeps was closed."""
    yield
    idle_connections.close()
    sessions = _sessions(housekeeping)
    assert not sessions, sessions


def _sessions(housekeeping: Housekeeping) -> list[str]:
    query = (
        "SELECT query FROM pg_stat_activity "
        "WHERE starts_with(application_name, 'tallystick') AND backend_type = 'client backend'"
    )
    for _ in range(100):
        texts = [text for (text,) in housekeeping.query(query)]
        if not texts:
            break
        time.sleep(0.02)
    return texts
