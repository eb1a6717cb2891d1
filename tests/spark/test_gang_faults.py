"""Resident tasks on Spark and Kafka: whatever becomes of a member, the output stays exact."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.errors import TallystickError
from tallystick.pipeline.sinks import SinkCluster
from tallystick.run.query import Query
from tallystick.spark.gang import gang as gangs_module
from tallystick.spark.gang.gang import GangLostError
from tallystick.testing import EmbeddedKafka
from tests.spark.driver_process import Drivers
from tests.spark.flow import Facts, Flow
from tests.spark.mischief import (
    FORKED,
    KEYED,
    READ,
    WORKER,
    WRITTEN,
    Gangs,
    Mischief,
    is_gone,
    processes_told_in,
    wait_until_gone,
)
from tests.spark.topics import by_key, read_committed, wait_until_nothing_is_pending
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(600)]


class Resident:
    """A pipeline with resident tasks, keyed or not, that runs until the test ends it."""

    def __init__(self, flow: Flow, mischief: Mischief, *, is_keyed: bool) -> None:
        self.flow, self.mischief, self.is_keyed = flow, mischief, is_keyed
        self.facts = Facts()
        self.queries: list[Query] = []

    def pipeline(self, *, parallelism: int | None = None, **sink: Any) -> ts.Pipeline:
        """As its mischief wants it."""
        columns = ("key", "value")
        read = self.mischief.function(READ, columns)
        pipeline = ts.Pipeline(self.flow.name).read(self.flow.source())
        if not self.is_keyed:
            return pipeline.map_batches(read).write(self.flow.sink(**sink))
        return (
            pipeline.map_batches(read, schema="key string, value string")
            .key_by("key")
            .process(
                ts.aggregate({"n": ts.count()}, each="record", keep=["value"]),
                output="key string, value string, n bigint",
                parallelism=parallelism,
            )
            .map_batches(self.mischief.function(KEYED))
            .write(self.flow.sink(key="key", value=ts.Json(), **sink))
        )

    def start(self, pipeline: ts.Pipeline | None = None) -> Query:
        """A run that goes on."""
        query = (pipeline or self.pipeline()).start(
            self.flow.spark,
            checkpoint=str(self.flow.checkpoint),
            trigger={"processingTime": "20 milliseconds"},
            execution="resident",
            listener=self.facts,
        )
        self.queries.append(query)
        return query

    def run(self) -> None:
        """A run over what is left."""
        query = self.start()
        query.processAllAvailable()
        query.stop()

    def assert_exact(self) -> None:
        """Each record once, in order; and each with its number among those of its key."""
        if not self.is_keyed:
            self.flow.assert_exact()
            return
        wait_until_nothing_is_pending(self.flow.confluent, self.flow.topic_out)
        records = read_committed(self.flow.confluent, self.flow.topic_out)
        rows = [(record.key, json.loads(record.value or "")) for record in records]
        assert by_key((key, row["value"]) for key, row in rows) == by_key(self.flow.input)
        for _, numbers in by_key((key, row["n"]) for key, row in rows).items():
            assert numbers == list(range(1, len(numbers) + 1))


@pytest.fixture
def gangs(monkeypatch: pytest.MonkeyPatch) -> Gangs:
    return Gangs(monkeypatch)


@pytest.fixture
def mischief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mischief:
    mischief_at = Mischief(tmp_path / "mischief")
    monkeypatch.setattr(SinkCluster, "write_plan", mischief_at.write_plan)
    return mischief_at


@pytest.fixture(params=[False, True], ids=["stateless", "keyed"])
def resident(
    request: pytest.FixtureRequest, flow: Flow, mischief: Mischief, gangs: Gangs
) -> Iterator[Resident]:
    resident_flow = Resident(flow, mischief, is_keyed=request.param)
    yield resident_flow
    for query in resident_flow.queries:
        query.stop()


@pytest.mark.parametrize("order", [(WORKER, FORKED), (FORKED, WORKER)], ids=[WORKER, FORKED])
def test_members_killed_at_any_place_of_an_epoch_and_between_epochs(
    resident: Resident, gangs: Gangs, order: tuple[str, str]
) -> None:
    """Each time the epoch runs again in a new gang, and the next one does in the same.

    At each place of an epoch one of the two is killed, between epochs each of them.
    """
    flow, mischief = resident.flow, resident.mischief
    query = resident.start()
    flow.feed(30)
    query.processAllAvailable()
    places = (READ, KEYED, WRITTEN) if resident.is_keyed else (READ, WRITTEN)
    for place, who in zip(places, cycle(order), strict=False):
        gang, failed = gangs.newest, len(resident.facts.errors)
        mischief.ask(place, who, "kill")
        flow.feed(30)
        assert mischief.wait(place, who, "kill") in gang.pids.values()
        query.processAllAvailable()
        assert isinstance(resident.facts.errors[failed], GangLostError)
        assert gangs.newest is not gang
        wait_until_gone(gang.pids.values())
        flow.feed(5)
        query.processAllAvailable()
        assert len(resident.facts.errors) == failed + 1
        resident.assert_exact()
    for who in order:
        gang, failed = gangs.newest, len(resident.facts.errors)
        os.kill(gangs.pid(who), signal.SIGKILL)
        wait_until(lambda gang=gang: gang.is_lost, "nobody misses it")  # type: ignore[misc]
        flow.feed(30)
        query.processAllAvailable()
        assert gangs.newest is not gang
        assert len(resident.facts.errors) == failed, "no epoch was begun in a lost gang"
        resident.assert_exact()
    query.stop()
    assert query.exception() is None
    wait_until_gone(pid for gang in gangs.all for pid in gang.pids.values())


@pytest.mark.parametrize(
    ("resident", "who"), [(False, FORKED), (True, WORKER)], indirect=["resident"]
)
def test_a_paused_member_is_waited_for_and_one_that_hangs_is_not(
    resident: Resident, gangs: Gangs, who: str
) -> None:
    """An epoch may take as long as its transaction; the zombie is ended, and changes nothing."""
    flow, mischief = resident.flow, resident.mischief
    query = resident.start(resident.pipeline(transaction_timeout_ms=15_000))
    place = KEYED if resident.is_keyed else WRITTEN
    flow.feed(30)
    query.processAllAvailable()

    mischief.ask(place, who, "stop")
    flow.feed(30)
    paused = mischief.wait(place, who, "stop")
    time.sleep(3)
    os.kill(paused, signal.SIGCONT)
    query.processAllAvailable()
    assert resident.facts.errors == []
    resident.assert_exact()

    mischief.ask(place, who, "stop")
    flow.feed(30)
    zombie = mischief.wait(place, who, "stop")
    query.processAllAvailable()
    assert "takes longer than the 15 s that its transaction may" in str(resident.facts.errors[0])
    assert len(gangs.all) == 2
    resident.assert_exact()
    if not is_gone(zombie):
        os.kill(zombie, signal.SIGCONT)
    wait_until_gone(gangs.all[0].pids.values())
    flow.feed(30)
    query.processAllAvailable()
    assert len(resident.facts.errors) == 1
    resident.assert_exact()


@pytest.mark.parametrize(
    ("resident", "who"), [(False, WORKER), (True, FORKED)], indirect=["resident"]
)
def test_a_query_is_stopped_in_an_epoch_whose_task_hangs(
    resident: Resident, gangs: Gangs, who: str
) -> None:
    resident.mischief.ask(READ, who, "stop")
    resident.flow.feed(30)
    query = resident.start()
    resident.mischief.wait(READ, who, "stop")
    query.stop()
    assert not query.isActive
    assert query.exception() is None
    wait_until_gone(gangs.newest.pids.values())
    wait_until_nothing_is_pending(resident.flow.confluent, resident.flow.topic_out)
    assert read_committed(resident.flow.confluent, resident.flow.topic_out) == []
    resident.run()
    resident.assert_exact()


@pytest.mark.parametrize(
    ("resident", "what", "kind", "text"),
    [
        (False, "error", ValueError, "a mistake"),
        (True, "error", ValueError, "a mistake"),
        (True, "memory", MemoryError, "no room"),
        (False, "exit", TallystickError, r"SystemExit\(3\) ends a process of tasks"),
    ],
    indirect=["resident"],
)
def test_what_a_function_raises_ends_the_run_and_the_next_goes_on(
    resident: Resident, gangs: Gangs, what: str, kind: type[Exception], text: str
) -> None:
    place = KEYED if resident.is_keyed else READ
    resident.flow.feed(30)
    resident.mischief.ask(place, FORKED, what)
    query = resident.start()
    resident.mischief.wait(place, FORKED, what)
    with pytest.raises(kind, match=text) as met:
        query.awaitTermination(60)
    assert "in pass_on" in "".join(met.value.__notes__)
    assert len(gangs.all) == 1, "nothing is tried again"
    resident.run()
    resident.assert_exact()


def test_a_function_that_cannot_be_pickled_is_refused_with_the_reason(flow: Flow) -> None:
    lock, facts = threading.Lock(), Facts()

    def locked(rows: Any) -> Any:
        with lock:
            return rows

    flow.feed(10)
    with pytest.raises(ts.OptionError, match="cannot pickle"):
        flow.pipeline(locked).start(
            flow.spark, checkpoint=str(flow.checkpoint), execution="resident", listener=facts
        )
    assert facts.names == [], "Kafka is not asked"
    flow.run(execution="resident")
    flow.assert_exact()


@pytest.mark.parametrize("resident", [True], indirect=True)
def test_more_tasks_than_members_and_frames_that_wait_in_files(
    resident: Resident, gangs: Gangs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven tasks of two members; each file of frames is seen by who writes."""
    monkeypatch.setattr(gangs_module, "HELD_BYTES_MAX", 2000)
    query = resident.start(resident.pipeline(parallelism=7))
    for _ in range(3):
        resident.flow.feed(2000, keys=50)
        query.processAllAvailable()
    files = resident.mischief.files()
    assert {pid for pid, _ in files} == set(gangs.newest.pids.values())
    assert max(size for _, size in files) > 10_000
    resident.assert_exact()
    assert resident.facts.errors == []


def test_two_pipelines_and_a_job_of_the_users_share_a_session(
    kafka: EmbeddedKafka, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each pipeline holds one of two slots: both go on; a job is told what it waits for."""
    flows = [Flow(kafka, spark, tmp_path / name) for name in ("one", "two")]
    queries = []
    for flow in flows:
        queries.append(
            flow.pipeline().start(spark, checkpoint=str(flow.checkpoint), execution="resident")
        )
        flow.feed(30)
        queries[-1].processAllAvailable()
        if len(queries) == 1:
            assert spark.range(1000).count() == 1000
            assert "hold all" not in caplog.text
    for flow, query in zip(flows, queries, strict=True):
        flow.feed(30)
        query.processAllAvailable()
        flow.assert_exact()
    assert "resident tasks now hold all 2 slots of this application" in caplog.text
    assert "local[3]" in caplog.text
    counts: list[int] = []
    job = threading.Thread(target=lambda: counts.append(spark.range(1000).count()), daemon=True)
    job.start()
    queries[0].stop()
    job.join(60)
    assert counts == [1000]
    flows[1].feed(30)
    queries[1].processAllAvailable()
    flows[1].assert_exact()
    queries[1].stop()


@pytest.mark.parametrize("resident", [False], indirect=True)
def test_a_driver_killed_in_an_epoch_takes_its_members_with_it(
    resident: Resident, drivers: Drivers, tmp_path: Path
) -> None:
    """One is at work, one is stopped."""
    flow, started = resident.flow, tmp_path / "started"
    flow.feed(60)
    driver = drivers.take()
    spec = flow.spec(execution="resident", map_waits_for="/nowhere", tells_pids=str(started))
    driver.run(spec)
    wait_until(lambda: len(processes_told_in(started)) == 2, "both are in their function")
    pids = processes_told_in(started)
    os.kill(min(pids), signal.SIGSTOP)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait_until_killed()
    wait_until_gone(pids)
    driver.stop()
    resident.run()
    resident.assert_exact()


@pytest.mark.parametrize("resident", [False], indirect=True)
def test_a_session_that_is_stopped_ends_the_pipeline_in_it(
    resident: Resident, drivers: Drivers, tmp_path: Path
) -> None:
    """In an epoch, and while it waits for records."""
    flow = resident.flow
    flow.feed(60)
    driver = drivers.take()
    for waits_for in ("/nowhere", ""):
        started = tmp_path / f"started{waits_for == ''}"
        spec = flow.spec(execution="resident", map_waits_for=waits_for, tells_pids=str(started))
        driver.run(
            {
                **spec,
                "session_stops_behind": str(started),
                "trigger": {"processingTime": "20 milliseconds"},
            }
        )
        error = driver.wait_for_end() or ""
        assert "SparkContext was stopped" in error, error
        wait_until_gone(processes_told_in(started))
    flow.feed(10)
    resident.run()
    resident.assert_exact()
    drivers.give_back(driver)
