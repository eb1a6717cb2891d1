"""A node of the embedded Kafka: folder, settings, JVM, and readiness."""

import base64
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tallystick.errors import BrokerUnavailableError
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig

HOST = "127.0.0.1"
LOG_TAIL_LINES = 30

LOGGING = """\
rootLogger.level = INFO
rootLogger.appenderRefs = stdout
rootLogger.appenderRef.stdout.ref = STDOUT
appender.stdout.type = Console
appender.stdout.name = STDOUT
appender.stdout.layout.type = PatternLayout
appender.stdout.layout.pattern = [%d] %p %m (%c)%n
"""
LOGGING_OF_KAFKA_3 = """\
log4j.rootLogger = INFO, stdout
log4j.appender.stdout = org.apache.log4j.ConsoleAppender
log4j.appender.stdout.layout = org.apache.log4j.PatternLayout
log4j.appender.stdout.layout.ConversionPattern = [%d] %p %m (%c)%n
"""
"""Log4j 1, where Kafka 4 has log4j 2; a node has both files and reads its own."""

SMALL_AND_QUICK = {
    "offsets.topic.num.partitions": "5",
    "transaction.state.log.num.partitions": "5",
    "group.initial.rebalance.delay.ms": "0",
    "auto.create.topics.enable": "false",  # a typing error in a topic's name should show
    "log.retention.ms": "-1",  # records with old timestamps are what tests write
    "broker.session.timeout.ms": "3000",  # a killed leader is replaced after 3 s, not 9
    "broker.heartbeat.interval.ms": "500",
    "log.cleaner.dedupe.buffer.size": str(16 << 20),  # the default is half of the heap
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
}

SHAPES_FORMAT = (
    *("log.dir", "metadata.log.dir", "process.roles", "controller.quorum"),
    *("inter.broker.protocol", "unstable."),
)
"""The beginnings of properties that decide what Kafka formats, and where."""
META = "meta.properties"
"""The file of a data folder that names its node and cluster."""

QUICK_JVM = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Xlog:cds=off"]
"""A broker that lives for seconds gains nothing from the second compiler."""


@dataclass(frozen=True, slots=True)
class Node:
    """A broker that is a controller too. `node_id` is the broker's id in Metadata."""

    node_id: int
    port: int
    controller_port: int
    directory: Path

    @property
    def address(self) -> str:
        """`host:port` of the node's listener for clients."""
        return f"{HOST}:{self.port}"

    @property
    def log_path(self) -> Path:
        """The node's log: one file over all restarts."""
        return self.directory / "server.log"

    @property
    def properties_path(self) -> Path:
        """The node's `server.properties`."""
        return self.directory / "server.properties"

    @property
    def logging_path(self) -> Path:
        """The settings of the node's log."""
        return self.directory / "log4j2.properties"

    @property
    def old_logging_path(self) -> Path:
        """The settings of the node's log for Kafka 3."""
        return self.directory / "log4j.properties"

    @property
    def data_path(self) -> Path:
        """The folder of the node's partitions."""
        return self.directory / "data"

    @property
    def is_formatted(self) -> bool:
        """True if the data folder belongs to a cluster already."""
        return (self.data_path / META).exists()

    def write_settings(self, server_properties: str) -> None:
        """Write the settings for the next start of the JVM."""
        self.directory.mkdir(exist_ok=True)
        self.logging_path.write_text(LOGGING)
        self.old_logging_path.write_text(LOGGING_OF_KAFKA_3)
        self.properties_path.touch(mode=0o600)  # it may hold passwords
        self.properties_path.write_text(server_properties)

    def log_tail(self) -> str:
        """Return the end of the node's log, for errors."""
        if not self.log_path.exists():
            return "(it has written no log)"
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])


def lay_out(
    directory: Path, ports: Sequence[int], controller_ports: Sequence[int]
) -> tuple[Node, ...]:
    """Return the nodes of a cluster, numbered from 1, each with a folder of its own."""
    numbered = enumerate(zip(ports, controller_ports, strict=True), start=1)
    return tuple(Node(number, *both, directory / f"node-{number}") for number, both in numbered)


def server_properties(
    node: Node, nodes: Sequence[Node], protocol: str, more: Mapping[str, str]
) -> str:
    """Return the text of a node's `server.properties`.

    Args:
        node: The node.
        nodes: All of the cluster.
        protocol: The name of the listener for clients, PLAINTEXT or SASL_SSL.
        more: Properties that override all others.
    """
    voters = ",".join(f"{voter.node_id}@{HOST}:{voter.controller_port}" for voter in nodes)
    properties = {
        "process.roles": "broker,controller",
        "node.id": str(node.node_id),
        "controller.quorum.voters": voters,
        "listeners": f"{protocol}://{node.address},CONTROLLER://{HOST}:{node.controller_port}",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": str(node.data_path),
        **_replication(len(nodes)),
        **SMALL_AND_QUICK,
        **more,
    }
    return "".join(f"{name}={_escaped(value)}\n" for name, value in properties.items())


def _replication(brokers: int) -> dict[str, str]:
    copies, in_sync_min = str(brokers), str(min(2, brokers))
    return {
        "default.replication.factor": copies,
        "min.insync.replicas": in_sync_min,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": in_sync_min,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": in_sync_min,
    }


def _escaped(value: str) -> str:
    """Return a value as Java's properties format wants it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n")


@dataclass(frozen=True, slots=True)
class Programs:
    """Java and Kafka's classes: the beginning of every command line."""

    java: Path
    classpath: str
    archive: Path | None = None
    """The classes of a broker as an earlier one loaded them (AppCDS): 40 % less to do at start."""
    record_to: Path | None = None
    """The path at which a server that is shut down in order leaves such an archive."""

    def server_command(self, node: Node, heap_mb: int) -> list[str]:
        """Return the command that runs a node in the foreground."""
        record = [f"-XX:ArchiveClassesAtExit={self.record_to}"] if self.record_to else []
        return [*self._jvm(node, heap_mb), *record, "kafka.Kafka", str(node.properties_path)]

    def format_command(self, node: Node, cluster_id: str, more: Sequence[str]) -> list[str]:
        """Return the command that formats a node's data folder for the first start."""
        command = [*self._jvm(node, heap_mb=128), "kafka.tools.StorageTool", "format"]
        return [*command, "-t", cluster_id, "-c", str(node.properties_path), *more]

    def _jvm(self, node: Node, heap_mb: int) -> list[str]:
        logging = [f"-Dlog4j2.configurationFile={node.logging_path}"]
        logging += [f"-Dlog4j.configuration=file:{node.old_logging_path}"]
        archive = [f"-XX:SharedArchiveFile={self.archive}"] if self.archive else []
        options = [f"-Xmx{heap_mb}m", *QUICK_JVM, *archive, *logging, "-cp", self.classpath]
        return [str(self.java), *options]


def new_cluster_id() -> str:
    """Return a random cluster id in Kafka's format: a UUID in base 64 without a dash at first."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text


def copy_format(model: Path, node: Node, cluster_id: str) -> None:
    """Format a node's data folder as Kafka has formatted another one: a copy under other ids.

    Args:
        model: the folder that `StorageTool` formatted, with the same features.
        node: whose folder is new.
        cluster_id: of the node's cluster.

    Source: KIP-858 (`directory.id`), MetaPropertiesEnsemble.
    """
    ids = {"node.id": str(node.node_id), "cluster.id": cluster_id, "directory.id": new_cluster_id()}
    lines = (model / META).read_text().splitlines()
    names = [line.partition("=")[0] for line in lines]
    text = "".join(
        f"{name}={ids[name]}\n" if name in ids else f"{line}\n"
        for name, line in zip(names, lines, strict=True)
    )
    shutil.copytree(model, node.data_path, ignore=shutil.ignore_patterns(META))
    (node.data_path / META).write_text(text)  # at last: with it, the folder counts as formatted


def cluster_id_of(node: Node) -> str | None:
    """Return the id of the cluster of a node's data folder; None: the folder is not formatted."""
    if not node.is_formatted:
        return None
    text = (node.data_path / META).read_text()
    match = re.search(r"^cluster\.id=(.+)$", text, re.MULTILINE)
    return match[1] if match else None


ASK_TIMEOUT_S = 2.0
"""The interval of the checks that the node's process is alive."""
POLL_S = 0.05

Holds = Callable[[Any], bool]
"""True if a Metadata response is as expected."""


@contextmanager
def connected(options: Mapping[str, str]) -> Iterator[Client]:
    """Yield a client for the length of a `with`."""
    client = Client(KafkaConfig.from_options(options))
    try:
        yield client
    finally:
        client.close()


def wait_for(
    node: Node,
    process: subprocess.Popen[bytes],
    options: Mapping[str, str],
    deadline: float,
    topics: Iterable[str] | None,
    holds: Holds,
) -> None:
    """Ask one node for Metadata until `holds` is true of the answer.

    Args:
        node: The node to ask.
        process: Of that node; the wait ends when the process has ended.
        options: How to reach the cluster; the address is replaced by the node's own.
        deadline: `time.monotonic` when to give up.
        topics: The topics to ask for; None: all topics.
        holds: True of the answer that ends the wait.

    Raises:
        BrokerUnavailableError: The process ended, or the deadline has come.
    """
    why = "its metadata were not as expected"
    alone = {**options, "bootstrap.servers": node.address}
    while process.poll() is None:
        if time.monotonic() >= deadline:
            raise _failed(node, f"was not ready in time ({why})")
        try:
            # A new client each time: one that knows the other nodes might ask those.
            with connected(alone) as client:
                ask_until = min(deadline, time.monotonic() + ASK_TIMEOUT_S)
                if holds(client.metadata(topics, deadline=ask_until)):
                    return
        except BrokerUnavailableError as error:
            why = str(error)
        time.sleep(POLL_S)
    raise _failed(node, f"ended with code {process.returncode}")


def names_all(wanted: set[int], metadata: Any) -> bool:
    """True if Metadata lists all wanted brokers."""
    return wanted <= {broker.node_id for broker in metadata.brokers}


def is_in_sync(alive: set[int], metadata: Any) -> bool:
    """True if every partition has a leader alive, and all its replicas that are alive in sync."""
    return all(
        topic.error_code == 0
        and all(
            part.leader_id in alive and alive.intersection(part.replica_nodes) <= {*part.isr_nodes}
            for part in topic.partitions
        )
        for topic in metadata.topics
    )


def _failed(node: Node, what: str) -> BrokerUnavailableError:
    return BrokerUnavailableError(
        f"node {node.node_id} of the embedded Kafka ({node.address}) {what}. "
        f"The end of {node.log_path}:\n{node.log_tail()}"
    )
