"""The examples, unchanged, through `tallystick.testing.Driver`: what they find is what Kafka gives.

An example compares its output with its input by other means than the package. Here broker, producer
and consumer of an example are topics in memory, and each start of a checkpoint is a run of one
`Driver`. Data and last lines are those of `tests/test_examples.py`, on a real Kafka and Spark.
"""

import json
import runpy
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

import tallystick as ts
from tallystick import testing
from tallystick.codec.rows import partition_of
from tallystick.testing import Driver
from tests.test_examples import EXAMPLES, LAST_LINES

SPARKS_OR_POSTGRES = {"foreach_batch", "postgres_and_files"}
"""One is a query of Spark's, the other one compares what a real PostgreSQL holds."""


class Place:
    """Stands for the broker of an example, and for the checkpoints of its pipelines."""

    bootstrap_servers = "localhost:1"

    def __init__(self) -> None:
        self.partitions: dict[str, int] = {}
        self.waiting = defaultdict[str, list[tuple[bytes, bytes]]](list)
        self.drivers: dict[str, Driver] = {}

    def create_topic(self, topic: str, partitions: int) -> None:
        self.partitions[topic] = partitions

    def write(self, servers: str, topic: str, rows: pd.DataFrame, key: str) -> None:
        values = rows.to_json(orient="records", lines=True).splitlines()
        keys = rows[key].astype(str)
        self.waiting[topic] += [(k.encode(), v.encode()) for k, v in zip(keys, values, strict=True)]

    def start(self, pipeline: ts.Pipeline, *, checkpoint: str, trigger: Any) -> Any:
        """Run all that waits, from where the checkpoint's last run has ended."""
        assert trigger == {"availableNow": True}
        driver = self.drivers.get(checkpoint)
        if driver is None:
            driver = self.drivers[checkpoint] = Driver(pipeline, partitions=self.partitions)
        else:
            driver._pipeline = pipeline
            driver.restart()
        for topic, records in self.waiting.items():
            count = self.partitions[topic]
            owners = partition_of(pa.array([key for key, _ in records]), count, 0)
            for number in range(count):
                chosen = [
                    {"key": key, "value": value}
                    for (key, value), owner in zip(records, owners, strict=True)
                    if owner == number
                ]
                driver.feed(topic, chosen, partition=number)
        self.waiting.clear()
        driver.drain()
        return SimpleNamespace(awaitTermination=driver.restart)  # closes the sinks

    def read(self, servers: str, topic: str) -> list[dict[str, Any]]:
        (driver,) = self.drivers.values()
        return [json.loads(value) for value in driver.records(topic)["value"].to_pylist()]


@pytest.mark.parametrize("name", sorted(LAST_LINES.keys() - SPARKS_OR_POSTGRES))
def test_an_example_finds_what_it_finds_on_kafka(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place()
    monkeypatch.syspath_prepend(EXAMPLES)
    import playground

    monkeypatch.setattr(testing, "EmbeddedKafka", lambda: nullcontext(place))
    monkeypatch.setattr(
        ts.Pipeline, "start", lambda pipeline, **given: place.start(pipeline, **given)
    )
    monkeypatch.setattr(playground, "write", place.write)
    monkeypatch.setattr(playground, "read", place.read)

    runpy.run_path(str(Path(EXAMPLES, f"{name}.py")), run_name="__main__")

    assert capsys.readouterr().out.splitlines()[-1] == f"{LAST_LINES[name]}: as expected"
    assert place.drivers
