"""The page for operators, as a test looks at it."""

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, IsolationLevel, TopicPartition

from tallystick.testing.process import free_ports
from tests.ops.browser import Browser
from tests.spark.flow import Flow
from tests.spark.topics import Record, ends, pending

MARKS = [
    pytest.mark.broker,
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        shutil.which("chromedriver") is None,
        reason="apt-get install chromium-driver: chromedriver is not found",
    ),
]


@contextmanager
def page_of(checkpoint: Path, servers: str) -> Iterator[str]:
    """`tallystick ui` as a user calls it; the address that it prints."""
    (port,) = free_ports(1, "127.0.0.1")
    words = ["ui", str(checkpoint), "--bootstrap-servers", servers, "--port", str(port)]
    command = [sys.executable, "-m", "tallystick", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def facts_of(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "facts.json") as answer:
        facts: dict[str, Any] = json.loads(answer.read())
    return facts


def number(text: str) -> int:
    return int(text.replace(",", ""))


def recovery_of(flow: Flow) -> str:
    """What an operator types where the process is dead."""
    return f"tallystick recover MODULE:PIPELINE --checkpoint '{flow.checkpoint}'"


def shown(flow: Flow) -> dict[str, str]:
    """Names for a picture."""
    return {str(flow.checkpoint): "/data/orders", flow.name: "orders"}


def assert_not_shown(text: str, url: str, browser: Browser) -> None:
    """It is neither on the page, nor in what it is made of."""
    assert text not in str(browser.script("return document.documentElement.outerHTML"))
    for path in ("", "facts.json"):
        with urllib.request.urlopen(url + path) as answer:
            assert text not in answer.read().decode()
    with urllib.request.urlopen(url + "events") as answer:
        assert text not in answer.readline().decode()


def first_of_open(flow: Flow) -> Record:
    """The first record of a partition that committed readers do not see yet."""
    consumer = Consumer(
        {
            **flow.confluent,
            "group.id": "witness",
            "isolation.level": "read_uncommitted",
            "enable.auto.commit": False,
        }
    )
    try:
        stable = ends(flow.confluent, flow.topic_out, IsolationLevel.READ_COMMITTED)
        waiting = pending(flow.confluent, flow.topic_out)
        assert waiting, "no transaction was left open"
        partition = next(iter(waiting))
        consumer.assign([TopicPartition(flow.topic_out, partition, stable[partition])])
        message = consumer.poll(60)
        assert message is not None
        return Record(partition, message.offset(), None, None, (), message.timestamp()[1])
    finally:
        consumer.close()
