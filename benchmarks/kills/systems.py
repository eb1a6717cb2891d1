"""The three systems: how each is built, set up, and started again after its end.

Peers get the settings that make them recover fast. All commit every `EPOCH_MS`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.harness.systems import OPEN_FLAGS
from benchmarks.harness.workspace import Workspace, build_kills_peer
from tallystick.testing.process import free_ports

EPOCH_MS = 500
TIMEOUT_MS = 12_000
"""The transaction timeout of Tallystick and Kafka Streams: shorter than a pause."""
FLINK_TIMEOUT_MS = 900_000
"""Flink's: as long as brokers allow by default, as its documentation advises."""
FLINK_VERSION, KSTREAMS_VERSION = "2.2.1 (connector 5.0.0-2.2)", "4.3.0"
THREADS = 2
JOB_ID = "0" * 31 + "1"
HOST = "127.0.0.1"

FLINK_CONFIG = {
    "jobmanager.rpc.address": HOST,
    "jobmanager.bind-host": HOST,
    "rest.bind-address": HOST,
    "jobmanager.memory.process.size": "1g",
    "taskmanager.host": HOST,
    "taskmanager.bind-host": HOST,
    "taskmanager.numberOfTaskSlots": THREADS,
    "parallelism.default": THREADS,
    "taskmanager.cpu.cores": THREADS,
    "taskmanager.memory.framework.heap.size": "128m",
    "taskmanager.memory.framework.off-heap.size": "128m",
    "taskmanager.memory.task.heap.size": "640m",
    "taskmanager.memory.task.off-heap.size": "0",
    "taskmanager.memory.managed.size": "16m",
    "taskmanager.memory.network.min": "64m",
    "taskmanager.memory.network.max": "64m",
    "taskmanager.memory.jvm-metaspace.size": "256m",
    "taskmanager.memory.jvm-overhead.min": "192m",
    "taskmanager.memory.jvm-overhead.max": "192m",
    "execution.checkpointing.interval": f"{EPOCH_MS}ms",
    "execution.checkpointing.storage": "filesystem",
    "execution.checkpointing.num-retained": 3,
    "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
    "execution.checkpointing.tolerable-failed-checkpoints": 10,
    "state.backend.type": "hashmap",
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": 1_000_000,
    "restart-strategy.fixed-delay.delay": "200ms",
    # A process that is gone is noticed after two seconds, and not after 20; one that stands still
    # is waited for as by default. Processes that start together find each other at once.
    "heartbeat.interval": "1000ms",
    "heartbeat.timeout": "50s",
    "cluster.registration.error-delay": "300ms",
    "cluster.registration.refused-registration-delay": "300ms",
    "cluster.registration.max-timeout": "2s",
}

KSTREAMS_CONFIG = {
    "processing.guarantee": "exactly_once_v2",
    "num.stream.threads": THREADS,
    "commit.interval.ms": EPOCH_MS,
    "replication.factor": -1,
    "auto.offset.reset": "earliest",
    "producer.transaction.timeout.ms": TIMEOUT_MS,
    # A static member takes its place again at once, without a rebalance.
    "group.instance.id": "count",
    "session.timeout.ms": 10_000,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of a system for one run.

    Args:
        name: Unlike that of any other run on the cluster.
        servers: Of the brokers, through the proxies.
        events: The input topic.
        updates: The output topic.
        folder: For all its files.
        workspace: With what was built.
        flink_timeout_ms: Flink's transaction timeout.
    """

    name: str
    servers: str
    events: str
    updates: str
    folder: Path
    workspace: Workspace
    flink_timeout_ms: int = FLINK_TIMEOUT_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system under test.

    Args:
        name: In results.
        title: In tables.
        versions: Of what it is made of.
        build: Gets its programs ready; cheap the second time.
        prepare: Writes the files of its settings, before a run.
        commands: By part, each of which is a process: its command line, asked for at each start.
        coordinator: The part that stands still in the fault `pause`.
        worker: The part that dies in the fault `worker`.
        has_workers_below: Whether not that part itself dies, but a Python worker below it.
    """

    name: str
    title: str
    versions: str
    build: Callable[[Workspace], None]
    prepare: Callable[[Setting], None]
    commands: Mapping[str, Callable[[Setting], Sequence[str]]]
    coordinator: str
    worker: str
    has_workers_below: bool = False


def newest_checkpoint(folder: Path) -> Path | None:
    """Return Flink's newest complete checkpoint below a folder."""
    folders = [path.parent for path in folder.glob("*/chk-*/_metadata") if path.stat().st_size]
    return max(folders, key=lambda path: int(path.name.removeprefix("chk-")), default=None)


def _java(setting: Setting, name: str, heap: str, *flags: str) -> list[str]:
    jars = setting.workspace.jars(f"kills-{name}")
    classpath = f"{setting.workspace.classes(f'kills-{name}')}:{jars}/*"
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    return ["java", heap, "-XX:TieredStopAtLevel=1", *flags, quiet, "-cp", classpath]


def _checkpoints(setting: Setting) -> Path:
    return setting.folder / "checkpoints"


def _prepare_flink(setting: Setting) -> None:
    rpc, rest = free_ports(2, HOST)
    config = {
        **FLINK_CONFIG,
        "jobmanager.rpc.port": rpc,
        "rest.port": rest,
        "execution.checkpointing.dir": _checkpoints(setting).as_uri(),
        "io.tmp.dirs": setting.folder / "tmp",
    }
    (setting.folder / "conf").mkdir(parents=True)
    text = "".join(f"{name}: {value}\n" for name, value in config.items())
    (setting.folder / "conf" / "config.yaml").write_text(text)


def _job_manager(setting: Setting) -> list[str]:
    newest = newest_checkpoint(_checkpoints(setting))
    return [
        *_java(setting, "flink", "-Xmx512m", *OPEN_FLAGS),
        "org.apache.flink.container.entrypoint.StandaloneApplicationClusterEntryPoint",
        *("--configDir", str(setting.folder / "conf")),
        *("--job-classname", "FlinkCount", "--job-id", JOB_ID),
        *(("--fromSavepoint", newest.as_uri()) if newest is not None else ()),
        *(setting.name, setting.servers, setting.events, setting.updates),
        str(setting.flink_timeout_ms),
    ]


def _task_manager(setting: Setting) -> list[str]:
    return [
        *_java(setting, "flink", "-Xmx768m", "-XX:MaxDirectMemorySize=256m", *OPEN_FLAGS),
        "org.apache.flink.runtime.taskexecutor.TaskManagerRunner",
        *("--configDir", str(setting.folder / "conf")),
    ]


def _prepare_kstreams(setting: Setting) -> None:
    config = {
        **KSTREAMS_CONFIG,
        "application.id": setting.name,
        "bootstrap.servers": setting.servers,
        "state.dir": setting.folder / "state",
    }
    setting.folder.mkdir(parents=True)
    text = "".join(f"{name}={value}\n" for name, value in config.items())
    (setting.folder / "streams.properties").write_text(text)


def _kstreams(setting: Setting) -> list[str]:
    return [
        *_java(setting, "kstreams", "-Xmx768m"),
        *("StreamsCount", str(setting.folder / "streams.properties")),
        *(setting.events, setting.updates),
    ]


def _tallystick(setting: Setting) -> list[str]:
    return [
        *(sys.executable, "-m", "benchmarks.kills.count_job"),
        *(setting.name, setting.servers, setting.events, setting.updates),
        *(str(setting.folder / "checkpoint"), str(EPOCH_MS), str(TIMEOUT_MS)),
    ]


SYSTEMS = (
    System(
        name="tallystick",
        title="Tallystick",
        versions=f"PySpark {version('pyspark')}",
        build=lambda workspace: None,
        prepare=lambda setting: setting.folder.mkdir(parents=True),
        commands={"driver": _tallystick},
        coordinator="driver",
        worker="driver",
        has_workers_below=True,
    ),
    System(
        name="flink",
        title="Flink",
        versions=FLINK_VERSION,
        build=lambda workspace: build_kills_peer(workspace, "flink", "FlinkCount.java"),
        prepare=_prepare_flink,
        commands={"jobmanager": _job_manager, "taskmanager": _task_manager},
        coordinator="jobmanager",
        worker="taskmanager",
    ),
    System(
        name="kstreams",
        title="Kafka Streams",
        versions=KSTREAMS_VERSION,
        build=lambda workspace: build_kills_peer(workspace, "kstreams", "StreamsCount.java"),
        prepare=_prepare_kstreams,
        commands={"instance": _kstreams},
        coordinator="instance",
        worker="instance",
    ),
)
