"""What `read` takes, and what it refuses: several inputs, with names and without."""

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import tallystick as ts
from tallystick.errors import OptionError
from tallystick.pipeline.input_planning import text_of
from tallystick.pipeline.loop import LoopEpoch
from tallystick.source.offsets import ONLY_INPUT, SourceOffsets
from tallystick.spark.cluster import Cluster
from tallystick.state.meaning import Change, changes
from tallystick.values import TopicPartition

NOWHERE = "localhost:1"
BIDS = "bidder bigint, price bigint, ts timestamp"


@pytest.fixture(autouse=True)
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)


def source(topic: str, columns: str = BIDS, **settings: Any) -> ts.KafkaSource:
    return ts.KafkaSource(NOWHERE, topics=[topic], value=ts.Json(columns), **settings)


def same(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows


def part(uid: str | None, schema: str | None = "k string, n bigint", **settings: Any) -> ts.Stream:
    return ts.stream(source(uid or "in", **settings), uid=uid).map_batches(same, schema=schema)


def run_of(pipeline: ts.Pipeline) -> Any:
    whole = pipeline.write(ts.KafkaSink(NOWHERE, topic="out", value=ts.Json()))
    whole._check_whole(None)
    return whole._run(Cluster.at_hand(None), None)


def people() -> ts.KafkaSource:
    return source("people", "id bigint, name string, since bigint")


def named(**key: Any) -> Any:
    read = ts.Pipeline("p").read(bids=source("bids"), people=people())
    return read.key_by(**(key or {"bids": "bidder", "people": "id"}))


def count_all() -> Any:
    return ts.aggregate({"n": ts.count()})


def counted(keyed: Any, **settings: Any) -> ts.Pipeline:
    function = (
        ts.aggregate({"n": ts.count()})
        if not settings
        else ts.vectorised(lambda batch: ts.Update(), state="n bigint", time_mode="EventTime")
    )
    return keyed.process(function, output="bidder bigint, n bigint", **settings)


def test_the_only_source_needs_no_id_and_keeps_its_group():
    run = run_of(ts.Pipeline("p").read(source("in")).map_batches(same))
    (only,) = run.inputs
    assert (only.uid, only.name, only.options.group) == (ONLY_INPUT, "", "tallystick-p")


def test_steps_of_the_only_stream_are_the_pipelines():
    pipeline = ts.Pipeline("p").read(part(None, schema=None)).map_batches(same)
    run = run_of(pipeline)
    assert run.inputs[0].read.functions == (same, same)
    assert run.columns is None


def test_each_of_several_has_its_own_group_and_steps():
    run = run_of(ts.Pipeline("p").read(part("a"), part("b", group_id="mine")))
    assert [read_input.options.group for read_input in run.inputs] == ["tallystick-p/a", "mine"]
    assert [read_input.read.input for read_input in run.inputs] == ["a", "b"]
    assert run.columns == pa.schema([("k", pa.string()), ("n", pa.int64())])
    rows = pa.record_batch({"n": pa.array([1], pa.int32()), "k": ["x"]})
    *_, conform = run.inputs[1].read.functions
    assert conform(rows).to_pylist() == [{"k": "x", "n": 1}]
    assert conform(rows).schema == run.columns


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ([part("a"), part(None)], "number 2 has no uid.*input-1"),
        ([part("a"), part("a")], "two inputs have the uid 'a'"),
        ([], "expected sources"),
    ],
)
def test_inputs_that_could_be_taken_for_each_other_are_refused(streams, message):
    with pytest.raises(OptionError, match=message):
        ts.Pipeline("p").read(*streams)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (part("b", "k string, n int"), "'n' is int64 in input 'a', and int32 in input 'b'"),
        (part("b", "k string"), "'n' is int64 in input 'a', and not there in input 'b'"),
        (part("b", None), "input 'b': its last map_batches needs schema="),
    ],
)
def test_columns_that_differ_are_named(other, message):
    with pytest.raises(OptionError, match=message):
        run_of(ts.Pipeline("p").read(part("a"), other))


def test_the_order_of_columns_does_not_matter():
    run = run_of(ts.Pipeline("p").read(part("a"), part("b", "n bigint, k string")))
    assert run.columns.names == ["k", "n"]


def test_named_inputs_become_one_table_for_the_first_step():
    run = run_of(counted(named(), event_time={"people": "since"}))
    (step,) = run.keyed.steps
    assert step.columns.names == ["bidder", "$input", "$time", "bids", "people"]
    assert (step.key.names, step.event_time) == (["bidder"], "$time")
    assert [read_input.uid for read_input in run.inputs] == ["bids", "people"]
    columns = run.inputs[1].read.layout.schema
    row = {"id": 7, "name": "x", "since": 5}
    rows = pa.RecordBatch.from_pylist([row], schema=columns)
    for function in run.inputs[1].read.functions:
        rows = function(rows)
    (joined_row,) = rows.to_pylist()
    assert (
        joined_row["bidder"],
        joined_row["$input"],
        joined_row["$time"],
        joined_row["bids"],
    ) == (7, 1, 5, None)
    assert joined_row["people"].items() >= row.items()


JOINS = {
    "interval": lambda **options: ts.interval_join("bids", "people", lower=0, upper=5, **options),
    "window": lambda **options: ts.window_join("bids", "people", size=5, **options),
    "temporal": lambda **options: ts.temporal_join("bids", "people", **options),
    "upsert": lambda **options: ts.upsert_join("bids", "people", **options),
}


def carried_by(function: Any, bids: Any = None, **settings: Any) -> dict[str, list[str]]:
    """The columns of each input that travel to the step, which are those that it holds."""
    read = ts.Pipeline("p").read(bids=bids or source("bids"), people=people())
    keyed = read.key_by(bids="bidder", people="id")
    times = {} if function.time_mode == "None" else {"bids": "ts", "people": "since"}
    run = run_of(keyed.process(function, event_time=times, **settings))
    (step,) = run.keyed.steps
    columns = run.inputs[1].read.layout.schema.names
    assert "topic" not in columns, "columns of Kafka's that nobody needs are not even made"
    carried = {}
    for name in ("bids", "people"):
        carried[name] = [member.name for member in step.columns.field(name).type]
    return carried


@pytest.mark.parametrize("join", JOINS)
def test_a_join_leaves_kafkas_own_columns_out_and_carries_those_that_are_named(join):
    make = JOINS[join]
    bids, all_people = ["bidder", "price", "ts"], ["id", "name", "since"]
    assert carried_by(make()) == {"bids": bids, "people": all_people}
    upsert = make(columns={"bids": ["offset", "price"], "people": []})
    assert carried_by(upsert) == {"bids": ["price", "offset"], "people": []}
    mapped = ts.stream(source("bids"), uid="bids").map_batches(
        same, schema="bidder bigint, ts bigint, offset bigint"
    )
    assert carried_by(make(), mapped)["bids"] == ["bidder", "ts", "offset"], "as the user says"


def test_an_upsert_join_carries_what_it_goes_by():
    options = {"newest_by": {"bids": "offset", "people": "since"}, "columns": {"people": ["name"]}}
    carried = carried_by(JOINS["upsert"](**options))
    assert carried == {"bids": ["bidder", "price", "ts", "offset"], "people": ["name", "since"]}


def test_a_function_of_the_users_gets_all_columns():
    (step,) = run_of(counted(named())).keyed.steps
    assert "offset" in [member.name for member in step.columns.field("bids").type]


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("columns", ["price", {"bid": []}, {"bids": "price"}, {"bids": [1]}])
def test_columns_that_are_not_by_input_are_refused(join, columns):
    with pytest.raises(OptionError, match=r"expected (names of columns by|a dict|a list|a text)"):
        JOINS[join](columns=columns)


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(OptionError, match="columns= names 'colour' of input 'bids', which has onl"):
        carried_by(JOINS["window"](columns={"bids": ["price", "colour"]}))


def test_a_name_is_the_id_unless_there_is_another():
    read = ts.Pipeline("p").read(bids=part(ONLY_INPUT), people=people())
    assert read.inputs.uids == (ONLY_INPUT, "people")


def both() -> ts.Pipeline:
    return ts.Pipeline("p").read(bids=source("bids"), people=people())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: both().map_batches(same), "Give the function to its input"),
        (lambda: both().transform(same), "Give the function to its input"),
        (lambda: run_of(both()), "named inputs go to a process step"),
        (lambda: both().key_by("id"), "the inputs are bids, people, and each needs its key"),
        (lambda: both().key_by(bids="bidder"), "each needs its key"),
        (lambda: both().key_by(bids="bidder", people=("id", "name")), "as many columns"),
        (lambda: named(bids="bidder", people="id", more="x"), "each needs its key"),
        (lambda: ts.Pipeline("p").read(source("a")).key_by(a="x"), "only right after read"),
        (lambda: run_of(counted(named(bids="price", people="who"))), "no column 'who'"),
        (lambda: run_of(counted(named(bids="ts", people="id"))), "the key of input 'people'"),
        (lambda: counted(named(), event_time="ts"), "each of the inputs bids, people"),
        (lambda: counted(named(), event_time={"bid": "ts"}), "no input 'bid'"),
        (
            lambda: counted(ts.Pipeline("p").read(source("a")).key_by("x"), event_time={"a": "t"}),
            "expected one column",
        ),
        (lambda: run_of(counted(named(), event_time={}, max_drift=5)), "needs event_time="),
        (lambda: run_of(ts.Pipeline("p").read(a=source("a"))), "with their names"),
        (lambda: run_of(ts.Pipeline("p").map_batches(same).read(a=source("a"))), "their names"),
        (lambda: ts.Pipeline("p").read(max_parallelism=source("a")), "rename it"),
        (lambda: ts.Pipeline("p").read(source("a"), b=source("b")), "expected sources"),
        (lambda: ts.Pipeline("p").read("topic"), r"expected ts\.KafkaSource"),
        (lambda: ts.stream(source("a"), uid="a/b"), "uid 'a/b'"),
    ],
)
def test_what_named_inputs_cannot_do_is_refused(wrong, message):
    with pytest.raises(OptionError, match=message):
        wrong()


def test_explain_says_it_all():
    pipeline = (
        ts.Pipeline("p")
        .read(bids=part("old").map_batches(same, schema=BIDS), people=people())
        .key_by(bids="bidder", people="id")
        .process(ts.aggregate({"n": ts.count()}))
        .write(ts.KafkaSink(NOWHERE, topic="out", value=ts.Json()))
    )
    text = pipeline.explain()
    for line in (
        "input 'bids': topic old at",
        "input 'people': topic people at",
        "its positions are those of uid 'old'",
        "map_batches same",
        "bids, people go to step 1 side by side",
        "key_by bids: bidder; people: id",
        "group tallystick-p/people shows",
    ):
        assert line in text, text


def meanings(pipeline: ts.Pipeline) -> list[dict[str, str]]:
    (step,) = run_of(pipeline).keyed.steps
    return [dict(state.meaning) for state in step.declared]


def test_the_columns_of_event_times_are_part_of_the_meaning_of_state() -> None:
    """By another one a window would have rows of other times, and timers another clock."""
    function = ts.windowed(ts.tumbling(10), {"n": ts.count()})
    one = ts.Pipeline("p").read(source("in")).key_by("bidder")
    assert [
        meaning["event_time"] for meaning in meanings(one.process(function, event_time="ts"))
    ] == ['"ts"']
    times = {"bids": "ts", "people": "since"}
    join = ts.interval_join("bids", "people", lower=0, upper=1)
    for meaning in meanings(named().process(join, event_time=times)):
        assert meaning['event_time["bids"]'] == '"ts"'
        assert meaning['event_time["people"]'] == '"since"'
    (partly,) = meanings(counted(named(), event_time={"bids": "ts"}))
    assert partly['event_time["people"]'] == "no column"
    (without,) = meanings(counted(named()))
    assert "event_time" not in str(without)


def test_the_key_of_each_input_is_part_of_the_meaning_of_state() -> None:
    """The key's schema has the names of the first input's columns alone."""
    (one,), (other,) = (
        meanings(counted(named(bids="bidder", people=key))) for key in ("id", "since")
    )
    assert [str(change) for change in changes(tuple(one.items()), tuple(other.items()))] == [
        str(Change('key_by["people"]', '["id"]', '["since"]'))
    ]
    join = ts.upsert_join("bids", "people")
    for meaning in meanings(named().process(join)):
        assert meaning['key_by["bids"]'] == '["bidder"]'
    (single,) = meanings(ts.Pipeline("p").read(source("in")).key_by("bidder").process(count_all()))
    assert "key_by" not in str(single)


def test_readers_believe_times_as_the_first_step_with_event_time_says() -> None:
    """Also where a step without event time is before it: its rows' times move the watermark."""
    limit = {"event_time": "ts", "event_time_max_ahead": "1 hour", "uid": "two"}
    windows = ts.windowed(ts.tumbling(10), {"n": ts.count()})
    read = ts.Pipeline("p").read(source("in")).key_by("bidder")
    later = read.process(ts.deduplicate(), uid="one").key_by("bidder").process(windows, **limit)
    whole = SourceOffsets("", "", {TopicPartition("in", 0): 5}, input=ONLY_INPUT)
    before = replace(whole, positions={TopicPartition("in", 0): 1})
    for pipeline in (read.process(windows, **limit), later):
        epoch = LoopEpoch((text_of(whole),), (text_of(before),), 1000)
        (unread,) = run_of(pipeline)._unread(epoch).inputs
        assert unread.plan.event_time is not None
        assert unread.plan.event_time_limit_ms == 1000 + 3_600_000


def test_the_first_input_names_the_columns_of_the_key() -> None:
    """So their order may change where all have the same names; else the key is another one."""
    read = ts.Pipeline("p").read(people=people(), bids=source("bids"))
    other = read.key_by(bids="bidder", people="id")
    count = ts.aggregate({"n": ts.count()})
    names = [
        run_of(pipeline.process(count)).keyed.steps[0].key.names for pipeline in (named(), other)
    ]
    assert names == [["bidder"], ["id"]]
