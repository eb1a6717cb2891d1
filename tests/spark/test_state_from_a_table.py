"""A pipeline begins with state from a table, on Spark and a real broker."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tallystick as ts
from tallystick.ops import savepoints
from tallystick.storage.file_storage import FileStorage
from tests.spark.changed_job import sums
from tests.spark.flow import Flow
from tests.spark.topics import produce

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]


def test_a_new_pipeline_goes_on_from_a_table_and_is_set_back_by_offsets(
    flow: Flow, tmp_path: Path
) -> None:
    """Its sources say where it begins; then a savepoint of it is read again from an offset."""
    spark = flow.spark
    assert spark is not None

    def feed(count: int) -> None:
        rows = [("k", json.dumps({"k": "k", "n": 1})) for _ in range(count)]
        produce(flow.confluent, flow.topic_in, rows)

    def restored(folder: Path, name: str) -> Path:
        checkpoint = tmp_path / name
        savepoints.restore(FileStorage(str(folder)), FileStorage(str(checkpoint)))
        return checkpoint

    def state(checkpoint: Path) -> Any:
        rows = ts.read_state(spark, str(checkpoint)).select("k", "n", "least").collect()
        return {row["k"]: (row["n"], row["least"]) for row in rows}

    program = sums(flow.spec(), "old", 2)
    table = pa.table({"k": ["k", "other"], "n": [100, 7], "least": pa.array([-5, 3], pa.int32())})
    ts.write_state(table, None, "sums", to=tmp_path / "first", pipeline=program)
    feed(3)
    checkpoint = restored(tmp_path / "first", "cp")
    flow.run(program, checkpoint=checkpoint)
    assert state(checkpoint) == {"k": (103, -5), "other": (7, 3)}
    feed(2)
    flow.run(program, checkpoint=checkpoint)
    assert state(checkpoint) == {"k": (105, -5), "other": (7, 3)}

    kept = tmp_path / "kept"
    savepoints.create(FileStorage(str(checkpoint)), FileStorage(str(kept)))
    again = {flow.topic_in: dict.fromkeys(range(flow.partitions), 0)}
    ts.write_state(table, kept, "sums", to=tmp_path / "back", offsets=again)
    other = sums({**flow.spec(), "name": f"{flow.name}-again"}, "old", 1)
    back = restored(tmp_path / "back", "cp-back")
    flow.run(other, checkpoint=back)
    assert state(back) == {"k": (105, -5), "other": (7, 3)}, "all five rows, on the table once more"
