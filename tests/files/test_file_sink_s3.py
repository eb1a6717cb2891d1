"""The same on S3, against a real server process: nothing renames there."""

import json
import signal
import subprocess
import sys
import textwrap

import pytest
from pyarrow import fs

from tallystick.epoch.two_phase import Outcome
from tallystick.errors import DataLossError, OptionError, StorageError
from tests.files.file_sinks import OWNER, opened, place, prepared, rows, visible
from tests.storage.test_storage_s3 import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def bucket(server, request):
    """An independent view of a bucket of one's own."""
    name = f"bucket-{abs(hash(request.node.name)) % 10**9}"
    files = server.create_bucket(name)
    return Bucket(files, name, f"s3a://{name}/out?{server.query}")


class Bucket:
    def __init__(self, files, name, uri):
        self.files = files
        self.name = name
        self.uri = uri

    def visible(self, folder="out"):
        path = f"{self.name}/{folder}"
        if self.files.get_file_info(path).type == fs.FileType.NotFound:
            return []
        return visible(path, self.files)

    def paths(self, folder="out"):
        selector = fs.FileSelector(f"{self.name}/{folder}", recursive=True, allow_not_found=True)
        infos = self.files.get_file_info(selector)
        return sorted(info.path for info in infos if info.type == fs.FileType.File)


@pytest.mark.parametrize("by", [[], ["dest"]])
def test_rows_are_hidden_until_the_commit_and_there_once_after_it(bucket, by):
    sink = opened(bucket.uri, partition_by=by)
    (committable,) = prepared(sink, place(), rows(0, 5), rows(5, 9))
    (aborted,) = prepared(sink, place(nonce="bb"), rows(0, 9))
    assert bucket.visible() == []
    assert not [path for path in bucket.paths() if path.endswith(".parquet")]
    assert {committable.name for committable in sink.lingering(OWNER)} == {
        committable.name,
        aborted.name,
    }

    for _ in range(2):
        assert sink.commit(committable) is Outcome.COMMITTED
        sink.abort(aborted)
        sink.abort(committable)
        assert bucket.visible() == list(range(9))
        assert list(sink.lingering(OWNER)) == []
        assert not [path for path in bucket.paths() if path.endswith(".draft")]
    assert sink.commit(aborted) is Outcome.LOST


def test_what_a_reader_took_away_is_not_lost_and_what_is_gone_unseen_is_named(bucket):
    sink = opened(bucket.uri, partition_by=["dest"])
    taken, gone = (prepared(sink, place(nonce=nonce), rows(0, 9))[0] for nonce in "ab")
    sink.commit(taken)
    for path in bucket.paths():
        if f"{taken.name}.parquet" in path or (
            f"{gone.name}.parquet.draft" in path and "ORD" in path
        ):
            bucket.files.delete_file(path)

    assert opened(bucket.uri).commit(taken) is Outcome.COMMITTED
    with pytest.raises(DataLossError, match=rf"1 are gone.*dest=ORD/part-{gone.name}.parquet"):
        opened(bucket.uri).commit(gone)
    assert bucket.visible() == []


def test_a_bucket_that_is_not_there_is_refused_at_the_start(server):
    with pytest.raises(OptionError, match="must be writable") as raised:
        opened(f"s3://key:hunter2@nobodys-bucket/out?{server.query}")
    assert "hunter2" not in str(raised.value)
    assert "nobodys-bucket/out" in str(raised.value)


def test_a_sink_that_moved_settles_what_lies_in_the_old_place(bucket, server):
    (committable,) = prepared(opened(bucket.uri), place(), rows(0, 3))
    assert "hunter2" not in committable.details
    moved = opened(f"s3a://key:hunter2@{bucket.name}/new?{server.query}")

    assert moved.commit(committable) is Outcome.COMMITTED
    assert bucket.visible() == [0, 1, 2]


def test_a_server_that_is_gone_leaves_the_outcome_open(tmp_path):
    server = Server(tmp_path)
    try:
        server.create_bucket("bucket")
        uri = f"s3://bucket/out?{server.query}"
        sink = opened(uri)
        (committable,) = prepared(sink, place(), rows(0, 3))
    finally:
        server.stop()
    with pytest.raises(StorageError, match="s3://bucket/out: looking for"):
        sink.commit(committable)


KILLED = textwrap.dedent(
    """
    import json, os, signal, sys
    from tallystick.epoch.two_phase import Committable
    from tests.files.file_sinks import opened

    class Killing:
        def __init__(self, files, step):
            self.files, self.left = files, step
            self.type_name = files.type_name

        def __getattr__(self, name):
            return lambda *args, **rest: self.do(getattr(self.files, name), *args, **rest)

        def do(self, step, *args, **rest):
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return step(*args, **rest)

    for line in sys.stdin:
        uri, step, fields = json.loads(line)
        child = os.fork()  # before anything of S3 runs in this process
        if child == 0:
            sink = opened(uri)
            folder = sink._plan.folder
            folder._files = Killing(folder._files, step)
            sink.commit(Committable.from_fields(fields))
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
    """
)


def test_a_commit_that_is_killed_before_any_request_is_finished_by_the_next(bucket):
    command = [sys.executable, "-c", KILLED]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    step, status = 0, signal.SIGKILL
    with subprocess.Popen(command, **pipes) as committing:
        while status == signal.SIGKILL:
            uri = bucket.uri.replace("/out", f"/{step}")
            sink = opened(uri, partition_by=["dest"])
            (committable,) = prepared(sink, place(), rows(0, 9))
            committing.stdin.write(json.dumps([uri, step, committable.to_fields()]) + "\n")
            committing.stdin.flush()
            status = int(committing.stdout.readline())

            assert opened(uri).commit(committable) is Outcome.COMMITTED
            assert bucket.visible(str(step)) == list(range(9)), f"killed before request {step}"
            assert list(sink.lingering(OWNER)) == []
            assert not [path for path in bucket.paths(str(step)) if path.endswith(".draft")]
            step += 1
    assert status == 0
    assert step > 8, "there was nothing to kill"
