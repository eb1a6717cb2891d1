"""`writeStream.format("tallystick")`: a transaction per task, committed after one decision."""

import builtins
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from pyspark import TaskContext, cloudpickle
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

import tallystick as ts
from tests.failover.sink_job import open_ids
from tests.spark import mortal_writer
from tests.spark.driver_process import DriverProcess, Drivers
from tests.spark.flow import Flow, finish
from tests.spark.mortal_writer import Death
from tests.spark.topics import WAIT_S, pending, read_committed, wait_until_nothing_is_pending
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(900)]

KILLS = [
    ("CommitOfOneTaskDue", 2),  # decided, and only a part of it committed
    *(
        [
            ("TransactionCommitted", 2),  # decided, and nothing committed
            ("TaskPrepared", 2),  # some tasks have prepared, and nobody was told
            ("CommitReturned", 2),  # between our commit and Spark's log
        ]
        if os.environ.get("SINK_KILLS") == "all"
        else []
    ),
]
"""The fact after which Spark's driver dies, and the how-manieth of its kind in that run."""
ENDS = [
    "TaskPrepared",
    "EpochRan",
    "ManifestWritten",
    "TransactionCommitted",
    "CommitOfOneTaskDue",
    "OutputSettled",
    "CommitReturned",
]
"""Facts after which an error ends the query, and Spark asks for an abort."""
NewTopic = Callable[..., str]


@pytest.fixture(autouse=True)
def active(spark: SparkSession) -> None:
    """Spark looks a sink up in the session that is active, which other tests may have changed."""
    spark.createDataFrame([], "a int")
    ts.register(spark)


def stream(flow: Flow, **options: str) -> DataFrame:
    """The input of the flow."""
    assert flow.spark is not None
    settings = {
        **flow.kafka.kafka_options,
        "subscribe": flow.topic_in,
        "startingOffsets": "earliest",
        **options,
    }
    return flow.spark.readStream.format("tallystick").options(**settings).load()


def start(
    flow: Flow, rows: DataFrame, *, mode: str = "append", form: str = "tallystick", **options: Any
) -> StreamingQuery:
    """Start a query over what is there."""
    settings = {**flow.kafka.kafka_options, "topic": flow.topic_out, **options}
    return (
        rows.writeStream.format(form)
        .queryName(flow.name)
        .options(**{name: value for name, value in settings.items() if value is not None})
        .option("checkpointLocation", str(flow.checkpoint))
        .outputMode(mode)
        .trigger(availableNow=True)
        .start()
    )


def write(flow: Flow, rows: DataFrame, **settings: Any) -> StreamingQuery:
    """Run a query over what is there, and raise what it raises."""
    return finish(lambda: start(flow, rows, **settings))


def copied(flow: Flow, **options: str) -> DataFrame:
    """Keys and values as they are, in epochs of a hundred records."""
    return stream(flow, maxOffsetsPerTrigger="100", **options).select("key", "value")


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    """Drivers that write by `writeStream`, and die."""
    job = Path(__file__).with_name("writer_job.py")
    pool = Drivers(tmp_path_factory.mktemp("writers"), job=job)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def mortal(spark: SparkSession) -> str:
    """The format that dies when asked to."""
    cloudpickle.register_pickle_by_value(mortal_writer)
    spark.dataSource.register(mortal_writer.MortalFormat)
    return "mortal"


def end_at(flow: Flow, mortal: str, fact: str, occurrence: int, folder: Path) -> None:
    """Run the query, and have it end with an error behind a fact."""
    folder.mkdir()
    death = Death(str(folder), fact, occurrence)
    with pytest.raises(StreamingQueryException, match=f"this is the end, at {fact}"):
        write(flow, copied(flow), form=mortal, **death.to_option())


def standing_at(
    fact: str, flow: Flow, writers: Drivers, folder: Path
) -> tuple[DriverProcess, Path]:
    """Start a driver that stands still behind a fact, until the file exists that is returned."""
    facts, released = folder / "facts", folder / "released"
    driver = writers.take()
    driver.run(flow.spec(dies_at=fact, facts=str(facts), waits_for=str(released)))
    try:
        wait_until((facts / f"{fact}-1").exists, f"no fact {fact}")
    except AssertionError:
        raise AssertionError(driver.log_tail()) from None
    return driver, released


def transactional_ids(flow: Flow) -> list[str]:
    """Those of the first attempts of its tasks, one for each partition of the input."""
    query_id = json.loads((flow.checkpoint / "metadata").read_text())["id"]
    return [f"tallystick-{query_id}/kafka/{task}/0" for task in range(flow.partitions)]


def test_a_driver_killed_behind_every_fact_loses_and_repeats_nothing(
    flow: Flow, writers: Drivers
) -> None:
    flow.feed(300)
    for fact, occurrence in KILLS:
        driver = writers.take(spares=1)  # what is left, the next test takes
        driver.run(flow.spec(dies_at=fact, occurrence=occurrence, epoch_records=40, kills=True))
        driver.wait_until_killed()
        driver.stop()
        flow.feed(20)

    write(flow, copied(flow))

    flow.assert_exact()


def test_an_error_behind_any_fact_leaves_nothing_open_or_undone(
    flow: Flow, mortal: str, tmp_path: Path
) -> None:
    """Spark asks for an abort in each case: what is decided must not be, and all else must be."""
    flow.feed(150)
    for number, fact in enumerate(ENDS):
        end_at(flow, mortal, fact, 2, tmp_path / f"facts-{number}")
        if fact in ("EpochRan", "ManifestWritten"):
            wait_until_nothing_is_pending(flow.confluent, flow.topic_out)  # no start was needed
        flow.feed(150)

    write(flow, copied(flow))

    flow.assert_exact()


def test_an_attempt_that_died_with_a_prepared_transaction_is_not_committed(
    flow: Flow, writers: Drivers
) -> None:
    """Another attempt prepares the same rows; the dead one's transaction is not waited for."""
    flow.feed(60)
    driver = writers.take()
    driver.run(
        flow.spec(master="local[2,4]", dies_at="TaskPrepared", occurrence=2, epoch_records=30)
    )
    error = driver.wait_for_end()
    driver.stop()

    assert error is None
    flow.assert_exact()


def test_what_the_loser_of_a_speculation_left_open_does_not_wait_for_a_later_epoch(
    flow: Flow, tmp_path: Path
) -> None:
    """The winner, whom the driver hears of, may be the first attempt: its number says nothing."""
    flow.feed(300)
    servers, marker = flow.kafka.bootstrap_servers, tmp_path / "marker"
    topic = flow.topic_out

    def beside_a_loser(batches: Any) -> Any:
        from confluent_kafka import Producer  # the class itself cannot be pickled

        context = TaskContext.get()
        is_second = context.getLocalProperty("streaming.sql.batchId") == "1"
        if is_second and context.partitionId() == 0:
            query_id = context.getLocalProperty("sql.streaming.queryId")
            name = f"tallystick-{query_id}/kafka/0/1"
            loser = Producer({"bootstrap.servers": servers, "transactional.id": name})
            loser.init_transactions(30)
            loser.begin_transaction()
            loser.produce(topic, b"of the loser")
            assert loser.flush(30) == 0
            marker.write_text(name)
            builtins.loser = loser  # type: ignore[attr-defined]  # it lets go of nothing
        yield from batches

    write(flow, copied(flow).mapInArrow(beside_a_loser, "key binary, value binary"))

    assert marker.read_text() not in open_ids(flow.kafka)
    flow.assert_exact()


def test_a_driver_that_was_replaced_decides_nothing(
    flow: Flow, writers: Drivers, tmp_path: Path
) -> None:
    """It hangs after its tasks; another one runs the epoch, and goes on; then it wakes up."""
    flow.feed(60)
    driver, released = standing_at("EpochRan", flow, writers, tmp_path)

    flow.feed(60)
    write(flow, copied(flow))
    released.touch()
    error = driver.wait_for_end()
    driver.stop()

    assert "belongs to another run now" in (error or "")
    flow.assert_exact()


def test_late_tasks_of_a_replaced_driver_leave_nothing_open(
    flow: Flow, writers: Drivers, tmp_path: Path
) -> None:
    """Its successor has read everything, so Spark will not ask it to look for what they prepare."""
    flow.feed(60)
    driver, released = standing_at("ParticipantsRecovered", flow, writers, tmp_path)
    write(flow, copied(flow))
    assert not (tmp_path / "facts/TaskPrepared-1").exists()

    released.touch()
    error = driver.wait_for_end()
    driver.stop()

    assert "belongs to another run now" in (error or "")
    assert (tmp_path / "facts/TaskPrepared-3").exists(), "each of its tasks had begun a transaction"
    assert not {*transactional_ids(flow)} & open_ids(flow.kafka)
    flow.assert_exact()


def test_complete_mode_writes_the_whole_result_each_time(flow: Flow) -> None:
    counts = (
        stream(flow, maxOffsetsPerTrigger="70")
        .groupBy("key")
        .count()
        .select(f.col("key").cast("string").alias("k"), "count")
    )
    flow.feed(140)

    write(flow, counts, mode="complete", **{"value.format": "json", "key.field": "k"})

    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
    found = read_committed(flow.confluent, flow.topic_out)
    assert sorted((r.key, r.value) for r in found if '"count":20' in (r.value or "")) == sorted(
        (f"k{n}", f'{{"k":"k{n}","count":20}}') for n in range(7)
    )
    assert len(found) % 7 == 0
    assert len(found) >= 14, "each epoch writes all keys"


def test_what_cannot_work_ends_the_query_and_says_why(flow: Flow) -> None:
    """That Spark refuses update mode is documented: if it takes it one day, that has to change."""
    flow.feed(3)
    with pytest.raises(StreamingQueryException, match="did you mean 'compression'"):
        write(flow, copied(flow), compresion="lz4")
    counts = stream(flow).groupBy("key").count().selectExpr("key", "string(count) as value")

    with pytest.raises(StreamingQueryException, match="tallystick does not support Update mode"):
        write(flow, counts, mode="update")

    (flow.checkpoint / "savepoint.json").write_bytes(b"somebody's")
    with pytest.raises(StreamingQueryException, match="is the folder of a savepoint"):
        write(flow, copied(flow))
    rows = copied(flow).writeStream.option("checkpointLocation", str(flow.checkpoint))
    with pytest.raises(StreamingQueryException, match="is the folder of a savepoint"):
        finish(rows.trigger(availableNow=True).foreachBatch(flow.sink()).start)


def test_rows_choose_their_topics(flow: Flow, tallystick_topic: NewTopic) -> None:
    other = tallystick_topic("chosen", partitions=2)
    flow.feed(20)
    number = f.col("value").cast("string").cast("int")
    rows = stream(flow).select(
        "key", "value", f.when(number < 10, flow.topic_out).otherwise(other).alias("topic")
    )

    write(flow, rows, topic=None, **{"token.topic": flow.topic_out})

    for topic, expected in ((flow.topic_out, range(10)), (other, range(10, 20))):
        wait_until_nothing_is_pending(flow.confluent, topic)
        found = read_committed(flow.confluent, topic)
        assert sorted(int(r.value or "") for r in found) == list(expected)


def test_a_failing_task_ends_the_query_and_its_neighbours_hold_nobody_up(flow: Flow) -> None:
    flow.feed(90)

    def fails_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        for batch in batches:
            yield batch.select(["key", "value"])
        if TaskContext.get().partitionId() == 2:
            time.sleep(1)  # the others have prepared
            raise ValueError("no such weather")

    failing = stream(flow).mapInArrow(fails_once, "key binary, value binary")
    with pytest.raises(StreamingQueryException, match="no such weather"):
        write(flow, failing)
    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
    assert read_committed(flow.confluent, flow.topic_out) == []

    write(flow, copied(flow))

    flow.assert_exact()


def test_a_query_stopped_in_the_middle_goes_on_exactly(flow: Flow) -> None:
    flow.feed(90)

    def hangs(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        for batch in batches:
            yield batch.select(["key", "value"])
        if TaskContext.get().partitionId() == 2:
            time.sleep(600)

    hanging = stream(flow).mapInArrow(hangs, "key binary, value binary")
    query = start(flow, hanging)
    try:
        wait_until(lambda: pending(flow.confluent, flow.topic_out), "no task has prepared")
    finally:
        query.stop()

    flow.feed(10)
    write(flow, copied(flow))

    flow.assert_exact()


def abort_by_hand(flow: Flow, transactional_id: str) -> None:
    """As an operator's tool, or a stranger with the same id, would."""
    stranger = Producer({**flow.confluent, "transactional.id": transactional_id})
    stranger.init_transactions(WAIT_S)


@pytest.mark.parametrize("lost", ["all", "one"])
def test_what_is_decided_and_lost_is_run_again_or_stops_the_query(
    flow: Flow, mortal: str, tmp_path: Path, lost: str
) -> None:
    flow.feed(90)
    end_at(flow, mortal, "TransactionCommitted", 2, tmp_path / "facts")
    assert len(pending(flow.confluent, flow.topic_out)) == 3
    ids = transactional_ids(flow)
    for each in ids if lost == "all" else ids[:1]:
        abort_by_hand(flow, each)

    if lost == "one":
        with pytest.raises(
            StreamingQueryException, match=r"(?s)DataLossError.*lost-output-of-epoch-0"
        ):
            write(flow, copied(flow))
        assert len(read_committed(flow.confluent, flow.topic_out)) < 90
        wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
        write(flow, copied(flow), accept="lost-output-of-epoch-0")
        flow.feed(10)
        write(flow, copied(flow))
        values = [r.value for r in read_committed(flow.confluent, flow.topic_out)]
        assert len(values) == len(set(values)) < 100
    else:
        write(flow, copied(flow))
        flow.assert_exact()


def test_the_log_of_a_query_is_mended_and_put_right_as_the_manifests_have_it(flow: Flow) -> None:
    """After a power cut, and after an entry of the log was replaced by an older one."""
    rows = stream(flow).select("key", "value")
    for _ in range(2):
        flow.feed(40)
        finish(lambda: start(flow, rows))
    for path in ("commits/1", "offsets/2"):
        (flow.checkpoint / path).write_bytes(b"")
    flow.feed(40)
    finish(lambda: start(flow, rows))
    flow.assert_exact()

    (flow.checkpoint / "offsets/.2.crc").unlink(missing_ok=True)
    (flow.checkpoint / "offsets/2").write_bytes((flow.checkpoint / "offsets/1").read_bytes())
    flow.feed(40)
    with pytest.raises(StreamingQueryException, match="SparkLogError"):
        finish(lambda: start(flow, rows))
    finish(lambda: start(flow, rows))
    flow.assert_exact()
