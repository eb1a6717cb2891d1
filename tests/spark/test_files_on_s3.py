"""A pipeline into files on S3: at the start no checkpoint is known, and no path may be empty."""

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyarrow import fs

import tallystick as ts
from tests.spark.flow import Facts, Flow, pass_on
from tests.storage.test_storage_s3 import Server

pytestmark = [pytest.mark.broker, pytest.mark.spark]

WHO = {"access_key": "key", "secret_key": "hunter2", "scheme": "http", "region": "us-east-1"}


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("s3"))
    yield running
    running.stop()


def paths(files: fs.FileSystem, folder: str) -> list[str]:
    """Of all files below a folder, hidden or not."""
    selector = fs.FileSelector(folder, recursive=True, allow_not_found=True)
    return [info.path for info in files.get_file_info(selector) if info.is_file]


def hold_input(flow: Flow, files: fs.FileSystem, folder: str) -> bool:
    """Whether the visible files are the input, exactly once."""
    rows = ds.dataset(folder, format="parquet", filesystem=files).to_table().to_pylist()
    pairs = sorted((row["key"].decode(), row["value"].decode()) for row in rows)
    return pairs == sorted(flow.input)


def hidden_ones(flow: Flow, files: fs.FileSystem, folder: str) -> set[str]:
    """What lies in the hidden folder, by the pipeline that it is of."""
    start = f"{folder}/_tallystick/"
    return {path.removeprefix(start).split("/")[0] for path in paths(files, start)}


def test_a_pipeline_writes_files_to_s3_and_leaves_nothing_strange(
    flow: Flow, server: Server, tmp_path: Path
) -> None:
    """Neither there nor on a disk."""
    s3 = server.create_bucket("bucket", access_key="key", secret_key="hunter2")
    disk, folder = fs.LocalFileSystem(), str(tmp_path / "files")
    sinks = (
        ts.FileSink(f"s3a://key:hunter2@bucket/out?{server.query}"),
        ts.FileSink(folder),
        flow.sink(transactions="task"),
    )
    pipeline = ts.Pipeline(flow.name).read(flow.source()).map_batches(pass_on()).write(*sinks)
    for count in (120, 30):
        flow.feed(count)
        flow.run(pipeline)

        flow.assert_exact()
        for files, where in ((s3, "bucket/out"), (disk, folder)):
            assert hold_input(flow, files, where)
            assert hidden_ones(flow, files, where) == {flow.name}


def test_a_warning_is_given_once_though_sinks_are_opened_twice(
    flow: Flow, caplog: pytest.LogCaptureFixture
) -> None:
    flow.feed(1)
    facts = Facts()
    sink = flow.sink(transactions="task", transaction_timeout_ms=599_000)
    pipeline = ts.Pipeline(flow.name).read(flow.source()).map_batches(pass_on()).write(sink)
    query = pipeline.start(
        flow.spark,
        checkpoint=str(flow.checkpoint),
        trigger={"processingTime": "10 minutes"},
        listener=facts,
    )
    try:
        deadline = time.monotonic() + 100
        while not facts.names:  # the driver is made by then
            assert time.monotonic() < deadline, query.status
            time.sleep(0.1)
    finally:
        query.stop()
    messages = [record.getMessage() for record in caplog.records]
    assert (
        len([message for message in messages if "trigger interval (600000 ms)" in message]) == 1
    ), messages


def test_a_folder_that_nobody_may_write_is_refused_before_the_start(
    flow: Flow, server: Server
) -> None:
    missing = ts.FileSink(f"s3a://key:hunter2@nobodys/out?{server.query}")
    flow.feed(1)
    pipeline = ts.Pipeline(flow.name).read(flow.source()).map_batches(pass_on()).write(missing)
    with pytest.raises(ts.OptionError, match="must be writable") as refused:
        flow.run(pipeline)
    assert "hunter2" not in str(refused.value)
    assert not flow.checkpoint.exists()
