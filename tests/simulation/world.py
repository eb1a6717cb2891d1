"""One simulated world: Kafka, storage and Spark, the drivers in it, and what befalls them.

Everything follows from the seed. A world lives in three parts: a stormy one, in which drivers are
started, killed, paused and replaced while faults strike; a quiet one, in which what is left over
arrives and a last driver goes on; and, for some seeds, an act of sabotage and what it must lead to.
"""

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, TypeVar

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch.facts import Request
from tallystick.epoch.manifest import CHECKPOINT, KAFKA, Identity
from tallystick.epoch.tokens import Token, decode_token
from tallystick.errors import RetriableError, StorageError, TallystickError
from tallystick.ports import Decider, Engine
from tallystick.run.driver import Driver
from tallystick.run.epoch_clock import SteadyClock
from tallystick.run.transaction_decider import Target, TransactionDecider
from tallystick.spark.streaming import micro_batch
from tallystick.state.catalog import StepState
from tallystick.values import TopicPartition
from tests.simulation.broker import SimulatedBroker
from tests.simulation.checker import Checker, offered_words, stated_after
from tests.simulation.engine import Attempt, SimulatedEngine
from tests.simulation.faults import (
    DRIVER_FAULTS,
    EFFECT,
    KAFKA_FAULTS,
    LATE,
    PUT_FAULTS,
    SINK_FAULTS,
    Fault,
    FaultPlan,
)
from tests.simulation.gang import Network, SimulatedGang
from tests.simulation.gangs import Gangs
from tests.simulation.kafka_cluster import KafkaCluster
from tests.simulation.loop import Loop
from tests.simulation.operator_state import RULES_SPLIT, TABLE
from tests.simulation.pipelines import Pipeline, pipeline_of
from tests.simulation.query import Query, whose_function
from tests.simulation.residents import Residents
from tests.simulation.rows import OUTPUT, RULES, Row
from tests.simulation.scheduler import Broken, Crash, Endless, Process, Scheduler
from tests.simulation.sinks import Sinks, rows_by_partition
from tests.simulation.spark import Checkpoint, Positions, Source, plan_ends
from tests.simulation.storage import SimulatedStorage
from tests.simulation.wire import Call
from tests.simulation.workers import Workers

Result = TypeVar("Result")

PIPELINE = "sim"
TOKEN_GROUP = "tallystick-sim-token"
OWN = Source("sink", "own-group", (TopicPartition("in", 0), TopicPartition("in", 1)))
OTHER = Source("elsewhere", "other-group", (TopicPartition("far", 0),))
SECOND = Source("elsewhere", "other-group", OWN.partitions, "second")
"""Another input, whose topic has the name of the first one's."""
CONTROL = Source("elsewhere", "other-group", (RULES_SPLIT,), TABLE)
"""The topic of a table."""
TARGET = Target("tallystick-sim", TOKEN_GROUP, OUTPUT[0], "sink")

JUMP_MS = 1 << 45
STEPS_MAX = 20_000
"""A world that takes longer has a driver that goes round in circles."""
STARTS_MAX = 8
RELEASED_MAX = 6


def sources(dice: random.Random, pipeline: Pipeline) -> tuple[Source, ...]:
    """The sources of a world: of two inputs, or of one, which may read of two clusters; a table."""
    drawn = (OWN, OTHER) if dice.random() < 0.3 else (OWN,)
    drawn = (OWN, SECOND) if pipeline.has_two_inputs else drawn
    return (*drawn, CONTROL) if pipeline.has_operator_state else drawn


class World:
    """The ports' other side, and the drivers.

    Args:
        seed: decides everything.
        kinds: only these kinds of faults; None draws some.
        wanted: of its pipeline; see `pipelines.pipeline_of`.
    """

    stops: Positions | None = None
    """Where reading ends for good."""

    ends_broken = False
    """At the first broken promise, else as a whole one does."""

    def __init__(self, seed: int, kinds: Collection[Fault] | None = None, **wanted: Any) -> None:
        self.pipeline = pipeline_of(seed, **wanted)
        self.is_keyed, self.has_gang = self.pipeline.is_keyed, self.pipeline.has_gang
        self.has_two_inputs = self.pipeline.has_two_inputs
        self.is_timed = self.has_two_inputs or self.pipeline.has_windows
        has_loop = self.pipeline.has_loop
        self.seed, self.dice = seed, random.Random(seed)
        self.plan = FaultPlan(self.dice, kinds, seed)
        if self.pipeline.has_windows:  # what is in them is told by where the records were
            self.plan.kinds -= {Fault.WHIM}
        self.strays: list[Attempt] = []
        self.step = 0
        self.ends: Counter[str] = Counter()
        self.trace: list[str] = []
        self.accepted: set[str] = set()
        self.backup: dict[str, bytes] = {}  # of files that were sabotaged
        self._pauses: dict[str, SteadyClock] = {}  # of each driver
        self._jump_ms = 0  # of the clock of the driver that looks at it now
        self.has_other_decider = False  # of the drivers that start now
        self.repeated: list[Row] = []  # what a person agreed to have in the output twice
        self._scheduler = Scheduler(self.dice)
        self._in_flight: list[Callable[[], object]] = []
        self._names = itertools.count(1)
        self._nonces = itertools.count(1)
        self._outage = False
        self._last_error: BaseException | None = None
        self._takeover_wanted = False
        self._tells = Fault.COUNT_HIDDEN not in self.plan.kinds
        self.plan.struck[Fault.COUNT_HIDDEN] += not self._tells
        self.sink = KafkaCluster(
            "sink",
            self.dice,
            lambda: self.step,
            transaction_version=self.dice.choice((2, 2, 1)),
            tells=self._tells,
            refuses=lambda: self.plan.strikes(Fault.BATCH_REFUSED),
        )
        self.sources = sources(self.dice, self.pipeline)
        partitions = [name for source in self.sources for name in source.names]
        self.available = dict.fromkeys(partitions, 0)  # the end of what can be read
        self.consumed = dict(self.available)
        self.met: Counter[str] = Counter()
        self.network = Network(self)
        self.listening: SimulatedGang | None = None
        self.gangs = Gangs(self)
        self.begins_late = has_loop and self.dice.random() < 0.3
        self.checkpoint = Checkpoint("lineage-1", "sim:/checkpoint-1", dict.fromkeys(partitions, 0))
        self.checkpoint.recorded = {0: self.checkpoint.base} if has_loop else None
        self.origin = self.checkpoint
        self.workers = Workers(self, OUTPUT)
        self.checker = Checker(
            self.checkpoint,
            rows_by_partition,
            token_group=TOKEN_GROUP,
            tells=self._tells,
            is_keyed=self.is_keyed,
            waited_for=[
                partition for partition in partitions if self.is_timed and partition != RULES
            ],
            is_judged=self.has_two_inputs,
            has_windows=self.pipeline.has_windows,
            has_operator_state=self.pipeline.has_operator_state,
        )
        self.sink.on_commit = self.checker.on_commit
        decided_by = self.pipeline.decided_by
        self.sinks = Sinks(self, decided_by) if decided_by else None
        if self.sinks is not None:
            self.checker.on_decision = self.sinks.decided
            self.sinks.oracle.has_loop = has_loop
        self.query = self._made_query()

    def _made_query(self) -> Loop | Query:
        if self.pipeline.has_loop:
            return Loop(self)
        function = whose_function(self.seed, self.pipeline.decided_by, self.plan.kinds)
        return Query(self, function)

    # What Spark offers
    def plan_positions(self, starts: Positions) -> Positions | None:
        """The end of the next micro-batch; None when there is nothing to read."""
        return plan_ends(self.dice, self.plan, self.available, starts)

    # Drivers
    def start_driver(self) -> Process:
        """Start the query in a new process."""
        name = f"driver {next(self._names)}"
        process = Process(name, self.query.run)
        self._scheduler.add(process)
        self.tell(f"{name} starts on {self.checkpoint.location}")
        return process

    def make_driver(self, process: Process, **options: Any) -> Driver:
        """The driver that is tested, on ports that break."""
        checkpoint = self.checkpoint
        identity = Identity(
            PIPELINE, checkpoint.lineage, checkpoint.location, frozenset(self.accepted)
        )
        storage = SimulatedStorage.of(self, process, checkpoint)
        decider = self._decider(process, storage)
        if self.sinks is not None:
            options["participants"] = self.sinks.participants(process, checkpoint.lineage)
        return Driver(
            identity,
            decider,
            storage,
            self,
            collect_every=self.dice.randint(1, 4) if Fault.COLLECTED in self.plan.kinds else 0,
            **options,
        )

    def _decider(self, process: Process, storage: SimulatedStorage) -> Decider:
        if self.sinks is not None and (self.decided_by == CHECKPOINT) != self.has_other_decider:
            return self.sinks.log(storage)
        target = TARGET
        if self.has_other_decider and self.sinks is None:
            target = replace(TARGET, transactional_id="other-sim")
        broker = SimulatedBroker(self, process, self.sink)
        return TransactionDecider(broker, target, self.checkpoint.lineage, str)

    def offer(self, process: Process, driver: Driver, epoch: int) -> None:
        """Ask a driver for one epoch that is in Spark's offset log."""
        process.offered = epoch
        folder = CheckpointFolder(SimulatedStorage.of(self, process, self.checkpoint))
        folder.log.sync(epoch)
        ends = self.checkpoint.offsets[epoch]
        texts = tuple(source.text(ends) for source in self.sources)
        request = Request(epoch, texts, may_skip=self.query.is_users)
        engine = self.engine(process, self.checkpoint, epoch)
        micro_batch.run_micro_batch(driver, folder, request, engine)

    def engine(self, process: Process, checkpoint: Checkpoint, epoch: int) -> Engine:
        """What runs an epoch whose input a checkpoint tells."""
        if self.has_gang:
            return self.gangs.engine(process, checkpoint, epoch)
        if self.is_keyed:
            branches = None if self.sinks is None else self.sinks.branches(process, in_jobs=True)
            return self.workers.engine(process, checkpoint, epoch, branches)
        engine = SimulatedEngine(self, process, self.sink, rows_by_partition(checkpoint, epoch))
        if self.sinks is not None:
            return self.sinks.engine(process, checkpoint, epoch, engine)
        return engine

    def residents(self, process: Process) -> Residents | None:
        """The resident tasks of a run; None: its epochs are Spark jobs."""
        return self.gangs.residents(process) if self.has_gang else None

    @property
    def decided_by(self) -> str:
        """Who decides."""
        return KAFKA if self.sinks is None else self.sinks.decided_by

    def token(self) -> Token | None:
        """What is decided last."""
        if self.sinks is not None and self.decided_by == CHECKPOINT:
            return self.sinks.token()
        offset = self.sink.offsets.get((TOKEN_GROUP, OUTPUT[0]))
        return decode_token(*offset) if offset else None

    def log_early(self, epoch: int) -> None:
        """Spark takes an epoch for done that may not be settled."""
        if self.sinks is not None:
            self.sinks.oracle.logged_early.add(epoch)

    # Clock
    def sleep(self, seconds: float) -> None:
        """See `ports.Clock.sleep`: time is the world's own."""

    def pauses_ms(self, process: Process, state: tuple[StepState, ...]) -> int:
        """Return the time by which a driver measures pauses; its machine's clock may jump.

        One that is ahead when a run begins is not told from a job that was down for so long.
        """
        if not self.has_two_inputs:
            return 0
        known_ms = max((time.seen_ms for step in state for time in step.partition_times), default=0)
        begins, jump_ms = process.name not in self._pauses, 0
        if (known_ms or not begins) and self.plan.strikes(Fault.CLOCK_JUMPED):
            jump_ms = -JUMP_MS if begins else self.dice.choice((-JUMP_MS, JUMP_MS))
            self.tell(f"{process.name}'s clock jumps by {jump_ms} ms")
        self._jump_ms = jump_ms
        if begins:
            clock = SteadyClock(lambda: self.step + self._jump_ms, lambda: self.step)
            self._pauses[process.name] = clock
        return self._pauses[process.name].now_ms(known_ms)

    def nonce(self) -> str:
        """See `ports.Clock.nonce`."""
        return f"{next(self._nonces):04d}"

    # The wire
    def send(self, process: Process, call: Call[Result]) -> Result:
        """Make a call take effect: at once, later, or not at all. See `sim.broker.Wire`."""
        self.advance(process)
        fault = self._fault_of(call)
        if fault is None:
            result = self.arrive(process, call)
            self.tell(f"{process.name} {call.name}")
            return result
        self.tell(f"{process.name} {call.name}: {fault.value}")
        if fault is Fault.OUTAGE:
            self._outage = True
        if fault is Fault.SINK_AWAY and self.sinks is not None:
            self.sinks.away.add(call.name.split()[0])
        if fault in LATE:
            self.post(process, call)
        if fault in EFFECT:
            self.arrive(process, call)
        if fault in DRIVER_FAULTS:
            raise Crash
        raise call.unavailable(f"{call.name}: {fault.value}")

    def _fault_of(self, call: Call[Any]) -> Fault | None:
        if call.unavailable is RetriableError:
            is_away = self.sinks is not None and call.name.split()[0] in self.sinks.away
            if is_away:
                return Fault.SINK_REFUSED
            return self.plan.pick((*DRIVER_FAULTS, *SINK_FAULTS))
        is_kafka = call.unavailable is not StorageError
        if self._outage and is_kafka:
            return Fault.REFUSED
        kinds = KAFKA_FAULTS if is_kafka else PUT_FAULTS if call.name == "put" else ()
        return self.plan.pick((*DRIVER_FAULTS, *kinds))

    def start(self, process: Process) -> None:
        """Let a resident task run."""
        self._scheduler.add(process)

    def end(self, process: Process) -> None:
        """End a resident task."""
        self._scheduler.kill(process)

    def later(self, do: Callable[[], object]) -> None:
        """Let something arrive later."""
        self._in_flight.append(do)

    def post(self, process: Process, call: Call[Any]) -> None:
        """Let a call arrive later."""
        self._in_flight.append(lambda: self.arrive(process, call))

    def arrive(self, process: Process, call: Call[Result]) -> Result:
        """Let a call take effect."""
        self.checker.committer = process.name
        if self.sinks is None:
            return call.effect()
        self.sinks.oracle.by = process.name
        result = call.effect()
        self.sinks.arrived(process, call)
        return result

    def asks_to_take_over(self, process: Process) -> None:
        """See `sim.broker.Wire`."""
        self.checker.asks_to_take_over(process.name)

    def took_over(self, process: Process) -> None:
        """See `sim.broker.Wire`."""
        self.checker.took_over(process.name, process.offered)
        if self.sinks is not None:
            self.sinks.oracle.took_over(process.name)

    def advance(self, process: Process) -> None:
        """Let time pass around a process; other processes may run, and it may be paused."""
        self.step += 1
        if self.step > STEPS_MAX:
            raise Endless
        while self._in_flight and self.dice.random() < 0.2:
            self._deliver(self.dice.randrange(len(self._in_flight)))
        if self.strays and self.dice.random() < 0.4:
            self._step_stray(self.dice.choice(self.strays))
        if self.plan.strikes(Fault.TRANSACTION_TIMEOUT) and self.sink.time_out():
            self.tell("the transaction times out")
        if self.sinks is not None:
            self.sinks.pass_time()
        if self.network.has_any and self.dice.random() < 0.05:
            self.network.deliver_one()
        if process.resident is None and self.plan.strikes(Fault.TAKEOVER):
            self._takeover_wanted = True
            process.asleep_until = self.step + self.dice.choice((0, 5, 20, 60))
            self.tell(f"{process.name} is paused until step {process.asleep_until}")
            process.give_back()
        elif len(self._scheduler.running) > 1 and self.dice.random() < 0.4:
            process.give_back()
        if process.resident is not None:
            process.resident.befall()

    def pass_by(self, process: Process) -> None:
        """A moment outside of any call, in which the process may die."""
        self.advance(process)
        if self.plan.strikes(Fault.CRASH_BEFORE):
            self.tell(f"{process.name} dies between two calls")
            raise Crash

    def _deliver(self, index: int) -> None:
        with contextlib.suppress(TallystickError):  # nobody waits for the answer
            self._in_flight.pop(index)()
            self.tell("a late request arrives")

    def _step_stray(self, stray: Attempt) -> None:
        is_through = stray.step() is not None
        self.tell("a stray attempt goes on")
        if is_through:
            self.strays.remove(stray)

    # The parts of a life
    def run_storm(self) -> None:
        """Start drivers, again and again, while faults strike."""
        remaining = self.dice.randint(2, STARTS_MAX)
        while remaining or self._scheduler.living:
            if remaining and (self._takeover_wanted or not self._scheduler.living):
                self.release_input()
                remaining -= 1
                if self.pipeline.has_end and not remaining:
                    self.stops = self.checker.stops = dict(self.available)
                self.start_driver()
            self._takeover_wanted = False
            self._run_some()

    def run_quietly(self) -> None:
        """Restart the query until it finishes; nothing fails any more."""
        self.plan.active = False
        for _ in range(STARTS_MAX):
            if self.run_driver() == "finished":
                self.consumed = dict(self.available)
                return
        self.checker.note(f"the query does not finish: {dict(self.ends)}")

    def run_driver(self) -> str:
        """Start the query once, and wait for its end; the word for that."""
        self.start_driver()
        end = ""
        while self._scheduler.living:
            end = self._run_some()
        return end

    def accept_last(self) -> bool:
        """State the decision that the last refusal asks for, if it offers one."""
        words = offered_words(self._last_error)
        self.accepted |= words
        return bool(words)

    def drain(self) -> None:
        """Let everything arrive that is under way."""
        while self._scheduler.running:
            self._run_some()
        while self.strays:
            self._step_stray(self.strays[0])
        while self._in_flight:
            self._deliver(0)
        if self.sinks is not None:
            self.sinks.drain()

    def release_input(self) -> None:
        """More input than before: the next run has something to do, unless the inputs ended."""
        for partition in self.available if self.stops is None else ():
            self.available[partition] += self.dice.randint(1, RELEASED_MAX)

    def close(self) -> None:
        """End all threads."""
        self._scheduler.kill_all()
        while self.strays:
            self.strays.pop().end()

    def _run_some(self) -> str:
        """Let one process run; the word for its end, if it ended."""
        if self.ends_broken and self.checker.violations:
            raise Broken
        while not self._scheduler.is_anyone_awake(self.step) and self.network.deliver_one():
            pass
        process = self._scheduler.run_one(self.step)
        if process is None:
            return ""
        if process.resident is not None:
            if not isinstance(process.ended_by, Crash | None):
                raise process.ended_by
            process.resident.ended()
            return ""
        self._outage = False
        error = self._last_error = process.ended_by
        if isinstance(error, Endless):
            raise error
        end = self.judge(process, error)
        self.ends[end] += 1
        self.tell(f"{process.name} ends: {end}" + (f": {error}" if error else ""))
        if self.checker.expected_error is None and self.decided_by == KAFKA:
            shown = self.sink.offsets.items()
            own = {partition: at for (group, partition), (at, _) in shown if group == OWN.group}
            self.checker.check_positions(own)
        is_dead = isinstance(error, Crash) and not self._scheduler.living
        if is_dead and self.plan.strikes(Fault.POWER_CUT):
            self.checkpoint.lose_power(self.dice)
            self.tell(Fault.POWER_CUT.value)
        self.accepted |= stated_after(end, error)
        if end == "told of failed calls":
            self.query.give_up(str(error))
        return end

    def judge(self, process: Process, error: BaseException | None) -> str:
        """Let the oracle look at what a driver raised; the word for it."""
        end = "" if self.sinks is None else self.sinks.ended(process, error)
        return end or self.checker.on_end(process.name, process.offered, error)

    def tell(self, what: str) -> None:
        """Add a line to the story of this world."""
        self.trace.append(f"{self.step:5d} {what}")
