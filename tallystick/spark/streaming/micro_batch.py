"""A micro-batch as an epoch of the driver: compared with Spark's log, and called for once.

Spark's log has the end offsets of each micro-batch, and so have the manifests of committed epochs.
The log may be lost or replaced, a manifest may not. The driver compares them once it knows which
epoch is committed, and refuses an epoch that would begin where the committed one did not end; what
the log is, and how it is put right, is known here.
"""

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.spark_log import entry_put_right
from tallystick.epoch.facts import Request
from tallystick.epoch.micro_batches import partial_path
from tallystick.errors import OtherOffsetsError, SecondCallError
from tallystick.ports import Engine
from tallystick.run.driver import Driver


def run_micro_batch(
    driver: Driver, folder: CheckpointFolder, request: Request, engine: Engine
) -> None:
    """Run a micro-batch as an epoch, and put Spark's log right where a manifest has other offsets.

    Args:
        driver: of the query's run.
        folder: of the query; its log has the micro-batch, and is durable.
        request: the micro-batch.
        engine: runs the tasks.

    Raises:
        SecondCallError: this run has ended the micro-batch before: other rows would be dropped as a
            replay. The next start sees from a note that they are missing.
        SparkLogError: Spark's log differed from the newest committed epoch, and is put right.
        FencedError: another run owns the pipeline, and puts the log right itself.
        TallystickError, or an error of the user's function: see `Driver.run_epoch`.
    """
    newest = driver.coordinator.committed_manifest
    if newest is not None and newest.checkpoint_id == request.checkpoint_id:
        raise _note_second_call(driver, folder, request.checkpoint_id)
    try:
        driver.run_epoch(request, engine, folder.log.sources)
    except OtherOffsetsError as error:
        folder.log.put_right(error.checkpoint_id, error.sources, driver.prove_owner)
        raise entry_put_right(folder.location, error) from None


def _note_second_call(driver: Driver, folder: CheckpointFolder, batch_id: int) -> SecondCallError:
    refusal = second_call(driver.pipeline, batch_id)
    folder.note(partial_path(driver.coordinator.manifest_path(batch_id)), str(refusal))
    return refusal


def second_call(pipeline: str, batch_id: int, whose: str = "the sink") -> SecondCallError:
    """Return the refusal of another call in a micro-batch whose first call has been taken."""
    return SecondCallError(
        f"pipeline {pipeline!r}: the function of foreachBatch called {whose} a second time in "
        f"micro-batch {batch_id}. One call is one transaction: the first one's rows are "
        f"committed, those of the second call are not written. Write all rows of a micro-batch "
        f"with one call of one sink: union the DataFrames, with a column 'topic' where they go to "
        f"several topics (topic=None, token_topic=…). The next start names what to do about "
        f"micro-batch {batch_id}."
    )
