"""Which clusters of a pipeline may have decided its epochs, and how to reach the places there."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from tallystick.checkpoint.facts import Identity
from tallystick.decision_log import KafkaPlace
from tallystick.errors import OptionError
from tallystick.handover import Earlier
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.sink.transactional_ids import token_group
from tallystick.sink.two_phase import Sink


class Closed(Protocol):
    """What is closed with the run."""

    def close(self) -> None:
        """Hang up."""
        ...


class Clusters:
    """Those of a pipeline's KafkaSinks, by their own names; connected to when they are asked for.

    Args:
        decider: of the sink that decides now, if one does.
        sinks: the others.
        identity: of the run.
        to_close: takes the connections.
    """

    def __init__(
        self,
        decider: KafkaBroker | None,
        sinks: Iterable[Sink],
        identity: Identity,
        to_close: list[Closed],
    ) -> None:
        self._decider = decider
        self._identity = identity
        self._to_close = to_close
        self._found: dict[str, KafkaBroker] | None = None
        self._ids: list[tuple[_OnKafka, str]] = []
        self._kafka = [each for each in sinks if isinstance(each, _OnKafka)]

    def reach(self, place: KafkaPlace) -> list[Earlier]:
        """The place, on its cluster; on each one where that is not known.

        Raises:
            OptionError: the pipeline has no sink there.
        """
        found = self._by_id()
        if place.cluster_id in found:
            found = {place.cluster_id: found[place.cluster_id]}
        elif place.cluster_id or not found:
            where = f" of cluster {place.cluster_id!r}" if place.cluster_id else ""
            others = f" It has some of {', '.join(map(repr, sorted(found)))}." if found else ""
            raise OptionError(
                f"pipeline {self._identity.pipeline!r}: epochs of checkpoint "
                f"{self._identity.checkpoint} were decided by transactions {place.transactional_id}"
                f"{where}, and the pipeline has no KafkaSink there any more: which of them was "
                f"committed last cannot be asked.{others} Keep that KafkaSink, with whatever "
                f"transactions= and guarantee=, until the first epoch behind the change is done."
            )
        group = token_group(place.transactional_id)
        return [Earlier(each, place.transactional_id, group) for each in found.values()]

    def assumed(self) -> list[KafkaPlace]:
        """Where each of the sinks would decide with transactions="epoch"."""
        self._by_id()
        return [
            KafkaPlace(f"{sink.transactional_id_prefix}{self._identity.pipeline}", cluster_id)
            for sink, cluster_id in self._ids
        ]

    def _by_id(self) -> dict[str, KafkaBroker]:
        if self._found is not None:
            return self._found
        found: dict[str, KafkaBroker] = {}
        if self._decider is not None:
            found[self._decider.cluster_id()] = self._decider
        known: dict[KafkaConfig, str] = {}
        for sink in self._kafka:
            if sink.config not in known:
                broker = KafkaBroker(sink.config, sink.transaction_timeout_ms)
                self._to_close.append(broker)
                known[sink.config] = broker.cluster_id()
                found.setdefault(known[sink.config], broker)
            self._ids.append((sink, known[sink.config]))
        self._found = found
        return found


@runtime_checkable
class _OnKafka(Protocol):
    """What a `KafkaSink` says of itself."""

    @property
    def config(self) -> KafkaConfig:
        """How to reach its cluster."""
        ...

    @property
    def transactional_id_prefix(self) -> str:
        """What stands before the pipeline's name."""
        ...

    @property
    def transaction_timeout_ms(self) -> int:
        """After how long its cluster aborts; what the cluster was checked to allow."""
        ...
