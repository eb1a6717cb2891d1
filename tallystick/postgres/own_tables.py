"""Tallystick's own tables, in a schema that belongs to the pipeline's role: their creation.

No other role can write into them, or put a trigger on them, without USAGE on the schema, which only
its owner grants: what is read there was written by a pipeline of this role.

Invariants:
    * Nothing in the schema is used before the server says that the schema and all tables in it
      belong to this role, and that no other role may create anything there.
    * A start waits for no lock that another role may hold.
    * Staged rows, which may be decided, keep their values, even if the user's columns change.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from hashlib import sha256

from psycopg import errors

from tallystick.errors import OptionError, RetriableError
from tallystick.postgres.binary_copy import TEXTS, TableColumn
from tallystick.postgres.connection import (
    OWN_PATH_MEANWHILE,
    USERS_PATH,
    Connection,
    query,
    quoted,
)
from tallystick.postgres.schema import (
    ID,
    NAME_BYTES_MAX,
    POSITION,
    Table,
    columns_of,
    registry_of,
    table_id_of,
    tokens_of,
)

_SCHEMA = """
    SELECT pg_get_userbyid(n.nspowner), pg_get_userbyid(n.nspowner) = current_user,
           (SELECT min(CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE pg_get_userbyid(a.grantee) END)
            FROM aclexplode(n.nspacl) a
            WHERE a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner),
           (SELECT min(c.relname::text) FROM pg_class c
            WHERE c.relnamespace = n.oid AND c.relowner <> n.nspowner)
    FROM pg_namespace n WHERE quote_ident(n.nspname) = $1
"""
_CHECKS = """
    SELECT c.conname, pg_get_constraintdef(c.oid),
           EXISTS (SELECT FROM pg_attribute a
                   WHERE a.attrelid = c.conrelid AND a.attnum = ANY (c.conkey)
                     AND a.attname = ANY ($2::text[]))
    FROM pg_constraint c WHERE c.conrelid = $1::regclass AND c.contype = 'c' ORDER BY c.conname
"""
"""A table's CHECKs, and whether each is of a column that the commit fills."""
_RETYPED = """
    SELECT t.attname, pg_catalog.format_type(t.atttypid, t.atttypmod),
           CASE WHEN t.attcollation OPERATOR(pg_catalog.=) 0::pg_catalog.oid THEN ''
           ELSE t.attcollation::pg_catalog.regcollation::pg_catalog.text END
    FROM pg_catalog.pg_attribute s JOIN pg_catalog.pg_attribute t
        ON t.attname OPERATOR(pg_catalog.=) s.attname
    WHERE s.attrelid OPERATOR(pg_catalog.=) pg_catalog.to_regclass($1)
      AND t.attrelid OPERATOR(pg_catalog.=) pg_catalog.to_regclass($2)
      AND s.attname OPERATOR(pg_catalog.=) ANY ($3::pg_catalog.text[])
      AND (s.atttypid OPERATOR(pg_catalog.<>) t.atttypid
           OR s.atttypmod OPERATOR(pg_catalog.<>) t.atttypmod
           OR s.attcollation OPERATOR(pg_catalog.<>) t.attcollation)
"""
"""Runs with the user's search_path, in which any role may have operators."""
_TEXT_BY = dict.fromkeys(("date", "timestamp", "timestamptz"), ("DateStyle", "ISO")) | {
    "interval": ("IntervalStyle", "postgres"),
    "bytea": ("bytea_output", "hex"),
}
"""The session's setting on which the text of such types depends, and its usual value."""
_ZONED, _ZONELESS = {"timestamptz", "timetz"}, {"timestamp", "time", "date"}
_DIGEST = 16
_BEGIN_BYTES = NAME_BYTES_MAX - _DIGEST - 1
_MADE_MEANWHILE = (
    errors.UniqueViolation,  # in the catalogue
    errors.DuplicateTable,
    errors.DuplicateObject,
)
_DELETES_ARE_PUBLISHED = "REPLICA IDENTITY FULL"
"""A publication FOR ALL TABLES lets nothing be deleted from a table without a primary key else."""


def own_schema(connection: Connection) -> str:
    """Return the name of the schema that holds the tables of this session's role, quoted.

    Raises:
        OptionError: there is such a schema, and another role owns it or may put something there.
    """
    row = connection.execute("SELECT current_user").fetchone()
    assert row is not None
    name = f"tallystick_{row[0]}"
    if len(name.encode()) > NAME_BYTES_MAX:
        digest = sha256(name.encode()).hexdigest()[:_DIGEST]
        name = f"{name.encode()[:_BEGIN_BYTES].decode(errors='ignore')}_{digest}"
    row = connection.execute("SELECT quote_ident($1)", [name]).fetchone()
    assert row is not None
    schema = str(row[0])
    _refuse_strangers(connection, schema)
    return schema


def _refuse_strangers(connection: Connection, schema: str) -> None:
    row = connection.execute(_SCHEMA, [schema]).fetchone()
    if row is None:
        return
    owner, is_ours, creator, relation = row
    problem = ""
    if not is_ours:
        problem = (
            f"it belongs to role {owner!r}: look who created it, and have its owner run DROP "
            f"SCHEMA {schema} CASCADE, or, if nothing is in it, ALTER SCHEMA {schema} OWNER TO "
            f"this role"
        )
    elif creator is not None:
        problem = (
            f"role {creator!r} may create tables there: REVOKE CREATE ON SCHEMA {schema} FROM it"
        )
    elif relation is not None:
        problem = (
            f"{relation!r} in it belongs to another role, whose triggers and defaults would run "
            f"with this role's rights: DROP it"
        )
    if problem:
        raise OptionError(
            f"PostgreSQL: schema {schema} is where Tallystick keeps its own tables for this role, "
            f"and has to be its own: {problem}"
        )


def ensure_schema(connection: Connection, schema: str) -> None:
    """Create the schema, the table of tokens and the registry, where they are missing.

    Args:
        connection: to the server, in autocommit.
        schema: as `own_schema` returned it.

    Raises:
        OptionError: the role may not create the schema: the message has the SQL for the database's
            owner; or another role has created it meanwhile.
    """
    tokens, registry = tokens_of(schema), registry_of(schema)
    if table_id_of(connection, tokens) and table_id_of(connection, registry):
        return
    if connection.execute(_SCHEMA, [schema]).fetchone() is None:
        try:
            _create(connection, [f"CREATE SCHEMA {schema}"])
        except (errors.InsufficientPrivilege, errors.ReadOnlySqlTransaction) as error:
            raise _without_schema(connection, schema, str(error.diag.message_primary)) from None
        _refuse_strangers(connection, schema)
    # The collation lets the primary key's index find all names that begin alike.
    _create(
        connection,
        [
            f"""CREATE TABLE IF NOT EXISTS {tokens} (
    name text COLLATE "C" PRIMARY KEY,
    pipeline text NOT NULL, sink text NOT NULL, lineage text NOT NULL,
    checkpoint_id bigint NOT NULL, task integer NOT NULL,
    lost boolean NOT NULL DEFAULT false, written timestamptz NOT NULL DEFAULT now())"""
        ],
    )
    _create(
        connection,
        [
            f"""CREATE TABLE IF NOT EXISTS {registry} (
    name text COLLATE "C" PRIMARY KEY, id bigint NOT NULL UNIQUE,
    target text NOT NULL, staging text NOT NULL, columns text[] NOT NULL, key text[] NOT NULL,
    record_count bigint NOT NULL, begun_ms bigint NOT NULL)"""
        ],
    )


def _without_schema(connection: Connection, schema: str, refused: str) -> OptionError:
    row = connection.execute(
        "SELECT quote_ident(current_user), quote_ident(current_database())"
    ).fetchone()
    assert row is not None
    role, database = row
    return OptionError(
        f"PostgreSQL: the role may not create the schema of its own tables ({refused}): have the "
        f"owner of the database create it, by the statement below, or let the role do it, by GRANT "
        f"CREATE ON DATABASE {database} TO {role}:\nCREATE SCHEMA {schema} AUTHORIZATION {role};"
    )


def ensure_staging(connection: Connection, schema: str, table: Table) -> str:
    """Create the table of rows that are staged for a user's table as it is now; return it, as SQL.

    It is never altered. When the user's table has changed, rows that wait stay in the table of its
    former shape, and are committed from there.

    Args:
        connection: to the server, in autocommit.
        schema: our own, in which `ensure_schema` has created the other tables.
        table: the user's.

    Raises:
        OptionError: the role may not read the user's table.
        RetriableError: the user's table is changed at this moment.
    """
    checks = _checks(connection, table)
    staging = f"{schema}.{quoted(_staging_name(table, checks))}"
    if table_id_of(connection, staging):
        return staging
    # CHECKs come along: what breaks one is refused while it can still be, before the decision. NOT
    # NULL does not, since a column that rows leave out gets its default at the commit only; for the
    # same reason CHECKs of such columns do not.
    ddl = [
        f"CREATE TABLE {staging} (LIKE {table.sql} INCLUDING CONSTRAINTS)",
        *(
            f"ALTER TABLE {staging} ALTER COLUMN {quoted(column.name)} DROP NOT NULL"
            for column in _attributes_not_null(connection, table)
        ),
        *(
            f"ALTER TABLE {staging} DROP CONSTRAINT {quoted(name)}"
            for name, _, is_filled in checks
            if is_filled
        ),
        f"ALTER TABLE {staging} "
        f"ADD COLUMN {ID} bigint NOT NULL, ADD COLUMN {POSITION} bigint NOT NULL, "
        f"{_DELETES_ARE_PUBLISHED}",
        f"CREATE INDEX ON {staging} ({ID})",
    ]

    def refuse_changed() -> None:  # by a name that tells its shape, it would be wrong for ever
        columns = tuple(columns_of(connection, table.sql).values())
        if (columns, _checks(connection, table)) != (table.columns, checks):
            raise RetriableError(f"table {table.name} is being changed: start again")

    try:
        _create(connection, ddl, staging, refuse_changed)
    except errors.InsufficientPrivilege as error:
        raise OptionError(
            f"the role may not create a table like {table.sql} for staged rows "
            f"({error.diag.message_primary}): GRANT SELECT ON {table.sql} TO it"
        ) from None
    return staging


def _checks(connection: Connection, table: Table) -> list[tuple[str, str, bool]]:
    filled = [column.name for column in table.columns if column.has_default or column.generated]
    return list(connection.execute(_CHECKS, [table.sql, filled]).fetchall())


def _staging_name(table: Table, checks: Sequence[tuple[str, str, bool]]) -> str:
    """Return the name of the table of staged rows: of the user's table, and of its shape."""
    shape = sha256(json.dumps([table.sql, *map(astuple, table.columns), *checks]).encode())
    begin = f"tallystick_staged_{table.schema}.{table.name}".encode()
    return f"{begin[:_BEGIN_BYTES].decode(errors='ignore')}_{shape.hexdigest()[:_DIGEST]}"


def _attributes_not_null(connection: Connection, table: Table) -> list[TableColumn]:
    rows = connection.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = $1::regclass AND attnotnull "
        "AND attnum > 0 AND NOT attisdropped",
        [table.sql],
    ).fetchall()
    names = {row[0] for row in rows}
    return [column for column in table.columns if column.name in names]


def refuse_loss(
    connection: Connection, staging: str, target: str, columns: Sequence[str], number: int
) -> dict[str, str]:
    """Refuse the commit of staged rows whose values the user's table would change.

    Rows wait in a table that has the columns which the user's table had when they were staged.

    Returns:
        For each altered column, the SQL of the value that the user's table will have: its type and
        collation decide which values are equal.

    Args:
        connection: in a transaction that keeps both tables as they are; with the user's
            search_path.
        staging: the table of staged rows, as SQL.
        target: the user's table, as SQL.
        columns: the columns of the rows.
        number: the id of the rows.

    Raises:
        OptionError: the user's table would cut, pad, round or shift a value.
    """
    changed = connection.execute(_RETYPED, [staging, target, list(columns)]).fetchall()
    if not changed:
        return {}
    connection.execute(OWN_PATH_MEANWHILE)
    staged, wanted = columns_of(connection, staging), columns_of(connection, target)
    for name in columns:
        old, new = staged[name], wanted[name]
        if old.type_name != new.type_name:
            with _lossless(connection, (staging, target), old, new, f"{ID} = {number}"):
                pass
    connection.execute(USERS_PATH)
    return {
        name: f"{quoted(name)}::{now}" + (f" COLLATE {collation}" if collation else "")
        for name, now, collation in changed
    }


@contextmanager
def _lossless(
    connection: Connection,
    tables: tuple[str, str],
    old: TableColumn,
    new: TableColumn,
    which: str = "true",
) -> Iterator[None]:
    """Run a block if all values of a column of staged rows stay the same in another type.

    Args:
        connection: in a transaction.
        tables: the table of staged rows, and the user's, as SQL.
        old: the column of the staged rows.
        new: the column of the user's table.
        which: a condition for the rows.

    Raises:
        OptionError: a value would change, or the block's own cast fails.
    """
    staging, target = tables
    name, was, now = quoted(old.name), old.type_name, new.type_name
    # As text, since not all types know what is equal, and by its bytes, as not all collations do.
    rounded = f'{name}::{now}::{was}::text IS DISTINCT FROM {name}::text COLLATE "C"'
    setting = _setting_between(connection, old.kind, new.kind)
    refused = f"what a value means would depend on the session's {setting}"
    # There and back a value would be the same again.
    if not setting:
        refused = "a value would not stay as it is"
        try:
            with connection.transaction():
                statement = f"SELECT FROM {staging} WHERE {which} AND {rounded} LIMIT 1"
                if not connection.execute(query(statement)).rowcount:
                    yield
                    return
        except (errors.DataError, errors.CannotCoerce, errors.DatatypeMismatch) as error:
            refused = str(error.diag.message_primary)
    raise OptionError(
        f"{staging} has rows that wait for their commit, and column {name} of {target} is {now} "
        f"now, and was {was}: {refused}. Nothing was changed. ALTER the column back to {was}, "
        f"start once, so that they are committed, and stop; then change it again"
    )


def _setting_between(connection: Connection, old: str, new: str) -> str:
    """Return the session's setting on which a cast of values depends; empty: none.

    The session that altered the user's table may have had another setting than the role.
    """
    old, new = old.removeprefix("_"), new.removeprefix("_")
    if {old, new} & _ZONED and {old, new} & _ZONELESS:
        return "TimeZone"
    if old not in _TEXT_BY or new not in TEXTS:
        return ""
    setting, usual = _TEXT_BY[old]
    row = connection.execute("SELECT split_part(current_setting($1), ',', 1)", [setting]).fetchone()
    return "" if row == (usual,) else setting


def _create(
    connection: Connection,
    ddl: Sequence[str],
    table: str = "",
    check: Callable[[], None] = lambda: None,
) -> None:
    """Run statements that create something in one transaction; another driver may do the same.

    Without a lock, which any role could hold: what another session creates meanwhile is waited for,
    and is there then.

    Args:
        connection: to the server, in autocommit.
        ddl: the statements.
        table: the table to create, as SQL, unless it is there by now; empty: the statements say so.
        check: called before the end of the transaction.
    """
    for is_last in (False, True):
        try:
            with connection.transaction():
                if not (table and table_id_of(connection, table)):
                    for statement in ddl:
                        connection.execute(query(statement))
                    check()
            return
        except errors.DuplicateSchema:
            return
        except _MADE_MEANWHILE:
            if is_last:
                raise
