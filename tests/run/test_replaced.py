"""A run that can decide nothing more aborts its own work, and nothing that a decision names."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.newest_run import RUN, newer_run, note_run
from tallystick.epoch.manifest import Identity
from tallystick.epoch.tokens import Token
from tallystick.epoch.two_phase import Committable
from tallystick.errors import DataLossError, FencedError
from tallystick.run.driver import Driver, abort_undecided
from tallystick.storage.file_storage import FileStorage, SystemClock
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


@pytest.mark.parametrize("accepted", [False, True])
def test_a_checkpoint_that_the_name_does_not_go_on_from_is_refused_before_the_fence(
    tmp_path: Path, *, accepted: bool
) -> None:
    """A mistyped checkpoint would end the run that is at work, and be refused after that."""
    path = "tallystick/000000000007-theirs.json"
    theirs = Token(7, "another lineage", "/right", path, staged_at="2026-11-27T14:03:05+00:00")
    accept = frozenset({"new-lineage-after-another lineage"} if accepted else ())
    identity = Identity("job", "L", str(tmp_path), accept)
    decider: Any = SimpleNamespace(name=SimpleNamespace(decided_by="kafka"))  # no fence to call
    storage = FileStorage(str(tmp_path))
    driver = Driver(identity, decider, storage, SystemClock())

    driver.check_name(None)
    driver.check_name(replace(theirs, lineage="L"))
    if accepted:
        driver.check_name(theirs)
    else:
        with pytest.raises(
            DataLossError,
            match=r"epochs up to 7 were committed, the last at 2026-11-27T14:03:05\+00:00, from "
            r"checkpoint /right",
        ):
            driver.check_name(theirs)
        with pytest.raises(DataLossError, match="epochs up to 7 were committed from checkpoint"):
            driver.check_name(replace(theirs, staged_at=""))  # an earlier release's


def test_the_error_of_a_replaced_run_names_the_newer_one(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))
    assert newer_run(storage) == "", "no run was noted"
    note_run(storage)
    assert newer_run(storage) == "", "this run itself: the newer one used another checkpoint"

    (tmp_path / RUN).write_text('{"host": "b", "pid": 7, "started": "2026-11-27T14:03:00+00:00"}')
    assert newer_run(storage).startswith(
        "The newer run: process 7 on host b, started at 2026-11-27T14:03:00+00:00."
    )
    (tmp_path / RUN).write_text("damaged")
    assert newer_run(storage) == ""
    note_run(storage)
    assert str(os.getpid()) in (tmp_path / RUN).read_text(), "each start writes it again"
