"""SQL that tasks and the driver share."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType

from tallystick.epoch.two_phase import Committable
from tallystick.postgres.connection import quoted
from tallystick.postgres.names import prefix_of
from tallystick.postgres.schema import ID, POSITION, tokens_of


def insert_token(
    schema: str, committable: Committable, *, lost: bool = False
) -> tuple[str, list[object]]:
    """Return the proof of what became of a committable, with its parameters.

    It waits for whoever writes the same one, and does nothing if it is there.
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
    """Return a digest of what a row of the registry says, which other roles may have changed."""
    said = json.dumps([target, staging, list(columns), list(key)])
    return sha256(said.encode()).hexdigest()[:32]


_OF_ONE = f"{ID} OPERATOR(pg_catalog.=) $1"
"""With the user's search_path, where anybody may have operators, pg_catalog may come last."""


def move(
    source: str,
    target: str,
    columns: Sequence[str],
    key: Sequence[str],
    changed: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Staged rows into the user's table; the parameter is their number.

    With a key, the last one of each key counts. In the key's order, so that two such statements
    take the rows' locks in one order.

    Args:
        source: of the rows, as SQL.
        target: the user's table, as SQL.
        columns: of the rows.
        key: those of them that ON CONFLICT finds.
        changed: columns that are not in both tables the same, as `refuse_loss` says.
    """
    names = ", ".join(map(quoted, columns))
    into = f"INSERT INTO {target} ({names}) OVERRIDING SYSTEM VALUE SELECT {names} FROM "
    if not key:
        return f"{into} {source} WHERE {_OF_ONE} ORDER BY {POSITION}"
    keys = ", ".join(map(quoted, key))
    equal = ", ".join(changed.get(each, quoted(each)) for each in key)
    others = [quoted(each) for each in columns if each not in key]
    changes = ", ".join(f"{each} = EXCLUDED.{each}" for each in others)
    return (
        f"{into} (SELECT DISTINCT ON ({equal}) {names} FROM {source} WHERE {_OF_ONE} "
        f"ORDER BY {equal}, {POSITION} DESC) AS last "
        f"ON CONFLICT ({keys}) DO {f'UPDATE SET {changes}' if changes else 'NOTHING'}"
    )


def deletion(source: str) -> str:
    """Return the statement that deletes staged rows; the parameter is their number."""
    return f"DELETE FROM {source} WHERE {_OF_ONE}"
