"""What a run aborts that can decide nothing more: its own, and nothing that a decision names."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.checkpoint.decision_log import DecisionLog
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch.facts import Identity, Request
from tallystick.epoch.tokens import Token
from tallystick.epoch.two_phase import Committable, Lost
from tallystick.errors import FencedError, StorageError
from tallystick.ports import EpochResult
from tallystick.run.driver import Driver
from tallystick.run.replaced import abort_undecided
from tallystick.storage.file_storage import FileStorage, SystemClock

IDENTITY = Identity("job", "L", "/c")
OURS, THEIRS = (Committable("sink", 0, 0, name, 1, 1) for name in ("ours", "theirs"))


class Sinks:
    """Engine and participants: each run prepares one committable and knows what was aborted."""

    def __init__(self, prepared: Committable) -> None:
        self.prepared = prepared
        self.aborted: list[Committable] = []
        self.meanwhile = lambda: None
        self.refuses = False

    def run_epoch(self, *_: Any) -> EpochResult:
        self.meanwhile()
        return EpochResult((), committables=(self.prepared,))

    def commit(self, committables: tuple[Committable, ...]) -> tuple[Lost, ...]:
        return ()

    def lingering(self) -> tuple[Committable, ...]:
        return ()

    def abort(self, committables: tuple[Committable, ...]) -> None:
        if self.refuses:
            raise StorageError("not now")
        self.aborted += committables

    def check_prepared(self, committables: tuple[Committable, ...]) -> None: ...

    check_newest = check_prepared


@pytest.fixture
def sinks() -> Sinks:
    return Sinks(OURS)


def started(folder: Path, sinks: Sinks) -> Driver:
    storage, clock = FileStorage(str(folder)), SystemClock()
    log = DecisionLog(storage, clock, "tallystick-job")
    return Driver(Identity("job", "L", storage.location), log, storage, clock, participants=sinks)


def run(driver: Driver, sinks: Sinks, epoch: int = 0) -> None:
    driver.run_epoch(Request(epoch, (f'{{"to": {epoch}}}',), may_skip=False), sinks)


@pytest.fixture(params=[0, 1], ids=["same epoch", "epochs later"])
def replaced(tmp_path: Path, sinks: Sinks, request: pytest.FixtureRequest) -> Driver:
    """A run that is replaced while its tasks write: its successor goes on to this epoch."""

    def meanwhile() -> None:
        other = Sinks(THEIRS)
        successor = started(tmp_path, other)
        for epoch in range(request.param + 1):
            run(successor, other, epoch)

    sinks.meanwhile = meanwhile
    return started(tmp_path, sinks)


def test_a_replaced_run_aborts_what_its_tasks_prepared(replaced: Driver, sinks: Sinks) -> None:
    with pytest.raises(FencedError):
        run(replaced, sinks)

    assert sinks.aborted == [OURS]


def test_where_it_cannot_be_aborted_the_run_says_that_it_is_replaced(
    replaced: Driver, sinks: Sinks, caplog: pytest.LogCaptureFixture
) -> None:
    sinks.refuses = True

    with pytest.raises(FencedError):
        run(replaced, sinks)

    assert "not now" in caplog.text


def test_a_run_that_is_replaced_after_its_decision_aborts_nothing(
    tmp_path: Path, sinks: Sinks
) -> None:
    driver = started(tmp_path, sinks)
    run(driver, sinks)
    started(tmp_path, Sinks(THEIRS)).recover(Request(1, ('{"to": 1}',), may_skip=False))

    with pytest.raises(FencedError):
        driver.check_owner()
    abort_undecided((OURS,), driver._decider, driver._folder, sinks, IDENTITY)

    assert sinks.aborted == []


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
    tmp_path: Path, sinks: Sinks, token: Token | None
) -> None:
    decider: Any = SimpleNamespace(last_decision=lambda: token)
    folder = CheckpointFolder(FileStorage(str(tmp_path)))

    abort_undecided((replace(OURS, checkpoint_id=7),), decider, folder, sinks, IDENTITY)

    assert sinks.aborted == []


def test_before_the_first_decision_all_of_it_is_aborted(tmp_path: Path, sinks: Sinks) -> None:
    decider: Any = SimpleNamespace(last_decision=lambda: Token(-1, "L", "/c", ""))

    abort_undecided((OURS,), decider, CheckpointFolder(FileStorage(str(tmp_path))), sinks, IDENTITY)

    assert sinks.aborted == [OURS]
