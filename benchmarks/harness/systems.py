"""The systems that are compared: how each is built, started, and known to be done.

All get the same: two cores, a heap of 3 GB, uncompressed output, `linger.ms` 20 and batches of
128 KiB where they have such settings, exactly once where they can. Here are those of the job
`stateless`; `count_systems.py` has those of `count`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .count_check import MODES, RECORD
from .workspace import Workspace, build_java_peer, build_spark_peer

STATELESS, COUNT = "stateless", "count"
JOBS = (STATELESS, COUNT)
NEXMARK = ("q0", "q1", "q2", "q3", "q4", "q5", "q7", "q8", "q11", "q12")
"""The queries of `nexmark.py`, each a job."""
HEAP = "-Xmx3g"
FLINK_VERSION = "2.2.1"
FLINK_CHECKPOINT_MS = 1000
KSTREAMS_VERSION = "4.3.0"
KSTREAMS_COMMIT_MS = 100

# Flink and its Kryo reach into these; without it the job does not start on Java 17.
_OPENED = ("lang", "util", "util.concurrent", "lang.invoke", "net", "time")
OPEN_FLAGS = tuple(f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in _OPENED)


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one system.

    Args:
        name: unlike that of any other run on the broker.
        bootstrap: `host:port` of the broker.
        input_topic: read from its start to what is its end now.
        output_topic: exists, and is empty.
        directory: the job's working directory; it may leave files there.
        epoch_records_max: records in one micro-batch, for Spark and for us alike.
    """

    name: str
    bootstrap: str
    input_topic: str
    output_topic: str
    directory: Path
    epoch_records_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One of the compared systems, at one job.

    Args:
        name: as in `--only` and in the results.
        job: one of `JOBS` or `NEXMARK`.
        mode: what the output holds, one of `MODES`.
        guarantee: what its output promises.
        config: what its speed depends on, recorded with each result.
        build: gets ready whatever the job needs; cheap when it is there.
        command: the job's command line.
        ends: whether the job ends by itself at the end of the input.
        says_first: whether it prints `FIRST <ms>` when its work begins.
        keyed_output: whether its rows have Kafka keys, so that those of a user are in order.
        records_max: it gets no more than so many: it would take for ever.
        slow: whether it is ended after a while; its rates are those of what it did.
    """

    name: str
    job: str
    mode: str = RECORD
    guarantee: str
    config: Mapping[str, str | int]
    build: Callable[[Workspace], None]
    command: Callable[[Workspace, Job], Sequence[str]]
    ends: bool
    says_first: bool = True
    keyed_output: bool = True
    records_max: int | None = None
    slow: bool = False

    def __post_init__(self) -> None:
        assert self.job in JOBS + NEXMARK, self
        assert self.mode in MODES, self


def java(workspace: Workspace, name: str, *flags: str, jars: Sequence[str] = ()) -> list[str]:
    """The start of a Java peer's command line: everything but its class and arguments."""
    classpath = ":".join([str(workspace.classes(name)), *(jars or [f"{workspace.jars(name)}/*"])])
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    return ["java", HEAP, "-XX:+UseG1GC", *flags, quiet, "-cp", classpath]


def flink(job_name: str, backend: str) -> Callable[[Workspace, Job], Sequence[str]]:
    """The command of Flink's DataStream peer."""

    def command(workspace: Workspace, job: Job) -> Sequence[str]:
        return [
            *java(workspace, "flink", *OPEN_FLAGS),
            *("peers.FlinkJob", job_name, job.bootstrap, job.input_topic, job.output_topic),
            *(str(FLINK_CHECKPOINT_MS), backend, "true", job.name),
        ]

    return command


def kstreams(
    job_name: str, commit_ms: int, cache_mb: int, store: str
) -> Callable[[Workspace, Job], Sequence[str]]:
    """The command of Kafka Streams' peer."""

    def command(workspace: Workspace, job: Job) -> Sequence[str]:
        return [
            *java(workspace, "kstreams"),
            *("peers.KsJob", job_name, job.bootstrap, job.input_topic, job.output_topic),
            *(str(commit_ms), str(cache_mb), store, job.name, "earliest"),
        ]

    return command


def spark(job_name: str) -> Callable[[Workspace, Job], Sequence[str]]:
    """The command of Spark's peer, with expressions only."""

    def command(workspace: Workspace, job: Job) -> Sequence[str]:
        script = workspace.spark_home / "scripts" / "spark_job.py"
        return [
            *(str(workspace.spark_python), str(script)),
            *(job_name, job.bootstrap, job.input_topic, job.output_topic),
            *(str(job.epoch_records_max), "availableNow", "earliest"),
        ]

    return command


def build_flink(workspace: Workspace) -> None:
    """Build Flink's DataStream peer."""
    build_java_peer(workspace, "flink", "src/main/java/peers/FlinkJob.java")


def build_kstreams(workspace: Workspace) -> None:
    """Build Kafka Streams' peer."""
    build_java_peer(workspace, "kstreams", "src/main/java/peers/KsJob.java")


def _ours(transactions: str) -> Callable[[Workspace, Job], Sequence[str]]:
    """The command of our job."""

    def command(workspace: Workspace, job: Job) -> Sequence[str]:
        script = workspace.benchmarks / "tallystick_stateless.py"
        return [
            *(sys.executable, str(script), job.bootstrap, job.input_topic, job.output_topic),
            *("--checkpoint", str(job.directory / "checkpoint")),
            *("--epoch-records", str(job.epoch_records_max)),
            *("--transactions", transactions),
        ]

    return command


STATELESS_SYSTEMS = (
    System(
        name="ours",
        job=STATELESS,
        guarantee="exactly once",
        config={"transactions": "epoch"},
        build=lambda _: None,
        command=_ours("epoch"),
        ends=True,
    ),
    System(
        name="ours-task",
        job=STATELESS,
        guarantee="exactly once",
        config={"transactions": "task"},
        build=lambda _: None,
        command=_ours("task"),
        ends=True,
    ),
    System(
        name="flink",
        job=STATELESS,
        guarantee="exactly once",
        config={
            "version": FLINK_VERSION,
            "checkpoint_ms": FLINK_CHECKPOINT_MS,
            "backend": "hashmap",
        },
        build=build_flink,
        command=flink(STATELESS, "hashmap"),
        ends=True,
    ),
    System(
        name="spark",
        job=STATELESS,
        guarantee="at least once",
        config={"version": "4.2.0"},
        build=build_spark_peer,
        command=spark(STATELESS),
        ends=True,
    ),
    System(
        name="kstreams",
        job=STATELESS,
        guarantee="exactly once",
        config={"version": KSTREAMS_VERSION, "commit_ms": KSTREAMS_COMMIT_MS},
        build=build_kstreams,
        command=kstreams(STATELESS, KSTREAMS_COMMIT_MS, 0, "memory"),
        ends=False,
    ),
)
