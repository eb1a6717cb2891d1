"""Copies of state lie where only their owner can look."""

import pytest

from tallystick.checkpoint.local.store import ROOT_VARIABLE, LocalState, state_root
from tallystick.errors import OptionError


def test_the_folder_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))

    root = state_root()
    assert root.parent == tmp_path
    assert root.stat().st_mode & 0o777 == 0o700
    assert state_root() == root
    root.chmod(0o755)
    with pytest.raises(OptionError, match=r"only this user can use.*TALLYSTICK_STATE_DIR"):
        state_root()


def test_a_link_of_somebody_elses_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "a"))
    (tmp_path / "b").mkdir(mode=0o700)
    (tmp_path / "a").mkdir()
    monkeypatch.setattr("os.getuid", lambda: 1)
    (tmp_path / "a" / "tallystick-1").symlink_to(tmp_path / "b")

    with pytest.raises(OptionError, match="only this user can use"):
        state_root()


def test_a_folder_can_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "deep" / "down"))

    assert state_root() == tmp_path / "deep" / "down"
    assert state_root().is_dir()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_named_folder_that_others_could_change_is_refused(tmp_path, monkeypatch, mode):
    """Who can change the copy of the state can change the output."""
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    tmp_path.chmod(mode)
    with pytest.raises(OptionError, match=rf"only this user can change.* mode {mode:o}.*go-w"):
        state_root()

    tmp_path.chmod(0o755)
    assert state_root() == tmp_path


def test_a_named_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: 1 + tmp_path.stat().st_uid)
    with pytest.raises(OptionError, match="only this user can change"):
        state_root()


def test_a_named_link_to_a_folder_of_the_user_is_followed(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "link"))
    assert state_root() == tmp_path / "link"


def test_credentials_in_the_checkpoints_uri_are_not_shown():
    assert "secret" not in repr(LocalState("s3://key:secret@bucket/x", "lineage"))
