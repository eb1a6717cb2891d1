"""Several outputs of one pipeline on real engines: exact each, and of the same epochs together."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tallystick as ts
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch import protocol as c
from tallystick.pipeline.listeners import PIPELINES
from tallystick.storage.file_storage import FileStorage
from tests.spark.flow import Flow
from tests.spark.sunk import files_in, open_ids
from tests.spark.test_sinks_killed import Died, Mortal, mortal  # noqa: F401
from tests.spark.topics import (
    assert_exact,
    by_key,
    produce,
    read_committed,
    wait_until_nothing_is_pending,
)

pytestmark = [pytest.mark.broker, pytest.mark.spark]

BOTH = "key binary, value binary"
ENGINES = pytest.mark.parametrize("execution", ["resident", "jobs"])


def multiples(of: int) -> Any:
    """A predicate: the rows whose value is a multiple."""

    def are_multiples(rows: pa.RecordBatch) -> pa.BooleanArray:
        numbers = pc.cast(pc.cast(rows["value"], pa.string()), pa.int64())
        return pc.equal(pc.subtract(numbers, pc.multiply(pc.divide(numbers, of), of)), 0)

    return are_multiples


def signed(by: str) -> Any:
    """A function before a sink: a table, whose values end with a sign; no rows for an empty one."""

    def sign(rows: pa.RecordBatch) -> pa.Table:
        values = pc.binary_join_element_wise(rows["value"], by.encode(), b"")
        signed = pa.record_batch({"key": rows["key"], "value": values})
        return pa.Table.from_batches([signed.slice(0, 1), signed.slice(1)])

    return sign


def reader() -> Any:
    """A function of batches that puts the multiples of five beside, and passes all on."""
    fives = multiples(5)

    def early(rows: pa.RecordBatch) -> ts.Rows:
        both = rows.select(["key", "value"])
        return ts.Rows(both, {"fives": both.filter(fives(both))})

    return early


def counting() -> Any:
    """A keyed function: rows pass; of each key's, those whose number is a multiple of three."""

    def thirds(batch: ts.KeyedBatch) -> ts.Update:
        numbers, totals = batch.running_count(start=batch.held("n"))
        third = pa.array(np.asarray(numbers) % 3 == 0)
        rows = pa.record_batch({"key": batch.rows["key"], "value": batch.rows["value"]})
        return ts.Update(rows, {"n": totals}, outputs={"thirds": rows.filter(third)})

    return ts.vectorised(thirds, state="n bigint", outputs={"thirds": BOTH})


def expected_thirds(records: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each third record of every key."""
    return [
        (key, value)
        for key, values in by_key(records).items()
        for number, value in enumerate(values, start=1)
        if number % 3 == 0
    ]


def expected_multiples(records: list[tuple[str, str]], of: int) -> list[tuple[str, str]]:
    return [(key, value) for key, value in records if int(value) % of == 0]


def passing() -> Any:
    """A keyed function of a second step: all rows go on, and are counted."""

    def pass_by(batch: ts.KeyedBatch) -> ts.Update:
        _, totals = batch.running_count(start=batch.held("n"))
        return ts.Update(batch.rows.select(["key", "value"]), {"n": totals})

    return ts.vectorised(pass_by, state="n bigint")


class Outputs:
    """A flow with a topic for each of its side outputs, and one for some rows of the main one."""

    def __init__(self, flow: Flow) -> None:
        self.flow, self.folder = flow, flow.folder / "files"
        self.topics = {name: f"{flow.name}-{name}" for name in ("fives", "thirds", "sevens")}
        for topic in self.topics.values():
            flow.kafka.create_topic(topic, 2)

    def sink(self, name: str, **settings: Any) -> ts.KafkaSink:
        return self.flow.sink(topic=self.topics[name], **settings)

    def pipeline(self, parallelism: int = 2, **source: Any) -> ts.Pipeline:
        """Three sinks share the epoch's transaction; two more are committed after it."""
        pipeline = ts.Pipeline(self.flow.name).read(self.flow.source(**source))
        pipeline = pipeline.map_batches(reader(), schema=BOTH, outputs={"fives": BOTH})
        for uid, step in (("one", counting()), ("two", passing())):
            pipeline = pipeline.key_by("key").process(
                step, output=BOTH, uid=uid, parallelism=parallelism
            )
        return pipeline.write(
            self.flow.sink(),
            ts.when(self.sink("sevens", compression="zstd"), multiples(7)),
            fives=self.sink("fives", transactions="task"),
            thirds=[self.sink("thirds"), ts.when(ts.FileSink(str(self.folder)), multiples(2))],
        )

    def assert_exact(self) -> None:
        """Each output is what the input makes of it."""
        flow = self.flow
        flow.assert_exact()
        assert flow.input
        self.assert_of(flow.input)

    def assert_of(self, main: list[tuple[str, str]]) -> None:
        """The others are what goes with these rows of the main output."""
        thirds = expected_thirds(main)
        assert_exact(self.flow.confluent, self.topics["thirds"], thirds)
        for name, of in (("fives", 5), ("sevens", 7)):
            assert_exact(self.flow.confluent, self.topics[name], expected_multiples(main, of))
        assert files_in(self.folder) == sorted(expected_multiples(thirds, 2))


@ENGINES
def test_main_and_side_outputs_are_exact_over_restarts_at_another_parallelism(
    flow: Flow, execution: Any
) -> None:
    """Side rows of the reader pass by two keyed steps, those of the first step by the second."""
    outputs = Outputs(flow)
    for parallelism in (2, 3, 1):
        flow.feed(150)
        pipeline = outputs.pipeline(parallelism, max_offsets_per_trigger=80)
        flow.run(pipeline, execution=execution)
        outputs.assert_exact()


def test_no_reader_sees_rows_of_an_epoch_without_its_side_rows(flow: Flow) -> None:
    """At the end of each epoch the side outputs are exactly what goes with the main one."""
    outputs, seen = Outputs(flow), []

    def look(event: object) -> None:
        if isinstance(event, c.OutputConfirmed):
            wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
            records = read_committed(flow.confluent, flow.topic_out)
            main = [(record.key or "", record.value or "") for record in records]
            seen.append(len(main))
            outputs.assert_of(main) if main else None

    flow.feed(120)
    flow.run(outputs.pipeline(max_offsets_per_trigger=50), listener=look)
    assert len(set(seen)) >= 3, seen
    outputs.assert_exact()


@pytest.mark.parametrize(
    "kills",
    [
        [("EpochRan", 1), ("ManifestWritten", 1), ("OutputCounted", 2)],
        [("TransactionCommitted", 2), ("ParticipantCommitted", 2), ("OutputSettled", 1)],
        [("EpochRan", 1), ("ParticipantCommitted", 2)],
    ],
    ids=["before the decision", "after it", "at both"],
)
def test_a_run_that_dies_between_prepare_decision_and_commit_loses_no_side_row(
    flow: Flow,
    mortal: Mortal,  # noqa: F811
    kills: list[tuple[str, int]],
) -> None:
    outputs = Outputs(flow)
    flow.feed(120)
    for at in kills:
        mortal.at = at
        with pytest.raises(Died):
            flow.run(outputs.pipeline(max_offsets_per_trigger=30), listener=mortal)
    mortal.at = ("", 0)
    flow.run(outputs.pipeline(3))
    outputs.assert_exact()
    assert open_ids(flow) == []


def test_malformed_records_and_outputs_of_a_function_are_in_one_transaction(flow: Flow) -> None:
    """No keyed step, no participant; recover finds nothing to do, and inspect every topic."""
    topics = [flow.kafka.create_topic(f"{flow.name}-{name}", 2) for name in ("dead", "even")]
    even = multiples(2)

    def halve(rows: pa.RecordBatch) -> ts.Rows:
        value = rows["n"].cast(pa.string()).cast(pa.binary())
        both = pa.record_batch({"key": rows["k"].cast(pa.binary()), "value": value})
        return ts.Rows(both.filter(pc.invert(even(both))), {"even": both.filter(even(both))})

    value = ts.Json("k string, n bigint", mode="deadletter")
    records = [
        (f"k{n % 5}", "poison" if n % 9 == 4 else f'{{"k": "k{n % 5}", "n": {n}}}')
        for n in range(90)
    ]
    produce(flow.confluent, flow.topic_in, records)
    pipeline = (
        ts.Pipeline(flow.name)
        .read(flow.source(value=value, max_offsets_per_trigger=40))
        .map_batches(halve, outputs={"even": BOTH})
        .write(flow.sink(dead_letter_topic=topics[0]), even=flow.sink(topic=topics[1]))
    )
    flow.run(pipeline)

    good = [(f"k{n % 5}", str(n)) for n in range(90) if n % 9 != 4]
    assert_exact(flow.confluent, flow.topic_out, [row for row in good if int(row[1]) % 2])
    assert_exact(flow.confluent, topics[1], [row for row in good if int(row[1]) % 2 == 0])
    wait_until_nothing_is_pending(flow.confluent, topics[0])
    assert [r.value for r in read_committed(flow.confluent, topics[0])] == ["poison"] * 10
    done = pipeline.recover(checkpoint=str(flow.checkpoint))
    assert (done.decider, done.sinks) == ("kafka-1", ())
    counts = PIPELINES[flow.name]
    assert (counts.rows_written, counts.dead_letters) == (len(good), 10)
    assert counts.sinks == ("kafka-1", "even-kafka-1")
    newest = CheckpointFolder(FileStorage(str(flow.checkpoint))).newest_manifests(2)
    assert {rows.topic for manifest in newest for rows in manifest.produced} == {
        flow.topic_out,
        *topics,
    }


@ENGINES
def test_outputs_behind_dataframe_code_and_malformed_records_at_the_same_time(
    flow: Flow, execution: Any
) -> None:
    """Functions behind a transform have outputs, and so have the keyed steps behind it."""
    names = ("dead", "fives", "thirds")
    topics = {name: flow.kafka.create_topic(f"{flow.name}-{name}", 2) for name in names}
    value = ts.Json("k string, n string", mode="deadletter")
    source = ts.Pipeline(flow.name).read(flow.source(value=value, max_offsets_per_trigger=40))
    if execution == "jobs":
        source = source.transform(lambda rows: rows.where("n <> '8'"))

    def in_bytes(rows: pa.RecordBatch) -> pa.RecordBatch:
        both = {"key": rows["k"], "value": rows["n"]}
        return pa.record_batch({name: text.cast(pa.binary()) for name, text in both.items()})

    pipeline = (
        source.map_batches(in_bytes, schema=BOTH)
        .map_batches(reader(), schema=BOTH, outputs={"fives": BOTH})
        .key_by("key")
        .process(counting(), output=BOTH, parallelism=2)
        .write(
            flow.sink(dead_letter_topic=topics["dead"]),
            fives=flow.sink(topic=topics["fives"]),
            thirds=flow.sink(topic=topics["thirds"]),
        )
    )
    texts = {n: "poison" if n % 9 == 4 else f'{{"k": "k{n % 5}", "n": "{n}"}}' for n in range(90)}
    produce(flow.confluent, flow.topic_in, [(f"k{n % 5}", text) for n, text in texts.items()])
    flow.run(pipeline, execution=execution)

    dropped = {8} if execution == "jobs" else set()
    good = [(f"k{n % 5}", str(n)) for n in range(90) if n % 9 != 4 and n not in dropped]
    assert_exact(flow.confluent, flow.topic_out, good)
    assert_exact(flow.confluent, topics["fives"], expected_multiples(good, 5))
    assert_exact(flow.confluent, topics["thirds"], expected_thirds(good))
    wait_until_nothing_is_pending(flow.confluent, topics["dead"])
    assert [r.value for r in read_committed(flow.confluent, topics["dead"])] == ["poison"] * 10


def test_a_sink_that_begins_to_share_the_transaction_settles_what_it_prepared_before(
    flow: Flow,
    mortal: Mortal,  # noqa: F811
) -> None:
    """The run that dies has decided, and not committed, what the side output prepared by itself."""
    topic = flow.kafka.create_topic(f"{flow.name}-fives", 2)

    def run(transactions: str, **settings: Any) -> None:
        pipeline = (
            ts.Pipeline(flow.name)
            .read(flow.source())
            .map_batches(reader(), outputs={"fives": BOTH})
            .write(flow.sink(), fives=flow.sink(topic=topic, transactions=transactions))
        )
        flow.run(pipeline, **settings)

    flow.feed(50)
    mortal.at = ("TransactionCommitted", 2)  # the first is a lineage's
    with pytest.raises(Died):
        run("task", listener=mortal)
    mortal.at = ("", 0)
    flow.feed(50)
    for transactions in ("epoch", "task"):
        run(transactions)
        flow.assert_exact()
        assert_exact(flow.confluent, topic, expected_multiples(flow.input, 5))
        flow.feed(20)


def test_rows_name_their_topics_and_their_side_rows_too(flow: Flow) -> None:
    """`topic=None` in a sink of the main output, beside one that shares its transaction."""
    topics = [flow.kafka.create_topic(f"{flow.name}-{name}", 2) for name in ("a", "b", "rest")]

    def name_topics(rows: pa.RecordBatch) -> ts.Rows:
        both = rows.select(["key", "value"])
        mask = multiples_of_two(both)
        topic = pc.if_else(mask, topics[0], topics[1])
        return ts.Rows(both.append_column("topic", topic), {"rest": both.filter(mask)})

    multiples_of_two = multiples(2)
    flow.feed(80)
    flow.run(
        ts.Pipeline(flow.name)
        .read(flow.source(max_offsets_per_trigger=50))
        .map_batches(name_topics, outputs={"rest": BOTH})
        .write(
            flow.sink(topic=None, token_topic=flow.topic_out),
            rest=flow.sink(topic=topics[2], transactions="epoch"),
        )
    )
    even = expected_multiples(flow.input, 2)
    assert_exact(flow.confluent, topics[0], even)
    assert_exact(flow.confluent, topics[1], [row for row in flow.input if row not in even])
    assert_exact(flow.confluent, topics[2], even)


def test_a_start_checks_the_topics_of_all_outputs_and_warns_of_circles(
    flow: Flow, caplog: pytest.LogCaptureFixture
) -> None:
    def run(**sinks: Any) -> None:
        flow.run(
            ts.Pipeline(flow.name)
            .read(flow.source())
            .map_batches(reader(), outputs={"fives": BOTH})
            .write(flow.sink(), **sinks)
        )

    for transactions in ("epoch", "task"):
        with pytest.raises(ts.OptionError, match="no-such-alerts"):
            run(fives=flow.sink(topic="no-such-alerts", transactions=transactions))
        with caplog.at_level("WARNING", "tallystick"):
            run(fives=flow.sink(topic=flow.topic_in, transactions=transactions))
        assert f"writes to topic {flow.topic_in!r} and reads it too" in caplog.text
        caplog.clear()


@ENGINES
def test_functions_before_sinks_are_exact_over_deaths_before_and_after_the_decision(
    flow: Flow,
    execution: Any,
    mortal: Mortal,  # noqa: F811
) -> None:
    """Each sink has its own, those in the epoch's transaction and one with its own."""
    outputs = Outputs(flow)
    flow.feed(150)
    pipeline = ts.Pipeline(flow.name).read(flow.source(max_offsets_per_trigger=60))
    pipeline = (
        pipeline.map_batches(reader(), schema=BOTH, outputs={"fives": BOTH})
        .key_by("key")
        .process(counting(), output=BOTH, uid="one", parallelism=2)
        .write(
            flow.sink(),
            ts.when(ts.mapped(outputs.sink("sevens"), signed("!")), multiples(7)),
            fives=ts.mapped(
                ts.mapped(outputs.sink("fives", transactions="task"), signed("b")), signed("a")
            ),
            thirds=ts.mapped(outputs.sink("thirds"), signed("?")),
        )
    )
    for at in (("EpochRan", 1), ("TransactionCommitted", 1)):
        mortal.at = at
        with pytest.raises(Died):
            flow.run(pipeline, execution=execution, listener=mortal)
    mortal.at = ("", 0)
    flow.feed(100)
    flow.run(pipeline, execution=execution)

    flow.assert_exact()
    sevens = [(key, f"{value}!") for key, value in expected_multiples(flow.input, 7)]
    fives = [(key, f"{value}ab") for key, value in expected_multiples(flow.input, 5)]
    thirds = [(key, f"{value}?") for key, value in expected_thirds(flow.input)]
    for name, expected in (("sevens", sevens), ("fives", fives), ("thirds", thirds)):
        assert_exact(flow.confluent, outputs.topics[name], expected)
