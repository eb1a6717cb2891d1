"""The Delta sink on S3, against a real server process: commits are conditional puts."""

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tallystick.epoch.two_phase import Outcome, Owner
from tallystick.errors import StorageError
from tests.delta.delta_sinks import check_epochs_are_there_once, opened, place, prepared, rows
from tests.storage.test_storage_s3 import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("s3"), one_at_a_time=True)
    yield server
    server.stop()


def seen(server: Server, bucket: str) -> list[int]:
    """Read the table by delta-rs, which gets its settings from the test and not from the sink."""
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
    uri = f"s3a://key:hunter2@{bucket}/out?{server.query}"
    files = server.create_bucket(bucket, access_key="key", secret_key="hunter2")
    read = functools.partial(seen, server, bucket)
    check_epochs_are_there_once(monkeypatch, uri, read, files, f"{bucket}/out", every)


def test_writers_that_race_for_a_version_lose_nothing(
    server: Server,
) -> None:
    """Each commit creates its version by a conditional put; the store refuses the second."""
    server.create_bucket("race", access_key="key", secret_key="hunter2")
    uri = f"s3a://key:hunter2@race/out?{server.query}"
    sinks = [opened(uri, Owner("race", f"delta-{n}", "f00d")) for n in range(2)]
    start = threading.Barrier(2)

    def commit_all(number: int) -> None:
        for epoch in range(1, 6):
            at = place(epoch, 0, f"a{number}", Owner("race", f"delta-{number}", "f00d"))
            first = 100 * number + 10 * epoch
            committables = prepared(sinks[number], at, rows(first, first + 10))
            start.wait()
            assert sinks[number].commit_together(committables) is Outcome.COMMITTED

    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(commit_all, number) for number in range(2)]:
            ended.result()
    assert seen(server, "race") == [*range(10, 60), *range(110, 160)]
    lines = server.log.read_text().splitlines()
    assert [line for line in lines if "PUT" in line and "_delta_log" in line and " 412" in line]


def test_a_store_that_is_away_is_tried_again(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.create_bucket("away", access_key="key", secret_key="hunter2")
    sink = opened(f"s3a://key:hunter2@away/out?{server.query}")
    epoch = prepared(sink, place(), rows(0, 3))
    server.stop()
    with pytest.raises(StorageError, match="Delta table s3a://away/out") as caught:
        sink.commit_together(epoch)
    assert "hunter2" not in str(caught.value)
