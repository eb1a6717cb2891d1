"""The tools on checkpoints of a loop of our own: savepoints, `inspect`, `read_state`, metrics.

No log of Spark's says there what is done. So each is also tried after a death that leaves a
manifest of which only the decider knows whether it counts.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner, Result

import tallystick as ts
from tallystick.__main__ import app
from tallystick.checkpoint.newest import Ask
from tallystick.kafka.config import KafkaConfig
from tallystick.ops import metrics, savepoints
from tallystick.ops.checkpoint_view import asking
from tallystick.ops.inspection import DECIDED, KAFKA_KNOWS, SETTLED, UNDECIDED, Report, inspect
from tallystick.pipeline.listeners import OBSERVERS
from tallystick.run.query import Query
from tallystick.source.offsets import SourceOffsets, parse_source
from tests.postgres.real_postgres import PostgresServer
from tests.spark.flow import Facts, Flow, die, pass_on
from tests.spark.streamed import streamed
from tests.spark.sunk import Sunk
from tests.spark.test_savepoint_restore import Counting, folder, leave_a_failed_attempt
from tests.spark.test_sinks_together import rows_in
from tests.spark.topics import WAIT_S, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]

LOOP = "jobs"


@dataclass
class Tools:
    """A pipeline in a loop, and what tells of its checkpoint.

    Its epochs are of at most 60 records, fewer where they take long, and begin with number 1.
    """

    counting: Counting

    @property
    def flow(self) -> Flow:
        return self.counting.flow

    @property
    def servers(self) -> str:
        return str(self.flow.kafka.kafka_options["kafka.bootstrap.servers"])

    @property
    def ask(self) -> Ask:
        return asking(KafkaConfig.from_options({"bootstrap.servers": self.servers}))

    def run(self, count: int, checkpoint: Path | None = None, **settings: Any) -> None:
        """Run over so many more records."""
        self.counting.feed(count)
        pipeline = self.counting.pipeline(**settings)
        self.flow.run(pipeline, checkpoint=checkpoint, execution=LOOP)

    def run_and_die(self, fact: str, count: int = 40) -> None:
        """Read so many more records in an epoch that gets no further than a fact."""
        self.counting.feed(count)
        with pytest.raises(RuntimeError, match="died after"):
            self.flow.run(self.counting.pipeline(), execution=LOOP, listener=Facts(fact, die))

    def inspect(self, checkpoint: Path | None = None, ask: Ask | None = None) -> Report:
        return inspect(folder(checkpoint or self.flow.checkpoint), verify=True, ask=ask)

    def state(self, checkpoint: Path | None = None, **settings: Any) -> int:
        """How many records of each key its state has seen; the same of all keys."""
        assert self.flow.spark is not None
        frame = ts.read_state(
            self.flow.spark, str(checkpoint or self.flow.checkpoint), "numbers", **settings
        )
        return sum(row["seen"] for row in frame.collect())

    def call(self, *words: object) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words])

    def assert_exact(self) -> None:
        assert self.counting.output() == self.counting.expected(0, self.counting.fed)


@pytest.fixture
def tools(flow: Flow) -> Tools:
    return Tools(Counting(flow))


def parsed(text: str) -> SourceOffsets:
    position = parse_source(text)
    assert position is not None
    return position


@contextmanager
def running(tools: Tools, pipeline: ts.Pipeline) -> Iterator[Query]:
    assert tools.flow.spark is not None
    query = pipeline.start(
        tools.flow.spark, checkpoint=str(tools.flow.checkpoint), execution="jobs"
    )
    try:
        yield query
    finally:
        query.stop()


def test_a_savepoint_goes_on_exactly_where_kafka_stands_and_else_only_if_told(
    tools: Tools, tmp_path: Path
) -> None:
    """At another parallelism."""
    tools.run(140)
    created = tools.call("savepoint", "create", tools.flow.checkpoint, tmp_path / "s" / "one")
    newest = tools.inspect(tools.flow.checkpoint).epoch
    assert newest >= 3
    assert f"Saved epoch {newest}" in created.output, created.output
    (listed,) = json.loads(tools.call("savepoint", "list", tmp_path / "s", "--json").output)
    assert (listed["epoch"], listed["pipeline"]) == (newest, tools.flow.name)
    for name in ("new", "again"):
        assert (
            tools.call("savepoint", "restore", tmp_path / "s/one", tmp_path / name).exit_code == 0
        )

    assert (tools.inspect(tmp_path / "new").epoch, tools.state(tmp_path / "new")) == (newest, 140)
    tools.run(70, tmp_path / "new", parallelism=3)
    tools.assert_exact()
    assert tools.inspect(tmp_path / "new").steps[0].parallelism == 3
    assert tools.state(tmp_path / "new") == 210

    with pytest.raises(ts.DataLossError, match="is written a second time"):
        tools.run(7, tmp_path / "again")
    tools.run(0, tmp_path / "new", parallelism=1)
    tools.assert_exact()
    assert tools.call("savepoint", "delete", tmp_path / "s/one").exit_code == 0


def test_a_savepoint_of_structured_streaming_goes_on_in_a_loop(
    tools: Tools, tmp_path: Path
) -> None:
    """And one of a checkpoint that a loop has taken over, in which Spark's log stands still."""
    tools.counting.feed(140)
    flow = tools.flow
    assert flow.spark is not None
    before = streamed(tools.counting.pipeline(), flow.spark, checkpoint=flow.checkpoint)
    assert before.awaitTermination(150)
    assert (flow.checkpoint / "commits" / "2").exists()
    savepoints.create(folder(flow.checkpoint), folder(tmp_path / "sparks"))
    savepoints.restore(folder(tmp_path / "sparks"), folder(tmp_path / "new"))

    tools.run(70, tmp_path / "new")

    tools.assert_exact()
    report = tools.inspect(tmp_path / "new")
    assert report.epoch == report.logged >= 4
    assert report.notes == ()
    assert report.is_whole
    assert tools.state(tmp_path / "new") == 210
    saved = savepoints.create(folder(tmp_path / "new"), folder(tmp_path / "ours"))
    assert (saved.manifest.checkpoint_id, saved.spark) == (report.epoch, {})
    savepoints.restore(folder(tmp_path / "ours"), folder(tmp_path / "newer"))
    tools.run(70, tmp_path / "newer")
    tools.assert_exact()


@pytest.mark.parametrize("fact", ["", "TransactionCommitted"])
def test_where_a_latest_start_was_is_in_its_savepoint(
    flow: Flow, tmp_path: Path, fact: str
) -> None:
    """Also of a run that died with its first token, so that there is only a seed."""
    flow.feed(40)
    latest = flow.pipeline(starting_offsets="latest")
    if fact:
        with pytest.raises(RuntimeError, match="died after"):
            flow.run(latest, execution=LOOP, listener=Facts(fact, die))
        assert inspect(folder(flow.checkpoint)).epoch == 0
    else:
        flow.run(latest, execution=LOOP)
    savepoints.create(folder(flow.checkpoint), folder(tmp_path / "saved"))
    savepoints.restore(folder(tmp_path / "saved"), folder(tmp_path / "new"))
    before = len(flow.input)
    flow.feed(30)

    flow.run(latest, checkpoint=tmp_path / "new", execution=LOOP)

    values = [record.value for record in read_committed(flow.confluent, flow.topic_out)]
    assert sorted(values, key=int) == [value for _, value in flow.input[before:]]


def test_a_manifest_that_was_not_decided_is_never_taken_for_decided(
    tools: Tools, tmp_path: Path
) -> None:
    tools.run(140)
    newest = tools.inspect().epoch
    assert newest >= 3
    tools.run_and_die("ManifestWritten")
    create = ("savepoint", "create", tools.flow.checkpoint)

    report, answered = tools.inspect(), tools.inspect(ask=tools.ask)
    assert (report.epoch, report.logged) == (newest, newest + 1)
    assert report.outputs[-1].standing == KAFKA_KNOWS
    assert f"what is decided after epoch {newest} is not known" in report.notes[-1]
    assert (answered.epoch, answered.outputs[-1].standing, answered.notes) == (
        newest,
        UNDECIDED,
        (),
    )

    with pytest.raises(ts.OptionError, match=f"epoch {newest + 1} has left a manifest"):
        tools.state()
    assert tools.state(bootstrap_servers=tools.servers) == 140
    refused = tools.call(*create, tmp_path / "no")
    assert refused.exit_code == 1
    assert "only Kafka knows whether it is decided" in refused.output
    servers_option = ("--bootstrap-servers", tools.servers)
    refused = tools.call(*create, tmp_path / "no", "--epoch", newest + 1, *servers_option)
    assert f"no committed epoch {newest + 1}" in refused.output
    saved = f"Saved epoch {newest}"
    assert saved in tools.call(*create, tmp_path / "told", "--epoch", newest).output
    assert saved in tools.call(*create, tmp_path / "saved", *servers_option).output

    savepoints.restore(folder(tmp_path / "saved"), folder(tmp_path / "new"))
    tools.run(30, tmp_path / "new")
    tools.assert_exact()


def test_an_epoch_that_was_decided_and_no_more_counts_where_kafka_is_asked(
    tools: Tools, tmp_path: Path
) -> None:
    """With an attempt beside it that failed; the next run's note makes the question needless."""
    tools.run(140)
    newest = tools.inspect().epoch
    tools.run_and_die("TransactionCommitted")
    leave_a_failed_attempt(folder(tools.flow.checkpoint))
    servers = {"bootstrap_servers": tools.servers}

    assert tools.inspect().epoch == newest
    answered = tools.inspect(ask=tools.ask)
    assert answered.epoch == newest + 1
    standings = [output.standing for output in answered.outputs if output.epoch == newest + 1]
    assert sorted(standings) == ["failed attempt", SETTLED]
    assert tools.state(**servers) == 180
    saved = savepoints.create(
        folder(tools.flow.checkpoint), folder(tmp_path / "saved"), ask_kafka=tools.ask
    )
    assert saved.manifest.checkpoint_id == newest + 1

    tools.run(0)
    assert tools.state() == 180
    assert tools.inspect().epoch == newest + 1
    savepoints.restore(folder(tmp_path / "saved"), folder(tmp_path / "new"))
    tools.run(30, tmp_path / "new")
    tools.assert_exact()


@pytest.mark.parametrize("sinks", ["task", "files", "both"])
def test_what_is_decided_and_not_settled_is_not_saved(
    flow: Flow, tmp_path: Path, sinks: str
) -> None:
    """The checkpoint's own log decides, and Kafka where it is one of both."""
    files = ts.FileSink(str(tmp_path / "files"))
    written = {
        "task": (flow.sink(transactions="task"),),
        "files": (files,),
        "both": (flow.sink(), files),
    }[sinks]
    source = flow.source(max_offsets_per_trigger=100)

    def of_loop() -> ts.Pipeline:
        return ts.Pipeline(flow.name).read(source).map_batches(pass_on()).write(*written)

    flow.feed(100)
    flow.run(of_loop(), execution=LOOP)
    flow.feed(60)
    with pytest.raises(RuntimeError, match="died after"):
        flow.run(of_loop(), execution=LOOP, listener=Facts("TransactionCommitted", die))
    servers = str(flow.kafka.kafka_options["kafka.bootstrap.servers"])
    servers_option = ("--bootstrap-servers", servers)

    created = CliRunner().invoke(
        app, ["savepoint", "create", str(flow.checkpoint), str(tmp_path / "one"), *servers_option]
    )
    shown = CliRunner().invoke(app, ["inspect", str(flow.checkpoint), "--json", *servers_option])

    assert "Saved epoch 1" in created.output, created.output
    assert "Epoch 2 is decided too" in created.output
    report = json.loads(shown.stdout)
    assert (report["epoch"], report["outputs"][-1]["standing"]) == (1, DECIDED)
    flow.run(of_loop(), execution=LOOP)
    saved = savepoints.create(folder(flow.checkpoint), folder(tmp_path / "two"))
    assert saved.manifest.checkpoint_id == 2
    if sinks != "files":
        flow.assert_exact()
    savepoints.restore(folder(tmp_path / "two"), folder(tmp_path / "new"))
    flow.feed(20)
    word = [] if sinks == "both" else ["restored-at-epoch-2-without-token"]
    flow.run(of_loop(), checkpoint=tmp_path / "new", execution=LOOP, accept=word)
    if sinks != "files":
        flow.assert_exact()
    if sinks != "task":
        assert rows_in(tmp_path / "files") == sorted(flow.input)


def test_a_pipeline_that_runs_is_saved_whole_and_notes_what_is_done_when_it_pauses(
    tools: Tools, tmp_path: Path
) -> None:
    with running(tools, tools.counting.pipeline()) as query:
        tools.counting.feed(280)
        places = [tmp_path / f"saved-{number}" for number in range(3)]
        for place in places:
            time.sleep(1)
            saved = savepoints.create(
                folder(tools.flow.checkpoint), folder(place), ask_kafka=tools.ask
            )
            read = sum(parsed(saved.manifest.sources[0]).positions.values())
            assert (tools.state(place) if saved.manifest.state else 0) == read
        query.processAllAvailable()
        deadline = time.monotonic() + WAIT_S
        while tools.inspect().outputs[-1].standing != SETTLED:
            assert time.monotonic() < deadline, "no note of what is done"
            time.sleep(0.1)
        assert tools.state() == 280
    tools.assert_exact()


def test_metrics_and_progress_are_those_of_every_query(tools: Tools) -> None:
    registry = CollectorRegistry()
    collector = metrics.register(registry)
    name = {"query": tools.flow.name}
    try:
        with running(tools, tools.counting.pipeline()) as query:
            tools.counting.feed(140)
            query.processAllAvailable()
            epochs = len(query.recentProgress)
            (source,) = ts.source_progress(query)
            (before,) = ts.source_progress(query.recentProgress[0])
            at = {**name, "source": "0", "topic": tools.flow.topic_in}
            shown = [
                registry.get_sample_value("tallystick_source_position", {**at, "partition": str(n)})
                for n in range(3)
            ]
        assert sum(source.positions.values()) == sum(filter(None, shown)) == 140
        assert source.lag_total == 0
        assert sum(before.positions.values()) < 140
        assert registry.get_sample_value("tallystick_epochs_total", name) == epochs
        gone = registry.get_sample_value("tallystick_source_position", {**at, "partition": "0"})
        assert gone is None, "the query has ended"
    finally:
        OBSERVERS.remove(collector.observe)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


def test_what_a_dead_loop_has_decided_is_committed_by_a_recovery_in_every_sink(
    flow: Flow, postgres: PostgresServer, tmp_path: Path
) -> None:
    """Kafka decides; a table and files are to follow."""
    sunk = Sunk(flow, postgres).kafka().prepared().files()
    flow.feed(100)
    flow.run(sunk.pipeline(), execution=LOOP)
    flow.feed(60)
    with pytest.raises(RuntimeError, match="died after"):
        flow.run(sunk.pipeline(), execution=LOOP, listener=Facts("TransactionCommitted", die))
    servers = str(flow.kafka.kafka_options["kafka.bootstrap.servers"])
    where = ("--bootstrap-servers", servers, "--checkpoint", str(flow.checkpoint))
    where += ("--postgres", postgres.dsn, "--files", str(sunk.folders[0]))

    def listed() -> list[dict[str, Any]]:
        words = ["transactions", "list", "--json", "--pipeline", flow.name, *where]
        transactions: list[dict[str, Any]] = json.loads(CliRunner().invoke(app, words).stdout)[
            "transactions"
        ]
        return transactions

    assert sunk.counts() == [160, 100, 100]
    assert {transaction["system"] for transaction in listed()} == {"postgres", "files"}
    assert {(transaction["standing"], transaction["epoch"]) for transaction in listed()} == {
        ("due", 2)
    }

    done = sunk.pipeline().recover(checkpoint=str(flow.checkpoint))

    assert (done.epoch, done.decider) == (2, "kafka-1")
    assert all(sink.committed and not sink.aborted for sink in done.sinks)
    assert listed() == []
    sunk.assert_exact()
    flow.feed(40)
    flow.run(sunk.pipeline(), execution=LOOP)
    sunk.assert_exact()
    assert inspect(folder(flow.checkpoint)).epoch == 3
