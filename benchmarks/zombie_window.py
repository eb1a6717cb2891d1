"""Measure how long a second attempt of a task can get rows into an epoch, and that all are found.

    .venv/bin/python benchmarks/zombie_window.py [--brokers 1,3] [--epochs 300]

The real driver runs epochs that a stand-in for Spark writes: 12 rows to each of 4 partitions. The
window is from the request of its last count to the transaction's marker in every partition, as the
driver itself sees it. Then a zombie comes to each epoch, in a process of its own: at the worst
moment, right after the count; or at a random one after the tasks have ended. It writes as fast as
it can with the right next sequence numbers. The logs say what became visible, an independent
consumer too; the driver has to have told of all of it, or this ends with an error.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import results
from harness.broker import start_broker

sys.path.insert(0, str(Path(__file__).parents[1]))

from confluent_kafka.admin import AdminClient, NewTopic

from tallystick.epoch import protocol as c
from tallystick.kafka import protocol
from tallystick.kafka.broker import EPOCH_BY_END_TXN, KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tests.failover.evidence import problems_of, read_committed, replay, visible_zombies
from tests.failover.job import Job
from tests.failover.known_rows import ZOMBIE, Shape
from tests.failover.zombies import HauntedEpoch, Zombie, run_haunted

HERE = Path(__file__).resolve().parent
PARTITIONS = 4
WARM_UP = 30
PARTS = ("count", "until EndTxn", "EndTxn", "until the markers are seen")
TAIL = "tasks to markers"
WINDOW = "window"
SPREAD = 1.5
"""A random moment lies in so many times the median of an epoch's rest after its tasks."""
SEED = 1


def main() -> None:
    """Measure on clusters of our own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--brokers", default="1,3")
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    arguments = parser.parse_args()
    for nodes in map(int, arguments.brokers.split(",")):
        with start_broker(arguments.work.resolve() / "zombie-window" / "broker", nodes) as broker:
            measured = measure(broker.bootstrap, nodes, arguments.epochs)
        print(f"\n{nodes} brokers, {arguments.epochs} epochs each; ms\n")
        print(results.markdown(["", "p50", "p99", "max"], list(rows_of(measured["times_ms"]))))
        print()
        for name in ("after the count", "at random"):
            print(f"a zombie {name}: {measured[name]}")
        config = {**results.environment(HERE), "brokers": nodes, "epochs": arguments.epochs}
        results.append_row(arguments.results, "zombie_window", measured, config=config)


def rows_of(times_ms: dict[str, list[float]]) -> Iterator[list[str]]:
    """Lines of the table."""
    for name, figures in times_ms.items():
        yield [name, *(f"{figure:.1f}" for figure in figures)]


def measure(bootstrap: str, nodes: int, epochs: int) -> dict[str, Any]:
    """All figures of one cluster."""
    config = KafkaConfig(bootstrap, client_id="zombie-window")
    with tempfile.TemporaryDirectory() as folder:
        topics = {name: create_topic(bootstrap, name, nodes) for name in ("window", "after", "any")}
        jobs = {
            name: Job(Shape(name, topic, tuple(range(PARTITIONS))), config, Path(folder, name))
            for name, topic in topics.items()
        }
        times = quiet_times(jobs["window"], epochs)
        rest_s = SPREAD * statistics.median(times[TAIL]) / 1000
        chance = random.Random(SEED)
        after = haunted(jobs["after"], epochs, c.OutputCounted, lambda: 0.0)
        anytime = haunted(jobs["any"], epochs, c.EpochRan, lambda: chance.uniform(0.0, rest_s))
    times_ms = {name: quantiles(times_ms_of_kind) for name, times_ms_of_kind in times.items()}
    load = round(os.getloadavg()[0], 1)
    return {"times_ms": times_ms, "load": load, "after the count": after, "at random": anytime}


def create_topic(bootstrap: str, name: str, nodes: int) -> str:
    """A topic with as many replicas as there are nodes."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, PARTITIONS, nodes)])[name].result(60)
    return name


def quantiles(figures: Iterable[float]) -> list[float]:
    """The median, the 99th percentile and the maximum."""
    ordered = sorted(figures)
    return [round(ordered[int(len(ordered) * q)], 2) for q in (0.5, 0.99)] + [round(ordered[-1], 2)]


class Requests:
    """When which request of a broker port's client was sent and answered."""

    def __init__(self) -> None:
        self.sent: dict[str, float] = {}
        """The first of each kind, since it was cleared."""
        self.answered: dict[str, float] = {}
        """The last of each kind."""

    def watch(self, broker: KafkaBroker) -> None:
        """Begin with a port that is new."""
        network = broker.client.network
        post, wait, names = network.post, network.wait, dict[int, str]()

        def post_watched(node: int, request: Any, deadline: float) -> Any:
            name, now = protocol.api_name(request), time.perf_counter()
            posted = post(node, request, deadline)
            self.sent.setdefault(name, now)
            names[id(posted)] = name
            return posted

        def wait_watched(posted: Any, deadline: float) -> Any:
            answer = wait(posted, deadline)
            self.answered[names.pop(id(posted))] = time.perf_counter()
            return answer

        network.post, network.wait = post_watched, wait_watched  # type: ignore[method-assign]


def quiet_times(job: Job, epochs: int) -> dict[str, list[float]]:
    """The times of each epoch without a zombie, in ms."""
    requests, at = Requests(), dict[type, float]()
    job.on_start = requests.watch
    job.on_event = lambda event: at.update({type(event): time.perf_counter()})
    job.run_until(WARM_UP)
    times: dict[str, list[float]] = {name: [] for name in (*PARTS, WINDOW, TAIL)}
    for _ in range(epochs):
        requests.sent.clear()
        job.run_next()
        assert job.restarts == 0
        sent, answered = requests.sent, requests.answered
        seen = at[c.OutputConfirmed]
        steps = [sent["DescribeProducers"], answered["DescribeProducers"]]
        steps += [sent["EndTxn"], answered["EndTxn"], seen]
        for name, begin, end in zip(PARTS, steps, steps[1:], strict=False):
            times[name].append((end - begin) * 1000)
        times[WINDOW].append((seen - steps[0]) * 1000)
        times[TAIL].append((seen - at[c.EpochRan]) * 1000)
    job.close()
    return times


def haunted(job: Job, epochs: int, at: type, after_s: Callable[[], float]) -> dict[str, int]:
    """How many epochs went which way, with a zombie in each.

    Raises:
        AssertionError: a row is visible that was not told, or a row of the job is not exact.
    """
    with zombie_of(job) as zombie:
        job.run_until(WARM_UP)
        haunted_epochs = list(run_haunted(job, zombie, epochs, at, after_s=after_s))
    job.close()
    rows = check(job, haunted_epochs)
    with_rows = [epoch for epoch in haunted_epochs if epoch.reported]
    return {
        "epochs": len(haunted_epochs),
        "with rows committed, and told": len(with_rows),
        "run again, since the count found rows": sum(epoch.is_repeated for epoch in haunted_epochs),
        "too late": sum(not epoch.accepted for epoch in haunted_epochs),
        "rows committed": rows,
        "rows told": sum(sum(epoch.reported.values()) for epoch in with_rows),
    }


@contextmanager
def zombie_of(job: Job) -> Iterator[Zombie]:
    """A zombie that writes where a job writes."""
    zombie = Zombie(job.config.bootstrap_servers, job.shape.topic, EPOCH_BY_END_TXN)
    try:
        yield zombie
    finally:
        zombie.close()


def check(job: Job, haunted_epochs: list[HauntedEpoch]) -> int:
    """Compare what was told with the logs, and with a consumer; return the rows committed."""
    client, topic = Client(job.config), job.shape.topic
    parts = replay(client, topic, PARTITIONS)
    client.close()
    seen = read_committed({"bootstrap.servers": job.config.bootstrap_servers}, topic, PARTITIONS)
    visible = visible_zombies(parts)
    reported = {
        (epoch.epoch, part): count
        for epoch in haunted_epochs
        for part, count in epoch.reported.items()
    }
    assert reported == visible, f"told of {reported}, and visible is {visible}"
    assert sum(rows.count(ZOMBIE) for rows in seen.values()) == sum(visible.values())
    assert problems_of(job.shape, job.logged, seen, parts) == []
    return sum(visible.values())


if __name__ == "__main__":
    main()
