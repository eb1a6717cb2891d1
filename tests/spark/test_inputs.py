"""Several inputs in one pipeline, on Spark and a real broker: exact, whatever is changed."""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import tallystick as ts
from tallystick.__main__ import app
from tallystick.api.pipeline import declared
from tallystick.epoch import manifest as m
from tallystick.errors import OptionError
from tallystick.ops.doctor_pipeline import DeclaredSubject
from tallystick.ops.doctor_pipeline import pipeline as its_checkpoint
from tallystick.ops.ui.page import CheckpointReader
from tallystick.source.offsets import parse_source
from tallystick.storage.file_storage import FileStorage
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Flow
from tests.spark.sources import ROWS, Sources, only_rows
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]


@pytest.fixture(params=["resident", "jobs"])
def flow(
    request: pytest.FixtureRequest,
    tallystick_kafka: EmbeddedKafka,
    spark: SparkSession,
    tmp_path: Path,
) -> Flow:
    return Flow(tallystick_kafka, spark, tmp_path, execution=request.param)


def typed(*arguments: object) -> str:
    """`tallystick …`, which is done as asked."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


def test_a_union_is_exact_whatever_joins_goes_or_changes_places(flow: Flow) -> None:
    """Over restarts at other parallelisms: one input first, then two, three, and two again."""
    sources = Sources(flow)
    sources.feed(100)
    sources.run(sources.numbers(None))  # the only one, without a name: as of a release before
    sources.assert_exact()
    assert parse_source(sources.manifest().sources[0]).input == "input-1"

    sources.feed(60, 90)
    query = sources.run(sources.numbers("input-1"), sources.texts(), parallelism=3)
    sources.assert_exact()
    progress = query.lastProgress
    assert [entry["input"] for entry in progress["sources"]] == ["input-1", "texts"]
    assert sum(entry["numInputRows"] for entry in query.recentProgress) == 150
    positions = [sum(source.positions.values()) for source in ts.source_progress(query)]
    assert positions == [160, 90]
    assert [source.lag_total for source in ts.source_progress(query)] == [0, 0]

    sources.feed(10, 10, 50)
    sources.run(sources.third(), sources.texts(), sources.numbers("input-1"), parallelism=1)
    sources.assert_exact()

    sources.feed(10, 0, 10)
    with pytest.raises(OptionError, match="dropped-input-texts"):
        sources.run(sources.numbers("input-1"), sources.third())
    sources.run(sources.numbers("input-1"), sources.third(), accept=["dropped-input-texts"])
    sources.assert_exact()
    inputs = {parse_source(text).input for text in sources.manifest().sources}
    assert inputs == {"input-1", "third"}
    sources.feed(5, 0, 5)
    sources.run(sources.third(), sources.numbers("input-1"))
    sources.assert_exact()


def test_each_group_shows_how_far_its_input_is_read(flow: Flow) -> None:
    sources = Sources(flow)
    sources.feed(30, 20)
    sources.run(sources.numbers("input-1"), sources.texts())

    def shown(group: str, topic: str, partitions: int) -> int:
        witness = Consumer({**flow.confluent, "group.id": group})
        wanted = [TopicPartition(topic, number) for number in range(partitions)]
        total = sum(max(0, position.offset) for position in witness.committed(wanted, timeout=30))
        witness.close()
        return total

    group = f"tallystick-{flow.name}"
    assert shown(group, flow.topic_in, 3) == 30
    assert shown(f"{group}/texts", sources.text_topic, 2) == 20
    assert shown(group, sources.text_topic, 2) == 0


def both_sides() -> Any:
    """Each row, and how many rows of either input its key has had by the end of its epoch."""

    def join(batch: ts.KeyedBatch) -> ts.Update:
        is_bid = pc.equal(batch.rows["$input"], 0).to_numpy(zero_copy_only=False)
        count = len(batch.keys)
        columns = {
            name: batch.held(name) + np.bincount(batch.codes[mask], minlength=count)
            for name, mask in (("bids", is_bid), ("people", ~is_bid))
        }
        what = pc.coalesce(
            pc.struct_field(batch.rows["bids"], "price").cast(pa.string()),
            pc.struct_field(batch.rows["people"], "name"),
        )
        out = {"bidder": batch.rows["bidder"], "what": what, "at": batch.rows["$time"]}
        out |= {
            name: pa.array(values[batch.codes].astype(np.int64)) for name, values in columns.items()
        }
        state = {name: pa.array(values.astype(np.int64)) for name, values in columns.items()}
        return ts.Update(pa.record_batch(out), state)

    return ts.vectorised(join, state="bids bigint, people bigint", time_mode="EventTime")


@dataclass
class Auction:
    """Bids and people in topics of other formats, and the pipeline of both."""

    flow: Flow
    bids: list[tuple[int, int, int]] = field(default_factory=list)
    people: list[tuple[int, str, int]] = field(default_factory=list)
    at_once: int = 40
    bid_settings: dict[str, Any] = field(default_factory=dict)
    max_drift: str | int = 0

    def __post_init__(self) -> None:
        self.topic = f"{self.flow.name}-people"
        self.flow.kafka.create_topic(self.topic, 2)

    def feed(self, bids: list[tuple[int, int, int]], people: list[tuple[int, str, int]]) -> None:
        """Append bids (bidder, price, ms) and people (id, name, ms)."""
        values = [
            (str(b), json.dumps({"bidder": b, "price": p, "ts": iso(ms)})) for b, p, ms in bids
        ]
        produce(self.flow.confluent, self.flow.topic_in, values)
        texts = [(str(i), f"{i};{name};{ms}") for i, name, ms in people]
        produce(self.flow.confluent, self.topic, texts)
        self.bids += bids
        self.people += people

    def pipeline(self, parallelism: int = 2) -> ts.Pipeline:
        flow = self.flow
        bids = flow.source(
            value=ts.Json("bidder bigint, price bigint, ts timestamp"), **self.bid_settings
        )
        people = ts.stream(
            flow.source(topics=[self.topic], value=ts.Text(), max_offsets_per_trigger=self.at_once)
        )
        return (
            ts.Pipeline(flow.name)
            .read(
                bids=bids,
                people=people.map_batches(parted(), schema="id bigint, name string, since bigint"),
            )
            .key_by(bids="bidder", people="id")
            .process(
                both_sides(),
                event_time={"bids": "ts", "people": "since"},
                max_drift=self.max_drift,
                output="bidder bigint, what string, at bigint, bids bigint, people bigint",
                uid="both",
                parallelism=parallelism,
            )
            .write(flow.sink(key="bidder", value=ts.Json()))
        )

    def run(self, parallelism: int = 2) -> None:
        self.flow.run(self.pipeline(parallelism), execution=self.flow.execution)

    def assert_exact(self) -> None:
        """Every row came once, with its time; and the state has counted all of them."""
        rows_out = [
            json.loads(record.value or "")
            for record in read_committed(self.flow.confluent, self.flow.topic_out)
        ]
        rows = sorted((row["bidder"], row["what"], row["at"]) for row in rows_out)
        assert rows == sorted([*((b, str(p), ms) for b, p, ms in self.bids), *self.people])
        for key in {row["bidder"] for row in rows_out}:
            newest = max(row["bids"] + row["people"] for row in rows_out if row["bidder"] == key)
            expected = [b for b, _, _ in self.bids] + [i for i, _, _ in self.people]
            assert newest == expected.count(key)


def parted() -> Any:
    def split(rows: pa.RecordBatch) -> pa.RecordBatch:
        parts = pc.split_pattern(rows["value"], ";")
        of = [pc.list_element(parts, number) for number in range(3)]
        columns = {"id": of[0].cast(pa.int64()), "name": of[1], "since": of[2].cast(pa.int64())}
        return pa.record_batch(columns)

    return split


def iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat()


def test_named_inputs_meet_by_key_and_are_exact_over_a_rescale(flow: Flow) -> None:
    auction = Auction(flow)
    at = 1_700_000_000_000
    for parallelism in (2, 3, 1):
        first = len(auction.bids)
        bids = [(n % 9, n, at + n * 1000) for n in range(first, first + 50)]
        people = [(n % 9, f"p{n}", at + n * 1000) for n in range(first, first + 30)]
        auction.feed(bids, people)
        auction.run(parallelism)
        at += 3_600_000
    auction.assert_exact()
    state = Sources(flow).manifest().state[0]
    assert {time.topic for time in state.partition_times} == {
        f"bids/{flow.topic_in}",
        f"people/{auction.topic}",
    }
    assert state.watermark_ms == max(ms for _, _, ms in auction.bids)


def test_an_input_that_lags_makes_no_row_late(flow: Flow) -> None:
    """People are a year behind, and read ten at a time; the bids are all there at once."""
    auction = Auction(flow, at_once=10, bid_settings={"max_offsets_per_trigger": "all"})
    now, year = 1_700_000_000_000, 365 * 86_400_000
    auction.feed(
        [(n % 5, n, now + n) for n in range(100)],
        [(n % 5, f"p{n}", now - year + 1000 * n) for n in range(60)],
    )
    auction.run()
    auction.assert_exact()
    paths = sorted((flow.checkpoint / m.FOLDER).glob("0*.json"))
    states = [m.decode(path.read_bytes(), str(path)).state for path in paths]
    marks = [state[0].watermark_ms for state in states if state and state[0].watermark_ms]
    assert len(marks) > 3
    assert marks == sorted(marks)
    assert sum(mark < now for mark in marks) >= 3, "it followed the one that lags"


def test_an_input_that_is_ahead_waits_for_the_other(flow: Flow) -> None:
    """Its first epoch shows how far it is; then it stands until the people are as far."""
    auction = Auction(flow, at_once=10, bid_settings={"max_offsets_per_trigger": 9})
    auction.max_drift = "1 hour"
    now, day = 1_700_000_000_000, 86_400_000
    auction.feed(
        [(n % 5, n, now + n) for n in range(60)],
        [(n % 5, f"p{n}", now - day + 1000 * n) for n in range(60)],
    )
    auction.run()
    auction.assert_exact()
    paths = sorted((flow.checkpoint / m.FOLDER).glob("0*.json"))
    read = [
        {position.input: sum(position.positions.values()) for position in map(parse_source, texts)}
        for texts in (m.decode(path.read_bytes(), str(path)).sources for path in paths)
    ]
    during = [counts["bids"] for counts in read if 0 < counts["people"] < 60]
    assert len(during) >= 3
    assert set(during) == {during[0]}
    assert 0 < during[0] < 60
    assert read[-1] == {"bids": 60, "people": 60}


def test_one_topic_may_be_read_twice(flow: Flow) -> None:
    sources = Sources(flow)
    sources.feed(40)

    def part(uid: str, **settings: Any) -> ts.Stream:
        source = flow.source(value=ts.Json(ROWS), **settings)
        return ts.stream(source, uid=uid).map_batches(some(uid == "even"), schema=ROWS)

    with pytest.raises(OptionError, match="one position"):
        sources.run(part("even", group_id="one"), part("odd", group_id="one"))
    sources.run(part("even"), part("odd"))
    sources.assert_exact()


def some(is_even: bool) -> Any:
    def choose(rows: pa.RecordBatch) -> pa.RecordBatch:
        even = pc.equal(pc.bit_wise_and(rows["n"], 1), 0)
        return rows.select(["k", "n"]).filter(even if is_even else pc.invert(even))

    return choose


@pytest.mark.parametrize("flow", ["resident"], indirect=True)
def test_tools_know_inputs_by_their_ids(flow: Flow, tmp_path: Path) -> None:
    """`inspect`, `doctor`, a savepoint, and a restored checkpoint that goes on by them."""
    sources = Sources(flow)
    sources.feed(30, 20)
    sources.run(sources.numbers(), sources.texts())
    checkpoint, saved = str(flow.checkpoint), str(tmp_path / "saved")

    output = typed("inspect", checkpoint, "--json")
    assert json.loads(output)["inputs"] == ["numbers", "texts"]
    shown = typed("inspect", checkpoint)
    assert "numbers" in shown
    assert "texts" in shown
    options = {n.removeprefix("kafka."): v for n, v in flow.kafka.kafka_options.items()}
    facts = CheckpointReader(checkpoint, options).read()
    assert sum(partition.lag for partition in facts.partitions) == 0
    assert {partition.topic for partition in facts.partitions} == {
        f"numbers/{flow.topic_in}",
        f"texts/{sources.text_topic}",
    }
    assert sum(epoch.offsets or 0 for epoch in facts.epochs) == 50

    sink = flow.sink(key="k", value=ts.Json())
    fewer = ts.Pipeline(flow.name).read(sources.numbers(), sources.third()).write(sink)
    options = "does not fit: the checkpoint has positions of input 'texts'"
    assert options in fewer.explain(flow.spark, checkpoint=checkpoint)
    subject = DeclaredSubject(declared(fewer), FileStorage(checkpoint), (), None)
    assert any("'texts'" in finding.found for finding in its_checkpoint(subject))

    typed("savepoint", "create", checkpoint, saved)
    flow.folder = tmp_path / "restored"
    typed("savepoint", "restore", saved, str(flow.checkpoint))
    sources.feed(10, 10)
    sources.run(sources.texts(), sources.numbers(), parallelism=3)
    sources.assert_exact()


def test_dead_letters_of_all_inputs_go_to_one_topic_with_transform_or_without(flow: Flow) -> None:
    """One of them leaves its own out; after a `transform` they are found by a second reading."""
    sources = Sources(flow)
    letters = f"{flow.name}-letters"
    flow.kafka.create_topic(letters, 1)
    for topic in (flow.topic_in, sources.text_topic, sources.third_topic):
        produce(flow.confluent, topic, [("a", "{"), ("b", json.dumps({"k": "b", "n": 1}))])

    def part(uid: str, topic: str, mode: Any) -> ts.Stream:
        source = flow.source(topics=[topic], value=ts.Json(ROWS, mode=mode))
        return ts.stream(source, uid=uid).map_batches(only_rows(), schema=ROWS)

    pipeline = ts.Pipeline(flow.name).read(
        part("one", flow.topic_in, "deadletter"),
        part("two", sources.text_topic, "dropmalformed"),
        part("three", sources.third_topic, "deadletter"),
    )
    if flow.execution == "jobs":
        pipeline = pipeline.transform(lambda rows: rows.where("n > 0"))
    sink = flow.sink(key="k", value=ts.Json(), dead_letter_topic=letters)
    flow.run(pipeline.write(sink), execution=flow.execution)

    rows = [
        json.loads(record.value or "") for record in read_committed(flow.confluent, flow.topic_out)
    ]
    assert rows == [{"k": "b", "n": 1}] * 3
    assert [record.value for record in read_committed(flow.confluent, letters)] == ["{"] * 2
