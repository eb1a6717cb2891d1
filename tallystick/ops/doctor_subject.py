"""The checkpoint and the cluster to check by `tallystick doctor`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tallystick.epoch.manifest import KAFKA, DeciderName, Manifest
from tallystick.epoch.transactional_ids import parse
from tallystick.kafka.client import Client
from tallystick.ops.checkpoint_view import CheckpointView
from tallystick.ops.transactions import LingeringTransaction
from tallystick.source.offsets import SourceOffsets, parse_source


@dataclass(frozen=True, slots=True)
class Subject:
    """The checkpoint that is checked, and the cluster.

    Args:
        options: of the connection, as the user gave them.
        client: of the cluster; it knows the cluster's id.
        open_transactions: lists those of the cluster.
        view: the checkpoint, with what Kafka knows of it.
        manifests: those that are retained, oldest first.
        decider: of the checkpoint; None: nothing was decided yet.
        trigger_interval_ms: of the pipeline; None: not given.
    """

    options: Mapping[str, str]
    client: Client
    open_transactions: Callable[[], Iterable[LingeringTransaction]]
    view: CheckpointView
    manifests: tuple[Manifest, ...]
    decider: DeciderName | None
    trigger_interval_ms: int | None = None

    @property
    def sources(self) -> list[SourceOffsets]:
        """The positions of the sources that are ours."""
        newest = self.view.decided or next(reversed(self.manifests), None)
        texts = () if newest is None else newest.sources
        return [source for source in map(parse_source, texts) if source is not None]

    @property
    def output_topics(self) -> list[str]:
        """The topics that the retained epochs have rows in."""
        return sorted({rows.topic for manifest in self.manifests for rows in manifest.produced})

    @property
    def transactional_ids(self) -> list[str]:
        """The ids that the next start writes with: that of the decider first, then of tasks."""
        decides = [] if self.decider is None else [self.decider.transactional_id]
        names = {
            committable.name for manifest in self.manifests for committable in manifest.committables
        }
        ids = sorted({name.rsplit(":", 2)[0] for name in names})
        return [
            *filter(None, decides),
            *(pooled_id for pooled_id in ids if parse(pooled_id) is not None),
        ]


def is_kafkas(decider: DeciderName | None) -> bool:
    """Return whether Kafka's transactions decide."""
    return decider is not None and decider.decided_by == KAFKA
