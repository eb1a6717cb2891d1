"""What others did to the server: their schemas, their rights, columns with rules of their own."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from postgres_writing import (
    COLUMNS,
    OWNER,
    attempted,
    begun,
    opened,
    own_schema_of,
    place_of,
    prepared,
    rows_of,
    staging_of,
)

from tallystick.epoch.two_phase import Outcome
from tallystick.errors import OptionError, RecordError, RetriableError
from tallystick.postgres import outcome
from tallystick.postgres.connection import idle_connections
from tallystick.postgres.names import application_of
from tests.postgres.real_postgres import PostgresServer
from tests.waiting import wait_for

Create = Callable[..., str]


@pytest.fixture
def role(postgres: PostgresServer) -> Iterator[str]:
    """A role without any rights but to have a schema of its own."""
    postgres.query("CREATE ROLE stranger LOGIN")
    postgres.query("GRANT CREATE ON DATABASE postgres TO stranger")
    yield "stranger"
    idle_connections.close()
    postgres.query("DROP OWNED BY stranger")
    postgres.query("DROP ROLE stranger")


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_an_upsert_refuses_an_identity_that_it_cannot_change(
    postgres: PostgresServer, table: Create, guarantee: str
) -> None:
    name = table("a bigint PRIMARY KEY, b text, n bigint GENERATED ALWAYS AS IDENTITY")
    settings: dict[str, Any] = {"transactions": "staged", "guarantee": guarantee}
    driver = opened(postgres.dsn, name, key=["a"], **settings)

    with pytest.raises(OptionError, match=r"'n' is GENERATED ALWAYS AS IDENTITY.*BY DEFAULT"):
        attempted(driver, rows_of(1).append_column("n", pa.array([7])))
    for committable in attempted(driver, rows_of(1)):
        assert driver.commit(committable) is Outcome.COMMITTED
    assert postgres.query(f"SELECT a, n FROM {name}") == [(1, 1)]
    driver.close()


def test_an_identity_may_be_the_key_or_be_inserted(postgres: PostgresServer, table: Create) -> None:
    name = table("a bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, b text")
    for key, number in ((["a"], 5), (["a"], 5), ([], 6)):
        driver = opened(postgres.dsn, name, key=key, transactions="staged")
        for committable in attempted(driver, rows_of(number)):
            assert driver.commit(committable) is Outcome.COMMITTED
        driver.close()
    assert postgres.query(f"SELECT a FROM {name} ORDER BY a") == [(5,), (6,)]


def test_a_key_that_the_server_computes_is_refused(postgres: PostgresServer, table: Create) -> None:
    name = table("b text, a bigint GENERATED ALWAYS AS (length(b)) STORED UNIQUE")
    driver = opened(postgres.dsn, name, key=["a"], transactions="staged")
    with pytest.raises(OptionError, match="into a generated column"):
        attempted(driver, rows_of(1))
    driver.close()


def test_rights_that_the_commit_lacks_are_seen_before_the_decision(
    postgres: PostgresServer, table: Create, role: str
) -> None:
    """It may insert and update some columns, and not all that the rows have."""
    name = table("a bigint PRIMARY KEY, b text")
    postgres.query(f"GRANT USAGE ON SCHEMA {name.split('.')[0]} TO {role}")
    postgres.query(f"GRANT INSERT, SELECT, UPDATE (a) ON {name} TO {role}")
    dsn = postgres.dsn.replace("user=postgres", f"user={role}")
    driver = opened(dsn, name, key=["a"], transactions="staged")

    with pytest.raises(OptionError, match=r"permission denied for table t.*grant"):
        attempted(driver, rows_of(1))
    assert list(driver.lingering(OWNER)) == []
    postgres.query(f"GRANT UPDATE (b) ON {name} TO {role}")
    for committable in attempted(driver, rows_of(1)):
        assert driver.commit(committable) is Outcome.COMMITTED
    driver.close()


@pytest.fixture
def published(postgres: PostgresServer) -> Iterator[Callable[[], None]]:
    """Publishes what happens in all tables, as change data capture does."""

    def publish() -> None:
        postgres.query("CREATE PUBLICATION everything FOR ALL TABLES")

    yield publish
    postgres.query("DROP PUBLICATION everything")


def test_a_publication_of_all_tables_does_not_stop_commits(
    postgres: PostgresServer, table: Create, published: Callable[[], None]
) -> None:
    """The server lets rows be deleted only from tables that say by what they are known."""
    name = table(COLUMNS)
    driver = opened(postgres.dsn, name, transactions="staged")
    (decided,) = prepared(driver, rows_of(1))
    prepared(driver, rows_of(2), task=1)
    published()

    assert driver.commit(decided) is Outcome.COMMITTED
    for committable in driver.lingering(OWNER):
        driver.abort(committable)
    assert list(driver.lingering(OWNER)) == []
    driver.close()


def test_what_the_commit_cannot_delete_is_seen_before_the_decision(
    postgres: PostgresServer, table: Create, published: Callable[[], None]
) -> None:
    name = table(COLUMNS)
    driver = opened(postgres.dsn, name, transactions="staged")
    staging = staging_of(postgres, name)
    postgres.query(f"ALTER TABLE {staging} REPLICA IDENTITY NOTHING")
    published()

    with pytest.raises(RetriableError, match="replica identity"):
        attempted(driver, rows_of(1))
    assert list(driver.lingering(OWNER)) == []
    driver.close()


@pytest.mark.parametrize(
    "column",
    [
        "timestamptz DEFAULT now() CHECK (c IS NOT NULL)",
        "integer GENERATED BY DEFAULT AS IDENTITY CHECK (c IS NOT NULL)",
        "bigint GENERATED ALWAYS AS (a + 1) STORED CHECK (c IS NOT NULL)",
        "{schema}.filled CHECK (c IS NOT NULL)",
        "{schema}.strict DEFAULT 3",
    ],
)
def test_checks_of_what_the_commit_fills_wait_for_it(
    postgres: PostgresServer, table: Create, column: str
) -> None:
    """Others are checked when rows are staged, as ever."""
    schema = table("x integer", name="first").split(".")[0]
    postgres.query(f"CREATE DOMAIN {schema}.filled AS integer NOT NULL DEFAULT 1")
    postgres.query(f"CREATE DOMAIN {schema}.strict AS integer NOT NULL")
    name = table(f"a bigint CHECK (a < 10), b text, c {column.format(schema=schema)}")
    driver = opened(postgres.dsn, name, transactions="staged")

    with pytest.raises(RecordError, match="t_a_check"):
        attempted(driver, rows_of(10))
    for committable in attempted(driver, rows_of(1)):
        assert driver.commit(committable) is Outcome.COMMITTED
    assert postgres.query(f"SELECT a, c IS NULL FROM {name}") == [(1, False)]
    driver.close()


def test_a_check_that_the_table_lost_is_not_asked_of_staged_rows(
    postgres: PostgresServer, table: Create
) -> None:
    name = table("a bigint CHECK (a < 10), b text CHECK (b <> 'bad')")
    opened(postgres.dsn, name, transactions="staged").close()
    postgres.query(f"ALTER TABLE {name} DROP CONSTRAINT t_a_check")

    driver = opened(postgres.dsn, name, transactions="staged")
    for committable in attempted(driver, rows_of(10)):
        assert driver.commit(committable) is Outcome.COMMITTED
    with pytest.raises(RecordError, match="t_b_check"):
        attempted(driver, pa.record_batch({"a": [1], "b": ["bad"]}))
    driver.close()


def test_a_session_that_ends_meanwhile_has_ended(postgres: PostgresServer, table: Create) -> None:
    """Of a backend that is gone when it is its turn, the server says false."""
    driver = opened(postgres.dsn, table(COLUMNS))
    place = place_of()
    zombies = [driver.plan().begin(place) for _ in range(2)]  # the server asks one after the other
    for zombie in zombies:
        zombie.write(rows_of(1))
    (lingering,) = driver.lingering(OWNER)
    query = "SELECT pid FROM pg_stat_activity WHERE application_name = %s"
    (first,), (second,) = postgres.query(query, application_of(lingering.name))
    driver.close()  # what a kept connection cannot do is tried once more

    os.kill(first, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        aborting = thread.submit(driver.abort, lingering)
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'BackendTermination'"
        wait_for(lambda: postgres.query(waits), [(1,)], "sessions that wait for the lock")
        postgres.query("SELECT pg_terminate_backend(%s, 5000)", second)
        os.kill(first, signal.SIGCONT)
        aborting.result()

    for zombie in zombies:
        with pytest.raises(RetriableError):
            zombie.prepare()
        zombie.abort()
    assert list(driver.lingering(OWNER)) == []
    driver.close()


def test_a_session_whose_role_was_set_is_found_and_ended(
    postgres: PostgresServer, table: Create, role: str
) -> None:
    """The server shows what a session does to who has connected, not to the role set then."""
    name, login = table(COLUMNS), f"{role}_login"
    schema = name.split(".")[0]
    for text in (
        f"CREATE ROLE {login} LOGIN",
        f"GRANT {role} TO {login}",
        f"ALTER ROLE {login} SET role = {role}",
        f"GRANT USAGE ON SCHEMA {schema} TO {role}",
        f"GRANT ALL ON {name} TO {role}",
    ):
        postgres.query(text)
    driver = opened(postgres.dsn.replace("user=postgres", f"user={login}"), name)
    dead = begun(driver, rows_of(1))

    (lingering,) = driver.lingering(OWNER)
    driver.abort(lingering)
    with pytest.raises(RetriableError):
        dead.prepare()
    dead.abort()
    assert list(driver.lingering(OWNER)) == []
    (committable,) = attempted(driver, rows_of(2))
    assert driver.commit(committable) is Outcome.COMMITTED
    driver.close()
    idle_connections.close()
    postgres.query(f"DROP ROLE {login}")


def test_a_session_that_does_not_end_is_not_taken_for_dead(
    postgres: PostgresServer, table: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome, "_END_MS", 100)
    driver = opened(postgres.dsn, table(COLUMNS))
    stubborn = begun(driver, rows_of(1))
    (lingering,) = driver.lingering(OWNER)
    query = "SELECT pid FROM pg_stat_activity WHERE application_name = %s"
    ((pid,),) = postgres.query(query, application_of(lingering.name))

    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RetriableError, match="did not end"):
            driver.abort(lingering)
    finally:
        os.kill(pid, signal.SIGCONT)
    stubborn.abort()
    driver.close()


def test_the_schemas_of_others_do_not_stop_a_recovery(
    postgres: PostgresServer, table: Create, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three registries of earlier builds one is hidden, one has other columns, one is locked."""
    name = table(COLUMNS)
    schema, own = name.split(".")[0], own_schema_of(role)
    postgres.query(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
    postgres.query(f"GRANT INSERT, SELECT ON {name} TO {role}")
    dsn = postgres.dsn.replace("user=postgres", f"user={role} options='-c lock_timeout=100ms'")
    driver = opened(dsn, name, transactions="staged")
    (pending,) = prepared(driver, rows_of(1))
    others = [f"{schema}_{suffix}" for suffix in ("hidden", "odd", "locked")]
    for other in others:
        postgres.query(f"CREATE SCHEMA {other}")
        columns = "x integer" if other.endswith("odd") else f"LIKE {own}.tallystick_staged"
        postgres.query(f"CREATE TABLE {other}.tallystick_staged ({columns})")
        postgres.query(f"ALTER TABLE {other}.tallystick_staged OWNER TO {role}")
    postgres.query(f"GRANT USAGE ON SCHEMA {', '.join(others[1:])} TO {role}")

    with locked(postgres, f"{others[2]}.tallystick_staged"), caplog.at_level(logging.WARNING):
        assert [committable.name for committable in driver.lingering(OWNER)] == [pending.name]
    assert sorted(record.getMessage().split()[1] for record in caplog.records) == [
        f"{other}.tallystick_staged" for other in sorted(others[1:])
    ]
    with (
        locked(postgres, f"{own}.tallystick_staged"),
        pytest.raises(RetriableError, match="55P03"),
    ):
        driver.lingering(OWNER)
    driver.abort(pending)
    driver.close()
    postgres.query(f"DROP SCHEMA {', '.join(others)} CASCADE")


def test_what_others_say_is_staged_is_not_believed(
    postgres: PostgresServer, table: Create, role: str
) -> None:
    """A row of a registry names tables that are deleted from with this pipeline's rights."""
    name = table(COLUMNS)
    schema, own = name.split(".")[0], own_schema_of(role)
    postgres.query(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
    postgres.query(f"GRANT INSERT, SELECT ON {name} TO {role}")
    driver = opened(
        postgres.dsn.replace("user=postgres", f"user={role}"), name, transactions="staged"
    )
    (pending,) = prepared(driver, rows_of(1))
    other = f"{schema}_planted"
    postgres.query(f"CREATE SCHEMA {other}")
    postgres.query(f"CREATE TABLE {other}.tallystick_staged AS TABLE {own}.tallystick_staged")
    postgres.query(f"UPDATE {other}.tallystick_staged SET name = name || '9', staging = '{name}'")
    postgres.query(f"GRANT USAGE ON SCHEMA {other} TO {role}")
    postgres.query(f"GRANT SELECT, DELETE ON {other}.tallystick_staged TO {role}")

    assert [committable.name for committable in driver.lingering(OWNER)] == [pending.name]
    driver.abort(pending)
    driver.close()
    postgres.query(f"DROP SCHEMA {other} CASCADE")


def locked(postgres: PostgresServer, name: str) -> psycopg.Connection:
    """Holds a lock that nobody reads beside, until the block ends."""
    lock_holder = psycopg.connect(postgres.dsn)
    lock_holder.execute(f"LOCK TABLE {name}")
    return lock_holder


def test_a_server_that_keeps_no_more_prepared_ones_names_the_setting() -> None:
    """More tasks than were known at the start, as after a shuffle: to try again is no use."""
    server = PostgresServer(max_prepared_transactions="4")
    try:
        server.query(f"CREATE TABLE t ({COLUMNS})")
        driver = opened(server.dsn, "t")
        for task in range(4):
            prepared(driver, rows_of(task), task=task)
        with pytest.raises(OptionError, match=r"raise max_prepared_transactions.*200 partitions"):
            attempted(driver, rows_of(4), task=4)
        driver.close()
    finally:
        idle_connections.close()
        server.stop()
