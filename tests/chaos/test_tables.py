"""Rows of PostgreSQL tables as output: what others see, and nothing while a commit is under way."""

import json
from collections.abc import Iterator

import pytest

from tallystick.errors import OptionError
from tallystick_tools.chaos.compare import differences
from tallystick_tools.chaos.tables import Tables
from tallystick_tools.chaos.verify import question_of
from tests.postgres.real_postgres import PostgresServer


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.query('CREATE TABLE "Late" (id bigint, dest text)')
    yield server
    server.stop()


@pytest.fixture
def tables(server: PostgresServer) -> Iterator[Tables]:
    server.query("""INSERT INTO "Late" VALUES (0, 'of an earlier run')""")
    tables = Tables(server.dsn, ['"Late"'])
    yield tables
    tables.close()


def insert(server: PostgresServer, *numbers: int) -> None:
    for number in numbers:
        server.query(f"""INSERT INTO "Late" VALUES ({number}, 'ORD')""")


def test_a_run_begins_with_empty_tables_and_its_rows_are_read(server, tables):
    assert tables.rows() == []
    before = tables.look()
    insert(server, 1, 2)
    assert tables.look() != before
    (one, two) = tables.rows()
    assert (one.topic, json.loads(one.value)) == ('table "Late"', {"id": 1, "dest": "ORD"})
    assert json.loads(two.value)["id"] == 2


def test_a_row_that_is_lost_or_there_twice_is_a_difference(server, tables):
    insert(server, 1, 2)
    expected = tables.rows()
    insert(server, 2)
    (twice,) = differences(expected, tables.rows(), "sequence")
    server.query('DELETE FROM "Late" WHERE id = 1')
    assert (twice.kind, twice.topic) == ("added", 'table "Late"')
    kinds = [difference.kind for difference in differences(expected, tables.rows(), "final")]
    assert kinds == ["lost", "added"]


def test_while_rows_are_prepared_or_staged_a_run_is_not_over(server, tables):
    with server.connect() as writer:
        writer.execute("BEGIN")
        writer.execute("""INSERT INTO "Late" VALUES (3, 'ORD')""")
        writer.execute("PREPARE TRANSACTION 'tallystick:p:s:h:1:0:0:n'")
    assert tables.look() is None
    with pytest.raises(TimeoutError, match="still wait"):
        tables.rows()
    server.query("COMMIT PREPARED 'tallystick:p:s:h:1:0:0:n'")
    assert len(tables.rows()) == 1

    server.query('CREATE TABLE tallystick_staged_late (LIKE "Late")')
    assert tables.look() is not None
    server.query("INSERT INTO tallystick_staged_late VALUES (4, 'ORD')")
    assert tables.look() is None
    server.query("DROP TABLE tallystick_staged_late")


def test_tables_that_cannot_be_emptied_are_named(server):
    with pytest.raises(OptionError, match=r"nowhere.*must exist"):
        Tables(server.dsn, ["nowhere"])
    with pytest.raises(OptionError, match="belong together"):
        question_of(["late"], inputs={}, tables=["late"])
    assert question_of(["late"], inputs={}, tables=["late"], postgres="dsn").job.stores
