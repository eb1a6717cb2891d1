"""Ask the right broker, and keep asking until the deadline: the one retry loop.

Invariants:
    * A request object is made for each try: it carries the version of the broker it went to.
    * Every try is bounded by request.timeout.ms, every call by delivery.timeout.ms. A call that
      ends at its deadline has an unknown outcome (BrokerUnavailableError).
    * An obstacle that may pass is waited for; anything else is raised at once (`error_policy`).
    * Not thread-safe, and not to be shared across a fork: one client per process that works.
"""

import gc
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from tallystick.errors import EpochAbortedError, TallystickError
from tallystick.host.worker_cache import WorkerCache
from tallystick.kafka import protocol
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.connection import Network, PendingRequest
from tallystick.kafka.error_policy import ABSENT, AGAIN, STALE, Attempts, describe, refusal
from tallystick.text import shortened
from tallystick.values import TopicPartition

LOOKUP_TIMEOUT_S = 3.0
"""The timeout of a look-up in one broker that any other could answer as well."""
NOBODY = -1
"""The leader of a partition that exists and has none."""
NO_EPOCH = -1
"""A request with this epoch is answered by a leader that was deposed too."""
COORDINATOR_KINDS = {"group": 0, "transaction": 1}


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The broker that keeps a consumer group, or the transactions of a transactional id."""

    kind: Literal["group", "transaction"]
    key: str

    def __str__(self) -> str:
        return f"the coordinator of {self.kind} {self.key!r}"


@dataclass(frozen=True, slots=True)
class AnyBroker:
    """The first broker that answers."""

    def __str__(self) -> str:
        return "any broker"


@dataclass(frozen=True, slots=True)
class Node:
    """A particular broker, for questions that no other broker can answer."""

    node: int

    def __str__(self) -> str:
        return f"broker {self.node}"


Target = Coordinator | AnyBroker | Node
Answer = tuple[int, str]
"""One error code of a response, and what it is about in words."""


class Client:
    """A blocking client of one cluster. Connects when first used.

    Args:
        config: where and how.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self.config = config
        self.network = Network(config)
        self.topic_ids: dict[str, Any] = {}
        self.obstacles: Counter[str] = Counter()
        self.cluster_id = ""
        self._leaders: dict[TopicPartition, int] = {}
        self.leader_epochs: dict[TopicPartition, int] = {}
        """Epochs that leaders are asked with: a deposed one refuses to answer (KIP-320)."""
        self._coordinators: dict[Coordinator, int] = {}
        self._latest = math.inf

    def close(self) -> None:
        """Close all connections."""
        self.network.close()

    def deadline(self, timeout_ms: int | None = None) -> float:
        """Return the deadline of a call that starts now, by default after delivery.timeout.ms."""
        if timeout_ms is None:
            timeout_ms = self.config.delivery_timeout_ms
        return min(self._latest, time.monotonic() + timeout_ms / 1000)

    @contextmanager
    def within(self, latest: float) -> Iterator[None]:
        """Let no call in the block have a deadline later than this, unless it is given one."""
        before, self._latest = self._latest, min(self._latest, latest)
        try:
            yield
        finally:
            self._latest = before

    def try_until(self, deadline: float) -> float:
        """Return the deadline of a single request that is sent now."""
        return min(deadline, time.monotonic() + self.config.request_timeout_ms / 1000)

    def call(
        self,
        make: Callable[[], Any],
        target: Target,
        codes: Callable[[Any], Iterable[Answer]],
        *,
        deadline: float | None = None,
        fenced: type[TallystickError] = EpochAbortedError,
        accept: frozenset[str] = frozenset(),
    ) -> Any:
        """Send a request to the target, and again until the answer counts or the deadline passes.

        Args:
            make: a fresh request for each try.
            target: the broker that has to answer it.
            codes: the error codes of a response, each with what it is about.
            deadline: `time.monotonic` when to give up; delivery.timeout.ms from now unless given.
            fenced: what a newer producer epoch is raised as.
            accept: names of errors that are answers to this caller.

        Raises:
            BrokerUnavailableError: the deadline passed; whether Kafka acted is unknown.
            TallystickError: the class that fits Kafka's error, see `reactions`.
        """
        deadline = self.deadline() if deadline is None else deadline
        attempts = Attempts(deadline, protocol.api_name(make()), self._subject(target))
        while True:
            request = make()
            doing = protocol.api_name(request)
            try:
                response = self._ask(target, request, deadline)
            except OSError as error:
                obstacle = describe(error)
                stale = True
            else:
                names = self._judge(codes(response), doing, fenced, accept)
                if not names:
                    return response
                obstacle = names[0]
                stale = not STALE.isdisjoint(names)
            if stale and isinstance(target, Coordinator):
                self._coordinators.pop(target, None)
            self.obstacles[f"{doing}: {obstacle}"] += 1
            attempts.pause(obstacle)

    def ask_leaders(
        self,
        partitions: Iterable[TopicPartition],
        make: Callable[[list[TopicPartition]], Any],
        answers: Callable[[Any], Iterable[tuple[TopicPartition, Any]]],
        *,
        deadline: float | None = None,
        accept: frozenset[str] = frozenset(),
        absent_after_s: float | None = None,
    ) -> dict[TopicPartition, Any]:
        """Ask the leaders of many partitions at once; leaders that move are followed.

        Args:
            partitions: about which.
            make: a request about some of them, which have the same leader.
            answers: the parts of a response, each with an `error_code`.
            deadline: as in `call`.
            accept: names of errors that are answers to this caller.
            absent_after_s: partitions that Kafka goes on calling unknown for so long are left out
                of the answers; None: they are asked for until the deadline.

        Returns:
            Each partition's part of the answers.

        Raises:
            The same as `call`.
        """
        waiting = set(partitions)
        answered: dict[TopicPartition, Any] = {}
        if not waiting:
            return answered
        deadline = self.deadline() if deadline is None else deadline
        doing = protocol.api_name(make([]))
        attempts = Attempts(deadline, doing, shortened(sorted(waiting)))
        unknown_since: dict[TopicPartition, float] = {}
        while True:
            obstacle = ""
            unknown = set()
            with closing(self._ask_each_leader(waiting, make, deadline)) as parts:
                for part in parts:
                    if isinstance(part, OSError):
                        obstacle = describe(part)
                        continue
                    for partition, answer in answers(part):
                        code = [(answer.error_code, str(partition))]
                        names = self._judge(code, doing, EpochAbortedError, accept)
                        if names:
                            obstacle = f"{names[0]} ({partition})"
                            if names[0] in ABSENT:
                                unknown.add(partition)
                        else:
                            answered[partition] = answer
                            waiting.discard(partition)
            unknown |= {partition for partition in waiting if partition not in self._leaders}
            now = time.monotonic()
            unknown_since = {partition: unknown_since.get(partition, now) for partition in unknown}
            if absent_after_s is not None:
                patience_ends = now - absent_after_s
                waiting -= {
                    partition for partition in unknown if unknown_since[partition] <= patience_ends
                }
            if not waiting:
                return answered
            if not obstacle:
                missing = min(waiting)
                obstacle = f"{self.leader_obstacle(missing)} ({missing})"
            self.forget_leaders(waiting)
            self.obstacles[f"{doing}: {obstacle}"] += 1
            attempts.pause(obstacle)

    def _ask_each_leader(
        self,
        partitions: set[TopicPartition],
        make: Callable[[list[TopicPartition]], Any],
        deadline: float,
    ) -> Generator[Any, None, None]:
        """Post to all leaders, then yield each response, or the OSError in its place."""
        until = self.try_until(deadline)
        under_way: deque[PendingRequest] = deque()
        try:
            for node, led in self.by_leader(partitions, deadline).items():
                try:
                    under_way.append(self.network.post(node, make(led), until))
                except OSError as error:
                    yield error
            while under_way:
                try:
                    yield self.network.wait(under_way.popleft(), until)
                except OSError as error:
                    yield error
        finally:  # after an error that no other try will mend
            for posted in under_way:
                self.network.discard(posted)

    def by_leader(
        self, partitions: Iterable[TopicPartition], deadline: float
    ) -> Mapping[int, list[TopicPartition]]:
        """Return partitions by the node of their leader; partitions without one are left out."""
        wanted = sorted(partitions)
        # One without a leader may be gone by now: what was known of it must not hide that.
        self.forget_leaders(
            partition for partition in wanted if self._leaders.get(partition) == NOBODY
        )
        unknown = {partition.topic for partition in wanted if partition not in self._leaders}
        if unknown:
            self.metadata(unknown, deadline=deadline)
        led = defaultdict(list)
        for partition in wanted:
            if self._leaders.get(partition, NOBODY) >= 0:
                led[self._leaders[partition]].append(partition)
        return led

    def forget_leaders(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget the leaders of partitions, so that the next request looks them up."""
        for partition in partitions:
            self._leaders.pop(partition, None)

    def leader_obstacle(self, partition: TopicPartition) -> str:
        """Return the reason why `by_leader` left a partition out."""
        return "LeaderNotAvailable" if partition in self._leaders else "UnknownTopicOrPartition"

    def metadata(self, topics: Iterable[str] | None = (), *, deadline: float | None = None) -> Any:
        """Ask for brokers, and for topics and their leaders; None means all topics.

        Topics that do not exist, or are not ready, are in the answer with their error code.

        Raises:
            AuthorizationError: a topic may not be described.
            BrokerUnavailableError: no broker answered.
        """
        names = None if topics is None else sorted(topics)
        topic_class = protocol.MetadataRequest.MetadataRequestTopic
        response = self._ask_any(
            lambda: protocol.MetadataRequest(
                topics=None if names is None else [topic_class(name=name) for name in names],
                allow_auto_topic_creation=False,
            ),
            self.deadline() if deadline is None else deadline,
        )
        # A broker that is just starting names no brokers: that is no reason to forget the others.
        if response.brokers:
            self.network.learn((b.node_id, b.host, b.port) for b in response.brokers)
        self.cluster_id = response.cluster_id or self.cluster_id
        accept = frozenset({"InvalidTopic"})
        for topic in response.topics:
            code = [(topic.error_code, f"topic {topic.name!r}")]
            names = self._judge(code, "Metadata", EpochAbortedError, accept)
            if not names:
                self._learn_leaders(topic)
            elif not ABSENT.isdisjoint(names):
                self.topic_ids.pop(topic.name, None)
        return response

    def _learn_leaders(self, topic: Any) -> None:
        self.topic_ids[topic.name] = topic.topic_id
        for part in topic.partitions:
            partition = TopicPartition(topic.name, part.partition_index)
            known = self.network.knows(part.leader_id)
            self._leaders[partition] = part.leader_id if known else NOBODY
            self.leader_epochs[partition] = part.leader_epoch

    def _subject(self, target: Target) -> str:
        if isinstance(target, Coordinator):
            return f"{target.kind} {target.key!r}"
        if isinstance(target, Node):
            return str(target)
        return f"the cluster at bootstrap.servers {self.config.bootstrap_servers}"

    def _ask(self, target: Target, request: Any, deadline: float) -> Any:
        """Try once."""
        if isinstance(target, AnyBroker):
            node = self.network.candidates()[0]
        elif isinstance(target, Node):
            node = target.node
        else:
            node = self._coordinator(target, deadline)
        return self.network.ask(node, request, self.try_until(deadline))

    def _ask_any(self, make: Callable[[], Any], deadline: float) -> Any:
        """Ask one broker after the other until one answers at all."""
        doing = protocol.api_name(make())
        attempts = Attempts(deadline, doing, self._subject(AnyBroker()))
        while True:
            obstacle = "no broker is known"
            for node in self.network.candidates():
                patience_s = min(LOOKUP_TIMEOUT_S, self.config.request_timeout_ms / 1000)
                until = min(deadline, time.monotonic() + patience_s)
                try:
                    return self.network.ask(node, make(), until)
                except OSError as error:
                    obstacle = describe(error)
                    self.obstacles[f"{doing}: {obstacle}"] += 1
                if time.monotonic() >= deadline:
                    break
            attempts.pause(obstacle)

    def _coordinator(self, target: Coordinator, deadline: float) -> int:
        """Return the coordinator's node, which is remembered until it turns out wrong."""
        node = self._coordinators.get(target)
        if node is not None:
            return node
        attempts = Attempts(deadline, "FindCoordinator", self._subject(target))
        while True:
            response = self._ask_any(
                lambda: protocol.FindCoordinatorRequest(
                    key_type=COORDINATOR_KINDS[target.kind],
                    coordinator_keys=[target.key],
                    min_version=4,  # KIP-699: several keys
                ),
                deadline,
            )
            if not response.coordinators:
                attempts.pause("an answer that names no coordinator")
                continue
            coordinator = response.coordinators[0]
            code = [(coordinator.error_code, self._subject(target))]
            names = self._judge(code, "FindCoordinator", EpochAbortedError, frozenset())
            if not names and not self.network.knows(coordinator.node_id):
                self.metadata(deadline=deadline)
            if not names and self.network.knows(coordinator.node_id):
                self._coordinators[target] = int(coordinator.node_id)
                return int(coordinator.node_id)
            obstacle = names[0] if names else f"node {coordinator.node_id} is not in the metadata"
            self.obstacles[f"FindCoordinator: {obstacle}"] += 1
            attempts.pause(obstacle)

    def _judge(
        self,
        codes: Iterable[Answer],
        doing: str,
        fenced: type[TallystickError],
        accept: frozenset[str],
    ) -> list[str]:
        """Return the errors that another try may mend; raise any error that no try will."""
        names = []
        for code, subject in codes:
            error_name = protocol.error_name(code)
            if error_name is None or error_name in accept:
                continue
            if error_name not in AGAIN:
                raise refusal(error_name, doing, subject, fenced=fenced)
            names.append(error_name)
        return names


_clients: WorkerCache[tuple[int, KafkaConfig], Client] = WorkerCache(Client.close)
"""They outlive the tasks of a worker process, so connections do too."""


def client_for(config: KafkaConfig) -> Client:
    """Return the thread's client of a cluster; never one that was made before a fork.

    Args:
        config: how the cluster is reached.
    """

    def make() -> Client:
        client = Client(config)
        # Spark's daemon has each worker collect garbage after every task, which visits all objects
        # of all modules: 35 to 70 ms. What was loaded by now stays, and need not be visited again.
        gc.collect()
        gc.freeze()
        return client

    return _clients.get((threading.get_ident(), config), make)
