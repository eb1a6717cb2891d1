"""A driver with one sink that is its engine too, over a checkpoint in a folder."""

from collections.abc import Callable
from pathlib import Path

from tallystick.checkpoint.decision_log import DecisionLog
from tallystick.epoch.facts import Request
from tallystick.epoch.manifest import Identity
from tallystick.epoch.protocol import EpochRan
from tallystick.epoch.two_phase import Committable, Lost
from tallystick.errors import StorageError
from tallystick.run.driver import Driver
from tallystick.state.catalog import StepState
from tallystick.storage.file_storage import FileStorage, SystemClock
from tallystick.values import Producer


class Sink:
    """Engine and participant: what is open there, what is visible, and what was aborted.

    Args:
        prepares: in each epoch.
        meanwhile: called while the tasks of an epoch write.
    """

    def __init__(self, prepares: Committable, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.prepares, self.meanwhile = prepares, meanwhile
        self.open: list[Committable] = []
        self.visible: list[Committable] = []
        self.aborted: list[Committable] = []
        self.refuses = False

    def run_epoch(self, *_: int | Producer | tuple[StepState, ...]) -> EpochRan:
        self.meanwhile()
        self.open.append(self.prepares)
        return EpochRan((), committables=(self.prepares,), has_strays=True)

    def commit(self, committables: tuple[Committable, ...]) -> tuple[Lost, ...]:
        self.visible += committables
        self.open = [committable for committable in self.open if committable not in committables]
        return ()

    def lingering(self) -> tuple[Committable, ...]:
        return tuple(self.open)

    def abort(self, committables: tuple[Committable, ...]) -> None:
        if self.refuses:
            raise StorageError("not now")
        self.aborted += committables
        self.open = [committable for committable in self.open if committable not in committables]

    def check_prepared(self, committables: tuple[Committable, ...]) -> None: ...

    check_newest = check_prepared


def started(folder: Path, sink: Sink) -> Driver:
    storage, clock = FileStorage(str(folder)), SystemClock()
    identity = Identity("job", "L", storage.location)
    log = DecisionLog(storage, clock, "tallystick-job", kept_slots=3)
    return Driver(identity, log, storage, clock, participants=sink)


def run(driver: Driver, sink: Sink, epoch: int = 0) -> None:
    driver.run_epoch(Request(epoch, (f'{{"to": {epoch}}}',), may_skip=False), sink)
