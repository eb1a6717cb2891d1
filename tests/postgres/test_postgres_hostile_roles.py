"""Two roles that share a schema: what one writes never runs, or blocks, with the other's rights."""

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import psycopg
import pytest
from earlier_build import EarlierBuild
from postgres_writing import COLUMNS, OWNER, WAYS, attempted, begun, opened, prepared, rows_of

from tallystick.epoch.two_phase import Committable, Outcome
from tallystick.errors import DataLossError, ManifestError, OptionError, RetriableError
from tallystick.postgres.connection import idle_connections
from tallystick.postgres.names import application_prefix, owner_prefix
from tests.postgres.real_postgres import PostgresServer

Create = Callable[..., str]
HIGH, LOW = '"The ""high"" one"', '"o\'Low"'
OWN = '"tallystick_The ""high"" one"'
INSERT = "INSERT INTO {}.tallystick_staged VALUES (%s, %s, %s, %s, '{{a}}', '{{}}', %s, %s)"


class Place(NamedTuple):
    """Role `high` writes into `table`, and alone has the rights on `payroll`, of two rows."""

    postgres: PostgresServer
    table: str
    schema: str
    payroll: str
    high: str
    low: str

    def paid(self) -> int:
        ((count,),) = self.postgres.query(f"SELECT count(*) FROM {self.payroll}")
        return int(count)

    def numbers(self) -> list[int]:
        return [a for (a,) in self.postgres.query(f"SELECT a FROM {self.table} ORDER BY a")]

    def as_low(self, text: str, *parameters: object) -> None:
        self.postgres.query(text, *parameters, dsn=self.low)

    def earlier(self) -> EarlierBuild:
        """Create the tables of an earlier build, for `high`, beside the table."""
        build = EarlierBuild(self.postgres, self.schema, self.high)
        build.create(HIGH)
        return build

    def let_low_in(self) -> None:
        """As an earlier build told a table's owner to."""
        self.postgres.query(f"GRANT USAGE ON SCHEMA {self.schema} TO {LOW}")
        for (ours,) in self.postgres.query(
            "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = %s::regnamespace "
            "AND relname IN ('tallystick_committed', 'tallystick_staged')",
            self.schema,
        ):
            self.postgres.query(f"GRANT INSERT, SELECT, UPDATE, DELETE ON {ours} TO {LOW}")


@pytest.fixture
def place(postgres: PostgresServer, table: Create) -> Iterator[Place]:
    """The two roles, by names that have to be quoted."""
    name = table(COLUMNS)
    schema = name.split(".")[0]
    secret = f"{schema}_hr"
    for text in (
        f"CREATE ROLE {HIGH} LOGIN",
        f"CREATE ROLE {LOW} LOGIN",
        f"GRANT CREATE ON DATABASE postgres TO {HIGH}",
        f"GRANT USAGE ON SCHEMA {schema} TO {HIGH}",
        f"GRANT ALL ON {name} TO {HIGH}",
        f"CREATE SCHEMA {secret} AUTHORIZATION {HIGH}",
        f"CREATE TABLE {secret}.payroll (a bigint)",
        f"INSERT INTO {secret}.payroll VALUES (-1), (-2)",
        f"ALTER TABLE {secret}.payroll OWNER TO {HIGH}",
    ):
        postgres.query(text)
    dsn = {
        role: psycopg.conninfo.make_conninfo(postgres.dsn, user=role[1:-1].replace('""', '"'))
        for role in (HIGH, LOW)
    }
    yield Place(postgres, name, schema, f"{secret}.payroll", dsn[HIGH], dsn[LOW])
    idle_connections.close()
    for (gid,) in postgres.query("SELECT gid FROM pg_prepared_xacts"):
        postgres.query(f"ROLLBACK PREPARED '{gid}'")
    postgres.query(f"DROP OWNED BY {HIGH}, {LOW} CASCADE")
    postgres.query(f"DROP ROLE {HIGH}, {LOW}")


def test_rows_of_others_touch_no_table_and_hold_nothing_up(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The row names what recovery deletes from; as text it once was SQL of whoever wrote it."""
    earlier = place.earlier()
    decided, stranger = earlier.staged(1, 2), earlier.staged(3, checkpoint_id=2)
    place.let_low_in()
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        place.as_low(f"SELECT * FROM {place.payroll}")
    hostile = [
        f"{place.payroll} WHERE $1::bigint IS NOT NULL --",
        place.payroll,
        f'{place.schema}_hr."payroll"',
        f'{place.schema}."t"',
        f'{place.schema}."tallystick_committed"',
        f'{place.schema}."tallystick_staged"',
        f'{place.schema}."tallystick_staged_t" --',
        f"{place.schema}.tallystick_staged_t",
        '"',
        "",
    ]
    insert, prefix = INSERT.format(place.schema), owner_prefix(OWNER)
    for number, staging in enumerate(hostile):
        name, target = f"{prefix}7:{number}:0:ab", place.payroll
        place.as_low(insert, name, number, target, staging, -1, 2**62)
    strange = [f"{prefix}x", f"{prefix}1:2:3:a:b", f"{prefix}{'9' * 30}:0:0:a", f"{prefix}1:1:٣:a"]
    for number, name in enumerate(strange):
        place.as_low(insert, name, -1 - number, "", "", 0, 0)

    later = opened(place.high, place.table, transactions="staged")
    with caplog.at_level(logging.WARNING):
        lingering = [
            committable
            for committable in later.lingering(OWNER)
            if committable.name != decided.name
        ]
        for committable in lingering:
            known = (
                place.table.split(".")[1] if committable.name == stranger.name else "(not known)"
            )
            assert known in later.describe(committable)
        for committable in lingering:
            later.abort(committable)
    assert later.commit(decided) is Outcome.COMMITTED

    assert len(lingering) == len(hostile) + 1
    assert stranger.name in {committable.name for committable in lingering}
    assert place.paid() == 2
    assert place.numbers() == [1, 2]
    for foreign in (*hostile, *strange):
        assert repr(foreign) in caplog.text, foreign
    assert list(later.lingering(OWNER)) == []
    kept = place.postgres.query(f"SELECT name FROM {place.schema}.tallystick_staged")
    assert {name for (name,) in kept} == set(strange)
    assert earlier.rows() == []
    later.close()


def test_a_row_that_leads_to_tables_of_a_stranger_is_not_followed(place: Place) -> None:
    """In the right schema, by the right names: but their triggers are his."""
    place.earlier()
    place.let_low_in()
    place.postgres.query(f"GRANT CREATE ON SCHEMA {place.schema} TO {LOW}")
    place.as_low(
        f"CREATE FUNCTION {place.schema}.trap() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$BEGIN DELETE FROM {place.payroll}; RETURN NULL; END$$"
    )
    for own in ("evil", "tallystick_staged_evil"):
        full = f"{place.schema}.{own}"
        place.as_low(f"CREATE TABLE {full} (a bigint, tallystick_id bigint)")
        place.as_low(
            f"CREATE TRIGGER trap BEFORE INSERT OR DELETE ON {full} "
            f"EXECUTE FUNCTION {place.schema}.trap()"
        )
        place.as_low(f"GRANT ALL ON {full} TO {HIGH}")
    names = (f"{owner_prefix(OWNER)}7:{number}:0:ab" for number in range(2))
    target, staging = (f'{place.schema}."{table}"' for table in ("evil", "tallystick_staged_evil"))
    for number, name in enumerate(names):
        insert = INSERT.format(place.schema)
        place.as_low(insert, name, number, target, staging, 0, 0)

    driver = opened(place.high, place.table, transactions="staged")
    first, second = driver.lingering(OWNER)
    with pytest.raises(DataLossError, match="not as the task has written it"):
        driver.commit(first)  # as a person might force it
    for committable in (first, second):
        driver.abort(committable)
    assert list(driver.lingering(OWNER)) == []
    assert place.paid() == 2
    driver.close()


def test_a_changed_row_of_a_decided_transaction_is_not_committed(place: Place) -> None:
    """Nor are rows taken from, or put, where it says; put right, it is committed."""
    decided = place.earlier().staged(1, 2)
    driver = opened(place.high, place.table, transactions="staged")
    place.let_low_in()
    registry = f"{place.schema}.tallystick_staged"
    ((staging, columns),) = place.postgres.query(f"SELECT staging, columns FROM {registry}")
    changes = {
        "target": (place.payroll, f'{place.schema}."t"'),
        "staging": (place.payroll, staging),
        "columns": (["b", "a"], columns),
        "key": (["a"], []),
        "record_count": (1, 2),
        "id": (1, None),
    }
    change = f"WITH gone AS (DELETE FROM {registry} RETURNING *) INSERT INTO {registry} SELECT "
    names = ("name", "id", "target", "staging", "columns", "key", "record_count", "begun_ms")
    for column, (wrong, right) in changes.items():
        what = ", ".join("%s" if name == column else name for name in names)
        with psycopg.connect(place.low, autocommit=True) as low:
            taken = low.execute(f"DELETE FROM {registry} RETURNING *").fetchone()
            assert taken is not None
            put = f"INSERT INTO {registry} VALUES ({', '.join(['%s'] * len(names))})"
            row = dict(zip(names, taken, strict=True))
            low.execute(put, list({**row, column: wrong}.values()))
        if right is None:
            break  # it is not read at all
        with pytest.raises(DataLossError, match=r"not as the task has written it.*2 rows"):
            driver.commit(decided)
        place.postgres.query(f"UPDATE {registry} SET {column} = %s", right)
        assert (place.paid(), place.numbers()) == (2, []), (column, change, what)

    assert driver.commit(decided) is Outcome.COMMITTED
    assert (place.paid(), place.numbers()) == (2, [1, 2])
    driver.close()


@pytest.mark.parametrize("ours", ["tallystick_committed", "tallystick_staged"])
def test_tables_of_an_earlier_build_that_are_a_strangers_are_refused(
    place: Place, caplog: pytest.LogCaptureFixture, ours: str
) -> None:
    """What he hangs on them would run with this role's rights."""
    decided = place.earlier().staged(1)
    full = f"{place.schema}.{ours}"
    place.postgres.query(f"GRANT USAGE, CREATE ON SCHEMA {place.schema} TO {LOW}")
    place.postgres.query(f"ALTER TABLE {full} OWNER TO {LOW}")
    place.as_low(f"GRANT ALL ON {full} TO {HIGH}")
    place.as_low(
        f"CREATE FUNCTION {place.schema}.trap() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$BEGIN DELETE FROM {place.payroll}; RETURN NULL; END$$"
    )
    place.as_low(
        f"CREATE TRIGGER trap BEFORE INSERT OR DELETE ON {full} "
        f"EXECUTE FUNCTION {place.schema}.trap()"
    )

    driver = opened(place.high, place.table, transactions="staged")
    with caplog.at_level(logging.WARNING):
        assert [*driver.lingering(OWNER), *driver.lingering(OWNER)] == []
    (warning,) = caplog.messages
    assert f"{full} belongs to role" in warning
    with pytest.raises(OptionError, match=rf"decided.*{ours} belongs to role .*o'Low.*OWNER TO"):
        driver.commit(decided)
    place.postgres.query(f"ALTER TABLE {full} OWNER TO {HIGH}")
    with pytest.raises(OptionError, match=rf"decided.*{ours} has a trigger.*DROP"):
        driver.commit(decided)
    place.postgres.query(f"DROP TRIGGER trap ON {full}")
    assert driver.commit(decided) is Outcome.COMMITTED
    for committable in attempted(driver, rows_of(2), checkpoint_id=2):
        assert driver.commit(committable) is Outcome.COMMITTED
    assert (place.paid(), place.numbers()) == (2, [1, 2])
    driver.close()


@pytest.mark.parametrize("ours", ["tallystick_committed", "tallystick_staged_t"])
def test_a_strangers_condition_of_a_trigger_is_refused(place: Place, ours: str) -> None:
    """The function is PostgreSQL's own, and WHEN calls his."""
    earlier = place.earlier()
    decided = earlier.staged(1)
    full = f"{place.schema}.{ours}"
    place.postgres.query(f"GRANT USAGE, CREATE ON SCHEMA {place.schema} TO {LOW}")
    place.postgres.query(f"GRANT TRIGGER ON {full} TO {LOW}")
    place.as_low(
        f"CREATE FUNCTION {place.schema}.trap(bigint) RETURNS boolean LANGUAGE plpgsql AS "
        f"$$BEGIN DELETE FROM {place.payroll}; RETURN false; END$$"
    )
    column = "checkpoint_id" if ours == "tallystick_committed" else "a"
    place.as_low(
        f"CREATE TRIGGER trap BEFORE INSERT ON {full} FOR EACH ROW "
        f"WHEN ({place.schema}.trap(NEW.{column})) "
        f"EXECUTE FUNCTION suppress_redundant_updates_trigger()"
    )

    driver = opened(place.high, place.table, transactions="staged")
    with pytest.raises(OptionError, match=rf"decided.*{ours}.* has a trigger.*DROP"):
        driver.commit(decided)
    place.postgres.query(f"DROP TRIGGER trap ON {full}")
    # On the user's table it is the matter of its owner.
    place.postgres.query(
        f"CREATE TRIGGER own BEFORE INSERT ON {place.table} FOR EACH ROW WHEN (NEW.a < 0) "
        f"EXECUTE FUNCTION suppress_redundant_updates_trigger()"
    )
    assert driver.commit(decided) is Outcome.COMMITTED
    assert (place.paid(), place.numbers(), earlier.rows()) == (2, [1], [])
    driver.close()


@pytest.mark.parametrize("grant", ["INHERIT FALSE, SET FALSE", "INHERIT FALSE, SET TRUE"])
def test_a_member_that_may_not_act_as_the_schemas_owner_is_a_stranger(
    place: Place, grant: str
) -> None:
    query = place.postgres.query
    ((version,),) = query("SELECT current_setting('server_version_num')::integer")
    if version < 160_000:
        pytest.skip("every member may")
    decided = place.earlier().staged(1)
    query("CREATE ROLE schemas_owner")
    try:
        query(f"ALTER SCHEMA {place.schema} OWNER TO schemas_owner")
        query(f"GRANT USAGE ON SCHEMA {place.schema} TO {HIGH}")
        query(f"GRANT schemas_owner TO {LOW} WITH {grant}")
        query(f"ALTER TABLE {place.schema}.tallystick_staged OWNER TO {LOW}")
        query(f"GRANT ALL ON {place.schema}.tallystick_staged TO {HIGH}")

        driver = opened(place.high, place.table, transactions="staged")
        if "SET TRUE" in grant:
            assert driver.commit(decided) is Outcome.COMMITTED
        else:
            with pytest.raises(OptionError, match=r"belongs to role .*o'Low.*OWNER TO"):
                driver.commit(decided)
        driver.close()
    finally:
        query(f"ALTER SCHEMA {place.schema} OWNER TO postgres")
        query("DROP OWNED BY schemas_owner CASCADE")
        query("DROP ROLE schemas_owner")


def test_no_other_role_reads_or_writes_our_tables(place: Place) -> None:
    """By whatever it was granted there, as long as it may not use the schema."""
    driver = opened(place.high, place.table, transactions="staged")
    (pending,) = prepared(driver, rows_of(1))
    tables = place.postgres.query(
        "SELECT oid::regclass::text FROM pg_class "
        "WHERE relnamespace = %s::regnamespace AND relkind = 'r'",
        OWN,
    )
    assert len(tables) == 3
    for (ours,) in tables:
        place.postgres.query(f"GRANT ALL ON {ours} TO {LOW}")
        for text in (
            f"SELECT * FROM {ours}",
            f"DELETE FROM {ours}",
            f"INSERT INTO {ours} DEFAULT VALUES",
            f"CREATE TRIGGER trap BEFORE INSERT ON {ours} "
            f"EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="for schema"):
                place.as_low(text)
    assert driver.commit(pending) is Outcome.COMMITTED
    assert place.numbers() == [1]
    driver.close()


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
@pytest.mark.parametrize(
    ("made_by", "message", "remedy"),
    [
        ("CREATE SCHEMA {own} AUTHORIZATION {low}", "belongs to role .*o'Low", "DROP SCHEMA {own}"),
        (
            "CREATE SCHEMA {own} AUTHORIZATION {high}; GRANT CREATE ON SCHEMA {own} TO {low}",
            "role .*o'Low.* may create tables there: REVOKE CREATE",
            "REVOKE CREATE ON SCHEMA {own} FROM {low}",
        ),
        (
            "CREATE SCHEMA {own} AUTHORIZATION {high}; GRANT CREATE ON SCHEMA {own} TO PUBLIC",
            "role 'PUBLIC' may create tables there: REVOKE CREATE",
            "REVOKE CREATE ON SCHEMA {own} FROM PUBLIC",
        ),
        (
            "CREATE SCHEMA {own} AUTHORIZATION {low}; CREATE TABLE {own}.tallystick_committed (); "
            "ALTER TABLE {own}.tallystick_committed OWNER TO {low}; "
            "ALTER SCHEMA {own} OWNER TO {high}",
            "'tallystick_committed' in it belongs to another role.*DROP",
            "DROP TABLE {own}.tallystick_committed",
        ),
    ],
)
def test_a_schema_that_is_not_its_own_is_refused(
    place: Place, made_by: str, message: str, remedy: str, guarantee: str
) -> None:
    """Any role that may create schemas may take the name."""
    names = {"own": OWN, "low": LOW, "high": HIGH}
    for text in made_by.format(**names).split("; "):
        place.postgres.query(text)
    with pytest.raises(OptionError, match=message):
        opened(place.high, place.table, guarantee=guarantee)
    place.postgres.query(remedy.format(**names))
    driver = opened(place.high, place.table, guarantee=guarantee)
    for committable in attempted(driver, rows_of(1)):
        assert driver.commit(committable) is Outcome.COMMITTED
    assert place.numbers() == [1]
    driver.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_superuser_settles_what_another_role_has_decided(place: Place, way: str) -> None:
    """It has a schema of its own; the committable names that of the role which wrote it."""
    driver = opened(place.high, place.table, transactions=way)
    (decided,) = prepared(driver, rows_of(1))
    driver.close()

    later = opened(place.postgres.dsn, place.table, transactions=way)
    assert [later.commit(decided) for _ in range(2)] == [Outcome.COMMITTED] * 2
    assert place.numbers() == [1]
    later.close()


def test_a_lock_of_a_stranger_does_not_stop_a_start(place: Place) -> None:
    """Any role may hold an advisory lock; several starts at a time need none."""
    with psycopg.connect(place.low, autocommit=True) as low:
        low.execute("SELECT pg_advisory_lock(hashtext('tallystick'))")

        def start(_: int) -> None:
            dsn = f"{place.high} options='-c lock_timeout=5s'"
            opened(dsn, place.table, transactions="staged").close()

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(start, range(8)))
        place.postgres.query(f"ALTER TABLE {place.table} ADD c text, ALTER a TYPE numeric")
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(start, range(8)))
        query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s"
        assert place.postgres.query(query, low.info.backend_pid) == [(1,)]
    driver = opened(place.high, place.table, transactions="staged")
    (committable,) = attempted(driver, rows_of(1))
    assert driver.commit(committable) is Outcome.COMMITTED
    assert place.numbers() == [1]
    driver.close()


def test_a_strangers_registry_is_not_looked_into(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A sink recovers all the same."""
    place.postgres.query(f"GRANT USAGE, CREATE ON SCHEMA {place.schema} TO {LOW}")
    place.earlier()
    place.postgres.query(f"ALTER TABLE {place.schema}.tallystick_staged OWNER TO {LOW}")
    place.as_low(f"GRANT ALL ON {place.schema}.tallystick_staged TO {HIGH}")
    name = f"{owner_prefix(OWNER)}7:0:0:ab"
    place.as_low(INSERT.format(place.schema), name, 1, "", place.payroll, 0, 0)

    driver = opened(place.high, place.table)
    (pending,) = prepared(driver, rows_of(1))
    with caplog.at_level(logging.WARNING):
        assert [committable.name for committable in driver.lingering(OWNER)] == [pending.name]
        driver.lingering(OWNER)
    (warning,) = [message for message in caplog.messages if "belongs to role" in message]
    assert f"{place.schema}.tallystick_staged" in warning
    place.as_low(
        f"CREATE FUNCTION {place.schema}.trap() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$BEGIN DELETE FROM {place.payroll}; RETURN NULL; END$$"
    )
    place.as_low(
        f"CREATE TRIGGER trap BEFORE DELETE ON {place.schema}.tallystick_staged "
        f"EXECUTE FUNCTION {place.schema}.trap()"
    )
    writing = begun(driver, rows_of(2), checkpoint_id=2)
    (still_open,) = [e for e in driver.lingering(OWNER) if e.name != pending.name]
    driver.abort(still_open)
    with pytest.raises(RetriableError):  # its session is ended: the abort really happened
        writing.prepare()
    assert place.paid() == 2
    driver.close()


def test_a_schema_that_a_manifest_names_is_a_name(place: Place) -> None:
    """It becomes a part of SQL, and a checksum does not say who wrote it."""
    driver = opened(place.high, place.table)
    (pending,) = prepared(driver, rows_of(1))
    details = json.loads(pending.details) | {"schema": f"public; DELETE FROM {place.payroll} --"}
    for act in (driver.commit, driver.abort):
        with pytest.raises(ManifestError, match="expected a name"):
            act(replace(pending, details=json.dumps(details)))
    assert place.paid() == 2
    assert driver.commit(pending) is Outcome.COMMITTED
    driver.close()


def test_a_prepared_transaction_of_another_program_is_not_committed(place: Place) -> None:
    """A manifest that somebody else made may name any that this role has prepared."""
    driver = opened(place.high, place.table)
    (pending,) = prepared(driver, rows_of(1))
    with place.postgres.connect(place.high) as billing:
        billing.execute("BEGIN")
        billing.execute(f"DELETE FROM {place.payroll}")
        billing.execute("PREPARE TRANSACTION 'billing-17'")
    with pytest.raises(ManifestError, match="billing-17"):
        driver.commit(replace(pending, name="billing-17"))
    assert place.paid() == 2
    assert driver.commit(pending) is Outcome.COMMITTED
    driver.close()


def test_functions_and_operators_of_others_are_not_called(place: Place) -> None:
    """Those that fit our arguments better than PostgreSQL's own, in the role's search_path.

    Triggers of the user's table have that path all the same.
    """
    schema = place.schema
    place.postgres.query(f"CREATE TABLE {schema}.trapped (who text)")
    place.postgres.query(f"CREATE TABLE {schema}.seen (a bigint)")
    place.postgres.query(f"GRANT INSERT ON {schema}.trapped, {schema}.seen TO PUBLIC")
    place.postgres.query(f"GRANT USAGE, CREATE ON SCHEMA {schema} TO {LOW}")
    traps = {
        "quote_ident(name)": "text AS $$SELECT pg_catalog.quote_ident($1::text)",
        "pg_advisory_xact_lock(integer)": "void AS $$SELECT pg_catalog.pg_advisory_xact_lock(1)",
        "times(numeric, integer)": "numeric AS $$SELECT $1 OPERATOR(pg_catalog.*) $2::numeric",
        "starts_with(name, text)": "boolean AS $$SELECT true",
    }
    for signature, body in traps.items():
        returns, rest = body.split(" AS $$")
        place.as_low(
            f"CREATE FUNCTION {schema}.{signature} RETURNS {returns} LANGUAGE sql VOLATILE AS "
            f"$$INSERT INTO {schema}.trapped VALUES (current_user); {rest}$$"
        )
    place.as_low(
        f"CREATE OPERATOR {schema}.* (FUNCTION = {schema}.times, LEFTARG = numeric, "
        f"RIGHTARG = integer)"
    )
    place.postgres.query(
        f"CREATE FUNCTION {schema}.see() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$BEGIN INSERT INTO seen VALUES (NEW.a); RETURN NEW; END$$"
    )
    place.postgres.query(
        f"CREATE TRIGGER see BEFORE INSERT ON {place.table} FOR EACH ROW "
        f"EXECUTE FUNCTION {schema}.see()"
    )
    path = psycopg.conninfo.make_conninfo(place.high, options=f"-c search_path={schema},public")

    for number, way in enumerate(("prepared", "staged"), 1):
        driver = opened(path, "t", transactions=way)
        for committable in attempted(driver, rows_of(number)):
            assert driver.commit(committable) is Outcome.COMMITTED
        attempted(driver, rows_of(9))
        zombie = begun(driver, rows_of(9))
        lingering = list(driver.lingering(OWNER))
        assert len(lingering) == 2
        for committable in lingering:
            driver.abort(committable)
        zombie.abort()
        driver.close()

    assert place.postgres.query(f"SELECT * FROM {schema}.trapped") == []
    assert place.numbers() == [1, 2]
    assert place.postgres.query(f"SELECT a FROM {schema}.seen ORDER BY a") == [(1,), (2,)]


@pytest.mark.parametrize(
    "settings",
    [
        {"transactions": "staged"},
        {"transactions": "staged", "key": ["a"]},
        {"guarantee": "at_least_once", "key": ["a"]},
    ],
)
def test_operators_of_others_are_not_called_where_pg_catalog_comes_last(
    place: Place, settings: dict
) -> None:
    """A search_path may name it after a schema of everybody's: theirs fit as well, and first."""
    schema = place.schema
    for text in (
        f"ALTER TABLE {place.table} ADD PRIMARY KEY (a)",
        f"CREATE TABLE {schema}.trapped (who text)",
        f"GRANT INSERT ON {schema}.trapped TO PUBLIC",
        f"GRANT USAGE, CREATE ON SCHEMA {schema} TO {LOW}",
    ):
        place.postgres.query(text)
    for right in ("bigint", "integer", "smallint"):
        place.as_low(
            f"CREATE FUNCTION {schema}.equal(bigint, {right}) RETURNS boolean LANGUAGE plpgsql AS "
            f"$$BEGIN INSERT INTO {schema}.trapped VALUES (current_user); "
            f"RETURN $1 OPERATOR(pg_catalog.=) $2; END$$"
        )
        place.as_low(
            f"CREATE OPERATOR {schema}.= (FUNCTION = {schema}.equal, LEFTARG = bigint, "
            f"RIGHTARG = {right})"
        )
    path = f"-c search_path={schema},pg_catalog"
    driver = opened(
        psycopg.conninfo.make_conninfo(place.high, options=path), place.table, **settings
    )
    for committable in attempted(driver, rows_of(1, 2)):
        assert driver.commit(committable) is Outcome.COMMITTED
    assert place.postgres.query(f"SELECT * FROM {schema}.trapped") == []
    assert place.numbers() == [1, 2]
    driver.close()


def test_names_of_transactions_and_sessions_of_others_hold_nothing_up(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Everybody may prepare a transaction, and be called, as he likes; and sees how ours are."""
    place.postgres.query(f"GRANT pg_read_all_stats TO {HIGH}")
    driver = opened(place.high, place.table)
    (decided,) = prepared(driver, rows_of(1))
    (pending,) = prepared(driver, rows_of(2), checkpoint_id=2)
    theirs = [f"{owner_prefix(OWNER)}{rest}" for rest in ("7:0:0:ab", "x", "1:2:3")]
    with (
        psycopg.connect(place.low, autocommit=True) as low,
        psycopg.connect(place.low) as session,
        psycopg.connect(place.high) as strange,
    ):
        for name in theirs:
            low.execute("BEGIN")
            low.execute(f"PREPARE TRANSACTION '{name}'")
        session.execute(f"SET application_name = '{application_prefix(OWNER)}7:0:0:ab'")
        strange.execute(f"SET application_name = '{application_prefix(OWNER)}x'")

        with caplog.at_level(logging.WARNING):
            lingering = list(driver.lingering(OWNER))
        assert [committable.name for committable in lingering] == sorted(
            (decided.name, pending.name)
        )
        for name in theirs:
            assert f"{name!r} is named as if" in caplog.text
        assert "'s transactions, and is none" in caplog.text
        driver.abort(pending)
        assert driver.commit(decided) is Outcome.COMMITTED

        # Its name is free now, and a recovery asks once more.
        low.execute("BEGIN")
        low.execute(f"PREPARE TRANSACTION '{decided.name}'")
        assert driver.commit(decided) is Outcome.COMMITTED
        low.execute("BEGIN")
        low.execute(f"PREPARE TRANSACTION '{pending.name}'")
        with pytest.raises(OptionError, match=r"decided.*belongs to role .*o'Low.*COMMIT PREPARED"):
            driver.commit(pending)

        # It takes the name of one that is being written.
        slow = begun(driver, rows_of(3))
        query = "SELECT application_name FROM pg_stat_activity WHERE xact_start IS NOT NULL"
        shown = [name for (name,) in place.postgres.query(query)]
        (own,) = [
            name.removeprefix(application_prefix(OWNER))
            for name in shown
            if name.startswith(f"{application_prefix(OWNER)}1:")
        ]
        low.execute("BEGIN")
        low.execute(f"PREPARE TRANSACTION '{owner_prefix(OWNER)}{own}'")
        with pytest.raises(RetriableError, match=r"42710.*taken the name"):
            slow.prepare()
        slow.abort()
    assert place.numbers() == [1]
    driver.close()


def test_a_name_taken_in_another_database_does_not_hide_what_became_of_ours(
    postgres: PostgresServer, table: Create
) -> None:
    """To a superuser the server says that it is elsewhere, not that it is another role's."""
    driver = opened(postgres.dsn, table(COLUMNS))
    (committable,) = prepared(driver, rows_of(1))
    assert driver.commit(committable) is Outcome.COMMITTED
    postgres.query("CREATE DATABASE beside")
    beside = psycopg.conninfo.make_conninfo(postgres.dsn, dbname="beside")
    with psycopg.connect(beside, autocommit=True) as other:
        other.execute("BEGIN")
        other.execute(f"PREPARE TRANSACTION '{committable.name}'")
        try:
            assert driver.commit(committable) is Outcome.COMMITTED
        finally:
            other.execute(f"ROLLBACK PREPARED '{committable.name}'")
    postgres.query("DROP DATABASE beside")
    driver.close()


def test_a_row_by_the_name_of_something_else_of_ours_does_not_hide_it(place: Place) -> None:
    """What is prepared would keep its locks, and what is open could be prepared, for ever."""
    place.earlier()
    place.let_low_in()
    driver = opened(place.high, place.table)
    (decided,) = prepared(driver, rows_of(1))
    (pending,) = prepared(driver, rows_of(2), checkpoint_id=2)
    zombie = begun(driver, rows_of(3), checkpoint_id=3)
    (still_open,) = [e for e in driver.lingering(OWNER) if e.checkpoint_id == 3]
    for number, committable in enumerate((decided, pending, still_open)):
        insert = INSERT.format(place.schema)
        place.as_low(insert, committable.name, number, place.payroll, place.payroll, 0, 0)

    assert driver.commit(decided) is Outcome.COMMITTED
    lingering = list(driver.lingering(OWNER))
    names = [decided.name, pending.name, pending.name, still_open.name, still_open.name]
    assert sorted(committable.name for committable in lingering) == sorted(names)
    for committable in lingering:
        driver.abort(committable)

    with pytest.raises(RetriableError):
        zombie.prepare()
    zombie.abort()
    assert driver.commit(pending) is Outcome.LOST
    assert list(driver.lingering(OWNER)) == []
    assert (place.paid(), place.numbers()) == (2, [1])
    driver.close()


def test_a_granted_role_that_takes_a_name_does_not_stop_an_abort(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """It has a session that this role may end, and a transaction that it may not."""
    place.postgres.query(f"GRANT {LOW} TO {HIGH}")
    driver = opened(place.high, place.table)
    (pending,) = prepared(driver, rows_of(1))
    rest = "7:0:0:ab"
    taken = f"{owner_prefix(OWNER)}{rest}"
    session = psycopg.connect(place.low)
    session.execute(f"SET application_name = '{application_prefix(OWNER)}{rest}'")
    with (
        psycopg.connect(place.low, autocommit=True) as low,
        caplog.at_level(logging.WARNING),
    ):
        low.execute("BEGIN")
        low.execute(f"PREPARE TRANSACTION '{taken}'")
        lingering = list(driver.lingering(OWNER))
        assert {committable.name for committable in lingering} == {pending.name, taken}
        for committable in lingering:
            driver.abort(committable)
    session.close()
    assert list(driver.lingering(OWNER)) == []
    (warning,) = [message for message in caplog.messages if taken in message]
    assert "belongs to role" in warning
    assert LOW[1:-1] in warning
    assert place.postgres.query("SELECT gid FROM pg_prepared_xacts") == [(taken,)]
    driver.close()


def test_an_attempt_that_has_a_token_of_its_loss_is_not_prepared(place: Place) -> None:
    """The token would say later what became of the transaction, and it would be wrong."""
    driver = opened(place.high, place.table)
    slow = begun(driver, rows_of(1))
    ((application,),) = place.postgres.query(
        "SELECT application_name FROM pg_stat_activity "
        "WHERE starts_with(application_name, %s) AND xact_start IS NOT NULL",
        application_prefix(OWNER),
    )
    name = owner_prefix(OWNER) + application.removeprefix(application_prefix(OWNER))
    place.postgres.query(
        f"INSERT INTO {OWN}.tallystick_committed VALUES (%s, 'p', 's', 'l', 1, 0, true)", name
    )

    with pytest.raises(RetriableError, match="a token says already what became of"):
        slow.prepare()
    slow.abort()
    for committable in driver.lingering(OWNER):  # its session, if the server has not noticed yet
        driver.abort(committable)
    assert place.postgres.query("SELECT gid FROM pg_prepared_xacts") == []
    assert place.numbers() == []
    driver.close()


def moved_on(place: Place) -> tuple[EarlierBuild, Committable, Committable]:
    """What an earlier build has staged for `high` in a table that belongs to `low` now."""
    earlier = place.earlier()
    decided, undecided = earlier.staged(1, 2), earlier.staged(3, checkpoint_id=2)
    place.let_low_in()
    staging = f"{place.schema}.tallystick_staged_t"
    place.postgres.query(f"ALTER TABLE {staging} OWNER TO {LOW}")
    place.postgres.query(f"GRANT ALL ON {staging} TO {HIGH}")
    return earlier, decided, undecided


@pytest.mark.parametrize(
    "trap",
    [
        "",
        "CREATE TRIGGER trap BEFORE DELETE ON {staging} EXECUTE FUNCTION {schema}.trap()",
        "CREATE RULE trap AS ON DELETE TO {staging} DO ALSO SELECT {schema}.trapped()",
        "CREATE POLICY trap ON {staging} USING ({schema}.trapped()); "
        "ALTER TABLE {staging} ENABLE ROW LEVEL SECURITY",
        "CREATE INDEX trap ON {staging} (a) WHERE {schema}.frozen()",
        "CREATE STATISTICS {schema}.trap ON ({schema}.frozen()), a FROM {staging}",
    ],
)
def test_what_was_staged_where_a_stranger_has_code_is_named_not_touched(
    place: Place, caplog: pytest.LogCaptureFixture, trap: str
) -> None:
    """What is given up stays there; what is decided waits until the table is trusted."""
    earlier, decided, undecided = moved_on(place)
    schema, staging = place.schema, f"{place.schema}.tallystick_staged_t"
    place.postgres.query(f"GRANT CREATE ON SCHEMA {schema} TO {LOW}")
    place.postgres.query(f"CREATE TABLE {schema}.seen (who text)")
    place.postgres.query(f"GRANT INSERT ON {schema}.seen TO PUBLIC")
    noted = (
        f"IF current_user <> $low${LOW[1:-1]}$low$ "
        f"THEN INSERT INTO {schema}.seen VALUES (current_user); END IF;"
    )
    for signature, body in {
        "trap() RETURNS trigger": f"{noted} RETURN NULL;",
        "trapped() RETURNS boolean": f"{noted} RETURN true;",
        "frozen() RETURNS boolean IMMUTABLE": f"PERFORM {schema}.trapped(); RETURN true;",
    }.items():
        place.as_low(
            f"CREATE FUNCTION {schema}.{signature} LANGUAGE plpgsql AS $$BEGIN {body} END$$"
        )
    for statement in trap.format(staging=staging, schema=schema).split("; ") if trap else ():
        place.as_low(statement)

    later = opened(place.high, place.table, transactions="staged")
    assert {committable.name for committable in later.lingering(OWNER)} == {
        decided.name,
        undecided.name,
    }
    with caplog.at_level(logging.WARNING):
        later.abort(undecided)
        with pytest.raises(OptionError, match=r"2 rows .*staged_t.*OWNER TO") as raised:
            later.commit(decided)
    assert LOW[1:-1] in str(raised.value)
    seen = f"SELECT * FROM {schema}.seen WHERE who = %s"
    assert place.postgres.query(seen, HIGH[1:-1].replace('""', '"')) == []
    assert (earlier.rows(), place.numbers()) == ([1, 2, 3], [])
    (warning,) = [message for message in caplog.messages if undecided.name in message]
    assert "OWNER TO" in warning
    if not trap:
        place.postgres.query(f"ALTER TABLE {staging} OWNER TO {HIGH}")
        assert later.commit(decided) is Outcome.COMMITTED
        assert (earlier.rows(), place.numbers()) == ([3], [1, 2])
    later.close()
