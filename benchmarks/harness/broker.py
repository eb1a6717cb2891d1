"""The broker under test: one node with a heap of 1 GB, beside the jobs on the same cores."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tallystick.testing import EmbeddedKafka

from .measure import Broker

HEAP_MB = 1024
PROPERTIES = {
    "log.segment.bytes": str(256 << 20),
    # More threads would only take turns on two cores.
    "num.network.threads": "2",
    "num.io.threads": "4",
    # What a run leaves is deleted at once, not a minute later under the next run.
    "log.segment.delete.delay.ms": "1000",
}


@contextmanager
def start_broker(directory: Path) -> Iterator[Broker]:
    """An empty broker, its log in `directory`; whatever is there is removed, before and after."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        with EmbeddedKafka(directory=directory, properties=PROPERTIES, heap_mb=HEAP_MB) as kafka:
            pids = tuple(node.pid for node in kafka.nodes)
            yield Broker(kafka.bootstrap_servers, pids)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
