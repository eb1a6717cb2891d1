"""What several sinks of one pipeline hold, as outsiders see it, and that it is all the same."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
from pyspark import cloudpickle

import tallystick as ts
from tallystick.kafka.client import Client
from tallystick.kafka.transactions import list_open_ids
from tests.postgres.real_postgres import PostgresServer
from tests.spark import lines_sink
from tests.spark.flow import Flow, pass_on
from tests.spark.lines_sink import LinesSink
from tests.spark.topics import by_key, read_committed, wait_until_nothing_is_pending

cloudpickle.register_pickle_by_value(lines_sink)  # workers need no tests
_numbers = count()
STAGED = "tallystick_staged"


@dataclass
class Sunk:
    """Sinks beside each other, each with its witness.

    Args:
        flow: input, output topic and checkpoint.
        postgres: the server; None: none of the sinks is there.
    """

    flow: Flow
    postgres: PostgresServer | None
    specs: list[dict[str, Any]] = field(default_factory=list)
    _rows: list[str] = field(default_factory=list)
    _newest: list[str] = field(default_factory=list)
    _files: list[Path] = field(default_factory=list)
    _lines: list[Path] = field(default_factory=list)

    def kafka(self, **settings: Any) -> "Sunk":
        """The output topic."""
        self.specs.append({"kind": "kafka", **settings})
        return self

    def files(self) -> "Sunk":
        """Parquet files."""
        self._files.append(self.flow.folder / f"files-{len(self._files)}")
        self.specs.append({"kind": "files", "path": str(self._files[-1])})
        return self

    def lines(self) -> "Sunk":
        """The sink that a user wrote."""
        self._lines.append(self.flow.folder / f"lines-{len(self._lines)}")
        self.specs.append({"kind": "lines", "folder": str(self._lines[-1])})
        return self

    def prepared(self, constraint: str = "") -> "Sunk":
        """A table of all rows, by prepared transactions."""
        table = self._create(f"key bytea, value bytea {constraint}")
        self._rows.append(table)
        return self._postgres(table)

    def staged(self) -> "Sunk":
        """A table of all rows, whose key is the row: it refuses to see one twice."""
        table = self._create("key bytea, value bytea PRIMARY KEY, n int DEFAULT 1")
        self._run(
            f"CREATE FUNCTION {table}_no() RETURNS trigger LANGUAGE plpgsql AS "
            f"'BEGIN RAISE EXCEPTION ''% was written twice'', NEW.value; END'",
            f"CREATE TRIGGER no BEFORE UPDATE ON {table} "
            f"FOR EACH ROW EXECUTE FUNCTION {table}_no()",
        )
        self._rows.append(table)
        return self._postgres(table, transactions="staged", key=["value"])

    def newest(self) -> "Sunk":
        """A table of the newest row of each key, and of what it was before."""
        table = self._create("key bytea PRIMARY KEY, value bytea")
        self._run(
            f"CREATE TABLE {table}_history (at serial, key bytea, value bytea)",
            f"CREATE FUNCTION {table}_note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN "
            f"INSERT INTO {table}_history (key, value) VALUES (NEW.key, NEW.value); "
            f"RETURN NEW; END'",
            f"CREATE TRIGGER note AFTER INSERT OR UPDATE ON {table} "
            f"FOR EACH ROW EXECUTE FUNCTION {table}_note()",
        )
        self._newest.append(table)
        return self._postgres(table, transactions="staged", key=["key"])

    @property
    def folders(self) -> list[Path]:
        """Where files go."""
        return self._files

    def pipeline(self, function: Any = None, **settings: Any) -> ts.Pipeline:
        """For this process; settings of the source go to it."""
        pipeline = ts.Pipeline(self.flow.name).read(self.flow.source(**settings))
        return pipeline.map_batches(function or pass_on()).write(*self.sinks())

    def sinks(self) -> list[Any]:
        """For this process."""
        sink_kinds = {
            "kafka": self.flow.sink,
            "postgres": ts.PostgresSink,
            "files": ts.FileSink,
            "lines": LinesSink,
        }
        return [
            sink_kinds[spec["kind"]](
                **{name: value for name, value in spec.items() if name != "kind"}
            )
            for spec in self.specs
        ]

    def spec(self, **further: Any) -> dict[str, Any]:
        """For a driver process."""
        return self.flow.spec(sinks=self.specs, **further)

    def assert_exact(self) -> None:
        """Every sink holds the input, and no more; nothing is open or hidden."""
        if any(spec["kind"] == "kafka" for spec in self.specs):
            self.flow.assert_exact()
        expected = sorted(self.flow.input)
        assert [table for table in self._rows if self._table(table) != expected] == []
        assert [folder for folder in self._files if files_in(folder) != expected] == []
        assert [folder for folder in self._lines if lines_in(folder) != expected] == []
        for table in self._newest:
            self._assert_newest(table)
        self.assert_nothing_lingers()

    def assert_nothing_lingers(self) -> None:
        """Neither prepared nor staged nor hidden nor open."""
        wait_until_nothing_is_pending(self.flow.confluent, self.flow.topic_out)
        assert open_ids(self.flow) == []
        for folder in (*self._files, *self._lines):
            assert hidden(folder) == []
        if self.postgres is not None:
            assert self.postgres.query("SELECT gid FROM pg_prepared_xacts") == []
            for (table,) in self.postgres.query(
                f"SELECT oid::regclass::text FROM pg_class "
                f"WHERE relname LIKE '{STAGED}%' AND relkind = 'r'"
            ):
                assert self.postgres.query(f"SELECT * FROM {table}") == [], table

    def counts(self) -> list[int]:
        """How many rows each sink shows."""
        shown = len(read_committed(self.flow.confluent, self.flow.topic_out))
        return [
            shown,
            *(len(self._table(table)) for table in self._rows),
            *(len(files_in(folder)) for folder in self._files),
            *(len(lines_in(folder)) for folder in self._lines),
        ]

    def _assert_newest(self, table: str) -> None:
        """Each key went forward, from epoch to epoch, to its last value."""
        expected = by_key(self.flow.input)
        assert dict(self._table(table)) == {key: values[-1] for key, values in expected.items()}
        noted = self._query(f"SELECT key, value FROM {table}_history ORDER BY at")
        for key, values in by_key(_pairs(noted)).items():
            numbers = [int(value or "") for value in values]
            assert numbers == sorted(set(numbers)), (key, numbers)

    def _table(self, table: str) -> list[tuple[str, str]]:
        return sorted(_pairs(self._query(f"SELECT key, value FROM {table}")))

    def _create(self, columns: str) -> str:
        table = f"t{next(_numbers)}"
        self._run(f"CREATE TABLE {table} ({columns})")
        return table

    def _postgres(self, table: str, **settings: Any) -> "Sunk":
        assert self.postgres is not None
        self.specs.append(
            {"kind": "postgres", "dsn": self.postgres.dsn, "table": table, **settings}
        )
        return self

    def _query(self, text: str) -> list[Any]:
        assert self.postgres is not None
        return self.postgres.query(text)

    def _run(self, *statements: str) -> None:
        for statement in statements:
            self._query(statement)


def open_ids(flow: Flow) -> list[str]:
    """The pipeline's open transactions, as the broker lists them."""
    config = flow.sink().output.config
    client = Client(config)
    try:
        return [ident for ident in list_open_ids(client) if re.search(rf"\b{flow.name}\b", ident)]
    finally:
        client.close()


def files_in(folder: Path) -> list[tuple[str, str]]:
    """What the visible files hold."""
    table = ds.dataset(folder, format="parquet").to_table()
    if not table.num_rows:
        return []
    return sorted(_pairs(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)))


def lines_in(folder: Path) -> list[tuple[str, str]]:
    """What the visible lines say."""
    lines = [line for file in folder.iterdir() if file.is_file() for line in file.open()]
    pairs = (line.split() for line in lines)
    return sorted((key, value) for key, value in pairs)


def hidden(folder: Path) -> list[Path]:
    """Drafts that wait, of either kind of folder."""
    return [*folder.rglob("*.draft"), *folder.glob("pending/*")]


def _pairs(rows: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[str, str]]:
    return ((key.decode(), value.decode()) for key, value in rows)
