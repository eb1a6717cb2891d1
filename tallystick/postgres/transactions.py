"""The task's side of the sink: one PostgreSQL transaction per attempt, on its own connection.

Invariants:
    * Rows and their token are in one transaction: both exist or neither does.
    * Rows are written in the types that their columns have when the transaction ends, or not at
      all. From a table's first COPY, or the planning of the statement that moves rows into it, its
      types stay.
    * A transaction that was handed over is on the server's disk; one that was not is not visible,
      and `lingering` finds it if it exists at all.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Self

import numpy as np
import pyarrow as pa

from tallystick.epoch.two_phase import Committable, Guarantee, LossyTransaction, Place, Transaction
from tallystick.errors import (
    UNREADABLE,
    ManifestError,
    OptionError,
    RecordError,
    RetriableError,
)
from tallystick.host.stopwatch import now_ms
from tallystick.postgres.binary_copy import ColumnEncoder, binary_copy, encoders_for
from tallystick.postgres.connection import (
    answered,
    close,
    finish,
    give_back,
    lend,
    literal,
    ours,
    query,
    quoted,
    secrets_of,
)
from tallystick.postgres.names import (
    application_of,
    deletion,
    fingerprint,
    insert_token,
    move,
    name_of,
    staged_id,
)
from tallystick.postgres.schema import (
    ID,
    POSITION,
    STAGING_COLUMNS,
    Table,
    refuse_other_keys,
    registry_of,
    retyped,
)

logger = logging.getLogger(__name__)

_QUOTED = re.compile(r'[a-z_][a-z0-9_]*|"(?:[^"\0]|"")+"')
"""A name as PostgreSQL's quote_ident writes it."""
_SENT_BYTES = 4 << 20
"""Batches are collected to this much: a COPY costs a round trip or two."""


@dataclass(frozen=True, slots=True)
class Details:
    """The details of a committable, for the driver, besides its name.

    Args:
        mode: `prepared` or `staged`; `open`: a task may still be writing.
        schema: the schema of our tables, quoted: the role's own; in the details of earlier builds
            the schema of the user's table, see `earlier_tables`.
        table: the user's, as SQL.
        server: the system identifier of the server; empty: not known.
        database: the name of the database.
        tokens_id: the server's number of the table of tokens; 0: not known.
        fingerprint: of the registry's row, see `names.fingerprint`; empty: there is no row, or its
            right content is not known.
    """

    mode: str
    schema: str
    table: str
    server: str
    database: str
    tokens_id: int
    fingerprint: str = ""

    def to_text(self) -> str:
        """Return the details as the text that a committable carries."""
        return json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the text of `to_text`.

        Raises:
            ManifestError: the text is none of ours; or the schema, which becomes a part of SQL, is
                no quoted name.
        """
        try:
            details = cls(**json.loads(text))
            is_ours = all(type(getattr(details, field.name)) is field.type for field in fields(cls))
        except UNREADABLE:
            is_ours = False
        if not is_ours:
            raise ManifestError(
                f"PostgreSQL: a manifest has the details {text[:200]!r}, which no release writes: "
                f"it was edited, or made by somebody else. Nothing was changed. Put a whole copy "
                f"of the checkpoint back"
            )
        if not _QUOTED.fullmatch(details.schema):
            raise ManifestError(
                f"PostgreSQL: a manifest names the schema {details.schema!r}: expected a name, "
                f"quoted where it has to be. It was edited, or made by somebody else. Nothing was "
                f"changed. Put a whole copy of the checkpoint back"
            )
        return details


@dataclass(frozen=True)
class PostgresPlan:
    """The settings of a run for its tasks; see `PostgresSink` for their meaning.

    Args:
        dsn: how to connect.
        table: the user's.
        key: of an upsert.
        details: of the run's committables.
        guarantee: of the sink.
        staging: the table of staged rows, as SQL; empty: rows are not staged.
    """

    dsn: str = field(repr=False)
    table: Table
    key: tuple[str, ...]
    details: Details
    guarantee: Guarantee
    staging: str = ""

    def begin(self, place: Place) -> Transaction:
        """See `TransactionPlan`. A name is of one attempt only: no other attempt is touched."""
        if self.guarantee is Guarantee.NONE:
            return LossyTransaction(
                lambda: _DirectTransaction(self),
                place,
                (RecordError, RetriableError),
                logger.warning,
                by_batch=True,
            )
        if self.guarantee is Guarantee.AT_LEAST_ONCE:
            return _DirectTransaction(self)
        return (
            _PreparedTransaction(self, place)
            if self.details.mode == "prepared"
            else _StagedTransaction(self, place)
        )


class _OpenTransaction:
    """An open transaction, and the rows to write into a table in it."""

    def __init__(self, plan: PostgresPlan, target: str, name: str = "") -> None:
        self._dsn = plan.dsn
        self._secrets = secrets_of(plan.dsn)
        self._table = plan.table
        self._key = plan.key
        self._target = target
        self._schema: pa.Schema | None = None
        self._encoders: tuple[ColumnEncoder, ...] = ()
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self.columns: tuple[str, ...] = ()
        self.record_count = 0
        self._over = False
        self.connection, self._pid = lend(plan.dsn, application_of(name) if name else "")

    def run(self, statement: str, parameters: Sequence[object] = ()) -> int:
        """Run a statement; return the number of affected rows."""
        with self._doing(f"writing into table {self._table.name}"):
            return self.connection.execute(query(statement), parameters or None).rowcount

    def write(self, rows: pa.RecordBatch, extra: Sequence[pa.Array] = ()) -> None:
        """Take rows, with the columns of `STAGING_COLUMNS` appended if they are staged."""
        if self._schema is None:
            self._fit(rows.schema, staged=bool(extra))
        elif not rows.schema.equals(self._schema):
            raise OptionError(
                f"table {self._table.name}: a batch has columns ({_shown(rows.schema)}), and those "
                f"before it had ({_shown(self._schema)}): all must be alike"
            )
        self.record_count += rows.num_rows
        for column, values in zip(STAGING_COLUMNS, extra, strict=bool(extra)):
            rows = rows.append_column(column.name, values)
        self._waiting.append(rows)
        self._waiting_bytes += rows.nbytes
        if self._waiting_bytes >= _SENT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the waiting batches, as one COPY."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not waiting:
            return
        names = ", ".join(map(quoted, waiting[0].schema.names))
        statement = f"COPY {self._target} ({names}) FROM STDIN (FORMAT binary)"
        types = {field.name: str(field.type) for field in waiting[0].schema}
        with self._doing(f"COPY into table {self._table.name}", types):
            with self.connection.cursor().copy(query(statement)) as copy:
                for chunk in binary_copy(waiting, self._encoders):
                    copy.write(chunk)

    def end(self, statement: str, tag: str) -> None:
        """End the transaction, and give the connection back for the next one."""
        with self._doing(f"{tag} of rows of table {self._table.name}"):
            self._refuse_retyped()
            finish(self.connection, statement, tag)
        self._over = True  # from here on the connection is another one's
        give_back(self._dsn, self.connection, self._pid)

    @contextmanager
    def _doing(self, doing: str, types: Mapping[str, str] | None = None) -> Iterator[None]:
        """Run a block on the connection; see `ours`, and for a frozen server `answered`."""
        with ours(doing, self._secrets, types), answered(self._dsn, self.connection, self._pid):
            yield

    def _refuse_retyped(self) -> None:
        """Raise if column types changed: COPY may take bytes of one type for those of another."""
        sent = [column for column in self._table.columns if column.name in self.columns]
        if changed := retyped(self.connection, (self._target, self._table.sql), sent):
            raise OptionError(
                f"table {self._table.name} was changed since the run began: {'; '.join(changed)}. "
                f"Nothing was written. Start again, which reads the types again"
            )

    def refuse_other_keys(self) -> None:
        """See `schema.refuse_other_keys`; after what has locked the table."""
        with self._doing(f"checking table {self._table.name}"):
            refuse_other_keys(self.connection, self._table.sql, self._key)

    def drop(self) -> None:
        """Cut the connection, which rolls the open transaction back."""
        if not self._over:
            close(self.connection)

    def _fit(self, schema: pa.Schema, *, staged: bool) -> None:
        known = {column.name: column for column in self._table.columns}
        problems = [f"there is no column {name!r}" for name in schema.names if name not in known]
        problems += [
            f"column {name!r} comes twice"
            for name in sorted({name for name in schema.names if schema.names.count(name) > 1})
        ]
        problems += [
            f"column {column.name!r} is NOT NULL without a default, and the rows do not have it"
            for column in self._table.columns
            if column.not_null and not column.has_default and not column.generated
            if column.name not in schema.names
        ]
        problems += [
            f"column {column.name!r} is GENERATED ALWAYS AS IDENTITY, which an upsert cannot "
            f"change: leave it out of the rows, or make it GENERATED BY DEFAULT"
            for column in self._table.columns
            if self._key and column.always
            if column.name in schema.names and column.name not in self._key
        ]
        problems += [
            f"column {name!r} is in key=, and the rows do not have it"
            for name in self._key
            if name not in schema.names
        ]
        if problems:
            raise OptionError(f"table {self._table.name}: {'; '.join(problems)}")
        columns = [  # a null in a key equals nothing: each would be inserted again
            replace(known[name], not_null=True) if name in self._key else known[name]
            for name in schema.names
        ]
        encoders = encoders_for(schema, columns, self._table.name)
        if staged:
            fields = [pa.field(column.name, pa.int64()) for column in STAGING_COLUMNS]
            encoders += encoders_for(pa.schema(fields), STAGING_COLUMNS, self._table.name)
        self._schema, self._encoders, self.columns = schema, encoders, tuple(schema.names)


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


class _PreparedTransaction:
    """Rows in the table itself, held by PREPARE TRANSACTION."""

    def __init__(self, plan: PostgresPlan, place: Place) -> None:
        self._plan, self._place, self._begun_ms = plan, place, now_ms()
        self._name = name_of(place)
        self._writing = _OpenTransaction(plan, plan.table.sql, self._name)

    def write(self, rows: pa.RecordBatch) -> None:
        self._writing.write(rows)

    def prepare(self) -> Sequence[Committable]:
        writing, name = self._writing, self._name
        writing.flush()
        if writing.run(*insert_token(self._plan.details.schema, self._committable(name))) != 1:
            raise RetriableError(
                f"PostgreSQL: a token says already what became of {name}: this attempt was given "
                f"up, or somebody has written the token by hand"
            )
        writing.end(f"PREPARE TRANSACTION {literal(name)}", "PREPARE TRANSACTION")
        return [self._committable(name)]

    def abort(self) -> None:
        self._writing.drop()

    def _committable(self, name: str) -> Committable:
        return _committable(self._plan, self._place, name, self._writing, self._begun_ms)


class _StagedTransaction:
    """Rows in the staging table, in a transaction that ends before they are handed over."""

    def __init__(self, plan: PostgresPlan, place: Place) -> None:
        self._plan, self._place, self._begun_ms = plan, place, now_ms()
        self._name = name_of(place)
        self._writing = _OpenTransaction(plan, plan.staging, self._name)

    def write(self, rows: pa.RecordBatch) -> None:
        self._writing.write(rows, _positions(staged_id(self._name), self._writing, rows))

    def prepare(self) -> Sequence[Committable]:
        writing, plan = self._writing, self._plan
        writing.flush()
        # The commit's own statements, planned only: privileges that it lacks are seen before the
        # decision, and not at each commit after it.
        moved = move(plan.staging, plan.table.sql, writing.columns, plan.key)
        for statement in (moved, deletion(plan.staging)):
            writing.run(f"EXPLAIN {statement}", [staged_id(self._name)])
        writing.run(
            f"INSERT INTO {registry_of(plan.details.schema)} (name, id, target, staging, "
            f"columns, key, record_count, begun_ms) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
            [
                self._name,
                staged_id(self._name),
                plan.table.sql,
                plan.staging,
                list(writing.columns),
                list(plan.key),
                writing.record_count,
                self._begun_ms,
            ],
        )
        writing.end("COMMIT", "COMMIT")
        seal = fingerprint(plan.table.sql, plan.staging, writing.columns, plan.key)
        plan = replace(plan, details=replace(plan.details, fingerprint=seal))
        return [_committable(plan, self._place, self._name, writing, self._begun_ms)]

    def abort(self) -> None:
        self._writing.drop()


class _DirectTransaction:
    """Rows that are visible as soon as the task is through."""

    def __init__(self, plan: PostgresPlan) -> None:
        self._plan = plan
        self._temporary = "pg_temp.tallystick_upserted" if plan.key else ""
        self._writing = _OpenTransaction(plan, self._temporary or plan.table.sql)
        if self._temporary:
            try:
                self._writing.run(
                    f"CREATE TEMPORARY TABLE tallystick_upserted ON COMMIT DROP AS SELECT *, "
                    f"0::bigint AS {ID}, 0::bigint AS {POSITION} FROM {plan.table.sql} WITH NO DATA"
                )
            except BaseException:
                self._writing.drop()
                raise

    def write(self, rows: pa.RecordBatch) -> None:
        extra = _positions(0, self._writing, rows) if self._temporary else ()
        self._writing.write(rows, extra)

    def prepare(self) -> Sequence[Committable]:
        writing, plan = self._writing, self._plan
        writing.flush()
        if self._temporary and writing.columns:
            writing.run(move(self._temporary, plan.table.sql, writing.columns, plan.key), [0])
            writing.refuse_other_keys()
        writing.end("COMMIT", "COMMIT")
        return []

    def abort(self) -> None:
        self._writing.drop()


def _positions(
    number: int, writing: _OpenTransaction, rows: pa.RecordBatch
) -> tuple[pa.Array, pa.Array]:
    start = writing.record_count
    return (
        pa.array(np.full(rows.num_rows, number, np.int64)),
        pa.array(np.arange(start, start + rows.num_rows)),
    )


def _committable(
    plan: PostgresPlan, place: Place, name: str, writing: _OpenTransaction, begun_ms: int
) -> Committable:
    return Committable(
        sink=place.owner.sink,
        checkpoint_id=place.checkpoint_id,
        task=place.task,
        name=name,
        record_count=writing.record_count,
        begun_ms=begun_ms,
        details=plan.details.to_text(),
    )
