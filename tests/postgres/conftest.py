"""One server for all modules; tests that kill one start their own."""

import time
from collections.abc import Callable, Iterator
from itertools import count

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


@pytest.fixture
def table(postgres: PostgresServer) -> Iterator[Callable[[str], str]]:
    """Creates a table of its own in a schema of its own, of which nothing stays."""
    schema = f"s{next(_numbers)}"
    postgres.query(f"CREATE SCHEMA {schema}")

    def create(columns: str, name: str = "t") -> str:
        postgres.query(f"CREATE TABLE {schema}.{name} ({columns})")
        return f"{schema}.{name}"

    yield create
    idle_connections.close()
    for (gid,) in postgres.query("SELECT gid FROM pg_prepared_xacts"):
        postgres.query(f"ROLLBACK PREPARED '{gid}'")
    postgres.query(f"DROP SCHEMA {schema} CASCADE")
    for (own,) in postgres.query(
        "SELECT quote_ident(nspname) FROM pg_namespace WHERE starts_with(nspname, 'tallystick_')"
    ):
        postgres.query(f"DROP SCHEMA {own} CASCADE")


@pytest.fixture(autouse=True)
def _no_connection_is_left(postgres: PostgresServer, table: object) -> Iterator[None]:
    """After each test, when what a process keeps was closed."""
    yield
    idle_connections.close()
    sessions = _sessions(postgres)
    assert not sessions, sessions


def _sessions(postgres: PostgresServer) -> list[str]:
    query = (
        "SELECT query FROM pg_stat_activity "
        "WHERE starts_with(application_name, 'tallystick') AND backend_type = 'client backend'"
    )
    for _ in range(100):
        texts = [text for (text,) in postgres.query(query)]
        if not texts:
            break
        time.sleep(0.02)
    return texts
