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
    * Text that other roles may write, as names of prepared transactions or of sessions, and into
      tables of earlier builds, makes nothing run with our rights, and keeps nothing of ours from
      being settled: it is named in a warning, and left alone or deleted.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

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
from tallystick.postgres.earlier_tables import earlier_schemas, is_table, strangers_hand
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
from tallystick.postgres.schema import registry_of, table_id_of
from tallystick.postgres.transactions import Details, PostgresPlan

logger = logging.getLogger(__name__)

EPOCHS_PROVED = 100
"""The number of epochs whose tokens are kept; a checkpoint's manifests are kept for far fewer."""
_EPOCHS_BETWEEN_PRUNINGS = 10


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
        mine = self._plan.details

        def work(connection: Connection) -> Outcome:
            if details.schema != mine.schema:
                self._refuse_strangers(connection, committable, details)
            return way(connection, committable, details, mine, until)

        with self._lock:
            try:
                outcome = self._session.run(f"committing {committable.name}", work, until)
            except RecordError as error:
                raise RecordError(
                    f"{error}. It stays as it is ({self.describe(committable)}) and is tried again "
                    f"at the next start: change the table, or the rows that are in the way"
                ) from None
            if outcome is Outcome.COMMITTED and details.schema == mine.schema:
                self._prune(committable, until)
        return outcome

    def _refuse_strangers(
        self, connection: Connection, committable: Committable, details: Details
    ) -> None:
        """Raise if others could run code through the tables beside the user's; see `commit`."""
        problem = strangers_hand(connection, details.schema, details.table)
        if problem:
            raise OptionError(
                f"PostgreSQL: {committable.name!r} is decided, and is committed at the first start "
                f"after this is solved: {problem}"
            )

    def abort(self, committable: Committable) -> None:
        """See `TwoPhaseCommitSink.abort`."""
        self._abort(committable, None)

    def abort_by(self, committable: Committable, until: float) -> None:
        """See `participants.AbortsBy`; as for `commit_by`."""
        self._abort(committable, until)

    def _abort(self, committable: Committable, until: float | None) -> None:
        details = Details.from_text(committable.details)
        ways: dict[str, Callable[[Connection, Committable, Details, Details, float | None], None]]
        ways = {"prepared": abort_prepared, "staged": abort_staged, "open": abort_open}
        way, mine = ways[details.mode], self._plan.details

        def work(connection: Connection) -> None:
            way(connection, committable, details, mine, until)

        with self._lock:
            self._session.run(f"aborting {committable.name}", work, until)

    def lingering(self, owner: Owner) -> Iterable[Committable]:
        """See `TwoPhaseCommitSink.lingering`; of the owner's lineage, in this database.

        Prepared and staged transactions, for any mode and table of the sink. And transactions
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
        text = replace(self._plan.details, mode="open").to_text()
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
        text = replace(self._plan.details, mode="prepared").to_text()
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
        mine = self._plan.details
        committables: list[Committable] = []
        if table_id_of(connection, registry_of(mine.schema)):
            committables += self._registered(connection, owner, mine.schema)
        for schema in earlier_schemas(connection, mine.schema, self._plan.table):
            problem = strangers_hand(connection, schema, mine.table)
            try:
                if not problem:
                    committables += self._registered(connection, owner, schema)
            except psycopg.Error as error:
                if connection.closed:
                    raise
                # A role that may write there must not be able to stop this pipeline's recovery.
                problem = f"{registry_of(schema)} cannot be read ({error.diag.message_primary})"
            if problem:
                self._warn(f"{problem}. What an earlier build staged there stays for now")
        return committables

    def _registered(self, connection: Connection, owner: Owner, schema: str) -> list[Committable]:
        rows = connection.execute(
            query(
                f"SELECT name, record_count, begun_ms, target FROM {registry_of(schema)} "
                f"WHERE starts_with(name, $1) ORDER BY name"
            ),
            [owner_prefix(owner)],
        ).fetchall()
        looked_ms, committables = now_ms(), []
        for name, count, begun_ms, target in rows:
            table = target if is_table(target) else ""
            details = replace(self._plan.details, mode="staged", schema=schema, table=table)
            if schema != self._plan.details.schema:
                details = replace(details, tokens_id=0)
            begun_ms = begun_ms if 0 <= begun_ms <= looked_ms else 0
            committables += self._readable([(name, owner.sink, details.to_text(), count, begun_ms)])
        return committables

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

    def _prune(self, committable: Committable, until: float | None) -> None:
        """Delete old tokens now and then; a failure does no harm, and is logged."""
        prefix, epoch = prefix_of(committable.name), committable.checkpoint_id
        own = self._plan.details.schema
        if epoch < self._pruned_at.get(prefix, EPOCHS_PROVED):
            return
        self._pruned_at[prefix] = epoch + _EPOCHS_BETWEEN_PRUNINGS
        try:
            self._session.run(
                "deleting old tokens",
                lambda connection: prune(connection, prefix, own, epoch - EPOCHS_PROVED),
                until,
            )
        except (RetriableError, OptionError, RecordError) as error:
            logger.warning("old tokens were not deleted: %s", error)
