"""A driver process to be killed, paused and fenced: `python crash_job.py '{"spark.…": …}'`.

It starts Spark at once, so that a test may have one ready, then takes commands on stdin, one JSON
text a line: `{"run": {…}}` runs a pipeline, `{"go_on": true}` ends a stop at `block_at`. On stdout
it says, as JSON too, what becomes a fact.

A spec's `sinks` are what is written to in place of one topic: each with its `kind` and settings.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jvm
import lines_sink
import loaded_daemon
import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import tallystick as ts
from tallystick.epoch import protocol as c
from tallystick.epoch.two_phase import Committable, Outcome
from tallystick.pipeline.sinks import SinkCluster, Sinks
from tallystick.run.driver import Driver, Listener
from tallystick.run.participants import OpenSinks
from tallystick.run.query import Query
from tallystick.spark.context import JAVA_OPTIONS, is_in_one_jvm
from tallystick.spark.streaming.foreach_batch import EpochRunner
from tallystick.tasks.read import Report, WritePlan

CALL, WRITE_PLAN = EpochRunner.__call__, SinkCluster.write_plan
COMMIT_ONE, MAKE_DRIVER = OpenSinks._commit_one, Sinks.make_driver
LOCAL = "local[2]"
NOT_IN_TIME = "Python worker failed to connect back"
"""Spark gives its process for a query's source 10 s to come up, which a busy machine may not."""

STARTED = "Started"
"""Not an event of the coordinator: the query runs; one of Spark's has not planned anything yet."""
ONE_COMMITTED = "ParticipantCommitted"
"""Not an event of the coordinator: of what tasks prepared in sinks, one more is committed."""
RETURNED = "EpochReturned"
"""Not an event of the coordinator: Spark's epoch is over, and it has not logged it yet."""


def say(**fact: Any) -> None:
    """Tell the test."""
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


class Commands:
    """What the test says."""

    def __init__(self) -> None:
        self.runs: queue.Queue[dict[str, Any]] = queue.Queue()
        self.go_on = threading.Semaphore(0)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if "run" in command:
                self.runs.put(command["run"])
            else:
                self.go_on.release()
        os.kill(os.getpid(), signal.SIGKILL)  # the test is gone


def die() -> None:
    """Let nothing be tidied up."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Fate:
    """What is to happen at the n-th occurrence of a fact; a kill also some time after it."""

    commands: Commands
    kill_at: str = ""
    block_at: str = ""
    occurrence: int = 1
    delay_s: float = 0.0

    def __call__(self, event: c.Event) -> None:
        """Called by the driver with each event."""
        self.meet(type(event).__name__)

    def meet(self, fact: str) -> None:
        """Tell it, and let come what must."""
        say(fact=fact)
        if fact not in (self.kill_at, self.block_at):
            return
        self.occurrence -= 1
        if self.occurrence == 0 and fact == self.block_at:
            say(blocked=fact)
            self.commands.go_on.acquire()
        elif self.occurrence == 0 and self.delay_s:
            threading.Timer(self.delay_s, die).start()
        elif self.occurrence == 0:
            die()


@dataclass(frozen=True)
class DyingWritePlan(WritePlan):
    """The first attempt to write dies once it has written everything, before it can report."""

    marker: str = ""

    def write(self, frames: Any, attempt_number: int) -> Report:
        """Write, and lose the report if it is the first one ever."""
        report = WritePlan.write(self, frames, attempt_number)
        if report.produced and not Path(self.marker).exists():
            Path(self.marker).touch()
            raise RuntimeError("this attempt died after it wrote")
        return report


@dataclass(frozen=True)
class ForgetfulWritePlan(WritePlan):
    """The first attempt to write loses what the tasks before it sent, and dies of it.

    Spark fetches in vain for the next one, and runs those tasks again: another attempt of their
    stage, in which it counts their attempts from 0.
    """

    marker: str = ""
    local: str = ""

    def write(self, frames: Any, attempt_number: int) -> Report:
        """Delete Spark's shuffle files, once."""
        if not Path(self.marker).exists():
            lost = list(Path(self.local).rglob("shuffle_*"))
            for path in lost:
                path.unlink()
            Path(self.marker).write_text(str(len(lost)))
            raise RuntimeError("this attempt died when the shuffle files were gone")
        return WritePlan.write(self, frames, attempt_number)


def hook(fate: Fate, marker: str | None, forgetful: dict[str, str] | None = None) -> None:
    """Make more of it facts, and hand out a write plan of ours if one is asked for."""

    def called(self: EpochRunner, rows: Any, batch_id: int) -> None:
        CALL(self, rows, batch_id)
        fate.meet(RETURNED)

    def write_plan(self: SinkCluster, producer: Any) -> WritePlan:
        plan = WRITE_PLAN(self, producer)
        if forgetful:
            return ForgetfulWritePlan(**vars(plan), **forgetful)
        if marker is None:
            return plan
        return DyingWritePlan(**vars(plan), marker=marker)

    def commit_one(self: OpenSinks, committable: Committable) -> Outcome:
        outcome = COMMIT_ONE(self, committable)
        fate.meet(ONE_COMMITTED)
        return outcome

    def make_driver(
        self: Sinks, *given: Any, listener: Listener | None = None, **notes: Any
    ) -> Driver:
        # foreachBatch has no listener.
        return MAKE_DRIVER(self, *given, listener=listener or fate, **notes)

    OpenSinks._commit_one = commit_one  # type: ignore[method-assign]
    Sinks.make_driver = make_driver  # type: ignore[method-assign]
    EpochRunner.__call__ = called  # type: ignore[method-assign]
    SinkCluster.write_plan = write_plan  # type: ignore[method-assign]


def step(spec: dict[str, Any]) -> Any:
    """The function of the pipeline: keys and values as they are, with what a test asked for."""
    reading_dies = spec.get("reading_dies", False)
    wait_for = spec.get("map_waits_for", "")
    dies, marker = spec.get("dies", ""), spec.get("marker", "")
    sleeps_s = spec.get("one_attempt_sleeps_s", 0.0)
    tells_pids = spec.get("tells_pids", "")
    seen: list[int] = []  # how many rows of each batch this attempt of a task had

    def pass_on(rows: pa.RecordBatch) -> pa.RecordBatch:
        if reading_dies and TaskContext.get().attemptNumber() == 0:
            raise RuntimeError("this attempt died while it read")
        if dies and seen and not os.path.exists(marker):
            Path(marker).touch()
            kill(dies)
        if sleeps_s and seen and not os.path.exists(marker):
            Path(marker).touch()
            time.sleep(sleeps_s)
        seen.append(rows.num_rows)
        if tells_pids:
            Path(tells_pids).mkdir(exist_ok=True)
            Path(tells_pids, str(os.getpid())).touch()
        while wait_for and not os.path.exists(wait_for):
            time.sleep(0.02)
        return rows.select(["key", "value"])

    return pass_on


def kill(dies: str) -> None:
    """Let this process die, or the daemon of its worker, or the executor above both."""
    daemon = os.getpgrp()  # it leads the group of its workers, and of what they fork
    os.kill(daemon, 0)
    assert os.getppid() != 1, "this worker is an orphan, or Spark runs without a daemon"
    victim = {"worker": os.getpid, "daemon": os.getpgrp, "executor": lambda: above(daemon)}[dies]()
    os.kill(victim, signal.SIGKILL)
    while dies == "daemon" and os.getppid() == daemon:
        time.sleep(0.01)  # until this worker knows what it is


def above(pid: int) -> int:
    """The parent of a process: of a daemon, the JVM."""
    return int(subprocess.check_output(["ps", "-o", "ppid=", "-p", str(pid)]))


def show(spark: SparkSession, spec: dict[str, Any], query: Query | StreamingQuery) -> None:
    """Print what a user may look at while he debugs; everything goes to the log of the test."""
    print("shown:", query.lastProgress, query.status, query.exception())
    if isinstance(query, StreamingQuery):
        query.explain(extended=True)
    ts.register(spark)
    rows = (
        spark.read.format("tallystick").options(**spec["kafka"], subscribe=spec["topic_in"]).load()
    )
    rows.explain(extended=True)
    print(rows, rows.count(), rows._jdf.queryExecution().toString())


def session(master: str, config: dict[str, str]) -> SparkSession:
    """A session as small and quick to start as it gets."""
    workers = loaded_daemon.SETTINGS
    if not is_in_one_jvm(master):
        workers = loaded_daemon.SPARKS_OWN
        os.environ[loaded_daemon.PYTHON] = sys.executable
    spark = ts.spark_session(
        "crash-job",
        master=master,
        config={
            "spark.ui.enabled": "false",
            **workers,
            JAVA_OPTIONS: config.get(JAVA_OPTIONS) or jvm.options(),
            **{name: value for name, value in config.items() if name.startswith("spark.")},
        },
    )
    spark.sparkContext.setLogLevel(config.get("log.level", "ERROR"))
    return spark


def run(spark: SparkSession, spec: dict[str, Any], commands: Commands) -> None:
    """Run one pipeline over all that is there."""
    settings = {
        name: spec[name]
        for name in ("kill_at", "block_at", "occurrence", "delay_s")
        if name in spec
    }
    fate = Fate(commands, **settings)
    hook(fate, spec.get("writing_dies_once"), spec.get("shuffle_is_lost_once"))
    for _ in range(3):
        query = start(spark, spec, fate)
        fate.meet(STARTED)
        if folder := spec.get("session_stops_behind"):
            while not Path(folder).exists() or len(os.listdir(folder)) < 2:
                time.sleep(0.05)
            time.sleep(1)
            spark.stop()
        try:
            return query.awaitTermination()
        except StreamingQueryException as error:
            if NOT_IN_TIME not in str(error):
                raise
        finally:
            if spec.get("show"):
                show(spark, spec, query)
    raise RuntimeError("this machine is too busy for Spark")


def start(spark: SparkSession, spec: dict[str, Any], fate: Fate) -> Query | StreamingQuery:
    """Start the pipeline that a spec asks for."""
    if spec.get("foreach_batch"):
        return start_foreach_batch(spark, spec)
    return pipeline(spec).start(
        spark,
        checkpoint=spec["checkpoint"],
        trigger=spec.get("trigger", {"availableNow": True}),
        accept=spec.get("accept", ()),
        listener=fate,
        execution=spec.get("execution"),
    )


def start_foreach_batch(spark: SparkSession, spec: dict[str, Any]) -> StreamingQuery:
    """The same by a query of the user's own."""
    ts.register(spark)
    options = {**spec["kafka"], "subscribe": spec["topic_in"], "startingOffsets": "earliest"}
    rows = (
        spark.readStream.format("tallystick")
        .options(**options, maxOffsetsPerTrigger=spec["epoch_records"])
        .load()
    )
    (to,) = sinks(spec)
    return (
        rows.select("key", "value")
        .writeStream.queryName(spec["name"])
        .option("checkpointLocation", spec["checkpoint"])
        .foreachBatch(to)
        .trigger(availableNow=True)
        .start()
    )


def pipeline(spec: dict[str, Any]) -> ts.Pipeline:
    """Keys and values as they are; another job may put its own pipeline here."""
    return (
        ts.Pipeline(spec["name"])
        .read(source(spec))
        .map_batches(step(spec))
        .write(*sinks(spec, transaction_timeout_ms=spec.get("transaction_timeout_ms", 300_000)))
    )


def source(spec: dict[str, Any], **settings: Any) -> ts.KafkaSource:
    """The input."""
    servers, options = cluster(spec)
    return ts.KafkaSource(
        servers,
        topics=[spec["topic_in"]],
        starting_offsets=spec.get("starting_offsets", "earliest"),
        max_offsets_per_trigger=spec.get("epoch_records"),
        options=options,
        **settings,
    )


def sink(spec: dict[str, Any], **settings: Any) -> ts.KafkaSink:
    """The output."""
    servers, options = cluster(spec)
    return ts.KafkaSink(servers, topic=spec["topic_out"], options=options, **settings)


def sinks(spec: dict[str, Any], **settings: Any) -> tuple[Any, ...]:
    """All outputs; settings are those of a topic."""
    kinds = {
        "kafka": lambda **more: sink(spec, **{**settings, **more}),
        "postgres": ts.PostgresSink,
        "files": ts.FileSink,
        "delta": ts.DeltaSink,
        "iceberg": ts.IcebergSink,
        "lines": lines_sink.LinesSink,
    }
    specs = [dict(spec_given) for spec_given in spec.get("sinks", [{"kind": "kafka"}])]
    return tuple(kinds[sink_spec.pop("kind")](**sink_spec) for sink_spec in specs)


def cluster(spec: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Where the broker is, and how it is reached."""
    options = dict(spec["kafka"])
    return options.pop("kafka.bootstrap.servers"), options


def main() -> None:
    """Serve runs until the test ends."""
    config = json.loads(sys.argv[1])
    commands = Commands()
    spark = session(config.get("spark.master", LOCAL), config)
    say(fact="Ready")
    while True:
        spec, error = commands.runs.get(), None
        master = spec.get("master", config.get("spark.master", LOCAL))
        context = spark.sparkContext
        if context.master != master or context._jsc is None:
            spark.stop()
            spark = session(master, config)
        try:
            run(spark, spec, commands)
        except Exception as met:
            error = f"{type(met).__name__}: {met}"
        say(fact="Ended", error=error)


cloudpickle.register_pickle_by_value(lines_sink)  # as if it stood here: workers need no tests

if __name__ == "__main__":
    main()
