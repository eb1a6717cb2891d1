"""What a requested epoch means in the light of what Kafka committed last: run it, or not.

The table, for requested epoch N (spark-facts: Spark asks for N again until it has logged it):

    Kafka holds             this checkpoint has      verdict
    no token                no manifest              Open the lineage, then run N
    no token                manifests                TokenLost: Kafka forgot (7 days by default)
    a token of ours, N-1    its manifest             Run N
    a token of ours, N      its manifest             Done: only Spark's own log lacks it
    a token of ours, other  -                        OffBeat: one of the two was set back
    another lineage's       -                        OtherLineage: another checkpoint owns the name
"""

from dataclasses import dataclass

from tallystick.checkpoint.manifest import Manifest
from tallystick.errors import DataLossError, ManifestError, TallystickError
from tallystick.sink.transaction import Token


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
    """The epoch that Spark asks for, with the end offsets that it logged for it."""

    checkpoint_id: int
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.checkpoint_id >= 0, self
        assert self.sources, self


@dataclass(frozen=True, slots=True)
class Committed:
    """What Kafka committed last, and what the checkpoint storage has of it."""

    token: Token | None
    manifest: Manifest | None
    manifest_exists: bool  # any manifest of this checkpoint, whichever epoch it is of


@dataclass(frozen=True, slots=True)
class Open:
    """A new lineage: commit its first token, then run."""


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
    if token is None:
        return Refused(_token_lost(request, identity)) if committed.manifest_exists else Open()
    if token.lineage != identity.lineage:
        accepted = _new_lineage(token) in identity.accepted
        return Open() if accepted else Refused(_other_lineage(token, identity))
    if token.checkpoint_id not in (request.checkpoint_id - 1, request.checkpoint_id):
        return Refused(_off_beat(request, token, identity))
    if token.checkpoint_id == request.checkpoint_id and not token.manifest_path:
        return Refused(_off_beat(request, token, identity))  # before the lineage began
    if token.manifest_path and committed.manifest is None:
        return Refused(_manifest_gone(token, identity))
    if token.checkpoint_id == request.checkpoint_id - 1:
        return Run()
    assert committed.manifest is not None, "a token without a manifest is refused above"
    if committed.manifest.sources != request.sources:
        return Refused(_other_offsets(request, token, committed.manifest))
    return Done(committed.manifest)


def _new_lineage(token: Token) -> str:
    return f"new-lineage-after-{token.lineage}"


def _token_lost(request: Request, identity: Identity) -> DataLossError:
    return DataLossError(
        f"pipeline {identity.pipeline!r}: epoch {request.checkpoint_id} was asked for, and Kafka "
        f"no longer knows which epoch it committed last, although checkpoint {identity.checkpoint} "
        f"has manifests. Kafka forgets a group's offsets after offsets.retention.minutes (7 days "
        f"by default) without a commit. Whether the newest epoch became visible cannot be proved, "
        f"so running it could repeat it. Compare the end of the output with the newest manifest; "
        f"then start from a new checkpoint at the offsets that the manifest names, or raise "
        f"offsets.retention.minutes for the next long stop."
    )


def _other_lineage(token: Token, identity: Identity) -> DataLossError:
    return DataLossError(
        f"pipeline {identity.pipeline!r}: Kafka committed epoch {token.checkpoint_id} last from "
        f"checkpoint {token.checkpoint} (lineage {token.lineage}); this run uses checkpoint "
        f"{identity.checkpoint} (lineage {identity.lineage}). Going on would repeat or skip what "
        f"the two differ in. Use that checkpoint, or give this pipeline a name of its own; or, if "
        f"this checkpoint is meant to take over, start once with accept={_new_lineage(token)!r}."
    )


def _off_beat(request: Request, token: Token, identity: Identity) -> DataLossError:
    behind = token.checkpoint_id >= request.checkpoint_id
    what = (
        "the checkpoint was set back: the epochs in between would be written a second time"
        if behind
        else "Kafka's answer was set back: the epochs in between may be missing from the output"
    )
    return DataLossError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} asks for epoch "
        f"{request.checkpoint_id}, but Kafka committed epoch {token.checkpoint_id} last "
        f"(expected {request.checkpoint_id - 1}). If another run of this checkpoint was active "
        f"until now, start again: that is all. If not, {what}. Put the newest copy of the "
        f"checkpoint back; or start from a new checkpoint, stating where to read from."
    )


def _manifest_gone(token: Token, identity: Identity) -> ManifestError:
    return ManifestError(
        f"pipeline {identity.pipeline!r}: Kafka committed epoch {token.checkpoint_id}, whose "
        f"manifest {token.manifest_path} is missing from checkpoint {identity.checkpoint}. "
        f"Nothing was changed. Restore the file from a backup of the checkpoint; or start from a "
        f"new checkpoint, stating where to read from."
    )


def _other_offsets(request: Request, token: Token, manifest: Manifest) -> ManifestError:
    return ManifestError(
        f"epoch {request.checkpoint_id} is committed with the source offsets {manifest.sources} "
        f"(manifest {token.manifest_path}), but Spark's log has {request.sources} for it: the "
        f"folders offsets/ and tallystick/ of the checkpoint are not of the same time. Nothing was "
        f"changed. Put a consistent copy of the checkpoint back."
    )
