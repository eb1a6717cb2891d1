"""A pipeline goes on from what an earlier build left in the schema of the user's table."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from earlier_build import OURS, EarlierBuild
from postgres_writing import (
    COLUMNS,
    OWNER,
    WAYS,
    attempted,
    opened,
    own_schema_of,
    prepared,
    rows_of,
)

from tallystick.epoch.two_phase import Committable, Outcome
from tallystick.errors import DataLossError, OptionError
from tests.postgres.real_postgres import PostgresServer

Create = Callable[..., str]


@pytest.fixture
def name(table: Create) -> str:
    return table(COLUMNS)


@pytest.fixture
def earlier(postgres: PostgresServer, name: str) -> EarlierBuild:
    build = EarlierBuild(postgres, name.split(".")[0], postgres.dsn)
    build.create()
    return build


def numbers(postgres: PostgresServer, name: str) -> list[int]:
    return [a for (a,) in postgres.query(f"SELECT a FROM {name} ORDER BY a")]


def pending(earlier: EarlierBuild, way: str, *rows: int) -> Committable:
    return earlier.staged(*rows) if way == "staged" else earlier.prepared(*rows)


@pytest.mark.parametrize("now", WAYS)
@pytest.mark.parametrize("way", WAYS)
def test_what_it_decided_is_committed_once_and_what_it_did_not_decide_is_aborted(
    postgres: PostgresServer, name: str, earlier: EarlierBuild, way: str, now: str
) -> None:
    """Also if the answer of the commit is lost, and the next start asks again."""
    decided, undecided = pending(earlier, way, 1, 2), pending(earlier, way, 3)
    driver = opened(postgres.dsn, name, transactions=now)
    lingering = list(driver.lingering(OWNER))
    assert {committable.name for committable in lingering} == {decided.name, undecided.name}
    (aborted,) = [committable for committable in lingering if committable.name == undecided.name]

    assert driver.commit(decided) is Outcome.COMMITTED
    driver.abort(aborted)
    driver.close()
    driver = opened(postgres.dsn, name, transactions=now)
    assert driver.commit(decided) is Outcome.COMMITTED
    assert driver.commit(undecided) is Outcome.LOST
    assert list(driver.lingering(OWNER)) == []
    assert (numbers(postgres, name), earlier.rows()) == ([1, 2], [])

    for committable in prepared(driver, rows_of(4), checkpoint_id=2):
        assert driver.commit(committable) is Outcome.COMMITTED
    assert numbers(postgres, name) == [1, 2, 4]
    driver.close()


@pytest.mark.parametrize("way", WAYS)
def test_what_it_committed_without_an_answer_is_proved_by_its_token(
    postgres: PostgresServer, name: str, earlier: EarlierBuild, way: str
) -> None:
    decided = pending(earlier, way, 1)
    if way == "prepared":
        postgres.query(f"COMMIT PREPARED '{decided.name}'")
    else:
        earlier.committed_by_hand(decided)
    driver = opened(postgres.dsn, name, transactions=way)
    assert driver.commit(decided) is Outcome.COMMITTED
    assert numbers(postgres, name) == [1]
    postgres.query(f"DROP TABLE {', '.join(f'{earlier.schema}.{table}' for table in OURS)}")
    if way == "prepared":
        with pytest.raises(DataLossError, match=r"tallystick_committed was dropped"):
            driver.commit(decided)
    driver.close()


def test_a_row_that_comes_back_after_its_commit_is_not_committed_again(
    postgres: PostgresServer, name: str, earlier: EarlierBuild
) -> None:
    """A role that may write into the tables of an earlier build has put it there."""
    decided = earlier.staged(1)
    registry, staging = f"{earlier.schema}.tallystick_staged", f"{earlier.schema}.kept"
    postgres.query(f"CREATE TABLE {staging} AS TABLE {earlier.schema}.tallystick_staged_t")
    postgres.query(f"CREATE TABLE {staging}_row AS TABLE {registry}")
    driver = opened(postgres.dsn, name, transactions="staged")
    assert driver.commit(decided) is Outcome.COMMITTED
    postgres.query(f"INSERT INTO {registry} TABLE {staging}_row")
    postgres.query(f"INSERT INTO {earlier.schema}.tallystick_staged_t TABLE {staging}")

    with pytest.raises(DataLossError, match=r"is staged, and .* says that it was committed"):
        driver.commit(decided)
    assert numbers(postgres, name) == [1]
    driver.close()


def test_nothing_new_is_written_beside_the_users_table(
    postgres: PostgresServer, name: str, earlier: EarlierBuild
) -> None:
    other = earlier.staged(7, owner=replace(OWNER, pipeline="another"))
    before = [postgres.query(f"TABLE {earlier.schema}.{table}") for table in OURS]
    for way in WAYS:
        driver = opened(postgres.dsn, name, transactions=way)
        for committable in prepared(driver, rows_of(1), checkpoint_id=1_000):
            assert driver.commit(committable) is Outcome.COMMITTED
        driver.close()

    assert [postgres.query(f"TABLE {earlier.schema}.{table}") for table in OURS] == before
    assert earlier.rows() == [7]
    driver = opened(postgres.dsn, name, transactions="prepared")
    assert driver.commit(other) is Outcome.COMMITTED
    driver.close()


def test_a_column_that_its_rows_do_not_fit_is_refused_at_their_commit(
    postgres: PostgresServer, name: str, earlier: EarlierBuild
) -> None:
    decided = earlier.staged(2**40)
    postgres.query(f"ALTER TABLE {name} ALTER a TYPE integer")
    driver = opened(postgres.dsn, name, transactions="staged")
    with pytest.raises(OptionError, match=r'tallystick_staged_t.*column "a".*ALTER the column'):
        driver.commit(decided)
    assert earlier.rows() == [2**40]
    postgres.query(f"ALTER TABLE {name} ALTER a TYPE bigint")
    assert driver.commit(decided) is Outcome.COMMITTED
    driver.close()


def test_a_guarantee_that_needs_no_tables_settles_what_it_left(
    postgres: PostgresServer, name: str, earlier: EarlierBuild
) -> None:
    decided, undecided = earlier.staged(1), earlier.prepared(2)
    driver = opened(postgres.dsn, name, guarantee="none")
    assert driver.commit(decided) is Outcome.COMMITTED
    for committable in driver.lingering(OWNER):
        assert committable.name == undecided.name
        driver.abort(committable)
    assert numbers(postgres, name) == [1]
    own = own_schema_of("postgres")
    assert postgres.query("SELECT FROM pg_namespace WHERE nspname = %s", own) == []
    driver.close()


def test_another_role_goes_on_where_it_shares_them(
    postgres: PostgresServer, name: str, earlier: EarlierBuild
) -> None:
    """As an earlier build's error told the owner of the tables to."""
    schema = earlier.schema
    postgres.query("CREATE ROLE sharer LOGIN")
    postgres.query("GRANT CREATE ON DATABASE postgres TO sharer")
    postgres.query(f"GRANT USAGE ON SCHEMA {schema} TO sharer")
    postgres.query(
        f"GRANT INSERT, SELECT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO sharer"
    )
    dsn = postgres.dsn.replace("user=postgres", "user=sharer")
    shared = earlier._replace(dsn=dsn)
    decided, undecided = shared.staged(1), shared.prepared(2)

    driver = opened(dsn, name, transactions="staged")
    assert driver.commit(decided) is Outcome.COMMITTED
    for committable in driver.lingering(OWNER):
        assert committable.name == undecided.name
        driver.abort(committable)
    for committable in attempted(driver, rows_of(3), checkpoint_id=2):
        assert driver.commit(committable) is Outcome.COMMITTED
    assert (numbers(postgres, name), shared.rows()) == ([1, 3], [])
    driver.close()
    postgres.query("DROP OWNED BY sharer")
    postgres.query("DROP ROLE sharer")
