"""What an epoch costs on the driver's side with 10,000 partitions: planning time, size of its log.

    .venv/bin/python benchmarks/planning.py [--topics N] [--partitions N] [--epochs N]

No Kafka: a made-up cluster in which a tenth of the partitions grows between two epochs. Must be
flat: an epoch costs what it has to plan, not how many there were before it.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from harness.results import markdown

from tallystick.source.enumerator import Enumerator
from tallystick.source.offsets import from_json
from tallystick.source.splits import plan_splits
from tallystick.source.subscription import FoundTopic, LossPolicy, TopicPattern
from tallystick.values import TopicPartition

SHOWN = (1, 10, 100, 1000)
AROUND = 20
"""How many epochs a shown one stands for: itself and those before it; the least of each counts,
as other load on the machine can only add."""
GROWING = 0.1
GROWTH_MAX = 1000
"""So the epochs keep up, and each has a thousand splits: a backlog would change what is planned."""
FIRST_OFFSET = 1_000_000_000
"""Ten digits, as in a topic that has been in use for long."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """What one epoch took, in ms of CPU, and the bytes that went to Spark's log."""

    read_ms: float
    plan_ms: float
    write_ms: float
    split_ms: float
    size: int
    splits: int


class Driver:
    """A source as Spark drives it: each epoch starts from what the log says of the one before.

    Args:
        topics: how many.
        partitions: of each.
        offset_count_max: how many offsets an epoch may span.
    """

    def __init__(self, topics: int, partitions: int, offset_count_max: int) -> None:
        self._random = np.random.default_rng(42)
        self._found = {f"events-{i:03}": FoundTopic(f"{i:022}", partitions) for i in range(topics)}
        self._partitions = [TopicPartition(t, p) for t in self._found for p in range(partitions)]
        self._ends = np.full(len(self._partitions), FIRST_OFFSET)
        self._maximum = offset_count_max
        self._enumerator = Enumerator(TopicPattern("events-.*"), LossPolicy())
        self._enumerator.discovered(self._found, 1)
        self._enumerator.resolved(dict.fromkeys(self._partitions, FIRST_OFFSET))
        self._log = json.dumps(self._enumerator.first("c" * 22, "group", None).to_json())

    def run(self) -> Epoch:
        """Plan one epoch."""
        self._grow()
        ends = dict(zip(self._partitions, self._ends.tolist(), strict=True))
        times = [time.process_time()]
        self._enumerator.restored(from_json(json.loads(self._log)))
        times.append(time.process_time())
        self._enumerator.discovered(self._found, 1)
        self._enumerator.ended(ends)
        assert not self._enumerator.suspicious
        planned = self._enumerator.plan(self._maximum).offsets
        times.append(time.process_time())
        log = json.dumps(planned.to_json())
        times.append(time.process_time())
        splits = plan_splits(from_json(json.loads(self._log)), from_json(json.loads(log)))
        times.append(time.process_time())
        self._log = log
        return Epoch(*(np.diff(times) * 1000), size=len(log), splits=len(splits))

    def _grow(self) -> None:
        grown = self._random.random(len(self._ends)) < GROWING
        self._ends = self._ends + grown * self._random.integers(1, GROWTH_MAX, len(self._ends))


def main() -> None:
    """Run all epochs, and print some."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=100, help="of each topic")
    parser.add_argument("--epochs", type=int, default=max(SHOWN))
    parser.add_argument("--max-offsets", type=int, default=1_000_000)
    arguments = parser.parse_args()
    driver = Driver(arguments.topics, arguments.partitions, arguments.max_offsets)
    headings = ["epoch", "read log ms", "plan ms", "write log ms", "splits ms", "all ms"]
    print(markdown([*headings, "bytes", "splits"], []))
    near: deque[Epoch] = deque(maxlen=AROUND)
    for number in range(1, arguments.epochs + 1):
        near.append(driver.run())
        if number in SHOWN:
            print(row(number, near), flush=True)


def row(number: int, near: Sequence[Epoch]) -> str:
    """One shown epoch, in Markdown."""
    times = [
        min(getattr(epoch, name) for epoch in near)
        for name in ("read_ms", "plan_ms", "write_ms", "split_ms")
    ]
    shown = [f"{milliseconds:.1f}" for milliseconds in (*times, sum(times))]
    return f"| {' | '.join([str(number), *shown, f'{near[-1].size:,}', f'{near[-1].splits:,}'])} |"


if __name__ == "__main__":
    main()
