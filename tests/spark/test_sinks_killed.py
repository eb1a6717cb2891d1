"""Several sinks of one pipeline never disagree, whatever is killed, paused or broken, and when.

After every death and restart each of them holds the input, exactly once, and nothing lingers. Runs
of this process die without a word to anyone, after every fact of the protocol; driver processes
are killed with all that is theirs. `SINK_KILLS=all` kills those after every fact too.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyspark.errors import StreamingQueryException

import tallystick as ts
from tallystick.errors import RetriableError
from tallystick.ops.inspection import inspect
from tallystick.run.participants import OpenSinks
from tallystick.spark.streaming.foreach_batch import EpochRunner
from tallystick.storage.file_storage import FileStorage
from tallystick_tools.demo.flights import load
from tests.postgres.real_postgres import PostgresServer
from tests.spark.driver_process import Drivers
from tests.spark.flow import Facts, Flow, finish
from tests.spark.keyed_flights import Flights, keyed_drivers
from tests.spark.sunk import Sunk, hidden, open_ids
from tests.spark.topics import read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(3600)]

Kill = tuple[str, int]
"""The fact after which a run dies, and the how-manieth of its kind in that run."""
Chain = list[Kill]
"""Deaths that follow on each other, before a run that comes to its end."""
IS_LONG = os.environ.get("SINK_KILLS") == "all"
ONE_COMMITTED, RETURNED = "ParticipantCommitted", "EpochReturned"
"""Not events of the coordinator: in the middle of settling, and before Spark's log, if there is."""
FACTS = [
    "EpochWanted",
    "ProducerFenced",
    "CommittedRead",
    "EpochPlanned",
    "ParticipantsRecovered",
    "EpochRan",
    "ManifestWritten",
    "OutputCounted",
    "TransactionCommitted",
    ONE_COMMITTED,
    "OutputSettled",
    "OutputConfirmed",
]
ALL: list[Chain] = [
    *([(fact, 1)] for fact in FACTS),
    *([(fact, 2)] for fact in FACTS[FACTS.index("EpochRan") :]),
    [(ONE_COMMITTED, 3), (ONE_COMMITTED, 1), ("ParticipantsRecovered", 1)],
    [("TransactionCommitted", 2), (ONE_COMMITTED, 2), ("EpochRan", 1)],
    [("EpochRan", 2), ("CommittedRead", 1), ("EpochRan", 1), ("ManifestWritten", 1)],
]
CHAINS: dict[str, list[Chain]] = {
    "kafka": [
        [
            ("TransactionCommitted", 1),
            ("EpochRan", 1),
            (ONE_COMMITTED, 1),
            ("OutputCounted", 1),
        ],
    ],
    "checkpoint": [
        [
            ("EpochRan", 1),
            (ONE_COMMITTED, 2),
            ("ParticipantsRecovered", 1),
            ("ManifestWritten", 1),
        ],
    ],
    "users": [
        [("ManifestWritten", 1), ("ManifestWritten", 2), (ONE_COMMITTED, 3), ("OutputSettled", 1)]
    ],
}
"""Those that every run of the tests takes, by pipeline."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A server of this module's own, which is killed too."""
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def sunk(flow: Flow, postgres: PostgresServer) -> Sunk:
    """No sinks yet."""
    return Sunk(flow, postgres)


def all_of(name: str, sunk: Sunk) -> Sunk:
    """Pipelines with different sinks: Kafka decides, the checkpoint does, with the user's own."""
    match name:
        case "kafka":
            return sunk.kafka().prepared().files()
        case "checkpoint":
            return sunk.kafka(transactions="task").staged().newest()
        case _:
            return sunk.lines().kafka(transactions="task").lines()


class Died(BaseException):
    """Nobody in between can catch it and tidy up."""


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> "Mortal":
    """Runs of this process meet the facts that no listener hears."""
    fate = Mortal()
    call, commit_one = EpochRunner.__call__, OpenSinks._commit_one

    def called(self: EpochRunner, rows: Any, batch_id: int) -> None:
        try:
            call(self, rows, batch_id)
            fate.meet(RETURNED)
        except Died as death:
            raise RuntimeError("died") from death  # Spark is not to die of it

    def committed(self: OpenSinks, committable: Any) -> Any:
        outcome = commit_one(self, committable)
        fate.meet(ONE_COMMITTED)
        return outcome

    monkeypatch.setattr(EpochRunner, "__call__", called)
    monkeypatch.setattr(OpenSinks, "_commit_one", committed)
    return fate


class Mortal:
    """A listener that dies at the n-th occurrence of a fact."""

    def __init__(self) -> None:
        self.at: Kill = ("", 0)

    def __call__(self, event: object) -> None:
        self.meet(type(event).__name__)

    def meet(self, fact: str) -> None:
        """Die of it, if it is time."""
        if fact == self.at[0]:
            self.at = (fact, self.at[1] - 1)
            if self.at[1] == 0:
                raise Died


@pytest.mark.parametrize("name", CHAINS)
def test_a_run_that_dies_behind_any_fact_leaves_nothing_wrong(
    sunk: Sunk, mortal: Mortal, name: str
) -> None:
    """The dead one's connections stay open, as those of a driver whose host is cut off."""
    all_of(name, sunk)
    for chain in ALL if IS_LONG else CHAINS[name]:
        sunk.flow.feed(60)
        for at in chain:
            mortal.at = at
            with pytest.raises(Died):
                sunk.flow.run(sunk.pipeline(max_offsets_per_trigger=30), listener=mortal)
        mortal.at = ("", 0)
        sunk.flow.run(sunk.pipeline(max_offsets_per_trigger=60))
        sunk.assert_exact()


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("kafka", [("TransactionCommitted", 2)]),  # the first is a lineage's
        ("checkpoint", [(ONE_COMMITTED, 2)]),
        *([("users", [("ManifestWritten", 2), (ONE_COMMITTED, 1)])] if IS_LONG else []),
    ],
)
def test_a_driver_killed_with_all_that_is_its_own(
    sunk: Sunk, drivers: Drivers, name: str, kills: Chain
) -> None:
    all_of(name, sunk)
    for chain in ALL if IS_LONG else [kills]:
        sunk.flow.feed(90)
        for fact, occurrence in chain:
            driver = drivers.take()
            driver.run(sunk.spec(kill_at=fact, occurrence=occurrence, epoch_records=30))
            driver.wait_until_killed()
            driver.stop()
        sunk.flow.run(sunk.pipeline(max_offsets_per_trigger=60))
        sunk.assert_exact()


@pytest.mark.parametrize("name", ["kafka", "checkpoint"])
def test_a_task_whose_worker_is_killed_is_tried_again(
    sunk: Sunk, drivers: Drivers, tmp_path: Path, name: str
) -> None:
    """Its first attempt had written to every sink, and prepared nowhere. It is the last epoch.

    Spark's attempt, which the epoch does not notice; after a resident task the epoch runs again.
    """
    all_of(name, sunk)
    driver = drivers.take()
    for execution, failed in (("jobs", 0), ("resident", 1)):
        sunk.flow.feed(300)
        marker = tmp_path / execution
        settings = {"master": "local[2,4]", "dies": "worker", "marker": str(marker)}
        driver.run(sunk.spec(epoch_records="all", execution=execution, **settings))
        assert driver.wait_for_end() is None
        assert marker.exists()
        assert driver.facts.count("ActionFailed") == failed
        sunk.assert_exact()
    drivers.give_back(driver)


@pytest.mark.parametrize("execution", ["resident", "jobs"])
def test_what_an_attempt_left_open_that_died_holds_up_no_reader(
    sunk: Sunk, drivers: Drivers, tmp_path: Path, execution: str
) -> None:
    """Its rows were in Kafka already; no epoch comes after it, and no timeout is waited for."""
    sunk.kafka(transactions="task", batch_bytes=1024)
    sunk.flow.feed(30_000)
    driver = drivers.take()
    marker = tmp_path / "died"
    settings = {"dies": "worker", "marker": str(marker), "execution": execution}
    driver.run(sunk.spec(master="local[2,4]", epoch_records="all", **settings))
    assert driver.wait_for_end() is None
    assert marker.exists()
    drivers.give_back(driver)
    assert open_ids(sunk.flow) == []
    sunk.assert_exact()


PAUSES = [("epoch", "OutputCounted"), ("task", "OutputCounted"), ("task", "TransactionCommitted")]


@pytest.mark.parametrize(("transactions", "fact"), PAUSES)
def test_a_paused_driver_that_wakes_up_behind_its_successor_harms_nothing(
    sunk: Sunk, drivers: Drivers, transactions: str, fact: str
) -> None:
    """Before its decision, which comes too late; and after it: all is settled by another."""
    sunk.kafka(transactions=transactions).prepared().files()
    sunk.flow.feed(90)
    zombie = drivers.take()
    zombie.run(sunk.spec(block_at=fact, occurrence=2, epoch_records=30))
    zombie.wait_until_blocked()
    zombie.pause()

    sunk.flow.feed(40)
    sunk.flow.run(sunk.pipeline())
    sunk.assert_exact()
    zombie.resume()
    zombie.go_on()

    assert "FencedError: " in (zombie.wait_for_end() or "")
    sunk.assert_exact()
    drivers.give_back(zombie)


def test_late_tasks_of_a_fenced_driver_prepare_what_never_counts(
    sunk: Sunk, drivers: Drivers, tmp_path: Path
) -> None:
    """It aborts what they prepared itself: its successor may never have another look."""
    sunk.kafka(transactions="task").prepared().newest().files().lines()
    sunk.flow.feed(60)
    gate = tmp_path / "gate"
    zombie = drivers.take()
    zombie.run(sunk.spec(map_waits_for=str(gate), block_at="ParticipantsRecovered"))
    zombie.wait_until_blocked()
    zombie.go_on()  # into the epoch, whose tasks now wait for the gate

    sunk.flow.run(sunk.pipeline())
    gate.touch()

    assert "FencedError: " in (zombie.wait_for_end() or "")
    assert "EpochRan" in zombie.facts, "they prepared"
    drivers.give_back(zombie)
    sunk.assert_exact()
    sunk.flow.feed(30)
    sunk.flow.run(sunk.pipeline())
    sunk.assert_exact()


@pytest.mark.parametrize("transactions", ["epoch", "task"])
def test_a_database_killed_between_prepare_and_commit_comes_back_with_all_of_it(
    sunk: Sunk, postgres: PostgresServer, transactions: str
) -> None:
    sunk.kafka(transactions=transactions).prepared().staged().files()
    for fact in ("TransactionCommitted", "EpochRan"):
        sunk.flow.feed(60)

        def bounce(_: object) -> None:
            postgres.kill()
            postgres.start()

        facts = Facts(fact, bounce)
        sunk.flow.run(sunk.pipeline(), listener=facts)
        assert fact in facts.names
        sunk.assert_exact()


def test_a_database_that_is_down_when_it_should_commit_holds_up_no_other_sink(
    sunk: Sunk, postgres: PostgresServer
) -> None:
    sunk.kafka(transactions="task").prepared().files()
    sunk.flow.feed(60)
    sunk.flow.run(sunk.pipeline())
    sunk.flow.feed(60)
    try:
        with pytest.raises(RetriableError, match="PostgreSQL"):
            sunk.flow.run(
                sunk.pipeline(),
                listener=Facts("TransactionCommitted", lambda _: postgres.kill()),
            )
        sunk.flow.assert_exact()  # Kafka has it all
    finally:
        postgres.start()
    sunk.flow.run(sunk.pipeline())
    sunk.assert_exact()


@pytest.mark.parametrize("transactions", ["epoch", "task"])
def test_a_row_that_a_table_refuses_leaves_nothing_in_any_sink(
    sunk: Sunk, transactions: str
) -> None:
    sunk.kafka(transactions=transactions).files().prepared("CHECK (value <> '77')").lines()
    sunk.flow.feed(60)
    sunk.flow.run(sunk.pipeline())
    sunk.assert_exact()

    before = list(sunk.flow.input)
    sunk.flow.feed(30)
    with pytest.raises(ts.RecordError, match=r"PostgreSQL: .* constraint"):
        sunk.flow.run(sunk.pipeline())
    after, sunk.flow.input = sunk.flow.input, before
    sunk.assert_exact()

    sunk.flow.input = [row for row in after if row[1] != "77"]
    sunk.flow.run(sunk.pipeline(all_but_77()))
    sunk.assert_exact()


def all_but_77() -> Any:
    def choose(rows: pa.RecordBatch) -> pa.RecordBatch:
        rows = rows.select(["key", "value"])
        return rows.filter(pa.array([value != b"77" for value in rows["value"].to_pylist()]))

    return choose


def test_a_query_of_the_users_own_with_a_transaction_per_task(sunk: Sunk, mortal: Mortal) -> None:
    sunk.kafka(transactions="task")
    flow = sunk.flow
    assert flow.spark is not None

    def run() -> None:
        reader = flow.spark.readStream.format("tallystick").options(**flow.kafka.kafka_options)
        reader.options(subscribe=flow.topic_in, startingOffsets="earliest", maxOffsetsPerTrigger=40)
        writer = reader.load().select("key", "value").writeStream.queryName(flow.name)
        writer.option("checkpointLocation", str(flow.checkpoint)).trigger(availableNow=True)
        finish(writer.foreachBatch(flow.sink(transactions="task")).start)

    for at in [(ONE_COMMITTED, 3), (RETURNED, 1)]:
        flow.feed(80)
        mortal.at = at
        with pytest.raises(StreamingQueryException, match="died"):
            run()
    run()
    sunk.assert_exact()


FLIGHT = "id bigint, carrier string, dest string"
UID = "flights-by-destination"
FILES = "files-of-flights"


def numbering(flow: Flow, parallelism: int) -> ts.Pipeline:
    """The pipeline of `keyed_job.py`, for this process."""
    counted = ts.aggregate({"n": ts.count()}, each="record", keep=["id", "carrier"])

    def only_flights(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(["id", "carrier", "dest"])

    return (
        ts.Pipeline(flow.name)
        .read(flow.source(value=ts.Json(FLIGHT), max_offsets_per_trigger=400))
        .map_batches(only_flights, schema=FLIGHT)
        .key_by("dest", max_parallelism=32)
        .process(counted, output=f"{FLIGHT}, n bigint", parallelism=parallelism, uid=UID)
        .write(
            flow.sink(transactions="task", key="dest", value=ts.Json()),
            ts.FileSink(str(flow.folder / FILES)),
        )
    )


def assert_counted(flow: Flow, flights: Flights) -> None:
    """Kafka, files and state agree."""
    flights.assert_exact()
    records = read_committed(flow.confluent, flow.topic_out)
    rows = [json.loads(record.value or "") for record in records]
    file_rows = ds.dataset(flow.folder / FILES, format="parquet").to_table().to_pylist()
    assert sorted((row["id"], row["n"]) for row in file_rows) == sorted(
        (row["id"], row["n"]) for row in rows
    )
    assert hidden(flow.folder / FILES) == []
    assert open_ids(flow) == []


def test_counts_and_their_files_go_on_over_deaths_and_rescales(
    flow: Flow, mortal: Mortal, tmp_path: Path
) -> None:
    """4 → 2 → 3 tasks, by runs that die and, in a long run, by drivers that are killed."""
    flights = Flights(flow, load(4000))
    sinks = [
        {"kind": "kafka", "transactions": "task"},
        {"kind": "files", "path": str(flow.folder / FILES)},
    ]
    kills = [(4, "ManifestWritten", 2), (2, ONE_COMMITTED, 2)] if IS_LONG else []
    drivers = keyed_drivers(tmp_path, tmp_path / "copies")
    try:
        for parallelism, fact, occurrence in kills:
            flights.feed(1000)
            driver = drivers.take()
            settings = {"kill_at": fact, "occurrence": occurrence, "epoch_records": 400}
            driver.run(flights.spec(parallelism, sinks=sinks, **settings))
            driver.wait_until_killed()
    finally:
        drivers.close()
    flights.feed(1000)
    flow.run(numbering(flow, 3))
    assert_counted(flow, flights)

    flights.feed(1000)
    for parallelism, at in [(4, ("EpochRan", 1)), (2, (ONE_COMMITTED, 3))]:
        mortal.at = at
        with pytest.raises(Died):
            flow.run(numbering(flow, parallelism), listener=mortal)
    mortal.at = ("", 0)
    flow.run(numbering(flow, 4))
    assert_counted(flow, flights)


IN_EPOCH_2 = [
    ("EpochRan", 2, 1),
    ("ManifestWritten", 3, 1),  # the first is a lineage's
    ("TransactionCommitted", 3, 2),  # so here
    (ONE_COMMITTED, 12, 2),  # each epoch has ten
]
"""Between prepare, decision and commits: the fact, and the epoch that is decided then."""


@pytest.mark.parametrize("execution", ["resident", "jobs"])
@pytest.mark.parametrize(("fact", "occurrence", "epoch"), IN_EPOCH_2)
def test_what_a_killed_driver_left_is_recovered_without_spark(
    sunk: Sunk, drivers: Drivers, fact: str, occurrence: int, epoch: int, execution: str
) -> None:
    """Every sink shows exactly the decided epochs; then the pipeline goes on."""
    sunk.lines().kafka(transactions="task").prepared().staged().files()
    sunk.flow.feed(90)
    driver = drivers.take()
    driver.run(
        sunk.spec(kill_at=fact, occurrence=occurrence, epoch_records=30, execution=execution)
    )
    driver.wait_until_killed()
    driver.stop()

    done = sunk.pipeline().recover(checkpoint=str(sunk.flow.checkpoint))
    again = sunk.pipeline().recover(checkpoint=str(sunk.flow.checkpoint))

    assert (done.epoch, done.runs_again, again.epoch) == (epoch, None, epoch)
    assert all(sink.committed and not sink.lost and not sink.failures for sink in done.sinks)
    assert [sink.aborted > 0 for sink in done.sinks] == [epoch == 1] * 5
    assert not any(sink.committed or sink.aborted for sink in again.sinks)
    sunk.assert_nothing_lingers()
    assert set(sunk.counts()) == {visible_rows(sunk)}
    sunk.flow.feed(30)
    sunk.flow.run(sunk.pipeline(max_offsets_per_trigger=60))
    sunk.assert_exact()


def visible_rows(sunk: Sunk) -> int:
    """How many records the newest decided epoch, and those before it, have read."""
    report = inspect(FileStorage(str(sunk.flow.checkpoint)))
    return sum(offset for source in report.positions for offset in source.values())
