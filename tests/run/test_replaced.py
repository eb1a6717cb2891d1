"""A run that can decide nothing more aborts its own work, and nothing that a decision names."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch.facts import Identity
from tallystick.epoch.tokens import Token
from tallystick.epoch.two_phase import Committable
from tallystick.errors import FencedError
from tallystick.run.driver import Driver, abort_undecided
from tallystick.storage.file_storage import FileStorage
from tests.run.one_sink import Sink, run, started

IDENTITY = Identity("job", "L", "/c")
OURS, THEIRS = (Committable("sink", 0, 0, name, 1, 1) for name in ("ours", "theirs"))


@pytest.fixture
def sink() -> Sink:
    return Sink(OURS)


@pytest.fixture(params=[0, 1], ids=["same epoch", "epochs later"])
def replaced(tmp_path: Path, sink: Sink, request: pytest.FixtureRequest) -> Driver:
    """A run that is replaced while its tasks write: its successor goes on to this epoch."""

    def meanwhile() -> None:
        other = Sink(THEIRS)
        successor = started(tmp_path, other)
        for epoch in range(request.param + 1):
            run(successor, other, epoch)

    sink.meanwhile = meanwhile
    return started(tmp_path, sink)


def test_a_replaced_run_aborts_what_its_tasks_prepared(replaced: Driver, sink: Sink) -> None:
    with pytest.raises(FencedError):
        run(replaced, sink)

    assert sink.aborted == [OURS]


def test_where_it_cannot_be_aborted_the_run_says_that_it_is_replaced(
    replaced: Driver, sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    sink.refuses = True

    with pytest.raises(FencedError):
        run(replaced, sink)

    assert "not now" in caplog.text


def test_a_run_that_is_replaced_after_its_decision_aborts_nothing(
    tmp_path: Path, sink: Sink
) -> None:
    driver = started(tmp_path, sink)
    run(driver, sink)
    started(tmp_path, Sink(THEIRS))._decider.fence(None)

    with pytest.raises(FencedError):
        driver.check_owner()
    abort_undecided((OURS,), driver._decider, driver._folder, sink, IDENTITY)

    assert sink.aborted == []


@pytest.mark.parametrize(
    "token",
    [
        None,
        Token(7, "L", "/c", "tallystick/000000000007-gone.json"),
        Token(6, "another lineage", "/c", ""),
        Token(5, "L", "/c", ""),
    ],
    ids=["forgotten", "without its manifest", "of another lineage", "an older one"],
)
def test_where_the_newest_decision_is_not_known_nothing_is_aborted(
    tmp_path: Path, sink: Sink, token: Token | None
) -> None:
    decider: Any = SimpleNamespace(last_decision=lambda: token)
    folder = CheckpointFolder(FileStorage(str(tmp_path)))

    abort_undecided((replace(OURS, checkpoint_id=7),), decider, folder, sink, IDENTITY)

    assert sink.aborted == []


def test_before_the_first_decision_all_of_it_is_aborted(tmp_path: Path, sink: Sink) -> None:
    decider: Any = SimpleNamespace(last_decision=lambda: Token(-1, "L", "/c", ""))

    abort_undecided((OURS,), decider, CheckpointFolder(FileStorage(str(tmp_path))), sink, IDENTITY)

    assert sink.aborted == [OURS]
