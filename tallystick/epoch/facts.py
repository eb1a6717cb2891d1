"""The facts that a verdict about an epoch needs: the request, the committed epoch."""

from dataclasses import dataclass

from tallystick.epoch.manifest import CHECKPOINT, KAFKA, Manifest
from tallystick.epoch.tokens import Token


@dataclass(frozen=True, slots=True)
class Request:
    """The epoch to run, with end offsets that a caller has or our own loop has planned.

    Args:
        checkpoint_id: the epoch.
        sources: its end offsets, a JSON text per source.
        may_skip: the caller may have left out epochs before this one.
        start: its start offsets, if our own loop has planned the epoch.
    """

    checkpoint_id: int
    sources: tuple[str, ...]
    may_skip: bool = True
    start: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.checkpoint_id >= 0, self
        assert self.sources, self


@dataclass(frozen=True, slots=True)
class Base:
    """A manifest that a lineage could begin with."""

    path: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class CommittedEpoch:
    """The newest decision, and what is known of the epoch: manifests, notes, the caller's plan.

    Args:
        token: None if Kafka holds none.
        manifest: named by the token, if the token is of this lineage and the file exists.
        manifest_exists: an epoch of this checkpoint has left a manifest.
        is_seeded: a seed lies in the checkpoint, of any epoch.
        bases: all manifests of the epoch that a lineage would begin after, the seed's too; looked
            up only where Kafka's token is not of this lineage.
        has_state: files of keyed state lie in the checkpoint; looked up only where no manifest
            does.
        before: the manifest that the newest epoch went on from, where that epoch may have to be run
            again: if others than Kafka hold its output.
        decided_by: the decider that was asked for the token; for messages.
        logged: the end offsets that the caller has of the token's epoch; None: it has none, or none
            any more.
        begun: epochs between the token's, or the bases', and the requested one that have left a
            manifest or a note.
        is_partial: the token's epoch lacks the rows of a second call.
        is_set_back: a run has noted a later epoch than the token's as settled.
        is_settled: a run of our own loop has noted the token's epoch, or all bases, as settled.
        has_failed: a call for the token's epoch failed, perhaps after its decision; the caller may
            have gone on all the same.
    """

    token: Token | None
    manifest: Manifest | None
    manifest_exists: bool
    is_seeded: bool = False
    bases: tuple[Base, ...] = ()
    has_state: bool = False
    before: Manifest | None = None
    decided_by: str = KAFKA
    logged: tuple[str, ...] | None = None
    begun: tuple[int, ...] = ()
    is_partial: bool = False
    is_set_back: bool = False
    is_settled: bool = False
    has_failed: bool = False

    @property
    def is_by_log(self) -> bool:
        """True if the checkpoint's own log of decisions was asked."""
        return self.decided_by == CHECKPOINT

    @property
    def seed(self) -> Base | None:
        """The seed, as long as no epoch has run after it."""
        if self.manifest_exists or len(self.bases) != 1:
            return None
        base = self.bases[0]
        return base if base.manifest.origin is not None else None
