"""The names of transactions in PostgreSQL, and the SQL that tasks and the driver share.

A name tells the owner and the place of the transaction, and can be parsed:

    tallystick:<pipeline>:<sink>:<lineage's hash>:<checkpoint_id>:<task>:<attempt>:<nonce>

Invariants:
    * A name is shorter than 200 bytes, PostgreSQL's limit of a prepared transaction's identifier.
    * Names of one owner begin with the same text, and names of another owner do not. The lineage
      belongs to the owner: a pipeline started from a savepoint, beside the pipeline that the
      savepoint is of, leaves the transactions of the other alone.
"""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from urllib.parse import quote

from tallystick.epoch.two_phase import Committable, Owner, Place
from tallystick.postgres.connection import quoted
from tallystick.postgres.schema import ID, POSITION, tokens_of

NAME_BYTES_MAX = 199
_PIPELINE_MAX, _SINK_MAX, _NONCE_MAX, _HASH = 48, 40, 24, 16
_APPLICATION_MAX = 63  # the server cuts a session's application_name there
_OF_ONE = f"{ID} OPERATOR(pg_catalog.=) $1"
"""With the user's search_path, where any role may have operators, pg_catalog may come last."""
_NAME = re.compile(r"tallystick:[^:]*:[^:]*:[^:]*:(\d{1,19}):(\d{1,10}):\d{1,10}:[^:]+")


def owner_prefix(owner: Owner) -> str:
    """Return the beginning of all names of an owner."""
    pipeline, sink = _short(owner.pipeline, _PIPELINE_MAX), _short(owner.sink, _SINK_MAX)
    return f"tallystick:{pipeline}:{sink}:{_hash(owner.lineage)}:"


def name_of(place: Place) -> str:
    """Return the name of one attempt's transaction."""
    prefix, nonce = owner_prefix(place.owner), _short(place.nonce, _NONCE_MAX)
    name = f"{prefix}{place.checkpoint_id}:{place.task}:{place.attempt}:{nonce}"
    assert len(name) <= NAME_BYTES_MAX, name
    return name


def prefix_of(name: str) -> str:
    """Return the owner's part of a name."""
    return name.rsplit(":", 4)[0] + ":"


def application_of(name: str) -> str:
    """Return the session name for writing a transaction, by which a recovery finds it open.

    Empty if the name would be too long, which takes numbers that no pipeline reaches.
    """
    prefix = prefix_of(name)
    session_name = _application_prefix(prefix) + name.removeprefix(prefix)
    return session_name if len(session_name) <= _APPLICATION_MAX else ""


def application_prefix(owner: Owner) -> str:
    """Return the beginning of the names of an owner's sessions."""
    return _application_prefix(owner_prefix(owner))


def name_from(application: str, owner: Owner) -> str:
    """Return the name of the transaction that a session of the owner writes."""
    return owner_prefix(owner) + application.removeprefix(application_prefix(owner))


def _application_prefix(prefix: str) -> str:
    return f"tallystick:{_hash(prefix)}:"


def committable_of(
    name: str, sink: str, details: str, record_count: int = 0, begun_ms: int = 0
) -> Committable | None:
    """Return the committable of a name that a recovery found; None: `name_of` did not make it.

    Args:
        name: possibly made by another user in order to cause trouble.
        sink: the sink's uid, which the name may hold in a shortened form.
        details: see `Committable`.
        record_count: 0: unknown.
        begun_ms: 0: unknown.
    """
    parts = _NAME.fullmatch(name)
    if parts is None or not name.isascii():
        return None
    return Committable(sink, int(parts[1]), int(parts[2]), name, record_count, begun_ms, details)


def staged_id(name: str) -> int:
    """Return the number that stands for a name in each staged row."""
    return int.from_bytes(sha256(name.encode()).digest()[:8], "big", signed=True)


def insert_token(
    schema: str, committable: Committable, *, lost: bool = False
) -> tuple[str, list[object]]:
    """Return the statement that inserts the token of a committable's outcome, with parameters.

    The statement waits for a session that writes the same token, and does nothing if one exists.
    """
    _, pipeline, sink, lineage, *_ = prefix_of(committable.name).split(":")
    return (
        f"INSERT INTO {tokens_of(schema)} (name, pipeline, sink, lineage, checkpoint_id, task, "
        f"lost) VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT (name) DO NOTHING",
        [
            committable.name,
            pipeline,
            sink,
            lineage,
            committable.checkpoint_id,
            committable.task,
            lost,
        ],
    )


def fingerprint(target: str, staging: str, columns: Sequence[str], key: Sequence[str]) -> str:
    """Return a digest of a row of the registry, to detect a change by another role."""
    content = json.dumps([target, staging, list(columns), list(key)])
    return sha256(content.encode()).hexdigest()[:32]


def move(
    source: str,
    target: str,
    columns: Sequence[str],
    key: Sequence[str],
    changed: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the statement that moves staged rows to the user's table; the parameter is their id.

    With a key, the last row of each key counts. Rows go in the key's order, so that two such
    statements take the rows' locks in one order.

    Args:
        source: the table of staged rows, as SQL.
        target: the user's table, as SQL.
        columns: of the rows.
        key: the columns of the unique index for ON CONFLICT.
        changed: the columns that differ between the tables, see `refuse_loss`.
    """
    names = ", ".join(map(quoted, columns))
    into = f"INSERT INTO {target} ({names}) OVERRIDING SYSTEM VALUE SELECT {names} FROM "
    if not key:
        return f"{into} {source} WHERE {_OF_ONE} ORDER BY {POSITION}"
    keys = ", ".join(map(quoted, key))
    equal = ", ".join(changed.get(name, quoted(name)) for name in key)
    others = [quoted(name) for name in columns if name not in key]
    changes = ", ".join(f"{name} = EXCLUDED.{name}" for name in others)
    return (
        f"{into} (SELECT DISTINCT ON ({equal}) {names} FROM {source} WHERE {_OF_ONE} "
        f"ORDER BY {equal}, {POSITION} DESC) AS last "
        f"ON CONFLICT ({keys}) DO {f'UPDATE SET {changes}' if changes else 'NOTHING'}"
    )


def deletion(source: str) -> str:
    """Return the statement that deletes staged rows; the parameter is their id."""
    return f"DELETE FROM {source} WHERE {_OF_ONE}"


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:_HASH]


def _short(text: str, limit: int) -> str:
    quoted = quote(text, safe="")
    if len(quoted) <= limit:
        return quoted
    return f"{quoted[: limit - _HASH - 1]}~{_hash(text)}"
