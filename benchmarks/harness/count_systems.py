"""The systems at the keyed job: count and sum of amounts per user (`README.md`, "The work").

Those of mode `record` write an update for each input; those of mode `epoch` one row for each key
that a commit (or an interval, or a cache) has seen.
"""

import sys
from collections.abc import Callable, Sequence

from .count_check import EPOCH, RECORD
from .systems import (
    COUNT,
    FLINK_CHECKPOINT_MS,
    FLINK_VERSION,
    KSTREAMS_VERSION,
    OPEN_FLAGS,
    Job,
    System,
    build_flink,
    build_kstreams,
    flink,
    java,
    kstreams,
    spark,
)
from .workspace import (
    Workspace,
    build_flink_sql_peer,
    build_pyflink_peer,
    build_spark_peer,
)

KSTREAMS_COMMIT_MS = 1000
KSTREAMS_CACHE_MB = 64
MINI_BATCH_MS = 1000
PYFLINK_MODE = "thread"
"""Python in the JVM's process: ten times as fast at this job as in processes of its own."""
PYFLINK_RECORDS_MAX = 1_000_000


def ours(mode: str) -> Callable[[Workspace, Job], Sequence[str]]:
    """The command of our job."""

    def command(workspace: Workspace, job: Job) -> Sequence[str]:
        script = workspace.benchmarks / "tallystick_count.py"
        return [
            *(sys.executable, str(script), job.bootstrap, job.input_topic, job.output_topic),
            *("--checkpoint", str(job.directory / "checkpoint"), "--mode", mode),
            *("--epoch-records", str(job.epoch_records_max)),
        ]

    return command


def _flink_sql(workspace: Workspace, job: Job) -> Sequence[str]:
    connector = ("flink-connector-kafka-", "kafka-clients-", "flink-connector-base-")
    jars = [
        str(jar) for jar in workspace.jars("flink").glob("*.jar") if jar.name.startswith(connector)
    ]
    return [
        *java(workspace, "flinksql", *OPEN_FLAGS, jars=[f"{workspace.flink_python_jars}/*", *jars]),
        *("peers.FlinkSqlJob", job.bootstrap, job.input_topic, job.output_topic),
        *(str(FLINK_CHECKPOINT_MS), "hashmap", "true", job.name, str(MINI_BATCH_MS)),
    ]


def _spark_with_state(workspace: Workspace, job: Job) -> Sequence[str]:
    script = workspace.benchmarks / "spark_count.py"
    return [
        *(sys.executable, str(script), job.bootstrap, job.input_topic, job.output_topic),
        *("--checkpoint", str(job.directory / "checkpoint")),
        *("--epoch-records", str(job.epoch_records_max)),
    ]


def _pyflink(workspace: Workspace, job: Job) -> Sequence[str]:
    # Found by the JVM: the interpreter, and the options of its own start.
    variables = {
        "FLINK_ENV_JAVA_OPTS": " ".join(OPEN_FLAGS),
        "JVM_ARGS": "-Xmx3g",
        "VIRTUAL_ENV": str(workspace.flink_python.parent.parent),
        "PYTHONPATH": str(workspace.flink_python_packages),
    }
    return [
        *("env", *(f"{name}={value}" for name, value in variables.items())),
        *(str(workspace.flink_python), str(workspace.pyflink_script), "count"),
        *(job.bootstrap, job.input_topic, job.output_topic),
        *(str(FLINK_CHECKPOINT_MS), PYFLINK_MODE, job.name),
    ]


def _flink_config(backend: str) -> dict[str, str | int]:
    return {
        "version": FLINK_VERSION,
        "checkpoint_ms": FLINK_CHECKPOINT_MS,
        "backend": backend,
    }


def _ours_at(mode: str, name: str) -> System:
    return System(
        name=name,
        job=COUNT,
        mode=mode,
        guarantee="exactly once",
        config={"transactions": "epoch"},
        build=lambda _: None,
        command=ours(mode),
        ends=True,
    )


def _flink_with(backend: str, name: str) -> System:
    return System(
        name=name,
        job=COUNT,
        guarantee="exactly once",
        config=_flink_config(backend),
        build=build_flink,
        command=flink(COUNT, backend),
        ends=True,
    )


def _kstreams_with(cache_mb: int, name: str) -> System:
    return System(
        name=name,
        job=COUNT,
        mode=EPOCH if cache_mb else RECORD,
        guarantee="exactly once",
        config={
            "version": KSTREAMS_VERSION,
            "commit_ms": KSTREAMS_COMMIT_MS,
            "cache_mb": cache_mb,
            "store": "rocksdb",
        },
        build=build_kstreams,
        command=kstreams(COUNT, KSTREAMS_COMMIT_MS, cache_mb, "rocksdb"),
        ends=False,
    )


COUNT_SYSTEMS = (
    _ours_at(RECORD, "ours"),
    _flink_with("hashmap", "flink"),
    _flink_with("rocksdb", "flink-rocksdb"),
    _kstreams_with(0, "kstreams"),
    System(
        name="pyflink",
        job=COUNT,
        guarantee="exactly once",
        config={**_flink_config("hashmap"), "python": PYFLINK_MODE},
        build=build_pyflink_peer,
        command=_pyflink,
        ends=True,
        says_first=False,
        keyed_output=False,
        records_max=PYFLINK_RECORDS_MAX,
        slow=True,
    ),
    _ours_at(EPOCH, "ours-epoch"),
    System(
        name="flinksql",
        job=COUNT,
        mode=EPOCH,
        guarantee="exactly once",
        config={**_flink_config("hashmap"), "mini_batch_ms": MINI_BATCH_MS},
        build=build_flink_sql_peer,
        command=_flink_sql,
        ends=True,
        says_first=False,
    ),
    _kstreams_with(KSTREAMS_CACHE_MB, "kstreams-cached"),
    System(
        name="spark",
        job=COUNT,
        mode=EPOCH,
        guarantee="at least once",
        config={"version": "4.2.0"},
        build=build_spark_peer,
        command=spark(COUNT),
        ends=True,
    ),
    System(
        name="spark-state",
        job=COUNT,
        mode=EPOCH,
        guarantee="at least once",
        config={"version": "4.3", "python": "row"},
        build=lambda _: None,
        command=_spark_with_state,
        ends=True,
        slow=True,
    ),
)
