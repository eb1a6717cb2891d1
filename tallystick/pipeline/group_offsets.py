"""Positions in consumer groups, for epochs that no transaction of ours commits.

`kafka-consumer-groups` and lag exporters read them; nothing here does, and no restart depends on
them. So a failure is logged and counted, and never stops a query.

Invariants:
    * Only positions that differ from what the group shows are sent.
    * A position that was not reported to this run only moves a group forward: what lies in the log
      may be another run's, and must not overwrite what a newer one has shown
      (docs/decisions/0007).
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition, Thread

from tallystick.errors import AuthorizationError, OptionError, RetriableError, TallystickError
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.source.offsets import SourceOffsets, requests, shown
from tallystick.values import TopicPartition

logger = logging.getLogger(__name__)

CLOSING_PATIENCE_S = 10.0
"""The time the end of a run waits until its last positions are shown."""
Place = tuple[str, str]
"""A place where positions are committed for monitoring: cluster id and consumer group."""


@dataclass(frozen=True, slots=True)
class SourceClient:
    """The consumer group and the Kafka settings of a source."""

    group: str
    config: KafkaConfig


@dataclass(slots=True)
class Counts:
    """The counts of a query's group commits in this process."""

    commits: int = 0
    positions: int = 0
    failures: int = 0


COUNTS: defaultdict[str, Counts] = defaultdict(Counts)
"""By the query's name, or its id; for metrics."""

_with_transactions: dict[str, set[str]] = {}


def shown_in_transaction(run_id: str, cluster_id: str) -> None:
    """Note that transactions of this run show the positions of sources on the cluster.

    From now on no other part of the run may: a driver that was replaced, and does not know it yet,
    would put its old positions over newer ones, which in a transaction Kafka refuses.
    """
    _with_transactions.setdefault(run_id, set()).add(cluster_id)


def in_transaction(run_id: str, cluster_id: str) -> bool:
    """True if positions on this cluster are left to the transactions of the run."""
    return cluster_id in _with_transactions.get(run_id, ())


def forget_transactions(run_id: str) -> None:
    """Forget a run that is over."""
    _with_transactions.pop(run_id, None)


class GroupOffsets:
    """The positions in the consumer groups of a query run, for use by one thread at a time.

    Args:
        query: the name or id, for messages and counts.
        clients: of the query's sources.
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
        self._place_brokers: dict[Place, KafkaBroker] = {}
        self._shown: dict[Place, dict[TopicPartition, int]] = {}
        self._warned: set[Place] = set()

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
                self._warn(place, error)
                done = False
            else:
                self._warned.discard(place)
        return done

    def close(self) -> None:
        """Close the connections."""
        for broker in self._brokers.values():
            broker.close()
        self._brokers.clear()
        self._place_brokers.clear()

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
        """Return a connection to the cluster, with the rights of the source whose group it is.

        A cluster that does not answer is asked again each time, but does not delay other clusters.
        """
        if place in self._place_brokers:
            return self._place_brokers[place]
        cluster_id, group = place
        trouble: TallystickError = OptionError(
            f"no source of the query is connected to cluster {cluster_id}, whose offsets its "
            f"checkpoint holds: was kafka.bootstrap.servers changed?"
        )
        for client in sorted(self._clients, key=lambda client: client.group != group):
            if client.config not in self._brokers:
                self._brokers[client.config] = self._connect(client.config)
            broker = self._brokers[client.config]
            try:
                if broker.cluster_id() == cluster_id:
                    return self._place_brokers.setdefault(place, broker)
            except (RetriableError, AuthorizationError) as error:
                trouble = error
        raise trouble

    def _warn(self, place: Place, error: Exception) -> None:
        COUNTS[self._query].failures += 1
        if place not in self._warned:
            self._warned.add(place)
            logger.warning(
                "query %s: group %r on cluster %s does not show its positions, which are committed "
                "all the same; tried again with the next epoch: %s: %s",
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
        previous: of earlier runs of the query. They end first, or are given up: two at once could
            each put the other's positions back.
        before_end: called in the thread, for a last look; may call `show`.
    """

    def __init__(
        self,
        groups: GroupOffsets,
        previous: Sequence["GroupOffsetsBeside"] = (),
        before_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._groups = groups
        self._previous = previous
        self._before_end = before_end
        self._changed = Condition()
        self._newest: tuple[tuple[SourceOffsets, ...], bool] | None = None
        self._is_waiting = False
        self._is_busy = False
        self._is_shown = False
        self._is_closing = False
        self._is_given_up = False
        self._thread = Thread(target=self._run, name="tallystick positions", daemon=True)
        self._thread.start()

    def show(self, *sources: SourceOffsets, forward_only: bool = False) -> None:
        """Show how far sources are read, soon; returns at once.

        Args:
            sources: their positions.
            forward_only: see `GroupOffsets.show`.
        """
        with self._changed:
            self._newest, self._is_waiting = (sources, forward_only), True
            self._changed.notify_all()

    def show_again(self) -> None:
        """Show the newest positions again, if they were not shown."""
        with self._changed:
            if self.is_due and self._newest is not None:
                self.show(*self._newest[0], forward_only=self._newest[1])

    @property
    def is_due(self) -> bool:
        """True if the newest positions were not shown, and no thread is about to show them."""
        with self._changed:
            return not self._is_waiting and not self._is_busy and not self._is_shown

    def end(self) -> None:
        """Show the newest positions, and then nothing more; return at once."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def close(self, patience_s: float = CLOSING_PATIENCE_S) -> None:
        """Show the newest positions, and disconnect; a cluster that hangs is left to itself.

        Nothing more is sent to such a cluster: by then another run may show its own positions.

        Args:
            patience_s: how long to wait for the clusters.
        """
        self.end()
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
            for earlier in self._previous:
                earlier.close()
            self._previous = ()
            self._serve()
            self._before_end()
            self._serve()
            if self._newest is not None and not self._is_shown and not self._is_given_up:
                self._groups.show(self._newest[0], forward_only=True)
        finally:
            self._groups.close()

    def _serve(self) -> None:
        """Show what is given, until the end."""
        while (given := self._next()) is not None:
            is_shown = self._groups.show(given[0], forward_only=given[1])
            with self._changed:
                self._is_busy, self._is_shown = False, is_shown

    def _next(self) -> tuple[tuple[SourceOffsets, ...], bool] | None:
        """Wait for positions to show, and return them; None: there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_waiting or self._is_closing)
            self._is_busy = self._is_waiting and not self._is_given_up
            self._is_waiting = False
            return self._newest if self._is_busy else None


def _by_place(sources: Iterable[SourceOffsets]) -> dict[Place, dict[TopicPartition, int]]:
    """Return the positions to show; of two sources with one group and partition, the lower one."""
    places: dict[Place, dict[TopicPartition, int]] = {}
    for source in sources:
        if not source.group:
            continue
        offsets = places.setdefault((source.cluster_id, source.group), {})
        for partition, offset in shown(source).items():
            offsets[partition] = min(offset, offsets.get(partition, offset))
    return places
