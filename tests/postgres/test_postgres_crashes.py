"""Kill -9 of writers and of servers, and a crash between every two statements: exactly once."""

import gc
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from dying_writer import ROWS
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
)

from tallystick.epoch.two_phase import Committable, Outcome, commit_all, to_abort
from tallystick.errors import RetriableError
from tallystick.postgres import connection as connection_module
from tallystick.postgres import driver as driver_module
from tallystick.postgres.connection import connect, idle_connections
from tallystick.run.participants import CommitsBeside, OpenSinks
from tests.postgres.real_postgres import PostgresServer
from tests.waiting import wait_for

Create = Callable[..., str]
HERE = Path(__file__).parent


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def name(table: Create) -> str:
    return table(COLUMNS)


def numbers(postgres: PostgresServer, name: str) -> list[int]:
    return [a for (a,) in postgres.query(f"SELECT a FROM {name} ORDER BY a")]


@pytest.fixture
def writer(postgres: PostgresServer, name: str, way: str) -> Iterator[Callable[[str], Any]]:
    """Starts a task in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(how: str) -> subprocess.Popen[str]:
        arguments = [HERE / "dying_writer.py", postgres.dsn, name, way, how]
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE.parents[1],
            env={"PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "PATH": "/usr/bin:/bin"},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def gone(postgres: PostgresServer) -> None:
    """Wait until the server has noticed that its client is dead."""
    query = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE starts_with(application_name, 'tallystick') AND backend_type = 'client backend'"
    )
    wait_for(lambda: postgres.query(query), [(0,)], "sessions of ours")


def test_a_writer_killed_behind_its_prepare_is_committed_by_another_process(
    postgres: PostgresServer, name: str, way: str, writer: Callable[[str], Any]
) -> None:
    process = writer("once")
    committable = Committable.from_fields(json.loads(process.stdout.readline()))
    process.kill()
    gone(postgres)

    driver = opened(postgres.dsn, name, transactions=way)
    assert [transaction.name for transaction in driver.lingering(OWNER)] == [committable.name]
    assert driver.commit(committable) is Outcome.COMMITTED
    assert numbers(postgres, name) == list(range(ROWS, 2 * ROWS))
    driver.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_killed_anywhere_leaves_whole_transactions_only(
    postgres: PostgresServer, name: str, way: str, writer: Callable[[str], Any], seed: int
) -> None:
    """What it told of is committed, the rest is found and aborted: nothing else is ever seen."""
    process = writer("endless")
    committables = [Committable.from_fields(json.loads(process.stdout.readline()))]
    time.sleep(random.Random(seed).uniform(0, 0.15))  # fewer than the server allows
    process.kill()
    committables += [Committable.from_fields(json.loads(line)) for line in process.stdout]
    gone(postgres)

    driver = opened(postgres.dsn, name, transactions=way)
    settled = commit_all(committables, driver.commit)
    for committable in to_abort(driver.lingering(OWNER), committables):
        driver.abort(committable)

    assert (settled.lost, settled.error) == ((), None)
    epochs = sorted(committable.checkpoint_id for committable in committables)
    assert epochs == list(range(1, len(committables) + 1))
    assert numbers(postgres, name) == list(range(ROWS, ROWS * (len(committables) + 1)))
    assert list(driver.lingering(OWNER)) == []
    driver.close()


def test_a_server_killed_between_prepare_and_commit() -> None:
    """Both ways, on one server of its own; what was not prepared is gone with it."""
    server = PostgresServer()
    try:
        server.query("CREATE SCHEMA x")
        for way in WAYS:
            server.query(f"CREATE TABLE x.{way} ({COLUMNS})")
        drivers = {way: opened(server.dsn, f"x.{way}", transactions=way) for way in WAYS}
        committables = {way: prepared(drivers[way], rows_of(1, 2)) for way in WAYS}
        unfinished = [drivers[way].plan().begin(place_of(2)) for way in WAYS]
        for transaction in unfinished:
            transaction.write(rows_of(3))
        server.kill()
        for way in WAYS:
            with pytest.raises(RetriableError):
                drivers[way].commit(committables[way][0])
        for transaction in unfinished:
            with pytest.raises(RetriableError):
                transaction.prepare()
            transaction.abort()
        server.start()

        for way in WAYS:
            assert [drivers[way].commit(committable) for committable in committables[way]] == [
                Outcome.COMMITTED
            ]
            assert numbers(server, f"x.{way}") == [1, 2]
            server.kill()
            server.start()
            assert drivers[way].commit(committables[way][0]) is Outcome.COMMITTED
            assert numbers(server, f"x.{way}") == [1, 2]
        for way in WAYS:
            assert list(drivers[way].lingering(OWNER)) == []
            drivers[way].close()
    finally:
        idle_connections.close()
        server.stop()


def _stop(*servers: PostgresServer | None) -> None:
    idle_connections.close()
    for server in servers:
        if server is not None:
            server.stop()


def test_a_standby_is_refused_until_it_is_the_primary() -> None:
    """It does not show what is prepared: asked, it would prove a loss that is none."""
    primary = PostgresServer()
    standby = None
    try:
        primary.query(f"CREATE TABLE t ({COLUMNS})")
        driver = opened(primary.dsn, "t")
        standby = PostgresServer(primary)
        (committable,) = prepared(driver, rows_of(1, 2))
        driver.close()
        ((written,),) = primary.query("SELECT pg_current_wal_lsn()::text")
        while standby.query("SELECT pg_last_wal_replay_lsn() < %s::pg_lsn", written) != [(False,)]:
            time.sleep(0.02)
        with pytest.raises(RetriableError, match="standby"):
            opened(standby.dsn, "t")
        primary.kill()
        standby.query("SELECT pg_promote()")

        later = opened(standby.dsn, "t")
        assert [committable.name for committable in later.lingering(OWNER)] == [committable.name]
        assert [later.commit(committable) for _ in range(2)] == [Outcome.COMMITTED] * 2
        assert numbers(standby, "t") == [1, 2]
        later.close()
    finally:
        _stop(primary, standby)


class Died(BaseException):
    """The process is no more: nothing that it would have done is done."""


class Accident:
    """Cuts the connection at the nth statement: before it, or with its answer on the way."""

    def __init__(self, postgres: PostgresServer, nth: int, *, before: bool, dies: bool) -> None:
        self._postgres, self._left, self._before, self._dies = postgres, nth, before, dies
        self.happened = False

    def __call__(self, connection: psycopg.Connection[Any], run: Callable[[], Any]) -> Any:
        self._left -= 1
        if self._left:
            return run()
        self.happened = True
        if not self._before:
            run()
        self._postgres.query("SELECT pg_terminate_backend(%s)", connection.info.backend_pid)
        while connection.info.backend_pid in self._backends():
            time.sleep(0.005)
        if self._dies:
            connection.close()
            raise Died
        if self._before:
            return run()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    def _backends(self) -> set[int]:
        return {pid for (pid,) in self._postgres.query("SELECT pid FROM pg_stat_activity")}


@pytest.fixture
def accident(monkeypatch: pytest.MonkeyPatch) -> Callable[[Accident | None], None]:
    """Has one happen to whatever statement our connections run; None: never mind."""
    planned: list[Accident] = []
    execute = psycopg.Connection.execute

    def watched(self: psycopg.Connection[Any], *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return execute(self, *args, **kwargs)

        ours = self.info.get_parameters().get("fallback_application_name") == "tallystick"
        return planned[0](self, run) if planned and ours else run()

    monkeypatch.setattr(psycopg.Connection, "execute", watched)

    def plan(one: Accident | None) -> None:
        planned[:] = [one] if one else []

    return plan


@pytest.mark.parametrize("dies", [True, False], ids=["the driver dies", "the connection is cut"])
@pytest.mark.parametrize(
    ("way", "key"),
    [("prepared", ()), ("staged", ()), ("staged", ("a",))],
    ids=["prepared", "staged", "upsert"],
)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_commit_cut_at_every_statement_happens_once(
    postgres: PostgresServer,
    table: Create,
    accident: Callable[[Accident | None], None],
    dies: bool,
    way: str,
    key: tuple[str, ...],
    before: bool,
) -> None:
    name = table("a bigint PRIMARY KEY, b text" if key else COLUMNS)
    settings = {"transactions": way, "key": key}
    expected: list[int] = []
    for nth in range(1, 30):
        driver = opened(postgres.dsn, name, **settings)
        (committable,) = prepared(driver, rows_of(nth), checkpoint_id=nth)
        expected.append(nth)
        planned = Accident(postgres, nth, before=before, dies=dies)
        accident(planned)
        with suppress(Died):
            assert driver.commit(committable) is Outcome.COMMITTED
        accident(None)
        driver.close()
        later = opened(postgres.dsn, name, **settings)
        assert later.commit(committable) is Outcome.COMMITTED
        assert numbers(postgres, name) == expected
        assert list(later.lingering(OWNER)) == []
        later.close()
        if not planned.happened:
            break
    assert nth > (1 if way == "prepared" else 6), "the accidents reached every statement"
    assert nth < 29


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_task_cut_at_every_statement_leaves_nothing_or_something_to_abort(
    postgres: PostgresServer,
    name: str,
    way: str,
    accident: Callable[[Accident | None], None],
    before: bool,
) -> None:
    driver = opened(postgres.dsn, name, transactions=way)
    for nth in range(1, 30):
        idle_connections.close()
        planned = Accident(postgres, nth, before=before, dies=True)
        accident(planned)
        committables: list[Committable] = []
        with suppress(Died):
            committables = list(attempted(driver, rows_of(nth), checkpoint_id=nth))
        accident(None)
        lingering = list(driver.lingering(OWNER))
        assert len(lingering) <= 1
        for committable in to_abort(lingering, committables):
            driver.abort(committable)
        assert numbers(postgres, name) == []
        again = committables or list(attempted(driver, rows_of(nth), checkpoint_id=nth))
        assert [driver.commit(committable) for committable in again] == [Outcome.COMMITTED]
        assert numbers(postgres, name) == [nth]
        postgres.query(f"TRUNCATE {name}")
        if not planned.happened:
            break
    assert 4 < nth < 29
    driver.close()


def test_an_epoch_that_runs_again_beside_what_it_left_prepared(
    postgres: PostgresServer, table: Create
) -> None:
    """A prepared transaction holds its keys: the next attempt fails, and succeeds after it."""
    name = table("a bigint PRIMARY KEY, b text")
    driver = opened(f"{postgres.dsn} options='-c lock_timeout=200ms'", name)
    prepared(driver, rows_of(1))

    with pytest.raises(RetriableError, match="lock timeout"):
        attempted(driver, rows_of(1))
    for lingering in driver.lingering(OWNER):
        driver.abort(lingering)
    (committable,) = attempted(driver, rows_of(1))
    assert driver.commit(committable) is Outcome.COMMITTED
    driver.close()


def test_two_drivers_commit_one_committable(postgres: PostgresServer, name: str, way: str) -> None:
    """A zombie and its successor, at one time: both are told the truth."""
    drivers = [opened(postgres.dsn, name, transactions=way) for _ in range(2)]
    expected = []
    with ThreadPoolExecutor(2) as pool:
        for number in range(20):
            (committable,) = prepared(drivers[0], rows_of(number))
            expected.append(number)
            for outcome in pool.map(lambda peer, it=committable: _patiently(peer, it), drivers):
                assert outcome is Outcome.COMMITTED
    assert numbers(postgres, name) == expected
    for opened_driver in drivers:
        opened_driver.close()


def _patiently(driver: Any, committable: Committable) -> Outcome:
    while True:
        try:
            outcome: Outcome = driver.commit(committable)
            return outcome
        except RetriableError:  # the other one is just at it
            time.sleep(0.001)


def test_an_empty_batch_is_no_row(postgres: PostgresServer, name: str, way: str) -> None:
    driver = opened(postgres.dsn, name, transactions=way)
    (committable,) = prepared(driver, pa.record_batch(rows_of(1)).slice(1))

    assert driver.commit(committable) is Outcome.COMMITTED
    assert numbers(postgres, name) == []
    driver.close()


def test_a_commit_that_has_little_time_left_waits_no_longer_for_a_lock(
    postgres: PostgresServer, table: Create
) -> None:
    """Hundreds of tasks' commits share one deadline, whatever the role's lock_timeout is."""
    name = table("a bigint PRIMARY KEY, b text")
    driver = opened(f"{postgres.dsn} options='-c lock_timeout=10min'", name, transactions="staged")
    checked: object = driver
    assert isinstance(checked, CommitsBeside)
    (committable,) = prepared(driver, rows_of(1))

    with psycopg.connect(postgres.dsn) as other:
        other.execute(f"LOCK TABLE {name}")
        with pytest.raises(RetriableError, match="55P03"):
            checked.commit_by(committable, time.monotonic() + 0.2)
    assert numbers(postgres, name) == []
    assert checked.commit_by(committable, time.monotonic() + 20) is Outcome.COMMITTED
    assert numbers(postgres, name) == [1]
    driver.close()


def test_a_proof_that_has_little_time_left_waits_no_longer_for_a_task(
    postgres: PostgresServer, name: str
) -> None:
    """One that the driver took for dead has written its token, and is at work."""
    driver = opened(f"{postgres.dsn} options='-c lock_timeout=10min'", name)
    checked: object = driver
    assert isinstance(checked, CommitsBeside)
    (committable,) = prepared(driver, rows_of(1))
    postgres.query(f"ROLLBACK PREPARED '{committable.name}'")

    with psycopg.connect(postgres.dsn) as other:
        other.execute(
            f"INSERT INTO {OWN}.tallystick_committed VALUES (%s, 'p', 's', 'l', 1, 0, false)",
            [committable.name],
        )
        with pytest.raises(RetriableError, match="55P03"):
            checked.commit_by(committable, time.monotonic() + 0.2)
    assert checked.commit_by(committable, time.monotonic() + 20) is Outcome.COMMITTED
    driver.close()


def test_a_server_that_does_not_answer_is_not_waited_for_longer_than_told() -> None:
    """A socket that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dsn = f"host=127.0.0.1 port={silent.getsockname()[1]} dbname=x connect_timeout=300"
        began = time.monotonic()
        with pytest.raises(RetriableError, match="timeout"):
            connect(dsn, patience_s=1)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("act", ["commit", "abort"])
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "new"])
def test_what_a_frozen_server_does_not_answer_shares_one_deadline(
    postgres: PostgresServer,
    name: str,
    way: str,
    act: str,
    is_kept: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether there is a connection or not: sixteen tasks' commits take no longer than one."""
    monkeypatch.setattr(driver_module, "PATIENCE_S", 2.0)
    monkeypatch.setattr(connection_module, "_ASKED_S", 2)
    driver = opened(postgres.dsn, name, transactions=way)
    sinks = OpenSinks({OWNER.sink: driver}, {OWNER.sink: OWNER})
    many = tuple(prepared(driver, rows_of(task), task=task)[0] for task in range(16))
    if not is_kept:
        driver.close()

    postgres.pause()
    try:
        began = time.monotonic()
        with pytest.raises(RetriableError, match=r"did not answer|timeout"):
            getattr(sinks, act)(many)
        took_s = time.monotonic() - began
    finally:
        postgres.resume()
    assert took_s < 10

    gc.collect()  # psycopg's error about a connection that was not made in time keeps its socket
    getattr(sinks, act)(many)
    assert sinks.lingering() == ()
    assert numbers(postgres, name) == (list(range(16)) if act == "commit" else [])
    driver.close()


def test_aborts_that_wait_for_a_lock_share_one_deadline(
    postgres: PostgresServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "PATIENCE_S", 1.0)
    driver = opened(f"{postgres.dsn} options='-c lock_timeout=10min'", name, transactions="staged")
    sinks = OpenSinks({OWNER.sink: driver}, {OWNER.sink: OWNER})
    many = tuple(prepared(driver, rows_of(task), task=task)[0] for task in range(16))

    with psycopg.connect(postgres.dsn) as other:
        other.execute(f"LOCK TABLE {OWN}.tallystick_staged")
        began = time.monotonic()
        with pytest.raises(RetriableError, match="55P03"):
            sinks.abort(many)
        assert time.monotonic() - began < 10
    sinks.abort(many)
    assert sinks.lingering() == ()
    driver.close()


def test_work_that_goes_on_behind_the_deadline_is_not_cut(
    postgres: PostgresServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start would do it again up to there, and a decided epoch would never be seen."""
    monkeypatch.setattr(driver_module, "PATIENCE_S", 0.5)
    monkeypatch.setattr(connection_module, "_ASKED_EVERY_S", 0.2)
    driver = opened(postgres.dsn, name, transactions="staged")
    sinks = OpenSinks({OWNER.sink: driver}, {OWNER.sink: OWNER})
    many = tuple(prepared(driver, rows_of(task), task=task)[0] for task in range(2))
    for text in (
        f"CREATE FUNCTION {name}_slow() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$BEGIN PERFORM pg_sleep(4); RETURN NEW; END$$",
        f"CREATE TRIGGER slow BEFORE INSERT ON {name} FOR EACH ROW EXECUTE FUNCTION {name}_slow()",
    ):
        postgres.query(text)

    assert sinks.commit(many) == ()
    assert numbers(postgres, name) == [0, 1]
    driver.close()


def test_work_on_a_server_that_is_slow_to_take_a_connection_is_not_cut(
    name: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has much to do, or is far away, which is where a commit takes long, too."""
    driver = opened(postgres.dsn, name, transactions="staged")
    (pending,) = prepared(driver, rows_of(1))
    monkeypatch.setattr(driver_module, "PATIENCE_S", 0.5)
    for text in (
        f"CREATE FUNCTION {name}_slow() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$BEGIN PERFORM pg_sleep(8); RETURN NEW; END$$",
        f"CREATE TRIGGER slow BEFORE INSERT ON {name} FOR EACH ROW EXECUTE FUNCTION {name}_slow()",
        "ALTER SYSTEM SET post_auth_delay = 3",
    ):
        postgres.query(text)
    try:
        _reload_until(postgres, lambda connecting_s: connecting_s > 2.5)
        assert OpenSinks({OWNER.sink: driver}, {OWNER.sink: OWNER}).commit((pending,)) == ()
    finally:
        postgres.query("ALTER SYSTEM RESET post_auth_delay")
        _reload_until(postgres, lambda connecting_s: connecting_s < 2.5)
    assert numbers(postgres, name) == [1]
    driver.close()


def _reload_until(postgres: PostgresServer, is_so: Callable[[float], bool]) -> None:
    took_s, tried_count = 0.0, 0
    while not is_so(took_s) or not tried_count:
        assert tried_count < 20, took_s
        began, tried_count = time.monotonic(), tried_count + 1
        postgres.query("SELECT pg_reload_conf()")
        took_s = time.monotonic() - began


def test_a_server_without_room_for_another_session_is_at_work() -> None:
    server = PostgresServer(max_connections="5", superuser_reserved_connections="3")
    try:
        others = [server.connect() for _ in range(5)]
        pid = others[0].info.backend_pid
        assert connection_module._trouble(server.dsn, pid) == ""
        for other in others:
            other.close()
        server.pause()
        assert connection_module._trouble(server.dsn, pid) == "the server did not answer"
        server.resume()
    finally:
        server.stop()


@pytest.mark.parametrize("attrs", ["any", "read-write"])
def test_a_frozen_server_is_not_waited_for_because_another_host_is_there(
    postgres: PostgresServer, attrs: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = unused.getsockname()[1]
    dsn = (
        f"host={postgres.folder},127.0.0.1 port=5432,{nobody} user=postgres dbname=postgres "
        f"target_session_attrs={attrs}"
    )
    session = connection_module.Session(dsn)
    session.run("asking", lambda it: it.execute("SELECT 1"))
    thaw = threading.Timer(30, postgres.resume)
    postgres.pause()
    try:
        thaw.start()
        began = time.monotonic()
        with pytest.raises(RetriableError, match="did not answer"):
            session.run("asking", lambda it: it.execute("SELECT 1"), until=began + 1)
        took_s = time.monotonic() - began
    finally:
        thaw.cancel()
        postgres.resume()
    assert took_s < 20
    gc.collect()  # as above
    session.close()


def test_a_session_that_its_server_does_not_know_is_not_waited_for(
    postgres: PostgresServer,
) -> None:
    with postgres.connect() as gone:
        pid = gone.info.backend_pid
        assert connection_module._trouble(postgres.dsn, pid) == ""
    while postgres.query("SELECT FROM pg_stat_activity WHERE pid = %s", pid):
        time.sleep(0.02)
    assert "no such session" in connection_module._trouble(postgres.dsn, pid)


@pytest.mark.parametrize("options", ["", " options='-c statement_timeout=300ms'"])
def test_a_commit_that_no_standby_confirms_is_not_waited_for_without_end(
    postgres: PostgresServer, name: str, way: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it taken for done when the server's own timeout ends the wait."""
    monkeypatch.setattr(driver_module, "PATIENCE_S", 0.5)
    driver = opened(postgres.dsn + options, name, transactions=way)
    sinks = OpenSinks({OWNER.sink: driver}, {OWNER.sink: OWNER})
    many = tuple(prepared(driver, rows_of(1)))
    postgres.query("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    postgres.query("SELECT pg_reload_conf()")
    try:
        time.sleep(0.5)
        with pytest.raises(RetriableError, match="standby"):
            sinks.commit(many)
    finally:
        postgres.query("ALTER SYSTEM RESET synchronous_standby_names")
        postgres.query("SELECT pg_reload_conf()")
    assert _patiently(driver, many[0]) is Outcome.COMMITTED
    assert numbers(postgres, name) == [1]
    driver.close()


def test_a_commit_that_its_server_shows_waits_for_the_standby_all_the_same(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is restarted during the wait shows it; the standby may become the primary."""
    monkeypatch.setattr(driver_module, "PATIENCE_S", 0.5)
    primary = PostgresServer()
    standby = None
    try:
        primary.query(f"CREATE TABLE t ({COLUMNS})")
        driver = opened(primary.dsn, "t", transactions=way)
        standby = PostgresServer(primary)
        primary.query("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.query("SELECT pg_reload_conf()")
        time.sleep(0.5)
        sinks = OpenSinks({OWNER.sink: driver}, {OWNER.sink: OWNER})
        many = tuple(prepared(driver, rows_of(1, 2)))
        standby.kill()
        with pytest.raises(RetriableError, match="standby"):
            sinks.commit(many)
        primary.kill()
        primary.start()
        assert numbers(primary, "t") == [1, 2]
        for _ in range(2):
            with pytest.raises(RetriableError, match="standby"):
                sinks.commit(many)
        primary.kill()
        standby.start()
        assert numbers(standby, "t") == []
        driver.close()
        standby.query("SELECT pg_promote()")

        later = opened(standby.dsn, "t", transactions=way)
        assert [later.commit(many[0]) for _ in range(2)] == [Outcome.COMMITTED] * 2
        assert numbers(standby, "t") == [1, 2]
        later.close()
    finally:
        _stop(primary, standby)


@pytest.mark.parametrize("timeout", ["statement_timeout", "transaction_timeout"])
def test_a_timeout_of_the_role_cuts_no_commit(
    postgres: PostgresServer, name: str, timeout: str
) -> None:
    """It would be cut again at each start."""
    if not postgres.query("SELECT 1 FROM pg_settings WHERE name = %s", timeout):
        pytest.skip("there from version 17 on")
    schema = name.split(".")[0]
    postgres.query(
        f"CREATE FUNCTION {schema}.slow() RETURNS trigger LANGUAGE plpgsql "
        f"AS 'BEGIN PERFORM pg_sleep(0.6); RETURN NEW; END'"
    )
    postgres.query(
        f"CREATE TRIGGER slow BEFORE INSERT ON {name} FOR EACH ROW EXECUTE FUNCTION {schema}.slow()"
    )
    dsn = f"{postgres.dsn} options='-c {timeout}=300ms'"
    driver = opened(dsn, name, transactions="staged")
    (pending,) = prepared(driver, rows_of(1))
    assert driver.commit(pending) is Outcome.COMMITTED
    driver.close()


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "new"])
def test_a_frozen_server_ends_a_task(
    postgres: PostgresServer, name: str, way: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it writes, prepares or only begins; nothing is handed over."""
    monkeypatch.setattr(connection_module, "PATIENCE_S", 1.0)
    monkeypatch.setattr(connection_module, "_ASKED_S", 2)
    driver = opened(postgres.dsn, name, transactions=way)
    first, second = begun(driver, rows_of(1)), begun(driver, rows_of(2), task=1)
    if is_kept:  # a connection, for the third one
        for pending in prepared(driver, rows_of(0), task=2):
            driver.abort(pending)
    began = time.monotonic()
    postgres.pause()
    try:
        for act in (first.prepare, second.prepare, lambda: begun(driver, rows_of(3), task=2)):
            with pytest.raises(RetriableError, match=r"did not answer|timeout"):
                act()
    finally:
        postgres.resume()
    assert time.monotonic() - began < 30
    for transaction in (first, second):
        transaction.abort()
    gc.collect()  # as above
    for lingering in driver.lingering(OWNER):
        driver.abort(lingering)
    (committable,) = prepared(driver, rows_of(4))
    assert driver.commit(committable) is Outcome.COMMITTED
    assert numbers(postgres, name) == [4]
    driver.close()


def test_a_frozen_server_ends_a_look_and_a_start(
    postgres: PostgresServer, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "PATIENCE_S", 1.0)
    monkeypatch.setattr(connection_module, "_ASKED_S", 2)
    driver = opened(postgres.dsn, name, transactions=way)
    began = time.monotonic()
    postgres.pause()
    try:
        with pytest.raises(RetriableError, match=r"did not answer|timeout"):
            list(driver.lingering(OWNER))
        with pytest.raises(RetriableError, match=r"did not answer|timeout"):
            opened(postgres.dsn, name, transactions=way)
    finally:
        postgres.resume()
    assert time.monotonic() - began < 20
    gc.collect()  # as above
    assert list(driver.lingering(OWNER)) == []
    driver.close()
