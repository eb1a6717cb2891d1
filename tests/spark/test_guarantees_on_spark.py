"""Guarantee and mode change with every start of a pipeline that died, on the real Spark.

All twelve changes, and what each guarantee lets happen, are in `tests/failover`, without Spark.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tallystick as ts
from tallystick.epoch import protocol as c
from tests.spark.flow import Flow, pass_on
from tests.spark.test_sinks_together import rows_in
from tests.spark.topics import read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(600)]

WAYS: list[tuple[dict[str, Any], str, int]] = [
    ({"transactions": "task"}, "TransactionCommitted", 2),  # the first one begins the lineage
    ({"transactions": "task", "transactional_id_prefix": "team-"}, "TransactionCommitted", 1),
    ({"guarantee": "at_least_once"}, "OutputCounted", 1),
]
"""How to write where the checkpoint decides, and the fact at which the driver dies."""


class DeathError(Exception):
    """By a test."""


class Dies:
    """A listener that ends the driver at the n-th fact of a kind."""

    def __init__(self, at: str, occurrence: int) -> None:
        self._at, self._left = at, occurrence

    def __call__(self, event: c.Event) -> None:
        self._left -= type(event).__name__ == self._at
        if not self._left:
            raise DeathError("the driver ends here, by a test")


def test_every_start_has_another_way_to_write_and_something_pending(
    flow: Flow, tmp_path: Path
) -> None:
    """Files beside it are told the same decisions; rows without transactions may be there twice."""
    folder = tmp_path / "files"

    def pipeline(way: dict[str, Any]) -> ts.Pipeline:
        sink = flow.sink(**way)
        step = ts.Pipeline(flow.name).read(flow.source()).map_batches(pass_on())
        return step.write(sink, ts.FileSink(str(folder)))

    for way, event, occurrence in WAYS:
        flow.feed(60)
        with pytest.raises(Exception, match="the driver ends here, by a test"):
            flow.run(pipeline(way), listener=Dies(event, occurrence))
    flow.feed(60)
    flow.run(pipeline({"transactions": "task"}))

    more = Counter(seen(flow)) - Counter(flow.input)
    assert not Counter(flow.input) - Counter(seen(flow))
    assert max(more.values()) == 1  # one epoch had no transaction, and was not decided
    assert len(more) < len(flow.input)
    assert rows_in(folder) == sorted(flow.input)


def seen(flow: Flow) -> list[tuple[str, str]]:
    records = read_committed(flow.confluent, flow.topic_out)
    return [(str(record.key), str(record.value)) for record in records]
