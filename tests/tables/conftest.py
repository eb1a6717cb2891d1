"""What the tests of tables share: jobs with sinks, and the kinds of tables."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.failover.sink_job import SinkJob, sink_jobs
from tests.tables.test_table_guarantees import Delta, Files, Iceberg, Kind

names = (f"tables_{number}" for number in count())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., SinkJob]]:
    with sink_jobs(tmp_path, names) as make:
        yield make


@pytest.fixture(params=[Delta, Iceberg, Files], ids=["delta", "iceberg", "files"])
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param()
    return kind
