"""What the tests of the participant share: owners, places, and short ways to write."""

import secrets
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tallystick.epoch.two_phase import (
    Committable,
    Owner,
    Place,
    RunFacts,
    Transaction,
    TwoPhaseCommitSink,
)
from tallystick.postgres.sink import PostgresSink
from tests.postgres.real_postgres import PostgresServer

OWNER = Owner("late flights", "postgres-1", "7a1d5f1c-lineage")
COLUMNS = "a bigint, b text"
WAYS = ("prepared", "staged")


def own_schema_of(role: str) -> str:
    """The schema of our tables, for a role whose name needs no quotes."""
    return f"tallystick_{role}"


OWN = own_schema_of("postgres")


def staging_of(postgres: PostgresServer, name: str, own: str = OWN) -> str:
    """The newest table of the rows that are staged for a table, whose name needs no quotes."""
    rows = postgres.query(
        "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = %s::regnamespace "
        "AND relkind = 'r' AND starts_with(relname, %s) ORDER BY pg_class.oid DESC",
        own,
        f"tallystick_staged_{name}_",
    )
    return str(rows[0][0])


def rows_of(*numbers: int, text: str = "row") -> pa.RecordBatch:
    return pa.record_batch(
        {"a": pa.array(numbers, pa.int64()), "b": pa.array([f"{text} {n}" for n in numbers])}
    )


def place_of(checkpoint_id: int = 1, task: int = 0, owner: Owner = OWNER) -> Place:
    return Place(owner, checkpoint_id, task, 0, secrets.token_hex(8))


def opened(dsn: str, table: str, owner: Owner = OWNER, **settings: Any) -> TwoPhaseCommitSink:
    return PostgresSink(dsn, table=table, **settings).open(owner, RunFacts(tasks=2))


def begun(driver: TwoPhaseCommitSink, *batches: pa.RecordBatch, **where: Any) -> Transaction:
    transaction = driver.plan().begin(place_of(**where))
    for rows in batches:
        transaction.write(rows)
    return transaction


def prepared(
    driver: TwoPhaseCommitSink, *batches: pa.RecordBatch, **where: Any
) -> Sequence[Committable]:
    return begun(driver, *batches, **where).prepare()


def attempted(
    driver: TwoPhaseCommitSink, *batches: pa.RecordBatch, **where: Any
) -> Sequence[Committable]:
    """As the engine does it: whatever fails, the transaction is told to let go."""
    transaction = begun(driver, **where)
    try:
        for rows in batches:
            transaction.write(rows)
        return transaction.prepare()
    finally:
        transaction.abort()
