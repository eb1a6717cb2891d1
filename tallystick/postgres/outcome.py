"""The outcome of a committable: its commit, its abort, and the proof of either.

Each function runs on a connection of the driver's, in autocommit, with its own search_path.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, LiteralString

from psycopg import errors

from tallystick.epoch.two_phase import Committable, Outcome
from tallystick.errors import DataLossError, OptionError, RetriableError
from tallystick.postgres.connection import (
    USERS_PATH,
    Connection,
    literal,
    query,
    seconds_until,
    transaction,
)
from tallystick.postgres.names import (
    application_of,
    deletion,
    fingerprint,
    insert_token,
    move,
    prefix_of,
    staged_id,
)
from tallystick.postgres.own_tables import refuse_loss
from tallystick.postgres.schema import (
    ID,
    NO_TABLE,
    Table,
    lock_without_code,
    refuse_other_keys,
    registry_of,
    staging_named,
    strangers_hand,
    table_at,
    tokens_of,
)
from tallystick.postgres.transactions import Details

logger = logging.getLogger(__name__)

_PRUNED = "pruned"
_END_MS = 10_000
_SAID_MAX = 200
_WAIT_LESS = """
    SELECT set_config('lock_timeout', least($1::bigint, nullif(
        extract(epoch FROM current_setting('lock_timeout')::interval) * 1000, 0)::bigint)::text,
        true)
"""
_CHANGEABLE = """
    SELECT 1 FROM pg_class WHERE oid = to_regclass($1) AND relkind IN ('r', 'p')
    AND has_table_privilege(oid, 'SELECT') AND has_table_privilege(oid, 'DELETE')
"""
_WAIT_FOR_STANDBYS = "SELECT pg_logical_emit_message(true, 'tallystick', ''::text)"
"""After a restart during the wait for a synchronous standby, a server shows a commit that perhaps
no standby has. A later commit that writes something waits until the standby has both."""
SESSIONS = (
    "FROM pg_stat_activity WHERE datname = current_database() "
    "AND starts_with(application_name, $1) "
    "AND (usename = session_user OR pg_has_role(usesysid, 'USAGE'))"
)
"""The sessions that this role may end: any role may name its sessions as it likes."""
MAY_END = (
    "(owner = current_user "
    "OR EXISTS (SELECT FROM pg_roles WHERE rolname = current_user AND rolsuper))"
)
"""A condition on pg_prepared_xacts; to have been granted the owner's role is not enough."""


@contextmanager
def as_who_connected(connection: Connection) -> Iterator[None]:
    """Run a transaction as the login role, the owner of sessions, without the role that was set."""
    with connection.transaction():
        connection.execute("SET LOCAL ROLE NONE")
        yield


def commit_prepared(
    connection: Connection, committable: Committable, details: Details, until: float | None = None
) -> Outcome:
    """Commit a prepared transaction, or prove its outcome; for `until` see `commit_staged`.

    Only the proof may have to wait for a lock.
    """
    try:
        connection.execute(query(f"COMMIT PREPARED {literal(committable.name)}"))
    except errors.UndefinedObject:
        # It is nowhere on the server: one of another database, or one that another session is
        # just committing, would be another error. And a commit shows its rows, the token among
        # them, before the server forgets the name.
        return _proved(connection, committable, details, until)
    except (errors.InsufficientPrivilege, errors.FeatureNotSupported):
        # Once ours is settled, its name is free: another role's, or in another database.
        outcome = _outcome_of_token(connection, committable, details)
        if outcome is None:
            raise _of_others(connection, committable) from None
        return outcome
    return Outcome.COMMITTED


def _of_others(connection: Connection, committable: Committable) -> OptionError:
    row = connection.execute(
        "SELECT owner, database, database = current_database() FROM pg_prepared_xacts "
        "WHERE gid = $1",
        [committable.name],
    ).fetchone()
    role, database, is_here = row or (None, None, True)
    where = "" if is_here else f", in another database, {database!r}, and has to be settled there"
    return OptionError(
        f"PostgreSQL: prepared transaction {committable.name!r} of epoch "
        f"{committable.checkpoint_id} is decided, and belongs to role {role!r}{where}: only "
        f"that role or a superuser may commit it. If the pipeline ran so before, have one of them "
        f"say COMMIT PREPARED, and start again; if not, somebody has taken the name: have it "
        f"rolled back, and start again to see what became of ours"
    )


def abort_prepared(connection: Connection, committable: Committable, *_: object) -> None:
    """Roll a prepared transaction back if it exists and is ours; `lingering` warns of others."""
    ours = connection.execute(
        query(
            f"SELECT FROM pg_prepared_xacts "
            f"WHERE gid = $1 AND database = current_database() AND {MAY_END}"
        ),
        [committable.name],
    )
    if not ours.rowcount:
        return
    try:
        connection.execute(query(f"ROLLBACK PREPARED {literal(committable.name)}"))
    except errors.UndefinedObject:
        return


def commit_staged(
    connection: Connection, committable: Committable, details: Details, until: float | None = None
) -> Outcome:
    """Move staged rows into the user's table, or prove their outcome.

    Args:
        connection: to the server.
        committable: the rows.
        details: of the committable.
        until: a point of `time.monotonic` up to which a lock is waited for; None: the usual time.
    """
    name, table = committable.name, table_at(details.schema, details.table)
    registry, target = registry_of(details.schema), NO_TABLE if table is None else table.sql
    if problem := strangers_hand(connection, registry, target):
        raise OptionError(
            f"PostgreSQL: {name!r} is decided, and is committed at the first start after this is "
            f"solved: {problem}"
        )
    with transaction(connection):
        _wait_less(connection, until)
        # Another process that commits or aborts it waits here, and then does not find it.
        row = connection.execute(
            query(
                f"DELETE FROM {registry} WHERE name = $1 "
                f"RETURNING target, staging, columns, key, record_count"
            ),
            [name],
        ).fetchone()
        if row is not None:
            number = staged_id(name)
            table, columns, key, record_count = _checked(connection, committable, details, row)
            target, staging = table.sql, table.staging
            written = connection.execute(*_both(insert_token(details.schema, committable))).rowcount
            if written != 1:
                raise DataLossError(
                    f"PostgreSQL: {name} is staged, and {tokens_of(details.schema)} says that it "
                    f"was committed or given up: somebody has changed our tables by hand. Compare "
                    f"the rows in {staging} with {target}, then delete what is not right"
                )
            connection.execute(USERS_PATH)
            moving = query(move(staging, target, columns, key))
            # Planned only, it keeps both tables as they are, and needs no right that LOCK would.
            connection.execute(query(f"EXPLAIN {moving}"), [number])
            changed = refuse_loss(connection, staging, target, columns, number)
            if key:
                refuse_other_keys(connection, target, key)
            connection.execute(query(move(staging, target, columns, key, changed)), [number])
            moved = connection.execute(query(deletion(staging)), [number]).rowcount
            if moved != record_count:
                raise DataLossError(
                    f"PostgreSQL: {name} staged {record_count} rows in {staging}, and {moved} are "
                    f"there: somebody has changed them by hand. Nothing was committed; to go on "
                    f"without them, delete it from {registry}"
                )
    return (
        Outcome.COMMITTED if row is not None else _proved(connection, committable, details, until)
    )


def _wait_less(connection: Connection, until: float | None) -> None:
    """Limit the server's own wait for a lock: a session that is cut off would wait on."""
    if until is not None:
        connection.execute(_WAIT_LESS, [round(seconds_until(until) * 1000) or 1])


def _checked(
    connection: Connection, committable: Committable, details: Details, row: tuple[Any, ...]
) -> tuple[Table, list[str], list[str], int]:
    """Check that nobody has changed a row of the registry; return the content.

    Returns:
        The table, the columns, the columns of the key, and the number of rows.

    Raises:
        DataLossError: the row was changed since.
        OptionError: a table was renamed or is gone, or strangers could run code in the staged one.
    """
    target, staging, columns, key, record_count = row
    registry, table = registry_of(details.schema), table_at(details.schema, details.table)
    seal = fingerprint(target, staging, columns, key)
    changed = bool(details.fingerprint) and details.fingerprint != seal
    # What a recovery finds has the count of this very row.
    if changed or record_count != committable.record_count:
        raise DataLossError(
            f"PostgreSQL: row {committable.name!r} of {registry} is not as the task has written it "
            f"({committable.record_count} rows for {details.table}): it says {record_count} rows "
            f"from {staging!r} for {target!r}. Somebody has changed it. Nothing was committed, and "
            f"no other table touched. See who may write into {registry}, and put the row right; to "
            f"go on without its rows, delete it"
        )
    if table is None or (table.sql, table.staging) != (target, staging):
        raise OptionError(
            f"PostgreSQL: row {committable.name!r} of {registry} says that rows go from "
            f"{staging!r} to {target!r}: expected a table of schema {details.schema} and its own "
            f"staging table. It was not made by this pipeline, or tables were renamed since"
        )
    if staging_named(connection, details.schema, staging) is None:
        raise OptionError(
            f"PostgreSQL: {staging}, which holds the rows of {committable.name!r}, is gone"
        )
    if problem := strangers_hand(connection, staging, target):
        raise OptionError(
            f"PostgreSQL: {committable.name!r} is decided, and {record_count} rows of it wait in "
            f"{staging}; they are committed at the first start after this is solved: {problem}"
        )
    return table, columns, key, record_count


def abort_staged(
    connection: Connection,
    committable: Committable,
    details: Details,
    target: str,
    until: float | None = None,
) -> None:
    """Delete staged rows; of a registry row by another user, only the row itself.

    Args:
        connection: to the server.
        committable: the rows.
        details: of the committable.
        target: the user's table, whose owner is trusted.
        until: see `commit_staged`.
    """
    name, number, registry = (
        committable.name,
        staged_id(committable.name),
        registry_of(details.schema),
    )
    with transaction(connection):
        _wait_less(connection, until)
        row = connection.execute(
            query(f"DELETE FROM {registry} WHERE name = $1 RETURNING staging"), [name]
        ).fetchone()
        if row is None:
            return
        staging = staging_named(connection, details.schema, row[0])
        if staging is None:
            logger.warning(
                "PostgreSQL: row %r of %s says that its rows are in %r, which is no staging table "
                "of ours in that schema: the row is deleted, and no other table touched. If this "
                "pipeline did not write it, see who may write into %s",
                name,
                registry,
                row[0][:_SAID_MAX],
                registry,
            )
            return
        problem = strangers_hand(connection, staging, target)
        # As when table= is another one now, or its owner: what holds rows only is cleared anyway.
        if not problem or lock_without_code(connection, staging, (ID, "int8")):
            connection.execute(query(f"DELETE FROM ONLY {staging} WHERE {ID} = $1"), [number])
        else:
            logger.warning(
                "PostgreSQL: row %r of %s, which no epoch needs, is deleted, and what may belong "
                "to it in %r is not: %s. Then run DELETE FROM %s WHERE %s = %d",
                name,
                registry,
                row[0][:_SAID_MAX],
                problem,
                staging,
                ID,
                number,
            )


def abort_open(
    connection: Connection,
    committable: Committable,
    details: Details,
    target: str,
    until: float | None = None,
) -> None:
    """End the attempt's session, then abort the transaction it may have prepared or staged."""
    sessions = f"{SESSIONS} AND application_name = $1"
    application = application_of(committable.name)
    with as_who_connected(connection):
        ended = connection.execute(
            query(f"SELECT bool_and(pg_terminate_backend(pid, $2)) {sessions}"),
            [application, _END_MS],
        ).fetchone()
    # The server also says "no" of one that had ended by itself when it was its turn. And it shows
    # one transaction the same sessions throughout.
    with as_who_connected(connection):
        remaining = connection.execute(query(f"SELECT {sessions}"), [application]).rowcount
    if ended == (False,) and remaining:
        raise RetriableError(
            f"PostgreSQL: the session that writes {committable.name} did not end in {_END_MS} ms"
        )
    abort_prepared(connection, committable)
    # Where others could run their code in it, or we may not change it, the attempt staged nothing.
    registry = registry_of(details.schema)
    is_ours = connection.execute(_CHANGEABLE, [registry]).fetchone() is not None
    if is_ours and not strangers_hand(connection, registry, target):
        abort_staged(connection, committable, details, target, until)


def _proved(
    connection: Connection, committable: Committable, details: Details, until: float | None
) -> Outcome:
    """Return the outcome of a missing committable: by its token, else by a new token of the loss.

    Raises:
        DataLossError: the server cannot have the token, so that a missing one proves nothing.
    """
    outcome = _outcome_of_token(connection, committable, details)
    if outcome is None:
        table_id = table_id_of(connection, tokens_of(details.schema))
        _refuse_elsewhere(connection, committable, details, table_id)
        # Were the transaction under way somewhere after all, this would wait for its end.
        with transaction(connection):
            _wait_less(connection, until)
            connection.execute(*_both(insert_token(details.schema, committable, lost=True)))
        outcome = _outcome_of_token(connection, committable, details)
        assert outcome is not None, "its token was written"
    return outcome


def _outcome_of_token(
    connection: Connection, committable: Committable, details: Details
) -> Outcome | None:
    """Return the outcome proved by a token or by the mark; None: neither exists."""
    name, tokens = committable.name, tokens_of(details.schema)
    mark = prefix_of(name) + _PRUNED
    known = {}
    if table_id_of(connection, tokens):
        known = dict(_tokens(connection, tokens, name, mark))
    is_behind = known.get(mark, (False, 0))[1] > committable.checkpoint_id
    if name not in known and not is_behind:
        return None
    connection.execute(_WAIT_FOR_STANDBYS)
    lost, _ = known.get(name, (False, 0))
    return Outcome.LOST if lost else Outcome.COMMITTED


def _refuse_elsewhere(
    connection: Connection, committable: Committable, details: Details, table_id: int
) -> None:
    """Raise if the token would be elsewhere, so that a missing token proves nothing."""
    server, database = identity(connection)
    other_server = details.server and server and details.server != server
    if other_server or details.database != database:
        raise DataLossError(
            f"PostgreSQL: {committable.name} was prepared in database {details.database} of server "
            f"{details.server or '?'}, and the dsn leads to database {database} of server "
            f"{server or '?'}, which does not know it: let it lead to the first until it is settled"
        )
    if not table_id or (details.tokens_id and details.tokens_id != table_id):
        raise DataLossError(
            f"PostgreSQL: {committable.name} is no longer prepared, and the table "
            f"{tokens_of(details.schema)} was dropped since, which would say whether it was "
            f"committed: see whether {details.table} has its {committable.record_count} rows"
        )


def _tokens(
    connection: Connection, tokens: str, name: str, mark: str
) -> list[tuple[str, tuple[bool, int]]]:
    found_rows = connection.execute(
        query(f"SELECT name, lost, checkpoint_id FROM {tokens} WHERE name IN ($1, $2)"),
        [name, mark],
    ).fetchall()
    return [(found_name, (lost, checkpoint_id)) for found_name, lost, checkpoint_id in found_rows]


def _both(statement: tuple[str, list[object]]) -> tuple[LiteralString, list[object]]:
    return query(statement[0]), statement[1]


def prune(connection: Connection, prefix: str, schema: str, below: int) -> None:
    """Delete the tokens of an owner's commits before a checkpoint, and write the mark of that.

    Args:
        connection: in autocommit.
        prefix: of the owner's names.
        schema: where the tokens are.
        below: the first checkpoint whose tokens stay.
    """
    _, pipeline, sink, lineage, *_ = prefix.split(":")
    tokens = tokens_of(schema)
    connection.execute(
        query(
            f"WITH gone AS (DELETE FROM {tokens} WHERE name ^@ $1 AND NOT lost "
            f"AND checkpoint_id < $2 AND name <> $3 RETURNING 1) "
            f"INSERT INTO {tokens} (name, pipeline, sink, lineage, checkpoint_id, task) "
            f"SELECT $3, $4, $5, $6, $2, -1 "
            f"WHERE EXISTS (SELECT FROM gone) ON CONFLICT (name) DO UPDATE "
            f"SET checkpoint_id = greatest({tokens}.checkpoint_id, EXCLUDED.checkpoint_id)"
        ),
        [prefix, below, prefix + _PRUNED, pipeline, sink, lineage],
    )


def table_id_of(connection: Connection, table: str) -> int:
    """Return the server's number of a table; a table created again has another; 0: no table."""
    row = connection.execute("SELECT coalesce(to_regclass($1)::oid::bigint, 0)", [table]).fetchone()
    assert row is not None
    return int(row[0])


def identity(connection: Connection) -> tuple[str, str]:
    """Return the server's system identifier, empty if it does not say, and the database's name."""
    try:
        row = connection.execute(
            "SELECT system_identifier::text, current_database() FROM pg_control_system()"
        ).fetchone()
    except (errors.InsufficientPrivilege, errors.UndefinedFunction):
        row = connection.execute("SELECT '', current_database()").fetchone()
    assert row is not None
    return row[0], row[1]
