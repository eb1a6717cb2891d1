"""The driver's side of the sink: prepared transactions are committed, aborted, or proved lost.

Invariants:
    * A commit is answered COMMITTED only where PostgreSQL said so, or a token shows it; LOST only
      where neither the rows nor a token exist, and no token can come any more: a token that says
      "lost" has taken its place.
    * A token is deleted only long after its epoch, in one statement with the write of a mark.
      By then a later epoch of the same lineage was committed, before which everything earlier was
      settled: a transaction before the mark and without a token was committed, since the tokens of
      losses are kept.
    * A pending transaction is settled by its own details, independent of the sink's settings now.
    * Text that other roles may write, into our tables, as names of prepared transactions or of
      sessions, makes nothing run with our rights, and keeps nothing of ours from being settled: it
      is named in a warning, and left alone or deleted.
"""

import logging
import threading
from collections.abc import Callable, Iterable

import psycopg

from tallystick.epoch.two_phase import (
    PATIENCE_S,
    Committable,
    Outcome,
    Owner,
    Timeout,
    TransactionPlan,
)
from tallystick.errors import ManifestError, OptionError, RecordError, RetriableError
from tallystick.host.stopwatch import now_ms
from tallystick.postgres.connection import Connection, Session, query
from tallystick.postgres.names import (
    NAME_BYTES_MAX,
    application_prefix,
    committable_of,
    name_from,
    owner_prefix,
    prefix_of,
)
from tallystick.postgres.outcome import (
    MAY_END,
    SESSIONS,
    abort_open,
    abort_prepared,
    abort_staged,
    as_who_connected,
    commit_prepared,
    commit_staged,
    prune,
)
from tallystick.postgres.schema import (
    NO_TABLE,
    lock_without_code,
    registry_of,
    staging_named,
    strangers_hand,
    table_at,
)
from tallystick.postgres.transactions import Details, PostgresPlan

logger = logging.getLogger(__name__)

EPOCHS_PROVED = 100
"""The number of epochs whose tokens are kept; a checkpoint's manifests are kept for far fewer."""
_EPOCHS_BETWEEN_PRUNINGS = 10
_REGISTRIES = """
    SELECT quote_ident(n.nspname), quote_ident(n.nspname) = $1
           OR c.relowner = (SELECT oid FROM pg_roles WHERE rolname = current_user)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relname = 'tallystick_staged' AND c.relkind = 'r'
      AND has_schema_privilege(n.oid, 'USAGE')
      AND has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'DELETE')
"""
"""Ours are, besides the one of the sink's own schema, only those that this user has
made: a row names tables that are then written to, and must not be another user's."""
_LOOK_MS = 2_000
"""The time limit for reading another role's table, which may be large."""


class PostgresCommitter:
    """See `TwoPhaseCommitSink`. Safe to call from several threads, one after another."""

    def __init__(self, session: Session, plan: PostgresPlan, owner: Owner) -> None:
        self._session, self._plan, self._owner = session, plan, owner
        self._lock = threading.Lock()
        self._pruned_at: dict[str, int] = {}
        self._warned: set[str] = set()

    @property
    def timeout(self) -> Timeout | None:
        """None: PostgreSQL keeps prepared transactions for ever."""
        return None

    def plan(self) -> TransactionPlan:
        """Return the plan of the run, the same for every epoch."""
        return self._plan

    def commit(self, committable: Committable) -> Outcome:
        """See `TwoPhaseCommitSink.commit`.

        Raises:
            ManifestError: the name is none of ours.
            OptionError: the role may not commit, or the tables were changed.
            RecordError: staged rows break a constraint; they stay, and can be tried again.
        """
        return self._commit(committable, None)

    @property
    def commits_at_once(self) -> int:
        """See `participants.CommitsBeside`; tasks' rows may touch the same keys."""
        return 1

    @property
    def commit_patience_s(self) -> float:
        """See `participants.CommitsBeside`."""
        return PATIENCE_S

    def commit_by(self, committable: Committable, until: float) -> Outcome:
        """See `participants.CommitsBeside`; up to ten seconds more, to ask if it works."""
        return self._commit(committable, until)

    def _commit(self, committable: Committable, until: float | None) -> Outcome:
        details = Details.from_text(committable.details)
        if committable_of(committable.name, committable.sink, committable.details) is None:
            raise ManifestError(
                f"PostgreSQL: a manifest names the transaction {committable.name!r}, as no task "
                f"does: it was edited, or made by somebody else. Nothing was changed. Put a whole "
                f"copy of the checkpoint back"
            )
        if details.mode == "open":
            raise RetriableError(f"PostgreSQL: {self.describe(committable)}: not prepared yet")
        way = commit_prepared if details.mode == "prepared" else commit_staged

        def work(connection: Connection) -> Outcome:
            return way(connection, committable, details, until)

        with self._lock:
            try:
                outcome = self._session.run(f"committing {committable.name}", work, until)
            except RecordError as error:
                raise RecordError(
                    f"{error}. It stays as it is ({self.describe(committable)}) and is tried again "
                    f"at the next start: change the table, or the rows that are in the way"
                ) from None
            if outcome is Outcome.COMMITTED:
                self._prune(committable, details, until)
        return outcome

    def abort(self, committable: Committable) -> None:
        """See `TwoPhaseCommitSink.abort`."""
        self._abort(committable, None)

    def abort_by(self, committable: Committable, until: float) -> None:
        """See `participants.AbortsBy`; as for `commit_by`."""
        self._abort(committable, until)

    def _abort(self, committable: Committable, until: float | None) -> None:
        details = Details.from_text(committable.details)
        ways: dict[str, Callable[[Connection, Committable, Details, str, float | None], None]]
        ways = {"prepared": abort_prepared, "staged": abort_staged, "open": abort_open}
        way, target = ways[details.mode], self._target(details.schema)

        def work(connection: Connection) -> None:
            way(connection, committable, details, target, until)

        with self._lock:
            self._session.run(f"aborting {committable.name}", work, until)

    def lingering(self, owner: Owner) -> Iterable[Committable]:
        """See `TwoPhaseCommitSink.lingering`; of the owner's lineage, in this database.

        Prepared and staged transactions, for any mode of the sink, in any schema. And transactions
        that a session has open: the session's task, believed dead by the driver, could prepare the
        transaction after the recovery has looked. To abort such a transaction ends its session.
        """

        def look(connection: Connection) -> list[Committable]:
            # In the order that a transaction goes through: what moves on meanwhile is seen twice.
            # Both stay: another user's row or session may have the name of a transaction of ours.
            committables = self._open(connection, owner)
            committables += self._prepared(connection, owner)
            committables += self._staged(connection, owner)
            return list(
                {
                    (committable.name, committable.details): committable
                    for committable in committables
                }.values()
            )

        with self._lock:
            return self._session.run("looking for what is pending", look)

    def _open(self, connection: Connection, owner: Owner) -> list[Committable]:
        with as_who_connected(connection):
            rows = connection.execute(
                query(
                    "SELECT application_name, (extract(epoch FROM xact_start) * 1000)::bigint "
                    f"{SESSIONS} AND xact_start IS NOT NULL"
                ),
                [application_prefix(owner)],
            ).fetchall()
        text = _details(self._plan.details, "open", self._plan.details.schema)
        return self._readable(
            (name_from(application, owner), owner.sink, text, 0, begun_ms)
            for application, begun_ms in rows
        )

    def _prepared(self, connection: Connection, owner: Owner) -> list[Committable]:
        prepared = connection.execute(
            "SELECT gid, database = current_database(), database, "
            f"(extract(epoch FROM prepared) * 1000)::bigint, owner, {MAY_END} "
            f"FROM pg_prepared_xacts WHERE starts_with(gid, $1) ORDER BY gid",
            [owner_prefix(owner)],
        ).fetchall()
        mine = self._plan.details
        text = _details(mine, "prepared", mine.schema)
        ours = []
        for name, here, database, prepared_ms, role, may_end in prepared:
            if not may_end:
                self._warn(
                    f"prepared transaction {name!r} is named as if it were this pipeline's, and "
                    f"belongs to role {role!r}: it is left alone, and keeps its locks until that "
                    f"role or a superuser says ROLLBACK PREPARED"
                )
            elif here:
                ours.append((name, owner.sink, text, 0, prepared_ms))
            else:
                self._warn(
                    f"prepared transaction {name!r} is in database {database}, which this dsn does "
                    f"not lead to: it can be settled only from there"
                )
        return self._readable(ours)

    def _staged(self, connection: Connection, owner: Owner) -> list[Committable]:
        committables: list[Committable] = []
        schemas = connection.execute(query(_REGISTRIES), [self._plan.details.schema]).fetchall()
        for schema, is_ours in schemas:
            registry, is_mine = registry_of(schema), schema == self._plan.details.schema
            if not is_ours:
                self._look_elsewhere(connection, registry, owner)
                continue
            if problem := strangers_hand(connection, registry, self._target(schema)):
                self._warn(f"{problem}. What this pipeline staged there stays for now")
                continue
            try:
                rows = connection.execute(
                    query(
                        f"SELECT name, record_count, begun_ms, target, staging FROM {registry} "
                        f"WHERE starts_with(name, $1) ORDER BY name"
                    ),
                    [owner_prefix(owner)],
                ).fetchall()
            except psycopg.Error as error:
                if connection.closed or is_mine:
                    raise
                # The owner of that schema must not be able to stop this pipeline's recovery.
                logger.warning(
                    "%s cannot be read (%s): if this pipeline staged rows there, they stay for now",
                    registry,
                    error.diag.message_primary,
                )
                continue
            looked_ms = now_ms()
            for name, count, begun_ms, target, staging in rows:
                known = self._known(connection, schema, target, staging)
                text = _details(self._plan.details, "staged", schema, known)
                begun_ms = begun_ms if 0 <= begun_ms <= looked_ms else 0
                committables += self._readable([(name, owner.sink, text, count, begun_ms)])
        return committables

    def _look_elsewhere(self, connection: Connection, registry: str, owner: Owner) -> None:
        """Warn of rows that an earlier run may have staged in a registry of another role."""
        problem, rows = "it has triggers, rules or policies", None
        try:
            with connection.transaction():
                connection.execute(query(f"SET LOCAL statement_timeout = {_LOOK_MS}"))
                if lock_without_code(connection, registry, ("name", "text"), nowait=True):
                    rows = connection.execute(
                        query(
                            f"SELECT name FROM ONLY {registry} WHERE starts_with(name, $1) LIMIT 1"
                        ),
                        [owner_prefix(owner)],
                    ).fetchall()
        except psycopg.Error as error:
            if connection.closed:
                raise
            problem = str(error.diag.message_primary)
        if rows is None:
            self._warn(
                f"{registry} belongs to another role, and cannot be looked into ({problem}): if "
                f"this pipeline staged rows there, with another table=, they stay"
            )
        elif rows:
            self._warn(
                f"{registry} belongs to another role, and has rows of this pipeline, such as "
                f"{rows[0][0][:NAME_BYTES_MAX]!r}: they stay. If it staged them itself, with "
                f"another table=, run ALTER TABLE {registry} OWNER TO its role, and start again"
            )

    def _known(self, connection: Connection, schema: str, target: str, staging: str) -> str:
        """Return the user's table that a row names, as SQL; empty: the name may be a trap."""
        table, own = table_at(schema, target), self._target(schema)
        if table is None or table.staging != staging:
            return ""
        if staging_named(connection, schema, staging) is None:
            return ""
        is_ours = not any(strangers_hand(connection, it, own) for it in (staging, table.sql))
        return table.sql if is_ours else ""

    def _target(self, schema: str) -> str:
        """Return the user's table by the run's settings, for a schema; no row is trusted."""
        target = self._plan.details.table
        return NO_TABLE if table_at(schema, target) is None else target

    def _readable(self, rows: Iterable[tuple[str, str, str, int, int]]) -> list[Committable]:
        """Return the committables of the rows with names of our tasks; warn of the others."""
        committables = []
        for row in rows:
            name, committable = row[0], committable_of(*row)
            if committable is None:
                self._warn(
                    f"{name[:NAME_BYTES_MAX]!r} begins like the names of this pipeline's "
                    f"transactions, and is none: somebody else has made it, and it is left alone"
                )
            else:
                committables.append(committable)
        return committables

    def _warn(self, warning: str) -> None:
        """Log a warning once: its cause may stay for long."""
        if warning not in self._warned:
            self._warned.add(warning)
            logger.warning("PostgreSQL: %s", warning)

    def describe(self, committable: Committable) -> str:
        """See `TwoPhaseCommitSink.describe`."""
        details = Details.from_text(committable.details)
        rows = f"{committable.record_count or 'an unknown number of'} rows"
        table = details.table or "(not known)"
        if details.mode == "open":
            return (
                f"PostgreSQL, database {details.database}: a session that is writing "
                f"{committable.name!r} for table {table}; see pg_stat_activity"
            )
        if details.mode == "prepared":
            return (
                f"PostgreSQL, database {details.database}: prepared transaction "
                f"{committable.name!r} of {rows} for table {table}; see pg_prepared_xacts"
            )
        return (
            f"PostgreSQL, database {details.database}: {rows} for table {table}, staged "
            f"under {committable.name!r}; see {registry_of(details.schema)}"
        )

    def close(self) -> None:
        """See `TwoPhaseCommitSink.close`."""
        with self._lock:
            self._session.close()

    def _prune(self, committable: Committable, details: Details, until: float | None) -> None:
        """Delete old tokens now and then; a failure does no harm, and is logged."""
        prefix, epoch = prefix_of(committable.name), committable.checkpoint_id
        if epoch < self._pruned_at.get(prefix, EPOCHS_PROVED):
            return
        self._pruned_at[prefix] = epoch + _EPOCHS_BETWEEN_PRUNINGS
        try:
            self._session.run(
                "deleting old tokens",
                lambda connection: prune(connection, prefix, details.schema, epoch - EPOCHS_PROVED),
                until,
            )
        except (RetriableError, OptionError, RecordError) as error:
            logger.warning("old tokens were not deleted: %s", error)


def _details(mine: Details, mode: str, schema: str, table: str | None = None) -> str:
    tokens_id = mine.tokens_id if schema == mine.schema else 0
    table = mine.table if table is None else table
    return Details(mode, schema, table, mine.server, mine.database, tokens_id).to_text()
