"""A topic and a Delta table of one pipeline agree, whenever its driver is killed."""

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema

import tallystick as ts
from tests.delta.delta_sinks import commits, numbers_of_log, unnamed
from tests.spark.driver_process import Drivers
from tests.spark.flow import Flow, pass_on

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(900)]

COLUMNS = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])
KILLS = ("EpochRan", "ManifestWritten", "TransactionCommitted", "OutputSettled")


@pytest.fixture
def table(flow: Flow) -> str:
    path = str(flow.folder / "table")
    DeltaTable.create(path, Schema.from_arrow(COLUMNS))
    return path


def test_a_topic_and_a_table_agree_after_drivers_are_killed(
    flow: Flow, drivers: Drivers, table: str
) -> None:
    """In front of each step of an epoch in turn; what was due then is published by the next run."""
    sinks = [{"kind": "kafka"}, {"kind": "delta", "table": table, "commit_every": "1 hour"}]
    for fact in KILLS:
        flow.feed(90)
        driver = drivers.take(spares=1)
        driver.run(flow.spec(sinks=sinks, kill_at=fact, occurrence=2, epoch_records=30))
        driver.wait_until_killed()
        driver.stop()
        in_table = set(numbers_of_log(flow.folder / "table", "value"))
        assert in_table < {value.encode() for _, value in flow.input}, "the table lags behind"
    delta = ts.DeltaSink(table, commit_every="1 hour")
    source = flow.source(max_offsets_per_trigger=60)
    flow.run(ts.Pipeline(flow.name).read(source).map_batches(pass_on()).write(flow.sink(), delta))

    flow.assert_exact()
    expected = sorted(value.encode() for _, value in flow.input)
    assert sorted(DeltaTable(table).to_pyarrow_table()["value"].to_pylist()) == expected
    assert numbers_of_log(flow.folder / "table", "value") == expected
    assert unnamed(flow.folder / "table") == []
    assert len(commits(flow.folder / "table")) <= len(KILLS) + 1
