"""What a requested epoch means in the light of what Kafka committed last: run it, or not.

The table, for requested epoch N (spark-facts: Spark asks for N again until it has logged it):

    Kafka holds             this checkpoint has      verdict
    no token                nothing                  Open the lineage, then run N
    no token                only files of state      StateOfNothing: a restore was interrupted
    no token                manifests                TokenLost: Kafka forgot (7 days by default)
    no token                only a seed              Open at the seed, if it is of another name
                                                     and not of a seed; else TokenLost, or the
                                                     decision was stated
    a token of ours, N-1    its manifest             Run N
    a token of ours, N      its manifest             Done: only Spark's own log lacks it
    a token of ours, before no trace of those        Run N: the user's function left them out
                              in between
    a token of ours, other  -                        OffBeat: one of the two was set back
    a token of ours         another end of it in     OtherOffsets: the log is put right, as the
                              Spark's log              manifest has it; start again
    a token of ours         a note: called twice     Partial: the second call's rows are missing
    the token of the seed's only that seed           Open at the seed: the name goes on exactly
      own manifest                                     where the savepoint was taken
    another lineage's       only a seed              Beyond: the output between would be repeated
    another lineage's       -                        OtherLineage: another checkpoint owns the name

The last two are opened, and a partial epoch is followed, if a person states the decision. What a
lineage is opened at, its base, is the manifest of epoch N-1, or of the newest before it where a
user's function left epochs out; a checkpoint that has manifests and not that one is refused.
"""

from dataclasses import dataclass

from tallystick.checkpoint.manifest import CHECKPOINT, KAFKA, Manifest, is_seed
from tallystick.errors import DataLossError, ManifestError, SparkLogError, TallystickError
from tallystick.sink.transaction import Token
from tallystick.source.offsets import parse_source


@dataclass(frozen=True, slots=True)
class Identity:
    """Who runs: a pipeline's name, and the checkpoint that it goes on from.

    `accepted` are the decisions that a person stated; an error message gives the word to state.
    """

    pipeline: str
    lineage: str
    checkpoint: str
    accepted: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Request:
    """The epoch that Spark asks for, with the end offsets that it logged for it.

    Args:
        checkpoint_id: the epoch.
        sources: its end offsets, a JSON text per source.
        may_skip: a user's own function stands between Spark and the driver, and may have left out
            epochs before this one.
    """

    checkpoint_id: int
    sources: tuple[str, ...]
    may_skip: bool = True

    def __post_init__(self) -> None:
        assert self.checkpoint_id >= 0, self
        assert self.sources, self


@dataclass(frozen=True, slots=True)
class Base:
    """A manifest that a lineage could begin with."""

    path: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Committed:
    """What Kafka committed last, and what the checkpoint storage has of it.

    Args:
        token: None if Kafka holds none.
        manifest: the one that a token of this lineage names, if it is there.
        manifest_exists: some epoch of this checkpoint, whichever, has left one.
        is_seeded: a seed lies in the checkpoint, of whichever epoch.
        bases: all manifests of the epoch that a lineage would begin behind, the seed's too; looked
            up only where Kafka's token is not of this lineage.
        has_state: files of keyed state lie in the checkpoint; looked up only where no manifest
            does.
        before: the manifest that the newest epoch went on from, where that epoch may have to be run
            again: if others than Kafka hold its output.
        decided_by: whose answer this is: Kafka's, or the log of decisions'; for messages.
        logged: the end offsets that Spark's log has of the token's epoch; None: it has none, Spark
            removes those of a hundred micro-batches ago.
        begun: epochs between the token's and the requested one of which there is a trace.
        is_partial: the token's epoch lacks the rows of a second call.
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

    @property
    def is_by_log(self) -> bool:
        """Whether the checkpoint's own log of decisions was asked."""
        return self.decided_by == CHECKPOINT

    @property
    def seed(self) -> Base | None:
        """The seed, as long as no epoch has run behind it."""
        if self.manifest_exists or len(self.bases) != 1:
            return None
        base = self.bases[0]
        return base if base.manifest.origin is not None else None


@dataclass(frozen=True, slots=True)
class Open:
    """A new lineage: commit its first token, which names the base's manifest, then run."""

    base_path: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """The epoch before is committed: run this one."""


@dataclass(frozen=True, slots=True)
class Done:
    """The epoch is committed already; its manifest says what it wrote."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Refused:
    """Running would lose or repeat records."""

    error: TallystickError


Verdict = Open | Run | Done | Refused


def judge(request: Request, committed: Committed, identity: Identity) -> Verdict:
    """Decide what to do about a requested epoch; see the table above."""
    token = committed.token
    if token is None or token.lineage != identity.lineage:
        return _begin(request, committed, identity)
    is_done = token.checkpoint_id == request.checkpoint_id
    if not is_done and not _follows(request, token, committed, identity):
        return Refused(_off_beat(request, token, identity, committed))
    if is_done and not token.manifest_path:
        return Refused(_off_beat(request, token, identity, committed))  # before the lineage began
    manifest = committed.manifest
    if token.manifest_path and manifest is None:
        return Refused(_manifest_gone(token, identity, committed))
    logged = request.sources if is_done else committed.logged
    if manifest is not None and logged not in (None, manifest.sources):
        return Refused(_other_offsets(identity, token, manifest, logged))
    if committed.is_partial and _partial_word(token) not in identity.accepted:
        return Refused(_partial(token, identity))
    if not is_done:
        return Run()
    assert manifest is not None, "a token without a manifest is refused above"
    return Done(manifest)


def _follows(request: Request, token: Token, committed: Committed, identity: Identity) -> bool:
    """Whether nothing is missing between the token's epoch and the requested one."""
    if token.checkpoint_id >= request.checkpoint_id - 1:
        return token.checkpoint_id == request.checkpoint_id - 1
    is_proven = not committed.begun
    return request.may_skip and (is_proven or _skip_word(request, token) in identity.accepted)


def _skip_word(request: Request, token: Token) -> str:
    """What a person states to go on without the epochs in between."""
    return f"without-epochs-{token.checkpoint_id + 1}-to-{request.checkpoint_id - 1}"


def _begin(request: Request, committed: Committed, identity: Identity) -> Verdict:
    """Open a lineage that Kafka's token is not of, where that repeats nothing or was decided."""
    token, seed = committed.token, committed.seed
    if token is not None:
        if not _goes_on_exactly(token, seed) and new_lineage_word(token) not in identity.accepted:
            return Refused(_other_lineage(token, identity, seed))
    elif seed is not None:
        if _is_of(identity, seed) and _without_token(seed) not in identity.accepted:
            return Refused(_token_lost_after_savepoint(seed, identity, committed))
    elif committed.manifest_exists:
        return Refused(_token_lost(request, identity, committed))
    return _open(request, committed, identity)


def _is_of(identity: Identity, seed: Base) -> bool:
    """Whether the savepoint may be of this very pipeline: then Kafka may have had a token of it.

    That of a fork before its first epoch holds a seed, which has the name of the original.
    """
    origin = seed.manifest.origin
    return origin is not None and (
        origin.pipeline == identity.pipeline or is_seed(origin.manifest_path)
    )


def _goes_on_exactly(token: Token, seed: Base | None) -> bool:
    """Whether what Kafka committed last is the very manifest that the savepoint holds."""
    origin = None if seed is None else seed.manifest.origin
    return origin is not None and (
        (token.lineage, token.manifest_path) == (origin.lineage, origin.manifest_path)
    )


def _open(request: Request, committed: Committed, identity: Identity) -> Verdict:
    bases = committed.bases
    if any(base.manifest.lineage != identity.lineage for base in bases):
        return Refused(_half_restored(bases, identity))
    if not bases:
        is_bare = not committed.manifest_exists and not committed.is_seeded
        if is_bare and committed.has_state:
            return Refused(_state_of_nothing(identity))
        return Open() if is_bare else Refused(_base_gone(request, identity))
    has_state = any(base.manifest.state for base in bases)  # that of a user's function has none
    if has_state and bases[0].manifest.checkpoint_id != request.checkpoint_id - 1:
        return Refused(_base_gone(request, identity))
    if has_state and len(bases) > 1:
        return Refused(_several_bases(bases, identity))
    return Open(bases[0].path if len(bases) == 1 else "")


def _without_token(seed: Base) -> str:
    return f"restored-at-epoch-{seed.manifest.checkpoint_id}-without-token"


def new_lineage_word(token: Token) -> str:
    """What a person states to take a name over from another lineage."""
    return f"new-lineage-after-{token.lineage}"


def _token_lost(request: Request, identity: Identity, committed: Committed) -> DataLossError:
    if committed.is_by_log:
        return DataLossError(
            f"pipeline {identity.pipeline!r}: epoch {request.checkpoint_id} was asked for, and the "
            f"log of decisions of checkpoint {identity.checkpoint} (tallystick/decisions) does not "
            f"say which epoch was decided last, although the checkpoint has manifests: its files "
            f"were removed, or not copied; or Kafka decided the newest epochs, and forgot "
            f"(offsets.retention.minutes, 7 days by default). Whether the newest epoch became "
            f"visible cannot be proved, so running it could repeat it. Put a whole copy of the "
            f"checkpoint back. Or compare the end of the output with the newest manifest; then "
            f"make a savepoint of this checkpoint and restore it into a new one, or start from a "
            f"new checkpoint at the offsets that the manifest names."
        )
    return DataLossError(
        f"pipeline {identity.pipeline!r}: epoch {request.checkpoint_id} was asked for, and Kafka "
        f"no longer knows which epoch it committed last, although checkpoint {identity.checkpoint} "
        f"has manifests. Kafka forgets a group's offsets after offsets.retention.minutes (7 days "
        f"by default) without a commit, and at once when the topic under whose name they are kept "
        f"was deleted (token_topic=, or the sink's own). Whether the newest epoch became visible "
        f"cannot be proved, so running it could repeat it. Compare the end of the output with the "
        f"newest manifest; "
        f"then make a savepoint of this checkpoint and restore it into a new one, or start from a "
        f"new checkpoint at the offsets that the manifest names. Raise offsets.retention.minutes "
        f"for the next long stop."
    )


def _token_lost_after_savepoint(
    seed: Base, identity: Identity, committed: Committed
) -> DataLossError:
    epoch, origin = seed.manifest.checkpoint_id, seed.manifest.origin
    is_of_seed = origin is not None and is_seed(origin.manifest_path)
    whose = "a pipeline that had not run yet, perhaps this one," if is_of_seed else "this pipeline"
    why = (
        "and nothing tells whether the original went on: without a KafkaSink that has "
        "transactions='epoch', decisions are kept in each checkpoint's own log, and the one of "
        "the original is not looked at"
        if committed.is_by_log
        else "and Kafka does not know which epoch the pipeline committed last: it forgot "
        "(offsets.retention.minutes, 7 days by default), or this is another cluster"
    )
    return DataLossError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} was restored from a "
        f"savepoint of {whose} at epoch {epoch}, {why}. {_consequence(seed)} if epochs behind "
        f"{epoch} were ever committed; if none was, it goes on exactly. To go on either way, "
        f"start once with "
        f"accept={_without_token(seed)!r}; or give the pipeline another name and another output."
    )


def _other_lineage(token: Token, identity: Identity, seed: Base | None) -> DataLossError:
    found = (
        f"pipeline {identity.pipeline!r}: Kafka committed epoch {token.checkpoint_id} last from "
        f"checkpoint {token.checkpoint} (lineage {token.lineage}); this run uses checkpoint "
        f"{identity.checkpoint} (lineage {identity.lineage})"
    )
    if seed is None:
        consequence = "Going on would repeat or skip what the two differ in"
    else:
        found += f", restored from a savepoint of epoch {seed.manifest.checkpoint_id}"
        consequence = _consequence(seed)
    return DataLossError(
        f"{found}. {consequence}. Use that checkpoint, or give this pipeline a name of its own; "
        f"or, if this checkpoint is meant to take over, start once with "
        f"accept={new_lineage_word(token)!r}."
    )


POSITIONS_SHOWN_MAX = 20


def _consequence(seed: Base) -> str:
    positions = [
        f"{partition} from offset {offset}"
        for source in map(parse_source, seed.manifest.sources)
        if source is not None
        for partition, offset in sorted(source.positions.items())
    ]
    shown = ", ".join(positions[:POSITIONS_SHOWN_MAX])
    more = len(positions) - POSITIONS_SHOWN_MAX
    where = f" ({shown}{f' and {more} partitions more' if more > 0 else ''})" if shown else ""
    return (
        f"Going on reads again what comes behind epoch {seed.manifest.checkpoint_id}{where}, so "
        f"output from epoch {seed.manifest.checkpoint_id + 1} on is written a second time"
    )


def _half_restored(bases: tuple[Base, ...], identity: Identity) -> ManifestError:
    other = next(base for base in bases if base.manifest.lineage != identity.lineage)
    return ManifestError(
        f"pipeline {identity.pipeline!r}: manifest {other.path} in checkpoint "
        f"{identity.checkpoint} is of lineage {other.manifest.lineage}, the checkpoint's own is "
        f"{identity.lineage}: a restore was interrupted, or folders of two checkpoints were mixed. "
        f"Nothing was changed. Restore the savepoint again, into an empty folder."
    )


def _base_gone(request: Request, identity: Identity) -> ManifestError:
    return ManifestError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} is to go on with epoch "
        f"{request.checkpoint_id}, but has no manifest of the epoch before, only of others: what "
        f"state to go on from cannot be told. Nothing was changed. Put a whole copy of the "
        f"checkpoint back; or restore a savepoint into an empty folder."
    )


def _state_of_nothing(identity: Identity) -> ManifestError:
    return ManifestError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} has files of keyed "
        f"state, but no manifest that names them: a restore was interrupted, the manifests were "
        f"removed, or no epoch of an earlier pipeline was ever finished. Beginning here would "
        f"begin with empty state. Nothing was changed. Restore the savepoint again, into an empty "
        f"folder; or use a new checkpoint folder."
    )


def _several_bases(bases: tuple[Base, ...], identity: Identity) -> ManifestError:
    return ManifestError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} has "
        f"{len(bases)} manifests of epoch {bases[0].manifest.checkpoint_id} "
        f"({', '.join(base.path for base in bases)}), and Kafka does not tell any more which of "
        f"them counts. Nothing was changed. Restore a savepoint into an empty folder."
    )


def _off_beat(
    request: Request, token: Token, identity: Identity, committed: Committed
) -> DataLossError:
    behind = token.checkpoint_id >= request.checkpoint_id
    by_log = committed.is_by_log
    who = "its log of decisions has" if by_log else "Kafka committed"
    answer = "the log (tallystick/decisions)" if by_log else "Kafka's answer"
    what = (
        "the checkpoint was set back: the epochs in between would be written a second time"
        if behind
        else f"{answer} was set back: the epochs in between may be missing from the output"
    )
    return DataLossError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} asks for epoch "
        f"{request.checkpoint_id}, but {who} epoch {token.checkpoint_id} last "
        f"(expected {request.checkpoint_id - 1}). If another run of this checkpoint was active "
        f"until now, start again: that is all. If not, {what}. Put the newest copy of the "
        f"checkpoint back; or start from a new checkpoint, stating where to read from."
        f"{'' if behind else _on_skipping(request, token, committed)}"
    )


def _on_skipping(request: Request, token: Token, committed: Committed) -> str:
    """For a function that may leave micro-batches out: these were begun."""
    if not request.may_skip:
        return ""
    begun = ", ".join(map(str, committed.begun[:POSITIONS_SHOWN_MAX]))
    return (
        f" Or the function of foreachBatch went on after the sink had failed (begun, and not "
        f"committed: {begun}): what the sink raises must not be caught, for Spark takes a "
        f"micro-batch whose function returns for done. To go on without their rows, start once "
        f"with accept={_skip_word(request, token)!r}."
    )


def _manifest_gone(token: Token, identity: Identity, committed: Committed) -> ManifestError:
    who = "the checkpoint's log decided" if committed.is_by_log else "Kafka committed"
    return ManifestError(
        f"pipeline {identity.pipeline!r}: {who} epoch {token.checkpoint_id}, whose "
        f"manifest {token.manifest_path} is missing from checkpoint {identity.checkpoint}. "
        f"Nothing was changed. Restore the file from a backup of the checkpoint; or start from a "
        f"new checkpoint, stating where to read from."
    )


def _other_offsets(
    identity: Identity, token: Token, manifest: Manifest, logged: tuple[str, ...] | None
) -> SparkLogError:
    return SparkLogError(
        f"pipeline {identity.pipeline!r}: epoch {token.checkpoint_id} is committed with the source "
        f"offsets {manifest.sources} (manifest {token.manifest_path}), but offsets/"
        f"{token.checkpoint_id} in checkpoint {identity.checkpoint} has {logged}: it was lost and "
        f"planned again, or replaced. It was put right, as the manifest has it. Nothing is lost or "
        f"repeated: start the query again.",
        token.checkpoint_id,
        manifest.sources,
    )


def _partial_word(token: Token) -> str:
    return f"partial-epoch-{token.checkpoint_id}"


def _partial(token: Token, identity: Identity) -> DataLossError:
    epoch = token.checkpoint_id
    return DataLossError(
        f"pipeline {identity.pipeline!r}: the function of foreachBatch called a sink twice in "
        f"micro-batch {epoch}. The rows of the first call are committed, those of the second call "
        f"are not in the output, and no start writes them: the epoch is committed. Write all rows "
        f"of a micro-batch with one call of one sink (union the DataFrames); write the missing "
        f"ones of micro-batch {epoch} by other means (its offsets are in offsets/{epoch} of "
        f"checkpoint {identity.checkpoint}); then start once with accept={_partial_word(token)!r}. "
        f"Or start from a new checkpoint, with an empty output."
    )
