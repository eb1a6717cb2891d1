"""A real Kafka cluster for tests and experiments: nothing to install, gone afterwards.

    with EmbeddedKafka(brokers=3) as kafka:
        topic = kafka.create_topic("orders", partitions=6)
        ...
        kafka.kill(1)

Invariants:
    A cluster is ready when each running node itself names all running nodes (Metadata); an open
    port or a line in a log proves nothing.
    No node outlives this process, see `process`.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from tallystick.errors import BrokerUnavailableError, OptionError
from tallystick.host.java import java_home
from tallystick.host.user_cache import cache_directory, one_process_at_a_time
from tallystick.kafka.topics import create_topic
from tallystick.testing.jars import chosen_version, kafka_classpath
from tallystick.testing.node import (
    HOST,
    SHAPES_FORMAT,
    Holds,
    Node,
    Programs,
    cluster_id_of,
    connected,
    copy_format,
    is_in_sync,
    lay_out,
    names_all,
    new_cluster_id,
    server_properties,
    wait_for,
)
from tallystick.testing.process import ProcessGroup, free_ports
from tallystick.testing.security import (
    PROTOCOL,
    SUPER_USER,
    Security,
    Stores,
    broker_properties,
    client_options,
    confluent_options,
    create_stores,
)

BROKERS_MAX = 3
HEAP_MIN_MB = 128
START_TRIES_MAX = 3
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
PORT_TAKEN = "Address already in use"


class EmbeddedKafka:
    """Apache Kafka in KRaft mode on 127.0.0.1, one to three nodes, as a context manager.

    Args:
        brokers: How many nodes; each is broker and controller.
        port: The first node's port, the others follow; None takes free ones.
        directory: Where data and logs go and stay. Data of an earlier cluster of the same size is
            taken up again. None is a temporary one, removed by `stop`.
        transaction_version: The cluster's feature `transaction.version`: 0, 1, or 2 (KIP-890);
            None is the newest that this Kafka has, which is 0 before Kafka 4.
        security: None is PLAINTEXT without any access control.
        properties: Of `server.properties`, for every node, or a function that returns the
            properties of a node; they override ours.
        heap_mb: The heap of each node, in MiB.
        version: Kafka's: 3.7.2, 3.9.1, 4.0.0 or 4.3.0. None is the version in the environment
            variable TALLYSTICK_KAFKA_VERSION, else 4.3.0.

    Raises:
        OptionError: A value that cannot work. Nothing was started.
    """

    def __init__(
        self,
        brokers: int = 1,
        *,
        port: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        transaction_version: int | None = None,
        security: Security | None = None,
        properties: Mapping[str, str] | Callable[[Node], Mapping[str, str]] | None = None,
        heap_mb: int = 256,
        version: str | None = None,
    ) -> None:
        _check("brokers", brokers, 1 <= brokers <= BROKERS_MAX, f"1 to {BROKERS_MAX}")
        _check("port", port, port is None or 0 < port < 2**16 - brokers, "1 to 65532, or None")
        self.version = chosen_version(version)
        newest = 2 if int(self.version.partition(".")[0]) >= 4 else 0
        chosen = newest if transaction_version is None else transaction_version
        expected = f"0 to {newest} with Kafka {self.version}, or None"
        _check("transaction_version", chosen, chosen in range(newest + 1), expected)
        _check("heap_mb", heap_mb, heap_mb >= HEAP_MIN_MB, f"{HEAP_MIN_MB} or more")
        self.brokers = brokers
        self.transaction_version = chosen
        self.security = security
        self.heap_mb = heap_mb
        self.nodes: tuple[Node, ...] = ()
        self._port = port
        self._directory = None if directory is None else Path(directory).resolve()
        self._properties = properties if callable(properties) else {**(properties or {})}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._put_out: set[int] = set()  # killed, terminated or paused, by a call
        self._programs: Programs | None = None
        self._stores: Stores | None = None
        self._clean_up: Callable[[], Any] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = self.bootstrap_servers if self.nodes else "stopped"
        return f"EmbeddedKafka(brokers={self.brokers}, {state}, security={self.security})"

    # What a client needs to know

    @property
    def bootstrap_servers(self) -> str:
        """`host:port,...` of all nodes, running or not."""
        return ",".join(node.address for node in self._started())

    @property
    def kafka_options(self) -> dict[str, str]:
        """The `kafka.*` options of a client of the cluster, as `admin` if there is security."""
        return self.kafka_options_for(SUPER_USER)

    def kafka_options_for(self, user: str) -> dict[str, str]:
        """Return the `kafka.*` options, as users of Spark's connector know them, of one user.

        Raises:
            OptionError: There is no such user.
        """
        return {f"kafka.{name}": value for name, value in self._client_options(user).items()}

    def confluent_options(self, user: str = SUPER_USER) -> dict[str, str]:
        """Return the options of one user under librdkafka's names, for confluent-kafka.

        Raises:
            OptionError: There is no such user.
        """
        options = {"bootstrap.servers": self.bootstrap_servers}
        if self.security is not None and self._stores is not None:
            options |= confluent_options(self.security, self._stores, user)
        return options

    def _client_options(self, user: str) -> dict[str, str]:
        options = {"bootstrap.servers": self.bootstrap_servers}
        if self.security is not None and self._stores is not None:
            options |= client_options(self.security, self._stores, user)
        return options

    # The cluster

    def start(self) -> None:
        """Start all nodes, and return when they are ready.

        Raises:
            OptionError: No Java, no jars, or no package that `security` needs.
            BrokerUnavailableError: A node died or was not ready in time; with its log's end.
        """
        assert not self.nodes, "it is running already"
        self._programs = self._programs or _programs(self.version)
        directory = self._directory or Path(tempfile.mkdtemp(prefix="tallystick-kafka-"))
        directory.mkdir(parents=True, exist_ok=True)
        self._group = ProcessGroup()
        # Also when the interpreter ends without `stop`.
        temporary = directory if self._directory is None else None
        self._clean_up = weakref.finalize(self, _clean_up, self._group, temporary, os.getpid())
        try:
            if self.security is not None:
                self._stores = create_stores(directory, HOST)
            self._start_nodes(directory)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all nodes; remove the directory if it was temporary. Again is fine."""
        if self._clean_up is None:
            return
        if self._directory is not None:  # what is not kept need not be shut down with care
            for node_id in self._processes:
                self.resume(node_id)
                self._processes[node_id].terminate()
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for process in self._processes.values():
                _wait(process, deadline)
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._clean_up()
        self._clean_up, self._stores, self.nodes = None, None, ()
        self._processes.clear()
        self._put_out.clear()

    def wait_until_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until every running node names all running nodes; paused ones do not count.

        Raises:
            BrokerUnavailableError: A node died, or the time is over; with its log's end.
        """
        deadline = time.monotonic() + timeout_s
        for node in self._answering():
            wanted = {peer.node_id for peer in self._answering()}
            self._wait_for(node, deadline, (), partial(names_all, wanted))

    def wait_until_in_sync(
        self, topics: Iterable[str] | None = None, timeout_s: float = READY_TIMEOUT_S
    ) -> None:
        """Wait until every running node reports every running replica in sync.

        Right after `kill` or `resume` a cluster still reports the old state for a moment.

        Args:
            topics: The topics; None is all, Kafka's own included.
            timeout_s: The longest wait.

        Raises:
            BrokerUnavailableError: A node died, or the time is over; with its log's end.
        """
        deadline = time.monotonic() + timeout_s
        names = None if topics is None else list(topics)
        for node in self._answering():
            alive = {peer.node_id for peer in self._answering()}
            self._wait_for(node, deadline, names, partial(is_in_sync, alive))

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int | None = None,
        config: Mapping[str, str] | None = None,
    ) -> str:
        """Create a topic, and return its name when all nodes know it and all replicas are in sync.

        Args:
            name: Of the topic; an existing topic is left as it is.
            partitions: The number of partitions.
            replication_factor: None is all nodes.
            config: Topic settings, such as `retention.ms`.

        Raises:
            OptionError: Kafka refused it.
            BrokerUnavailableError: There was no answer in time.
        """
        copies = -1 if replication_factor is None else replication_factor
        with connected(self._client_options(SUPER_USER)) as client:
            create_topic(client, name, partitions, copies, config or {})
        self.wait_until_in_sync([name])
        return name

    # One node

    def kill(self, node_id: int) -> None:
        """End a node at once (SIGKILL)."""
        process = self._process(node_id)
        self._put_out.add(node_id)
        process.kill()
        process.wait()

    def terminate(self, node_id: int) -> None:
        """Shut a node down (SIGTERM), with a handover of partitions; kill it after a timeout."""
        process = self._process(node_id)
        self._put_out.add(node_id)
        process.send_signal(signal.SIGCONT)
        process.terminate()
        if not _wait(process, time.monotonic() + STOP_TIMEOUT_S):
            self.kill(node_id)

    def pause(self, node_id: int) -> None:
        """Freeze a node (SIGSTOP): its connections stay open, and nothing answers."""
        process = self._process(node_id)
        self._put_out.add(node_id)
        process.send_signal(signal.SIGSTOP)

    def resume(self, node_id: int) -> None:
        """Resume a paused node (SIGCONT)."""
        process = self._process(node_id)
        process.send_signal(signal.SIGCONT)
        if process.poll() is None:
            self._put_out.discard(node_id)

    def restart(self, node_id: int) -> None:
        """Start a node again, on the same port and data; `wait_until_ready` waits for it."""
        if self._process(node_id).poll() is None:
            self.terminate(node_id)
        self._spawn(self._node(node_id))
        self._put_out.discard(node_id)

    def is_running(self, node_id: int) -> bool:
        """True if the node's process lives, paused or not."""
        return self._process(node_id).poll() is None

    def pid(self, node_id: int) -> int:
        """Return the process of a node."""
        return self._process(node_id).pid

    # Inside

    def _started(self) -> tuple[Node, ...]:
        if not self.nodes:
            raise OptionError("the embedded Kafka is not running: call start(), or use `with`.")
        return self.nodes

    def _node(self, node_id: int) -> Node:
        for node in self._started():
            if node.node_id == node_id:
                return node
        raise OptionError(f"there is no node {node_id}: they are numbered 1 to {self.brokers}.")

    def _process(self, node_id: int) -> subprocess.Popen[bytes]:
        return self._processes[self._node(node_id).node_id]

    def _answering(self) -> list[Node]:
        """Return the nodes that should answer: all but those killed, terminated or paused."""
        return [node for node in self._started() if node.node_id not in self._put_out]

    def _start_nodes(self, directory: Path) -> None:
        """Start all nodes; if another process took a port of our choice, try other ports."""
        for tries in range(1, START_TRIES_MAX + 1):
            ports = free_ports(2 * self.brokers, HOST)
            if self._port is not None:
                ports = [*range(self._port, self._port + self.brokers), *ports[self.brokers :]]
            self.nodes = lay_out(directory, ports[: self.brokers], ports[self.brokers :])
            self._write_settings()
            self._format()
            for node in self.nodes:
                self._spawn(node)
            try:
                return self.wait_until_ready()
            except BrokerUnavailableError as error:
                other_ports_help = self._port is None and PORT_TAKEN in str(error)
                if not other_ports_help or tries == START_TRIES_MAX:
                    raise
            for process in self._processes.values():
                process.kill()
                process.wait()

    def _write_settings(self) -> None:
        secure: dict[str, str] = {}
        if self.security is not None and self._stores is not None:
            secure = broker_properties(self.security, self._stores)
        protocol = PROTOCOL if secure else "PLAINTEXT"
        for node in self.nodes:
            own = secure | dict(self._own_properties(node))
            node.write_settings(server_properties(node, self.nodes, protocol, own))

    def _format(self) -> None:
        """Prepare the data folders that are new."""
        cluster_id = next(filter(None, map(cluster_id_of, self.nodes)), None) or new_cluster_id()
        feature = ["--feature", f"transaction.version={self.transaction_version}"]
        more = [] if self.version.startswith("3.") else feature  # it has none, or not a stable one
        more += [] if self.security is None else self.security.format_arguments()
        new = [node for node in self.nodes if not node.is_formatted]
        own = [
            node
            for node in new
            # Passwords are in what Kafka formats for these, or the user's properties shape it.
            if self.security is not None
            or any(name.startswith(SHAPES_FORMAT) for name in self._own_properties(node))
        ]
        self._format_by_kafka(own, cluster_id, more)
        for node in new:
            if node not in own:
                copy_format(self._kept_format(more), node, cluster_id)

    def _kept_format(self, more: list[str]) -> Path:
        """Return the folder of the user's cache with what Kafka formats: a JVM makes it once."""
        assert self._programs is not None
        identity = sha256("\n".join([self._programs.classpath, *more]).encode()).hexdigest()[:12]
        kept = cache_directory() / f"kafka-format-{identity}"
        if not kept.exists():
            with one_process_at_a_time(kept):
                if not kept.exists():
                    with tempfile.TemporaryDirectory(prefix=".format-", dir=kept.parent) as work:
                        (node,) = lay_out(Path(work), [1], [2])
                        node.write_settings(server_properties(node, [node], "PLAINTEXT", {}))
                        self._format_by_kafka([node], new_cluster_id(), more)
                        node.data_path.rename(kept)
        return kept

    def _own_properties(self, node: Node) -> Mapping[str, str]:
        """Return the user's properties of a node."""
        return self._properties(node) if callable(self._properties) else self._properties

    def _format_by_kafka(self, nodes: list[Node], cluster_id: str, more: list[str]) -> None:
        assert self._programs is not None
        formatting = {
            node: self._group.spawn(
                self._programs.format_command(node, cluster_id, more), node.log_path
            )
            for node in nodes
        }
        deadline = time.monotonic() + READY_TIMEOUT_S
        for node, process in formatting.items():
            if not _wait(process, deadline) or process.returncode != 0:
                raise BrokerUnavailableError(
                    f"the data folder {node.data_path} could not be formatted. "
                    f"The end of {node.log_path}:\n{node.log_tail()}"
                )

    def _spawn(self, node: Node) -> None:
        assert self._programs is not None
        command = self._programs.server_command(node, self.heap_mb)
        self._processes[node.node_id] = self._group.spawn(command, node.log_path)

    def _wait_for(
        self, node: Node, deadline: float, topics: Iterable[str] | None, holds: Holds
    ) -> None:
        process = self._processes[node.node_id]
        wait_for(node, process, self._client_options(SUPER_USER), deadline, topics, holds)


def _check(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise OptionError(f"EmbeddedKafka({name}=...) is {value!r}; expected {expected}.")


def _wait(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """True if the process ended before the deadline."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _clean_up(group: ProcessGroup, temporary: Path | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked copy of the interpreter ends, and the cluster is not its
        return
    group.close()
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)


def _programs(version: str) -> Programs:
    """Make Java, Kafka's jars, and the archive of its classes ready: once per user."""
    programs = Programs(java_home() / "bin" / "java", kafka_classpath(version))
    identity = sha256(f"{programs.java}\n{programs.classpath}".encode()).hexdigest()[:12]
    archive = cache_directory() / f"kafka-classes-{identity}.jsa"
    if not archive.exists():
        with one_process_at_a_time(archive):
            if not archive.exists():
                _record_classes(programs, archive, version)
    usable = archive.exists() and archive.stat().st_size > 0
    return replace(programs, archive=archive) if usable else programs


def _record_classes(programs: Programs, archive: Path, version: str) -> None:
    """Run a broker from start to end, so that the JVM records the loaded classes.

    A JVM that cannot record leaves an empty file, and is not asked again.
    """
    with tempfile.TemporaryDirectory(prefix=".classes-", dir=archive.parent) as work:
        recorded = Path(work, archive.name)
        kafka = EmbeddedKafka(directory=Path(work, "kafka"), version=version)
        kafka._programs = replace(programs, record_to=recorded)
        with kafka:
            kafka.create_topic("any")
            kafka.terminate(1)
            if kafka._process(1).returncode == -signal.SIGKILL:
                return  # it was too slow this time; the next cluster tries again
        recorded.touch()
        os.replace(recorded, archive)
