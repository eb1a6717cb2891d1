"""Connections of a process: made once, lent to one transaction at a time, thrown away on failure.

Invariants:
    * A connection that met a failure is closed and never lent again.
    * A connection is used by the process that made it only: a worker that Spark's daemon forked
      finds none of its parent's.
    * Commits are on disk when they are answered, with any synchronous_commit of the role; no wait
      for a lock, a statement or a silent peer is without end. A deadline ends silence, not work: a
      commit that is cut while it goes on would be cut again at each start.
    * Names without a schema mean what PostgreSQL itself has. Anybody may put a better fitting
      function or operator into a schema of the user's search_path (CVE-2018-1058); that path counts
      only where the user's own table is meant: `USERS_PATH`.
    * The texts of libpq and of the server may repeat the connection string and values of rows: such
      a text is cut, and every secret in it is blotted out. Their exceptions are not kept as causes,
      which a traceback would print.

Errors of psycopg become errors of ours by the reader's remedy.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, LiteralString, TypeAlias, TypeVar

import psycopg
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from tallystick.epoch.two_phase import PATIENCE_S
from tallystick.errors import OptionError, RecordError, RetriableError, TallystickError
from tallystick.host.worker_cache import WorkerCache

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]
Result = TypeVar("Result")

BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
USERS_PATH = "SET LOCAL search_path TO DEFAULT"
"""Sets the path for the rest of a transaction: triggers of the user's table may rely on it."""
_SEEN = """
    SELECT pg_is_in_recovery(), count(*) > 0, coalesce(bool_or(wait_event = 'SyncRep'), false)
    FROM pg_stat_activity WHERE pid = $1
"""
OWN_PATH = "SET search_path = pg_catalog, pg_temp"
OWN_PATH_MEANWHILE = OWN_PATH.replace("SET", "SET LOCAL")
CONNECT_TIMEOUT_S = 10
_DEFAULTS: dict[str, str | int] = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
    "fallback_application_name": "tallystick",
}
_TIMEOUTS = {
    "lock_timeout": "30s",
    "statement_timeout": "1h",
    "idle_in_transaction_session_timeout": "1h",
}
"""Set where neither the server, the role nor the connection string has set one."""
_WITHOUT_END = """
    SELECT set_config(name, '0', false) FROM pg_settings
    WHERE name IN ('statement_timeout', 'transaction_timeout')
"""
"""The second one is there from version 17 on."""
_MILLISECOND_S = 0.001
_GRACE_S = 0.5
"""A server that is well says itself, before it is cut off, what it waits for."""
_CONNECT_TIMEOUT_MIN_S = 2
"""libpq takes no less."""
_ASKED_S = CONNECT_TIMEOUT_S
"""The time that another connection has to show that the server is at work, maybe slowly."""
_ASKED_EVERY_S = 5.0
_SILENT = "the server did not answer"
_KEPT_MAX = 2
"""Idle connections of a process and connection string: two sinks may write in one task."""
_SECRETS = ("password", "sslpassword", "oauth_client_secret")
_TEXT_MAX = 300
_OPTION_STATES = ("0A", "28", "3D", "3F", "42")
_RECORD_STATES = ("21", "22", "23", "44", "P0")
_REFUSED = (
    "authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "does not exist",
    "permission denied",
    "certificate",
    "server does not support SSL",
)
_COPY_CONTEXT = re.compile(r"COPY .*?, line (\d+)(?:, column ([^:]+))?")


def secrets_of(dsn: str) -> tuple[str, ...]:
    """Return the parts of a connection string to hide, with the whole string."""
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.Error:
        return (dsn,)
    named = [given.get(name) for name in _SECRETS] + [os.environ.get("PGPASSWORD")]
    return tuple(sorted((str(secret) for secret in [dsn, *named] if secret), key=len, reverse=True))


def scrubbed(text: str, secrets: tuple[str, ...]) -> str:
    """Return the text on one line, cut, with every secret blotted out."""
    for secret in secrets:
        text = text.replace(secret, "***")
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_MAX else f"{line[:_TEXT_MAX]}…"


@contextmanager
def ours(
    doing: str, secrets: tuple[str, ...], columns: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a block, and translate psycopg's errors into errors of ours.

    Args:
        doing: the name of the work, for the message.
        secrets: see `secrets_of`.
        columns: the types of the rows' columns, for an error in a value.
    """
    try:
        yield
    except psycopg.Error as error:
        translated = translate(error, doing, secrets, columns or {})
    else:
        return
    raise translated from None


def translate(
    error: psycopg.Error, doing: str, secrets: tuple[str, ...], columns: Mapping[str, str]
) -> TallystickError:
    """Return the error of ours for an error of psycopg."""
    state = error.sqlstate or ""
    message = error.diag.message_primary or str(error)
    text = f"PostgreSQL: {doing}: {scrubbed(message, secrets)}{f' ({state})' if state else ''}"
    if not state:
        refused = isinstance(error, psycopg.ProgrammingError | psycopg.NotSupportedError)
        if refused or any(phrase in message for phrase in _REFUSED):
            return OptionError(text)
        return RetriableError(text)
    if state == "42710":  # a name of ours is drawn again for each attempt
        return RetriableError(f"{text}: another session has taken the name")
    if state == "42501":
        return OptionError(f"{text}: grant the pipeline's role what it needs")
    if state.startswith(_OPTION_STATES):
        return OptionError(f"{text}: was the table, or the server, changed?")
    if state.startswith(_RECORD_STATES):
        return RecordError(f"{text}{_where(error, columns)}")
    # The hint, since the message is in the server's language. To try again would end alike.
    hint = error.diag.message_hint or ""
    if state in {"53200", "53400"} and "max_prepared_transactions" in hint:
        return OptionError(
            f"{text}: raise max_prepared_transactions: all tasks of an epoch's last stage stay "
            f"prepared until the epoch is decided, such as 200 after a shuffle into 200 "
            f"partitions; look for forgotten ones in pg_prepared_xacts; or use "
            f'transactions="staged"'
        )
    return RetriableError(text)


def _where(error: psycopg.Error, columns: Mapping[str, str]) -> str:
    """Return the table, constraint, column and row of an error; never the row's values."""
    diag = error.diag
    copied = _COPY_CONTEXT.match(diag.context or "")
    column = diag.column_name or (copied and copied[2])
    parts = [
        diag.table_name and f"table {diag.table_name}",
        diag.constraint_name and f"constraint {diag.constraint_name}",
        column and f"column {column}{_type_of(column, columns)}",
        copied and f"row {copied[1]} of those sent together",
    ]
    place = ", ".join(part for part in parts if part)
    return f"; {place}" if place else ""


def _type_of(column: str, columns: Mapping[str, str]) -> str:
    return f" ({columns[column]})" if column in columns else ""


def _close_entry(entry: tuple[Connection, int]) -> None:
    close(entry[0])


idle_connections: WorkerCache[str, tuple[Connection, int]] = WorkerCache(
    _close_entry, idle_max=_KEPT_MAX
)
"""By connection string; with the number of the server's process."""


def query(text: str) -> LiteralString:
    """Return SQL whose names were quoted by the server or by `quoted`, for psycopg's types."""
    checked: Any = text
    sql: LiteralString = checked
    return sql


def quoted(name: str) -> str:
    """Return a name as SQL."""
    return sql.Identifier(name).as_string(None)


def literal(text: str) -> str:
    """Return a text as SQL, for statements that take no parameters."""
    return sql.Literal(text).as_string(None)


def connect(dsn: str, patience_s: float | None = None) -> Connection:
    """Return a new connection, in autocommit, to a server that takes writes.

    Args:
        dsn: how to connect.
        patience_s: how long each of the server's addresses is tried at most, in whole seconds and
            for two of them at least.

    Raises:
        OptionError: the connection string is wrong, or refused.
        RetriableError: there is no answer, or a standby answers.
    """
    return _connected(dsn, patience_s)[0]


def _connected(
    dsn: str, patience_s: float | None, *, has_no_end: bool = False
) -> tuple[Connection, int]:
    """Connect as `connect` does; return the number of the server's process too.

    Args:
        dsn: see `connect`.
        patience_s: see `connect`.
        has_no_end: a statement may take as long as it does, without the usual timeouts.
    """
    secrets, settings = secrets_of(dsn), _settings(dsn, patience_s)
    with ours("connecting", secrets):
        connection = psycopg.connect(dsn, **settings)
    try:
        with ours("setting up the session", secrets), cut_off(connection, patience_s):
            pid = _set_up(connection)
            if has_no_end:
                connection.execute(_WITHOUT_END)
    except BaseException:
        connection.close()
        raise
    return connection, pid


def _settings(dsn: str, patience_s: float | None) -> dict[str, Any]:
    """Return psycopg's settings; settings in the connection string override our defaults."""
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.Error:
        given = None
    if given is None:  # libpq's own message repeats parts of the string
        raise OptionError(
            "PostgreSQL: dsn is not a connection string: expected 'host=… dbname=… user=…' or "
            "'postgresql://user@host/database'"
        )
    wanted = given.get("connect_timeout") or CONNECT_TIMEOUT_S
    try:
        wanted_s = int(wanted)
    except ValueError:
        raise OptionError(
            f"PostgreSQL: connect_timeout={wanted!r} in dsn: expected whole seconds"
        ) from None
    settings: dict[str, Any] = {name: it for name, it in _DEFAULTS.items() if name not in given}
    if patience_s is not None:
        allowed_s = max(_CONNECT_TIMEOUT_MIN_S, round(patience_s))
        settings["connect_timeout"] = min(wanted_s, allowed_s) if wanted_s > 0 else allowed_s
    return settings | {
        "autocommit": True,
        "prepare_threshold": None,
        "client_encoding": "UTF8",
        "cursor_factory": psycopg.RawCursor,  # parameters are $1: a name may hold a percent sign
    }


def _set_up(connection: Connection) -> int:
    """Set the session up; return the process number from the server, as a pooler invents one."""
    parts = [
        f"CASE WHEN current_setting('{name}') = '0' THEN set_config('{name}', '{value}', false) END"
        for name, value in _TIMEOUTS.items()
    ]
    parts.append(
        "CASE WHEN current_setting('synchronous_commit') = 'off' "
        "THEN set_config('synchronous_commit', 'on', false) END"
    )
    parts.append("set_config('default_transaction_isolation', 'read committed', false)")
    parts.append("set_config('default_transaction_read_only', 'off', false)")
    # Else a double precision becomes a text of 15 digits.
    parts.append("set_config('extra_float_digits', '1', false)")
    connection.execute(OWN_PATH)
    row = connection.execute(
        query(f"SELECT pg_is_in_recovery(), pg_backend_pid(), {', '.join(parts)}")
    ).fetchone()
    assert row is not None
    if row[0]:
        raise RetriableError(
            "PostgreSQL: the server is a standby, in recovery: it takes no writes, and does not "
            "show what is prepared; the dsn must lead to the primary"
        )
    return int(row[1])


def lend(dsn: str, application: str = "") -> tuple[Connection, int]:
    """Lend a connection inside a new transaction, with the user's search_path.

    Returns the number of the server's process too, for `give_back` and `answered`.

    Args:
        dsn: how to connect.
        application: the name of the session until the transaction ends; empty: the usual one.

    Raises:
        OptionError: see `connect`.
        RetriableError: see `connect`.
    """
    begin = f"{BEGIN}; {USERS_PATH}"
    if application:
        begin += f"; SET LOCAL application_name = {literal(application)}"
    while idle := idle_connections.take(dsn):
        connection, pid = idle
        try:
            with answered(dsn, connection, pid):
                connection.execute(query(begin))
            return connection, pid
        except psycopg.Error:  # it was cut while it was idle, which says nothing of the server
            close(connection)
        except BaseException:
            close(connection)
            raise
    connection, pid = _connected(dsn, PATIENCE_S)
    try:
        with ours("beginning a transaction", secrets_of(dsn)), answered(dsn, connection, pid):
            connection.execute(query(begin))
    except BaseException:
        close(connection)
        raise
    return connection, pid


def give_back(dsn: str, connection: Connection, pid: int) -> None:
    """Keep a connection for the next transaction, if it is whole and there is room."""
    if not connection.closed and connection.info.transaction_status is TransactionStatus.IDLE:
        idle_connections.give_back(dsn, (connection, pid))
    else:
        close(connection)


def close(connection: Connection) -> None:
    """Close a connection; never raise."""
    with suppress(Exception):
        connection.close()


def seconds_until(until: float) -> float:
    """Return the time left until a point of `time.monotonic`: at least a millisecond."""
    return max(_MILLISECOND_S, until - time.monotonic())


@contextmanager
def cut_off(
    connection: Connection, patience_s: float | None, trouble: Callable[[], str] = lambda: _SILENT
) -> Iterator[None]:
    """Cut a connection whose server does not answer in time: a frozen one keeps to no timeout.

    Args:
        connection: the connection that the block uses.
        patience_s: the time until `trouble` is called first; None: the connection is never cut.
        trouble: called in another thread; returns why to cut, or nothing to go on waiting.

    Raises:
        RetriableError: the connection was cut; the outcome of the last statement is not known.
    """
    if patience_s is None:
        yield
        return
    is_over, why = threading.Event(), ""

    def watch() -> None:
        nonlocal why
        wait_s = patience_s + _GRACE_S
        while not is_over.wait(wait_s):
            reason = trouble()
            if reason and not is_over.is_set():
                why = reason
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
                return
            wait_s = _ASKED_EVERY_S

    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            yield
        except psycopg.Error:
            if not why:
                raise
        else:
            return
        finally:
            is_over.set()
            watching.join()
    raise RetriableError(f"PostgreSQL: {why}, which was waited for {patience_s:.3g} s") from None


def _same_server(dsn: str, connection: Connection) -> str:
    """Return a connection string for the very server of a connection."""
    info = connection.info
    return make_conninfo(
        dsn, host=info.host, hostaddr=info.hostaddr, port=info.port, target_session_attrs="any"
    )


def _trouble(dsn: str, pid: int) -> str:
    """Return why a session does not answer, seen from another session; nothing: it is at work.

    Locks have a timeout of their own, lost connections keepalives; the wait for a standby after a
    COMMIT has none.

    Args:
        dsn: to the session's server alone: an answer of another server says nothing.
        pid: the number of the session's process, from the server.
    """
    try:
        with psycopg.connect(dsn, **_settings(dsn, _ASKED_S)) as other, cut_off(other, _ASKED_S):
            # What a session does is shown to the role that has connected.
            other.execute(query(f"SET ROLE NONE; {OWN_PATH}"))
            row = other.execute(_SEEN, [pid]).fetchone()
    except (errors.ConnectionTimeout, RetriableError):
        return _SILENT
    except psycopg.Error:  # that it has no room for another session is an answer
        return ""
    assert row is not None
    is_standby, is_there, is_stuck = row
    if is_stuck:
        return "no standby confirmed a commit (synchronous_standby_names)"
    # A standby is another server, which something between has led to: it knows nothing of ours.
    return "" if is_there or is_standby else "the server has no such session"


def answered(
    dsn: str, connection: Connection, pid: int, until: float | None = None
) -> AbstractContextManager[None]:
    """Cut a connection when its server neither answers nor is at work.

    Args:
        dsn: the connection string of the connection.
        connection: the connection that the block uses.
        pid: the number of the session's process, from the server.
        until: a point of `time.monotonic` at which the server is asked first; None: in
            `PATIENCE_S`.

    Raises:
        RetriableError: see `cut_off`.
    """
    patience_s = PATIENCE_S if until is None else seconds_until(until)
    return cut_off(connection, patience_s, lambda: _trouble(_same_server(dsn, connection), pid))


@contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """Commit a transaction at the end of the block; on failure no ROLLBACK is sent.

    The caller throws the connection away instead, which does the same and cannot fail.

    Raises:
        RetriableError: the transaction was not committed.
    """
    connection.execute(BEGIN)
    yield
    finish(connection, "COMMIT")


def finish(connection: Connection, statement: str, tag: str = "COMMIT") -> None:
    """End a transaction; raise if the server answers ROLLBACK, as it does after a failure before.

    Raises:
        RetriableError: the transaction was rolled back.
    """
    answer = connection.execute(query(statement)).statusmessage
    if answer != tag:
        raise RetriableError(f"PostgreSQL answered {answer!r} to {tag}: it was rolled back")


class Session:
    """The driver's connection: opened on first use, opened again after a failure."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.secrets = secrets_of(dsn)
        self._connection: Connection | None = None
        self._pid = 0

    def run(
        self, doing: str, work: Callable[[Connection], Result], until: float | None = None
    ) -> Result:
        """Do repeatable work on the connection: once more if a kept connection is found cut.

        Args:
            doing: the name of the work, for the error.
            work: called with the connection.
            until: a point of `time.monotonic` at which the wait for a silent server ends;
                None: in `PATIENCE_S`.

        Raises:
            TallystickError: the translation of psycopg's error, see `ours`.
        """
        until = time.monotonic() + PATIENCE_S if until is None else until
        was_kept = self._connection is not None
        try:
            return self._run(doing, work, until)
        except RetriableError:
            cut = self._connection is None
            if not (was_kept and cut) or time.monotonic() >= until:
                raise
        return self._run(doing, work, until)

    def _run(self, doing: str, work: Callable[[Connection], Result], until: float) -> Result:
        if self._connection is None:
            # Cut by the server, a commit of staged rows would be cut again at each start, and
            # COMMIT PREPARED would say that it is done, although no standby has confirmed it.
            patience_s = seconds_until(until)
            self._connection, self._pid = _connected(self._dsn, patience_s, has_no_end=True)
        with_end = answered(self._dsn, self._connection, self._pid, until)
        try:
            with ours(doing, self.secrets), with_end:
                return work(self._connection)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, if any."""
        if self._connection is not None:
            close(self._connection)
            self._connection = None
