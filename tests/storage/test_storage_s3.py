"""The same promises on S3, against a real server process."""

import pickle
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request

import pytest
from pyarrow import fs

from tallystick.checkpoint.state_files import delete_all
from tallystick.errors import ManifestError, OptionError, StorageError
from tallystick.storage.exclusive import ExclusiveStore
from tallystick.storage.file_storage import FileStorage
from tallystick.testing.process import ProcessGroup, free_ports

READY_S = 60


ONE_AT_A_TIME = """
import sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
app = DomainDispatcherApplication(create_backend_app)
run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=False)
"""


class Server:
    """moto's S3, in a process of its own.

    `one_at_a_time`: it looks whether a name is free and then takes it, in two steps; where two ask
    at once, real S3 lets one win, and its threads may let both.
    """

    def __init__(self, folder, *, one_at_a_time=False):
        (port,) = free_ports(1, "127.0.0.1")
        self.host = f"127.0.0.1:{port}"
        self.log = folder / "requests.log"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        if one_at_a_time:
            command = [sys.executable, "-c", ONE_AT_A_TIME, str(port)]
        self.group = ProcessGroup()
        self.process = self.group.spawn(command, self.log)
        deadline = time.monotonic() + READY_S
        while not self.answers():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def answers(self):
        try:
            urllib.request.urlopen(f"http://{self.host}/moto-api/", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    @property
    def query(self):
        return f"endpoint_override={self.host}&scheme=http&region=us-east-1"

    def create_bucket(self, name, **keys):
        """Create a bucket; return an independent view of the server.

        Without keys, those of the environment count.
        """
        files = fs.S3FileSystem(
            endpoint_override=self.host,
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
            **keys,
        )
        files.create_dir(name)
        return files

    def requests(self, since=0):
        lines = self.log.read_text().splitlines()[since:]
        return [line.partition('"')[2].partition('"')[0] for line in lines if "HTTP/1.1" in line]

    def stop(self):
        self.group.close()
        self.process.wait()


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
    name = f"bucket-{abs(hash(request.node.name)) % 10**9}"
    server.create_bucket(name)
    return name


def test_files_come_back_whole_in_part_or_not_at_all(server, bucket):
    storage = FileStorage(f"s3a://{bucket}/jobs/one?{server.query}")
    storage.put("keyed-state/counts/b", b"0123456789")
    storage.put("keyed-state/counts/a", b"")

    assert storage.get("keyed-state/counts/b") == b"0123456789"
    assert storage.get_range("keyed-state/counts/b", 2, 3) == b"234"
    assert storage.get_range("keyed-state/counts/b", -3, 100) == b"789"
    assert storage.get_range("keyed-state/counts/b", 100, 1) == b""
    assert storage.get("none") is storage.get_range("none", 0, 1) is None
    assert storage.names("keyed-state/counts") == ["keyed-state/counts/a", "keyed-state/counts/b"]
    assert storage.names("keyed-state") == ["keyed-state/counts"]
    assert storage.names("none") == []
    storage.delete("keyed-state/counts/b")
    storage.delete("keyed-state/counts/b")
    assert storage.names("keyed-state/counts") == ["keyed-state/counts/a"]


def test_no_path_leads_out_of_the_folder(server, bucket):
    old = FileStorage(f"s3a://{bucket}/old?{server.query}")
    new = FileStorage(f"s3://{bucket}/new?{server.query}")
    old.put("a", b"old")

    for path in ("../old/a", f"{old.location}/a", "/old/a"):
        with pytest.raises(ManifestError, match="leads out of the folder"):
            new.delete(path)
    assert old.get("a") == b"old"


def test_the_environment_is_enough(server, bucket, monkeypatch):
    """How Spark's own part of the checkpoint and ours get the same settings."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{server.host}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    storage = FileStorage(f"s3a://{bucket}/jobs/one")
    storage.put("a", b"x")

    assert FileStorage(f"s3://{bucket}/jobs/one?{server.query}").get("a") == b"x"


def test_small_files_take_one_request_and_nothing_is_listed(server, bucket):
    storage = FileStorage(f"s3://{bucket}/jobs/one?{server.query}")
    before = len(server.log.read_text().splitlines())
    storage.put("keyed-state/a", b"x" * 1000)
    assert [line.split()[0] for line in server.requests(before)] == ["PUT"]

    storage.get("keyed-state/a")
    storage.get_range("keyed-state/a", 0, 10)
    assert not [line for line in server.requests(before) if "list-type" in line]


def test_many_files_are_removed_with_one_request(server, bucket):
    storage = FileStorage(f"s3://{bucket}/jobs/many?{server.query}")
    paths = [f"keyed-state/n/{number}" for number in range(30)]
    for path in paths[1:]:
        storage.put(path, b"x")
    before = len(server.log.read_text().splitlines())

    assert storage.delete_many(paths), "one that is not there is no error"

    assert [line.split()[0] for line in server.requests(before)] == ["POST"]
    assert storage.names("keyed-state/n") == []


def test_also_below_a_name_that_looks_like_escapes(server, bucket):
    storage = FileStorage(f"s3://{bucket}/jobs/a%20b%2Bc%41é?{server.query}")
    storage.put("keyed-state/n/1", b"x")

    assert storage.delete_many(["keyed-state/n/1"])
    assert storage.names("keyed-state/n") == []


def test_files_are_removed_where_obstore_has_not_the_credentials_that_pyarrow_has(
    server, bucket, monkeypatch
):
    """As those of a profile in ~/.aws: else the checkpoint would grow for ever."""

    def refused(*_):
        raise OSError("GenericError: no credentials")

    monkeypatch.setattr(ExclusiveStore, "delete_many", refused)
    storage = FileStorage(f"s3://{bucket}/jobs/profile?{server.query}")
    storage.put("keyed-state/n/1", b"x")

    delete_all(storage, ["keyed-state/n/1", "keyed-state/n/2"], 2)

    assert storage.names("keyed-state/n") == []


def test_a_bucket_that_is_not_there_is_an_error_that_says_so(server):
    storage = FileStorage(f"s3://nobodys-bucket/jobs?{server.query}")

    with pytest.raises(StorageError, match="s3://nobodys-bucket/jobs: writing a "):
        storage.put("a", b"x")


def test_secrets_and_options_are_not_shown(server):
    with pytest.raises(OptionError) as raised:
        FileStorage("s3://key:hunter2@bucket/jobs?nonsense=hunter2")
    assert "hunter2" not in str(raised.value)

    storage = FileStorage(f"s3://key:hunter2@bucket/jobs/?{server.query}")
    assert storage.location == "s3://bucket/jobs"
    assert "hunter2" not in repr(storage)


def test_a_task_gets_the_same_storage(server, bucket):
    storage = FileStorage(f"s3://{bucket}/jobs/one?{server.query}")
    storage.put("a", b"x")

    assert pickle.loads(pickle.dumps(storage)).get("a") == b"x"  # noqa: S301  as Spark does


WRITER = textwrap.dedent(
    """
    import sys
    from tallystick.storage.file_storage import FileStorage

    storage = FileStorage(sys.argv[1])
    print("ready", flush=True)
    for number in range(10**6):
        storage.put(f"{sys.argv[2]}-{number:06d}", bytes(12 << 20))
    """
)


def test_an_upload_that_is_killed_is_not_visible(server, bucket):
    """12 MiB go in several parts: the file is there when they were put together, not before."""
    uri = f"s3://{bucket}/jobs/one?{server.query}"
    for attempt in range(3):
        command = [sys.executable, "-c", WRITER, uri, f"files/{attempt}"]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(0.1 + attempt * 0.15)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()

    storage = FileStorage(uri)
    for name in storage.names("files"):
        assert len(storage.get(name)) == 12 << 20
    assert any("uploads" in line or "uploadId" in line for line in server.requests())
