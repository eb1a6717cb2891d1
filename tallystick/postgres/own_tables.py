"""How our tables are made, and follow the user's; what they are for, `schema` says.

Invariants:
    * No lock that any role may hold stands before a start.
    * Rows that are staged, and may be decided, stay as they are, whatever becomes of their columns.
"""

from psycopg import errors

from tallystick.errors import OptionError
from tallystick.postgres.columns import TableColumn
from tallystick.postgres.connection import Connection, literal, query, quoted
from tallystick.postgres.schema import (
    ID,
    POSITION,
    Table,
    registry_of,
    strangers_hand,
    tokens_of,
)

_UNFIT_CHECKS = """
    SELECT s.conname FROM pg_constraint s
    WHERE s.conrelid = $1::regclass AND s.contype = 'c'
      AND (EXISTS (SELECT 1 FROM pg_attribute a
                   WHERE a.attrelid = s.conrelid AND a.attnum = ANY (s.conkey)
                     AND a.attname = ANY ($3::text[]))
           OR NOT EXISTS (SELECT 1 FROM pg_constraint t
                          WHERE t.conrelid = $2::regclass AND t.contype = 'c'
                            AND t.conname = s.conname
                            AND split_part(pg_get_constraintdef(t.oid), ' NOT VALID', 1)
                              = split_part(pg_get_constraintdef(s.oid), ' NOT VALID', 1)))
    ORDER BY s.conname
"""
"""A staging table's CHECKs of columns that the commit fills, and those that the user's lost."""
_MADE_MEANWHILE = (
    errors.UniqueViolation,  # in the catalogue
    errors.DuplicateTable,
    errors.DuplicateObject,
    errors.DuplicateColumn,
)
_DELETES_ARE_PUBLISHED = "REPLICA IDENTITY FULL"
"""A publication FOR ALL TABLES lets nothing be deleted from a table without a primary key else."""
_IS_REPLICATED = "SELECT FROM pg_class WHERE oid = to_regclass($1) AND relreplident = 'f'"


def ensure_tokens(connection: Connection, table: Table) -> None:
    """Create the table of tokens, where it is missing.

    Raises:
        OptionError: the role may not, and it says what to run by hand; or it is a stranger's.
    """
    schema = table.schema
    # The collation lets the primary key's index find all names that begin alike.
    _ensure(
        connection,
        table,
        tokens_of(schema),
        f"""CREATE TABLE IF NOT EXISTS {tokens_of(schema)} (
    name text COLLATE "C" PRIMARY KEY,
    pipeline text NOT NULL, sink text NOT NULL, lineage text NOT NULL,
    checkpoint_id bigint NOT NULL, task integer NOT NULL,
    lost boolean NOT NULL DEFAULT false, written timestamptz NOT NULL DEFAULT now())""",
        "INSERT, SELECT, UPDATE, DELETE",
    )


def ensure_staging(connection: Connection, table: Table) -> None:
    """Create the tables of staged rows, where they are missing, and bring them up to date.

    Raises:
        OptionError: the role may not, and it says what to run by hand; or they are a stranger's.
    """
    _ensure(
        connection,
        table,
        registry_of(table.schema),
        f"""CREATE TABLE IF NOT EXISTS {registry_of(table.schema)} (
    name text COLLATE "C" PRIMARY KEY, id bigint NOT NULL UNIQUE,
    target text NOT NULL, staging text NOT NULL, columns text[] NOT NULL, key text[] NOT NULL,
    record_count bigint NOT NULL, begun_ms bigint NOT NULL)""",
        "INSERT, SELECT, DELETE",
    )
    # CHECKs come along: what breaks one is refused while it can still be, before the decision.
    # NOT NULL does not, since a column that rows leave out gets its default at the commit only;
    # for the same reason `_differences` takes CHECKs of such columns away.
    loosened = "".join(
        f";\nALTER TABLE {table.staging} ALTER COLUMN {quoted(each.name)} DROP NOT NULL"
        for each in _attributes_not_null(connection, table)
    )
    _ensure(
        connection,
        table,
        table.staging,
        f"CREATE TABLE IF NOT EXISTS {table.staging} (LIKE {table.sql} INCLUDING CONSTRAINTS)"
        f"{loosened};\nALTER TABLE {table.staging} "
        f"ADD COLUMN {ID} bigint NOT NULL, ADD COLUMN {POSITION} bigint NOT NULL, "
        f"{_DELETES_ARE_PUBLISHED};\n"
        f"CREATE INDEX ON {table.staging} ({ID})",
        "INSERT, SELECT, DELETE",
    )
    if _differences(connection, table):
        with connection.transaction():
            connection.execute(query(f"LOCK TABLE {table.staging}"))
            if connection.execute(query(f"SELECT FROM {table.staging} LIMIT 1")).rowcount:
                _retype_rows(connection, table)
            if changes := _differences(connection, table):
                ddl = f"ALTER TABLE {table.staging} {', '.join(changes)}"
                _run_ddl(connection, ddl, table.staging)


def _attributes_not_null(connection: Connection, table: Table) -> list[TableColumn]:
    found = connection.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = $1::regclass AND attnotnull "
        "AND attnum > 0 AND NOT attisdropped",
        [table.sql],
    ).fetchall()
    names = {row[0] for row in found}
    return [each for each in table.columns if each.name in names]


def _staged_types(connection: Connection, table: Table) -> dict[str, str]:
    return dict(
        connection.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = $1::regclass AND attnum > 0 AND NOT attisdropped",
            [table.staging],
        ).fetchall()
    )


def _retype_rows(connection: Connection, table: Table) -> None:
    """Give columns of staged rows, which may be decided, their new types.

    Raises:
        OptionError: a cast would cut, pad or round a value, or there is none.
    """
    found = _staged_types(connection, table)
    for column in table.columns:
        old, new, name = found.get(column.name), column.type_name, quoted(column.name)
        if old in {None, new}:
            continue
        # As text, since not all types know what is equal.
        rounded = f"{name}::{new}::{old}::text IS DISTINCT FROM {name}::text"
        refused = "a value would not stay as it is"
        try:
            with connection.transaction():
                asked = f"SELECT FROM {table.staging} WHERE {rounded} LIMIT 1"
                if not connection.execute(query(asked)).rowcount:
                    # Without USING, since an explicit cast cuts and pads without a word.
                    ddl = f"ALTER TABLE {table.staging} ALTER COLUMN {name} TYPE {new}"
                    _run_ddl(connection, ddl, table.staging)
                    continue
        except (errors.DataError, errors.CannotCoerce, errors.DatatypeMismatch) as error:
            refused = str(error.diag.message_primary)
        raise OptionError(
            f"{table.staging} has rows that wait for their commit, and column {name} of "
            f"{table.sql} is {new} now, and was {old}: {refused}. Nothing was changed. ALTER "
            f"the column back to {old}, start once, so that they are committed, and stop; then "
            f"change it again"
        )


def _differences(connection: Connection, table: Table) -> list[str]:
    """What the user's table has got since its staging table was made."""
    found = _staged_types(connection, table)
    changes = []
    for column in table.columns:
        name, kind = quoted(column.name), column.type_name
        if column.name not in found:
            changes.append(f"ADD COLUMN {name} {kind}")
        elif found[column.name] != kind:
            changes.append(f"ALTER COLUMN {name} TYPE {kind} USING {name}::{kind}")
    filled = [each.name for each in table.columns if each.has_default or each.generated]
    if not connection.execute(_IS_REPLICATED, [table.staging]).rowcount:
        changes.append(_DELETES_ARE_PUBLISHED)
    unfit = connection.execute(_UNFIT_CHECKS, [table.staging, table.sql, filled]).fetchall()
    return changes + [f"DROP CONSTRAINT IF EXISTS {quoted(name)}" for (name,) in unfit]


def _ensure(connection: Connection, target: Table, table: str, ddl: str, privileges: str) -> None:
    if connection.execute("SELECT to_regclass($1)", [table]).fetchone() == (None,):
        _run_ddl(connection, ddl, table)
    if problem := strangers_hand(connection, table, target.sql):
        raise OptionError(problem)
    asked = [
        f"has_table_privilege({literal(table)}, {literal(each)})" for each in privileges.split(", ")
    ]
    if connection.execute(query(f"SELECT {' AND '.join(asked)}")).fetchone() != (True,):
        raise OptionError(
            f"the role lacks privileges on {table}: run GRANT {privileges} ON {table} TO it"
        )


def _run_ddl(connection: Connection, ddl: str, table: str) -> None:
    """Run it in one transaction, and only if it is needed still.

    Without a lock, which any role could hold: what another driver makes meanwhile is waited for,
    and then found.
    """
    for is_last in (False, True):
        try:
            with connection.transaction():
                known = connection.execute("SELECT to_regclass($1)", [table]).fetchone()
                if ddl.startswith("ALTER") or known == (None,):
                    for statement in ddl.split(";\n"):
                        connection.execute(query(statement))
            return
        except _MADE_MEANWHILE:
            if is_last:
                raise
        except (errors.InsufficientPrivilege, errors.ReadOnlySqlTransaction) as error:
            refused = error.diag.message_primary
            break
    raise OptionError(
        f"the role may not create or change {table} ({refused}): have its "
        f"owner run, and grant the role INSERT, SELECT, UPDATE and DELETE on it:\n{ddl};"
    )
