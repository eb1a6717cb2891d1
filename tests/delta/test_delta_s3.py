"""The Delta sink on S3, against a real server process: commits are conditional puts."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tallystick.epoch.two_phase import Outcome
from tallystick.errors import StorageError
from tests.delta.delta_sinks import OWNER, opened, place, prepared, rows
from tests.storage.test_storage_s3 import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    server = Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


def seen(server: Server, bucket: str) -> list[int]:
    """What delta-rs reads, with settings of its own."""
    settings = {
        "AWS_ENDPOINT_URL": f"http://{server.host}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
    }
    table = DeltaTable(f"s3://{bucket}/out", storage_options=settings)
    return sorted(table.to_pyarrow_table()["n"].to_pylist())


@pytest.mark.parametrize("every", [0, "1 hour"])
def test_epochs_on_s3_are_there_once_whoever_commits_them(
    server: Server, monkeypatch: pytest.MonkeyPatch, every: Any
) -> None:
    """Credentials are the URI's own; a zombie and its successor race for the same version."""
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    bucket = f"delta-{len(str(every))}"
    server.create_bucket(bucket, access_key="key", secret_key="hunter2")
    uri = f"s3a://key:hunter2@{bucket}/out?{server.query}"
    zombie = opened(uri, commit_every=every, partition_by=["dest"])
    epoch = prepared(zombie, place(), rows(0, 9), rows(9, 12))
    (stray,) = prepared(zombie, place(nonce="bb"), rows(0, 9))
    assert {one.name for one in zombie.lingering(OWNER)} == {epoch[0].name, stray.name}
    commit, hits = DeltaTable.create_write_transaction, []

    def successor_first(table: DeltaTable, *args: Any, **rest: Any) -> None:
        monkeypatch.setattr(DeltaTable, "create_write_transaction", commit)
        successor = opened(uri, commit_every=every)
        assert successor.commit_together(epoch) is Outcome.COMMITTED
        successor.close()
        hits.append(seen(server, bucket))
        commit(table, *args, **rest)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", successor_first)
    assert zombie.commit_together(epoch) is Outcome.COMMITTED
    zombie.close()
    assert hits == [list(range(12))]
    assert seen(server, bucket) == list(range(12))
    for lingering in zombie.lingering(OWNER):
        assert lingering.name == stray.name
        zombie.abort(lingering)
    files = server.create_bucket(f"{bucket}-other", access_key="key", secret_key="hunter2")
    listed = files.get_file_info(pa.fs.FileSelector(f"{bucket}/out", recursive=True))
    assert not [info.path for info in listed if stray.name in info.path]
    assert not [info.path for info in listed if re.search("/(due|pending)/.", info.path)]
    puts = [line for line in Path(server.log).read_text().splitlines() if "_delta_log" in line]
    assert any("PUT" in line and '" 412' in line for line in puts), "nobody was refused"


def test_a_store_that_is_away_is_tried_again(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.create_bucket("away", access_key="key", secret_key="hunter2")
    sink = opened(f"s3a://key:hunter2@away/out?{server.query}")
    epoch = prepared(sink, place(), rows(0, 3))
    server.stop()
    with pytest.raises(StorageError, match="Delta table s3://away/out") as caught:
        sink.commit_together(epoch)
    assert "hunter2" not in str(caught.value)
