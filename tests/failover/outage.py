"""One outage of one broker, with many pipelines that stand at different steps when it begins."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from tallystick.errors import FencedError
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.testing import EmbeddedKafka
from tallystick.values import TopicPartition
from tests.failover.evidence import problems_of, read_committed, replay
from tests.failover.job import Death, Job, token_group, transactional_id
from tests.failover.known_rows import Shape
from tests.failover.steps import Step, Trap
from tests.failover.wire import coordinator_of

EPOCHS = 4
FAULTY_EPOCH = 1
DOWN_S = 5.0
"""Longer than the brokers' session: others take over what the broker had."""
PAUSE_S = 10.0
HEAD_START_S = 0.003
"""How long requests are under way when the broker goes."""
PATIENCE_S = 90.0


class Role(Enum):
    """What the broker that goes is to the pipeline."""

    LEADER = "it leads a partition that is written to"
    TRANSACTIONS = "it coordinates the transaction"
    GROUP = "it coordinates the group of the token"


class Fault(Enum):
    """What happens to the broker."""

    KILL = "SIGKILL, restarted after others took over"
    RESTART = "SIGKILL, restarted at once"
    PAUSE = "SIGSTOP for ten seconds: its connections stay open, and nothing answers"


@dataclass(frozen=True, slots=True)
class Case:
    """One pipeline in the outage.

    Args:
        role: what the broker is to it.
        step: where its epoch stands when the broker goes.
        dies: its driver dies at that moment too.
        patient: its calls may take longer than the outage; else its epochs fail, and its runs.
    """

    role: Role
    step: Step
    dies: bool = False
    patient: bool = True

    def __str__(self) -> str:
        more = ("" if self.patient else "-impatient") + ("-dies" if self.dies else "")
        return f"{self.role.name}-{self.step.name}{more}"


CASES = [
    *(Case(role, step) for role in Role for step in Step if step is not Step.FENCED),
    *(Case(role, step, dies=True) for role in Role for step in (Step.FENCED, Step.ENDING)),
    *(Case(Role.TRANSACTIONS, step, patient=False) for step in Step if step is not Step.FENCED),
]


@dataclass(slots=True)
class Outcome:
    """What became of one pipeline."""

    restarts: int = -1
    slowest_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Gate:
    """Holds pipelines at their steps until all are there, and lets them go around the fault."""

    def __init__(self, count: int) -> None:
        self._waiting = threading.Semaphore(0)
        self._count = count
        self._early, self._late = threading.Event(), threading.Event()

    def stand(self, *, early: bool) -> None:
        """Wait for the fault; who is early is let go right before it."""
        self._waiting.release()
        assert (self._early if early else self._late).wait(PATIENCE_S), "the fault never came"

    def strike(self, act: Callable[[], None]) -> None:
        """When all are there: the fault."""
        for _ in range(self._count):
            assert self._waiting.acquire(timeout=PATIENCE_S), "a pipeline never reached its step"
        self._early.set()
        time.sleep(HEAD_START_S)
        act()
        self._late.set()


def run_outage(
    kafka: EmbeddedKafka, topic: str, victim: int, fault: Fault, folder: Path
) -> dict[Case, Outcome]:
    """Take a broker out under the pipelines of all cases; what became of each."""
    client = Client(KafkaConfig(kafka.bootstrap_servers, client_id="outage"))
    shapes = dict(zip(CASES, _shapes(client, topic, victim), strict=True))
    gate = Gate(len(CASES))
    with ThreadPoolExecutor(len(CASES)) as pool:
        running = {
            case: pool.submit(_run, case, shapes[case], kafka.bootstrap_servers, folder, gate)
            for case in CASES
        }
        with _struck(kafka, victim, fault, gate):
            outcomes = {case: future.result() for case, future in running.items()}
    kafka.wait_until_in_sync()
    _judge(kafka, client, topic, shapes, outcomes)
    client.close()
    return outcomes


@contextmanager
def _struck(kafka: EmbeddedKafka, victim: int, fault: Fault, gate: Gate) -> Iterator[None]:
    """The fault, from its beginning to its end."""
    if fault is Fault.PAUSE:
        gate.strike(lambda: kafka.pause(victim))
        time.sleep(PAUSE_S)
        kafka.resume(victim)
    else:
        gate.strike(lambda: kafka.kill(victim))
        time.sleep(DOWN_S if fault is Fault.KILL else 0.0)
        kafka.restart(victim)
    yield


def _run(case: Case, shape: Shape, servers: str, folder: Path, gate: Gate) -> Outcome:
    """All epochs of one pipeline; the second one stands at the gate."""
    outcome = Outcome()

    def reached() -> None:
        gate.stand(early=case.step is Step.ENDING)
        if case.dies:
            raise Death(str(case))

    trap = Trap(case.step, reached)
    job = Job(
        shape,
        _config(case, servers, shape.pipeline),
        folder / shape.pipeline,
        on_start=trap.on_start,
        on_event=trap.on_event,
        midway=trap.midway,
    )
    try:
        job.run_until(FAULTY_EPOCH)
        before = job.restarts
        trap.arm()
        if case.step is Step.FENCED:
            job.close()
        while job.logged < EPOCHS:
            began = time.monotonic()
            _run_one(job, case)
            outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - began)
        outcome.restarts = job.restarts - before
        outcome.errors = job.errors
    except Exception as error:
        outcome.problems.append(f"ended with {type(error).__name__}: {error}")
    finally:
        job.close()
    return outcome


def _run_one(job: Job, case: Case) -> None:
    """One epoch. Who gives up a call too early may find traces that it cannot tell from another's.

    (A coordinator that took over knows no repeated InitProducerId.) It stops then, which is safe.
    """
    try:
        job.run_until(job.logged + 1)
    except FencedError as error:
        if case.patient:
            raise
        job.errors.append(str(error))
        job.restart()
        job.run_until(job.logged + 1)


def _config(case: Case, servers: str, client_id: str) -> KafkaConfig:
    config = KafkaConfig(servers, client_id=client_id)
    if not case.patient:
        return replace(
            config, connection_timeout_ms=300, request_timeout_ms=400, delivery_timeout_ms=700
        )
    if case.role is Role.LEADER:  # a marker that comes late is waited for over many answers
        return replace(config, request_timeout_ms=1_000)
    return config


def _judge(
    kafka: EmbeddedKafka,
    client: Client,
    topic: str,
    shapes: dict[Case, Shape],
    outcomes: dict[Case, Outcome],
) -> None:
    count = len(kafka.nodes)
    seen = read_committed(kafka.confluent_options(), topic, count)
    parts = replay(client, topic, count)
    for case, outcome in outcomes.items():
        outcome.problems += problems_of(shapes[case], EPOCHS, seen, parts)


def _shapes(client: Client, topic: str, victim: int) -> Iterator[Shape]:
    """For each case a pipeline to which the victim is just what the case says."""
    partitions = [TopicPartition(topic, partition) for partition in range(3)]
    led = client.by_leader(partitions, client.deadline())
    others = tuple(
        p.partition
        for node, led_partitions in led.items()
        if node != victim
        for p in led_partitions
    )
    assert 0 < len(others) < len(partitions), f"broker {victim} should lead one of three: {led}"
    for case in CASES:
        written = tuple(range(3)) if case.role is Role.LEADER else others
        name = _name(client, case, victim)
        shape = Shape(name, topic, written)
        yield shape.spanning_groups() if case.step is Step.WROTE_HALF else shape


def _name(client: Client, case: Case, victim: int) -> str:
    """Coordinators follow from a hash of the name: try one name after the other."""
    for number in range(1_000):
        name = f"{case}-{victim}-{number}"
        transactions = coordinator_of(client, "transaction", transactional_id(name)) == victim
        group = coordinator_of(client, "group", token_group(name)) == victim
        wanted = case.role is Role.TRANSACTIONS, case.role is Role.GROUP
        if (transactions, group) == wanted:
            return name
    raise AssertionError(f"broker {victim} coordinates nothing")
