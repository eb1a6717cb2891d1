"""A file is whole or not there; what fails says so and leaves nothing behind."""

import errno
import os
from pathlib import Path

import pytest
from pyarrow import fs

from tallystick.api.file_sink import FileSink
from tallystick.checkpoint.savepoint_folder import whole_uri
from tallystick.epoch.two_phase import Owner, RunFacts
from tallystick.errors import ManifestError, OptionError, StorageError
from tallystick.files.folder import Folder
from tallystick.storage import file_storage as storage_module
from tallystick.storage import local_files
from tallystick.storage.file_storage import (
    FileStorage,
    reach,
    shown,
)
from tallystick.storage.places import local_path


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}"])
def test_a_location_is_a_path_or_one_of_sparks_forms_of_it(tmp_path, form):
    storage = FileStorage(form.format(tmp_path))
    storage.put("tallystick/a.json", b"x")

    assert (tmp_path / "tallystick/a.json").read_bytes() == b"x"
    assert storage.get("tallystick/a.json") == b"x"


ODD = ("a b", "a%20b", "a#1", "a#2", "a?b", "100%", "ä", "a%2Fb")


@pytest.mark.parametrize("name", ODD)
def test_a_folder_is_where_spark_has_it_whatever_its_name(tmp_path, name):
    """Spark names a checkpoint `file:` and the path, without escapes; we name it by a URI."""
    forms = (f"{tmp_path}/{name}", f"file:{tmp_path}/{name}", (tmp_path / name).as_uri())
    for number, form in enumerate(forms):
        FileStorage(form).put(f"tallystick/{number}", b"x")
        assert whole_uri(form) == (tmp_path / name).as_uri()
        assert local_path(form) == tmp_path / name

    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert len(list((tmp_path / name / "tallystick").iterdir())) == 3


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("{}/keep/monday#2", "%23 for #"),
        ("{}/keep/monday?2", "%3F for \\?"),
        ("{}/keep/monday?2#3", "%23 for #"),
        ("keep/monday", "file:///keep/monday"),
        ("monday", "file:///monday"),
        ("server{}/keep", "host"),
        ("", "host"),
    ],
)
def test_a_uri_that_means_another_folder_than_it_seems_to_is_refused(tmp_path, rest, message):
    """`savepoint delete` of monday#2 would remove monday; two checkpoints would be one."""
    uri = f"file://{rest.format(tmp_path)}"
    for take in (
        FileStorage,
        Folder,
        lambda uri: FileSink(uri).open(Owner("pipeline", "files-0", ""), RunFacts(tasks=1)),
    ):
        with pytest.raises(OptionError, match=message):
            take(uri)
    assert list(tmp_path.iterdir()) == []


def test_a_uri_may_name_this_host_and_has_no_other_special_characters(tmp_path):
    assert local_path(f"file://localhost{tmp_path}") == tmp_path
    assert local_path(f"file:{tmp_path}/s3://b") == tmp_path / "s3:/b"
    assert local_path(f"FILE://{tmp_path}/a%23b;c&d") == tmp_path / "a#b;c&d"
    assert local_path(f"file://{tmp_path}/a\nb") == tmp_path / "a\nb"


@pytest.mark.parametrize("name", [name for name in ODD if "?" not in name])
@pytest.mark.parametrize("scheme", ["s3a", "gs", "abfss"])
def test_an_object_stores_folder_has_the_name_that_hadoop_gives_it(scheme, name):
    """A cut or unescaped one could be that of another checkpoint."""
    host = "c@account.dfs.core.windows.net" if scheme == "abfss" else "bucket"
    uri = f"{scheme}://{host}/{name}/x" + ("?region=eu-central-1" if scheme == "s3a" else "")
    _, path = reach(uri, "checkpoint location")
    assert path.partition("/")[2] == f"{name}/x"
    assert shown(uri) == f"{scheme}://{host}/{name}/x"


def test_what_is_not_there_is_none_and_an_empty_list(tmp_path):
    storage = FileStorage(str(tmp_path))

    assert storage.get("tallystick/none.json") is None
    assert storage.names("tallystick") == []


def test_names_are_sorted_paths_without_drafts(tmp_path):
    storage = FileStorage(str(tmp_path))
    for name in ("b", "a", ".draft"):
        storage.put(f"tallystick/{name}", b"")

    assert storage.names("tallystick") == ["tallystick/a", "tallystick/b"]


def test_a_full_disk_is_an_error_that_leaves_no_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"tallystick/a\.json \(3 bytes\) failed.*No space"):
        FileStorage(str(tmp_path)).put("tallystick/a.json", b"abc")
    assert list((tmp_path / "tallystick").iterdir()) == []


@pytest.mark.parametrize("scheme", ["hdfs", "viewfs", "ftp"])
@pytest.mark.parametrize("take", [FileStorage, Folder])
def test_a_scheme_that_is_not_supported_is_refused_with_those_that_are(scheme, take):
    """Nothing was ever run on HDFS: what renames and durability mean there is not known here."""
    with pytest.raises(OptionError, match=rf"{scheme}://host:8020/a: .*'{scheme}'.*file, s3.*S3"):
        take(f"{scheme}://host:8020/a")


@pytest.mark.parametrize(
    "uri",
    [
        "ftp://AKIAKEY:hunter2@host/folder",
        "s3://AKIAKEY:hunter2/hunter2@bucket/folder",
        "s3://AKIAKEY:7/hunter2/hunter2@bucket/folder?region=eu",
        "s3://AKIAKEY:hunter2@bucket/folder?secret_key=hunter2&strange=hunter2",
    ],
)
def test_credentials_are_not_shown(uri):
    with pytest.raises(OptionError) as raised:
        FileStorage(uri)
    for text in (str(raised.value), shown(uri)):
        assert "hunter2" not in text
        assert "AKIAKEY" not in text
        assert "folder" in text


@pytest.mark.parametrize(
    "uri",
    [
        *("s3://bucket/a@b", "hdfs://host:8020/a@b", "/a:b/c@d"),
        *("s3://b/x:y/z@w", "abfss://container@account.dfs.core.windows.net/a@b"),
    ],
)
def test_a_location_without_credentials_is_shown_as_it_is(uri):
    assert shown(uri) == uri


@pytest.mark.parametrize("at", ["{}", "file://{}"])
def test_a_part_of_a_file_from_either_end(tmp_path, at):
    storage = FileStorage(at.format(tmp_path))
    storage.put("keyed-state/a", b"0123456789")

    assert storage.get_range("keyed-state/a", 2, 3) == b"234"
    assert storage.get_range("keyed-state/a", 8, 100) == b"89"
    assert storage.get_range("keyed-state/a", -3, 2) == b"78"
    assert storage.get_range("keyed-state/a", -100, 2) == b"01"
    assert storage.get_range("keyed-state/a", 100, 2) == b""
    assert storage.get_range("keyed-state/none", 0, 2) is None


def test_what_is_deleted_is_gone_and_may_be_deleted_again(tmp_path):
    storage = FileStorage(str(tmp_path))
    storage.put("keyed-state/a", b"x")
    storage.delete("keyed-state/a")
    storage.delete("keyed-state/a")

    assert storage.get("keyed-state/a") is None


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize(
    "path",
    [
        *("../there/a", "keyed-state/../../there/a", "..", "keyed-state/..", "a\\..\\..\\there"),
        *("{there}/a", "file:{there}/a", "file://{there}/a", "s3://bucket/a", "a\0b"),
    ],
)
def test_no_path_leads_out_of_the_folder(tmp_path, monkeypatch, path, is_local):
    """On an object store neither: any bucket is a local folder here."""
    there = tmp_path / "there"
    there.mkdir()
    (there / "a").write_bytes(b"theirs")
    if is_local:
        storage = FileStorage(str(tmp_path / "here"))
    else:
        root = (fs.LocalFileSystem(), str(tmp_path / "here"))
        monkeypatch.setattr(storage_module, "_root", lambda _: root)
        storage = FileStorage("s3://bucket/here")
    path = path.format(there=there)

    for act in (
        storage.get,
        storage.names,
        storage.delete,
        lambda path: storage.get_range(path, 0, 1),
        lambda path: storage.put(path, b"ours"),
        lambda path: storage.put_new(path, b"ours"),
    ):
        with pytest.raises(ManifestError, match="leads out of the folder"):
            act(path)
    assert (there / "a").read_bytes() == b"theirs"
    assert sorted(tmp_path.rglob("*")) == [there, there / "a"]


@pytest.mark.parametrize("link", ["keyed-state", "keyed-state/counts"])
def test_nothing_is_written_or_removed_through_a_symbolic_link(tmp_path, link):
    """A savepoint that was unpacked may have any."""
    here, there = tmp_path / "here", tmp_path / "there"
    (there / "counts").mkdir(parents=True)
    for folder in (there, there / "counts"):
        (folder / "a").write_bytes(b"theirs")
    (here / link).parent.mkdir(parents=True)
    (here / link).symlink_to(there)
    storage, before = FileStorage(str(here)), sorted(there.rglob("*"))

    for act in (
        storage.delete,
        lambda path: storage.put(path, b"ours"),
        lambda path: storage.put_new(path, b"ours"),
    ):
        for name in ("a", "b"):
            with pytest.raises(OptionError, match=f"{link} is a symbolic link"):
                act(f"keyed-state/counts/{name}")
    assert sorted(there.rglob("*")) == before
    assert {path.read_bytes() for path in before if path.is_file()} == {b"theirs"}
    linked = tmp_path / "linked"  # the folder itself may be one: that is what the user named
    linked.symlink_to(there)
    FileStorage(str(linked)).put("counts/a", b"ours")
    assert (there / "counts" / "a").read_bytes() == b"ours"


def test_the_files_of_the_folder_itself_are_listed_under_their_names(tmp_path):
    storage = FileStorage(str(tmp_path))
    storage.put("b/c", b"")
    storage.put("a", b"")

    assert storage.names("") == ["a", "b"]


def test_what_is_in_the_way_is_an_error_that_names_it(tmp_path):
    storage = FileStorage(str(tmp_path))
    (tmp_path / "keyed-state").mkdir()

    for act in (storage.get, storage.delete, lambda path: storage.get_range(path, 0, 1)):
        with pytest.raises(StorageError, match="keyed-state failed"):
            act("keyed-state")


@pytest.mark.parametrize("do", [FileStorage.put, FileStorage.put_new])
def test_folders_that_a_file_needs_are_durable_too(tmp_path, monkeypatch, do):
    """Else a power cut takes the first decision with the folder that it is in."""
    synced = []
    fsync_folder = local_files.fsync_folder

    def fsync(path):
        synced.append(path)
        fsync_folder(path)

    for module in (local_files, storage_module):
        monkeypatch.setattr(module, "fsync_folder", fsync)
    storage = FileStorage(str(tmp_path / "a"))
    do(storage, "b/c/file", b"x")
    assert set(synced) == {tmp_path / folder for folder in ("", "a", "a/b", "a/b/c")}

    synced.clear()
    do(storage, "b/c/other", b"x")
    assert synced == [tmp_path / "a/b/c"]


def test_drafts_of_killed_writers_are_removed_a_day_later(tmp_path):
    """Nothing else would: they are under no name that anybody knows."""
    folder = tmp_path / "keyed-state"
    folder.mkdir()
    marks = (".a.tallystick-0123abcd", ".b.tallystick-0123abcd", ".hidden", ".vimrc.0123abcd")
    old, young, *others = (folder / name for name in marks)
    for path in (old, young, *others):
        path.write_bytes(b"")
    no_file = folder / ".c.tallystick-0123abcd"
    no_file.mkdir()
    for path in (old, *others, no_file):
        os.utime(path, (0, 0))
    FileStorage(str(tmp_path)).put("keyed-state/c", b"")

    assert not old.exists()
    assert young.exists()
    assert all(path.exists() for path in others), "files of somebody else"
    assert no_file.exists()
    assert (folder / "c").exists(), "what cannot be removed keeps nobody from writing"


def test_a_draft_has_the_name_by_which_it_is_found(tmp_path, monkeypatch):
    """Else none would ever be removed."""

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        FileStorage(str(tmp_path)).put("a", b"")
    (draft,) = tmp_path.iterdir()
    os.utime(draft, (0, 0))
    monkeypatch.undo()
    local_files._looked_through.discard(tmp_path)
    FileStorage(str(tmp_path)).put("b", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
