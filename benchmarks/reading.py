"""How fast one topic is read, and by how much CPU: confluent-kafka, Spark's connector, and ours.

    .venv/bin/python benchmarks/reading.py [--records N] [--rounds N] [--partitions N]

All readers stay up and take turns, each round in the opposite order; the first round warms up and
does not count. Medians; `README.md` says what each column means.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from harness import results
from harness.broker import start_broker
from harness.measure import Broker
from harness.processes import Session, cpu_s, machine_cpu_s

HERE = Path(__file__).resolve().parent
TOPIC = "events"
RECORDS = 5_000_000
ROUNDS = 3
PARTITIONS = 4
CHUNK_RECORDS = 100_000
SEED = 42
USERS = 100_000
COUNTRIES = ("de", "fr", "us", "jp", "br", "in", "gb", "es")
FIRST_MS = 1_700_000_000_000
GRACE_S = 20.0
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Way:
    """One row of the table.

    Args:
        reader: the process, as in `reading_worker.READERS`.
        kind: `raw`, `value` (no other column), `json` or `fields` (those of the JSON alone).
        label: what the table calls it.
    """

    reader: str
    kind: str
    label: str


WAYS = {
    "a": Way("confluent", "raw", "confluent-kafka, consume(10 000)"),
    "b": Way("spark", "raw", "Spark's connector, raw"),
    "c": Way("ours", "raw", "ours in Spark, raw"),
    "b value": Way("spark", "value", "Spark's connector, value alone"),
    "c value": Way("ours", "value", "ours in Spark, value alone"),
    "d": Way("spark", "json", "Spark's connector, from_json"),
    "e": Way("ours", "json", "ours in Spark, JSON"),
    "d fields": Way("spark", "fields", "Spark's connector, from_json, fields alone"),
    "e fields": Way("ours", "fields", "ours in Spark, JSON, fields alone"),
    "f raw": Way("plan", "raw", "ours without Spark, raw"),
    "f json": Way("plan", "json", "ours without Spark, JSON"),
}
PEERS = {
    "c": ("a", "b"),
    "c value": ("a", "b value"),
    "e": ("a", "d"),
    "e fields": ("a", "d fields"),
    "f raw": ("a", "b"),
    "f json": ("a", "d"),
}
"""What each of ours is compared with: confluent-kafka, and Spark's connector."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one read of the whole topic took; `other_cpu_s`: of the rest of the machine."""

    wall_s: float
    cpu_s: float
    broker_cpu_s: float
    other_cpu_s: float


class Worker:
    """One process of `reading_worker.py`, and all that it starts."""

    def __init__(self, process: subprocess.Popen[str], broker: Broker) -> None:
        self._process = process
        self._broker = broker
        self._session = Session(process.pid)

    def wait_until_ready(self) -> None:
        """Until it can read."""
        self._answer()

    def read(self, kind: str) -> Cost:
        """Have it read the topic once."""
        before = self._cpu_s()
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind}\n")
        self._process.stdin.flush()
        wall_s = float(self._answer().split()[1])
        own, broker, machine = (now - then for now, then in zip(self._cpu_s(), before, strict=True))
        return Cost(wall_s, own, broker, machine - own - broker)

    def _cpu_s(self) -> tuple[float, float, float]:
        return self._session.cpu_s(), sum(map(cpu_s, self._broker.pids)), machine_cpu_s()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a reader ended with {self._process.wait()}; see its log")
        return line


def main() -> None:
    """Load, read in rounds, print the table, and add it to the results."""
    arguments = parse_arguments()
    directory = HERE / "work" / "reading"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with ExitStack() as stack:
        broker = stack.enter_context(start_broker(directory / "broker"))
        print(f"loading {arguments.records:,} records ...", flush=True)
        load(broker.bootstrap, arguments.records, arguments.partitions)
        ways = {name: WAYS[name] for name in arguments.only}
        workers = {}
        for reader in dict.fromkeys(way.reader for way in ways.values()):
            command = [reader, broker.bootstrap, TOPIC, str(arguments.records)]
            process = stack.enter_context(started(command, directory / f"{reader}.log"))
            workers[reader] = Worker(process, broker)
            workers[reader].wait_until_ready()
        costs = measure(ways, workers, arguments.rounds)
    print(table(ways, costs, arguments.records))
    config = {
        **results.environment(HERE),
        **{name: getattr(arguments, name) for name in ("records", "partitions")},
    }
    for name, costs_of_way in costs.items():
        for number, cost in enumerate(costs_of_way, 1):
            named = {**config, "way": WAYS[name].label, "round": number}
            results.append_row(arguments.results, "reading", asdict(cost), config=named)


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="beside the one that warms up")
    parser.add_argument("--partitions", type=int, default=PARTITIONS)
    parser.add_argument(
        "--only", type=_ways, default=list(WAYS), help=f"out of {', '.join(WAYS)}; default all"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    return parser.parse_args()


def _ways(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in WAYS]:
        raise argparse.ArgumentTypeError(f"{unknown}: expected some of {', '.join(WAYS)}")
    return names


def measure(ways: dict[str, Way], workers: dict[str, Worker], rounds: int) -> dict[str, list[Cost]]:
    """Let all ways take turns, and keep what all but the first round cost."""
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for round_number in range(rounds + 1):
        for name in ways if round_number % 2 else reversed(ways):
            cost = workers[ways[name].reader].read(ways[name].kind)
            print(f"round {round_number}: {ways[name].label}: {cost}", flush=True)
            if round_number:
                costs[name].append(cost)
    return costs


def table(ways: dict[str, Way], costs: dict[str, list[Cost]], records: int) -> str:
    """Medians of all ways, and the ratios that matter, in Markdown."""
    wall = {name: statistics.median(records / cost.wall_s for cost in costs[name]) for name in ways}
    core = {name: statistics.median(records / cost.cpu_s for cost in costs[name]) for name in ways}
    headings = ["", "reader", "records/s", "records/s per core", "broker CPU s / M", "other CPU s"]
    ratios = ["÷ confluent-kafka: records/s, per core", "÷ Spark's: records/s, per core"]
    rows = []
    for name, way in ways.items():
        middle = statistics.median(cost.broker_cpu_s for cost in costs[name]) / records * 1e6
        other = statistics.median(cost.other_cpu_s for cost in costs[name])
        row = [name, way.label, f"{wall[name]:,.0f}", f"{core[name]:,.0f}"]
        row += [f"{middle:.2f}", f"{other:.1f}"]
        row += [
            f"{wall[name] / wall[peer]:.2f}, {core[name] / core[peer]:.2f}" if peer in ways else ""
            for peer in PEERS.get(name, ("", ""))
        ]
        rows.append(row)
    return results.markdown([*headings, *ratios], rows)


def load(bootstrap: str, records: int, partitions: int) -> None:
    """Write the events through librdkafka, lz4; the same ones every time."""
    new = NewTopic(TOPIC, num_partitions=partitions, replication_factor=1)
    admin = AdminClient({"bootstrap.servers": bootstrap})  # its answers come while it lives
    admin.create_topics([new])[TOPIC].result(WAIT_S)
    config = {"compression.type": "lz4", "linger.ms": 50, "acks": 1}
    buffered = {"queue.buffering.max.messages": 1_000_000}
    producer = Producer({"bootstrap.servers": bootstrap, **config, **buffered})
    for number, (key, value) in enumerate(events(records)):
        while True:
            try:
                producer.produce(TOPIC, value, key, number % partitions)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(WAIT_S) == 0


def events(records: int) -> Iterator[tuple[str, str]]:
    """Keys and values like those of `run.py`'s input."""
    random = np.random.default_rng(SEED)
    for first in range(0, records, CHUNK_RECORDS):
        count = min(CHUNK_RECORDS, records - first)
        columns = zip(
            random.integers(0, USERS, count).tolist(),
            random.integers(0, 5000, count).tolist(),
            random.integers(100, 10_000, count).tolist(),
            random.integers(0, len(COUNTRIES), count).tolist(),
            random.integers(0, 2**32, count).tolist(),
            strict=True,
        )
        for number, (user, item, cents, country, session) in enumerate(columns, first):
            yield (
                f"u{user}",
                f'{{"user":"u{user}","item":"i{item}","ts":{FIRST_MS + number // 20},'
                f'"amount":{cents / 100:.2f},"country":"{COUNTRIES[country]}",'
                f'"session":"s{session:08x}"}}',
            )


@contextmanager
def started(arguments: Sequence[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A reader in a session of its own; on leaving, nothing of that session is left."""
    command = [sys.executable, str(HERE / "reading_worker.py"), *arguments]
    file: IO[bytes]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        Session(process.pid).end(GRACE_S)
        process.wait()


if __name__ == "__main__":
    main()
