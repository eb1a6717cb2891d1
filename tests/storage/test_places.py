"""Places as users write them: each means one folder, or is refused by name."""

import pickle
from pathlib import Path

import pytest

from tallystick.api.file_sink import FileSink
from tallystick.errors import OptionError
from tallystick.files.folder import Folder
from tallystick.storage.file_storage import FileStorage, shown
from tallystick.storage.places import local_path, resolved


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize(
    ("place", "path"),
    [
        ("job", "job"),
        ("./job", "job"),
        ("a/b:c", "a/b:c"),
        ("./b:c", "b:c"),
        ("2024:01", "2024:01"),
        ("~", "home"),
        ("~/job", "home/job"),
        ("./~/job", "~/job"),
        ("job#1 at 100%25", "job#1 at 100%25"),
        (Path("job"), "job"),
        (Path("~/job"), "home/job"),
    ],
)
def test_a_local_place_is_its_whole_path(here, place, path):
    assert resolved(place) == str(here / path)
    assert resolved(resolved(place)) == resolved(place)
    assert local_path(place) == here / path


def test_file_uris_and_whole_paths(here):
    for place in (str(here), here, f"file:{here}", f"file://{here}", f"FILE:{here}", f"{here}/"):
        assert resolved(place) == str(here)
    assert resolved("/data/s3://b") == "/data/s3:/b"


@pytest.mark.parametrize(
    "place",
    [
        "s3://b/job?region=eu",
        "s3a://b/job",
        "gs://b/job",
        "abfss://c@account.dfs.core.windows.net/job",
    ],
)
def test_the_uri_of_an_object_store_stays(place):
    assert resolved(place) == place
    assert local_path(place) is None


REFUSED = [
    ("", "is empty.*variable of the environment"),
    (" ", "is empty"),
    (" s3://b/job", "white space"),
    ("/data/job\n", "white space"),
    ("/data/job /", "white space"),
    ("s3://b/job /", "white space"),
    ("job /.", "white space"),
    ("file:///data/job%20", "white space"),
    ("a\0b", "zero byte"),
    (None, "is a NoneType: expected a path or a URI"),
    (b"/data", "is a bytes"),
    ("dbfs:/checkpoints/job", "dbfs:/checkpoints/job.*'dbfs' is not supported.*/dbfs/…"),
    ("dbfs://job", "'dbfs' is not supported.*/dbfs/…"),
    ("s3:/bucket/job", "begins with s3://"),
    (Path("s3://bucket/job"), "pathlib.Path makes one: give it as text"),
    ("S3://bucket/job", "begins with s3://, in small letters"),
    ("s3:bucket/job", "begins with s3://"),
    ("s3://", "s3://: the name of a bucket or container is missing.*is that set"),
    ("s3:///job", "s3:///job: the name of a bucket"),
    ("gs://?scheme=http", "gs://: the name of a bucket"),
    ("abfss:///job", "abfss:///job: the name of a bucket or container"),
    ("hdfs:/job", "'hdfs' is not supported"),
    ("wasbs://c@a/job", "'wasbs' is not supported"),
    ("job:1", "'job' is not supported.*write ./job:1"),
    ("file:job", "the whole path: file:/job"),
    ("C:\\job", "a path of Windows"),
    ("C:/job", "a path of Windows"),
    ("~nobody-has-this-name/job", "none of this name"),
]


@pytest.mark.parametrize(("place", "problem"), REFUSED)
def test_what_is_no_place_is_refused_by_name(here, place, problem):
    with pytest.raises(OptionError, match=rf"(?s)setting .*{problem}|setting {problem}"):
        resolved(place, "setting")
    for take in (FileStorage, Folder, FileSink):
        with pytest.raises(OptionError):
            take(place)
    assert list(here.iterdir()) == [], "nothing was made"


def test_a_zero_byte_that_is_escaped_is_one_too():
    with pytest.raises(OptionError, match="%00 is a zero byte"):
        resolved("file:///data/a%00b")


def test_a_key_is_not_shown():
    place = "s3:/AKIAKEY:hunter2@bucket/job?x=hunter2"
    with pytest.raises(OptionError) as raised:
        resolved(place)
    for text in (shown(place), str(raised.value)):
        assert "hunter2" not in text
        assert "AKIAKEY" not in text
        assert "bucket/job" in text


def test_a_place_stays_where_the_driver_was(here, monkeypatch):
    storage, folder, sink = FileStorage("job"), Folder("out"), FileSink("out")
    monkeypatch.chdir("/")

    for place in (storage, pickle.loads(pickle.dumps(storage))):  # noqa: S301
        assert place.location == place.uri == str(here / "job")
    assert pickle.loads(pickle.dumps(folder)).location == str(here / "out")  # noqa: S301
    assert sink.path == str(here / "out")


def test_messages_name_the_whole_path(here):
    assert shown("job") == str(here / "job")
