"""The committing process is killed before every single step; whoever goes on finds one copy."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from tallystick.epoch.two_phase import Outcome
from tallystick.files.drafts import name_of
from tests.files.file_sinks import (
    OWNER,
    files_below,
    final,
    opened,
    place,
    prepared,
    rows,
    visible,
)

STEPS = ("link", "rename", "replace", "mkdir", "rmdir", "unlink", "fsync")
"""What changes a disk, apart from writing into a file that has no name yet that counts."""


class Stepper:
    """Kills this process before a step."""

    def __init__(self, step):
        self.remaining = step

    def watch(self):
        for name in STEPS:
            setattr(os, name, self.watched(getattr(os, name)))

    def watched(self, step):
        def do(*args, **rest):
            if self.remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.remaining -= 1
            return step(*args, **rest)

        return do


def killed_at(step, work):
    """Whether a process that does the work was killed before this step; False: it has fewer."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            Stepper(step).watch()
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.mark.parametrize("settings", [{}, {"partition_by": ["dest"]}], ids=["one", "three files"])
@pytest.mark.parametrize("taken", [False, True], ids=["", "and a reader takes what it finds"])
def test_a_commit_that_is_killed_is_finished_by_the_next(tmp_path, settings, taken):
    """Exactly one copy, of which a reader may have taken any part away in between."""
    step = 0
    while True:
        path = tmp_path / str(step)
        sink = opened(path, **settings)
        (committable,) = prepared(sink, place(), rows(0, 9))
        killed = killed_at(step, lambda sink=sink, it=committable: sink.commit(it))
        seen = []
        if taken:
            seen = visible(path)
            for file in path.rglob("part-*.parquet"):
                file.unlink()

        assert opened(path).commit(committable) is Outcome.COMMITTED
        assert sorted(seen + visible(path)) == list(range(9)), f"killed before step {step}"
        assert list(sink.lingering(OWNER)) == []
        assert not list(path.rglob("*.draft"))
        if not killed:
            break
        step += 1
    assert step > 8, "there was nothing to kill"


@pytest.fixture
def another_device(tmp_path):
    """A folder to which nothing can be renamed from a test's own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        if folder.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("there is one device only")
        yield folder


def test_a_partition_on_another_device_gets_whole_files(tmp_path, another_device):
    """Linked or mounted there; whatever the commit is killed before, the next one finishes it."""
    step = 0
    while True:
        path, elsewhere = tmp_path / str(step), another_device / str(step)
        elsewhere.mkdir()
        path.mkdir()
        (path / "dest=ORD").symlink_to(elsewhere)
        sink = opened(path, partition_by=["dest"])
        (committable,) = prepared(sink, place(), rows(0, 9))
        killed = killed_at(step, lambda sink=sink, it=committable: sink.commit(it))
        assert len(visible(path)) in (0, 3, 6, 9), "files are visible whole"

        assert opened(path).commit(committable) is Outcome.COMMITTED
        assert visible(path) == list(range(9)), f"killed before step {step}"
        assert len(list(elsewhere.glob("part-*.parquet"))) == 1
        assert list(sink.lingering(OWNER)) == []
        assert not list(path.rglob("*.draft"))
        if not killed:
            break
        step += 1
    assert step > 8, "there was nothing to kill"
    assert sorted(path.name for path in elsewhere.iterdir()) == [final(place())]


def test_an_abort_that_is_killed_is_finished_by_the_next(tmp_path):
    step = 0
    while True:
        sink = opened(tmp_path / str(step), partition_by=["dest"])
        (committable,) = prepared(sink, place(), rows(0, 9))
        killed = killed_at(step, lambda sink=sink, it=committable: sink.abort(it))

        assert visible(tmp_path / str(step)) == []
        for lingering in sink.lingering(OWNER):
            sink.abort(lingering)
        assert files_below(tmp_path / str(step)) == []
        assert list(sink.lingering(OWNER)) == []
        assert sink.commit(committable) is Outcome.LOST
        if not killed:
            break
        step += 1
    assert step > 5, "there was nothing to kill"


def test_a_killed_task_shows_nothing_and_its_next_attempt_stands_alone(tmp_path):
    step = 0
    while True:
        path = tmp_path / str(step)
        sink = opened(path, partition_by=["dest"])
        killed = killed_at(step, lambda sink=sink: prepared(sink, place(nonce="01"), rows(0, 9)))
        (committable,) = prepared(sink, place(attempt=1, nonce="02"), rows(0, 9))

        assert sink.commit(committable) is Outcome.COMMITTED
        for lingering in sink.lingering(OWNER):
            assert lingering.name == name_of(place(nonce="01"))
            sink.abort(lingering)
        assert visible(path) == list(range(9))
        assert not list(path.rglob("*.draft"))
        if not killed:
            break
        step += 1
    assert step > 5, "there was nothing to kill"


def test_an_epoch_written_at_least_once_is_at_most_repeated(tmp_path):
    step = 0
    while True:
        path = tmp_path / str(step)
        sink = opened(path, partition_by=["dest"], guarantee="at_least_once")
        killed = killed_at(step, lambda sink=sink: prepared(sink, place(nonce="01"), rows(0, 9)))
        assert len(visible(path)) in (0, 3, 6, 9), "files are visible whole"
        assert killed or visible(path) == list(range(9))
        prepared(sink, place(attempt=1, nonce="02"), rows(0, 9))

        assert set(visible(path)) == set(range(9))
        if not killed:
            break
        step += 1
    assert step > 5, "there was nothing to kill"
