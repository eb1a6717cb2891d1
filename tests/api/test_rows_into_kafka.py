"""Rows of a program go to a real Kafka from its process: each epoch as a whole, or not at all."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer

import tallystick as ts
from tallystick.testing.kafka import EmbeddedKafka
from tests.waiting import wait_for

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def kafka(tallystick_kafka: EmbeddedKafka) -> EmbeddedKafka:
    return tallystick_kafka


def committed(kafka: EmbeddedKafka, topic: str) -> Counter[int]:
    """The numbers that a reader of committed records sees, by librdkafka."""
    consumer = Consumer(
        {
            **kafka.confluent_options(),
            "group.id": topic,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    numbers: Counter[int] = Counter()
    quiet = 0
    while quiet < 5:
        message = consumer.poll(1.0)
        if message is None:
            quiet += 1
        elif message.error() is None:
            numbers[json.loads(message.value())["n"]] += 1
    consumer.close()
    return numbers


def test_rows_are_in_the_topic_once_for_each_start(kafka: EmbeddedKafka) -> None:
    topic = kafka.create_topic("rows-of-programs", 3)
    pipeline = (
        ts.Pipeline("fill")
        .read(ts.RowsSource([{"n": n, "dest": "ABC"[n % 3]} for n in range(500)]))
        .write(ts.KafkaSink(kafka.bootstrap_servers, topic=topic, key="dest", value=ts.Json()))
    )
    for _ in range(2):
        assert pipeline.start().awaitTermination(60)
    assert committed(kafka, topic) == dict.fromkeys(range(500), 2)


def test_of_a_program_that_is_killed_readers_see_whole_epochs(
    kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    """Each epoch of the program has ten rows, the last of which it never ends."""
    topic = kafka.create_topic("rows-of-killed-programs", 1)
    program = textwrap.dedent(
        f"""
        import time
        import tallystick as ts

        def rows():
            for n in range(1_000_000):
                if n == 35:
                    print("waits", flush=True)
                    time.sleep(600)
                yield {{"n": n}}

        sink = ts.KafkaSink({kafka.bootstrap_servers!r}, topic={topic!r}, value=ts.Json())
        source = ts.RowsSource(rows(), schema="n long")
        ts.Pipeline("killed").read(source).write(sink).start().awaitTermination()
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGKILL)
    process.wait()

    numbers = committed(kafka, topic)
    assert set(numbers) == set(range(len(numbers))), "a gap"
    assert set(numbers.values()) <= {1}
    after: Any = ts.RowsSource([{"n": 1_000}])
    sink = ts.KafkaSink(kafka.bootstrap_servers, topic=topic, value=ts.Json())
    ts.Pipeline("killed").read(after).write(sink).start().awaitTermination()
    wait_for(lambda: committed(kafka, topic)[1_000], 1, "the row of the next program")
