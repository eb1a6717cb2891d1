"""The first program of the README and its test, where there is no Java, no broker and no Spark."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = "README.md"
FIVE_MINUTES = "docs/first-five-minutes.md"


def block(page: str, mark: str) -> str:
    """The block of code below a mark of a page."""
    text = (ROOT / page).read_text()
    (text,) = re.findall(rf"<!-- {mark} -->\n```\w*\n(.*?)```", text, re.DOTALL)
    return str(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the program, as a reader would write it."""
    (tmp_path / "first.py").write_text(block(README, "first program"))
    return tmp_path


def bare(folder: Path) -> dict[str, str]:
    """An environment without Java, and with a cache that nothing was ever compiled into."""
    path = os.pathsep.join([str(folder), *sys.path])
    return {"PATH": "", "PYTHONPATH": path, "HOME": str(folder), "COLUMNS": "80"}


def test_the_first_program_shows_what_is_printed(folder: Path) -> None:
    """On a terminal; and no kernel is compiled, which would take seconds on a new machine."""
    ours, theirs = os.openpty()
    done = subprocess.run(
        [sys.executable, "first.py"],
        cwd=folder,
        env=bare(folder),
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)

    assert done.returncode == 0, done.stderr
    assert shown.splitlines() == block(README, "shown").splitlines()
    assert not list(folder.rglob("*.nbi"))


def test_the_first_test_passes(folder: Path) -> None:
    (folder / "test_first.py").write_text(block(FIVE_MINUTES, "first test"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_first.py"],
        cwd=folder,
        env=bare(folder),
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert not list(folder.rglob("*.nbi"))
