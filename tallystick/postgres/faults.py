"""Errors of psycopg as errors of ours: by the reader's remedy, and without secrets.

The texts of libpq and of the server may repeat the connection string and values of rows: such a
text is cut, and every secret in it is blotted out. Their exceptions are not kept as causes, which a
traceback would print.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psycopg
from psycopg.conninfo import conninfo_to_dict

from tallystick.errors import OptionError, RecordError, RetriableError, TallystickError

_SECRETS = ("password", "sslpassword", "oauth_client_secret")
_TEXT_MAX = 300
_OPTION_STATES = ("0A", "28", "3D", "3F", "42")
_RECORD_STATES = ("21", "22", "23", "44", "P0")
_REFUSED = (
    "authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "does not exist",
    "permission denied",
    "certificate",
    "server does not support SSL",
)
_COPY_CONTEXT = re.compile(r"COPY .*?, line (\d+)(?:, column ([^:]+))?")


def secrets_of(dsn: str) -> tuple[str, ...]:
    """Return the parts of a connection string to hide, with the whole string."""
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.Error:
        return (dsn,)
    named = [given.get(name) for name in _SECRETS] + [os.environ.get("PGPASSWORD")]
    return tuple(sorted((str(secret) for secret in [dsn, *named] if secret), key=len, reverse=True))


def scrubbed(text: str, secrets: tuple[str, ...]) -> str:
    """Return the text on one line, cut, with every secret blotted out."""
    for secret in secrets:
        text = text.replace(secret, "***")
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_MAX else f"{line[:_TEXT_MAX]}…"


@contextmanager
def ours(
    doing: str, secrets: tuple[str, ...], columns: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a block, and translate psycopg's errors into errors of ours.

    Args:
        doing: the name of the work, for the message.
        secrets: see `secrets_of`.
        columns: the types of the rows' columns, for an error in a value.
    """
    try:
        yield
    except psycopg.Error as error:
        translated = translate(error, doing, secrets, columns or {})
    else:
        return
    raise translated from None


def translate(
    error: psycopg.Error, doing: str, secrets: tuple[str, ...], columns: Mapping[str, str]
) -> TallystickError:
    """Return the error of ours for an error of psycopg."""
    state = error.sqlstate or ""
    message = error.diag.message_primary or str(error)
    text = f"PostgreSQL: {doing}: {scrubbed(message, secrets)}{f' ({state})' if state else ''}"
    if not state:
        refused = isinstance(error, psycopg.ProgrammingError | psycopg.NotSupportedError)
        if refused or any(phrase in message for phrase in _REFUSED):
            return OptionError(text)
        return RetriableError(text)
    if state == "42710":  # a name of ours is drawn again for each attempt
        return RetriableError(f"{text}: another session has taken the name")
    if state == "42501":
        return OptionError(f"{text}: grant the pipeline's role what it needs")
    if state.startswith(_OPTION_STATES):
        return OptionError(f"{text}: was the table, or the server, changed?")
    if state.startswith(_RECORD_STATES):
        return RecordError(f"{text}{_where(error, columns)}")
    # The hint, since the message is in the server's language. To try again would end alike.
    hint = error.diag.message_hint or ""
    if state in {"53200", "53400"} and "max_prepared_transactions" in hint:
        return OptionError(
            f"{text}: raise max_prepared_transactions: all tasks of an epoch's last stage stay "
            f"prepared until the epoch is decided, such as 200 after a shuffle into 200 "
            f"partitions; look for forgotten ones in pg_prepared_xacts; or use "
            f'transactions="staged"'
        )
    return RetriableError(text)


def _where(error: psycopg.Error, columns: Mapping[str, str]) -> str:
    """Return the table, constraint, column and row of an error; never the row's values."""
    diag = error.diag
    copied = _COPY_CONTEXT.match(diag.context or "")
    column = diag.column_name or (copied and copied[2])
    parts = [
        diag.table_name and f"table {diag.table_name}",
        diag.constraint_name and f"constraint {diag.constraint_name}",
        column and f"column {column}{_type_of(column, columns)}",
        copied and f"row {copied[1]} of those sent together",
    ]
    place = ", ".join(part for part in parts if part)
    return f"; {place}" if place else ""


def _type_of(column: str, columns: Mapping[str, str]) -> str:
    return f" ({columns[column]})" if column in columns else ""
