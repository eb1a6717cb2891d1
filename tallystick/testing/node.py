"""One node of the embedded Kafka: where it lives, what it is told, how its JVM is called."""

import base64
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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

QUICK_JVM = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Xlog:cds=off"]
"""A broker that lives for seconds gains nothing from the second compiler."""


@dataclass(frozen=True, slots=True)
class Node:
    """A broker that is a controller too. `node_id` is what Metadata calls it."""

    node_id: int
    port: int
    controller_port: int
    directory: Path

    @property
    def address(self) -> str:
        """`host:port` of its listener for clients."""
        return f"{HOST}:{self.port}"

    @property
    def log_path(self) -> Path:
        """What the node says: one file over all its restarts."""
        return self.directory / "server.log"

    @property
    def properties_path(self) -> Path:
        """Its `server.properties`."""
        return self.directory / "server.properties"

    @property
    def logging_path(self) -> Path:
        """The settings of its log."""
        return self.directory / "log4j2.properties"

    @property
    def data_path(self) -> Path:
        """Where its partitions are."""
        return self.directory / "data"

    @property
    def is_formatted(self) -> bool:
        """Whether its data folder belongs to a cluster already."""
        return (self.data_path / "meta.properties").exists()

    def write_settings(self, server_properties: str) -> None:
        """Write what the JVM reads at its start."""
        self.directory.mkdir(exist_ok=True)
        self.logging_path.write_text(LOGGING)
        self.properties_path.touch(mode=0o600)  # it may hold passwords
        self.properties_path.write_text(server_properties)

    def log_tail(self) -> str:
        """The end of its log, for errors."""
        if not self.log_path.exists():
            return "(it has written no log)"
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])


def lay_out(
    directory: Path, ports: Sequence[int], controller_ports: Sequence[int]
) -> tuple[Node, ...]:
    """The nodes of a cluster, numbered from 1, each with a folder of its own."""
    numbered = enumerate(zip(ports, controller_ports, strict=True), start=1)
    return tuple(Node(number, *both, directory / f"node-{number}") for number, both in numbered)


def server_properties(
    node: Node, nodes: Sequence[Node], protocol: str, more: Mapping[str, str]
) -> str:
    """The text of a node's `server.properties`.

    Args:
        node: Whose.
        nodes: All of the cluster.
        protocol: The name of the listener for clients, PLAINTEXT or SASL_SSL.
        more: Overrides anything.
    """
    voters = ",".join(f"{each.node_id}@{HOST}:{each.controller_port}" for each in nodes)
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
    """A value as Java's properties format wants it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n")


@dataclass(frozen=True, slots=True)
class Programs:
    """Java and Kafka's classes: what every command line begins with."""

    java: Path
    classpath: str
    archive: Path | None = None
    """The classes of a broker as an earlier one loaded them (AppCDS): 40 % less to do at start."""
    record_to: Path | None = None
    """Where a server that is shut down in order leaves such an archive."""

    def server_command(self, node: Node, heap_mb: int) -> list[str]:
        """Run a node in the foreground."""
        record = [f"-XX:ArchiveClassesAtExit={self.record_to}"] if self.record_to else []
        return [*self._jvm(node, heap_mb), *record, "kafka.Kafka", str(node.properties_path)]

    def format_command(self, node: Node, cluster_id: str, more: Sequence[str]) -> list[str]:
        """Prepare the data folder of a node for its first start."""
        command = [*self._jvm(node, heap_mb=128), "kafka.tools.StorageTool", "format"]
        return [*command, "-t", cluster_id, "-c", str(node.properties_path), *more]

    def _jvm(self, node: Node, heap_mb: int) -> list[str]:
        logging = f"-Dlog4j2.configurationFile={node.logging_path}"
        archive = [f"-XX:SharedArchiveFile={self.archive}"] if self.archive else []
        options = [f"-Xmx{heap_mb}m", *QUICK_JVM, *archive, logging, "-cp", self.classpath]
        return [str(self.java), *options]


def new_cluster_id() -> str:
    """A random cluster id in Kafka's format: a UUID in base 64, not beginning with a dash."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text


def cluster_id_of(node: Node) -> str | None:
    """The cluster that a node's data folder belongs to; None if it is not formatted."""
    if not node.is_formatted:
        return None
    text = (node.data_path / "meta.properties").read_text()
    found = re.search(r"^cluster\.id=(.+)$", text, re.MULTILINE)
    return found[1] if found else None
