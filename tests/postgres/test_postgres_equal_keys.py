"""Upserts: which keys are equal, for the rows of an epoch, for the index and after an ALTER."""

from collections.abc import Callable

import psycopg
import pyarrow as pa
import pytest
from postgres_writing import opened, place_of, prepared, staging_of

from tallystick import OptionError, RecordError
from tallystick.epoch.two_phase import Outcome
from tests.postgres.real_postgres import PostgresServer

Create = Callable[..., str]
UPSERTS = {"transactions": "staged", "key": ["k"]}


def rows_of(*keys: object) -> pa.RecordBatch:
    return pa.record_batch({"k": pa.array(keys), "v": pa.array(range(len(keys)), pa.int64())})


def created_collation(postgres: PostgresServer, schema: str) -> str:
    """One to which equal is more than the same bytes, or, without ICU, one that says so."""
    name = f"{schema}.ci"
    try:
        postgres.query(
            f"CREATE COLLATION {name} (provider=icu, locale='und-u-ks-level2', deterministic=false)"
        )
    except psycopg.errors.FeatureNotSupported:
        postgres.query(f'CREATE COLLATION {name} FROM "C"')
        postgres.query(
            "UPDATE pg_collation SET collisdeterministic = false WHERE oid = %s::regcollation", name
        )
    return name


def collation_of(postgres: PostgresServer, table: str, column: str) -> str:
    ((collation,),) = postgres.query(
        "SELECT attcollation::regcollation::text FROM pg_attribute "
        "WHERE attrelid = %s::regclass AND attname = %s",
        table,
        column,
    )
    return str(collation)


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        ("text COLLATE {ci}", 'text COLLATE "C"', ["A", "a"]),
        ("text COLLATE {ci}", "text", ["A", "a"]),
        ("text", "text COLLATE {ci}", ["A"]),
        ("varchar(10) COLLATE {ci}", "varchar(20) COLLATE {ci}", ["A"]),
    ],
)
def test_staged_rows_take_a_new_collation(
    postgres: PostgresServer, table: Create, old: str, new: str, keys: list[str], waiting: bool
) -> None:
    """Else keys are told apart by another rule than the index has, and one of two is dropped."""
    name = table("v bigint")
    ci = created_collation(postgres, name.split(".")[0])
    postgres.query(f"ALTER TABLE {name} ADD k {old.format(ci=ci)} PRIMARY KEY")
    driver = opened(postgres.dsn, name, **UPSERTS)
    pending = list(prepared(driver, rows_of(*keys))) if waiting else []
    driver.close()
    postgres.query(f"ALTER TABLE {name} ALTER k TYPE {new.format(ci=ci)}")
    postgres.query(f"ALTER TABLE {name} ADD c text COLLATE {ci}")

    driver = opened(postgres.dsn, name, **UPSERTS)
    staging = staging_of(postgres, name)
    for column in ("k", "c"):
        assert collation_of(postgres, staging, column) == collation_of(postgres, name, column)
    pending = pending or list(prepared(driver, rows_of(*keys)))
    assert [driver.commit(committable) for committable in pending] == [Outcome.COMMITTED]
    assert sorted(k for (k,) in postgres.query(f"SELECT k FROM {name}")) == keys
    driver.close()


@pytest.mark.parametrize(
    ("old", "new", "keys", "kept"),
    [
        ("double precision", "text", [0.0, -0.0], ["-0", "0"]),
        ("text COLLATE {ci}", 'text COLLATE "C"', ["A", "a"], ["A", "a"]),
    ],
)
def test_keys_are_equal_as_the_table_has_it_at_the_commit(
    postgres: PostgresServer, table: Create, old: str, new: str, keys: list, kept: list[str]
) -> None:
    name = table("v bigint")
    ci = created_collation(postgres, name.split(".")[0])
    postgres.query(f"ALTER TABLE {name} ADD k {old.format(ci=ci)} PRIMARY KEY")
    driver = opened(postgres.dsn, name, **UPSERTS)
    (pending,) = prepared(driver, rows_of(*keys))
    postgres.query(f"ALTER TABLE {name} ALTER k TYPE {new}")

    assert driver.commit(pending) is Outcome.COMMITTED
    assert sorted(k for (k,) in postgres.query(f"SELECT k FROM {name}")) == kept
    driver.close()


@pytest.mark.parametrize(
    ("kind", "index"),
    [
        ("text", "k COLLATE {ci}"),
        ("text COLLATE {ci}", 'k COLLATE "C"'),
        ("text", "k bpchar_ops"),
        ("text", "k bpchar_pattern_ops"),
        ("text PRIMARY KEY", "k bpchar_ops"),
    ],
)
@pytest.mark.parametrize("settings", [UPSERTS, {"guarantee": "at_least_once", "key": ["k"]}])
def test_an_index_that_takes_other_keys_for_equal_is_refused(
    postgres: PostgresServer, table: Create, kind: str, index: str, settings: dict
) -> None:
    name = table("v bigint")
    ci = created_collation(postgres, name.split(".")[0])
    postgres.query(f"ALTER TABLE {name} ADD k {kind.format(ci=ci)}")
    postgres.query(f"CREATE UNIQUE INDEX other ON {name} ({index.format(ci=ci)})")
    with pytest.raises(OptionError, match=r'other, a unique index over its key \("k"\).*collation'):
        opened(postgres.dsn, name, **settings)


@pytest.mark.parametrize("settings", [UPSERTS, {"guarantee": "at_least_once", "key": ["k"]}])
def test_an_index_that_is_replaced_meanwhile_drops_no_rows(
    postgres: PostgresServer, table: Create, settings: dict
) -> None:
    """Of two keys that are different as the table has it, one replaced the other's row."""
    name = table("k text PRIMARY KEY, v bigint")
    driver = opened(postgres.dsn, name, **settings)
    pending = list(prepared(driver, rows_of("a")))
    postgres.query(f"ALTER TABLE {name} DROP CONSTRAINT t_pkey")
    postgres.query(f"CREATE UNIQUE INDEX other ON {name} (k bpchar_ops)")

    message = r"other, a unique index over its key.*collation"
    for committable in pending:
        with pytest.raises(OptionError, match=message):
            driver.commit(committable)
    if not pending:
        transaction = driver.plan().begin(place_of())
        transaction.write(rows_of("a "))
        with pytest.raises(OptionError, match=message):
            transaction.prepare()
        transaction.abort()
    assert len(postgres.query(f"SELECT FROM {name}")) == (0 if pending else 1)
    postgres.query(f"DROP INDEX {name.split('.')[0]}.other")
    postgres.query(f"ALTER TABLE {name} ADD PRIMARY KEY (k)")
    for committable in pending or prepared(driver, rows_of("a ")):
        assert driver.commit(committable) is Outcome.COMMITTED
    assert len(postgres.query(f"SELECT FROM {name}")) == (1 if pending else 2)
    driver.close()


@pytest.mark.parametrize(
    ("kind", "index"),
    [
        ("text", 'k COLLATE "C"'),
        ("text", "k text_pattern_ops, v"),
        ("varchar(9)", "k varchar_pattern_ops) INCLUDE (v"),
        ("bpchar", "k"),
        ("text COLLATE {ci}", "k"),
        ("name", "k"),
        ("nested", "k"),
        ("of_two", "k"),
        ("int[]", "k"),
        ("int4range", "k"),
    ],
)
def test_an_index_that_takes_the_same_keys_for_equal_is_taken(
    postgres: PostgresServer, table: Create, kind: str, index: str
) -> None:
    name = table("v bigint")
    schema = name.split(".")[0]
    ci = created_collation(postgres, schema)
    postgres.query(f"CREATE TYPE {schema}.of_two AS ENUM ('A', 'a')")
    postgres.query(f"CREATE DOMAIN {schema}.inner_key AS varchar(20)")
    postgres.query(f"CREATE DOMAIN {schema}.nested AS {schema}.inner_key CHECK (value <> '')")
    kind = f"{schema}.{kind}" if kind in {"nested", "of_two"} else kind.format(ci=ci)
    postgres.query(f"ALTER TABLE {name} ADD k {kind}")
    postgres.query(f"CREATE UNIQUE INDEX ON {name} ({index})")
    key = ["k", "v"] if index.endswith(", v") else ["k"]
    opened(postgres.dsn, name, transactions="staged", key=key).close()


def test_keys_that_a_trigger_makes_equal_are_told_with_the_remedy(
    postgres: PostgresServer, table: Create
) -> None:
    name = table("k text PRIMARY KEY, v bigint")
    schema = name.split(".")[0]
    postgres.query(
        f"CREATE FUNCTION {schema}.low() RETURNS trigger LANGUAGE plpgsql "
        f"AS 'BEGIN NEW.k = lower(NEW.k); RETURN NEW; END'"
    )
    postgres.query(
        f"CREATE TRIGGER low BEFORE INSERT ON {name} FOR EACH ROW EXECUTE FUNCTION {schema}.low()"
    )
    driver = opened(postgres.dsn, name, **UPSERTS)
    (pending,) = prepared(driver, rows_of("A", "a"))
    with pytest.raises(RecordError, match=r"\(21000\).*tried again at the next start"):
        driver.commit(pending)
    postgres.query(f"DROP TRIGGER low ON {name}")
    assert driver.commit(pending) is Outcome.COMMITTED
    driver.close()
