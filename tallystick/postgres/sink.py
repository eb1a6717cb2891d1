"""A PostgreSQL table to write to, as a public value."""

import logging
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from tallystick.arguments import checked
from tallystick.epoch.two_phase import (
    Guarantee,
    Owner,
    RunFacts,
    TwoPhaseCommitSink,
    guarantee_problem,
)
from tallystick.errors import OptionError
from tallystick.host.installed import pip_install

if TYPE_CHECKING:
    from tallystick.postgres.connection import Connection
    from tallystick.postgres.schema import Table

logger = logging.getLogger(__name__)

PREPARED, STAGED = "prepared", "staged"
_VERSION_MIN = 140_000
_PREPARED_PER_TASK = 2
"""Prepared transactions of a failed attempt may still exist when the next attempt prepares."""
_WITHHELD = """
    SELECT oid::regprocedure::text FROM pg_proc
    WHERE proname = 'pg_logical_emit_message' AND pronamespace = 'pg_catalog'::regnamespace
      AND proargtypes[2] = 'text'::regtype AND NOT has_function_privilege(oid, 'EXECUTE')
"""
"""The function by which `outcome` waits for standbys, if the role may not call it."""


@checked
@dataclass(frozen=True)
class PostgresSink:
    """A table to write to, exactly once, with one transaction per task and epoch.

    Rows go into the columns of the same names; columns that rows do not have get their defaults.

    Args:
        dsn: how to connect, as libpq has it: `host=… dbname=… user=…`, or
            `postgresql://user@host/database`. A password is better kept in a file (`passfile=`).
        table: as in SQL: `orders`, `sales.orders`, `"Orders"`.
        key: columns with a unique index: a row replaces the one with the same key (an upsert), the
            last one of an epoch's task counts. With `exactly_once` it needs `staged`.
        transactions: prepared: rows are written into the table at once, held by PREPARE
            TRANSACTION, and become visible by COMMIT PREPARED; the server's
            max_prepared_transactions must allow it. staged: rows wait in a table beside it and are
            moved by the commit; for servers without prepared transactions, and for upserts; each
            row is written twice.
        guarantee: exactly_once; at_least_once: rows are visible when their task is through, and
            again if the epoch runs again; none: the same, and rows that cannot be written are
            counted, warned about, and left out.
        uid: names the sink in its pipeline for as long as transactions may be pending; None: its
            kind and its number among the sinks of that kind.

    Raises:
        OptionError: a setting is of the wrong type, or contradicts another.
    """

    dsn: str = field(repr=False)
    _: KW_ONLY
    table: str
    key: Sequence[str] = ()
    transactions: str = PREPARED
    guarantee: str = Guarantee.EXACTLY_ONCE.value
    uid: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", tuple(self.key))
        if len(set(self.key)) < len(self.key):
            raise OptionError(f"key={list(self.key)!r}: a column is named twice")
        if not self.table:
            raise OptionError(
                "table is empty: expected the name of a table, such as 'sales.orders'"
            )
        if self.transactions not in {PREPARED, STAGED}:
            raise OptionError(
                f"transactions={self.transactions!r}: expected {PREPARED!r} or {STAGED!r}"
            )
        if problem := guarantee_problem(self.guarantee):
            raise OptionError(problem)
        if self.key and self._exact and self.transactions == PREPARED:
            raise OptionError(
                f'key={list(self.key)!r} needs transactions="{STAGED}": a prepared transaction '
                f"holds the locks of the rows that it changed until it is committed, and another "
                f"task, or the epoch's next attempt, that has the same key would wait for it"
            )

    @property
    def kind(self) -> str:
        """See `Sink`."""
        return "postgres"

    @property
    def _exact(self) -> bool:
        return self.guarantee == Guarantee.EXACTLY_ONCE.value

    def open(self, owner: Owner, facts: RunFacts) -> TwoPhaseCommitSink:
        """See `Sink`. Creates the role's own schema and the tables in it where they are missing.

        Raises:
            OptionError: a setting, the server or the table does not fit.
            RetriableError: the server cannot be reached now.
        """
        try:
            from tallystick.postgres import (
                connection,
                driver,
                outcome,
                own_tables,
                schema,
                transactions,
            )
        except ImportError as error:
            if error.name is None or not error.name.startswith(("psycopg", "pgpq")):
                raise
            raise OptionError(
                f"writing to PostgreSQL needs psycopg and pgpq: {pip_install('postgres')}"
            ) from None
        session = connection.Session(self.dsn)
        try:
            table = session.run(
                f"checking table {self.table}", lambda conn: self._checked(conn, facts)
            )
            own = session.run("looking for its own tables", own_tables.own_schema)
            staging = session.run(
                "creating its own tables", lambda conn: self._ensure(conn, own, table)
            )
            server, database = session.run("asking who it is", outcome.identity)
            tokens = schema.tokens_of(own)
            tokens_id = session.run("asking", lambda conn: schema.table_id_of(conn, tokens))
        except BaseException:
            session.close()
            raise
        details = transactions.Details(
            self.transactions, own, table.sql, server, database, tokens_id
        )
        plan = transactions.PostgresPlan(
            self.dsn, table, tuple(self.key), details, Guarantee(self.guarantee), staging
        )
        return driver.PostgresCommitter(session, plan, owner)

    def _checked(self, connection: "Connection", facts: RunFacts) -> "Table":
        from tallystick.postgres import schema

        version = connection.info.server_version
        problems = []
        if version < _VERSION_MIN:
            problems.append(f"the server is of version {version // 10_000}: expected 14 or later")
        if self._exact and self.transactions == PREPARED:
            problems += _prepared_problems(_setting(connection, "max_prepared_transactions"), facts)
        if self._exact and not facts.are_checked and _setting(connection, "fsync") == "off":
            logger.warning("the PostgreSQL server has fsync=off: a crash of it can lose commits")
        if self.key and not self._exact:
            row = connection.execute(
                "SELECT has_database_privilege(current_database(), 'TEMPORARY')"
            ).fetchone()
            if row == (False,):
                problems.append("upserts need a temporary table: GRANT TEMPORARY ON DATABASE")
        for (function,) in connection.execute(_WITHHELD).fetchall() if self._exact else ():
            problems.append(f"recovery needs GRANT EXECUTE ON FUNCTION {function} TO the role")
        try:
            table = schema.read_table(connection, self.table, self.key)
        except OptionError as error:
            problems.append(str(error))
        if problems:
            raise OptionError(f"PostgreSQL: {'; '.join(problems)}")
        return table

    def _ensure(self, connection: "Connection", own: str, table: "Table") -> str:
        """Create the tables that the settings need; return that of staged rows, as SQL, or ""."""
        from tallystick.postgres import own_tables

        if self._exact:
            own_tables.ensure_schema(connection, own)
            if self.transactions == STAGED:
                return own_tables.ensure_staging(connection, own, table)
        return ""


def _setting(connection: "Connection", name: str) -> str:
    row = connection.execute("SELECT current_setting($1)", [name]).fetchone()
    assert row is not None
    return str(row[0])


def _prepared_problems(allowed: str, facts: RunFacts) -> list[str]:
    needed = _PREPARED_PER_TASK * facts.tasks
    if int(allowed) >= needed:
        return []
    return [
        f"max_prepared_transactions is {allowed}, and {facts.tasks} tasks need {needed} or more "
        f"(two each): all tasks of an epoch's last stage stay prepared until the epoch is decided, "
        f"and a shuffle can make more of them than run at a time. Raise it in postgresql.conf, "
        f'which takes a restart of the server, or use transactions="{STAGED}"'
    ]
