"""Several sinks of one pipeline, with Kafka's transaction in charge and without."""

from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

import tallystick as ts
from tests.spark.flow import Flow, pass_on

pytestmark = [pytest.mark.broker, pytest.mark.spark]


def pipeline(flow: Flow, *sinks: Any, **settings: Any) -> ts.Pipeline:
    """From the input through nothing, to the sinks."""
    source = flow.source(max_offsets_per_trigger=100, **settings)
    return ts.Pipeline(flow.name).read(source).map_batches(pass_on()).write(*sinks)


def rows_in(folder: Path) -> list[tuple[str, str]]:
    """What the visible files hold."""
    table = ds.dataset(folder, format="parquet").to_table()
    pairs = zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)
    return sorted((key.decode(), value.decode()) for key, value in pairs)


@pytest.mark.parametrize("transactions", ["epoch", "task"])
def test_files_and_kafka_hold_the_same(flow: Flow, tmp_path: Path, transactions: str) -> None:
    flow.feed(300)
    folder = tmp_path / "files"
    run = pipeline(flow, flow.sink(transactions=transactions), ts.FileSink(str(folder)))

    flow.run(run)
    flow.feed(120)
    flow.run(run)

    flow.assert_exact()
    assert rows_in(folder) == sorted(flow.input)


def test_a_mode_may_change_with_every_start(flow: Flow, tmp_path: Path) -> None:
    for transactions, prefix in (
        ("epoch", "tallystick-"),
        ("task", "tallystick-"),
        ("epoch", "tallystick-"),
        ("epoch", "team-a-"),
        ("task", "team-b-"),
    ):
        flow.feed(150)
        flow.run(
            pipeline(flow, flow.sink(transactions=transactions, transactional_id_prefix=prefix))
        )
        flow.assert_exact()
