"""A topic, a Delta table and an Iceberg table of one pipeline agree, whenever its driver dies."""

import os
from collections import Counter

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema

import tallystick as ts
from tests.delta.delta_sinks import commits, numbers_of_log, unnamed
from tests.iceberg.iceberg_sinks import (
    NAME,
    catalog_in,
    epochs_in,
    make_table,
    sink_in,
    unnamed_in,
    values_in,
)
from tests.spark.driver_process import Drivers
from tests.spark.flow import Flow, pass_on

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(900)]

COLUMNS = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])
ALL_KILLS = ("EpochRan", "ManifestWritten", "TransactionCommitted", "OutputSettled")
KILLS = ALL_KILLS if os.environ.get("SINK_KILLS") == "all" else ALL_KILLS[1:3]
"""Without `SINK_KILLS=all`: prepared and not decided, and decided with nothing published."""

SMALL = 2_400
"""The size of compacted files: a task's file has about 1,000 bytes."""


def test_a_topic_and_tables_agree_after_drivers_are_killed(flow: Flow, drivers: Drivers) -> None:
    """In front of each step of an epoch in turn; what was due then is published by the next run."""
    delta, iceberg, every = flow.folder / "delta", flow.folder / "iceberg", "1 hour"
    DeltaTable.create(str(delta), Schema.from_arrow(COLUMNS))
    in_iceberg = {"kind": "iceberg", "catalog": catalog_in(iceberg), "table": NAME}
    make_table(iceberg, COLUMNS)
    how = {"commit_every": every, "target_file_size": SMALL}
    sinks = [
        {"kind": "kafka"},
        {"kind": "delta", "table": str(delta), **how},
        {**in_iceberg, **how},
    ]
    compactions = 0
    for fact in KILLS:
        flow.feed(300)
        driver = drivers.take()
        driver.run(flow.spec(sinks=sinks, kill_at=fact, occurrence=8, epoch_records=30))
        driver.wait_until_killed()
        driver.stop()
        written = {value.encode() for _, value in flow.input}
        assert set(numbers_of_log(delta, "value")) < written, "the table lags behind"
        assert set(values_in(iceberg, "value")) < written
        for table in (delta, iceberg):
            notes = [note.read_text() for note in table.rglob("due/*")]
            assert notes
            compactions += sum('"compactions": [[' in note for note in notes)
    assert compactions >= len(KILLS), "tasks compacted, and a driver died after it"
    tables = (ts.DeltaSink(str(delta), commit_every=every), sink_in(iceberg, commit_every=every))
    source = flow.source(max_offsets_per_trigger=60)
    pipeline = ts.Pipeline(flow.name).read(source).map_batches(pass_on())
    flow.run(pipeline.write(flow.sink(), *tables))

    flow.assert_exact()
    expected = sorted(value.encode() for _, value in flow.input)
    assert sorted(DeltaTable(str(delta)).to_pyarrow_table()["value"].to_pylist()) == expected
    assert numbers_of_log(delta, "value") == expected
    assert values_in(iceberg, "value") == Counter(expected)
    assert unnamed(delta) == unnamed_in(iceberg) == []
    assert len(commits(delta)) <= len(KILLS) + 1
    assert len(epochs_in(iceberg)) <= len(KILLS) + 1
