"""The Iceberg sink on S3, against a real server process, with the catalog's own credentials."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyiceberg.catalog import load_catalog

import tallystick as ts
from tallystick.epoch.two_phase import Outcome, RunFacts
from tests.delta.delta_sinks import COLUMNS, OWNER, place, prepared, rows
from tests.iceberg.iceberg_sinks import NAME
from tests.storage.test_storage_s3 import Server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


@pytest.mark.parametrize("every", [0, "1 hour"])
def test_epochs_on_s3_are_there_once(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int | str
) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(variable, raising=False)
    server.create_bucket("ice", access_key="key", secret_key="hunter2")
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": "s3://ice/warehouse",
        "s3.endpoint": f"http://{server.host}",
        "s3.access-key-id": "key",
        "s3.secret-access-key": "hunter2",
        "s3.region": "us-east-1",
    }
    settings = {"create": True, "schema": COLUMNS, "commit_every": every}
    killed = ts.IcebergSink(catalog, NAME, **settings).open(OWNER, RunFacts())
    epoch = prepared(killed, place(), rows(0, 9), rows(9, 12))
    (stray,) = prepared(killed, place(nonce="bb"), rows(0, 9))
    assert "hunter2" not in epoch[0].details
    assert killed.commit_together(epoch) is Outcome.COMMITTED
    successor = ts.IcebergSink(catalog, NAME, **settings).open(OWNER, RunFacts())
    for sink in (successor, killed):
        assert sink.commit_together(epoch) is Outcome.COMMITTED
        sink.abort(stray)
        sink.close()

    table = load_catalog("default", **catalog).load_table(NAME)
    assert sorted(table.scan().to_arrow()["n"].to_pylist()) == list(range(12))
    assert list(successor.lingering(OWNER)) == []
