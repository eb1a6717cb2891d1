"""The tables: the user's as it is, and ours beside it, in its schema.

tallystick_committed        a token per committed transaction: the proof of what became of it
tallystick_staged           a row per transaction that is staged and not committed
tallystick_staged_<table>   the rows of those; the user's columns, and two of ours

Other roles may write into them, since several pipelines share them. Invariants:
    * Nothing that is read from a row becomes SQL: a row names a table of staged rows, and it counts
      only if the catalogue has one of exactly that name in the registry's own schema.
    * A table of ours belongs to a role that could do harm anyway: to this one, to the owner of the
      user's table or of the schema, or to a superuser. Its owner's triggers, defaults and policies
      run with the rights of whoever writes into it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import psycopg
from psycopg import errors

from tallystick.errors import OptionError
from tallystick.postgres.columns import TableColumn
from tallystick.postgres.connection import USERS_PATH, Connection, literal, query, quoted

logger = logging.getLogger(__name__)

ID, POSITION = "tallystick_id", "tallystick_position"
NO_TABLE = "pg_catalog.tallystick_none"
"""In place of the user's table where it is not known: nobody is trusted for being its owner."""
STAGING_COLUMNS = (
    TableColumn(ID, "bigint", "int8", not_null=True),
    TableColumn(POSITION, "bigint", "int8", not_null=True),
)
_NAME_BYTES_MAX = 63
_COLUMNS = """
    WITH RECURSIVE base AS (
        SELECT a.attnum, a.attname, t.oid, t.typbasetype, t.typtype, t.typname,
               CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE a.atttypmod END AS modifier,
               a.attnotnull OR t.typnotnull AS not_null
        FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
        WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
      UNION ALL
        SELECT b.attnum, b.attname, t.oid, t.typbasetype, t.typtype, t.typname,
               CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE b.modifier END,
               b.not_null OR t.typnotnull
        FROM base b JOIN pg_type t ON t.oid = b.typbasetype WHERE b.typtype = 'd'
    )
    SELECT a.attname, format_type(a.atttypid, a.atttypmod),
           CASE WHEN b.typtype = 'e' THEN 'enum' ELSE b.typname END,
           b.modifier, b.not_null, a.atthasdef OR a.attidentity <> '' OR d.typdefault IS NOT NULL,
           a.attgenerated <> '', a.attidentity = 'a'
    FROM base b JOIN pg_attribute a ON a.attrelid = $1 AND a.attnum = b.attnum
    JOIN pg_type d ON d.oid = a.atttypid
    WHERE b.typtype <> 'd' ORDER BY a.attnum
"""
_FOUND = "SELECT pg_catalog.to_regclass($1)::pg_catalog.oid"
_TABLE = """
    SELECT c.oid, quote_ident(n.nspname), c.relname, c.relkind, c.relpersistence,
           has_table_privilege(c.oid, 'INSERT') OR has_any_column_privilege(c.oid, 'INSERT'),
           has_table_privilege(c.oid, 'UPDATE') OR has_any_column_privilege(c.oid, 'UPDATE'),
           has_table_privilege(c.oid, 'SELECT') OR has_any_column_privilege(c.oid, 'SELECT')
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = $1
"""


def _trusted(role: str) -> str:
    """A condition: this role could do harm anyway; `$2` is the user's table, `n` the schema."""
    return (
        f"({role} = (SELECT oid FROM pg_roles WHERE rolname = current_user) "
        f"OR EXISTS (SELECT FROM pg_class WHERE oid = to_regclass($2) AND relowner = {role}) "
        f"OR pg_has_role({role}, n.nspowner, 'MEMBER'))"  # a superuser is a member of every role
    )


_STRANGERS_TRIGGER = f"""
    (SELECT min(t.tgname) FROM pg_trigger t JOIN pg_proc f ON f.oid = t.tgfoid
     WHERE t.tgrelid = c.oid AND NOT t.tgisinternal AND NOT {_trusted("f.proowner")})
"""
_OURS = f"""
    SELECT pg_get_userbyid(c.relowner), {_trusted("c.relowner")}, {_STRANGERS_TRIGGER}
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass($1)
"""
_STAGING = f"""
    SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE quote_ident(n.nspname) = $1 AND c.relkind = 'r'
      AND starts_with(c.relname::text, 'tallystick_staged_')
      AND $2 = quote_ident(n.nspname) || '."' || replace(c.relname::text, '"', '""') || '"'
      AND EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND NOT a.attisdropped
                  AND a.attname = '{ID}' AND a.atttypid = 'int8'::regtype)
"""
_WITHOUT_CODE = """
    SELECT FROM pg_class c
    WHERE c.oid = to_regclass($1) AND c.relkind = 'r'
      AND has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'DELETE')
      AND NOT (c.relhastriggers OR c.relhasrules OR c.relrowsecurity)
      AND EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND NOT a.attisdropped
                  AND a.attname = $2 AND a.atttypid = $3::regtype)
      AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid
                      AND (i.indexprs IS NOT NULL OR i.indpred IS NOT NULL))
      AND NOT EXISTS (SELECT FROM pg_statistic_ext x WHERE x.stxrelid = c.oid
                      AND x.stxexprs IS NOT NULL)
"""
"""Expressions of indexes and statistics are evaluated, where they can be, while it is planned."""
_UNIQUE = """
    SELECT 1 FROM pg_index i
    WHERE i.indrelid = $1 AND i.indisunique AND i.indisvalid AND i.indimmediate
      AND i.indpred IS NULL AND i.indexprs IS NULL
      AND (SELECT array_agg(a.attname::text ORDER BY a.attname::text)
           FROM pg_attribute a
           WHERE a.attrelid = i.indrelid
             AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])) = $2
"""
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

_DELETES_ARE_PUBLISHED = "REPLICA IDENTITY FULL"
"""A publication FOR ALL TABLES lets nothing be deleted from a table without a primary key else."""
_IS_REPLICATED = "SELECT FROM pg_class WHERE oid = to_regclass($1) AND relreplident = 'f'"


@dataclass(frozen=True, slots=True)
class Table:
    """The user's table, as the server has it.

    Args:
        schema: quoted.
        name: not quoted.
        columns: in the table's order.
    """

    schema: str
    name: str
    columns: tuple[TableColumn, ...]

    @property
    def sql(self) -> str:
        """As SQL."""
        return f"{self.schema}.{quoted(self.name)}"

    @property
    def staging(self) -> str:
        """The table of its staged rows, as SQL."""
        name = f"tallystick_staged_{self.name}"
        if len(name.encode()) > _NAME_BYTES_MAX:
            digest = sha256(self.name.encode()).hexdigest()[:16]
            kept = self.name.encode()[: _NAME_BYTES_MAX - 35].decode(errors="ignore")
            name = f"tallystick_staged_{kept}_{digest}"
        return f"{self.schema}.{quoted(name)}"


def table_at(schema: str, sql: str) -> Table | None:
    """Read back what `Table.sql` made, without its columns; None: it is of another form."""
    name = sql.removeprefix(f'{schema}."').removesuffix('"').replace('""', '"')
    table = Table(schema, name, ())
    return table if name and table.sql == sql else None


def tokens_of(schema: str) -> str:
    """The table of tokens, as SQL."""
    return f"{schema}.tallystick_committed"


def registry_of(schema: str) -> str:
    """The table of what is staged, as SQL."""
    return f"{schema}.tallystick_staged"


def read_table(connection: Connection, table: str, key: Sequence[str]) -> Table:
    """Look the table up, and see that rows can be written into it.

    Raises:
        OptionError: it is not there, or not as it must be; all problems are named.
    """
    row, reason = None, ""
    try:
        with connection.transaction():
            connection.execute(USERS_PATH)
            found = connection.execute(_FOUND, [table]).fetchone()
        row = connection.execute(_TABLE, found).fetchone()
    except (errors.SyntaxError, errors.InvalidName) as error:
        reason = f": {error.diag.message_primary}"
    if row is None:
        raise OptionError(
            f"table={table!r} is not there, or the role may not see its schema{reason}: create it, "
            f"or name it as SQL does: schema.table, with double quotes around names that have "
            f"capitals or signs"
        )
    oid, schema, name, kind, persistence, inserts, updates, selects = row
    columns = tuple(TableColumn(*each) for each in connection.execute(_COLUMNS, [oid]).fetchall())
    problems = []
    if kind not in {"r", "p"} or persistence == "t":
        problems.append("is a view, a foreign or a temporary table: expected an ordinary one")
    if not inserts:
        problems.append("may not be inserted into by this role: GRANT INSERT")
    if key:
        if not (updates and selects):
            problems.append("may not be updated and read by this role, for key=: GRANT both")
        problems += _key_problems(connection, oid, columns, key)
    if problems:
        raise OptionError(f"table={table!r} " + "; and ".join(problems))
    if persistence == "u":
        logger.warning("table %s is unlogged: a crash of the server empties it", table)
    return Table(schema, name, columns)


def _key_problems(
    connection: Connection, oid: int, columns: Sequence[TableColumn], key: Sequence[str]
) -> list[str]:
    missing = sorted(set(key) - {each.name for each in columns})
    if missing:
        return [f"has no column {', '.join(map(repr, missing))}, named in key="]
    if connection.execute(_UNIQUE, [oid, sorted(key)]).fetchone() is None:
        names = ", ".join(map(quoted, key))
        return [
            f"has no unique index over exactly its key ({names}), without conditions: CREATE "
            f"UNIQUE INDEX, or a PRIMARY KEY, is needed for upserts"
        ]
    return []


def strangers_hand(connection: Connection, ours: str, target: str) -> str:
    """Say which role could run its code with our rights through a table of ours; empty: none.

    Args:
        connection: to the server.
        ours: a table of ours, as SQL.
        target: the user's table, as SQL.
    """
    row = connection.execute(query(_OURS), [ours, target]).fetchone()
    if row is None:
        return ""
    owner, is_trusted, trigger = row
    if not is_trusted:
        return (
            f"{ours} belongs to role {owner!r}, whose triggers and defaults would run with this "
            f"role's rights: expected it to belong to this role, to the owner of {target} or of "
            f"its schema, or to a superuser. Look who made it, and what is in it; then ALTER "
            f"TABLE {ours} OWNER TO one of them, or DROP it if no pipeline has anything in it"
        )
    if trigger is not None:
        return (
            f"{ours} has trigger {trigger!r}, whose function belongs to neither this role nor the "
            f"owner of {target} or of its schema, and would run with this role's rights: DROP it"
        )
    return ""


def staging_named(connection: Connection, schema: str, said: str) -> str | None:
    """Return the staging table that a row names, as SQL; None: there is none in that schema.

    Whose it is, `strangers_hand` says.

    Args:
        connection: to the server.
        schema: of the registry, quoted.
        said: by the row, as `Table.staging`; compared letter by letter.
    """
    row = connection.execute(query(_STAGING), [schema, said]).fetchone()
    return None if row is None else f"{schema}.{quoted(row[0])}"


def lock_without_code(
    connection: Connection, table: str, column: tuple[str, str], *, nowait: bool = False
) -> bool:
    """Return whether no code runs when a table is read, or deleted from, by one column.

    Whoever owns it: where that holds, nothing is added until the transaction ends. It counts for
    `ONLY` that table.

    Args:
        connection: in a transaction.
        table: as SQL.
        column: by which rows are found: its name and its type, one of PostgreSQL's own.
        nowait: fail rather than wait for a lock.
    """
    for is_locked in (False, True):
        asked = [table, *column]
        if not connection.execute(query(_WITHOUT_CODE), asked).rowcount:
            return False
        if not is_locked:
            # Against new statistics and indexes; then against triggers, and so all stronger locks.
            for mode in ("SHARE UPDATE EXCLUSIVE", "ROW EXCLUSIVE"):
                lock = f"LOCK TABLE ONLY {table} IN {mode} MODE{' NOWAIT' if nowait else ''}"
                connection.execute(query(lock))
    return True


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
    """Run it in one transaction, one of all drivers at a time, and only if it is needed still."""
    try:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(hashtext('tallystick'))")
            known = connection.execute("SELECT to_regclass($1)", [table]).fetchone()
            if ddl.startswith("ALTER") or known == (None,):
                for statement in ddl.split(";\n"):
                    connection.execute(query(statement))
    except (errors.InsufficientPrivilege, errors.ReadOnlySqlTransaction) as error:
        refused: psycopg.Error = error
    else:
        return
    raise OptionError(
        f"the role may not create or change {table} ({refused.diag.message_primary}): have its "
        f"owner run, and grant the role INSERT, SELECT, UPDATE and DELETE on it:\n{ddl};"
    )
