"""The outcome of a committable: its commit, its abort, and the proof of either.

Each function runs on a connection of the driver's, in autocommit, with its own search_path. The
tables of tokens and of staged rows are those of the schema that a committable's details name: ours,
or for a committable of an earlier build the user's, see `earlier_tables`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import LiteralString

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
from tallystick.postgres.earlier_tables import refuse_changed, strangers_hand
from tallystick.postgres.names import (
    application_of,
    deletion,
    insert_token,
    move,
    prefix_of,
    staged_id,
)
from tallystick.postgres.own_tables import refuse_loss
from tallystick.postgres.schema import (
    ID,
    read_tokens,
    refuse_other_keys,
    registry_of,
    table_id_of,
    tokens_of,
)
from tallystick.postgres.transactions import Details

logger = logging.getLogger(__name__)

_PRUNED = "pruned"
_END_MS = 10_000
_WAIT_LESS = """
    SELECT set_config('lock_timeout', least($1::bigint, nullif(
        extract(epoch FROM current_setting('lock_timeout')::interval) * 1000, 0)::bigint)::text,
        true)
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
    connection: Connection,
    committable: Committable,
    details: Details,
    _: Details,
    until: float | None = None,
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
    connection: Connection,
    committable: Committable,
    details: Details,
    mine: Details,
    until: float | None = None,
) -> Outcome:
    """Move staged rows into the user's table, or prove their outcome.

    Args:
        connection: to the server.
        committable: the rows.
        details: of the committable; tables that are not of our schema were checked for strangers.
        mine: the run's, with our schema.
        until: a point of `time.monotonic` up to which a lock is waited for; None: the usual time.
    """
    name, registry = committable.name, registry_of(details.schema)
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
            if details.schema != mine.schema:
                refuse_changed(connection, committable, details, row)
            number = staged_id(name)
            target, staging, columns, key, record_count = row
            written = connection.execute(*_both(insert_token(details.schema, committable))).rowcount
            if written != 1:
                raise DataLossError(
                    f"PostgreSQL: {name} is staged, and {tokens_of(details.schema)} says that it "
                    f"was committed or given up: somebody has changed our tables by hand. Compare "
                    f"the rows in {staging} with {target}, then delete what is not right"
                )
            connection.execute(USERS_PATH)
            moving = query(move(staging, target, columns, key))
            try:
                with connection.transaction():
                    # It keeps both tables as they are, and needs no right that LOCK would.
                    connection.execute(query(f"EXPLAIN {moving}"), [number])
            except errors.DatatypeMismatch:  # which column, and what to do, this tells
                refuse_loss(connection, staging, target, columns, number)
                raise
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


def abort_staged(
    connection: Connection,
    committable: Committable,
    details: Details,
    mine: Details,
    until: float | None = None,
) -> None:
    """Delete staged rows; of a row of an earlier registry that may be a trap, only the row itself.

    Args:
        connection: to the server.
        committable: the rows.
        details: of the committable.
        mine: the run's, with our schema, and with the sink's table, whose owner is trusted with
            the tables of an earlier build beside it.
        until: see `commit_staged`.
    """
    name, registry = committable.name, registry_of(details.schema)
    if not table_id_of(connection, registry):
        return
    if details.schema != mine.schema and (
        problem := strangers_hand(connection, details.schema, mine.table)
    ):
        logger.warning("PostgreSQL: %r, which no epoch needs, stays: %s", name, problem)
        return
    with transaction(connection):
        _wait_less(connection, until)
        row = connection.execute(
            query(f"DELETE FROM {registry} WHERE name = $1 RETURNING staging"), [name]
        ).fetchone()
        if row is None:
            return
        if details.schema != mine.schema and (
            problem := strangers_hand(connection, details.schema, mine.table, row[0])
        ):
            logger.warning(
                "PostgreSQL: row %r of %s, which no epoch needs, is deleted, and no other table "
                "touched: %s. Rows that belong to it have %s = %d",
                name,
                registry,
                problem,
                ID,
                staged_id(name),
            )
            return
        connection.execute(query(deletion(row[0])), [staged_id(name)])


def abort_open(
    connection: Connection,
    committable: Committable,
    details: Details,
    mine: Details,
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
    abort_staged(connection, committable, details, mine, until)


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
    known: dict[str, tuple[bool, int]] = {}
    if table_id_of(connection, tokens):
        known = read_tokens(connection, tokens, [name, mark])
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
