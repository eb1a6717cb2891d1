"""What a lost epoch is run again from is never collected, however often the pipeline clears up."""

import itertools
import random
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pytest

from tallystick.checkpoint.decision_log import DecisionLog, newest_entry
from tallystick.checkpoint.state_files import write_changelog
from tallystick.epoch import manifest as m
from tallystick.epoch.facts import Request
from tallystick.epoch.manifest import Identity
from tallystick.epoch.protocol import EpochRan
from tallystick.epoch.two_phase import Committable, Lost
from tallystick.errors import DataLossError, TallystickError
from tallystick.run.driver import Driver
from tallystick.state.catalog import StepState, Version
from tallystick.state.file_sets import extend
from tallystick.state.keys import HASH_VERSION, KeyCodec
from tallystick.state.overlay import ENTRIES
from tallystick.storage.file_storage import FileStorage, SystemClock
from tallystick.values import Producer

EPOCHS = 2 * m.EPOCHS_RETAINED + 3
KEY = KeyCodec(pa.schema([("user", pa.string())])).schema_text


class DownError(TallystickError):
    """The driver dies here."""


class World:
    """One pipeline over its runs: its checkpoint, its sink, and its dice."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.storage = FileStorage(str(folder))
        self.dice = random.Random(seed)
        self.names = itertools.count()
        self.open: set[Committable] = set()
        self.visible: dict[int, list[str]] = {}
        self.values: dict[int, bytes] = {}
        self.replays = 0

    # --- ports.Engine

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> EpochRan:
        """Go on from the state, which must be there, and be that of the epoch before."""
        self.replays += checkpoint_id in self.values
        (step,) = state or (StepState("counts", 128, 2, KEY, HASH_VERSION),)
        self.assert_there(state)
        assert (step.version.epoch if step.version else -1) == checkpoint_id - 1
        number = next(self.names)
        self.values[checkpoint_id] = b"%d" % number
        entries = pa.table([[b"\x00\x03\x01\x01all\x00\x00"], [b"%d" % number]], schema=ENTRIES)
        file = write_changelog(self.storage, "counts", checkpoint_id, 0, f"n{number}", entries)
        assert file is not None
        committables = [
            Committable("sink", checkpoint_id, task, f"{number}-{task}", 1, 1) for task in range(2)
        ]
        self.open |= set(committables)
        after = extend(step, Version(checkpoint_id, f"n{number}"), [file])
        return EpochRan((), (after,), committables=tuple(committables))

    # --- ports.Participants

    def commit(self, committables: tuple[Committable, ...]) -> tuple[Lost, ...]:
        """Commit; or lose all of it, or die before or behind it."""
        fate = self.dice.choice(["", "", "die", "lose", "lose and die", "die after"])
        if fate == "die":
            raise DownError
        if fate.startswith("lose"):
            self.open -= set(committables)
        if fate == "lose and die":
            raise DownError
        lost = []
        for committable in committables:
            done = self.visible.setdefault(committable.checkpoint_id, [])
            if committable in self.open:
                self.open.remove(committable)
                done.append(committable.name)
            elif committable.name not in done:
                lost.append(Lost(committable, committable.name))
        if fate == "die after":
            raise DownError
        return tuple(lost)

    def lingering(self) -> tuple[Committable, ...]:
        """See `ports.Participants`."""
        return tuple(self.open)

    def abort(self, committables: tuple[Committable, ...]) -> None:
        """See `ports.Participants`."""
        self.open -= set(committables)

    def check_prepared(self, committables: tuple[Committable, ...]) -> None:
        """See `ports.Participants`."""

    def check_newest(self, settled: tuple[Committable, ...]) -> None:
        """See `ports.Participants`."""

    # --- what is looked at

    def start(self) -> Driver:
        """A new run of the pipeline, which clears up after every epoch."""
        return Driver(
            Identity("job", "L", self.storage.location),
            DecisionLog(self.storage, SystemClock(), "tallystick-job", kept_slots=3),
            self.storage,
            SystemClock(),
            participants=self,
            collect_every=1,
        )

    def assert_there(self, state: Iterable[StepState]) -> None:
        """All files of a state."""
        for step in state:
            for file in step.files:
                assert self.storage.get(file.path) is not None, file.path

    def assert_replayable(self) -> None:
        """The newest decision, what it went on from, and all files of both."""
        entry = newest_entry(self.storage)
        assert entry is not None
        if entry.token is None or not entry.token.manifest_path:
            return
        path = entry.token.manifest_path
        for _ in range(2):
            data = self.storage.get(path)
            assert data is not None, path
            manifest = m.decode(data, path)
            self.assert_there(manifest.state)
            path = manifest.base_path
            if not path:
                break


@pytest.mark.parametrize("seed", range(6))
def test_a_lost_epoch_is_run_again_from_what_was_kept(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    driver: Driver | None = None
    for epoch in range(EPOCHS):
        while True:
            driver = driver or world.start()
            try:
                driver.run_epoch(Request(epoch, (f'{{"to": {epoch}}}',), may_skip=False), world)
            except DataLossError:
                raise
            except TallystickError:
                driver = None  # Spark asks the next run for the same epoch
            else:
                break
            finally:
                world.assert_replayable()

    assert {epoch: len(names) for epoch, names in world.visible.items()} == dict.fromkeys(
        range(EPOCHS), 2
    ), "each epoch is visible once, and whole"
    assert world.replays > 5
    kept = {m.epoch_of(path) for path in m.manifests(world.storage.names(m.FOLDER))}
    assert min(kept) >= EPOCHS - 1 - m.EPOCHS_RETAINED
