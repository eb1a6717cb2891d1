"""Broadcast tables and the join with them, on Spark and a real broker."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import tallystick as ts
from tallystick.__main__ import app
from tallystick.errors import OptionError
from tallystick.ops import savepoints
from tallystick.storage.file_storage import FileStorage
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Flow
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

ROWS = "k string, n bigint"


@pytest.fixture(params=["resident", "jobs"])
def flow(
    request: pytest.FixtureRequest,
    tallystick_kafka: EmbeddedKafka,
    spark: SparkSession,
    tmp_path: Path,
) -> Flow:
    return Flow(tallystick_kafka, spark, tmp_path, execution=request.param)


def only_rows() -> Any:
    """Made here, so that workers need no tests."""
    return lambda rows: rows.select(["k", "n"])


class Rules:
    """Rows and rules: names by key, with the version that they have."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.topic = f"{flow.name}-rules"
        flow.kafka.create_topic(self.topic, 2)
        self.table: dict[str, int | None] = {}
        self.fed = 0
        self.expected: list[tuple[str, int, int | None]] = []

    def rule(self, key: str, version: int | None) -> None:
        value = None if version is None else json.dumps({"version": version})
        produce(self.flow.confluent, self.topic, [(key, value)])
        self.table.pop(key, None)
        if version is not None:
            self.table[key] = version

    def feed(self, count: int) -> None:
        rows = [(f"k{n % 7}", n) for n in range(self.fed, self.fed + count)]
        self.fed += count
        self.expected += [(k, n, self.table.get(k)) for k, n in rows]
        values = [(k, json.dumps({"k": k, "n": n})) for k, n in rows]
        produce(self.flow.confluent, self.flow.topic_in, values)

    def declared(self) -> ts.BroadcastTable:
        source = self.flow.source(
            topics=[self.topic], value=ts.Json("version bigint"), starting_offsets=None
        )
        return ts.broadcast(
            ts.stream(source).map_batches(keyed(), schema="key string, version bigint"),
            key="key",
            uid="rules",
            delete=gone(),
        )

    def pipeline(self, table: ts.BroadcastTable | None = None, *, inner: bool = False) -> Any:
        how = "inner" if inner else "left"
        return (
            ts.Pipeline(self.flow.name)
            .read(self.flow.source(value=ts.Json(ROWS)))
            .map_batches(only_rows())
            .map_batches(ts.enrich(table or self.declared(), on={"k": "key"}, how=how))
            .write(self.flow.sink(key="k", value=ts.Json()))
        )

    def run(self, pipeline: Any = None, **settings: Any) -> None:
        self.flow.run(pipeline or self.pipeline(), execution=self.flow.execution, **settings)

    def assert_exact(self) -> None:
        records = read_committed(self.flow.confluent, self.flow.topic_out)
        rows = [json.loads(record.value) for record in records]
        assert sorted((r["k"], r["n"], r.get("version")) for r in rows) == sorted(self.expected)


def keyed() -> Any:
    """The record's key as text: a tombstone has nothing else."""

    def named(rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"key": rows["key"].cast(pa.string()), "version": rows["version"]})

    return named


def gone() -> Any:
    return lambda rows: pc.is_null(rows["version"])


def test_rows_have_the_rules_of_their_epoch_after_restarts_too(flow: Flow) -> None:
    rules = Rules(flow)
    for key in range(5):
        rules.rule(f"k{key}", key)
    rules.feed(100)
    rules.run()
    rules.assert_exact()

    rules.rule("k1", 10)
    rules.rule("k2", None)
    rules.rule("k6", 60)
    rules.feed(50)
    rules.run()
    rules.assert_exact()

    rules.feed(20)
    rules.run()
    rules.assert_exact()
    rules.rule("k3", None)
    rules.run()
    rules.feed(20)
    rules.run()
    rules.assert_exact()
    entries = ts.read_state(flow.spark, str(flow.checkpoint), "rules").collect()
    assert {row["key"]: row["version"] for row in entries} == rules.table


def noted() -> Any:
    """Rows with a rule, and beside them those without."""

    def by_rule(rows: pa.RecordBatch, table: pa.Table) -> ts.Rows:
        known = pc.is_in(rows["k"], value_set=table["key"])
        return ts.Rows(rows.filter(known), {"unknown": rows.filter(pc.invert(known))})

    return by_rule


def test_a_table_is_there_in_every_stage_and_goes_along_in_a_savepoint(
    flow: Flow, tmp_path: Path
) -> None:
    """In a stream of an input, before a keyed step and after it; with sinks of their own."""
    rules = Rules(flow)
    others = f"{flow.name}-others"
    flow.kafka.create_topic(others, 2)

    def pipeline(parallelism: int) -> ts.Pipeline:
        table = rules.declared()
        more = flow.source(topics=[others], value=ts.Json(ROWS))
        streams = [
            ts.stream(source, uid=uid)
            .map_batches(only_rows())
            .map_batches(noted(), state=table, schema=ROWS, outputs={"unknown": ROWS})
            for uid, source in {"rows": flow.source(value=ts.Json(ROWS)), "others": more}.items()
        ]
        return (
            ts.Pipeline(flow.name)
            .read(*streams)
            .key_by("k", max_parallelism=16)
            .process(
                ts.aggregate({"count": ts.count()}, each="record", keep=["n"]),
                uid="counts",
                parallelism=parallelism,
            )
            .map_batches(ts.enrich(table, on={"k": "key"}))
            .write(
                ts.FileSink(str(tmp_path / "known")), unknown=ts.FileSink(str(tmp_path / "unknown"))
            )
        )

    for key in range(5):
        rules.rule(f"k{key}", key)
    rules.feed(70)
    rules.run(pipeline(2))
    saved, fork = tmp_path / "saved", tmp_path / "fork"
    savepoints.create(FileStorage(str(flow.checkpoint)), FileStorage(str(saved)))
    entries = ts.read_state(flow.spark, str(saved), "rules").collect()
    assert {row["key"]: row["version"] for row in entries} == rules.table
    with pytest.raises(OptionError, match="'rules' is operator state"):
        savepoints.migrate(
            FileStorage(str(saved)), FileStorage(str(tmp_path / "more")), {"rules": 8}, tmp_path
        )
    savepoints.restore(FileStorage(str(saved)), FileStorage(str(fork)))
    shown = CliRunner().invoke(app, ["inspect", str(fork)])
    assert shown.exit_code == 0
    assert "1 key groups, states: table (version bigint)" in " ".join(shown.output.split())

    rules.rule("k0", 100)
    rules.rule("k4", None)
    produce(flow.confluent, others, [("k5", json.dumps({"k": "k5", "n": 1000}))])
    rules.feed(35)
    rules.run(pipeline(3), checkpoint=fork, accept=["restored-at-epoch-1-without-token"])

    known, unknown = (
        ds.dataset(tmp_path / name, format="parquet").to_table().to_pylist()
        for name in ("known", "unknown")
    )
    assert sorted((row["k"], row["n"], row["version"]) for row in known) == sorted(
        expectation for expectation in rules.expected if expectation[2] is not None
    )
    rest = [(k, n) for k, n, version in rules.expected if version is None]
    assert sorted((row["k"], row["n"]) for row in unknown) == sorted([*rest, ("k5", 1000)])
    by_key = Counter(row["k"] for row in known)
    assert {k: max(r["count"] for r in known if r["k"] == k) for k in by_key} == by_key


def test_rules_change_while_a_pipeline_runs_and_is_rescaled(flow: Flow) -> None:
    """Each row has the rule that was in the topic before it, or a newer one."""
    rules, least = Rules(flow), list[int]()
    query = rules.pipeline().start(
        flow.spark, checkpoint=str(flow.checkpoint), execution=flow.execution
    )
    try:
        for number in range(1, 7):
            for key in range(7):
                rules.rule(f"k{key}", number)
            least += [number] * 30
            rules.feed(30)
            if number in (2, 4):
                query.rescale(parallelism=number // 2)
            if number % 2:
                query.processAllAvailable()
        query.processAllAvailable()
        progress = query.recentProgress
    finally:
        query.stop()
    rows_out = [
        json.loads(record.value or "") for record in read_committed(flow.confluent, flow.topic_out)
    ]
    assert sorted(row["n"] for row in rows_out) == list(range(180))
    assert all(row["version"] >= least[row["n"]] for row in rows_out)
    assert sum(progress_entry["numInputRows"] for progress_entry in progress) == 180 + 42, (
        "each rule is counted once"
    )


def test_a_table_comes_and_goes_as_an_input_and_a_state_do(flow: Flow) -> None:
    rules = Rules(flow)
    plain = (
        ts.Pipeline(flow.name)
        .read(flow.source(value=ts.Json(ROWS)))
        .map_batches(only_rows())
        .write(flow.sink(key="k", value=ts.Json()))
    )
    rules.feed(20)
    rules.run(plain)
    rules.rule("k1", 1)
    rules.feed(20)
    rules.run()
    rules.assert_exact()

    rules.feed(20)
    rules.expected[-20:] = [(k, n, None) for k, n, _ in rules.expected[-20:]]
    with pytest.raises(OptionError, match="holds state of step 'rules'"):
        rules.run(plain)
    settings = {"execution": flow.execution, "allow_dropped_state": ["rules"]}
    with pytest.raises(OptionError, match="dropped-input-rules"):
        flow.run(plain, **settings)
    flow.run(plain, accept=["dropped-input-rules"], **settings)
    rules.assert_exact()

    rules.feed(20)
    rules.run()  # from the beginning again
    rules.assert_exact()
    other = ts.broadcast(
        ts.stream(flow.source(topics=[rules.topic], value=ts.Json("version bigint"))).map_batches(
            keyed(), schema="key string, version int"
        ),
        key="key",
        uid="rules",
    )
    rules.feed(1)
    with pytest.raises(OptionError, match="a broadcast table with the columns"):
        rules.run(rules.pipeline(other))


def lots_of(size: int) -> Any:
    def lots(rows: pa.RecordBatch, kept: pa.RecordBatch) -> Any:
        together = pa.Table.from_batches([kept, rows])
        whole = together.num_rows - together.num_rows % size
        return together.slice(0, whole), together.slice(whole)

    return lots


def own_numbers() -> Any:
    def own(elements: pa.RecordBatch, task: int, count: int) -> pa.RecordBatch:
        mine = [number % count == task for number in elements["n"].to_pylist()]
        return elements.filter(pa.array(mine, pa.bool_()))

    return own


@pytest.mark.parametrize("union", [None, own_numbers()], ids=["list", "union"])
def test_lists_go_on_over_rescales_and_in_a_savepoint(
    flow: Flow, tmp_path: Path, union: Any
) -> None:
    """What is held by tasks that are gone is with others; each row is out, or held, once."""
    rules = Rules(flow)
    pipeline = (
        ts.Pipeline(flow.name)
        .read(flow.source(value=ts.Json(ROWS)))
        .map_batches(only_rows())
        .map_batches(lots_of(25), state=ts.list_state(ROWS, uid="held", union=union))
        .write(flow.sink(key="k", value=ts.Json()))
    )
    seen = []

    def held_now(checkpoint: Path) -> list[int]:
        rows = ts.read_state(flow.spark, str(checkpoint), "held").collect()
        for task in {row["task"] for row in rows}:
            places = sorted(row["place"] for row in rows if row["task"] == task)
            assert places == list(range(len(places)))
        seen.append({row["task"] for row in rows})
        out = read_committed(flow.confluent, flow.topic_out)
        numbers = [json.loads(record.value or "")["n"] for record in out]
        assert len(numbers) % 25 == 0
        return sorted([*numbers, *(row["n"] for row in rows)])

    for parallelism in (2, 1, 3):
        place = str(flow.checkpoint)
        query = pipeline.start(flow.spark, checkpoint=place, execution=flow.execution)
        try:
            rules.feed(20)
            query.processAllAvailable()
            query.rescale(parallelism=parallelism)
            rules.feed(40)
            query.processAllAvailable()
        finally:
            query.stop()
        assert held_now(flow.checkpoint) == list(range(rules.fed))
    assert all(max(tasks, default=0) < n for tasks, n in zip(seen, (2, 1, 3), strict=True))
    savepoints.create(FileStorage(str(flow.checkpoint)), FileStorage(str(tmp_path / "saved")))
    savepoints.restore(FileStorage(str(tmp_path / "saved")), FileStorage(str(tmp_path / "fork")))
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "fork")]).output
    assert "states: elements (k string, n bigint)" in " ".join(shown.split())
    rules.feed(40)
    flow.run(pipeline, checkpoint=tmp_path / "fork", execution=flow.execution)
    assert held_now(tmp_path / "fork") == list(range(rules.fed))
