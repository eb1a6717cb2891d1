"""The systems that are compared: how each is built, started, and known to be done.

All get the same: two cores, a heap of 3 GB, uncompressed output, `linger.ms` 20 and batches of
128 KiB where they have such settings, exactly once where they can.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .workspace import Workspace, build_java_peer, build_spark_peer

HEAP = "-Xmx3g"
FLINK_CHECKPOINT_MS = 1000
KSTREAMS_COMMIT_MS = 100
EPOCH_RECORDS_MAX = 1_000_000
"""Records in one micro-batch, for Spark's connector and for us alike."""

# Flink and its Kryo reach into these; without it the job does not start on Java 17.
_OPENED = ("lang", "util", "util.concurrent", "lang.invoke", "net", "time")
_OPEN_FLAGS = [f"--add-opens=java.base/java.{each}=ALL-UNNAMED" for each in _OPENED]


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one system.

    Args:
        name: unlike that of any other run on the broker.
        bootstrap: `host:port` of the broker.
        input_topic: read from its start to what is its end now.
        output_topic: exists, and is empty.
        directory: the job's working directory; it may leave files there.
    """

    name: str
    bootstrap: str
    input_topic: str
    output_topic: str
    directory: Path


@dataclass(frozen=True, slots=True)
class System:
    """One of the compared systems.

    Args:
        name: as in `--only` and in the results.
        guarantee: what its output promises.
        config: what its speed depends on, recorded with each result.
        build: gets ready whatever the job needs; cheap when it is there.
        command: the job's command line.
        ends: whether the job ends by itself at the end of the input.
    """

    name: str
    guarantee: str
    config: Mapping[str, str | int]
    build: Callable[[Workspace], None]
    command: Callable[[Workspace, Job], Sequence[str]]
    ends: bool


def _ours(workspace: Workspace, job: Job) -> Sequence[str]:
    script = workspace.benchmarks / "tallystick_stateless.py"
    return [
        *(sys.executable, str(script), job.bootstrap, job.input_topic, job.output_topic),
        *("--checkpoint", str(job.directory / "checkpoint")),
        *("--epoch-records", str(EPOCH_RECORDS_MAX)),
    ]


def _flink(workspace: Workspace, job: Job) -> Sequence[str]:
    return [
        *_java(workspace, "flink", *_OPEN_FLAGS),
        *("peers.FlinkJob", "stateless", job.bootstrap, job.input_topic, job.output_topic),
        *(str(FLINK_CHECKPOINT_MS), "hashmap", "true", job.name),
    ]


def _kstreams(workspace: Workspace, job: Job) -> Sequence[str]:
    return [
        *_java(workspace, "kstreams"),
        *("peers.KsJob", "stateless", job.bootstrap, job.input_topic, job.output_topic),
        *(str(KSTREAMS_COMMIT_MS), "0", "memory", job.name, "earliest"),
    ]


def _spark(workspace: Workspace, job: Job) -> Sequence[str]:
    script = workspace.spark_home / "scripts" / "spark_job.py"
    return [
        *(str(workspace.spark_python), str(script)),
        *("stateless", job.bootstrap, job.input_topic, job.output_topic),
        *(str(EPOCH_RECORDS_MAX), "availableNow", "earliest"),
    ]


def _java(workspace: Workspace, name: str, *flags: str) -> list[str]:
    classpath = f"{workspace.classes(name)}:{workspace.jars(name)}/*"
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    return ["java", HEAP, "-XX:+UseG1GC", *flags, quiet, "-cp", classpath]


SYSTEMS = {
    system.name: system
    for system in (
        System(
            name="ours",
            guarantee="exactly once",
            config={"epoch_records_max": EPOCH_RECORDS_MAX, "transactions": "epoch"},
            build=lambda _: None,
            command=_ours,
            ends=True,
        ),
        System(
            name="flink",
            guarantee="exactly once",
            config={"version": "2.2.1", "checkpoint_ms": FLINK_CHECKPOINT_MS, "backend": "hashmap"},
            build=lambda workspace: build_java_peer(
                workspace, "flink", "src/main/java/peers/FlinkJob.java"
            ),
            command=_flink,
            ends=True,
        ),
        System(
            name="spark",
            guarantee="at least once",
            config={"version": "4.2.0", "epoch_records_max": EPOCH_RECORDS_MAX},
            build=build_spark_peer,
            command=_spark,
            ends=True,
        ),
        System(
            name="kstreams",
            guarantee="exactly once",
            config={"version": "4.3.0", "commit_ms": KSTREAMS_COMMIT_MS},
            build=lambda workspace: build_java_peer(
                workspace, "kstreams", "src/main/java/peers/KsJob.java"
            ),
            command=_kstreams,
            ends=False,
        ),
    )
}
"""All that can be compared, by name."""
