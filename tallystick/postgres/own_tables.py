"""The creation of our tables, and their change with the user's table; for their use see `schema`.

Invariants:
    * A start waits for no lock that any role may hold.
    * Staged rows, which may be decided, keep their values, even if their columns change.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from psycopg import errors

from tallystick.errors import OptionError
from tallystick.postgres.binary_copy import TEXTS, TableColumn
from tallystick.postgres.connection import (
    OWN_PATH_MEANWHILE,
    USERS_PATH,
    Connection,
    literal,
    query,
    quoted,
)
from tallystick.postgres.names import NAME_BYTES_MAX, committable_of, prefix_of
from tallystick.postgres.schema import (
    ID,
    POSITION,
    Table,
    columns_of,
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
_DOMAIN_DEFAULTS = """
    SELECT a.attname, pg_get_expr(d.adbin, d.adrelid)
    FROM pg_attrdef d
    JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
    JOIN pg_type t ON t.oid = a.atttypid
    WHERE d.adrelid = $1::regclass AND a.attgenerated = '' AND t.typtype = 'd'
"""
_TEXT_BY = dict.fromkeys(("date", "timestamp", "timestamptz"), ("DateStyle", "ISO")) | {
    "interval": ("IntervalStyle", "postgres"),
    "bytea": ("bytea_output", "hex"),
}
"""The session's setting on which the text of such types depends, and its usual value."""
_ZONED, _ZONELESS = {"timestamptz", "timetz"}, {"timestamp", "time", "date"}
_WHOSE = """
    SELECT r.name, r.id, count(*) FROM {staging} s LEFT JOIN {registry} r ON r.id = s.{id}
    GROUP BY r.name, r.id ORDER BY r.name
"""
_OWNERS_SHOWN = 10
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
        OptionError: the role may not, and the message has the SQL to run by hand; or the table's
            owner is not trusted.
    """
    schema = table.schema
    # The collation lets the primary key's index find all names that begin alike.
    _ensure(
        connection,
        table,
        tokens_of(schema),
        [
            f"""CREATE TABLE IF NOT EXISTS {tokens_of(schema)} (
    name text COLLATE "C" PRIMARY KEY,
    pipeline text NOT NULL, sink text NOT NULL, lineage text NOT NULL,
    checkpoint_id bigint NOT NULL, task integer NOT NULL,
    lost boolean NOT NULL DEFAULT false, written timestamptz NOT NULL DEFAULT now())"""
        ],
        "INSERT, SELECT, UPDATE, DELETE",
    )


def ensure_staging(connection: Connection, table: Table) -> None:
    """Create the tables of staged rows, where they are missing, and bring them up to date.

    Raises:
        OptionError: the role may not, and the message has the SQL to run by hand; or a table's
            owner is not trusted.
    """
    _ensure(
        connection,
        table,
        registry_of(table.schema),
        [
            f"""CREATE TABLE IF NOT EXISTS {registry_of(table.schema)} (
    name text COLLATE "C" PRIMARY KEY, id bigint NOT NULL UNIQUE,
    target text NOT NULL, staging text NOT NULL, columns text[] NOT NULL, key text[] NOT NULL,
    record_count bigint NOT NULL, begun_ms bigint NOT NULL)"""
        ],
        "INSERT, SELECT, DELETE",
    )
    # CHECKs come along: what breaks one is refused while it can still be, before the decision.
    # NOT NULL does not, since a column that rows leave out gets its default at the commit only;
    # for the same reason `_differences` takes CHECKs of such columns away.
    loosened = [
        f"ALTER TABLE {table.staging} ALTER COLUMN {quoted(column.name)} DROP NOT NULL"
        for column in _attributes_not_null(connection, table)
    ]
    _ensure(
        connection,
        table,
        table.staging,
        [
            f"CREATE TABLE IF NOT EXISTS {table.staging} (LIKE {table.sql} INCLUDING CONSTRAINTS)",
            *loosened,
            f"ALTER TABLE {table.staging} "
            f"ADD COLUMN {ID} bigint NOT NULL, ADD COLUMN {POSITION} bigint NOT NULL, "
            f"{_DELETES_ARE_PUBLISHED}",
            f"CREATE INDEX ON {table.staging} ({ID})",
        ],
        "INSERT, SELECT, DELETE",
    )
    if _differences(connection, table):
        with connection.transaction():
            connection.execute(query(f"LOCK TABLE {table.staging}"))
            if connection.execute(query(f"SELECT FROM {table.staging} LIMIT 1")).rowcount:
                _retype_rows(connection, table)
            if changes := _differences(connection, table):
                ddl = [f"ALTER TABLE {table.staging} {', '.join(changes)}"]
                staged = columns_of(connection, table.staging)
                ddl += [
                    f"ALTER TABLE {table.staging} ALTER COLUMN {quoted(name)} DROP DEFAULT"
                    for name in _domain_defaults(connection, table)
                    if name not in staged
                ]
                _run_ddl(connection, ddl, table.staging)


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

    The table's columns may have been altered since the start, and a start with other transactions
    does not look at staged rows.

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


def _retype_rows(connection: Connection, table: Table) -> None:
    """Change columns of staged rows, which may be decided, to their new types.

    Raises:
        OptionError: a cast would cut, pad, round or shift a value, or there is no cast.
    """
    staged = columns_of(connection, table.staging)
    for new in table.columns:
        old = staged.get(new.name)
        if old is not None and old.type_name != new.type_name:
            # Without USING, since an explicit cast cuts and pads without a word.
            change = f"ALTER COLUMN {quoted(new.name)} TYPE {new.declared}"
            try:
                with _lossless(connection, (table.staging, table.sql), old, new):
                    _run_ddl(connection, [f"ALTER TABLE {table.staging} {change}"], table.staging)
            except OptionError as error:
                raise OptionError(f"{error}. {_whose(connection, table)}") from None


def _whose(connection: Connection, table: Table) -> str:
    """Return the owners of staged rows, and the statements that remove rows given up for good.

    Pipelines share the table, and none can know which others live on, and from which checkpoint: a
    person removes the rows of a checkpoint that was given up.
    """
    staging, registry = table.staging, registry_of(table.schema)
    statement = _WHOSE.format(staging=staging, registry=registry, id=ID)
    counts: dict[tuple[str, str], int] = {}
    for name, number, count in connection.execute(query(statement)).fetchall():
        whose = _removal(staging, registry, name, number)
        counts[whose] = counts.get(whose, 0) + count
    shown = list(counts)[:_OWNERS_SHOWN]
    rows = "; ".join(f"{counts[whose]} rows of {whose[0]}" for whose in shown)
    removals = "".join(f"\n{removal};" for _, removal in shown)
    return (
        f"The rows are: {rows}{'; and others' if len(shown) < len(counts) else ''}. Start each of "
        f"these pipelines: its checkpoint's lineage, as a hash, follows its name and its sink's. "
        f"Of a checkpoint that was given up, and of no transaction, rows are never committed; "
        f"remove those, and only those:{removals}"
    )


def _removal(staging: str, registry: str, name: str | None, number: int) -> tuple[str, str]:
    """Return the owner of the rows under a name, and the statement that removes all of them."""
    if name is None:
        known = f"SELECT FROM {registry} WHERE id = {staging}.{ID}"
        return "no transaction", f"DELETE FROM {staging} WHERE NOT EXISTS ({known})"
    whose, which = prefix_of(name), f"starts_with(name, {literal(prefix_of(name))})"
    # Rows of others, whose name may be what the names of all begin with.
    if committable_of(name, "", "") is None:
        whose, which = name[:NAME_BYTES_MAX], f"id = {number}"
    return repr(whose), (
        f"WITH gone AS (DELETE FROM {registry} WHERE {which} "
        f"AND staging = {literal(staging)} RETURNING id) "
        f"DELETE FROM {staging} WHERE {ID} IN (SELECT id FROM gone)"
    )


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


def _domain_defaults(connection: Connection, table: Table) -> dict[str, str]:
    """Return the defaults in the user's table, as SQL, for new columns that refuse nulls.

    Waiting rows do not have these columns, and their commit leaves the columns out.
    """
    defaults = connection.execute(_DOMAIN_DEFAULTS, [table.sql]).fetchall()
    strict = {column.name for column in table.columns if column.not_null}
    return {name: default for name, default in defaults if name in strict}


def _differences(connection: Connection, table: Table) -> list[str]:
    """Return the changes that bring the staging table up to date with the user's."""
    staged = columns_of(connection, table.staging)
    defaults = _domain_defaults(connection, table)
    changes = []
    for column in table.columns:
        name, kind = quoted(column.name), column.type_name
        if column.name not in staged:
            if column.generated:
                continue  # rows never have it, and it may be null nowhere
            default = defaults.get(column.name)
            filled_with = f" DEFAULT {default}" if default else ""
            changes.append(f"ADD COLUMN {name} {column.declared}{filled_with}")
        elif staged[column.name].declared != column.declared:
            changes.append(f"ALTER COLUMN {name} TYPE {column.declared} USING {name}::{kind}")
    filled = [column.name for column in table.columns if column.has_default or column.generated]
    if not connection.execute(_IS_REPLICATED, [table.staging]).rowcount:
        changes.append(_DELETES_ARE_PUBLISHED)
    unfit = connection.execute(_UNFIT_CHECKS, [table.staging, table.sql, filled]).fetchall()
    return changes + [f"DROP CONSTRAINT IF EXISTS {quoted(name)}" for (name,) in unfit]


def _ensure(
    connection: Connection, target: Table, table: str, ddl: Sequence[str], privileges: str
) -> None:
    if connection.execute("SELECT to_regclass($1)", [table]).fetchone() == (None,):
        _run_ddl(connection, ddl, table)
    if problem := strangers_hand(connection, table, target.sql):
        raise OptionError(problem)
    conditions = [
        f"has_table_privilege({literal(table)}, {literal(privilege)})"
        for privilege in privileges.split(", ")
    ]
    if connection.execute(query(f"SELECT {' AND '.join(conditions)}")).fetchone() != (True,):
        raise OptionError(
            f"the role lacks privileges on {table}: run GRANT {privileges} ON {table} TO it"
        )


def _run_ddl(connection: Connection, ddl: Sequence[str], table: str) -> None:
    """Run statements in one transaction, unless the table to create exists by now.

    Without a lock, which any role could hold: a table that another driver creates meanwhile is
    waited for, and then found.
    """
    for is_last in (False, True):
        try:
            with connection.transaction():
                known = connection.execute("SELECT to_regclass($1)", [table]).fetchone()
                if ddl[0].startswith("ALTER") or known == (None,):
                    for statement in ddl:
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
        f"owner run, and grant the role INSERT, SELECT, UPDATE and DELETE on it:\n"
        + ";\n".join(ddl)
        + ";"
    )
