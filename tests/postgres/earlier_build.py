"""Tables of an earlier build in the schema of the user's table, written as that build did."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import psycopg
from postgres_writing import OWNER, place_of

from tallystick.epoch.two_phase import Committable, Owner
from tallystick.postgres.names import fingerprint, insert_token, name_of, staged_id
from tests.postgres.real_postgres import PostgresServer

TABLES = (
    """CREATE TABLE {schema}.tallystick_committed (
    name text COLLATE "C" PRIMARY KEY,
    pipeline text NOT NULL, sink text NOT NULL, lineage text NOT NULL,
    checkpoint_id bigint NOT NULL, task integer NOT NULL,
    lost boolean NOT NULL DEFAULT false, written timestamptz NOT NULL DEFAULT now())""",
    """CREATE TABLE {schema}.tallystick_staged (
    name text COLLATE "C" PRIMARY KEY, id bigint NOT NULL UNIQUE,
    target text NOT NULL, staging text NOT NULL, columns text[] NOT NULL, key text[] NOT NULL,
    record_count bigint NOT NULL, begun_ms bigint NOT NULL)""",
    "CREATE TABLE {schema}.tallystick_staged_t (LIKE {schema}.t INCLUDING CONSTRAINTS)",
    "ALTER TABLE {schema}.tallystick_staged_t ADD COLUMN tallystick_id bigint NOT NULL, "
    "ADD COLUMN tallystick_position bigint NOT NULL, REPLICA IDENTITY FULL",
    "CREATE INDEX ON {schema}.tallystick_staged_t (tallystick_id)",
)
OURS = ("tallystick_committed", "tallystick_staged", "tallystick_staged_t")


class EarlierBuild(NamedTuple):
    """A build that keeps its tables beside table `t (a bigint, b text)`.

    Args:
        postgres: the server.
        schema: of the user's table.
        dsn: as whom it writes.
    """

    postgres: PostgresServer
    schema: str
    dsn: str

    def create(self, role: str = "") -> None:
        """Create its tables, as the superuser, for a role."""
        for text in TABLES:
            self.postgres.query(text.format(schema=self.schema))
        for table in OURS if role else ():
            self.postgres.query(f"ALTER TABLE {self.schema}.{table} OWNER TO {role}")

    def staged(self, *numbers: int, owner: Owner = OWNER, checkpoint_id: int = 1) -> Committable:
        """Stage rows, as its task did."""
        committable = self._committable("staged", len(numbers), owner, checkpoint_id)
        target, staging = (f'{self.schema}."{name}"' for name in ("t", "tallystick_staged_t"))
        number = staged_id(committable.name)
        with psycopg.connect(self.dsn) as connection:
            for position, a in enumerate(numbers):
                row = [a, f"row {a}", number, position]
                connection.execute(f"INSERT INTO {staging} VALUES (%s, %s, %s, %s)", row)
            connection.execute(
                f"INSERT INTO {self.schema}.tallystick_staged "
                f"VALUES (%s, %s, %s, %s, %s, %s, %s, 0)",
                [committable.name, number, target, staging, ["a", "b"], [], len(numbers)],
            )
        seal = fingerprint(target, staging, ["a", "b"], [])
        details = json.loads(committable.details) | {"fingerprint": seal}
        return replace(committable, details=json.dumps(details))

    def prepared(self, *numbers: int, owner: Owner = OWNER, checkpoint_id: int = 1) -> Committable:
        """Prepare a transaction, as its task did."""
        committable = self._committable("prepared", len(numbers), owner, checkpoint_id)
        statement, parameters = insert_token(self.schema, committable)
        with psycopg.connect(self.dsn, autocommit=True, cursor_factory=psycopg.RawCursor) as task:
            task.execute("BEGIN")
            for a in numbers:
                task.execute(f"INSERT INTO {self.schema}.t VALUES ($1, $2)", [a, f"row {a}"])
            task.execute(statement, parameters)
            task.execute(f"PREPARE TRANSACTION '{committable.name}'")
        return committable

    def committed_by_hand(self, committable: Committable) -> None:
        """Commit staged rows, as its driver did before it died without an answer."""
        statement, parameters = insert_token(self.schema, committable)
        number = staged_id(committable.name)
        with psycopg.connect(self.dsn, cursor_factory=psycopg.RawCursor) as driver:
            staging = f"{self.schema}.tallystick_staged_t"
            for text in (
                f"INSERT INTO {self.schema}.t SELECT a, b FROM {staging} WHERE tallystick_id = $1",
                f"DELETE FROM {staging} WHERE tallystick_id = $1",
                f"DELETE FROM {self.schema}.tallystick_staged WHERE id = $1",
            ):
                driver.execute(text, [number])
            driver.execute(statement, parameters)

    def rows(self) -> Sequence[int]:
        """Return what waits in its table of staged rows."""
        rows = self.postgres.query(f"SELECT a FROM {self.schema}.tallystick_staged_t ORDER BY a")
        return [a for (a,) in rows]

    def _committable(
        self, mode: str, record_count: int, owner: Owner, checkpoint_id: int
    ) -> Committable:
        ((server, tokens_id),) = self.postgres.query(
            f"SELECT system_identifier::text, "
            f"'{self.schema}.tallystick_committed'::regclass::oid::bigint FROM pg_control_system()"
        )
        details = {
            "mode": mode,
            "schema": self.schema,
            "table": f'{self.schema}."t"',
            "server": server,
            "database": "postgres",
            "tokens_id": tokens_id,
            "fingerprint": "",
        }
        place = place_of(checkpoint_id, owner=owner)
        return Committable(
            sink=owner.sink,
            checkpoint_id=checkpoint_id,
            task=0,
            name=name_of(place),
            record_count=record_count,
            begun_ms=0,
            details=json.dumps(details),
        )
