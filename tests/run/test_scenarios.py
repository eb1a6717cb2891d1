"""The protocol told as stories: a script above the line, its transcript below.

    A: epoch 0                                 driver A is offered epoch 0 (a new name, a new run)
    A: epoch 1 | put: crash after              at A's next call of `put` in that epoch ...
    B: epoch 1 | fence: C epoch 1 first        ... or all of another driver's epoch happens first
    token expires / checkpoint set back to 0 / another checkpoint / late requests arrive / accept
    savepoint taken / savepoint restored       of what Kafka committed last / as a new checkpoint

With `sinks: kafka` or `sinks: checkpoint` as its first line there are two other sinks, db and far,
and Kafka's transaction or the checkpoint's own log decides.

    db times out                               it aborts all that is open or prepared
    sink db is gone / sink db is back          for drivers that start from now on
    A: epoch 1 | second put: crash before      the next call but one; "third": but two

If one fails, run with REWRITE=1, read the diff, and commit it only if you understand and want it.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.codec.records.encoder import stamp
from tallystick.epoch import manifest as m
from tallystick.epoch.manifest import KAFKA
from tallystick.epoch.protocol import Action, Event
from tallystick.epoch.savepoint import Savepoint, seed_of
from tallystick.epoch.tokens import decode_token
from tallystick.errors import TallystickError
from tallystick.run.driver import Driver
from tests.simulation.checker import offered_words
from tests.simulation.faults import Fault
from tests.simulation.other_systems import OtherSystem
from tests.simulation.rows import Row, to_batch
from tests.simulation.sabotage import TOKEN, sabotage
from tests.simulation.scheduler import Crash
from tests.simulation.sink_oracle import SinkOracle
from tests.simulation.sinks import numbered
from tests.simulation.spark import Checkpoint, Positions
from tests.simulation.wire import Call
from tests.simulation.world import OUTPUT, OWN, World

SCENARIOS = sorted(Path(__file__).with_name("scenarios").glob("*.txt"))
ROWS_PER_EPOCH = 3


class Story(World):
    """A world in which only what the script says goes wrong, and that takes notes."""

    def __init__(self, decided_by: str = "") -> None:
        super().__init__(seed=0, kinds=(), decided_by=decided_by, has_loop=False)
        self.gone: set[str] = set()
        if self.sinks is not None:
            systems = {uid: OtherSystem(uid, times_out=True) for uid in ("db", "far")}
            self.sinks.systems = systems
            self.sinks.oracle = SinkOracle(self.checker.note, systems, numbered)
        self.sources = (OWN,)
        self.available = dict.fromkeys(OWN.partitions, 100)
        self.checkpoint.base = dict.fromkeys(OWN.partitions, 0)
        self.sink.transaction_version = 2
        self.lines: list[str] = []
        self.drivers: dict[str, tuple[Any, Driver]] = {}
        self.due: dict[tuple[str, str], str] = {}
        self.restored = 0

    # The script
    def play(self, command: str) -> None:  # noqa: PLR0912 - one case per command
        """Do what one line says."""
        self.lines.append(f"> {command}")
        match command.split():
            case [name, "epoch", number, *rest]:
                if rest:
                    call, fault = command.partition("| ")[2].split(": ")
                    self.due[name.rstrip(":"), call] = fault
                self.run(name.rstrip(":"), int(number))
            case ["late", *_]:
                self.drain()
            case [uid, "times", "out"]:
                while self.sinks.systems[uid].time_out(self.dice):
                    pass
            case ["sink", uid, "is", "gone"]:
                self.gone.add(uid)
            case ["sink", uid, "is", "back"]:
                self.gone.discard(uid)
            case ["accept"]:
                self.accept_last()
            case ["token", "expires"]:
                sabotage(self, Fault.TOKEN_EXPIRED)
            case ["manifest", "deleted"]:
                sabotage(self, Fault.MANIFEST_DELETED)
            case ["another", "checkpoint"]:
                sabotage(self, Fault.OTHER_CHECKPOINT)
            case ["savepoint", "taken"]:
                self._take_savepoint()
            case ["savepoint", "restored"]:
                self._restore_savepoint()
            case ["checkpoint", "set", "back", "to", number]:
                self.checkpoint.forget_from(int(number))
            case _:
                raise ValueError(command)
        visible = [row for partition in OUTPUT for row in self.sink.visible(partition)]
        foreign = sum(row.foreign for row in visible)
        counted = f"{len(visible) - foreign}" + (f" and {foreign} foreign" if foreign else "")
        token = self.token()
        epoch = token.checkpoint_id if token else None
        if self.sinks is None:
            self.lines.append(f"  visible rows: {counted}; Kafka's token: {epoch}")
            return
        here = [f"Kafka {counted}"] if self.decided_by == KAFKA else []
        for uid, system in self.sinks.systems.items():
            waiting = sum(
                len(transaction.rows) for transaction in system.pending(self.checkpoint.lineage)
            )
            here.append(f"{uid} {len(system.visible())}" + (f" ({waiting} wait)" * bool(waiting)))
        self.lines.append(f"  visible rows: {', '.join(here)}; decided: {epoch}")

    def _take_savepoint(self) -> None:
        path = decode_token(*self.sink.offsets[TOKEN]).manifest_path
        manifest = m.decode(self.checkpoint.files[path], path)
        self.saved = Savepoint("it", "2026", self.checkpoint.location, path, manifest)
        self.saved_from = self.checkpoint

    def _restore_savepoint(self) -> None:
        self.restored += 1
        name, epoch = f"restored-{self.restored}", self.saved.manifest.checkpoint_id
        self.checkpoint = Checkpoint(name, f"sim:/{name}", self.saved_from.base)
        logged = self.saved_from.offsets
        for number in (epoch - 1, epoch):
            if number in logged:
                self.checkpoint.log_offsets(number, logged[number], self.sources)
        self.checkpoint.log_commit(epoch)
        seed = seed_of(self.saved, "sim:/savepoint", name)
        self.checkpoint.files[m.manifest_path(seed, f"{m.SEED}1")] = seed.encode()

    def run(self, name: str, epoch: int) -> None:
        """Offer an epoch to a driver, which is started if it is new."""
        process, driver = self._driver(name)
        if epoch not in self.checkpoint.offsets:
            ends = self.plan_positions(self.checkpoint.start_of(epoch))
            self.checkpoint.log_offsets(epoch, ends, self.sources)
        try:
            self.offer(process, driver, epoch)
            if epoch not in self.checkpoint.commits:
                self.checkpoint.log_commit(epoch)
            self.lines.append(f"  {name} is done with epoch {epoch}")
        except Crash:
            self.lines.append(f"  {name} dies")
        except TallystickError as error:
            self._last_error = error
            if self.sinks is not None:
                self.sinks.ended(process, error)
            self.lines.append(f"  {name} raises {type(error).__name__}: {str(error)[:150]}")

    def _driver(self, name: str) -> tuple[Any, Driver]:
        if name not in self.drivers:
            process: Any = SimpleNamespace(name=name, offered=-1)
            if self.sinks is not None:
                present = tuple(uid for uid in self.sinks.systems if uid not in self.gone)
                self.sinks.set_run(name, present, 1)
            driver = self.make_driver(process)
            self._take_notes(name, driver)
            self.drivers[name] = (process, driver)
        return self.drivers[name]

    def _take_notes(self, name: str, driver: Driver) -> None:
        coordinator: Any = driver.coordinator
        original = coordinator.step

        def step(event: Event) -> Action:
            action = original(event)
            what, order = type(event).__name__, type(action).__name__
            self.lines.append(f"  {name} {what:20} {coordinator.phase.name:10} -> {order}")
            return action

        coordinator.step = step

    # The ports' other side
    def plan_positions(self, starts: Positions) -> Positions:
        return {partition: offset + ROWS_PER_EPOCH for partition, offset in starts.items()}

    def advance(self, process: Any) -> None:
        self.step += 1

    def pass_by(self, process: Any) -> None:
        self.step += 1

    def send(self, process: Any, call: Call[Any]) -> Any:
        fault = self.due.pop((process.name, call.name), "")
        for which, following in (("second ", ""), ("third ", "second ")):
            if later := self.due.pop((process.name, which + call.name), ""):
                self.due[process.name, following + call.name] = later
        match fault.split():
            case ["crash", "before"]:
                raise Crash
            case ["crash", "after"]:
                self.arrive(process, call)
                raise Crash
            case ["crash", "and", "late"]:
                self.post(process, call)
                raise Crash
            case ["lost", "reply"]:
                self.arrive(process, call)
                raise call.unavailable(f"{call.name}: no answer")
            case ["refused"]:
                raise call.unavailable(f"{call.name}: refused")
            case ["time", "out", "first"]:
                self.sink.time_out()
            case ["stray", "first"]:
                self._write_stray()
            case [other, "epoch", number, "first"]:
                self.run(other, int(number))
        return self.arrive(process, call)

    def _write_stray(self) -> None:
        """An attempt that nobody waits for writes one row more where the task has written."""
        partition = OUTPUT[0]
        last = (self.sink.describe_producers(self.sink.current, [partition]) or {})[partition]
        row = Row("", 0, OWN.partitions[0], 0, foreign=True)
        data = stamp(to_batch([row]).data, self.sink.current, last + 1)
        self.sink.produce(self.sink.current.transactional_id, partition, data)


def transcript(script: str) -> str:
    """Play a script; tell what happened."""
    first, _, rest = script.partition("\n")
    has_sinks = first.startswith("sinks: ")
    story = Story(first.removeprefix("sinks: ") if has_sinks else "")
    try:
        for command in (rest if has_sinks else script).splitlines():
            story.play(command)
    finally:
        story.close()
    assert not has_sinks or story.checker.violations == []
    return "\n".join(story.lines) + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    """The transcript is what it was."""
    script, _, expected = path.read_text().partition("----\n")
    actual = transcript(script.strip())
    if "REWRITE" in os.environ:
        path.write_text(f"{script.strip()}\n----\n{actual}")
    else:
        assert actual == expected


def test_accepting_needs_the_word_of_the_message() -> None:
    assert offered_words("start once with accept='yes-really'.") == {"yes-really"}
    assert offered_words("restore the file") == set()
