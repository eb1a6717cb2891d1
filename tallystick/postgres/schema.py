"""The user's table as the server describes it, and the names of Tallystick's own tables.

They are in a schema that belongs to the pipeline's role alone, see `own_tables`:

tallystick_committed      a token per committed transaction: the proof of its outcome
tallystick_staged         a row per transaction that is staged and not committed
tallystick_staged_<name>  the rows of staged transactions; the user's columns, and two of ours
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import errors

from tallystick.errors import OptionError
from tallystick.postgres.binary_copy import TableColumn
from tallystick.postgres.connection import OWN_PATH_MEANWHILE, USERS_PATH, Connection, query, quoted

logger = logging.getLogger(__name__)

ID, POSITION = "tallystick_id", "tallystick_position"
STAGING_COLUMNS = (
    TableColumn(ID, "bigint", "int8", not_null=True),
    TableColumn(POSITION, "bigint", "int8", not_null=True),
)
NAME_BYTES_MAX = 63
"""The server cuts the names of schemas and tables there."""
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
           a.attgenerated <> '', a.attidentity = 'a', a.atttypid, a.atttypmod,
           CASE WHEN a.attcollation = d.typcollation THEN '' ELSE a.attcollation::regcollation::text
           END, a.attcollation, current_setting('server_encoding') = 'SQL_ASCII'
    FROM base b JOIN pg_attribute a ON a.attrelid = $1 AND a.attnum = b.attnum
    JOIN pg_type d ON d.oid = a.atttypid
    WHERE b.typtype <> 'd' ORDER BY a.attnum
"""
_TYPES = """
    SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod),
           CASE WHEN a.attcollation OPERATOR(pg_catalog.=) t.typcollation THEN ''
           ELSE a.attcollation::pg_catalog.regcollation::pg_catalog.text END,
           a.atttypid, a.atttypmod, a.attcollation
    FROM pg_catalog.pg_attribute a
    JOIN pg_catalog.pg_type t ON t.oid OPERATOR(pg_catalog.=) a.atttypid
    WHERE a.attrelid OPERATOR(pg_catalog.=) pg_catalog.to_regclass($1)
       OR a.attrelid OPERATOR(pg_catalog.=) pg_catalog.to_regclass($2)
"""
"""Runs with the user's search_path, in which any role may have operators."""
_FOUND = "SELECT pg_catalog.to_regclass($1)::pg_catalog.oid"
_TABLE = """
    SELECT c.oid, quote_ident(n.nspname), c.relname, c.relkind, c.relpersistence,
           has_table_privilege(c.oid, 'INSERT') OR has_any_column_privilege(c.oid, 'INSERT'),
           has_table_privilege(c.oid, 'UPDATE') OR has_any_column_privilege(c.oid, 'UPDATE'),
           has_table_privilege(c.oid, 'SELECT') OR has_any_column_privilege(c.oid, 'SELECT')
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = $1
"""

_UNIQUE = """
    SELECT i.indexrelid::regclass::text, NOT EXISTS (
        SELECT FROM unnest(i.indkey::int2[], i.indcollation::oid[], i.indclass::oid[])
            WITH ORDINALITY AS k (attnum, coll, class, number)
        JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
        JOIN pg_opclass c ON c.oid = k.class
        CROSS JOIN LATERAL (
            WITH RECURSIVE b AS (
                SELECT t.oid, t.typbasetype FROM pg_type t WHERE t.oid = a.atttypid
              UNION ALL
                SELECT t.oid, t.typbasetype FROM b JOIN pg_type t ON t.oid = b.typbasetype
            )
            SELECT d.opcfamily FROM b JOIN pg_opclass d ON d.opcintype IN (b.oid, c.opcintype)
            WHERE b.typbasetype = 0 AND d.opcmethod = c.opcmethod AND d.opcdefault
            ORDER BY d.opcintype <> b.oid LIMIT 1
        ) AS usual
        WHERE k.number <= i.indnkeyatts
          AND (NOT EXISTS (SELECT FROM pg_amop o JOIN pg_amop u USING (amopopr, amopstrategy)
                           WHERE o.amopfamily = c.opcfamily AND o.amopstrategy = 3
                             AND o.amoplefttype = c.opcintype AND o.amoprighttype = c.opcintype
                             AND u.amopfamily = usual.opcfamily)
               OR (k.coll <> a.attcollation
                   AND EXISTS (SELECT FROM pg_collation l WHERE NOT l.collisdeterministic
                               AND l.oid IN (k.coll, a.attcollation)))))
    FROM pg_index i
    WHERE i.indrelid = $1 AND i.indisunique AND i.indisvalid AND i.indimmediate
      AND i.indpred IS NULL AND i.indexprs IS NULL
      AND (SELECT array_agg(a.attname::text ORDER BY a.attname)
           FROM pg_attribute a
           WHERE a.attrelid = i.indrelid
             AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]))
        = (SELECT array_agg(k.name::text ORDER BY k.name) FROM unnest($2::name[]) AS k (name))
    ORDER BY 1
"""
"""And whether what is equal to the index is equal to DISTINCT, and the other way around.

It is where both compare by one operator (strategy 3), and by one collation or by two that take for
equal what has the same bytes. ON CONFLICT takes all unique indexes over its columns.
"""


@dataclass(frozen=True, slots=True)
class Table:
    """The user's table, as the server describes it.

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
        """The table's name as SQL."""
        return f"{self.schema}.{quoted(self.name)}"


def tokens_of(schema: str) -> str:
    """Return the table of tokens, as SQL."""
    return f"{schema}.tallystick_committed"


def registry_of(schema: str) -> str:
    """Return the registry, the table of staged transactions, as SQL."""
    return f"{schema}.tallystick_staged"


def table_id_of(connection: Connection, table: str) -> int:
    """Return the server's number of a table; a table created again has another; 0: no table."""
    row = connection.execute("SELECT coalesce(to_regclass($1)::oid::bigint, 0)", [table]).fetchone()
    assert row is not None
    return int(row[0])


def read_tokens(
    connection: Connection, tokens: str, names: Sequence[str]
) -> dict[str, tuple[bool, int]]:
    """Return the tokens of some names: whether each says "lost", and its checkpoint.

    Args:
        connection: to the server.
        tokens: the table, as SQL.
        names: of transactions, and of the mark of deleted tokens.
    """
    rows = connection.execute(
        query(f"SELECT name, lost, checkpoint_id FROM {tokens} WHERE name = ANY ($1::text[])"),
        [list(names)],
    ).fetchall()
    return {name: (lost, checkpoint_id) for name, lost, checkpoint_id in rows}


def read_table(connection: Connection, table: str, key: Sequence[str]) -> Table:
    """Look the user's table up, and check that rows can be written into it.

    Raises:
        OptionError: the table does not exist, or does not fit; all problems are named.
    """
    row, reason = None, ""
    try:
        with connection.transaction():
            connection.execute(USERS_PATH)
            identity = connection.execute(_FOUND, [table]).fetchone()
        row = connection.execute(_TABLE, identity).fetchone()
    except (errors.SyntaxError, errors.InvalidName) as error:
        reason = f": {error.diag.message_primary}"
    if row is None:
        raise OptionError(
            f"table={table!r} is not there, or the role may not see its schema{reason}: create it, "
            f"or name it as SQL does: schema.table, with double quotes around names that have "
            f"capitals or signs"
        )
    oid, schema, name, kind, persistence, inserts, updates, selects = row
    columns = _columns(connection, oid)
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


def columns_of(connection: Connection, table: str) -> dict[str, TableColumn]:
    """Return the present columns of a table, by name.

    Args:
        connection: with its own search_path, by which types are named.
        table: as SQL; a missing table has no columns.
    """
    row = connection.execute(_FOUND, [table]).fetchone()
    assert row is not None
    return {column.name: column for column in _columns(connection, row[0])}


def _columns(connection: Connection, oid: object) -> tuple[TableColumn, ...]:
    return tuple(TableColumn(*row) for row in connection.execute(_COLUMNS, [oid]).fetchall())


def retyped(
    connection: Connection, tables: tuple[str, str], columns: Sequence[TableColumn]
) -> list[str]:
    """Return the columns whose type or collation has changed since they were read, as clauses.

    Args:
        connection: in a transaction that keeps the tables as they are; with any search_path.
        tables: as SQL, with columns of those names and types.
        columns: as they were.
    """
    known = {column.name: column for column in columns}
    types = [
        (known[name], f"{now} COLLATE {collation}" if collation else now, exact)
        for name, now, collation, *exact in connection.execute(_TYPES, tables).fetchall()
        if name in known
    ]
    changed = {
        f"column {quoted(was.name)} is {now} now, and was {was.declared}"
        for was, now, exact in types
        if exact != [was.type_id, was.type_modifier, was.collation_id]
    }
    return sorted(changed)


def _key_problems(
    connection: Connection, oid: int, columns: Sequence[TableColumn], key: Sequence[str]
) -> list[str]:
    missing = sorted(set(key) - {column.name for column in columns})
    if missing:
        return [f"has no column {', '.join(map(repr, missing))}, named in key="]
    indexes = connection.execute(query(_UNIQUE), [oid, list(key)]).fetchall()
    names = ", ".join(map(quoted, key))
    if not indexes:
        return [
            f"has no unique index over exactly its key ({names}), without conditions: CREATE "
            f"UNIQUE INDEX, or a PRIMARY KEY, is needed for upserts"
        ]
    return [
        f"has {index}, a unique index over its key ({names}) whose collation or operator class "
        f"takes other values for equal than the columns themselves do: create it again without "
        f"them, or give the columns its collation"
        for index, is_as_columns in indexes
        if not is_as_columns
    ]


def refuse_other_keys(connection: Connection, target: str, key: Sequence[str]) -> None:
    """Refuse an upsert by a unique index that has replaced the index of the start.

    Args:
        connection: in a transaction that keeps the table as it is; with the user's search_path.
        target: the user's table, as SQL.
        key: the columns of the unique index for ON CONFLICT.

    Raises:
        OptionError: the index takes other values for equal than the columns do: rows would be lost.
    """
    connection.execute(OWN_PATH_MEANWHILE)
    (oid,) = connection.execute(_FOUND, [target]).fetchone() or (0,)
    problems = _key_problems(connection, oid, _columns(connection, oid), key)
    connection.execute(USERS_PATH)
    if problems:
        raise OptionError(f"table {target} " + "; and ".join(problems))
