"""What an executor takes with it when it goes costs a Spark job's epoch its work, and no more."""

import glob
import os
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext

from tests.spark.flow import Facts, Flow

pytestmark = [pytest.mark.broker, pytest.mark.spark]


def test_an_epoch_whose_shuffle_files_are_lost_is_aborted_and_runs_again(
    flow: Flow, tmp_path: Path
) -> None:
    """The writing stage has one attempt only, so Spark gives the job up instead of the stage."""
    flow.feed(100)
    assert flow.spark is not None
    folder = flow.spark.sparkContext.getConf().get("spark.local.dir")
    marker = str(tmp_path / "lost")

    def shuffle_files() -> set[str]:
        return set(glob.glob(f"{folder}/blockmgr-*/*/shuffle_*_*_0.data"))

    before = shuffle_files()

    def lose_the_other_tasks_output(rows: pa.RecordBatch) -> pa.RecordBatch:
        if TaskContext.get().partitionId() == 1 and not os.path.exists(marker):
            while not (new := shuffle_files() - before):
                time.sleep(0.02)
            for name in new:
                os.unlink(name)
            Path(marker).touch()
        return rows.select(["key", "value"])

    facts = Facts()
    pipeline = flow.pipeline(lose_the_other_tasks_output, max_offsets_per_trigger="all")
    flow.run(pipeline, listener=facts, execution="jobs")

    assert "lost its input" in str(facts.errors[0])
    assert facts.names.count("EpochRan") == 1
    flow.assert_exact()
