"""The places beside topics that the campaign's programs write, as independent readers see them."""

import os
from pathlib import Path

from tallystick_tools.chaos.cluster import NO_OFFSET, OutputRecord
from tallystick_tools.chaos.files import ParquetFiles
from tallystick_tools.chaos.object_store import ENDPOINT_VARIABLE
from tallystick_tools.chaos.program import FILES
from tallystick_tools.chaos.tables import Tables
from tests.postgres.real_postgres import PostgresServer
from tests.storage.test_storage_s3 import Server

DSN_VARIABLE = "TALLYSTICK_CAMPAIGN_POSTGRES"
PREPARED, STAGED = "prepared_bets", "staged_bets"
BUCKET = "s3://campaign/checkpoints"
COLUMNS = "player text, id bigint, amount bigint, at bigint"


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
    "lines": lambda folder: Lines(folder / FILES),
    "tables": lambda folder: Tables(os.environ[DSN_VARIABLE], [PREPARED, STAGED]),
}
