"""One run: a job, a steady input, the faults of a schedule, and an independent reader.

All times are seconds after the run began, by one clock that also stamps the input.
"""

import json
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from confluent_kafka import Producer

from benchmarks.harness.workspace import Workspace
from tallystick.testing.kafka import EmbeddedKafka
from tallystick_tools.chaos.cluster import Cluster, OutputRecord, Witness, read_all
from tallystick_tools.chaos.program import python_workers
from tallystick_tools.chaos.proxy import END_TXN

from .audit import Audit, Event, Update, audit
from .parts import Parts, state_of
from .schedule import Fault
from .systems import Setting, System

PARTITIONS = 4
USERS = 1_000
RECORDS_PER_S = 1_000
TICK_S = 0.05
FIRST_OUTPUT_S = 300.0
OWN_ENDS_MAX = 3
QUIET_S = 60.0
"""The longest time without new committed output, after the end of the input."""
AFTER_ALL_S = 3.0
"""The time for more than is expected to come."""
GONE_S = 5.0
RECOVERY_S = 180.0
NEWEST = 1_000
CAUGHT_S = 30.0
POLL_S = 0.1
CONTROLLER = re.compile(r"Becoming the active controller at epoch (\d+)")
"""In the log of a node."""


@dataclass
class Hit:
    """A fault that was carried out.

    Args:
        kind: Of the fault.
        at_s: When it began.
        hit: What it hit; "": nothing.
        first_s: How long after that an update of a later event was committed.
        every_s: How long until there was one in every partition.
    """

    kind: str
    at_s: float
    hit: str
    first_s: float | None = None
    every_s: float | None = None


@dataclass
class Run:
    """A run, as it was seen.

    Args:
        audit: The judgment of its output.
        hits: The faults.
        problems: What must not be, besides.
        starts: Of all processes.
        own_ends: Of processes that nobody killed.
        seconds: Its length.
        load: The load of the machine at its start, in processes that want to run.
    """

    audit: Audit
    hits: list[Hit]
    problems: list[str]
    starts: int
    own_ends: list[str]
    seconds: float
    load: float
    log_folder: Path = field(default_factory=Path)


def active_controller(kafka: EmbeddedKafka) -> int:
    """Return the node that became the active controller last, by the nodes' logs.

    Without it Kafka takes 5 s until partitions have new leaders, and 3 s without another broker.
    """
    candidates = [
        (int(epoch), node.node_id)
        for node in kafka.nodes
        for epoch in CONTROLLER.findall(node.log_path.read_text(errors="replace"))
    ]
    return max(candidates)[1]


class Feed:
    """Writes events at a steady rate, in a thread of its own, until it is closed."""

    def __init__(self, cluster: Cluster, seed: int, now: Callable[[], float]) -> None:
        self.errors: list[str] = []
        self.written = 0
        (self._topic,) = cluster.inputs
        self._now = now
        self._chance = random.Random(seed)
        self._producer = Producer(
            {
                "bootstrap.servers": cluster.direct,
                "enable.idempotence": True,
                "linger.ms": 50,
                "message.timeout.ms": 300_000,
                "queue.buffering.max.messages": 1_000_000,
                "log_level": 0,
            }
        )
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, when all that was written is acknowledged."""
        self._is_over.set()
        self._thread.join()
        self._producer.flush()

    def _write(self) -> None:
        began = time.monotonic()
        while not self._is_over.wait(TICK_S):
            due = int((time.monotonic() - began) * RECORDS_PER_S)
            while self.written < due:
                user = self._chance.randrange(USERS)
                ts = int(self._now() * 1000)
                value = {"user": f"u{user}", "amount": self._chance.randrange(1, 100), "ts": ts}
                self._producer.produce(
                    self._topic,
                    json.dumps(value).encode(),
                    value["user"].encode(),
                    user % PARTITIONS,
                    on_delivery=self._on_delivery,
                )
                self.written += 1
            self._producer.poll(0)

    def _on_delivery(self, error: object, message: object) -> None:
        if error is not None:
            self.errors.append(f"the input could not be written: {error}")


class Course:
    """The course of a run."""

    def __init__(self, cluster: Cluster, parts: Parts, witness: Witness, began: float) -> None:
        self._cluster, self._parts, self._witness, self._began = cluster, parts, witness, began
        self.hits: list[Hit] = []

    def now(self) -> float:
        """Return the time, in seconds after the beginning."""
        return time.monotonic() - self._began

    def wait_for_output(self) -> None:
        """Wait for the first committed update.

        Raises:
            TimeoutError: There is none.
        """
        end = self.now() + FIRST_OUTPUT_S
        while not self._witness.seen:
            if self.now() > end or len(self._parts.own_ends) > OWN_ENDS_MAX:
                raise TimeoutError(f"no output in {self.now():.0f} s; ends: {self._parts.own_ends}")
            time.sleep(POLL_S)

    def inject_all(self, faults: Sequence[Fault], say: Callable[[str], None]) -> None:
        """Carry out all faults, each at its time, or when the job is back from the one before."""
        for fault in faults:
            time.sleep(fault.gap_s)
            self.wait_for_recovery()
            hit = Hit(fault.kind, self.now(), "")
            hit.hit = self._inject(fault, hit)
            self.hits.append(hit)
            say(f"  {hit.at_s:6.1f} s  {fault.kind}: {hit.hit or 'there was nothing to hit'}")

    def wait_for_end(self, expected: int) -> list[str]:
        """Wait until as much is committed as is expected, or nothing more comes."""
        count, moved = -1, self.now()
        while self.now() - moved < QUIET_S:
            if len(self._witness.seen) != count:
                count, moved = len(self._witness.seen), self.now()
            if count >= expected:
                break
            time.sleep(POLL_S)
        time.sleep(AFTER_ALL_S)
        outputs = self._cluster.outputs
        ends = [
            self._cluster.ends(outputs, committed=is_committed) for is_committed in (True, False)
        ]
        return [] if ends[0] == ends[1] else ["a transaction is still open at the end"]

    def wait_for_recovery(self) -> None:
        """Wait until an event that was made after the last fault has led to output."""
        if not self.hits:
            return
        end, began_ms = self.now() + RECOVERY_S, self.hits[-1].at_s * 1000
        while self.now() < end:
            newest = list(self._witness.seen.values())[-NEWEST:]
            if any(update(record).ts > began_ms for record in newest):
                return
            time.sleep(POLL_S)

    def _inject(self, fault: Fault, hit: Hit) -> str:
        """Carry out a fault to its end; return what it hit."""
        match fault.kind:
            case "job":
                roots = self._parts.roots()
                count = self._parts.kill_all()
                return (
                    f"{count} processes" if _are_gone([root.process.pid for root in roots]) else ""
                )
            case "worker":
                return self._kill_worker(fault, hit)
            case "pause":
                return self._pause(fault)
            case "broker":
                return self._kill_broker(fault)
            case "before-commit" | "after-commit" | "outage":
                return self._kill_at_commit(fault, hit)
        raise AssertionError(fault.kind)

    def _kill_worker(self, fault: Fault, hit: Hit) -> str:
        system = self._parts.system
        life = self._parts.life(system.worker)
        if not system.has_workers_below:
            self._parts.kill(system.worker)
            pid = life.process.pid
            return f"process {pid}" if _are_gone([pid]) else ""
        end = self.now() + CAUGHT_S
        while self.now() < end:
            workers = python_workers(life.processes())
            if workers:
                chosen = workers[int(fault.pick * len(workers))]
                hit.at_s = self.now()
                chosen.send(signal.SIGKILL)
                what = f"process {chosen.pid}, one of {len(workers)}"
                return what if _are_gone([chosen.pid]) else ""
            time.sleep(POLL_S)
        return ""

    def _pause(self, fault: Fault) -> str:
        process = self._parts.life(self._parts.system.coordinator).process
        process.send_signal(signal.SIGSTOP)
        time.sleep(fault.length_s)
        stood_still = state_of(process.pid) == "T"
        process.send_signal(signal.SIGCONT)
        return f"process {process.pid} for {fault.length_s:.0f} s" if stood_still else ""

    def _kill_broker(self, fault: Fault) -> str:
        kafka = self._cluster.kafka
        node = kafka.nodes[int(fault.pick * len(kafka.nodes))].node_id
        what = f"broker {node}" + ", the active controller" * (node == active_controller(kafka))
        kafka.kill(node)
        is_gone = not kafka.is_running(node)
        time.sleep(fault.length_s)
        kafka.restart(node)
        return what if is_gone else ""

    def _kill_at_commit(self, fault: Fault, hit: Hit) -> str:
        # What they started is found again when they are gone.
        count = sum(len(life.processes()) for life in self._parts.roots())
        roots = [root.process.pid for root in self._parts.roots()]

        def die() -> None:
            hit.at_s = self.now()
            self._parts.kill_roots()

        loss = "lose-reply" if fault.kind == "after-commit" else "lose-request"
        proxies = self._cluster.proxies
        self._parts.hold()
        trap = proxies.set_trap(loss, [END_TXN], commits_only=True, then=die)
        caught = trap.caught.wait(CAUGHT_S)
        proxies.remove_trap()
        self._parts.kill_all(fault.length_s)
        what = f"EndTxn, and {count} processes"
        return what if caught and _are_gone(roots) else ""


def run(
    cluster: Cluster,
    system: System,
    seed: int,
    faults: tuple[Fault, ...],
    workspace: Workspace,
    say: Callable[[str], None],
    **options: int,
) -> Run:
    """Run a job under a schedule, and judge its output.

    Args:
        cluster: With all its brokers running; its topics are used no more than once.
        system: Whose job.
        seed: Of the input.
        faults: The schedule.
        workspace: With what was built.
        say: Is told what happens.
        options: Of `Setting`.
    """
    load = os.getloadavg()[0]
    name = f"{system.name}-{seed}-{faults[0].kind}"
    folder = Path(tempfile.mkdtemp(prefix=f"tallystick-kills-{name}-"))
    events, updates = f"events-{name}", f"updates-{name}"
    for topic in (events, updates):
        cluster.kafka.create_topic(topic, PARTITIONS)
    cluster = replace(cluster, inputs=(events,), outputs=(updates,), partitions=PARTITIONS)
    servers = cluster.proxies.bootstrap_servers
    setting = Setting(name, servers, events, updates, folder / "job", workspace, **options)
    system.prepare(setting)
    witness, began = Witness(cluster), time.monotonic()
    feed = Feed(cluster, seed, lambda: time.monotonic() - began)
    parts = Parts(system, setting)
    course = Course(cluster, parts, witness, began)
    try:
        course.wait_for_output()
        course.inject_all(faults, say)
        course.wait_for_recovery()
        feed.close()
        problems = course.wait_for_end(feed.written) + feed.errors[:3]
        rows = read_all(cluster)
    finally:
        feed.close()
        parts.close()
        witness.close()
    written = read_all(replace(cluster, outputs=(events,)))
    measure(course.hits, witness, began)
    problems += witness.problems[:3]
    if len(written) != feed.written:
        problems.append(f"{feed.written} events were written, {len(written)} are there")
    return Run(
        audit(map(event, written), map(update, rows)),
        course.hits,
        problems + [f"nothing was hit: {hit.kind}" for hit in course.hits if not hit.hit],
        parts.starts.total(),
        parts.own_ends,
        course.now(),
        load,
        folder,
    )


def measure(hits: Sequence[Hit], witness: Witness, began: float) -> None:
    """Find out when the reader first saw updates of events after each fault."""
    seen = sorted(
        (witness.seen_at[place] - began, place[1], update(record).ts / 1000)
        for place, record in witness.seen.items()
    )
    for hit in hits:
        waiting = set(range(PARTITIONS))
        for at_s, partition, event_s in seen:
            if event_s > hit.at_s and at_s > hit.at_s and partition in waiting:
                if hit.first_s is None:
                    hit.first_s = round(at_s - hit.at_s, 2)
                waiting.remove(partition)
                if not waiting:
                    hit.every_s = round(at_s - hit.at_s, 2)
                    break


def event(record: OutputRecord) -> Event:
    """Return a record of the input."""
    return Event(**json.loads(record.value or b""))


def update(record: OutputRecord) -> Update:
    """Return a record of the output."""
    fields = json.loads(record.value or b"")
    return Update(fields["user"], fields["count"], fields["sum"], fields["ts"])


def _are_gone(pids: Sequence[int]) -> bool:
    end = time.monotonic() + GONE_S
    while any(state_of(pid) not in ("", "Z") for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True
