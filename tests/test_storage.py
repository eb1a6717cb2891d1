"""A file is whole or not there; what fails says so and leaves nothing behind."""

import errno
import os

import pytest

from tallystick.errors import OptionError, StorageError
from tallystick.storage import FileStorage


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}"])
def test_a_location_is_a_path_or_one_of_sparks_forms_of_it(tmp_path, form):
    storage = FileStorage(form.format(tmp_path))
    storage.put("tallystick/a.json", b"x")

    assert (tmp_path / "tallystick/a.json").read_bytes() == b"x"
    assert storage.get("tallystick/a.json") == b"x"


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


def test_an_unknown_scheme_is_refused_with_the_known_ones():
    with pytest.raises(OptionError, match="file, s3"):
        FileStorage("ftp://host/folder")


def test_credentials_are_not_shown():
    with pytest.raises(OptionError) as raised:
        FileStorage("ftp://key:hunter2@host/folder")
    assert "hunter2" not in str(raised.value)
