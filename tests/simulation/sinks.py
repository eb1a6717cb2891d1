"""The other sinks of the simulated pipeline: systems, what befalls them, and who decides."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from tallystick.checkpoint.decision_log import DECISIONS, KEPT_SLOTS, DecisionLog
from tallystick.epoch.manifest import CHECKPOINT, KAFKA
from tallystick.epoch.tokens import Token, decode_token
from tallystick.epoch.two_phase import Committable, Owner
from tallystick.errors import RetriableError, TallystickError
from tallystick.ports import Engine, Storage
from tallystick.run.participants import OpenSinks
from tallystick.values import TopicPartition
from tests.simulation.branches import Branches, is_aborted
from tests.simulation.checker import Checker
from tests.simulation.faults import Fault, FaultPlan
from tests.simulation.other_systems import Held, OtherSystem, SimulatedSink, TellingSink
from tests.simulation.pipelines import Pipeline
from tests.simulation.rows import OUTPUT, RULES, Row, key_partition, output_partition
from tests.simulation.scheduler import Process
from tests.simulation.sink_engine import SinkAttempt, SinkEngine
from tests.simulation.sink_oracle import SinkOracle
from tests.simulation.spark import Checkpoint
from tests.simulation.wire import Call

Result = TypeVar("Result")

NAMES = ("db", "far", "files")
TASK_COUNT_MAX = 3
DOWN_STEPS = 15
"""How long a pipeline is down between two runs, as far as timeouts are concerned."""


class Surroundings(Protocol):
    """What these sinks need of the world."""

    dice: random.Random
    plan: FaultPlan
    step: int
    checker: Checker
    checkpoint: Checkpoint
    is_keyed: bool
    pipeline: Pipeline

    def send(self, process: Process, call: Call[Result]) -> Result:
        """Make a call take effect: at once, later, or not at all."""
        ...

    def asks_to_take_over(self, process: Process) -> None:
        """See `sim.broker.Wire`."""
        ...

    def took_over(self, process: Process) -> None:
        """See `sim.broker.Wire`."""
        ...

    def pass_by(self, process: Process) -> None:
        """Let time pass; the process may be paused, or die, here."""
        ...

    def nonce(self) -> str:
        """A name that no other run will draw."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def tell(self, what: str) -> None:
        """Add a line to the story of this world."""
        ...


class Sinks:
    """What outlives every driver.

    Args:
        world: what surrounds them.
        decided_by: `KAFKA` or `CHECKPOINT`.
    """

    def __init__(self, world: Surroundings, decided_by: str) -> None:
        self._world = world
        self.decided_by = decided_by
        dice = world.dice
        names = NAMES[: dice.randint(1, len(NAMES) - (decided_by == KAFKA))]
        share = dice.choice((0.3, 1.0))  # only where all time out nothing of an epoch is visible
        self.systems = {
            uid: OtherSystem(uid, times_out=dice.random() < share, tells=dice.random() < 0.3)
            for uid in names
        }
        self.zombies: list[SinkAttempt] = []
        self.away: set[str] = set()
        self.task_count = dice.randint(1, TASK_COUNT_MAX)
        self._is_keyed = world.is_keyed
        rows = self._keyed_rows if self._is_keyed else numbered
        self.oracle = SinkOracle(world.checker.note, self.systems, rows)
        self._runs: dict[str, tuple[tuple[str, ...], int]] = {}  # by process
        self._slots = SlotWatch(world, self)

    # What a driver gets
    def run_of(self, process: Process) -> tuple[tuple[str, ...], int]:
        """The sinks that its pipeline has, and how many tasks."""
        if process.name not in self._runs:
            plan, dice = self._world.plan, self._world.dice
            present, tasks = tuple(self.systems), self.task_count
            may_go = len(present) > (self.decided_by == CHECKPOINT)
            if may_go and plan.strikes(Fault.SINK_GONE):
                gone = dice.choice(present)
                present = tuple(uid for uid in present if uid != gone)
                self._world.tell(f"{process.name} has no sink {gone}")
            if any(plan.strikes(Fault.SINK_TIMEOUT) for _ in range(DOWN_STEPS)):
                self._time_out_all()  # since the run before
            if plan.strikes(Fault.RESCALED):
                tasks = dice.randint(1, TASK_COUNT_MAX)
            self._runs[process.name] = present, tasks
        return self._runs[process.name]

    def set_run(self, name: str, present: tuple[str, ...], tasks: int) -> None:
        """Settle what a run has, before it starts."""
        self._runs[name] = present, tasks

    def participants(self, process: Process, lineage: str) -> OpenSinks | None:
        """See `ports.Participants`."""
        present, _ = self.run_of(process)
        if not present:
            return None

        return OpenSinks(
            {uid: self.open(process, uid) for uid in present},
            {uid: Owner("sim", uid, lineage) for uid in present},
            lambda: self._world.step,
        )

    def open(self, process: Process, uid: str) -> SimulatedSink:
        """A driver's way to a system."""

        def on_request(name: str) -> None:
            self.oracle.on_request(process.name, name)

        system = self.systems[uid]
        kind = TellingSink if system.tells else SimulatedSink
        return kind(self._world, process, system, on_request)

    def tasks(self, process: Process) -> SinkEngine:
        """What runs tasks whose rows are told with each epoch."""
        present, tasks = self.run_of(process)
        systems = {uid: self.systems[uid] for uid in present}
        return SinkEngine(self._world, process, systems, self.zombies, (), tasks, None)

    def log(self, storage: Storage) -> DecisionLog:
        """See `ports.Decider`: what decides where Kafka does not."""
        removes = Fault.SLOTS_REMOVED in self._world.plan.kinds
        kept = self._world.dice.randint(1, 4) if removes else KEPT_SLOTS
        if removes:
            self._world.plan.struck[Fault.SLOTS_REMOVED] += 1
        return DecisionLog(storage, self._world, "tallystick-sim", kept_slots=kept)

    def present(self, process: Process) -> dict[str, OtherSystem]:
        """The systems that a driver's pipeline writes into."""
        present, _ = self.run_of(process)
        return {uid: self.systems[uid] for uid in present}

    def engine(
        self, process: Process, checkpoint: Checkpoint, epoch: int, kafka: Engine
    ) -> SinkEngine:
        """What runs an epoch for a driver."""
        present, tasks = self.run_of(process)
        return SinkEngine(
            self._world,
            process,
            {uid: self.systems[uid] for uid in present},
            self.zombies,
            rows_of(checkpoint, epoch),
            tasks,
            kafka if self.decided_by == KAFKA else None,
        )

    def branches(self, process: Process, *, in_jobs: bool = False) -> Branches:
        """What tasks that run the real outlet get.

        Args:
            process: their driver.
            in_jobs: they are Spark's, whose attempts may be gone before they abort anything.
        """
        return Branches(
            self.present(process),
            process.name,
            self._world.nonce,
            decides_elsewhere=self.decided_by == CHECKPOINT,
            on_left=self._leave if in_jobs else is_aborted,
            may_leave_strays=in_jobs,
        )

    def _leave(self, system: OtherSystem, transaction: Held) -> bool:
        """Half of what tasks give up lives on: it is prepared later, if nobody aborts it."""
        if self._world.dice.random() < 0.5:
            return False
        self.zombies.append(SinkAttempt(system, transaction))
        return True

    # What befalls them
    def pass_time(self) -> None:
        """Attempts that nobody waits for go on; what waits for too long is aborted."""
        if self.zombies and self._world.dice.random() < 0.2:
            self._step(self._world.dice.choice(self.zombies))
        if self._world.plan.strikes(Fault.SINK_TIMEOUT):
            if self._world.dice.random() < 0.4:
                self._time_out_all()
            system = self._world.dice.choice(list(self.systems.values()))
            if system.time_out(self._world.dice):
                self._world.tell(f"{system.uid}: a transaction times out")

    def _time_out_all(self) -> None:
        for system in self.systems.values():
            while system.time_out(self._world.dice):
                self._world.tell(f"{system.uid}: a transaction times out, as all do")

    def drain(self) -> None:
        """Let all attempts come to their end."""
        while self.zombies:
            self._step(self.zombies[0])

    def leave_behind(self, lineage: str, epoch: int) -> None:
        """A task of a run that was replaced prepares something, while no run is there."""
        for uid, system in self.systems.items():
            late = Committable(uid, epoch, 0, f"{uid}-{epoch}-late", 0, 0)
            system.begin(Held(late, lineage, "a zombie"))
            system.prepare(late.name)

    def _step(self, zombie: SinkAttempt) -> None:
        try:
            is_through = zombie.step()
            self._world.tell(f"a late attempt goes on: {zombie.committable.name}")
        except RetriableError:
            is_through = True
        if is_through:
            self.zombies.remove(zombie)

    # What the checker is told
    def arrived(self, process: Process, call: Call[Any]) -> None:
        """A request has taken effect."""
        if self.decided_by == CHECKPOINT and call.name in ("put", "delete"):
            self._slots.look(process)

    def decided(self, epoch: int, manifest_path: str, by: str) -> None:
        """A decision was taken."""
        present, _ = self._runs[by]
        self.oracle.by = by
        if self._is_keyed and self.decided_by == CHECKPOINT:
            self._look_at_rows(epoch, manifest_path, present[0])
        self.oracle.on_decision(self._world.checkpoint, epoch, manifest_path, present)

    def _look_at_rows(self, epoch: int, manifest_path: str, uid: str) -> None:
        """Let the oracle of the keyed steps see what one sink was given, as there is no topic."""
        checkpoint, checker = self._world.checkpoint, self._world.checker
        if self.oracle.has_decided(checkpoint.lineage, epoch):
            checker.state.begin(checkpoint.lineage, epoch - 1)
        rows_in_output: dict[TopicPartition, list[Row]] = {}
        for row in self.oracle.rows_named(checkpoint.files[manifest_path], uid):
            rows_in_output.setdefault(OUTPUT[key_partition(row.key)], []).append(row)
        checker.check_keyed(epoch, rows_in_output, manifest_path)

    def _keyed_rows(self, checkpoint: Checkpoint, epoch: int) -> Sequence[Row]:
        """The rows of the epoch that was just decided, as seen in one place."""
        return self._world.checker.state.visible

    def token(self) -> Token | None:
        """What the log of decisions holds now."""
        return self._slots.token

    def slots_were_changed(self, *, are_gone: bool = False) -> None:
        """By hand: that is not the code's doing."""
        self._slots.forget(are_gone=are_gone)

    def ended(self, process: Process, error: BaseException | None) -> str:
        """How a driver ended, if that is the business of these sinks; else nothing."""
        self.away.clear()
        present, _ = self.run_of(process)
        if isinstance(error, RetriableError):
            self.oracle.on_gave_up(process.name, present)
        if not isinstance(error, TallystickError):
            return ""
        owner = self._world.checker.owner
        if "lost-output-of-epoch" in str(error):
            return "lost output" if self.oracle.on_lost(process.name, owner, error) else ""
        misses = self.oracle.misses_a_sink(error, process.offered, present)
        return "a sink is gone" if misses else ""


class SlotWatch:
    """Reads the log of decisions as it is written, and tells the checker what follows from it."""

    def __init__(self, world: Surroundings, sinks: Sinks) -> None:
        self._world = world
        self._sinks = sinks
        self._location = ""
        self._seen: dict[str, bytes] = {}
        self._newest = ""
        self._run = ""
        self.token: Token | None = None

    def forget(self, *, are_gone: bool) -> None:
        """What the slots held; what is gone is decided no more."""
        self._seen = {}
        if are_gone:
            self._newest, self._run, self.token = "", "", None

    def look(self, process: Process) -> None:
        """A write has arrived, perhaps into the log."""
        checkpoint, checker = self._world.checkpoint, self._world.checker
        if checkpoint.location != self._location:
            self._location = checkpoint.location
            self.forget(are_gone=True)
        files = {
            path: data for path, data in checkpoint.files.items() if path.startswith(DECISIONS)
        }
        changed = [path for path, data in self._seen.items() if files.get(path, data) != data]
        if changed:
            checker.note(f"slots were changed: {changed}")
        self._seen = files
        newest = max(files, default="")
        if newest <= self._newest:
            return  # nothing, or a hole
        self._newest = newest
        entry = json.loads(files[newest].splitlines()[0])
        token = None if entry["token"] is None else decode_token(*entry["token"])
        before, self.token = self.token, token
        if entry["run"] != self._run:
            self._run = entry["run"]
            self._world.took_over(process)
            if token != before:
                checker.note(f"{process.name} takes over with {token}, decided was {before}")
        elif token != before and token is not None:
            checker.on_log_decision(token, process.name)


def numbered(checkpoint: Checkpoint, epoch: int) -> list[Row]:
    """The rows of an epoch, each with its number in the whole input."""
    starts = checkpoint.start_of(epoch)
    before = sum(starts[partition] - checkpoint.beginning[partition] for partition in starts)
    return [row._replace(nth=before + at) for at, row in enumerate(rows_of(checkpoint, epoch))]


def rows_of(checkpoint: Checkpoint, epoch: int) -> Sequence[Row]:
    """The rows of an epoch, in order."""
    starts, ends = checkpoint.start_of(epoch), checkpoint.offsets[epoch]
    return [
        Row(checkpoint.lineage, epoch, source, offset)
        for source in ends
        if source != RULES
        for offset in range(starts[source], ends[source])
    ]


def rows_by_partition(
    checkpoint: Checkpoint, epoch: int
) -> Mapping[TopicPartition, tuple[Row, ...]]:
    """What each output partition gets from an epoch."""
    rows_of_partitions: dict[TopicPartition, list[Row]] = {partition: [] for partition in OUTPUT}
    for row in rows_of(checkpoint, epoch):
        rows_of_partitions[OUTPUT[output_partition(row.source, row.offset)]].append(row)
    return {partition: tuple(rows) for partition, rows in rows_of_partitions.items()}
