"""Copies of state lie where only their owner can look."""

import pytest

from tallystick.errors import OptionError
from tallystick.local_state import ROOT_VARIABLE, LocalState, state_root


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


def test_credentials_in_the_checkpoints_uri_are_not_shown():
    assert "secret" not in repr(LocalState("s3://key:secret@bucket/x", "lineage"))
