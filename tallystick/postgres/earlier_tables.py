"""Tables of earlier builds, beside the user's table: what waits there is settled where it is.

Earlier builds kept the table of tokens, the registry and the tables of staged rows in the schema of
the user's table, where roles shared them. A committable that such a build wrote names that schema
in its details: its rows are committed from there, and its token is there. Nothing else is written
to these tables.

Other roles may write into them. Invariants:
    * Nothing that is read from a row there becomes SQL but the quoted name of a table in that
      schema, and nothing is done to that table: only to the table of staged rows for it.
    * A table counts only if it belongs to a role that could do harm anyway: to this one, to the
      owner of the user's table or of the schema, or to a superuser; and only if nothing on it runs
      code of others.
"""

import re

from tallystick.epoch.two_phase import Committable
from tallystick.errors import DataLossError, OptionError
from tallystick.postgres.connection import Connection, query
from tallystick.postgres.names import fingerprint
from tallystick.postgres.schema import Table, registry_of, table_id_of, tokens_of
from tallystick.postgres.transactions import Details

_NO_TABLE = "pg_catalog.tallystick_none"
"""In place of the user's table where it is not known: no role is trusted as its owner."""
_TABLE = re.compile(r'(?:[a-z_][a-z0-9_]*|"(?:[^"\0]|"")+")\."(?:[^"\0]|"")+"')
"""A table as `Table.sql` has it."""
_SHOWN_MAX = 200
_MAY_ACT = (
    "CASE WHEN current_setting('server_version_num')::integer >= 160000 "
    "THEN 'USAGE, SET' ELSE 'MEMBER' END"
)
"""The privilege to act as a role: from version 16 on, a member may be one without it."""
_UNTRUSTED = f"""
    SELECT pg_get_userbyid(c.relowner), w.is_trusted
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    CROSS JOIN LATERAL (
        SELECT pg_get_userbyid(c.relowner) = current_user
               OR EXISTS (SELECT FROM pg_class t
                          WHERE t.oid = to_regclass($2) AND t.relowner = c.relowner)
               OR pg_has_role(c.relowner, n.nspowner, {_MAY_ACT}),
               c.relkind <> 'r' OR c.relrowsecurity
               OR EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid)
               OR EXISTS (SELECT FROM pg_rewrite r WHERE r.ev_class = c.oid)
    ) AS w (is_trusted, has_code)
    WHERE c.oid = to_regclass($1) AND (w.has_code OR NOT w.is_trusted)
"""
"""A superuser may act as every role. Expressions of indexes and the like only an owner creates."""
_REGISTRIES = """
    SELECT quote_ident(n.nspname)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relname = 'tallystick_staged' AND c.relkind = 'r' AND quote_ident(n.nspname) <> $1
      AND (quote_ident(n.nspname) = $2 OR pg_get_userbyid(c.relowner) = current_user)
      AND has_schema_privilege(n.oid, 'USAGE')
      AND has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'DELETE')
    ORDER BY 1
"""
"""The registry beside the sink's table, and those that this role created for another table=."""


def earlier_schemas(connection: Connection, own: str, table: Table) -> list[str]:
    """Return the schemas, quoted, in which an earlier build of a pipeline may have staged rows.

    Args:
        connection: to the server.
        own: the schema of our tables, quoted, which is left out.
        table: the sink's.
    """
    rows = connection.execute(query(_REGISTRIES), [own, table.schema]).fetchall()
    return [schema for (schema,) in rows]


def is_table(text: str) -> bool:
    """Return whether a text is the name of a table as `Table.sql` has it, and so is safe as SQL."""
    return _TABLE.fullmatch(text) is not None


def strangers_hand(
    connection: Connection, schema: str, target: str, staging: str | None = None
) -> str:
    """Describe the role whose code could run with our rights through earlier tables; or "".

    Args:
        connection: to the server.
        schema: of the tables, quoted.
        target: the user's table, as SQL, whose owner is trusted if it is in that schema.
        staging: the table of staged rows that a row names, perhaps as SQL; None: none is used.
    """
    tables = [tokens_of(schema), registry_of(schema)]
    if staging is not None:
        is_ours = staging.startswith(f'{schema}."tallystick_staged_') and is_table(staging)
        if not is_ours or not table_id_of(connection, staging):
            return f"it names {staging[:_SHOWN_MAX]!r}, which is no table of staged rows"
        tables.append(staging)
    is_beside = target.startswith(f'{schema}."') and is_table(target)
    for table in tables:
        parameters = [table, target if is_beside else _NO_TABLE]
        row = connection.execute(query(_UNTRUSTED), parameters).fetchone()
        if row is not None and not row[1]:
            return (
                f"{table} belongs to role {row[0]!r}, whose triggers and defaults would run with "
                f"this role's rights: expected it to belong to this role, to the owner of the "
                f"table that is written to, or of its schema, or to a superuser. Look who created "
                f"it, and what is in it; then ALTER TABLE {table} OWNER TO one of them, or DROP it "
                f"if no pipeline has anything in it"
            )
        if row is not None:
            return (
                f"{table} has a trigger, a rule or a policy, which may run anybody's code with "
                f"this role's rights: DROP it"
            )
    return ""


def refuse_changed(
    connection: Connection,
    committable: Committable,
    details: Details,
    row: tuple[str, str, list[str], list[str], int],
) -> None:
    """Raise if a row of an earlier registry is not as the task has written it.

    Args:
        connection: to the server.
        committable: the transaction.
        details: of the committable.
        row: target, table of staged rows, columns, key and number of rows, as the registry has
            them.

    Raises:
        DataLossError: the row was changed since.
        OptionError: it names other tables than a pipeline's, or strangers could run code.
    """
    name, registry, (target, staging, columns, key, record_count) = (
        committable.name,
        registry_of(details.schema),
        row,
    )
    is_changed = (target, fingerprint(target, staging, columns, key)) != (
        details.table,
        details.fingerprint,
    )
    # What a recovery finds has the count of this very row.
    if is_changed or record_count != committable.record_count:
        raise DataLossError(
            f"PostgreSQL: row {name!r} of {registry} is not as the task has written it "
            f"({committable.record_count} rows for {details.table}): it says {record_count} rows "
            f"from {staging!r} for {target!r}. Somebody has changed it. Nothing was committed, and "
            f"no other table touched. See who may write into {registry}, and put the row right; to "
            f"go on without its rows, delete it"
        )
    problem = strangers_hand(connection, details.schema, target, staging)
    if not is_table(target):
        problem = f"it says that rows go to {target!r}, which is no name of a table"
    if problem:
        raise OptionError(
            f"PostgreSQL: {name!r} is decided, and {record_count} rows of it wait in {staging}; "
            f"they are committed at the first start after this is solved: {problem}"
        )
