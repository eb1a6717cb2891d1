"""Commands to a pipeline that runs in a program of its own: `tallystick rescale` and `stop`.

The output is read by librdkafka, `read_committed`, beside a run that goes on from the savepoint.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
from confluent_kafka import IsolationLevel
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from tallystick.__main__ import app
from tallystick.ops import savepoints
from tallystick.storage.file_storage import FileStorage
from tests.spark.flow import Flow
from tests.spark.test_savepoint_restore import KEYS, Counting
from tests.spark.topics import ends, pending
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]

WAIT_S = 120


def tallystick(*words: object) -> str:
    """Call the command line; return what it prints."""
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


def tallystick_process(*words: object) -> str:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "tallystick", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def job(flow: Flow) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.spark.asked_job", json.dumps(flow.spec())]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def fed(counting: Counting) -> Iterator[None]:
    """Append records all the time, so that an epoch is at work whatever moment a command picks."""
    is_enough = Event()

    def feed() -> None:
        while not is_enough.wait(0.2):
            counting.feed(2 * KEYS)

    feeder = Thread(target=feed)
    feeder.start()
    try:
        yield
    finally:
        is_enough.set()
        feeder.join()


def stable_end(flow: Flow) -> int:
    """Where readers of committed records are, in all partitions of the output together."""
    return sum(ends(flow.confluent, flow.topic_out, IsolationLevel.READ_COMMITTED).values())


def test_a_running_pipeline_is_rescaled_and_stopped_with_a_savepoint(
    flow: Flow, spark: SparkSession, tmp_path: Path
) -> None:
    counting, saved_at = Counting(flow), tmp_path / "saved"
    with fed(counting):
        with job(flow) as process:
            wait_until(lambda: process.poll() is not None or stable_end(flow), "no output yet")
            assert "goes on with parallelism 3" in tallystick(
                *("rescale", flow.checkpoint, "--parallelism", 3)
            )
            end = stable_end(flow)
            wait_until(lambda: stable_end(flow) > end, "it does not go on")
            text = tallystick_process("stop", flow.checkpoint, "--savepoint", saved_at)
            assert "was the last one, and is committed" in text
            assert process.wait(WAIT_S) == 0, "the program ends, as after any end in order"
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()
    assert not any(pending(flow.confluent, flow.topic_out).values())

    saved = savepoints.read(FileStorage(str(saved_at)))
    newest = max((flow.checkpoint / "tallystick").glob("0*.json"))
    assert f"epoch {int(newest.name[:12])} was" in text
    assert saved.manifest.checkpoint_id == int(newest.name[:12]), "its last epoch"
    assert [step.parallelism for step in saved.manifest.state] == [3]

    # Kafka has committed nothing after the savepoint, or this start would be refused.
    counting.feed(KEYS)
    before = counting.output()
    assert 0 < len(before) < counting.fed
    tallystick("savepoint", "restore", saved_at, tmp_path / "restored")
    query = counting.pipeline().start(
        spark, checkpoint=str(tmp_path / "restored"), trigger={"availableNow": True}
    )
    assert query.awaitTermination(WAIT_S)
    assert counting.output() == counting.expected(0, counting.fed)
