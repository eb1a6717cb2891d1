"""The participant on a real server: commits, aborts, what lingers, what is checked and refused."""

import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from postgres_writing import (
    COLUMNS,
    OWN,
    OWNER,
    WAYS,
    attempted,
    begun,
    opened,
    place_of,
    prepared,
    rows_of,
    staging_of,
)

from tallystick.epoch.two_phase import (
    Committable,
    Outcome,
    Owner,
    Place,
    RunFacts,
    Sink,
    TwoPhaseCommitSink,
)
from tallystick.errors import DataLossError, OptionError, RecordError, RetriableError
from tallystick.postgres import driver as driver_module
from tallystick.postgres import own_tables
from tallystick.postgres.connection import connect, idle_connections
from tallystick.postgres.names import NAME_BYTES_MAX, name_of, owner_prefix
from tallystick.postgres.sink import PostgresSink
from tests.postgres.real_postgres import PostgresServer

Create = Callable[..., str]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def name(table: Create) -> str:
    return table(COLUMNS)


@pytest.fixture
def driver(postgres: PostgresServer, name: str, way: str) -> Iterator[TwoPhaseCommitSink]:
    opened_driver = opened(postgres.dsn, name, transactions=way)
    yield opened_driver
    opened_driver.close()


def numbers(postgres: PostgresServer, name: str) -> list[int]:
    return [a for (a,) in postgres.query(f"SELECT a FROM {name} ORDER BY a")]


def test_rows_are_visible_after_the_commit_only(
    postgres: PostgresServer, name: str, driver: TwoPhaseCommitSink
) -> None:
    (committable,) = prepared(driver, rows_of(1, 2), rows_of(3))

    assert numbers(postgres, name) == []
    assert (committable.record_count, committable.begun_ms > 0) == (3, True)
    assert Committable.from_fields(committable.to_fields()) == committable
    assert driver.commit(committable) is Outcome.COMMITTED
    assert numbers(postgres, name) == [1, 2, 3]


def test_commit_and_abort_may_be_repeated(
    postgres: PostgresServer, name: str, driver: TwoPhaseCommitSink
) -> None:
    (committable,) = prepared(driver, rows_of(1))

    assert [driver.commit(committable) for _ in range(3)] == [Outcome.COMMITTED] * 3
    driver.abort(committable)
    assert driver.commit(committable) is Outcome.COMMITTED
    assert numbers(postgres, name) == [1]

    (other,) = prepared(driver, rows_of(2))
    driver.abort(other)
    driver.abort(other)
    assert driver.commit(other) is Outcome.LOST
    assert numbers(postgres, name) == [1]
    assert list(driver.lingering(OWNER)) == []


def test_what_was_given_up_by_hand_is_lost_for_ever(
    postgres: PostgresServer, name: str, way: str, driver: TwoPhaseCommitSink
) -> None:
    (committable,) = prepared(driver, rows_of(1))
    if way == "prepared":
        postgres.query(f"ROLLBACK PREPARED '{committable.name}'")
    else:
        postgres.query(f"DELETE FROM {OWN}.tallystick_staged")

    assert [driver.commit(committable) for _ in range(2)] == [Outcome.LOST] * 2
    assert numbers(postgres, name) == []


def test_what_was_committed_by_hand_is_committed(
    postgres: PostgresServer, name: str, table: Create
) -> None:
    driver = opened(postgres.dsn, name)
    (committable,) = prepared(driver, rows_of(1))
    postgres.query(f"COMMIT PREPARED '{committable.name}'")

    assert driver.commit(committable) is Outcome.COMMITTED
    driver.close()


def test_an_abandoned_attempt_leaves_nothing(
    postgres: PostgresServer, name: str, driver: TwoPhaseCommitSink
) -> None:
    transaction = begun(driver, rows_of(1))
    transaction.abort()
    transaction.abort()

    assert begun(driver, rows_of(2)).prepare()
    (committable,) = driver.lingering(OWNER)
    driver.abort(committable)
    assert numbers(postgres, name) == []


def test_an_abort_after_prepare_harms_neither_it_nor_the_next_one(
    postgres: PostgresServer, name: str, driver: TwoPhaseCommitSink
) -> None:
    """The connection is another transaction's by then."""
    first = begun(driver, rows_of(1))
    (committable,) = first.prepare()
    second = begun(driver, rows_of(2))
    first.abort()
    (other,) = second.prepare()

    assert [driver.commit(pending) for pending in (committable, other)] == [Outcome.COMMITTED] * 2
    assert numbers(postgres, name) == [1, 2]


def test_what_lingers_is_found_by_another_run(
    postgres: PostgresServer, name: str, way: str, driver: TwoPhaseCommitSink
) -> None:
    """Of a task that there is no more, of a run that never completed a checkpoint, of both ways."""
    committables = [
        *prepared(driver, rows_of(1), task=7),
        *prepared(driver, rows_of(2), checkpoint_id=0),
    ]
    driver.close()

    other_way = next(way_tried for way_tried in WAYS if way_tried != way)
    later = opened(postgres.dsn, name, transactions=other_way)
    lingering = list(later.lingering(OWNER))

    assert {
        (committable.name, committable.checkpoint_id, committable.task, committable.sink)
        for committable in lingering
    } == {
        (committable.name, committable.checkpoint_id, committable.task, committable.sink)
        for committable in committables
    }
    assert later.commit(committables[0]) is Outcome.COMMITTED
    for committable in later.lingering(OWNER):
        later.abort(committable)
    assert numbers(postgres, name) == [1]
    assert list(later.lingering(OWNER)) == []
    assert postgres.query(f"SELECT count(*) FROM {OWN}.tallystick_committed") == [(1,)]
    later.close()


def test_what_a_task_has_open_is_found_and_ended(
    postgres: PostgresServer, name: str, driver: TwoPhaseCommitSink
) -> None:
    """The task of a run that is over may be slow, not dead: it must not prepare anything now."""
    zombie = begun(driver, rows_of(1))
    slow = begun(driver, rows_of(2), task=1)
    lingering = list(driver.lingering(OWNER))
    assert sorted(committable.task for committable in lingering) == [0, 1]
    assert "pg_stat_activity" in driver.describe(lingering[0])
    with pytest.raises(RetriableError, match="not prepared yet"):
        driver.commit(lingering[0])
    (late,) = slow.prepare()  # between the look and the abort

    for committable in lingering * 2:
        driver.abort(committable)

    with pytest.raises(RetriableError):
        zombie.prepare()
    zombie.abort()
    assert driver.commit(late) is Outcome.LOST
    assert list(driver.lingering(OWNER)) == []
    assert numbers(postgres, name) == []


def test_owners_do_not_see_each_other(driver: TwoPhaseCommitSink) -> None:
    """Another pipeline, another sink, and a fork: the same pipeline of another checkpoint."""
    others = [
        Owner("late flight", OWNER.sink, OWNER.lineage),
        Owner(OWNER.pipeline, "postgres-10", OWNER.lineage),
        Owner(OWNER.pipeline, OWNER.sink, "another lineage"),
    ]
    for number, owner in enumerate(others):
        prepared(driver, rows_of(number), owner=owner)

    assert list(driver.lingering(OWNER)) == []
    for owner in others:
        (committable,) = driver.lingering(owner)
        driver.abort(committable)


def test_a_changed_table_and_guarantee_still_settle_what_is_pending(
    postgres: PostgresServer, name: str, table: Create, driver: TwoPhaseCommitSink
) -> None:
    first, second = prepared(driver, rows_of(1))[0], prepared(driver, rows_of(2))[0]
    driver.close()

    later = opened(postgres.dsn, table(COLUMNS, name="u"), guarantee="none")
    assert {committable.name for committable in later.lingering(OWNER)} == {first.name, second.name}
    assert later.commit(first) is Outcome.COMMITTED
    later.abort(second)
    assert numbers(postgres, name) == [1]
    later.close()


def test_the_committable_of_another_server_is_not_taken_for_lost(
    postgres: PostgresServer, name: str, driver: TwoPhaseCommitSink
) -> None:
    (committable,) = prepared(driver, rows_of(1))
    fields = committable.to_fields()
    elsewhere = Committable.from_fields(
        {
            **fields,
            "name": committable.name[:-4] + "0000",
            "details": committable.details.replace('"server":"', '"server":"1'),
        }
    )

    with pytest.raises(DataLossError, match="leads to database postgres of server"):
        driver.commit(elsewhere)
    driver.abort(committable)


def test_without_its_tokens_a_committable_is_not_taken_for_lost(
    postgres: PostgresServer, name: str, way: str, driver: TwoPhaseCommitSink
) -> None:
    """Whether somebody dropped them, or a later run made new ones in their place."""
    (committable,) = prepared(driver, rows_of(1))
    driver.commit(committable)
    postgres.query(f"DROP TABLE {OWN}.tallystick_committed")
    with pytest.raises(DataLossError, match=r"tallystick_committed was dropped.* 1 rows"):
        driver.commit(committable)

    later = opened(postgres.dsn, name, transactions=way)
    with pytest.raises(DataLossError, match=r"tallystick_committed was dropped"):
        later.commit(committable)
    later.close()


def test_the_committable_of_another_database_is_not_taken_for_lost(
    postgres: PostgresServer, name: str
) -> None:
    postgres.query("CREATE DATABASE elsewhere")
    elsewhere = postgres.dsn.replace("dbname=postgres", "dbname=elsewhere")
    postgres.query(f"CREATE TABLE t ({COLUMNS})", dsn=elsewhere)
    there = opened(elsewhere, "t")
    (committable,) = prepared(there, rows_of(1))
    here = opened(postgres.dsn, name)

    with pytest.raises(OptionError, match="another database"):
        here.commit(committable)
    assert list(here.lingering(OWNER)) == []
    assert there.commit(committable) is Outcome.COMMITTED
    with pytest.raises(DataLossError, match="database elsewhere"):
        here.commit(committable)
    for driver in (here, there):
        driver.close()


def test_tokens_are_pruned_and_prove_nevertheless(
    postgres: PostgresServer, name: str, driver: TwoPhaseCommitSink
) -> None:
    tokens = f"{OWN}.tallystick_committed"
    by_epoch = {}
    for epoch in [1, 2, 3, 200, 201]:
        (by_epoch[epoch],) = prepared(driver, rows_of(epoch), checkpoint_id=epoch)
    driver.abort(by_epoch[2])
    outcomes = [driver.commit(by_epoch[epoch]) for epoch in by_epoch]

    kept = postgres.query(f"SELECT checkpoint_id, lost FROM {tokens} WHERE task >= 0 ORDER BY 1")
    assert kept == [(2, True), (200, False), (201, False)]
    assert [driver.commit(by_epoch[epoch]) for epoch in by_epoch] == outcomes
    assert outcomes == [Outcome.LOST if epoch == 2 else Outcome.COMMITTED for epoch in by_epoch]
    (late,) = prepared(driver, rows_of(4), checkpoint_id=250)
    (by_epoch[310],) = prepared(driver, rows_of(310), checkpoint_id=310)
    outcomes.append(driver.commit(by_epoch[310]))
    kept = postgres.query(f"SELECT checkpoint_id FROM {tokens} WHERE task >= 0 ORDER BY 1")
    assert kept == [(2,), (310,)]
    assert [driver.commit(by_epoch[epoch]) for epoch in by_epoch] == outcomes
    driver.abort(late)
    assert driver.commit(late) is Outcome.LOST, "it is not after the mark"


def test_two_tasks_do_not_wait_for_each_other(
    postgres: PostgresServer, name: str, driver: TwoPhaseCommitSink
) -> None:
    open_ones = [begun(driver, rows_of(task), task=task) for task in range(4)]
    committables = [committable for one in open_ones for committable in one.prepare()]

    for committable in reversed(committables):
        driver.commit(committable)
    assert numbers(postgres, name) == [0, 1, 2, 3]


def test_an_upsert_takes_the_last_row_of_each_key(postgres: PostgresServer, table: Create) -> None:
    name = table("a bigint, c integer, b text DEFAULT 'new', PRIMARY KEY (c, a)")
    driver = opened(postgres.dsn, name, key=["a", "c"], transactions="staged")

    def rows(*values: tuple[int, int, str]) -> pa.RecordBatch:
        a, c, b = zip(*values, strict=True)
        return pa.record_batch({"a": a, "c": pa.array(c, pa.int32()), "b": b})

    first = prepared(driver, rows((1, 1, "x"), (2, 1, "y"), (1, 1, "z")), rows((2, 1, "w")))
    second = prepared(driver, rows((1, 1, "later"), (1, 2, "other")), checkpoint_id=2)
    for committable in [*first, *second, *first, *second]:
        assert driver.commit(committable) is Outcome.COMMITTED

    rows_written = postgres.query(f"SELECT a, c, b FROM {name} ORDER BY a, c")
    assert rows_written == [(1, 1, "later"), (1, 2, "other"), (2, 1, "w")]
    with pytest.raises(RecordError, match=r"column a .*NOT NULL"):
        attempted(driver, rows((None, 1, "x")))
    driver.close()


@pytest.mark.parametrize("exact", [True, False])
def test_names_may_hold_anything(
    postgres: PostgresServer, table: Create, way: str, exact: bool
) -> None:
    schema = table("a integer").split(".")[0]
    odd = f'"{schema} 100% of ""$1"" {{x}}"'
    postgres.query(f"CREATE SCHEMA {odd}")
    columns = 'a bigint PRIMARY KEY, "%s ""b""" text'
    longest = '"' + "%s'ü" * 12 + '"'
    postgres.query(f"CREATE TABLE {odd}.{longest} ({columns})")
    settings = {} if exact else {"guarantee": "at_least_once", "key": ["a"]}
    if way == "staged" and exact:
        settings = {"key": ["a"]}
    driver = opened(postgres.dsn, f"{odd}.{longest}", transactions=way, **settings)
    rows = rows_of(1, 2).rename_columns(["a", '%s "b"'])

    for committable in prepared(driver, rows):
        assert driver.commit(committable) is Outcome.COMMITTED
        assert driver.commit(committable) is Outcome.COMMITTED

    assert numbers(postgres, f"{odd}.{longest}") == [1, 2]
    driver.close()
    postgres.query(f"DROP SCHEMA {odd} CASCADE")


def test_a_columns_name_or_default_may_hold_what_ends_a_statement(
    postgres: PostgresServer, table: Create
) -> None:
    name = table('a bigint, ";\n" bigint NOT NULL')
    schema = name.split(".")[0]
    opened(postgres.dsn, name, transactions="staged").close()
    postgres.query(f"CREATE DOMAIN {schema}.strict AS text NOT NULL")
    postgres.query(f"ALTER TABLE {name} ADD c {schema}.strict DEFAULT ';\n'")
    driver = opened(postgres.dsn, name, transactions="staged")
    for committable in prepared(driver, pa.record_batch({"a": [1], ";\n": [2]})):
        assert driver.commit(committable) is Outcome.COMMITTED
    assert postgres.query(f"SELECT * FROM {name}") == [(1, 2, ";\n")]
    driver.close()


def test_staged_rows_keep_their_order(postgres: PostgresServer, table: Create) -> None:
    name = table(f"{COLUMNS}, n serial")
    driver = opened(postgres.dsn, name, transactions="staged")
    committables = prepared(driver, rows_of(5, 3), rows_of(4), rows_of(1))
    staging = staging_of(postgres, name)
    first = f"WITH first AS (DELETE FROM {staging} WHERE a = 5 RETURNING *)"
    postgres.query(f"{first} INSERT INTO {staging} SELECT * FROM first")  # it lies last now
    for committable in committables:
        driver.commit(committable)

    assert postgres.query(f"SELECT a FROM {name} ORDER BY n") == [(5,), (3,), (4,), (1,)]
    driver.close()


def test_staged_rows_that_break_a_constraint_stay_until_it_is_mended(
    postgres: PostgresServer, table: Create
) -> None:
    name = table("a bigint PRIMARY KEY, b text CHECK (b <> 'bad')")
    driver = opened(postgres.dsn, name, transactions="staged")
    with pytest.raises(RecordError, match="t_b_check"):
        attempted(driver, pa.record_batch({"a": [1], "b": ["bad"]}))
    postgres.query(f"INSERT INTO {name} VALUES (1)")
    (committable,) = prepared(driver, rows_of(1))

    with pytest.raises(RecordError, match=r"t_pkey.*stays as it is"):
        driver.commit(committable)
    postgres.query(f"DELETE FROM {name}")
    assert driver.commit(committable) is Outcome.COMMITTED
    driver.close()


def test_the_staging_table_follows_the_users(postgres: PostgresServer, table: Create) -> None:
    name = table("a integer")
    driver = opened(postgres.dsn, name, transactions="staged")
    (pending,) = prepared(driver, pa.record_batch({"a": pa.array([1], pa.int32())}))
    driver.close()
    postgres.query(f"ALTER TABLE {name} ALTER a TYPE bigint, ADD b text DEFAULT 'new'")

    later = opened(postgres.dsn, name, transactions="staged")
    for committable in [pending, *prepared(later, rows_of(2**40))]:
        assert later.commit(committable) is Outcome.COMMITTED

    assert postgres.query(f"SELECT * FROM {name} ORDER BY a") == [
        (1, "new"),
        (2**40, f"row {2**40}"),
    ]
    later.close()


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("varchar(10)", "varchar(3)", "'abcdef'"),
        ("char(6)", "char(3)", "'abcdef'"),
        ("text", "varchar(3)", "'abcdef'"),
        ("bit(5)", "bit(3)", "B'10100'"),
        ("bit(3)", "bit(5)", "B'101'"),
        ("varbit", "varbit(3)", "B'10100'"),
        ("numeric(10,4)", "numeric(10,2)", "1.2345"),
        ("numeric", "integer", "1.5"),
        ("double precision", "real", "0.123456789"),
        ("bigint", "double precision", "9007199254740993"),
        ("timestamp", "timestamp(0)", "'2026-01-01 00:00:00.25'"),
        ("timestamp", "date", "'2026-01-01 12:00'"),
        ("interval", "interval(0)", "'0.25 s'"),
        ("text", "integer", "'x'"),
        ("integer", "date", "1"),
        ("timestamp", "timestamptz", "'2026-01-01 12:00'"),
        ("timestamptz", "timestamp", "'2026-01-01 12:00'"),
        ("date", "timestamptz", "'2026-01-01'"),
        ("time", "timetz", "'12:00'"),
    ],
)
def test_rows_that_wait_are_not_cut_by_a_new_type(
    postgres: PostgresServer, table: Create, old: str, new: str, value: str
) -> None:
    """The commit is refused while a value would be another one, and they stay unchanged."""
    name = table(f"a bigint, c {old}")
    driver = opened(postgres.dsn, name, transactions="staged")
    (pending,) = prepared(driver, pa.record_batch({"a": [1], "c": pa.nulls(1)}))
    driver.close()
    staging = staging_of(postgres, name)
    postgres.query(f"UPDATE {staging} SET c = {value}")
    before = postgres.query(f"SELECT c::text FROM {staging}")
    postgres.query(f"ALTER TABLE {name} DROP c, ADD c {new}")

    driver = opened(postgres.dsn, name, transactions="staged")
    # An explicit cast of bits there and back changes none: the insert itself refuses them.
    is_bits = old.startswith("bit(")
    refused = "bit string length" if is_bits else 'tallystick_staged_.*"c".*ALTER the column'
    with pytest.raises(RecordError if is_bits else OptionError, match=refused):
        driver.commit(pending)
    driver.close()
    assert postgres.query(f"SELECT c::text FROM {staging}") == before

    postgres.query(f"ALTER TABLE {name} DROP c, ADD c {old}")
    driver = opened(postgres.dsn, name, transactions="staged")
    assert driver.commit(pending) is Outcome.COMMITTED
    assert postgres.query(f"SELECT c::text FROM {name}") == before
    driver.close()


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("varchar(10)", "varchar(3)", "'abc'"),
        ("varchar(3)", "text", "'abc'"),
        ("numeric(10,2)", "numeric(12,4)", "1.25"),
        ("real", "double precision", "0.1"),
        ("date", "timestamp", "'2026-01-01'"),
        ("json", "jsonb", "'{\"a\": 1}'"),
    ],
)
def test_rows_that_wait_take_a_new_type_that_holds_them(
    postgres: PostgresServer, table: Create, old: str, new: str, value: str
) -> None:
    name = table(f"a bigint, c {old}")
    driver = opened(postgres.dsn, name, transactions="staged")
    (pending,) = prepared(driver, pa.record_batch({"a": [1], "c": pa.nulls(1)}))
    driver.close()
    postgres.query(f"UPDATE {staging_of(postgres, name)} SET c = {value}")
    postgres.query(f"ALTER TABLE {name} ALTER c TYPE {new} USING c::{new}")

    driver = opened(postgres.dsn, name, transactions="staged")
    assert driver.commit(pending) is Outcome.COMMITTED
    assert postgres.query(f"SELECT c = ({value}::{old})::{new} FROM {name}") == [(True,)]
    driver.close()


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize(
    ("setting", "unusual", "kind", "value", "usual"),
    [
        ("DateStyle", "SQL,DMY", "date", date(2026, 2, 1), "2026-02-01"),
        (
            "DateStyle",
            "SQL,DMY",
            "timestamp",
            datetime.fromisoformat("2026-02-01"),
            "2026-02-01 00:00:00",
        ),
        ("IntervalStyle", "iso_8601", "interval", timedelta(hours=1), "01:00:00"),
        ("bytea_output", "escape", "bytea", b"abc", "\\x616263"),
    ],
)
def test_rows_that_wait_become_no_text_of_the_roles_own_form(
    postgres: PostgresServer,
    table: Create,
    setting: str,
    unusual: str,
    kind: str,
    value: object,
    usual: str,
    starts: bool,
) -> None:
    """Whoever altered the table had another form: 01/02/2026 stood beside 2026-02-01."""
    name = table(f"v {kind}")
    dsn = f"{postgres.dsn} options='-c {setting}={unusual}'"
    driver = opened(dsn, name, transactions="staged")
    (pending,) = prepared(driver, pa.record_batch({"v": [value]}))
    postgres.query(f"ALTER TABLE {name} ALTER v TYPE text")
    if starts:
        driver.close()
        driver = opened(dsn, name, transactions="staged")
    with pytest.raises(OptionError, match=f"has rows that wait.*{setting}"):
        driver.commit(pending)
    driver.close()

    driver = opened(postgres.dsn, name, transactions="staged")
    assert driver.commit(pending) is Outcome.COMMITTED
    assert postgres.query(f"SELECT v FROM {name}") == [(usual,)]
    driver.close()


@pytest.fixture
def of_encoding(postgres: PostgresServer) -> Iterator[Callable[[str], str]]:
    """Creates a database of an encoding, and returns how to connect."""

    def create(encoding: str) -> str:
        postgres.query(
            f"CREATE DATABASE encoded ENCODING '{encoding}' TEMPLATE template0 "
            f"LC_COLLATE 'C' LC_CTYPE 'C'"
        )
        return postgres.dsn.replace("dbname=postgres", "dbname=encoded")

    yield create
    idle_connections.close()
    postgres.query("DROP DATABASE encoded WITH (FORCE)")


def test_where_bytes_are_characters_no_blank_is_cut(
    postgres: PostgresServer, of_encoding: Callable[[str], str]
) -> None:
    dsn = of_encoding("SQL_ASCII")
    postgres.query("CREATE TABLE t (v varchar(3))", dsn=dsn)
    driver = opened(dsn, "t")
    with pytest.raises(RecordError, match="too long for 3 characters"):
        attempted(driver, pa.record_batch({"v": ["é  "]}))
    for committable in prepared(driver, pa.record_batch({"v": ["é ", "abc"]})):
        assert driver.commit(committable) is Outcome.COMMITTED
    rows_written = postgres.query("SELECT convert_to(v, 'SQL_ASCII') FROM t", dsn=dsn)
    assert rows_written == [("é ".encode(),), (b"abc",)]
    driver.close()


def test_a_keys_names_may_sort_otherwise_in_the_database(
    postgres: PostgresServer, of_encoding: Callable[[str], str]
) -> None:
    dsn = of_encoding("KOI8R")
    postgres.query('CREATE TABLE t ("в" bigint, "ю" bigint, PRIMARY KEY ("в", "ю"))', dsn=dsn)
    driver = opened(dsn, "t", transactions="staged", key=["ю", "в"])
    for committable in prepared(driver, pa.record_batch({"в": [1], "ю": [2]})):
        assert driver.commit(committable) is Outcome.COMMITTED
    assert postgres.query("SELECT * FROM t", dsn=dsn) == [(1, 2)]
    driver.close()


def test_rows_of_a_lineage_that_was_given_up_do_not_stop_a_start_after_a_new_type(
    postgres: PostgresServer, table: Create
) -> None:
    """Nobody aborts them: no start is of their lineage. They wait in a table of the old shape."""
    name = table("a bigint, c numeric(10,4)")
    retired = replace(OWNER, lineage="given up; it's")
    rows = pa.record_batch({"a": [1], "c": pa.array([Decimal("1.2345")])})
    driver = opened(postgres.dsn, name, retired, transactions="staged")
    (given_up,) = prepared(driver, rows, owner=retired)
    driver.close()
    old = staging_of(postgres, name)
    postgres.query(f"ALTER TABLE {name} ALTER c TYPE numeric(10,2)")

    driver = opened(postgres.dsn, name, transactions="staged")
    (live,) = prepared(driver, pa.record_batch({"a": [2], "c": pa.array([Decimal("2.5")])}))
    assert driver.commit(live) is Outcome.COMMITTED
    assert postgres.query(f"SELECT * FROM {name}") == [(2, Decimal("2.50"))]
    assert postgres.query(f"SELECT a, c FROM {old}") == [(1, Decimal("1.2345"))]
    assert staging_of(postgres, name) != old
    driver.abort(given_up)
    assert postgres.query(f"SELECT * FROM {old}") == []
    driver.close()


def test_a_table_that_changes_while_its_staging_table_is_created_is_not_mistaken(
    postgres: PostgresServer, table: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name tells the shape: under a wrong one no later start would write."""
    name = table(COLUMNS)
    real = own_tables._attributes_not_null

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(own_tables, "_attributes_not_null", real)
        postgres.query(f"ALTER TABLE {name} ADD c integer")
        return real(*arguments)

    monkeypatch.setattr(own_tables, "_attributes_not_null", late)
    with pytest.raises(RetriableError, match="is being changed: start again"):
        opened(postgres.dsn, name, transactions="staged")
    driver = opened(postgres.dsn, name, transactions="staged")
    (committable,) = attempted(driver, pa.record_batch({"c": pa.array([1], pa.int32())}))
    assert driver.commit(committable) is Outcome.COMMITTED
    driver.close()


@pytest.mark.parametrize("added", ["DEFAULT 5", "GENERATED ALWAYS AS (5) STORED", "DEFAULT 1 + 4"])
def test_rows_that_wait_stand_a_new_column_that_is_null_nowhere(
    postgres: PostgresServer, table: Create, added: str
) -> None:
    """Of a domain, which says so itself, and not the column."""
    name = table(COLUMNS)
    schema = name.split(".")[0]
    driver = opened(postgres.dsn, name, transactions="staged")
    (pending,) = prepared(driver, rows_of(1))
    driver.close()
    postgres.query(f"CREATE DOMAIN {schema}.strict AS integer NOT NULL")
    postgres.query(f"ALTER TABLE {name} ADD c {schema}.strict {added}")

    driver = opened(postgres.dsn, name, transactions="staged")
    assert driver.commit(pending) is Outcome.COMMITTED
    for committable in prepared(driver, rows_of(2), checkpoint_id=2):
        assert driver.commit(committable) is Outcome.COMMITTED
    assert postgres.query(f"SELECT a, c FROM {name} ORDER BY a") == [(1, 5), (2, 5)]
    driver.close()


@pytest.mark.parametrize("way", ["staged", "prepared"])
@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("numeric(10,2)", "numeric(10,0)", "1.25"),
        ("text", "varchar(2)", "'ab  '"),
        ("timestamp", "timestamptz", "'2026-01-01 12:00'"),
        ("double precision", "numeric", "0.1::float8 + 0.2::float8"),
    ],
)
def test_rows_are_not_cut_by_a_type_that_changes_before_their_commit(
    postgres: PostgresServer, table: Create, way: str, old: str, new: str, value: str
) -> None:
    """While the pipeline runs, or before a start that does not look at staged rows."""
    name = table(f"a bigint, c {old}")
    dsn = f"{postgres.dsn} options='-c extra_float_digits=0'"
    driver = opened(dsn, name, transactions="staged")
    (pending,) = prepared(driver, pa.record_batch({"a": [1], "c": pa.nulls(1)}))
    staging = staging_of(postgres, name)
    postgres.query(f"UPDATE {staging} SET c = {value}")
    before = postgres.query(f"SELECT c::text FROM {staging}")
    postgres.query(f"ALTER TABLE {name} ALTER c TYPE {new}")
    if way == "prepared":
        driver.close()
        driver = opened(dsn, name, transactions=way)

    with pytest.raises(OptionError, match=r'tallystick_staged_.*column "c".*ALTER the column'):
        driver.commit(pending)
    assert postgres.query(f"SELECT c::text FROM {staging}") == before
    assert postgres.query(f"SELECT * FROM {name}") == []

    postgres.query(f"ALTER TABLE {name} ALTER c TYPE {old}")
    assert driver.commit(pending) is Outcome.COMMITTED
    assert postgres.query(f"SELECT c::text FROM {name}") == before
    driver.close()


def test_rows_go_into_a_type_that_changes_before_their_commit_and_holds_them(
    postgres: PostgresServer, table: Create
) -> None:
    name = table("a bigint, b varchar(9)")
    driver = opened(postgres.dsn, name, transactions="staged")
    (pending,) = prepared(driver, rows_of(1))
    postgres.query(f"ALTER TABLE {name} ALTER a TYPE numeric, ALTER b TYPE text")
    assert driver.commit(pending) is Outcome.COMMITTED
    assert postgres.query(f"SELECT * FROM {name}") == [(1, "row 1")]
    driver.close()


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("bigint", "double precision", pa.scalar(1)),
        ("numeric(10,2)", "numeric(10,0)", pa.scalar(Decimal("1.25"))),
        ("timestamp", "timestamptz", pa.scalar(1, pa.timestamp("us"))),
        ("timestamp", "timestamp(0)", pa.scalar(600_000, pa.timestamp("us"))),
        ("text", 'text COLLATE "C"', pa.scalar("x")),
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"transactions": "staged"},
        {"transactions": "staged", "key": ["a"]},
        {"guarantee": "at_least_once"},
        {"guarantee": "at_least_once", "key": ["a"]},
        {"guarantee": "none"},
    ],
)
def test_the_bytes_of_one_type_are_not_taken_for_those_of_another(
    postgres: PostgresServer, table: Create, settings: dict, old: str, new: str, value: pa.Scalar
) -> None:
    """A binary COPY made 5e-324 of 1 where a bigint became a double precision during the run."""
    name = table(f"a bigint PRIMARY KEY, c {old}")
    rows = pa.record_batch({"a": [1], "c": pa.array([value.as_py()], value.type)})
    driver = opened(postgres.dsn, name, **settings)
    postgres.query(f"ALTER TABLE {name} ALTER c TYPE {new}")
    with pytest.raises(OptionError, match=r'"c" is .* now, and was .* Start again'):
        attempted(driver, rows)
    assert postgres.query(f"SELECT * FROM {name}") == []

    if settings == {"transactions": "staged"}:  # another pipeline's start alters the shared table
        postgres.query(f"ALTER TABLE {name} ALTER c TYPE {old}")
        postgres.query(f"ALTER TABLE {staging_of(postgres, name)} ALTER c TYPE {new}")
        with pytest.raises(OptionError, match=r'"c" is .* now, and was .* Start again'):
            attempted(driver, rows)
    driver.close()


@pytest.mark.parametrize("key", [[], ["a"]])
def test_at_least_once_shows_rows_when_the_task_is_through(
    postgres: PostgresServer, table: Create, key: list[str]
) -> None:
    """An epoch that runs again writes its rows again; with a key they are the same rows."""
    name = table("a bigint PRIMARY KEY, b text" if key else COLUMNS)
    driver = opened(postgres.dsn, name, key=key, guarantee="at_least_once")
    for text in ("first", "again"):
        assert list(prepared(driver, rows_of(1, 2, text=text), rows_of(2, text=text))) == []

    texts = [b for (b,) in postgres.query(f"SELECT b FROM {name} ORDER BY b")]
    assert texts == ["again 1", "again 2"] if key else len(texts) == 6
    assert list(driver.lingering(OWNER)) == []
    driver.close()


def test_none_goes_on_without_what_cannot_be_written(
    postgres: PostgresServer, table: Create, caplog: pytest.LogCaptureFixture
) -> None:
    name = table("a bigint CHECK (a < 10), b text")
    driver = opened(postgres.dsn, name, guarantee="none")
    with caplog.at_level(logging.WARNING):
        assert list(prepared(driver, rows_of(1, 2), rows_of(3, 10, 4), rows_of(5))) == []

    assert numbers(postgres, name) == [1, 2, 5]
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("sink postgres-1: 3 rows of epoch 1, task 0 are lost")
    assert "t_a_check" in message
    driver.close()


def test_a_sink_is_a_value(postgres: PostgresServer, name: str) -> None:
    sink = PostgresSink(postgres.dsn, table=name, key=["a"], transactions="staged")
    checked: Sink = sink

    assert checked.kind == "postgres"
    assert pickle.loads(pickle.dumps(sink)) == sink  # noqa: S301  its own
    assert hash(sink) == hash(PostgresSink(**sink.__dict__ | {"key": ("a",)}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key": "a"}, r"expected a list, \[text, …\]: \['a'\]"),
        ({"key": ["a"]}, 'transactions="staged".*locks'),
        ({"key": ["a", "a"], "transactions": "staged"}, "twice"),
        ({"transactions": "2pc"}, "expected 'prepared' or 'staged'"),
        ({"guarantee": "perhaps"}, "exactly_once"),
        ({"table": ""}, "table is empty"),
    ],
)
def test_settings_are_checked_before_anything_starts(settings: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PostgresSink("host=x", **{"table": "t", **settings})


def test_a_table_that_cannot_work_is_refused(postgres: PostgresServer, table: Create) -> None:
    name = table("a bigint, b text")
    schema = name.split(".")[0]
    postgres.query(f"CREATE VIEW {schema}.v AS SELECT * FROM {name}")
    postgres.query(f"CREATE UNIQUE INDEX ON {name} (a) WHERE b IS NULL")
    staged = {"transactions": "staged"}
    for settings, message in [
        ({"table": f"{schema}.nothing"}, "is not there"),
        ({"table": f"{schema}.no such"}, "is not there"),
        ({"table": f"{schema}.v"}, "is a view"),
        ({"table": name, "key": ["a"], **staged}, "no unique index over exactly"),
        ({"table": name, "key": ["c"], **staged}, "no column 'c'"),
    ]:
        with pytest.raises(OptionError, match=message):
            opened(postgres.dsn, **settings)


def test_too_few_prepared_transactions_are_refused(postgres: PostgresServer, name: str) -> None:
    sink = PostgresSink(postgres.dsn, table=name)

    with pytest.raises(OptionError, match=r'is 32, and 17 tasks need 34.*transactions="staged"'):
        sink.open(OWNER, RunFacts(tasks=17))


@pytest.fixture
def writer(postgres: PostgresServer, name: str) -> Iterator[str]:
    """The connection string of a role that may insert into the table, and nothing else."""
    for text in (
        'CREATE ROLE "Writer" LOGIN',
        f'GRANT USAGE ON SCHEMA {name.split(".")[0]} TO "Writer"',
        f'GRANT INSERT ON {name} TO "Writer"',
    ):
        postgres.query(text)
    yield postgres.dsn.replace("user=postgres", "user=Writer")
    idle_connections.close()
    postgres.query('DROP OWNED BY "Writer"')
    postgres.query('DROP ROLE "Writer"')


def test_a_role_that_may_not_write_is_told_what_it_lacks(
    postgres: PostgresServer, name: str, writer: str
) -> None:
    postgres.query(f'REVOKE USAGE ON SCHEMA {name.split(".")[0]} FROM "Writer"')
    with pytest.raises(OptionError, match="permission denied for schema"):
        opened(writer, name)
    postgres.query(f'GRANT USAGE ON SCHEMA {name.split(".")[0]} TO "Writer"')
    postgres.query(f'REVOKE INSERT ON {name} FROM "Writer"')
    with pytest.raises(OptionError, match="GRANT INSERT"):
        opened(writer, name)


@pytest.mark.parametrize("remedy", ["CREATE SCHEMA", "GRANT"])
def test_a_role_that_may_not_create_its_schema_is_told_what_the_owner_runs(
    postgres: PostgresServer, name: str, writer: str, remedy: str
) -> None:
    with pytest.raises(OptionError, match="may not create the schema") as refused:
        opened(writer, name)
    text, statement = str(refused.value).split("\n", 1)
    assert statement == 'CREATE SCHEMA "tallystick_Writer" AUTHORIZATION "Writer";'
    grant = 'GRANT CREATE ON DATABASE postgres TO "Writer"'
    assert grant in text
    postgres.query(statement if remedy == "CREATE SCHEMA" else grant)

    driver = opened(writer, name)
    for committable in prepared(driver, rows_of(1)):
        assert driver.commit(committable) is Outcome.COMMITTED
    driver.close()
    with pytest.raises(OptionError, match=f"GRANT SELECT ON {name.split('.')[0]}"):
        opened(writer, name, transactions="staged")
    postgres.query(f'GRANT SELECT ON {name} TO "Writer"')
    driver = opened(writer, name, transactions="staged")
    for committable in prepared(driver, rows_of(2)):
        assert driver.commit(committable) is Outcome.COMMITTED
    driver.close()
    assert numbers(postgres, name) == [1, 2]


def test_a_guarantee_that_proves_nothing_needs_no_schema(
    postgres: PostgresServer, name: str, writer: str
) -> None:
    driver = opened(writer, name, guarantee="at_least_once")
    assert list(prepared(driver, rows_of(1))) == []
    assert list(driver.lingering(OWNER)) == []
    assert numbers(postgres, name) == [1]
    driver.close()


@pytest.mark.parametrize("length", [51, 52, 53, 63])
def test_a_role_with_a_long_name_has_a_schema_of_its_own(
    postgres: PostgresServer, name: str, length: int
) -> None:
    roles = [f"{'r' * (length - 1)}{number}" for number in range(2)]
    for role in roles:
        postgres.query(f"CREATE ROLE {role} LOGIN SUPERUSER")
        driver = opened(postgres.dsn.replace("user=postgres", f"user={role}"), name)
        for committable in prepared(driver, rows_of(length)):
            assert driver.commit(committable) is Outcome.COMMITTED
        driver.close()
    idle_connections.close()
    query = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, 'tallystick_r')"
    schemas = {schema for (schema,) in postgres.query(query)}
    assert len(schemas) == 2
    assert all(len(schema) <= 63 for schema in schemas)
    for role in roles:
        postgres.query(f"DROP OWNED BY {role}")
        postgres.query(f"DROP ROLE {role}")


def test_a_role_without_what_recovery_needs_is_told_at_the_start(
    postgres: PostgresServer, name: str
) -> None:
    function = "FUNCTION pg_logical_emit_message(boolean, text, text{})"
    is_new = postgres.query("SHOW server_version_num")[0][0] >= "170000"
    function = function.format(", boolean" if is_new else "")
    schema = name.split(".")[0]
    postgres.query("CREATE ROLE recoverer LOGIN")
    postgres.query(f"GRANT ALL ON SCHEMA {schema} TO recoverer")
    postgres.query(f"GRANT ALL ON {name} TO recoverer")
    postgres.query("GRANT CREATE ON DATABASE postgres TO recoverer")
    postgres.query(f"REVOKE EXECUTE ON {function} FROM PUBLIC")
    dsn = postgres.dsn.replace("user=postgres", "user=recoverer")
    try:
        with pytest.raises(OptionError, match="GRANT EXECUTE ON FUNCTION pg_logical_emit_message"):
            opened(dsn, name)
        postgres.query(f"GRANT EXECUTE ON {function} TO recoverer")
        opened(dsn, name).close()
    finally:
        postgres.query(f"GRANT EXECUTE ON {function} TO PUBLIC")
        postgres.query("DROP OWNED BY recoverer")
        postgres.query("DROP ROLE recoverer")


def test_a_lock_is_not_waited_for_without_end(postgres: PostgresServer, name: str) -> None:
    driver = opened(f"{postgres.dsn} options='-c lock_timeout=200ms'", name)
    with postgres.connect() as other, other.transaction():
        other.execute(f"LOCK TABLE {name}")
        with pytest.raises(RetriableError, match="55P03"):
            attempted(driver, rows_of(1))
    driver.close()


def test_a_session_waits_for_the_disk_and_for_nothing_else_without_end(
    postgres: PostgresServer,
) -> None:
    names = [
        "synchronous_commit",
        "default_transaction_isolation",
        "default_transaction_read_only",
        "lock_timeout",
        "statement_timeout",
        "idle_in_transaction_session_timeout",
    ]
    lax = "-c synchronous_commit=off -c default_transaction_isolation=serializable"
    lax += " -c default_transaction_read_only=on -c lock_timeout=7s"
    with connect(f"{postgres.dsn} options='{lax}'") as connection:
        columns = ", ".join(f"current_setting('{setting}')" for setting in names)
        settings = connection.execute(f"SELECT {columns}").fetchone()

    assert settings == ("on", "read committed", "off", "7s", "1h", "1h")


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_what_failed_before_is_not_handed_over(
    postgres: PostgresServer, table: Create, guarantee: str
) -> None:
    """The server answers COMMIT of a failed transaction by a quiet ROLLBACK."""
    name = table("a bigint CHECK (a < 10), b text")
    driver = opened(postgres.dsn, name, guarantee=guarantee)
    transaction = begun(driver, rows_of(1))
    transaction.write(rows_of(99))
    failed: list[Exception] = []
    for _ in range(2):
        with pytest.raises((RecordError, RetriableError)) as caught:
            transaction.prepare()
        failed.append(caught.value)

    assert isinstance(failed[0], RecordError)
    assert isinstance(failed[1], RetriableError)
    transaction.abort()
    driver.close()


def test_a_cut_connection_is_made_again(
    postgres: PostgresServer, name: str, driver: TwoPhaseCommitSink
) -> None:
    (first,) = prepared(driver, rows_of(1))
    cut = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE starts_with(application_name, 'tallystick')"
    )
    assert postgres.query(cut)

    (second,) = prepared(driver, rows_of(2))
    assert [driver.commit(committable) for committable in (first, second)] == [
        Outcome.COMMITTED
    ] * 2
    transaction = begun(driver, rows_of(3))
    assert postgres.query(cut)
    with pytest.raises(RetriableError):
        transaction.prepare()
    transaction.abort()
    assert numbers(postgres, name) == [1, 2]


@pytest.mark.parametrize(
    ("timeout", "used"), [("", 10), ("0", 100), ("-1", 100), ("30", 30), ("300", 100)]
)
def test_a_connection_is_waited_for_as_the_dsn_says_and_no_longer_than_allowed(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, timeout: str, used: int
) -> None:
    """Zero is no limit, as for libpq: not the shortest."""
    seen: dict[str, Any] = {}
    real = psycopg.connect

    def watched(*args: Any, **settings: Any) -> Any:
        seen.update(settings)
        return real(*args, **settings)

    monkeypatch.setattr(psycopg, "connect", watched)
    dsn = f"{postgres.dsn} connect_timeout={timeout}" if timeout else postgres.dsn
    connect(dsn, 100.0).close()
    assert seen["connect_timeout"] == used


def test_a_time_that_is_no_number_is_an_option_error(postgres: PostgresServer) -> None:
    for patience_s in (None, 100.0):
        with pytest.raises(OptionError, match=r"connect_timeout='soon'.*seconds"):
            connect(f"{postgres.dsn} connect_timeout=soon", patience_s)


def test_secrets_are_seen_nowhere(postgres: PostgresServer, name: str) -> None:
    dsn = f"{postgres.dsn} password=hunter2"
    sink = PostgresSink(dsn, table=name)
    driver = sink.open(OWNER, RunFacts())
    (committable,) = prepared(driver, rows_of(1))
    shown = [repr(sink), repr(driver.plan()), repr(committable), driver.describe(committable)]
    driver.abort(committable)
    driver.close()

    for wrong in (
        "host=/nowhere/hunter2 password=hunter2",
        "postgresql://me:hunter2@localhost:1/x",
        "postgresql://me:hunter2@[::1/x",
        "host=x password='hunter2",
        "hunter2",
        f"{dsn} user=nobody_hunter2",
        "host=localhost password=hunter2 port=hunter2",
    ):
        with pytest.raises((OptionError, RetriableError)) as caught:
            PostgresSink(wrong, table=name).open(OWNER, RunFacts())
        shown += traceback.format_exception(caught.value, limit=0)

    assert not [message for message in shown if "hunter2" in message]


def test_names_are_short_enough_and_tell_whose_they_are() -> None:
    long = Owner("päth/" * 100, "s" * 200, "l" * 100)
    name = name_of(Place(long, 2**63, 10**9, 10**9, "f" * 100))

    assert len(name.encode()) <= NAME_BYTES_MAX
    assert name.startswith(owner_prefix(long))
    assert not name.startswith(owner_prefix(Owner("päth/" * 101, "s" * 200, "l" * 100)))
    assert not name.startswith(owner_prefix(Owner(long.pipeline, "s" * 201, long.lineage)))
    assert owner_prefix(Owner("a:b", "c", "")) != owner_prefix(Owner("a", "b:c", ""))


def test_a_prune_that_fails_does_not_undo_the_commit(
    postgres: PostgresServer,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(*_: object) -> None:
        raise RetriableError("not now")

    monkeypatch.setattr(driver_module, "prune", failing)
    driver = opened(postgres.dsn, name)
    (committable,) = prepared(driver, rows_of(1), checkpoint_id=1000)

    assert driver.commit(committable) is Outcome.COMMITTED
    assert "old tokens were not deleted: not now" in caplog.text
    driver.close()


def test_the_plan_travels_to_the_tasks(
    postgres: PostgresServer, name: str, driver: TwoPhaseCommitSink
) -> None:
    there = pickle.loads(pickle.dumps(driver.plan())).begin(place_of())  # noqa: S301  its own
    there.write(rows_of(1))
    (committable,) = there.prepare()

    assert driver.commit(committable) is Outcome.COMMITTED
    assert numbers(postgres, name) == [1]
