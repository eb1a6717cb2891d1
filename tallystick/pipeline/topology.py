"""The sinks of a pipeline: the deciding sink, sinks in its transaction, rows per sink."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tallystick.codec.formats import DEADLETTER
from tallystick.epoch.transactional_ids import ID_PREFIX
from tallystick.epoch.two_phase import Sink
from tallystick.errors import OptionError
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.output import KafkaOutput
from tallystick.tasks.outputs import OF_MAIN, Selection


class SharingSink(NamedTuple):
    """A sink that writes into the deciding sink's transaction.

    Args:
        uid: the sink's.
        sink: this sink with transactions of its own, to recover epochs of a run that had it so.
        output: the output in the deciding sink's cluster.
    """

    uid: str
    sink: Sink
    output: KafkaOutput


@dataclass(frozen=True)
class OutputTopology:
    """The sinks of a pipeline, and among them the deciding sink.

    Args:
        decider: the sink whose Kafka transaction decides; None: the checkpoint decides.
        sink: the deciding sink with transactions of its own, to recover epochs of a run in which
            another sink decided.
        uid: of the deciding sink.
        others: the other sinks, by uid.
        dead_letter_topic: the topic that a sink has for malformed records; None: no sink has one.
        id_prefix: what transactional ids of the pipeline begin with, before its name.
        sharing: the sinks that write into the same transaction.
        selections: the rows that each sink gets, by uid; a missing sink gets the main output.
        dropped: side outputs that the user lets go nowhere.
    """

    decider: KafkaOutput | None
    sink: Sink | None = None
    uid: str = ""
    others: tuple[tuple[str, Sink], ...] = ()
    dead_letter_topic: str | None = None
    id_prefix: str = ID_PREFIX
    sharing: tuple[SharingSink, ...] = ()
    selections: Mapping[str, Selection] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    @property
    def deciding(self) -> tuple[tuple[str, Sink], ...]:
        """The sinks that write into the deciding transaction, by uid."""
        first = () if self.sink is None else ((self.uid, self.sink),)
        return (*first, *((sharing.uid, sharing.sink) for sharing in self.sharing))

    @property
    def by_uid(self) -> tuple[tuple[str, Sink], ...]:
        """All sinks by uid, beginning with the sinks in the deciding transaction."""
        return (*self.deciding, *self.others)

    @property
    def configs(self) -> list[KafkaConfig]:
        """The settings of the Kafka clusters that the sinks write to, one for each Kafka sink."""
        outputs = (getattr(sink, "output", None) for _, sink in self.by_uid)
        return [output.config for output in outputs if isinstance(output, KafkaOutput)]

    @property
    def written(self) -> tuple[tuple[KafkaOutput, Selection], ...]:
        """The settings and rows of the sinks that write into the transaction that decides."""
        if self.decider is None:
            return ()
        first = (self.decider, self.selection(self.uid))
        return (first, *((sharing.output, self.selection(sharing.uid)) for sharing in self.sharing))

    @property
    def functions(self) -> tuple[tuple[str, Callable[..., object]], ...]:
        """The user's functions on the way to sinks, each with a name for errors."""
        of_all = self.selections.values()
        predicates = [
            ("when(): the predicate", selection.when) for selection in of_all if selection.when
        ]
        mapping = [
            ("mapped(): the function", one) for selection in of_all for one in selection.functions
        ]
        return (*predicates, *mapping)

    def selection(self, uid: str) -> Selection:
        """Return the selection of rows for a sink."""
        return self.selections.get(uid, OF_MAIN)

    def written_to(self, servers: str) -> tuple[KafkaOutput, ...]:
        """Return what is written with transactions of tasks to a cluster, as far as that shows.

        Args:
            servers: of the cluster, as the source has them.
        """
        outputs = (getattr(sink, "output", None) for _, sink in self.others)
        return tuple(
            output
            for output in outputs
            if isinstance(output, KafkaOutput) and output.config.bootstrap_servers == servers
        )

    def check_dead_letters(self, value_mode: str) -> None:
        """Raise `OptionError` unless mode and topic come together, and the topic is its own.

        Args:
            value_mode: what the source does with malformed values.
        """
        topic, wanted = self.dead_letter_topic, value_mode == DEADLETTER
        if wanted and topic is None:
            raise OptionError(
                "the source's values have mode='deadletter', but the sink has no topic for "
                "malformed records: create one and set KafkaSink(dead_letter_topic=...), or choose "
                "another mode"
            )
        if topic is not None and not wanted:
            raise OptionError(
                f"dead_letter_topic={topic!r}, but the mode of the source's values is "
                f"{value_mode!r}: set mode='deadletter' there, e.g. "
                f"value=Json(..., mode='deadletter'), or remove the topic"
            )
        if topic is not None and any(topic == output.topic for output, _ in self.written):
            raise OptionError(
                f"dead_letter_topic {topic!r} is the output topic itself, whose readers expect "
                f"good records: name another"
            )
