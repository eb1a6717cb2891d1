"""`read_state` as a DataFrame: every kind of state in Spark's own types, read by tasks."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.checkpoint.state_files import write_changelog
from tallystick.epoch import manifest as m
from tallystick.epoch.manifest import Manifest
from tallystick.epoch.micro_batches import OWN_LOOP, settled_path
from tallystick.state.catalog import StepState, Version
from tallystick.state.file_sets import extend
from tallystick.storage.file_storage import FileStorage
from tallystick.values import Producer
from tests.ops.test_state_columns import A_DAY, STEP, USERS, entries_of

pytestmark = pytest.mark.spark


def test_all_kinds_of_state_are_columns_of_one_row_per_key(
    spark: SparkSession, tmp_path: Path
) -> None:
    storage = FileStorage(str(tmp_path))
    file = write_changelog(storage, STEP.uid, 0, 0, "n", pa.Table.from_batches([entries_of()]))
    assert file is not None
    state = (extend(STEP, Version(0, "t"), [file]), StepState("other", 1, 1, "[]", 1))
    manifest = Manifest(1, "job", "lineage", ("{}",), (), Producer("t", 1, 1), state)
    path = m.manifest_path(manifest, "n")
    for name, content in ((path, manifest.encode()), (OWN_LOOP, b""), (settled_path(path), b"")):
        storage.put(name, content)

    frame = ts.read_state(spark, str(tmp_path), "step")

    rows = {row["user"]: row for row in frame.collect()}
    assert set(rows) == set(USERS)
    assert frame.rdd.getNumPartitions() > 1
    assert (rows["ann"]["count"], rows["ann"]["last"]) == (7, "x")
    assert tuple(rows["bob"]["pair"]) == (1, A_DAY, 5)
    assert [row["name"] for row in rows["ann"]["names"]] == ["p", "q"]
    assert rows["ann"]["timers"] == [-3, 9]
    assert rows[None]["timers"] is None
    pairs = frame.selectExpr("explode(by_name) as (key, value)").select("key.name", "value.name")
    assert [tuple(row) for row in pairs.collect()] == [("k", "v")]
    assert frame.schema["pair"].dataType.simpleString() == "struct<a:bigint,b:date,$expiry:bigint>"
    assert frame.where("pair.b = date'2026-11-21'").count() == 1
    with pytest.raises(ts.OptionError, match="name the step; its keyed steps are: 'step', 'other'"):
        ts.read_state(spark, str(tmp_path))
    with pytest.raises(ts.OptionError, match="there is no step 'stpe'"):
        ts.read_state(spark, str(tmp_path), "stpe")
