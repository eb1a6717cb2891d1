"""The facts that a verdict about an epoch needs: the run, the request, what is committed."""

from dataclasses import dataclass

from tallystick.epoch.manifest import CHECKPOINT, KAFKA, Manifest
from tallystick.epoch.tokens import Token
from tallystick.values import Producer


@dataclass(frozen=True, slots=True)
class Identity:
    """A pipeline's name, and the checkpoint that it goes on from.

    `accepted` are the decisions that a person stated; an error message gives the word to state.
    """

    pipeline: str
    lineage: str
    checkpoint: str
    accepted: frozenset[str] = frozenset()

    def own(self, token: Token | None) -> Token | None:
        """Return a decision if it is of this checkpoint's lineage; None: it is not, or is none."""
        return token if token is not None and token.lineage == self.lineage else None

    def token(self, checkpoint_id: int, manifest_path: str) -> Token:
        """Return what says that an epoch is decided, with this manifest."""
        return Token(checkpoint_id, self.lineage, self.checkpoint, manifest_path)

    def manifest(
        self, checkpoint_id: int, sources: tuple[str, ...], producer: Producer, decided_by: str
    ) -> Manifest:
        """Return the manifest of an epoch that has left nothing."""
        return Manifest(
            checkpoint_id,
            self.pipeline,
            self.lineage,
            sources,
            produced=(),
            producer=producer,
            decided_by=decided_by,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """The epoch to run, with its end offsets: Spark logged them, or our own loop has planned it.

    Args:
        checkpoint_id: the epoch.
        sources: its end offsets, a JSON text per source.
        may_skip: a user's own function stands between Spark and the driver, and may have left out
            epochs before this one.
        start: where it begins, of an epoch that our own loop has planned.
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
    """The newest decision, and what the checkpoint has of it.

    Args:
        token: None if Kafka holds none.
        manifest: the one that a token of this lineage names, if it is there.
        manifest_exists: an epoch of this checkpoint has left one.
        is_seeded: a seed lies in the checkpoint, of any epoch.
        bases: all manifests of the epoch that a lineage would begin after, the seed's too; looked
            up only where Kafka's token is not of this lineage.
        has_state: files of keyed state lie in the checkpoint; looked up only where no manifest
            does.
        before: the manifest that the newest epoch went on from, where that epoch may have to be run
            again: if others than Kafka hold its output.
        decided_by: whose answer this is: Kafka's, or the log of decisions'; for messages.
        logged: the end offsets that Spark's log has of the token's epoch; None: it has none, Spark
            removes those of a hundred micro-batches ago.
        begun: epochs between the token's, or the bases', and the requested one of which there is a
            trace.
        is_partial: the token's epoch lacks the rows of a second call.
        is_set_back: a run has noted a later epoch than the token's as settled.
        is_settled: a run of our own loop has seen the token's epoch through to its end.
        has_failed: a call for the token's epoch failed, perhaps after its decision; the function
            may have returned all the same.
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
