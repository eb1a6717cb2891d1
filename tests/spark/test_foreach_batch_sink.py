"""`KafkaSink` after a streaming query of the user's own: one transaction per micro-batch."""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from tallystick.checkpoint.spark_log import SparkLog
from tallystick.epoch import manifest as m
from tallystick.epoch.two_phase import Committable
from tallystick.errors import (
    BrokerUnavailableError,
    DataLossError,
    OptionError,
    QueryEndedError,
    StorageError,
    TallystickError,
)
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.ops import savepoints
from tallystick.ops.checkpoint_view import asking
from tallystick.run.participants import OpenSinks
from tallystick.spark.engine import DataFrameEngine
from tallystick.spark.streaming import foreach_batch
from tallystick.spark.streaming.executions import active_runs, current_run_id
from tallystick.spark.streaming.foreach_batch import EpochRunner
from tallystick.storage.file_storage import FileStorage
from tests.spark.flow import Flow, finish
from tests.spark.topics import (
    by_key,
    numbered,
    produce,
    read_committed,
    wait_until_nothing_is_pending,
)

pytestmark = [pytest.mark.broker, pytest.mark.spark]

NewTopic = Callable[..., str]


def write(flow: Flow, rows: DataFrame, sink: Any, *, mode: str = "append") -> None:
    """Run the query over what is there."""
    finish(
        rows.writeStream.queryName(flow.name)
        .option("checkpointLocation", str(flow.checkpoint))
        .outputMode(mode)
        .trigger(availableNow=True)
        .foreachBatch(sink)
        .start
    )


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


def filed(flow: Flow) -> DataFrame:
    """Rows of `file`, a micro-batch for each call of it.

    Where only the sink is looked at: Spark reads files without the Python processes of a source.
    """
    assert flow.spark is not None
    (flow.folder / "rows").mkdir(exist_ok=True)
    reader = flow.spark.readStream.schema("key string, value string")
    return reader.option("maxFilesPerTrigger", 1).json(str(flow.folder / "rows"))


def file(flow: Flow, *record_counts: int) -> None:
    """Put numbered records into files, which are read in this order."""
    (flow.folder / "rows").mkdir(exist_ok=True)
    for record_count in record_counts:
        records = numbered(record_count, first=len(flow.input))
        path = flow.folder / "rows" / f"{len(flow.input)}.json"
        path.write_text("".join(json.dumps({"key": k, "value": v}) + "\n" for k, v in records))
        os.utime(path, (len(flow.input),) * 2)  # Spark reads files in the order of their age
        flow.input += records


def test_counts_of_a_stateful_query_are_written_once_per_change(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """groupBy().count() in update mode: Spark's own state keeps up with ours.

    Over an epoch that is aborted and runs again, and over a death after its commit.
    """
    counts = (
        stream(flow, maxOffsetsPerTrigger="100")
        .groupBy("key")
        .count()
        .select("key", f.col("count").cast("string").alias("value"))
    )
    sink = flow.sink()
    flow.feed(140)
    refusals = [StorageError("no room for the first manifest")]
    put = FileStorage.put

    def put_later(storage: FileStorage, path: str, data: bytes) -> None:
        if refusals:
            raise refusals.pop()
        put(storage, path, data)

    monkeypatch.setattr(FileStorage, "put", put_later)

    def dies_after_the_commit(rows: DataFrame, batch_id: int) -> None:
        sink(rows, batch_id)
        assert current_run_id(rows.sparkSession) in active_runs(rows.sparkSession)
        if batch_id == 1:
            raise RuntimeError("between our commit and Spark's")

    with pytest.raises(StreamingQueryException, match="between our commit"):
        write(flow, counts, dies_after_the_commit, mode="update")
    flow.feed(70)
    write(flow, counts, sink, mode="update")
    deadline = time.monotonic() + 20
    while sink._runner._runners:  # Spark tells of the end a little later
        assert time.monotonic() < deadline, "runs that are over are not let go of"
        time.sleep(0.05)

    by_message_key = by_key(
        (r.key, r.value) for r in read_committed(flow.confluent, flow.topic_out)
    )
    changes = {
        key: [int(value or "") for value in values] for key, values in by_message_key.items()
    }
    assert {key: values[-1] for key, values in changes.items()} == dict.fromkeys(changes, 30)
    assert len(changes) == 7
    assert all(values == sorted(set(values)) for values in changes.values()), (
        "a change was told twice"
    )
    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)


def test_rows_choose_topic_partition_headers_and_timestamp(
    flow: Flow, tallystick_topic: NewTopic
) -> None:
    other = tallystick_topic("chosen", partitions=2)
    flow.feed(20)
    number = f.col("value").cast("string").cast("int")
    rows = stream(flow).select(
        f.concat(f.lit("key-"), number).alias("key"),
        f.col("value").cast("string").alias("value"),
        f.when(number < 10, flow.topic_out).otherwise(other).alias("topic"),
        f.when(number >= 10, f.lit(1)).alias("partition"),  # null: by key
        f.array(f.struct(f.lit("n").alias("key"), f.col("value").alias("value"))).alias("headers"),
        f.timestamp_millis(number.cast("long") * 1000 + 7).alias("timestamp"),
        f.lit("left out").alias("another"),
    )

    write(flow, rows, flow.sink(topic=None, token_topic=flow.topic_out))

    by_hash = read_committed(flow.confluent, flow.topic_out)
    chosen = read_committed(flow.confluent, other)
    assert sorted(int(r.value or "") for r in by_hash) == list(range(10))
    assert sorted(int(r.value or "") for r in chosen) == list(range(10, 20))
    assert {r.partition for r in chosen} == {1}
    for record in (*by_hash, *chosen):
        assert record.key == f"key-{record.value}"
        assert record.timestamp == int(record.value or "") * 1000 + 7
        assert record.headers == (("n", (record.value or "").encode()),)
    java = tallystick_topic("java", partitions=flow.partitions)
    produce(flow.confluent, java, [(r.key, r.value) for r in by_hash])
    assert {(r.key, r.partition) for r in by_hash} == {
        (r.key, r.partition) for r in read_committed(flow.confluent, java)
    }, "murmur2 as the Java client has it"


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("3 AS partition", "RecordError: .* do not exist .the first is 3; it has 3."),
        ("'no-such' AS topic", "RecordError: a row names topic 'no-such'"),
    ],
    ids=["partition", "topic"],
)
def test_a_row_that_cannot_be_written_fails_the_query_and_nothing_of_its_batch_is_visible(
    flow: Flow, column: str, message: str
) -> None:
    file(flow, 20)
    topic = None if "topic" in column else flow.topic_out
    sink = flow.sink(topic=topic, token_topic=flow.topic_out)
    rows = filed(flow).selectExpr("key", "value", column)

    with pytest.raises(StreamingQueryException, match=message):
        write(flow, rows, sink)

    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
    assert read_committed(flow.confluent, flow.topic_out) == []
    if topic is not None:
        write(flow, filed(flow), flow.sink())
        flow.assert_exact()


def numbers(flow: Flow, topic: str | None = None) -> list[int]:
    """What the output has."""
    records = read_committed(flow.confluent, topic or flow.topic_out)
    return sorted(int(r.value or "") for r in records)


def error_of(run: Callable[[], None]) -> str:
    """What a query fails with."""
    with pytest.raises(StreamingQueryException) as failed:
        run()
    return str(failed.value)


@pytest.mark.parametrize("how", ["one sink twice", "another sink"])
def test_a_second_call_in_a_micro_batch_is_refused_and_no_restart_passes_over_its_rows(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, tallystick_topic: NewTopic, how: str
) -> None:
    """The refusal asks nobody: what fails then would hide that the rows are missing."""
    file(flow, 40, 40, 20)
    rows = filed(flow)
    even = f.col("value").cast("string").cast("int") % 2 == 0
    sink = flow.sink()
    other = sink if how == "one sink twice" else flow.sink(topic=tallystick_topic("other"))
    sizes: list[int] = []

    def both(df: DataFrame, batch_id: int) -> None:
        sizes.append(df.count())
        sink(df.where(even), batch_id)
        with monkeypatch.context() as patched:
            patched.setattr(SparkLog, "batch", refuse_to_read)
            other(df.where(~even), batch_id)

    def refuse_to_read(*_: object) -> None:
        raise StorageError("the checkpoint cannot be read")

    def one(accept: str = "") -> Callable[[DataFrame, int], None]:
        mended = flow.sink(accept={accept} - {""})
        return lambda df, batch_id: mended(df.where(even).union(df.where(~even)), batch_id)

    assert "SecondCallError" in error_of(lambda: write(flow, rows, both))
    first = numbers(flow)
    assert 0 < len(first) < sizes[0]
    error = error_of(lambda: write(flow, rows, one()))  # the function is mended
    assert "DataLossError" in error
    assert "accept='partial-epoch-0'" in error
    assert numbers(flow) == first

    write(flow, rows, one("partial-epoch-0"))
    numbers_out = numbers(flow)
    assert numbers_out == sorted({*first, *numbers_out}), "nothing is there twice"
    assert len(set(range(100)) - set(numbers_out)) == sizes[0] - len(first), "but for what was told"


def test_a_second_call_is_told_by_the_next_start_though_its_run_could_not_ask_kafka(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before committed the first call, and ended before Spark logged the micro-batch."""
    file(flow, 100)
    rows = filed(flow)
    even = f.col("value").cast("string").cast("int") % 2 == 0
    caught: list[str] = []

    def dies_after_the_first(df: DataFrame, batch_id: int) -> None:
        flow.sink()(df.where(even), batch_id)
        raise RuntimeError("killed here")

    def calls_twice_and_catches(df: DataFrame, batch_id: int) -> None:
        for part in (df.where(even), df.where(~even)):
            try:
                flow.sink()(part, batch_id)
            except TallystickError as error:
                caught.append(str(error))

    def refuse(*_: object) -> None:
        raise BrokerUnavailableError("nobody answers")

    assert "killed here" in error_of(lambda: write(flow, rows, dies_after_the_first))
    first = numbers(flow)
    assert len(first) == 50
    with monkeypatch.context() as patched:
        patched.setattr(EpochRunner, "_open", refuse)
        write(flow, rows, calls_twice_and_catches)  # Spark logs the micro-batch
    assert len(caught) == 2

    file(flow, 10)
    error = error_of(lambda: write(flow, rows, flow.sink()))
    assert "accept='partial-epoch-0'" in error
    assert numbers(flow) == first
    write(flow, rows, flow.sink(accept={"partial-epoch-0"}))
    assert len(numbers(flow)) == 60


def test_a_micro_batch_may_be_left_out_and_a_failure_that_is_caught_is_not_taken_for_that(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = filed(flow)
    is_wanted = f.col("value").cast("string").cast("int") >= 200

    def left_out(df: DataFrame, batch_id: int) -> None:
        wanted = df.where(is_wanted)
        if not wanted.isEmpty():
            flow.sink()(wanted, batch_id)  # made anew for each: it is the same sink all the same

    file(flow, *[30] * 6, 20)
    write(flow, rows, left_out)
    assert numbers(flow) == [], "all of its micro-batches were left out"
    for record_count in (20, 40):
        file(flow, record_count)
        write(flow, rows, left_out)
    assert numbers(flow) == list(range(200, 260))

    # A gap in the middle, in one run and over two.
    sink, calls = flow.sink(), []

    def now_and_then(df: DataFrame, batch_id: int) -> None:
        calls.append(batch_id)
        if len(calls) % 4 == 1:
            sink(df, batch_id)

    file(flow, *[30] * 8)
    write(flow, rows, now_and_then)
    written = len(numbers(flow)) - 60
    assert len(calls) >= 8
    assert 0 < written < 8 * 30

    # What the sink raises is caught: Spark takes the micro-batch for done.
    put = FileStorage.put
    refusals = [StorageError("no room for a manifest")] * 3
    swallowed: list[int] = []

    def put_later(storage: FileStorage, path: str, data: bytes) -> None:
        if refusals and path.endswith(".json"):
            raise refusals.pop()
        put(storage, path, data)

    def swallows(df: DataFrame, batch_id: int) -> None:
        try:
            sink(df, batch_id)
        except StorageError:
            swallowed.append(df.count())

    monkeypatch.setattr(FileStorage, "put", put_later)
    file(flow, 30, 30)
    assert "Do not catch what the sink raises" in error_of(lambda: write(flow, rows, swallows))
    assert len(swallowed) == 1
    error = error_of(lambda: write(flow, rows, sink))
    assert "begun, and not committed" in error
    word = error.partition("accept='")[2].partition("'")[0]
    assert word.startswith("without-epochs-")
    before = numbers(flow)
    write(flow, rows, flow.sink(accept={word}))
    assert len(numbers(flow)) == len(before) + 60 - swallowed[0]
    assert len(numbers(flow)) == len(set(numbers(flow)))


def test_a_failure_that_is_caught_before_anything_was_committed_is_told(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no token yet, and no manifest: only the note of the call."""
    rows = filed(flow)
    swallowed: list[int] = []

    def refuse(*_: object) -> None:
        raise StorageError("the checkpoint cannot be read")

    def swallows(df: DataFrame, batch_id: int) -> None:
        try:
            flow.sink()(df, batch_id)
        except StorageError:
            swallowed.append(df.count())

    file(flow, 30, 30)
    with monkeypatch.context() as patched:
        patched.setattr(EpochRunner, "_open", refuse)
        assert "Do not catch what the sink raises" in error_of(lambda: write(flow, rows, swallows))
    assert len(swallowed) == 1
    error = error_of(lambda: write(flow, rows, flow.sink()))
    assert "DataLossError" in error
    assert "rows of earlier micro-batches are missing" in error
    assert "accept='without-epochs-0-to-0'" in error
    assert numbers(flow) == []
    write(flow, rows, flow.sink(accept={"without-epochs-0-to-0"}))
    assert len(numbers(flow)) == 60 - swallowed[0]


def test_what_was_decided_when_the_function_caught_the_error_is_committed_by_the_next_run(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a transaction per task the checkpoint decides, and the commits come after it."""
    rows = filed(flow)
    swallowed: list[int] = []

    commit = OpenSinks.commit

    def refuse(sinks: OpenSinks, decided: tuple[Committable, ...]) -> Any:
        if decided:
            raise BrokerUnavailableError("nobody answers")
        return commit(sinks, decided)

    def swallows(df: DataFrame, batch_id: int) -> None:
        try:
            flow.sink(transactions="task")(df, batch_id)
        except BrokerUnavailableError:
            swallowed.append(df.count())

    file(flow, 30, 30)
    with monkeypatch.context() as patched:
        patched.setattr(OpenSinks, "commit", refuse)
        assert "Do not catch what the sink raises" in error_of(lambda: write(flow, rows, swallows))
    assert len(swallowed) == 1
    assert numbers(flow) == []
    write(flow, rows, flow.sink(transactions="task"))
    flow.assert_exact()


def killed(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, run: Callable[[], None]
) -> None:
    """A run that comes to where it is told of what tasks wrote, and leaves no note of its end."""
    original = getattr(where, name)

    def die(self: object, *arguments: Any) -> Any:
        if arguments[-1]:
            raise RuntimeError("killed here")
        return original(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(where, name, die)
        patched.setattr(EpochRunner, "_note_failure", lambda *_, **__: None)
        assert "killed here" in error_of(run)


def fail_and_catch(
    flow: Flow, rows: DataFrame, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> int:
    """A run whose first call fails before it is asked what is committed; how many rows it had."""
    swallowed: list[int] = []

    def swallows(df: DataFrame, batch_id: int) -> None:
        try:
            flow.sink(**options)(df, batch_id)
        except BrokerUnavailableError:
            swallowed.append(df.count())

    def refuse(*_: object) -> None:
        raise BrokerUnavailableError("nobody answers")

    with monkeypatch.context() as patched:
        patched.setattr(EpochRunner, "_open", refuse)
        assert "Do not catch what the sink raises" in error_of(lambda: write(flow, rows, swallows))
    (count,) = swallowed
    return count


ENDED = "00000000-0000-0000-0000-000000000000"
"""The id of a query that does not run."""


class TimeIsUp(BaseException):
    """As libraries raise it in the thread of a call that takes too long."""


def limit(patched: pytest.MonkeyPatch, where: object, name: str, limits: list[str]) -> None:
    """The time of the first call that comes here is up."""
    original = getattr(where, name)

    def limited(*args: Any, **settings: Any) -> Any:
        if name not in limits:
            limits.append(name)
            raise TimeIsUp
        return original(*args, **settings)

    patched.setattr(where, name, limited)


@pytest.mark.parametrize(
    "places",
    [
        [(DataFrameEngine, "run_epoch")],
        [(foreach_batch, "current_run_id")],
        [(EpochRunner, "_take")],
        [(DataFrameEngine, "run_epoch"), (foreach_batch, "note")],
    ],
    ids=["in the epoch", "before its run is known", "before its turn", "while it is noted"],
)
def test_a_call_that_a_time_limit_ended_is_not_taken_for_left_out(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, places: list[tuple[object, str]]
) -> None:
    rows = filed(flow)
    limits: list[str] = []
    sink, swallowed = flow.sink(), []

    def swallows(df: DataFrame, batch_id: int) -> None:
        try:
            sink(df, batch_id)
        except TimeIsUp:
            swallowed.append(df.count())

    file(flow, 30, 30)
    with monkeypatch.context() as patched:
        for where, name in places:
            limit(patched, where, name, limits)
        error_of(lambda: write(flow, rows, swallows))
    assert limits == [name for _, name in places]
    error = error_of(lambda: write(flow, rows, sink))
    assert "begun, and not committed: 0" in error
    word = error.partition("accept='")[2].partition("'")[0]
    write(flow, rows, flow.sink(accept={word}))
    assert len(numbers(flow)) == 60 - swallowed[0] > 0


@pytest.mark.parametrize(
    ("setting", "why"),
    [({"dead_letter_topic": "dead"}, "in a Pipeline only"), ({"uid": "a b"}, "uid='a b'")],
)
def test_what_a_sink_that_cannot_be_used_was_given_is_not_taken_for_left_out(
    flow: Flow, setting: dict[str, str], why: str
) -> None:
    rows = filed(flow)
    unfit, swallowed = flow.sink(**setting), []

    def swallows(df: DataFrame, batch_id: int) -> None:
        try:
            unfit(df, batch_id)
        except OptionError as error:
            swallowed.append(str(error))

    file(flow, 60)
    write(flow, rows, swallows)
    assert len(swallowed) == 1
    assert why in swallowed[0]
    file(flow, 30)
    second_error = error_of(lambda: write(flow, rows, flow.sink()))
    assert "begun, and not committed: 0" in second_error
    word = second_error.partition("accept='")[2].partition("'")[0]
    write(flow, rows, flow.sink(accept={word}))
    assert len(numbers(flow)) == 30


@pytest.mark.parametrize(
    ("fault", "order"),
    [
        *product(["rows of no query", "unfit"], ["alone", "after", "before"]),
        *product(["no listener"], ["alone", "before"]),  # there is one after a call
    ],
)
def test_a_call_that_is_refused_and_caught_is_not_passed_over_beside_another(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, fault: str, order: str
) -> None:
    """A thread of the user's own, and rows of his own session, do not tell whose call it is."""
    assert flow.spark is not None
    spark, rows = flow.spark, filed(flow)
    even = f.col("value").cast("string").cast("int") % 2 == 0
    sink, swallowed = flow.sink(), []

    def refused(df: DataFrame, batch_id: int) -> None:
        if fault == "unfit":
            flow.sink(dead_letter_topic="dead")(df, batch_id)
        if fault == "no listener":
            with monkeypatch.context() as patched:
                patched.setattr(foreach_batch, "listen", cannot)
                flow.sink()(df, batch_id)
        with ThreadPoolExecutor(1) as threads:
            taken = spark.createDataFrame(df.collect(), df.schema)
            threads.submit(flow.sink(), taken, batch_id).result()

    def cannot(*_: object) -> None:
        raise StorageError("the session cannot be listened to")

    def swallows(df: DataFrame, batch_id: int) -> None:
        if order == "after":
            sink(df.where(even), batch_id)
        try:
            refused(df.where(~even), batch_id)
        except TallystickError:
            swallowed.append(df.count())
        if order == "before":
            sink(df.where(even), batch_id)

    file(flow, 60)
    if order == "before":
        expected = "SecondCallError" if fault == "unfit" else "Do not catch what the sink"
        assert expected in error_of(lambda: write(flow, rows, swallows))
        assert numbers(flow) == []
        write(flow, rows, sink)
        flow.assert_exact()
        return
    write(flow, rows, swallows)  # Spark has it for done
    assert swallowed == [60]
    assert len(numbers(flow)) == {"alone": 0, "after": 30}[order]
    file(flow, 10)
    error = error_of(lambda: write(flow, rows, flow.sink()))
    word = error.partition("accept='")[2].partition("'")[0]
    assert word == {"alone": "without-epochs-0-to-0", "after": "partial-epoch-0"}[order]
    write(flow, rows, flow.sink(accept={word}))
    assert numbers(flow)[-10:] == list(range(60, 70))


def test_what_a_killed_run_decided_is_committed_though_a_later_failure_was_caught(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run has Spark log what it knows nothing of."""
    rows = filed(flow).repartition(2, "key")
    sink = flow.sink(transactions="task")
    file(flow, 30, 30)
    killed(monkeypatch, OpenSinks, "commit", lambda: write(flow, rows, sink))
    fail_and_catch(flow, rows, monkeypatch, transactions="task")
    write(flow, rows, flow.sink(transactions="task"))

    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
    flow.assert_exact()


def test_an_epoch_that_was_begun_and_never_committed_is_no_savepoint(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One run is killed after its manifest, another's failure is caught: Spark has it for done."""
    rows = filed(flow)
    checkpoint = FileStorage(str(flow.checkpoint))
    file(flow, 30, 30)
    killed(monkeypatch, KafkaBroker, "last_sequences", lambda: write(flow, rows, flow.sink()))
    count = fail_and_catch(flow, rows, monkeypatch)

    with pytest.raises(DataLossError, match="epoch 0 as done, but a call of its sink failed"):
        savepoints.create(checkpoint, FileStorage(str(tmp_path / "kept")), epoch=0)
    error = error_of(lambda: write(flow, rows, flow.sink()))
    assert "begun, and not committed: 0" in error
    word = error.partition("accept='")[2].partition("'")[0]
    write(flow, rows, flow.sink(accept={word}))
    assert len(numbers(flow)) == 60 - count


@pytest.mark.parametrize("transactions", ["epoch", "task"])
def test_what_a_killed_run_began_and_the_function_then_left_out_is_no_savepoint(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transactions: str
) -> None:
    """Spark has it for done, it left a manifest, and no call failed: its decider is asked."""
    rows = filed(flow)
    checkpoint, kept = FileStorage(str(flow.checkpoint)), FileStorage(str(tmp_path / "kept"))
    servers = {"bootstrap.servers": flow.kafka.bootstrap_servers}
    ask = asking(KafkaConfig.from_options(servers)) if transactions == "epoch" else None
    sink = flow.sink(transactions=transactions)
    file(flow, 60)
    write(flow, rows, sink)
    file(flow, 30)
    counting = (KafkaBroker, "last_sequences") if ask else (OpenSinks, "check_prepared")
    killed(monkeypatch, *counting, lambda: write(flow, rows, sink))
    write(flow, rows, lambda *_: None)

    with pytest.raises(DataLossError, match="epoch 1 as done, and its decider knows of earlier"):
        savepoints.create(checkpoint, kept, ask_kafka=ask)
    assert savepoints.create(checkpoint, kept, epoch=0, ask_kafka=ask).manifest.checkpoint_id == 0
    file(flow, 10)
    error = error_of(lambda: write(flow, rows, sink))
    assert "begun, and not committed: 1" in error
    word = error.partition("accept='")[2].partition("'")[0]
    write(flow, rows, flow.sink(transactions=transactions, accept={word}))
    assert len(numbers(flow)) == 70


def test_an_epoch_that_failed_and_ran_again_is_a_savepoint(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = filed(flow)
    checkpoint = FileStorage(str(flow.checkpoint))
    file(flow, 60)

    def refuse(*_: object) -> None:
        raise StorageError("cannot be read for now")

    with monkeypatch.context() as patched:
        patched.setattr(EpochRunner, "_open", refuse)
        assert "cannot be read for now" in error_of(lambda: write(flow, rows, flow.sink()))
    assert any("failed-0" in name for name in checkpoint.names(m.FOLDER))
    write(flow, rows, flow.sink())

    flow.assert_exact()
    saved = savepoints.create(checkpoint, FileStorage(str(tmp_path / "kept")))
    assert saved.manifest.checkpoint_id == 0


def test_a_stream_that_is_used_twice_in_one_query_is_written(flow: Flow) -> None:
    """Spark's log has a line for each use, its own memory one end."""
    rows = stream(flow, maxOffsetsPerTrigger="30").select("key", "value")
    number = f.col("value").cast("string").cast("int")
    both = rows.where(number % 2 == 0).union(rows.where(number % 2 == 1))
    flow.feed(60)
    write(flow, both, flow.sink())
    flow.feed(20)
    write(flow, both, flow.sink())

    assert numbers(flow) == list(range(80))


def test_calls_from_threads_of_the_users_own_are_calls_of_their_micro_batch(flow: Flow) -> None:
    """One call is in `test_a_thread_that_served_another_query…`; this is of two."""
    rows = filed(flow)
    sink = flow.sink()

    def twice_and_never_looked_at(df: DataFrame, batch_id: int) -> None:
        with ThreadPoolExecutor(2) as threads:
            for _ in range(2):
                threads.submit(sink, df, batch_id)

    file(flow, 30, 30)
    write(flow, rows, twice_and_never_looked_at)  # Spark has it for done
    file(flow, 10)
    words: set[str] = set()
    for prefix in ("without-epochs-", "partial-epoch-"):
        error = error_of(lambda: write(flow, rows, flow.sink(accept=words)))
        words.add(error.partition("accept='")[2].partition("'")[0])
        assert any(word.startswith(prefix) for word in words), error
    before = numbers(flow)
    write(flow, rows, flow.sink(accept=words))
    assert len(numbers(flow)) == len(before) + 10


def test_a_thread_that_served_another_query_serves_the_one_whose_rows_it_gets(flow: Flow) -> None:
    """A pool's thread keeps what Spark told the one that it first worked for."""
    assert flow.spark is not None
    context, sink = flow.spark.sparkContext, flow.sink()
    rows = filed(flow)
    file(flow, 30, 30)
    other = flow.spark.readStream.format("rate").load().writeStream.format("noop").start()

    def in_the_others(df: DataFrame, batch_id: int) -> None:
        context.setLocalProperty("sql.streaming.queryId", other.id)
        sink(df, batch_id)

    def in_a_pool(df: DataFrame, batch_id: int) -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(in_the_others, df, batch_id).result()

    try:
        write(flow, rows, in_a_pool)
        assert other.isActive
    finally:
        other.stop()
    flow.assert_exact()


def test_a_call_that_outlives_its_query_is_refused_and_stops_no_other(flow: Flow) -> None:
    rows, sink, refused = filed(flow), flow.sink(), []
    assert flow.spark is not None
    spark = flow.spark

    def late(batch_id: int) -> None:
        spark.sparkContext.setLocalProperty("sql.streaming.queryId", ENDED)
        with pytest.raises(QueryEndedError, match="has ended"):
            sink(spark.createDataFrame([], rows.schema), batch_id)
        refused.append(batch_id)

    def beside(df: DataFrame, batch_id: int) -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(late, batch_id).result()
        sink(df, batch_id)

    file(flow, 30)
    write(flow, rows, beside)
    assert refused == [0]
    flow.assert_exact()


def test_an_entry_of_sparks_log_that_is_not_what_spark_reads_is_not_committed(flow: Flow) -> None:
    """Another query's entry, on a storage where it replaces this one's: rows would be skipped."""
    rows = stream(flow).select("key", "value")
    flow.feed(40)
    write(flow, rows, flow.sink())
    flow.feed(40)
    sink = flow.sink()

    def behind_another(df: DataFrame, batch_id: int) -> None:
        entry = flow.checkpoint / "offsets" / str(batch_id)
        entry.with_name(f".{batch_id}.crc").unlink()
        entry.write_bytes(entry.with_name(str(batch_id - 1)).read_bytes())
        sink(df, batch_id)

    error = error_of(lambda: write(flow, rows, behind_another))
    assert "another query writes the same checkpoint" in error
    assert len(numbers(flow)) == 40
    write(flow, rows, flow.sink())
    write(flow, rows, flow.sink())
    flow.assert_exact()
