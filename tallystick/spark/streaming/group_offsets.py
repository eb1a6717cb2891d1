"""Positions in consumer groups, for epochs that no transaction of ours commits.

`kafka-consumer-groups` and lag exporters read them; nothing here does, and no restart depends on
them. So a failure is told and counted, and never stops a query.

Invariants:
    * Only positions that differ from what the group shows are sent.
    * A position that nobody has told this run of only moves a group forward: what lies in the log
      may be another run's, and must not overwrite what a newer one has shown
      (docs/decisions/0007).
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition, Thread

from tallystick.errors import AuthorizationError, OptionError, RetriableError
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.source.offsets import SourceOffsets, requests, shown
from tallystick.values import TopicPartition

logger = logging.getLogger(__name__)

CLOSING_PATIENCE_S = 10.0
"""How long the end of a run waits until its last positions are shown."""
Place = tuple[str, str]
"""A place where positions are committed for monitoring: cluster id and consumer group."""


@dataclass(frozen=True, slots=True)
class SourceClient:
    """How one source of a query reaches its cluster."""

    group: str
    config: KafkaConfig


@dataclass(slots=True)
class Counts:
    """The counts of one query in this process."""

    commits: int = 0
    positions: int = 0
    failures: int = 0


COUNTS: defaultdict[str, Counts] = defaultdict(Counts)
"""By the query's name, or its id; for metrics."""

_with_transactions: dict[str, set[str]] = {}


def shown_in_transaction(run_id: str, cluster_id: str) -> None:
    """Say that transactions of this run show the positions of sources on the cluster.

    From now on nobody else in the run may: a driver that was replaced, and does not know it yet,
    would put its old positions over newer ones, which in a transaction Kafka refuses.
    """
    _with_transactions.setdefault(run_id, set()).add(cluster_id)


def in_transaction(run_id: str, cluster_id: str) -> bool:
    """True if positions on this cluster are left to the transactions of the run."""
    return cluster_id in _with_transactions.get(run_id, ())


def forget_transactions(run_id: str) -> None:
    """The run is over."""
    _with_transactions.pop(run_id, None)


class GroupOffsets:
    """The positions that the consumer groups of one query run show. One thread at a time.

    Args:
        query: its name or id, for messages and counts.
        clients: how its sources reach their clusters.
        connect: makes a broker of a configuration.
    """

    def __init__(
        self,
        query: str,
        clients: Sequence[SourceClient],
        connect: Callable[[KafkaConfig], KafkaBroker] = KafkaBroker,
    ) -> None:
        self._query = query
        self._clients = clients
        self._connect = connect
        self._brokers: dict[KafkaConfig, KafkaBroker] = {}
        self._clusters: dict[KafkaConfig, str] = {}
        self._found: dict[Place, KafkaBroker] = {}
        self._shown: dict[Place, dict[TopicPartition, int]] = {}
        self._told: set[tuple[Place, str]] = set()

    def show(self, sources: Iterable[SourceOffsets], *, forward_only: bool = False) -> bool:
        """Commit the positions that the groups do not show yet.

        Args:
            sources: the positions of an epoch that is committed.
            forward_only: leave alone what shows more already.

        Returns:
            Whether the groups show them all now; if not, a later call sends them again.
        """
        done = True
        for place, positions in _by_place(sources).items():
            try:
                self._show(place, positions, forward_only)
            except Exception as error:
                self._shown.pop(place, None)  # what was sent may have arrived, or not
                self._tell(place, error)
                done = False
            else:
                self._told = {told for told in self._told if told[0] != place}
        return done

    def close(self) -> None:
        """Close the connections."""
        for broker in self._brokers.values():
            broker.close()
        self._brokers.clear()
        self._clusters.clear()
        self._found.clear()

    def _show(self, place: Place, positions: Mapping[TopicPartition, int], forward: bool) -> None:
        broker = self._broker(place)
        _, group = place
        if forward or place not in self._shown:  # others may have shown more by now
            self._shown[place] = broker.committed_offsets(group, positions)
        known = self._shown[place]
        changed = {
            partition: offset
            for partition, offset in positions.items()
            if (known.get(partition, -1) < offset if forward else known.get(partition) != offset)
        }
        counts = COUNTS[self._query]
        for part in requests(changed):
            broker.commit_offsets(group, part)
            known.update({partition: offset for partition, (offset, _) in part.items()})
            counts.commits += 1
            counts.positions += len(part)

    def _broker(self, place: Place) -> KafkaBroker:
        """A connection to the cluster, with the rights of the source whose group it is.

        A cluster that does not answer is asked again each time, but is in nobody else's way.
        """
        if place in self._found:
            return self._found[place]
        cluster_id, group = place
        silent: RetriableError | AuthorizationError | None = None
        for client in sorted(self._clients, key=lambda client: client.group != group):
            try:
                if self._cluster(client.config) == cluster_id:
                    return self._found.setdefault(place, self._brokers[client.config])
            except (RetriableError, AuthorizationError) as error:
                silent = error
        if silent is not None:
            raise silent
        raise OptionError(
            f"no source of the query is connected to cluster {cluster_id}, whose offsets its "
            f"checkpoint holds: was kafka.bootstrap.servers changed?"
        )

    def _cluster(self, config: KafkaConfig) -> str:
        """The id of the cluster that a configuration leads to; asked until it has answered once."""
        if config not in self._brokers:
            self._brokers[config] = self._connect(config)
        if config not in self._clusters:
            self._clusters[config] = self._brokers[config].cluster_id()
        return self._clusters[config]

    def _tell(self, place: Place, error: Exception) -> None:
        COUNTS[self._query].failures += 1
        cause = (place, type(error).__name__)
        if cause in self._told:
            return
        self._told.add(cause)
        logger.warning(
            "query %s: group %r on cluster %s does not show its positions, which are committed all "
            "the same; tried again with the next epoch: %s: %s",
            self._query,
            place[1],
            place[0],
            type(error).__name__,
            error,
        )


class GroupOffsetsBeside:
    """Shows positions in a thread of its own: a cluster that hangs holds up no epoch.

    At most one call is under way; of what is given meanwhile only the newest counts. What Kafka has
    refused at the end of a run is tried once more.

    Args:
        groups: what shows them; it belongs to the thread.
    """

    def __init__(self, groups: GroupOffsets) -> None:
        self._groups = groups
        self._changed = Condition()
        self._wanted: tuple[SourceOffsets, bool] | None = None
        self._is_busy = False
        self._is_shown = False
        self._is_closing = False
        self._is_given_up = False
        self._thread = Thread(target=self._run, name="tallystick positions", daemon=True)

    def show(self, source: SourceOffsets, *, forward_only: bool = False) -> None:
        """Show how far a source is read, soon; returns at once.

        Args:
            source: its positions.
            forward_only: see `GroupOffsets.show`.
        """
        with self._changed:
            self._wanted = (source, forward_only)
            if not self._thread.is_alive():
                self._thread.start()
            self._changed.notify_all()

    @property
    def is_due(self) -> bool:
        """True if the newest positions were not shown, and nobody is about to."""
        with self._changed:
            return self._wanted is None and not self._is_busy and not self._is_shown

    def close(self, patience_s: float = CLOSING_PATIENCE_S) -> None:
        """Show what was given last, and hang up; a cluster that hangs is left to itself.

        Nothing is sent to that any more: by then another run may show its own positions.

        Args:
            patience_s: how long to wait for it.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if not self._thread.is_alive():
            self._groups.close()
            return
        self._thread.join(patience_s)
        with self._changed:
            self._is_given_up = True
        if self._thread.is_alive():
            logger.warning(
                "where the sources' groups stand could not be shown within %.0f s of the end of "
                "the run; the next one does it",
                patience_s,
            )

    def _run(self) -> None:
        try:
            source: SourceOffsets | None = None
            while (wanted := self._next()) is not None:
                source, forward_only = wanted
                is_shown = self._groups.show([source], forward_only=forward_only)
                with self._changed:
                    self._is_busy, self._is_shown = False, is_shown
            if source is not None and not self._is_shown and not self._is_given_up:
                self._groups.show([source], forward_only=True)
        finally:
            self._groups.close()

    def _next(self) -> tuple[SourceOffsets, bool] | None:
        """Wait for positions to show, and return them; None: there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted is not None or self._is_closing)
            wanted, self._wanted = None if self._is_given_up else self._wanted, None
            self._is_busy = wanted is not None
            return wanted


def _by_place(sources: Iterable[SourceOffsets]) -> dict[Place, dict[TopicPartition, int]]:
    """The positions to show; where two sources share a group and a partition, the lower one."""
    places: dict[Place, dict[TopicPartition, int]] = {}
    for source in sources:
        if not source.group:
            continue
        found = places.setdefault((source.cluster_id, source.group), {})
        for partition, offset in shown(source).items():
            found[partition] = min(offset, found.get(partition, offset))
    return places
