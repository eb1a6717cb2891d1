"""The places beside topics that the campaign's programs write, as independent readers see them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import duckdb

from tallystick_tools.chaos.cluster import NO_OFFSET, OutputRecord
from tallystick_tools.chaos.files import ParquetFiles
from tallystick_tools.chaos.lake import LakeTables
from tallystick_tools.chaos.object_store import ENDPOINT_VARIABLE
from tallystick_tools.chaos.program import FILES
from tallystick_tools.chaos.tables import Tables
from tests.delta.delta_sinks import added_files
from tests.iceberg.iceberg_sinks import NAME, data_files, file_of
from tests.postgres.real_postgres import PostgresServer
from tests.storage.test_storage_s3 import Server

DSN_VARIABLE = "TALLYSTICK_CAMPAIGN_POSTGRES"
PREPARED, STAGED = "prepared_bets", "staged_bets"
BUCKET = "s3://campaign/checkpoints"
COLUMNS = "player text, id bigint, amount bigint, at bigint"
DELTA = "delta-bets"
LAKE = f"delta {DELTA}", f"iceberg {NAME}", "files of Delta", "files of Iceberg"
"""The outputs that `Lake` reads: both tables, each by its library and by its files."""


class Lines:
    """The folder of a sink that a user wrote: lines in files, hidden until they are committed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def look(self) -> list[str] | None:
        """Return the files; None: hidden ones are left."""
        if any(self._folder.glob("pending/*")):
            return None
        return sorted(path.name for path in self._folder.glob("*-*-*"))

    def rows(self) -> list[OutputRecord]:
        """Return the lines."""
        names = self.look()
        if names is None:
            raise TimeoutError(f"files in {self._folder}/pending still wait for a commit")
        return [
            OutputRecord("lines", -1, NO_OFFSET, None, line)
            for name in names
            for line in (self._folder / name).read_bytes().splitlines()
        ]

    def close(self) -> None:
        """Nothing is open."""


class Lake(LakeTables):
    """Tables by their libraries, and by DuckDB from the files that log and metadata name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, [DELTA], [NAME])

    def rows(self) -> list[OutputRecord]:
        """Return the rows of both tables, twice."""
        return [*super().rows(), *self._by_duckdb()]

    def _by_duckdb(self) -> Iterator[OutputRecord]:
        delta, iceberg = LAKE[2:]
        for file in added_files(self._folder / DELTA):
            yield from _rows_in(self._folder / DELTA / file["path"], delta, file["partitionValues"])
        for file in data_files(self._folder):
            rows = [*_rows_in(file_of(file["file_path"]), iceberg, {})]
            yield from rows
            ids = [json.loads(row.value or b"")["id"] for row in rows]
            if ids != sorted(ids, reverse=True) or file["sort_order_id"] != 1:
                yield OutputRecord(iceberg, -1, NO_OFFSET, None, b'{"rows": "not sorted"}')


def _rows_in(file: Path, topic: str, values: dict[str, str]) -> Iterator[OutputRecord]:
    """Yield the rows of a file of a partition with these values."""
    found = duckdb.connect().execute("SELECT * FROM read_parquet($1)", [str(file)])
    names = [column[0] for column in found.description or ()]
    for row in found.fetchall():
        text = json.dumps(dict(zip(names, row, strict=True)) | values, sort_keys=True).encode()
        yield OutputRecord(topic, -1, NO_OFFSET, None, text)


def start_postgres() -> PostgresServer:
    """Start a server, and tell programs of it."""
    server = PostgresServer(max_prepared_transactions="200")
    server.query(f"CREATE TABLE {PREPARED} ({COLUMNS})")
    server.query(f"CREATE TABLE {STAGED} ({COLUMNS}, PRIMARY KEY (player, id))")
    os.environ[DSN_VARIABLE] = server.dsn
    return server


def start_object_store(folder: Path) -> Server:
    """Start a server of S3 with a bucket, and tell programs of it."""
    server = Server(folder)
    server.create_bucket("campaign", access_key="key", secret_key="secret")
    os.environ |= {
        ENDPOINT_VARIABLE: f"http://{server.host}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    return server


STORES = {
    "files": lambda folder: ParquetFiles(folder / FILES),
    "lake": lambda folder: Lake(folder / FILES),
    "lines": lambda folder: Lines(folder / FILES),
    "tables": lambda folder: Tables(os.environ[DSN_VARIABLE], [PREPARED, STAGED]),
}
