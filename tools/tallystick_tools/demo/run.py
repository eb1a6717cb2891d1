"""The demo from beginning to end: broker, data, pipeline, kills, audit, verdict."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch.micro_batches import settled_path
from tallystick.storage.file_storage import FileStorage
from tallystick.testing.kafka import EmbeddedKafka
from tallystick_tools.demo import chaos, flights
from tallystick_tools.demo.audit import Verdict, audit, audit_state, read_all, read_counts
from tallystick_tools.demo.job import NAME

STALL_S = 120.0
"""No progress for so long means that the pipeline hangs, and the demo has failed."""
NO_COORDINATOR = {
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}
"""Errors that pass by themselves, of a group whose topic a broker is still creating."""
PARALLELISMS = (1, 2, 3, 5, 2, 3)
"""The number of counting tasks in each run; some runs return to old copies of state."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The settings of a demo.

    Args:
        kills: how often the pipeline is killed; the first three at the protocol's crash points.
        records: how many flights; None: all 336,776.
        rate: records per second into the input topic while the pipeline runs; None: all at once.
        seed: repeats a kill schedule.
        stateless: leave out the counts by destination, and with them all keyed state.
        ui_port: serve the page of the pipeline there, while it runs; None: nowhere.
    """

    kills: int = 5
    records: int | None = None
    rate: float | None = None
    seed: int = 1
    stateless: bool = False
    ui_port: int | None = None


class DemoError(Exception):
    """The pipeline ended by itself, or hangs: the demo cannot go on."""


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Run the demo; print a JSON object as the last line. Return whether the output is exact."""
    began = time.monotonic()
    data = flights.load(options.records)
    wanted = flights.expected(data)
    console.print(f"[bold]{len(data):,}[/] flights, of which [bold]{len(wanted):,}[/] flew")
    with _folder() as folder, EmbeddedKafka() as kafka:
        console.print(f"Kafka runs at {kafka.bootstrap_servers}")
        kafka.create_topic(flights.TOPIC_IN, flights.PARTITIONS)
        kafka.create_topic(flights.TOPIC_OUT, flights.PARTITIONS)
        feed = Feed(kafka.bootstrap_servers, data, options.rate)
        kills = survive(kafka.bootstrap_servers, feed, options, folder, console)
        console.print("auditing with confluent-kafka, read_committed, against the source data")
        output = read_all(kafka.bootstrap_servers, flights.TOPIC_OUT)
        verdict = audit(output, wanted, key="carrier" if options.stateless else "dest")
        if not options.stateless:
            verdict = _with_state(verdict, wanted, folder, console)
    _print_table(verdict, len(data), len(wanted), kills, console)
    line = {
        "input": len(data),
        "expected": len(wanted),
        **asdict(verdict),
        "kills": kills,
        "seconds": round(time.monotonic() - began, 1),
    }
    console.file.write(json.dumps(line) + "\n")
    console.file.flush()
    return verdict.exact


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield the folder of the demo; dying processes may still write there at the removal."""
    with tempfile.TemporaryDirectory(
        prefix="tallystick-demo-", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def _with_state(verdict: Verdict, wanted: pd.DataFrame, folder: Path, console: Console) -> Verdict:
    """Add the number of wrong counts in the state to a verdict."""
    console.print("auditing the state: read_state on the checkpoint's files")
    counts = read_counts(folder / "checkpoint", folder / "job.log")
    if counts is None:
        raise DemoError(f"the state could not be read:\n{chaos.tail(folder / 'job.log')}")
    wrong = audit_state(counts, flights.expected_counts(wanted))
    console.print(f"{len(counts)} destinations have a count, {wrong} of them a wrong one")
    return replace(verdict, wrong=verdict.wrong + wrong)


class Feed:
    """A writer of the flights to the input topic, all at once or at a rate."""

    def __init__(self, bootstrap_servers: str, data: pd.DataFrame, rate: float | None) -> None:
        self._keys, self._values = flights.to_messages(data)
        self._rate = rate
        self._began = time.monotonic()
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "linger.ms": 20,
                "log_level": 2,
                "queue.buffering.max.messages": 1_000_000,
            }
        )
        self.written = 0
        self.total = len(self._values)

    def step(self) -> None:
        """Write the flights due by now."""
        due = self.total
        if self._rate is not None:
            due = min(due, int((time.monotonic() - self._began) * self._rate))
        for row in range(self.written, due):
            self._producer.produce(flights.TOPIC_IN, self._values[row], self._keys[row])
        self._producer.flush()
        self.written = max(self.written, due)


class Positions:
    """The progress of the pipeline, by the offsets of its consumer group."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": f"tallystick-{NAME}",
                "log_level": 2,
            }
        )
        self._partitions = [TopicPartition(flights.TOPIC_IN, p) for p in range(flights.PARTITIONS)]
        self._newest = 0

    def read(self) -> int:
        """Return how many records the group has committed; the input topic has no transactions.

        As long as a young broker has no coordinator for the group, return the last answer.
        """
        try:
            committed = self._consumer.committed(self._partitions, timeout=20.0)
        except KafkaException as error:
            if error.args[0].code() not in NO_COORDINATOR:
                raise
        else:
            self._newest = sum(max(0, partition.offset) for partition in committed)
        return self._newest

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()


def survive(
    bootstrap_servers: str, feed: Feed, options: DemoOptions, folder: Path, console: Console
) -> int:
    """Start the pipeline, kill it as planned, restart it, until all input is processed."""
    epoch_records = max(1, feed.total // (6 * (options.kills + 1)))
    arguments = [
        "--bootstrap-servers",
        bootstrap_servers,
        "--checkpoint",
        str(folder / "checkpoint"),
    ]
    arguments += ["--epoch-records", str(epoch_records)]
    if options.ui_port is not None:
        arguments += ["--ui-port", str(options.ui_port)]
        console.print(f"a page about it, while it runs: http://127.0.0.1:{options.ui_port}/")
    copies = chaos.Copies(folder)
    positions = Positions(bootstrap_servers)
    kills = 0
    with _progress(console) as progress:
        bar = progress.add_task("starting", total=feed.total)
        for kill in [*chaos.plan(options.kills, options.seed), None]:
            tasks = PARALLELISMS[kills % len(PARALLELISMS)]
            kind = ["--stateless"] if options.stateless else ["--parallelism", str(tasks)]
            with chaos.Victim([*arguments, *kind], kill, folder / "job.log", copies.path) as victim:
                _watch(victim, feed, positions, lambda n: progress.update(bar, completed=n))
                if victim.alive:  # it has read everything
                    _wait_until_settled(folder / "checkpoint")
                    break
            if kill is None or not victim.was_killed:
                raise DemoError(f"the pipeline ended by itself:\n{victim.error_text}")
            kills += 1
            progress.update(bar, description=f"restarting after kill {kills}")
            console.print(f"kill -9 number {kills}: {kill}")
            if not options.stateless:
                fate = copies.suffer(kill.copies)
                console.print(f"  tasks that counted: {tasks}; local copies of the state: {fate}")
    positions.close()
    return kills


def _watch(
    victim: chaos.Victim, feed: Feed, positions: Positions, show: Callable[[int], None]
) -> None:
    """Wait until the pipeline has read everything, or is dead."""
    moved, last = time.monotonic(), -1
    while victim.alive:
        feed.step()
        now = positions.read()
        show(now)
        if feed.written == feed.total and now >= feed.total:
            return
        if now != last:
            moved, last = time.monotonic(), now
        if time.monotonic() - moved > STALL_S:
            raise DemoError(f"no progress for {STALL_S:.0f} s:\n{victim.error_text}")
        time.sleep(0.1)


def _wait_until_settled(checkpoint: Path) -> None:
    """Wait until the pipeline, at rest, has noted its last epoch: the audit needs no Kafka then."""
    deadline = time.monotonic() + STALL_S
    folder = CheckpointFolder(FileStorage(str(checkpoint)))
    while time.monotonic() < deadline:
        if settled_path(folder.manifest_paths()[-1]) in folder.files():
            return
        time.sleep(0.1)
    raise DemoError(f"the last epoch was not noted as settled within {STALL_S:.0f} s")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _print_table(
    verdict: Verdict, flights_read: int, wanted: int, kills: int, console: Console
) -> None:
    table = Table(title=f"{kills} times kill -9, then the audit")
    table.add_column("what")
    table.add_column("records", justify="right")
    for what, count in (
        ("flights in", flights_read),
        ("expected out (cancelled ones dropped)", wanted),
        ("found out", verdict.output),
        ("lost", verdict.lost),
        ("duplicated", verdict.duplicated),
        ("wrong", verdict.wrong),
        ("out of order", verdict.out_of_order),
    ):
        table.add_row(what, f"{count:,}")
    console.print(table)
    console.print("[green]exactly once[/]" if verdict.exact else "[red]NOT exactly once[/]")
