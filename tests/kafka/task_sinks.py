"""What the tests of the sink with one transaction per task share."""

import json
import os
import signal
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import dumps, loads  # as Spark sends plans to tasks
from typing import Any

import pyarrow as pa

from tallystick.epoch.two_phase import Committable, Outcome, Owner, Place, RunFacts
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.task_sink import KafkaTaskSink
from tallystick.kafka.task_transaction import TaskPlan
from tests.waiting import wait_until

LINEAGE = "lineage-1"
ROOT = Path(__file__).parents[2]


def output_of(config: KafkaConfig, topic: str, **changes: Any) -> KafkaOutput:
    """Settings as `KafkaSink` would make them."""
    values = {"token_topic": topic, "transaction_timeout_ms": 120_000, **changes}
    return KafkaOutput(config, topic, **values)


@contextmanager
def opened(
    config: KafkaConfig,
    topic: str,
    pipeline: str,
    lineage: str = LINEAGE,
    id_prefix: str | None = None,
    earlier_prefixes: frozenset[str] = frozenset(),
    **changes: Any,
) -> Iterator[KafkaTaskSink]:
    """A sink named `out` for one run."""
    sink = KafkaTaskSink(
        output_of(config, topic, **changes),
        Owner(pipeline, "out", lineage),
        RunFacts(tasks=2),
        id_prefix=id_prefix or f"tallystick-{pipeline}",
        earlier_prefixes=earlier_prefixes,
    )
    try:
        yield sink
    finally:
        sink.close()


def with_output(plan: TaskPlan, **changes: Any) -> TaskPlan:
    """The plan of a task whose output has other settings."""
    return replace(plan, output=replace(plan.output, **changes))


def place_of(
    pipeline: str, epoch: int = 0, task: int = 0, attempt: int = 0, lineage: str = LINEAGE
) -> Place:
    nonce = os.urandom(8).hex()
    return Place(Owner(pipeline, "out", lineage), epoch, task, attempt, nonce)


def rows_of(*texts: str, partition: int = 0) -> pa.RecordBatch:
    return pa.record_batch(
        {"value": pa.array(texts), "partition": pa.array([partition] * len(texts), pa.int32())}
    )


def written_by(plan: TaskPlan, place: Place, *texts: str, partition: int = 0) -> Committable:
    """What a task hands over that writes these rows."""
    transaction = plan.begin(place)
    transaction.write(rows_of(*texts, partition=partition))
    (committable,) = transaction.prepare()
    return committable


def written_in_another_process(plan: TaskPlan, place: Place, *texts: str) -> Committable:
    """The same by a process that is killed (-9) as soon as it has handed over."""
    task = subprocess.Popen(
        [sys.executable, "-m", "tests.kafka.task_sinks"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert task.stdin is not None
    assert task.stdout is not None
    task.stdin.write(b64encode(dumps((plan, place, texts))).decode() + "\n")
    task.stdin.flush()
    line = task.stdout.readline()
    task.send_signal(signal.SIGKILL)
    task.wait()
    task.stdin.close()
    task.stdout.close()
    return Committable.from_fields(json.loads(line))


def state_of(client: Client, committable: Committable) -> str:
    name = json.loads(committable.details)["transactional_id"]
    state = transaction_state(client, name)
    return "" if state is None else str(state.transaction_state)


def settled(client: Client, committable: Committable) -> None:
    """Wait for the markers, which Kafka writes after it has answered."""
    wait_until(
        lambda: not state_of(client, committable).startswith("Prepare"),
        lambda: f"{committable.name} is still {state_of(client, committable)}",
    )


def committed(client: Client, sink: KafkaTaskSink, committable: Committable) -> Outcome:
    outcome = sink.commit(committable)
    settled(client, committable)
    return outcome


def taken_over(config: KafkaConfig, committable: Committable) -> None:
    """Fence, as the next user of the id does."""
    broker = KafkaBroker(config)
    broker.fence(json.loads(committable.details)["transactional_id"], None)
    broker.close()


def _main() -> None:
    plan, place, texts = loads(b64decode(sys.stdin.readline()))  # noqa: S301  our own bytes
    committable = written_by(plan, place, *texts)
    sys.stdout.write(json.dumps(committable.to_fields()) + "\n")
    sys.stdout.flush()
    time.sleep(600)


if __name__ == "__main__":
    _main()
