"""Whatever the moment of a kill -9, the next run puts out exactly what is missing."""

import os

import pytest

from tests.spark.driver_process import Drivers
from tests.spark.flow import Flow

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(900)]

KILLS = [
    ("Started", 1),  # before the first plan
    ("EpochRequested", 1),  # planned and logged, and nothing read yet
    ("ProducerFenced", 1),
    ("CommittedRead", 1),
    ("TransactionCommitted", 1),  # of the lineage's first token: nothing was written yet
    ("EpochRan", 1),
    ("ManifestWritten", 2),
    ("OutputCounted", 2),
    ("TransactionCommitted", 2),
    ("OutputConfirmed", 1),  # of the epoch that the last one committed: recovery dies as well
    ("OutputConfirmed", 3),
    ("EpochReturned", 2),  # between our commit and Spark's own
]
"""The fact after which a driver of Spark's query dies, and the how-manieth of its kind then."""
IN_EVERY_RUN = {("EpochReturned", 2)}
"""The others with `CRASH_KILLS=all`: `make stress`. Others with `CRASH_KILLS=fact,fact`.

`test_foreach_batch_sink.py` has runs that die once they have decided, without a driver for each.
"""
LOOP_KILLS = [
    ("EpochWanted", 1),
    ("EpochPlanned", 1),  # of a lineage that is not open yet, and later of an epoch
    ("ManifestWritten", 1),  # of where the lineage begins, and later of an epoch
    ("TransactionCommitted", 1),
    ("CommittedRead", 1),
    ("EpochRan", 1),
    ("ManifestWritten", 2),
    ("OutputCounted", 2),
    ("TransactionCommitted", 2),
    ("OutputConfirmed", 1),
    ("OutputConfirmed", 3),
    ("EpochPlanned", 3),
]
"""The same for a pipeline, which plans after the fence and keeps no log."""
LOOP_IN_EVERY_RUN = {("EpochRan", 1), ("ManifestWritten", 2)}
"""Behind the decision drivers are killed in `test_keyed_kills.py` and `test_tables_killed.py`."""
IS_LONG = os.environ.get("CRASH_KILLS") == "all"
EXECUTIONS = ["resident", "jobs"] if IS_LONG else ["resident"]
RECORD_COUNT = 600 if IS_LONG else 300
"""More than the epochs of all runs that are killed can take."""
GROWN_AFTER = {"Started", "EpochWanted", "EpochRequested", "EpochPlanned", "EpochRan"}
"""Before the first plan, after a plan and before its read, after a read and before its commit."""


def test_a_driver_killed_behind_every_fact_of_the_protocol_loses_and_repeats_nothing(
    flow: Flow, drivers: Drivers
) -> None:
    """A query of Spark's, whose log has to agree; with partitions added while it is down."""
    settings = {"foreach_batch": True, "epoch_records": 40}
    flow.feed(RECORD_COUNT, partition=0)
    for fact, occurrence in _kills(KILLS, IN_EVERY_RUN):
        driver = drivers.take()
        driver.run(flow.spec(kill_at=fact, occurrence=occurrence, **settings))
        driver.wait_until_killed()
        driver.stop()
        is_planned = (flow.checkpoint / "offsets" / "0").exists()
        assert is_planned == (fact != "Started")
        if fact in GROWN_AFTER:
            flow.grow(30)
        flow.feed(20, partition=0)

    driver = drivers.take()
    driver.run(flow.spec(**{**settings, "epoch_records": 200}))
    assert driver.wait_for_end() is None
    drivers.give_back(driver)
    flow.assert_exact()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_same_of_a_pipeline(flow: Flow, drivers: Drivers, execution: str) -> None:
    """Its manifests are the only log; where it begins, `earliest`, stands in the first of them."""
    flow.feed(RECORD_COUNT, partition=0)
    kills = _kills(LOOP_KILLS, LOOP_IN_EVERY_RUN)
    for fact, occurrence in kills:
        driver = drivers.take()
        settings = {"kill_at": fact, "occurrence": occurrence, "execution": execution}
        driver.run(flow.spec(epoch_records=40, **settings))
        driver.wait_until_killed()
        driver.stop()
        assert not (flow.checkpoint / "offsets").exists()
        if fact in GROWN_AFTER:
            flow.grow(30)
        flow.feed(20, partition=0)

    flow.run(flow.pipeline(max_offsets_per_trigger=200), execution=execution)

    flow.assert_exact()


def _kills(kills: list[tuple[str, int]], always: set[tuple[str, int]]) -> list[tuple[str, int]]:
    named = os.environ.get("CRASH_KILLS", "")
    if not named:
        return [kill for kill in kills if kill in always]
    chosen = [kill for kill in kills if named == "all" or kill[0] in named.split(",")]
    assert chosen, f"CRASH_KILLS={named} names no fact"
    return chosen
