"""The broker under test: nodes with a heap of 1 GB each, beside the jobs on the same cores."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tallystick.testing import EmbeddedKafka

from .measure import Broker

HEAP_MB = 1024
PROPERTIES = {
    "log.segment.bytes": str(256 << 20),
    # What a run leaves is deleted at once, not a minute later under the next run.
    "log.segment.delete.delay.ms": "1000",
}
JVM_VARIABLE = "_JAVA_OPTIONS"
JVM_OPTIONS = "-XX:-UseSerialGC -XX:+UseG1GC -XX:TieredStopAtLevel=4"
"""The embedded broker is made to start quickly. Here it has to run quickly, as it does in use."""


@contextmanager
def start_broker(directory: Path, nodes: int = 1) -> Iterator[Broker]:
    """An empty cluster, its logs in `directory`; whatever is there is removed, before and after."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    kafka = EmbeddedKafka(nodes, directory=directory, properties=PROPERTIES, heap_mb=HEAP_MB)
    try:
        with _broker_jvm_options():
            kafka.start()
        pids = tuple(kafka.pid(node.node_id) for node in kafka.nodes)
        yield Broker(kafka.bootstrap_servers, pids)
    finally:
        kafka.stop()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _broker_jvm_options() -> Iterator[None]:
    """Options that win over a JVM's command line, for the JVMs that are started meanwhile."""
    before = os.environ.get(JVM_VARIABLE)
    os.environ[JVM_VARIABLE] = JVM_OPTIONS
    try:
        yield
    finally:
        del os.environ[JVM_VARIABLE]
        if before is not None:
            os.environ[JVM_VARIABLE] = before
