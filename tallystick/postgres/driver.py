"""The driver's side: what was prepared becomes visible, or is given up, or is proved lost.

Invariants:
    * A commit is answered COMMITTED only where PostgreSQL said so, or a token shows it; LOST only
      where neither the rows nor a token are there, and no token can come any more: a token that
      says "lost" has taken its place.
    * A token is deleted only long after its epoch, and the mark that says so is written with it.
      By then a later epoch of the same lineage was committed, before which everything earlier was
      settled: what has no token and is behind the mark was committed, since losses keep theirs.
    * What is pending is settled as its own details say, whatever the sink's settings are now.
"""

import logging
import threading
from collections.abc import Iterable
from typing import LiteralString

import psycopg
from psycopg import errors

from tallystick.errors import DataLossError, OptionError, RecordError, RetriableError
from tallystick.postgres.connection import (
    Connection,
    Session,
    literal,
    query,
    transaction,
)
from tallystick.postgres.names import (
    application_of,
    application_prefix,
    found,
    name_from,
    owner_prefix,
    prefix_of,
)
from tallystick.postgres.schema import ID, registry_of, tokens_of
from tallystick.postgres.statements import insert_token, move
from tallystick.postgres.transactions import Details, PostgresPlan
from tallystick.sink.two_phase import Committable, Outcome, Owner, Timeout, TransactionPlan

logger = logging.getLogger(__name__)

EPOCHS_PROVED = 100
"""For so many epochs tokens are kept; a checkpoint's manifests are kept for far fewer."""
_EPOCHS_BETWEEN_PRUNINGS = 10
_PRUNED = "pruned"
_END_MS = 10_000
_REGISTRIES = """
    SELECT quote_ident(n.nspname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relname = 'tallystick_staged' AND c.relkind = 'r'
      AND has_schema_privilege(n.oid, 'USAGE')
      AND has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'DELETE')
      AND (quote_ident(n.nspname) = $1 OR c.relowner = current_user::regrole)
"""
"""Besides the one of the sink's own schema only those that this user has made: a row names tables
that are then written to, and must not be anybody's."""


class PostgresCommitter:
    """See `TwoPhaseCommitSink`. Safe to call from several threads, one after another."""

    def __init__(self, session: Session, plan: PostgresPlan, owner: Owner) -> None:
        self._session, self._plan, self._owner = session, plan, owner
        self._lock = threading.Lock()
        self._pruned_at: dict[str, int] = {}

    @property
    def timeout(self) -> Timeout | None:
        """PostgreSQL keeps what is prepared for ever."""
        return None

    def plan(self) -> TransactionPlan:
        """The same for every epoch."""
        return self._plan

    def commit(self, committable: Committable) -> Outcome:
        """See `TwoPhaseCommitSink.commit`.

        Raises:
            OptionError: the role may not, or the tables were changed.
            RecordError: staged rows break a constraint; they stay, and can be tried again.
        """
        details = Details.from_text(committable.details)
        if details.mode == "open":
            raise RetriableError(f"PostgreSQL: {self.describe(committable)}: not prepared yet")
        way = _commit_prepared if details.mode == "prepared" else _commit_staged
        with self._lock:
            try:
                outcome = self._session.run(
                    f"committing {committable.name}", lambda each: way(each, committable, details)
                )
            except RecordError as error:
                raise RecordError(
                    f"{error}. It stays as it is ({self.describe(committable)}) and is tried again "
                    f"at the next start: change the table, or the rows that are in the way"
                ) from None
            if outcome is Outcome.COMMITTED:
                self._prune(committable, details)
        return outcome

    def abort(self, committable: Committable) -> None:
        """See `TwoPhaseCommitSink.abort`."""
        details = Details.from_text(committable.details)
        ways = {"prepared": _abort_prepared, "staged": _abort_staged, "open": _abort_open}
        way = ways[details.mode]
        with self._lock:
            self._session.run(
                f"aborting {committable.name}", lambda each: way(each, committable, details)
            )

    def lingering(self, owner: Owner) -> Iterable[Committable]:
        """See `TwoPhaseCommitSink.lingering`; of the owner's lineage, in this database.

        Prepared and staged ones, whatever this sink's own way is, in whatever schema. And those
        that a session has open: of a task that the driver believes dead, and that could prepare
        what nobody would look for any more. To abort one ends its session.
        """

        def look(connection: Connection) -> list[Committable]:
            # In the order that a transaction goes through: what moves on meanwhile is seen twice.
            made = self._open(connection, owner)
            made += self._prepared(connection, owner)
            made += self._staged(connection, owner)
            return list({each.name: each for each in made}.values())

        with self._lock:
            return self._session.run("looking for what is pending", look)

    def _open(self, connection: Connection, owner: Owner) -> list[Committable]:
        rows = connection.execute(
            "SELECT application_name, (extract(epoch FROM xact_start) * 1000)::bigint "
            "FROM pg_stat_activity WHERE datname = current_database() "
            "AND starts_with(application_name, $1) AND xact_start IS NOT NULL",
            [application_prefix(owner)],
        ).fetchall()
        text = _details(self._plan.details, "open", self._plan.details.schema)
        return [
            found(name_from(application, owner), owner.sink, text, begun_ms=begun_ms)
            for application, begun_ms in rows
        ]

    def _prepared(self, connection: Connection, owner: Owner) -> list[Committable]:
        prefix = owner_prefix(owner)
        made: list[Committable] = []
        prepared = connection.execute(
            "SELECT gid, database = current_database(), database, "
            "(extract(epoch FROM prepared) * 1000)::bigint "
            "FROM pg_prepared_xacts WHERE starts_with(gid, $1) ORDER BY gid",
            [prefix],
        ).fetchall()
        mine = self._plan.details
        for name, here, database, prepared_ms in prepared:
            if here:
                text = _details(mine, "prepared", mine.schema)
                made.append(found(name, owner.sink, text, begun_ms=prepared_ms))
            else:
                logger.warning(
                    "prepared transaction %s is in database %s, which this dsn does not lead to: "
                    "it can be settled only from there",
                    name,
                    database,
                )
        return made

    def _staged(self, connection: Connection, owner: Owner) -> list[Committable]:
        made: list[Committable] = []
        schemas = connection.execute(query(_REGISTRIES), [self._plan.details.schema]).fetchall()
        for (schema,) in schemas:
            try:
                rows = connection.execute(
                    query(
                        f"SELECT name, record_count, begun_ms FROM {registry_of(schema)} "
                        f"WHERE starts_with(name, $1) ORDER BY name"
                    ),
                    [owner_prefix(owner)],
                ).fetchall()
            except psycopg.Error as error:
                if connection.closed or schema == self._plan.details.schema:
                    raise
                # Whoever has that schema must not be able to stop this pipeline's recovery.
                logger.warning(
                    "%s cannot be read (%s): if this pipeline staged rows there, they stay for now",
                    registry_of(schema),
                    error.diag.message_primary,
                )
                continue
            text = _details(self._plan.details, "staged", schema)
            made += [found(name, owner.sink, text, count, begun) for name, count, begun in rows]
        return made

    def describe(self, committable: Committable) -> str:
        """See `TwoPhaseCommitSink.describe`."""
        details = Details.from_text(committable.details)
        rows = f"{committable.record_count or 'an unknown number of'} rows"
        if details.mode == "open":
            return (
                f"PostgreSQL, database {details.database}: a session that is writing "
                f"{committable.name!r} for table {details.table}; see pg_stat_activity"
            )
        if details.mode == "prepared":
            return (
                f"PostgreSQL, database {details.database}: prepared transaction "
                f"{committable.name!r} of {rows} for table {details.table}; see pg_prepared_xacts"
            )
        return (
            f"PostgreSQL, database {details.database}: {rows} for table {details.table}, staged "
            f"under {committable.name!r}; see {registry_of(details.schema)}"
        )

    def close(self) -> None:
        """See `TwoPhaseCommitSink.close`."""
        with self._lock:
            self._session.close()

    def _prune(self, committable: Committable, details: Details) -> None:
        """Delete old tokens now and then; that it fails harms nothing, and says so."""
        prefix, epoch = prefix_of(committable.name), committable.checkpoint_id
        if epoch < self._pruned_at.get(prefix, EPOCHS_PROVED):
            return
        self._pruned_at[prefix] = epoch + _EPOCHS_BETWEEN_PRUNINGS
        try:
            self._session.run(
                "deleting old tokens",
                lambda each: prune(each, prefix, details.schema, epoch - EPOCHS_PROVED),
            )
        except (RetriableError, OptionError, RecordError) as error:
            logger.warning("old tokens were not deleted: %s", error)


def _details(mine: Details, mode: str, schema: str) -> str:
    tokens_id = mine.tokens_id if schema == mine.schema else 0
    return Details(mode, schema, mine.table, mine.server, mine.database, tokens_id).to_text()


def _commit_prepared(connection: Connection, committable: Committable, details: Details) -> Outcome:
    try:
        connection.execute(query(f"COMMIT PREPARED {literal(committable.name)}"))
    except errors.UndefinedObject:
        # It is nowhere on the server: one of another database, or one that another session is
        # just committing, would be another error. And a commit shows its rows, the token among
        # them, before the server forgets the name.
        return _proved(connection, committable, details)
    return Outcome.COMMITTED


def _abort_prepared(connection: Connection, committable: Committable, _: Details) -> None:
    try:
        connection.execute(query(f"ROLLBACK PREPARED {literal(committable.name)}"))
    except errors.UndefinedObject:
        return


def _commit_staged(connection: Connection, committable: Committable, details: Details) -> Outcome:
    name, number = committable.name, 0
    with transaction(connection):
        # Whoever else commits or aborts it waits here, and then does not find it.
        row = connection.execute(
            query(
                f"DELETE FROM {registry_of(details.schema)} WHERE name = $1 "
                f"RETURNING id, target, staging, columns, key, record_count"
            ),
            [name],
        ).fetchone()
        if row is not None:
            number, target, staging, columns, key, record_count = row
            written = connection.execute(*_both(insert_token(details.schema, committable))).rowcount
            if written != 1:
                raise DataLossError(
                    f"PostgreSQL: {name} is staged, and {tokens_of(details.schema)} says that it "
                    f"was committed or given up: somebody has changed our tables by hand. Compare "
                    f"the rows in {staging} with {target}, then delete what is not right"
                )
            connection.execute(query(move(staging, target, columns, key)), [number])
            moved = connection.execute(
                query(f"DELETE FROM {staging} WHERE {ID} = $1"), [number]
            ).rowcount
            if moved != record_count:
                raise DataLossError(
                    f"PostgreSQL: {name} staged {record_count} rows in {staging}, and {moved} are "
                    f"there: somebody has changed them by hand. Nothing was committed; to go on "
                    f"without them, delete it from {registry_of(details.schema)}"
                )
    return Outcome.COMMITTED if row is not None else _proved(connection, committable, details)


def _abort_staged(connection: Connection, committable: Committable, details: Details) -> None:
    with transaction(connection):
        row = connection.execute(
            query(
                f"DELETE FROM {registry_of(details.schema)} WHERE name = $1 RETURNING id, staging"
            ),
            [committable.name],
        ).fetchone()
        if row is not None:
            connection.execute(query(f"DELETE FROM {row[1]} WHERE {ID} = $1"), [row[0]])


def _abort_open(connection: Connection, committable: Committable, details: Details) -> None:
    """End the session, then undo what it may have finished before that."""
    sessions = "FROM pg_stat_activity WHERE datname = current_database() AND application_name = $1"
    application = application_of(committable.name)
    ended = connection.execute(
        query(f"SELECT bool_and(pg_terminate_backend(pid, $2)) {sessions}"), [application, _END_MS]
    ).fetchone()
    # The server also says "no" of one that had ended by itself when it was its turn.
    left = connection.execute(query(f"SELECT {sessions}"), [application]).rowcount
    if ended == (False,) and left:
        raise RetriableError(
            f"PostgreSQL: the session that writes {committable.name} did not end in {_END_MS} ms"
        )
    _abort_prepared(connection, committable, details)
    registry = registry_of(details.schema)
    if connection.execute("SELECT to_regclass($1)", [registry]).fetchone() != (None,):
        _abort_staged(connection, committable, details)


def _proved(connection: Connection, committable: Committable, details: Details) -> Outcome:
    """What became of a committable that is not there any more.

    Raises:
        DataLossError: this server cannot know.
    """
    name, tokens = committable.name, tokens_of(details.schema)
    mark = prefix_of(name) + _PRUNED
    table_id = table_id_of(connection, tokens)
    known = dict(_tokens(connection, tokens, name, mark)) if table_id else {}
    if name not in known and known.get(mark, (False, 0))[1] > committable.checkpoint_id:
        return Outcome.COMMITTED
    if name not in known:
        _refuse_elsewhere(connection, committable, details, table_id)
        # Were the transaction under way somewhere after all, this would wait for its end.
        connection.execute(*_both(insert_token(details.schema, committable, lost=True)))
        known = dict(_tokens(connection, tokens, name, mark))
    lost, _ = known[name]
    return Outcome.LOST if lost else Outcome.COMMITTED


def _refuse_elsewhere(
    connection: Connection, committable: Committable, details: Details, table_id: int
) -> None:
    """That there is no token proves nothing where it would not be."""
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
            f"PostgreSQL: {committable.name} is not prepared any more, and the table "
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
    return [(each, (lost, checkpoint_id)) for each, lost, checkpoint_id in found_rows]


def _both(statement: tuple[str, list[object]]) -> tuple[LiteralString, list[object]]:
    return query(statement[0]), statement[1]


def prune(connection: Connection, prefix: str, schema: str, below: int) -> None:
    """Delete the tokens of an owner's commits before a checkpoint, and write down that it was done.

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
    """The server's number of a table, which one that is created again does not get; 0: none."""
    row = connection.execute("SELECT coalesce(to_regclass($1)::oid::bigint, 0)", [table]).fetchone()
    assert row is not None
    return int(row[0])


def identity(connection: Connection) -> tuple[str, str]:
    """The server's system identifier, empty if it does not say, and the database's name."""
    try:
        row = connection.execute(
            "SELECT system_identifier::text, current_database() FROM pg_control_system()"
        ).fetchone()
    except (errors.InsufficientPrivilege, errors.UndefinedFunction):
        row = connection.execute("SELECT '', current_database()").fetchone()
    assert row is not None
    return row[0], row[1]
