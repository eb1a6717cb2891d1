"""What a start is checked against, before Kafka was asked."""

from dataclasses import replace
from pathlib import Path

import pytest

from tallystick.epoch import manifest as m
from tallystick.errors import DataLossError
from tallystick.pipeline.compiled import check_checkpoint
from tallystick.state.catalog import StepState
from tallystick.values import Producer
from tests.checkpoint_on_disk import KEY_SCHEMA, Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path / "checkpoint")
    job.run(3)
    return job


@pytest.mark.parametrize("epoch", [2, 3])
def test_what_an_attempt_left_that_was_never_committed_blocks_nothing(job, epoch):
    """It added a step, failed, and the pipeline is started without that step again."""
    committed = job.manifest()
    added = StepState("added", 128, 1, KEY_SCHEMA, 1)
    failed = replace(
        committed,
        checkpoint_id=epoch,
        state=(*committed.state, added),
        producer=Producer("t", 1, 1),
    )
    job.storage.put(m.manifest_path(failed, "ff"), failed.encode())

    manifest = check_checkpoint(job.storage, "job")

    assert manifest is not None
    assert [step.uid for step in manifest.state] == ["counts"]


def test_a_first_epoch_that_never_was_committed_tells_only_whose_the_checkpoint_is(job):
    for path in job.storage.names("commits"):
        job.storage.delete(path)

    assert check_checkpoint(job.storage, "job") is None
    with pytest.raises(DataLossError, match="belongs to pipeline 'job'"):
        check_checkpoint(job.storage, "other")
