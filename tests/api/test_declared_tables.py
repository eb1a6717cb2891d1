"""What `broadcast`, `enrich` and `map_batches(state=)` take, what they refuse, and runs of them."""

from threading import Lock
from typing import Any

import pyarrow as pa
import pytest

import tallystick as ts
from tallystick.errors import OptionError
from tallystick.source.subscription import EARLIEST, AtOffsets
from tallystick.spark.cluster import Cluster

NOWHERE = "localhost:1"
BIDS = "bidder bigint, price bigint"
PEOPLE = "id bigint, name string"


@pytest.fixture(autouse=True)
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)


def source(topic: str, columns: str = BIDS, mode: str = "failfast", **settings: Any) -> Any:
    return ts.KafkaSource(NOWHERE, topics=[topic], value=ts.Json(columns, mode=mode), **settings)


def people(uid: str = "people", **settings: Any) -> ts.BroadcastTable:
    return ts.broadcast(source("people", PEOPLE), **{"key": "id", **settings}, uid=uid)


def looked(rows: pa.RecordBatch, table: pa.Table) -> pa.RecordBatch:
    return rows


def same(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows


def run_of(pipeline: ts.Pipeline) -> Any:
    whole = pipeline.write(ts.KafkaSink(NOWHERE, topic="out", value=ts.Json()))
    whole._check_whole(None)
    return whole._run(Cluster.at_hand(None), None)


def bids() -> ts.Pipeline:
    return ts.Pipeline("p").read(source("bids"))


def test_a_table_is_an_input_of_its_own_that_begins_at_the_beginning():
    run = run_of(bids().map_batches(looked, state=people()))
    assert [read_input.uid for read_input in run.inputs] == ["input-1"]
    assert [read_input.uid for read_input in run.all_inputs] == ["input-1", "people"]
    table_input = run.all_inputs[1]
    assert table_input.options.group == "tallystick-p/people"
    assert table_input.options.start == AtOffsets(EARLIEST)
    (table,) = run.tables
    assert table.step.codec.columns == pa.schema([("id", pa.int64()), ("name", pa.string())])
    latest = ts.broadcast(source("people", PEOPLE, starting_offsets="latest"), key="id", uid="x")
    assert latest.stream.source.starting_offsets == "latest"


def test_kafkas_columns_are_there_where_the_key_names_them():
    run = run_of(bids().map_batches(looked, state=people(key="key")))
    names = run.tables[0].step.codec.columns.names
    assert names == ["id", "name", "key"]


def test_a_stream_says_the_columns_of_its_table():
    stream = ts.stream(source("people", PEOPLE)).map_batches(same, schema="name string, id bigint")
    run = run_of(bids().map_batches(looked, state=ts.broadcast(stream, key=["id"], uid="x")))
    assert run.tables[0].step.codec.columns.names == ["name", "id"]
    open_end = ts.stream(source("people", PEOPLE)).map_batches(same)
    with pytest.raises(OptionError, match="needs schema="):
        run_of(bids().map_batches(looked, state=ts.broadcast(open_end, key="id", uid="x")))


def test_a_table_is_one_wherever_it_is_used():
    table = people()
    named = {
        "bids": ts.stream(source("bids")).map_batches(
            ts.enrich(table, on={"bidder": "id"}), schema=f"{BIDS}, name string"
        ),
        "others": source("others"),
    }
    pipeline = (
        ts.Pipeline("p")
        .read(**named)
        .key_by(bids="bidder", others="bidder")
        .process(
            ts.co_process(lambda batch: None, state="n bigint"),
            output="bidder bigint, n bigint",
        )
        .map_batches(looked, state=table)
    )
    assert [declared.uid for declared in run_of(pipeline).tables] == ["people"]
    with pytest.raises(OptionError, match="two tables have the uid 'people', and are not the same"):
        run_of(bids().map_batches(looked, state=table).map_batches(looked, state=people(key="key")))


REFUSED: dict[str, tuple[Any, str]] = {
    "no name": (lambda: people("no name"), "broadcast: uid 'no name'"),
    "no key": (lambda: people(key=[]), r"broadcast\(key=\[\]\)"),
    "a key twice": (lambda: people(key=["id", "id"]), "each once"),
    "another uid": (
        lambda: ts.broadcast(ts.stream(source("people"), uid="a"), key="id", uid="b"),
        "its stream has the uid 'a'",
    ),
    "no function": (lambda: people(delete="name"), r"broadcast\(delete='name'\)"),
    "no table": (lambda: ts.enrich(source("people"), on="id"), r"expected ts\.broadcast"),
    "not all of the key": (
        lambda: ts.enrich(people(key=["id", "name"]), on={"bidder": "id"}),
        "the key of table 'people' is id, name",
    ),
    "no such join": (
        lambda: ts.enrich(people(), on="id", how="full"),
        "expected 'inner' or 'left'",
    ),
    "a text of columns": (lambda: ts.enrich(people(), on="id", columns="name"), r"expected a list"),
    "no state": (lambda: bids().map_batches(looked, state={}), r"expected ts\.broadcast"),
    "two tables": (
        lambda: bids().map_batches(ts.enrich(people(), on="id"), state=people("other")),
        "it has its table already",
    ),
    "called": (lambda: bids().map_batches(None, state=people()), "by its name alone"),
    "no such key": (
        lambda: run_of(bids().map_batches(looked, state=people(key="ids"))),
        "broadcast table 'people': key='ids': there is no column 'ids'",
    ),
    "dead letters": (
        lambda: run_of(
            bids().map_batches(
                looked,
                state=ts.broadcast(source("people", PEOPLE, "deadletter"), key="id", uid="x"),
            )
        ),
        "choose mode 'failfast' or 'dropmalformed'",
    ),
    "a part of it": (
        lambda: run_of(
            bids().map_batches(
                looked,
                state=ts.broadcast(
                    source("people", PEOPLE, max_offsets_per_trigger=5), key="id", uid="x"
                ),
            )
        ),
        "an epoch has all of the table that is there",
    ),
    "what waits for more": (
        lambda: run_of(
            bids().map_batches(
                looked,
                state=ts.broadcast(
                    source("people", PEOPLE, options={"minOffsetsPerTrigger": "9"}),
                    key="id",
                    uid="x",
                ),
            )
        ),
        "leave out max_offsets_per_trigger and minOffsetsPerTrigger",
    ),
    "a table for a table": (
        lambda: run_of(
            bids().map_batches(
                looked,
                state=ts.broadcast(
                    ts.stream(source("a", PEOPLE)).map_batches(
                        looked, state=people(), schema=PEOPLE
                    ),
                    key="id",
                    uid="x",
                ),
            )
        ),
        "nor state of their own",
    ),
    "the uid of an input": (
        lambda: run_of(bids().map_batches(looked, state=people("input-1"))),
        "an input of the pipeline has that uid",
    ),
    "the uid of a step": (
        lambda: run_of(
            bids()
            .map_batches(looked, state=people("sums"), schema=BIDS)
            .key_by("bidder")
            .process(ts.aggregate({"n": ts.count()}), uid="sums")
        ),
        "a process step of the pipeline has that uid",
    ),
    "the uid of another state": (
        lambda: run_of(
            bids()
            .map_batches(looked, state=people())
            .map_batches(looked, state=ts.list_state("n bigint", uid="people"))
        ),
        "list state 'people': other state of the pipeline has that uid",
    ),
    "a list of two steps": (
        lambda: run_of(
            bids()
            .map_batches(looked, state=ts.list_state("n bigint", uid="a"))
            .map_batches(looked, state=ts.list_state("n bigint", uid="a"))
        ),
        "two steps have list state 'a'",
    ),
    "a list behind keys": (
        lambda: run_of(
            bids()
            .key_by("bidder")
            .process(ts.aggregate({"n": ts.count()}))
            .map_batches(looked, state=ts.list_state("n bigint", uid="a"))
        ),
        "map_batches looked: list state 'a' is that of tasks that read",
    ),
    "a list of structs": (
        lambda: run_of(
            bids().map_batches(looked, state=ts.list_state("n struct<a: int>", uid="a"))
        ),
        "list state 'a': list state, column 'n' is struct",
    ),
    "no union": (lambda: ts.list_state("n bigint", uid="a", union=3), r"list_state\(union=3\)"),
    "a union that cannot travel": (
        lambda: run_of(
            bids().map_batches(
                looked, state=ts.list_state("n bigint", uid="a", union=Lock().locked)
            )
        ),
        "list state 'a': its union= cannot be sent",
    ),
    "no name of a list": (lambda: ts.list_state("n bigint", uid="a/b"), "list_state: uid 'a/b'"),
    "DataFrame code": (
        lambda: run_of(
            bids().map_batches(looked, state=people(), schema=BIDS).transform(lambda frame: frame)
        ),
        "a pipeline with transform steps has no operator state",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_before_anything_starts(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(OptionError, match=message):
        call()


def test_explain_names_the_table():
    pipeline = (
        bids()
        .map_batches(ts.enrich(people(delete=same), on={"bidder": "id"}))
        .write(ts.KafkaSink(NOWHERE, topic="out", value=ts.Json()))
    )
    text = pipeline.explain()
    assert f"table people     each task has it, and reads topic people at {NOWHERE} for it" in text
    assert "by id: id bigint, name string" in text
    assert "rows are deleted where same" in text
    assert "map_batches enrich(people)" in text
    with_list = bids().map_batches(looked, state=ts.list_state("n bigint", uid="buffer"))
    text = with_list.write(ts.KafkaSink(NOWHERE, topic="out", value=ts.Json())).explain()
    assert "list buffer      each task that reads has one: n bigint" in text
