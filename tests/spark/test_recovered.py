"""A pipeline dies, `Pipeline.recover` settles what it left, and it goes on exactly.

In real runs, which die between prepare, decision and commits; see `tests/ops/test_recover.py` for
what needs no run.
"""

from typing import Any

import pyarrow.dataset as ds
import pytest

import tallystick as ts
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch.two_phase import Owner
from tallystick.ops.inspection import DECIDED, SETTLED, inspect
from tallystick.storage.file_storage import FileStorage
from tests.files.file_sinks import opened, place, prepared, rows
from tests.spark.flow import Facts, Flow, die, pass_on
from tests.spark.sunk import open_ids
from tests.spark.topics import read_committed, wait_until_nothing_is_pending
from tests.waiting import wait_for

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture(params=["resident", "jobs"])
def execution(request: pytest.FixtureRequest) -> Any:
    return request.param


def pipeline(flow: Flow, transactions: str) -> ts.Pipeline:
    return flow.pipeline(sink={"transactions": transactions})


def run_and_die(flow: Flow, transactions: str, fact: str, execution: Any) -> None:
    """Run epoch 1, which is finished, and epoch 2, which is not."""
    flow.feed(100)
    flow.run(pipeline(flow, transactions), execution=execution)
    flow.feed(60)
    with pytest.raises(RuntimeError, match=f"died after {fact}"):
        flow.run(pipeline(flow, transactions), execution=execution, listener=Facts(fact, die))


def recovered(flow: Flow, transactions: str, visible: int) -> ts.Recovery:
    """Recover it, twice: nothing is open then, and exactly so many rows are visible."""
    done = pipeline(flow, transactions).recover(checkpoint=str(flow.checkpoint))
    again = pipeline(flow, transactions).recover(checkpoint=str(flow.checkpoint))

    assert again.epoch == done.epoch
    assert not any(sink.committed or sink.aborted for sink in again.sinks)
    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
    assert open_ids(flow) == []
    assert len(read_committed(flow.confluent, flow.topic_out)) == visible
    return done


def go_on(flow: Flow, transactions: str, execution: Any) -> None:
    """The pipeline, started again, finds nothing amiss."""
    flow.feed(40)
    flow.run(pipeline(flow, transactions), execution=execution)
    flow.assert_exact()
    assert open_ids(flow) == []


def wait_for_rows(flow: Flow, count: int) -> None:
    """Wait until the markers of a commit are written, which come after Kafka's answer."""
    wait_for(
        lambda: len(read_committed(flow.confluent, flow.topic_out)), count, "the number of rows"
    )


def test_what_a_dead_driver_has_decided_is_committed(flow: Flow, execution: Any) -> None:
    run_and_die(flow, "task", "TransactionCommitted", execution)
    wait_for_rows(flow, 100)
    before = inspect(FileStorage(str(flow.checkpoint))).outputs[-1]
    open_count = len(open_ids(flow))

    done = recovered(flow, "task", visible=160)

    after = inspect(FileStorage(str(flow.checkpoint))).outputs[-1]
    assert open_count > 0
    assert (done.epoch, done.sinks[0].committed, done.sinks[0].aborted) == (2, open_count, 0)
    assert (before.epoch, before.standing, before.decided_by) == (2, DECIDED, "checkpoint")
    assert (after.epoch, after.standing) == (2, SETTLED)
    go_on(flow, "task", execution)


def test_what_a_dead_driver_has_not_decided_is_aborted(flow: Flow, execution: Any) -> None:
    run_and_die(flow, "task", "ManifestWritten", execution)
    open_count = len(open_ids(flow))

    done = recovered(flow, "task", visible=100)

    assert open_count > 0
    assert (done.epoch, done.sinks[0].committed, done.sinks[0].aborted) == (1, 0, open_count)
    go_on(flow, "task", execution)


@pytest.mark.parametrize(
    ("fact", "visible"), [("ManifestWritten", 100), ("TransactionCommitted", 160)]
)
def test_the_whole_epoch_of_a_dead_driver_is_aborted_unless_it_is_committed(
    flow: Flow, execution: Any, fact: str, visible: int
) -> None:
    run_and_die(flow, "epoch", fact, execution)

    done = recovered(flow, "epoch", visible=visible)

    assert (done.epoch, done.decider, done.sinks) == (1 + (visible == 160), "kafka-1", ())
    go_on(flow, "epoch", execution)


@pytest.mark.parametrize("transactions", ["epoch", "task"])
def test_a_run_that_is_at_work_is_fenced_and_has_lost_nothing(
    flow: Flow, execution: Any, transactions: str
) -> None:
    """As by any second start: it can neither decide nor commit an epoch any more."""
    flow.feed(100)
    query = pipeline(flow, transactions).start(
        flow.spark, checkpoint=str(flow.checkpoint), execution=execution
    )
    query.processAllAvailable()

    done = pipeline(flow, transactions).recover(checkpoint=str(flow.checkpoint))
    flow.feed(60)

    with pytest.raises(ts.FencedError):
        query.awaitTermination(120)
    assert done.epoch is not None
    wait_for_rows(flow, 100)
    go_on(flow, transactions, execution)


def test_what_a_zombie_wrote_late_is_removed_by_a_start_with_nothing_to_read(
    flow: Flow, execution: Any
) -> None:
    files = flow.folder / "files"
    both = flow.sink(), ts.FileSink(str(files))
    with_files = ts.Pipeline(flow.name).read(flow.source()).map_batches(pass_on()).write(*both)
    flow.feed(100)
    flow.run(with_files, execution=execution)
    folder = CheckpointFolder(FileStorage(str(flow.checkpoint)))
    newest = folder.read_manifest(folder.manifest_paths()[-1])
    owner = Owner(newest.pipeline, newest.committables[0].sink, newest.lineage)
    zombie = opened(files, owner)
    undecided = prepared(zombie, place(newest.checkpoint_id + 1, owner=owner), rows(0, 9))
    assert undecided
    assert list(files.rglob("*.draft"))

    flow.run(with_files, execution=execution)

    assert not list(files.rglob("*.draft"))
    assert ds.dataset(str(files), format="parquet").count_rows() == 100
    flow.assert_exact()
