"""Of several writers of one name the first one wins: on a disk, and on S3."""

import builtins
import errno
import os
import pickle
import subprocess
import sys
import textwrap

import pytest

from tallystick.errors import OptionError, StorageError
from tallystick.storage.file_storage import FileStorage
from tests.storage.test_storage_s3 import Server

NAMES = 200

RACER = textwrap.dedent(
    """
    import sys
    from tallystick.storage.file_storage import FileStorage

    storage = FileStorage(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        print(storage.put_new(line.strip(), sys.argv[2].encode() * 1000), flush=True)
    """
)


def race(uri):
    """The names that each of two processes won."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    racers = {me: subprocess.Popen([sys.executable, "-c", RACER, uri, me], **pipes) for me in "ab"}
    won = {me: [] for me in racers}
    try:
        assert [racer.stdout.readline() for racer in racers.values()] == ["ready\n"] * 2
        for number in range(NAMES):
            for me in "ab" if number % 2 else "ba":
                racers[me].stdin.write(f"race/{number:04d}\n")
            for me, racer in racers.items():
                if {"True\n": True, "False\n": False}[racer.stdout.readline()]:
                    won[me].append(number)
    finally:
        for racer in racers.values():
            racer.kill()
            racer.communicate()
    return won["a"], won["b"]


def check_race(uri):
    won_a, won_b = race(uri)

    assert sorted(won_a + won_b) == list(range(NAMES))
    assert won_a, "the race was none"
    assert won_b, "the race was none"
    storage = FileStorage(uri)
    assert len(storage.names("race")) == NAMES, "drafts or probes are left"
    for winner, numbers in (("a", won_a), ("b", won_b)):
        for number in numbers:
            assert storage.get(f"race/{number:04d}") == winner.encode() * 1000


def test_two_processes_race_and_each_name_is_won_once(tmp_path):
    check_race(str(tmp_path))
    assert len(list((tmp_path / "race").iterdir())) == NAMES


def test_a_name_that_is_taken_is_left_as_it_is(tmp_path):
    storage = FileStorage(f"file://{tmp_path}")
    storage.put("folder/a", b"one")

    assert not storage.put_new("folder/a", b"two")
    assert storage.put_new("folder/b", b"two")
    assert FileStorage(f"file://{tmp_path}/other").put_new("b", b"three")
    assert [storage.get(f"folder/{name}") for name in "ab"] == [b"one", b"two"]
    assert sorted(os.listdir(tmp_path / "folder")) == ["a", "b"]


def test_an_answer_that_was_lost_on_the_way_is_no_defeat(tmp_path, monkeypatch):
    """NFS sends a request again when the answer does not come: the second one says EEXIST."""
    link = os.link

    def link_twice(source, target):
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    storage = FileStorage(str(tmp_path))

    assert storage.put_new("a", b"one")
    assert not storage.put_new("a", b"two")
    assert storage.get("a") == b"one"


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"creating a \(3 bytes\) failed: .*No space"):
        FileStorage(str(tmp_path)).put_new("a", b"abc")
    assert os.listdir(tmp_path) == []


def test_a_disk_without_links_is_refused_with_the_ways_on(tmp_path, monkeypatch):
    def no_links(_source, _target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(OptionError, match=r"no hard links.*transactions='epoch'"):
        FileStorage(str(tmp_path)).put_new("a", b"abc")
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("s3"), one_at_a_time=True)
    server.create_bucket("exclusive", access_key="key", secret_key="hunter2")
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_two_processes_race_on_s3(server):
    check_race(f"s3a://exclusive/race?{server.query}")


def test_on_s3_by_the_environment_and_by_the_uri_alone(server, monkeypatch):
    by_uri = FileStorage(f"s3a://key:hunter%2F2@exclusive/one?{server.query}")
    assert pickle.loads(pickle.dumps(by_uri)).put_new("a/b c", b"one")  # noqa: S301  as Spark does

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{server.host}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    by_environment = FileStorage("s3://exclusive/one")
    assert not by_environment.put_new("a/b c", b"two")
    assert by_environment.get("a/b c") == b"one"
    assert by_environment.names("a") == ["a/b c"]
    assert FileStorage("s3a://exclusive/two").put_new("x", b"two")
    assert FileStorage(f"s3://exclusive/two?{server.query}").get("x") == b"two"


def test_names_that_a_uri_writes_otherwise_are_the_same_files(server):
    storage = FileStorage(f"s3://exclusive/a%20b%2Bc%41?{server.query}")
    for name in ("x%41=ü", "a+b", "a[1]*~#", "a:b"):
        storage.put(name, b"one")

        assert not storage.put_new(name, b"two")
        assert storage.put_new(f"{name}-new", b"two")
        assert storage.get(f"{name}-new") == b"two"


def test_a_request_that_fails_is_an_unknown_outcome_and_shows_no_secret(server):
    storage = FileStorage(f"s3://key:hunter2@nobodys-bucket/jobs?{server.query}")

    with pytest.raises(StorageError, match=r"nobodys-bucket/jobs: creating a .*unknown") as raised:
        storage.put_new("a", b"x")
    assert "hunter2" not in str(raised.value)


def test_a_store_that_ignores_the_condition_is_refused(server, monkeypatch):
    """As older S3-compatible ones do: two writers would both win there."""
    import obstore

    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda *args, mode, **rest: put(*args, **rest))
    storage = FileStorage(f"s3://exclusive/ignoring?{server.query}")

    with pytest.raises(OptionError, match=r"succeeded twice.*transactions='epoch'"):
        storage.put_new("a", b"x")
    assert storage.names("") == []


def test_a_no_without_a_file_is_no_defeat(server, monkeypatch):
    """S3 answers 409 where a deletion was in the way, which obstore takes for "exists"."""
    import obstore

    storage = FileStorage(f"s3://exclusive/conflict?{server.query}")
    assert storage.put_new("a", b"x")

    def conflict(*_args, **_rest):
        raise obstore.exceptions.AlreadyExistsError("409 ConditionalRequestConflict")

    monkeypatch.setattr(obstore, "put", conflict)
    assert not storage.put_new("a", b"y")
    with pytest.raises(StorageError, match="in the way"):
        storage.put_new("b", b"y")


def test_without_obstore_the_error_says_what_to_install(server, monkeypatch):
    load = builtins.__import__

    def without_obstore(name, *args):
        if name.startswith("obstore"):
            raise ImportError(name)
        return load(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_obstore)
    with pytest.raises(OptionError, match=r"\[object-store\].*transactions='epoch'"):
        FileStorage(f"s3://exclusive/x?{server.query}").put_new("a", b"x")
