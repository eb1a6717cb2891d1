"""Where tasks with state run: hosts, what befalls them there, and their way to the checkpoint."""

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from tallystick.state.catalog import StepState
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.tasks.keyed import WorkerHost
from tallystick.values import TopicPartition
from tests.simulation.branches import Branches
from tests.simulation.engine import Attempt
from tests.simulation.faults import EFFECT, LATE, PUT_FAULTS, Fault, FaultPlan
from tests.simulation.hosts import Host, SimulatedWorkerHost
from tests.simulation.kafka_cluster import KafkaCluster
from tests.simulation.keyed_engine import EpochInput, KeyedEngine, TaskKilledError
from tests.simulation.keyed_step import LASTING_MS, MAX_PARALLELISM, RECORDS, keyed_steps
from tests.simulation.operator_state import with_operator_state
from tests.simulation.pipelines import Pipeline
from tests.simulation.rows import RULES
from tests.simulation.scheduler import Process
from tests.simulation.spark import Checkpoint
from tests.simulation.storage import SimulatedStorage
from tests.simulation.wire import Call

Result = TypeVar("Result")

HOST_COUNT = 3
PARALLELISM = 2
DAWDLE_MAX = 20


class Outside(Protocol):
    """What the workers need of the world."""

    dice: random.Random
    plan: FaultPlan
    strays: list[Attempt]
    sink: KafkaCluster
    pipeline: Pipeline

    def pass_by(self, process: Process) -> None:
        """Let time pass; the process may be paused, or die, here."""
        ...

    def advance(self, process: Process) -> None:
        """Let time pass; the process may be paused."""
        ...

    def later(self, do: Callable[[], object]) -> None:
        """Let something arrive later."""
        ...

    def post(self, process: Process, call: Call[Any]) -> None:
        """Let a call arrive later."""
        ...

    def arrive(self, process: Process, call: Call[Result]) -> Result:
        """Let a call take effect."""
        ...

    def tell(self, what: str) -> None:
        """Add a line to the story of this world."""
        ...

    def nonce(self) -> str:
        """A name that no other run will draw."""
        ...

    def pauses_ms(self, process: Process, state: tuple[StepState, ...]) -> int:
        """The time by which a driver measures pauses."""
        ...


class Workers:
    """The hosts, which outlive every driver.

    Args:
        world: what surrounds them.
        output: the output partitions.
    """

    def __init__(self, world: Outside, output: Sequence[TopicPartition]) -> None:
        self.hosts = [Host(number) for number in range(HOST_COUNT)]
        self.parallelism = PARALLELISM
        self.counted = RECORDS  # by the steps of the runs that start now
        self._world = world
        self._output = output
        self._parallelism_of: dict[str, int] = {}  # by process
        self._ttl_ms_of: dict[str, int] = {}

    def engine(
        self, process: Process, checkpoint: Checkpoint, epoch: int, branches: Branches | None
    ) -> KeyedEngine:
        """What runs an epoch for a driver as a Spark job."""
        unread = unread_in(checkpoint, epoch)

        def worker_host(index: int) -> WorkerHost:
            return self.worker_host(process, checkpoint, index)

        steps = self.steps(process, checkpoint)
        world = self._world
        return KeyedEngine(
            world, process, world.sink, self._output, steps, unread, worker_host, branches
        )

    def steps(self, process: Process, checkpoint: Checkpoint) -> PipelinePlan:
        """The keyed steps of a run."""
        parallelism = self.parallelism_of(process)
        worker_host = self.worker_host(process, checkpoint, 0)
        pipeline, ttl_ms = self._world.pipeline, self._ttl_ms(process)
        steps = keyed_steps(parallelism, worker_host, pipeline, self.counted, ttl_ms)
        return self.with_operator_state(steps, process, checkpoint)

    def with_operator_state(
        self, steps: PipelinePlan, process: Process, checkpoint: Checkpoint
    ) -> PipelinePlan:
        """Return the steps of a run with what its readers keep, if they do."""
        if not self._world.pipeline.has_operator_state:
            return steps
        partitions = [partition for partition in checkpoint.base if partition != RULES]
        return with_operator_state(steps, self.worker_host(process, checkpoint, 0), partitions)

    def parallelism_of(self, process: Process) -> int:
        """That of the run: of all its epochs."""
        if process.name not in self._parallelism_of:
            is_other = self._world.plan.strikes(Fault.RESCALED)
            drawn = self._world.dice.randint(1, MAX_PARALLELISM) if is_other else self.parallelism
            self._parallelism_of[process.name] = drawn
        return self._parallelism_of[process.name]

    def _ttl_ms(self, process: Process) -> int:
        """The time to live of a run's state: that of the run before, if the program is the same."""
        if process.name not in self._ttl_ms_of:
            before_ms = [0, *self._ttl_ms_of.values()][-1]
            is_other = self._world.plan.strikes(Fault.PROGRAM_CHANGED)
            self._ttl_ms_of[process.name] = LASTING_MS - before_ms if is_other else before_ms
        return self._ttl_ms_of[process.name]

    def worker_host(self, process: Process, checkpoint: Checkpoint, index: int) -> WorkerHost:
        """Those of the host that a task is placed on: at home on one, and sometimes moved."""
        is_moved = self._world.plan.strikes(Fault.TASK_MOVED)
        host = self._world.dice.choice(self.hosts) if is_moved else self.hosts[index % HOST_COUNT]
        files = SimulatedStorage(self, process, checkpoint.location, checkpoint.files)
        return SimulatedWorkerHost(host, checkpoint.lineage, files, lambda: self._dawdle(process))

    def _dawdle(self, process: Process) -> None:
        """A longer moment: between looking at a copy and changing it others may do much."""
        for _ in range(self._world.dice.choice((1, 1, DAWDLE_MAX))):
            self._pause(process)

    def _pause(self, process: Process) -> None:
        """A moment in a task, in which others run, and a host may lose what it has."""
        self._world.advance(process)
        if self._world.plan.strikes(Fault.COPY_LOST):
            self._world.dice.choice(self.hosts).lose_all()
            self._world.tell(Fault.COPY_LOST.value)

    def send(self, process: Process, call: Call[Result]) -> Result:
        """A task's call to the checkpoint; see `storage.Sender`."""
        self._pause(process)
        own = (Fault.TASK_KILLED,) if process.resident is None else ()
        kinds = (*own, *(PUT_FAULTS if call.name == "put" else ()))
        fault = self._world.plan.pick(kinds)
        if fault is None:
            return self._world.arrive(process, call)
        self._world.tell(f"a task of {process.name} {call.name}: {fault.value}")
        if fault in LATE:
            self._world.post(process, call)
        if fault in EFFECT:
            self._world.arrive(process, call)
        if fault is Fault.TASK_KILLED:
            raise TaskKilledError
        raise call.unavailable(f"{call.name}: {fault.value}")


def unread_in(checkpoint: Checkpoint, epoch: int) -> EpochInput:
    """What an epoch reads."""
    starts, ends = checkpoint.start_of(epoch), checkpoint.offsets[epoch]
    ranges = {partition: range(starts[partition], end) for partition, end in ends.items()}
    rules = ranges.pop(RULES, None)
    if rules is None:
        return EpochInput(checkpoint.lineage, epoch, ranges, is_over=checkpoint.is_over)
    all_rules = range(checkpoint.beginning[RULES], rules.stop)
    return EpochInput(checkpoint.lineage, epoch, ranges, rules, all_rules)
