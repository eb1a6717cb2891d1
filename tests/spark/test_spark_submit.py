"""The commands of docs/deploying.md for a cluster, as they stand there, and a lost machine."""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tallystick.host.java import spark_java_home
from tallystick.testing import EmbeddedKafka
from tallystick.testing.process import ProcessGroup, free_ports
from tests.spark import jvm
from tests.spark.topics import produce, read_committed
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
WAIT_S = 240.0
EXECUTORS = "spark.executor.extraJavaOptions"


def commands() -> tuple[str, str, str]:
    """The master's, a worker's, and the one that submits."""
    page = (ROOT / "docs" / "deploying.md").read_text()
    section = page.partition("## More machines")[2]
    master, worker, submit = re.findall(r"```bash\n(.*)\n```", section)
    return master, worker, submit


class Machines:
    """Processes that are machines to each other: addresses and disks of their own."""

    def __init__(self, folder: Path, kafka: EmbeddedKafka) -> None:
        self._folder, self._kafka = folder, kafka
        (self._port,) = free_ports(1, "127.0.0.1")
        self._groups: list[ProcessGroup] = []

    def run(self, name: str, command: str, address: str) -> ProcessGroup:
        """Type a command on a machine."""
        state = self._folder / name / "state"
        state.mkdir(parents=True)
        replacements = {
            "first": "127.0.0.1",
            "7077": str(self._port),
            "kafka:9092": self._kafka.bootstrap_servers,
            "/shared/late-flights": str(self._folder / "checkpoint"),
            "/var/lib/tallystick": str(state),
            "deploy/": f"{ROOT}/deploy/",
        }
        for placeholder, value in replacements.items():
            command = command.replace(placeholder, value)
        options = jvm.options()  # six JVMs: what counts is their start
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "JAVA_HOME": str(spark_java_home()),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "SPARK_LOCAL_IP": address,
            "SPARK_NO_DAEMONIZE": "1",
            "SPARK_WORKER_DIR": str(self._folder / name / "work"),
            "SPARK_DAEMON_MEMORY": "128m",
            "SPARK_DAEMON_JAVA_OPTS": options,
            "SPARK_SUBMIT_OPTS": f"{options} {shlex.quote(f'-D{EXECUTORS}={options}')}",
        }
        group = ProcessGroup()
        self._groups.append(group)
        group.spawn(["bash", "-c", command], self._folder / name / "log", env=environment)
        return group

    def close(self) -> None:
        """Switch all of them off."""
        for group in self._groups:
            group.close()

    def log(self, name: str) -> str:
        """The end of what a machine said."""
        return (self._folder / name / "log").read_text(errors="replace")[-3000:]


@contextmanager
def machines(folder: Path, kafka: EmbeddedKafka) -> Iterator[Machines]:
    machines_started = Machines(folder, kafka)
    try:
        yield machines_started
    finally:
        machines_started.close()


def test_the_commands_of_the_page_run_a_pipeline_that_outlives_a_machine(
    tidied_kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    master, worker, submit = commands()
    with machines(tmp_path, tidied_kafka) as all_of_them:
        options = tidied_kafka.confluent_options()
        for topic in ("flights", "late"):
            tidied_kafka.create_topic(topic, 2)

        def fly(first: int, count: int) -> None:
            rows = [
                {"id": n, "dest": f"D{n % 5}", "dep_delay": float(n % 40)}
                for n in range(first, first + count)
            ]
            produce(options, "flights", [(row["dest"], json.dumps(row)) for row in rows])

        def late() -> list[int]:
            return [
                json.loads(record.value or "")["id"] for record in read_committed(options, "late")
            ]

        def expected(count: int) -> list[int]:
            return [n for n in range(count) if n % 40 >= 15]

        def not_written(count: int) -> Callable[[], str]:
            return lambda: (
                f"expected {len(expected(count))} rows, found {len(late())}; the driver's log:\n"
                + all_of_them.log("driver")
            )

        all_of_them.run("master", master, "127.0.0.1")
        workers = [all_of_them.run(f"worker-{n}", worker, f"127.0.0.{n}") for n in (2, 3)]
        fly(0, 400)
        all_of_them.run("driver", submit, "127.0.0.1")
        wait_until(
            lambda: len(late()) == len(expected(400)),
            not_written(400),
            timeout_s=WAIT_S,
            poll_s=0.5,
        )

        workers[1].close()  # with its executor
        fly(400, 400)
        wait_until(
            lambda: len(late()) >= len(expected(800)),
            not_written(800),
            timeout_s=WAIT_S,
            poll_s=0.5,
        )

        assert sorted(late()) == expected(800)
        by_destination: dict[int, list[int]] = {}
        for ident in late():
            by_destination.setdefault(ident % 5, []).append(ident)
        assert all(rows == sorted(rows) for rows in by_destination.values())
        # In an epoch, or between two: that machine had a task, and Spark lost it.
        _, lost, _ = (tmp_path / "driver" / "log").read_text().partition("Lost executor")
        assert lost, "no executor was lost"
        ran = "".join(path.read_text() for path in (tmp_path / "worker-3").rglob("stderr"))
        assert "Running task" in ran, "it had no task"
