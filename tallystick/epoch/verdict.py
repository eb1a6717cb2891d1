"""The verdict about a requested epoch, by what Kafka committed last: run it, or not.

The table, for requested epoch N (a caller asks for N again until it has heard that N is done):

    Kafka holds             this checkpoint has      verdict
    no token                nothing                  Open the lineage, then run N
    no token                notes of failed calls    Refused: the function caught what we raised
    no token                only files of state      StateOfNothing: a restore was interrupted
    no token                manifests                TokenLost: Kafka forgot (7 days by default)
    no token                only a seed              Open at the seed, if it is of another name
                                                     and not of a seed; else TokenLost, or the
                                                     decision was stated
    a token of ours, N-1    its manifest             Run N
    a token of ours, N      its manifest             Done: only the caller does not know
    a token of ours, before no trace of those        Run N: the caller left them out
                              in between
    a token of ours, other  -                        OffBeat: one of the two was set back
    a token of ours         -, and the caller has    OtherOffsets: the caller's are wrong, as the
                              another end of it        manifest cannot be
    a token of ours         a note: called twice     Partial: the second call's rows are missing
    the token of the seed's only that seed           Open at the seed: the name goes on exactly
      own manifest                                     where the savepoint was taken
    another lineage's       only a seed              Beyond: the output between would be repeated
    another lineage's       -                        OtherLineage: another checkpoint owns the name

In the last two cases the lineage is opened, and a partial epoch is followed, if a person states the
decision. A lineage is opened at its base: the manifest of epoch N-1, or of the newest before it
where a user's function left epochs out; a checkpoint that has manifests but not the base is
refused.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tallystick.epoch import refusals
from tallystick.epoch.facts import Base, CommittedEpoch, Request
from tallystick.epoch.manifest import Identity, Manifest, is_seed
from tallystick.epoch.tokens import Token
from tallystick.errors import TallystickError
from tallystick.state.catalog import StepState


@dataclass(frozen=True, slots=True)
class Open:
    """A new lineage: commit its first token, which names the base's manifest, then run."""

    base_path: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """The previous epoch is committed: run the requested epoch."""


@dataclass(frozen=True, slots=True)
class AlreadyCommitted:
    """The requested epoch is committed already; `manifest` describes its output."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Refusal:
    """Running would lose or repeat records."""

    error: TallystickError


Verdict = Open | Run | AlreadyCommitted | Refusal


def judge(request: Request, committed: CommittedEpoch, identity: Identity) -> Verdict:
    """Decide what to do about a requested epoch; see the table above."""
    token = identity.own(committed.token)
    if token is None:
        return _begin(request, committed, identity)
    is_done = token.checkpoint_id == request.checkpoint_id
    if not is_done and not _follows(request, token, committed, identity):
        return Refusal(refusals.wrong_epoch(request, token, identity, committed))
    if is_done and not token.manifest_path:
        return Refusal(
            refusals.wrong_epoch(request, token, identity, committed)
        )  # before the lineage began
    manifest = committed.manifest
    if token.manifest_path and manifest is None:
        return Refusal(refusals.manifest_gone(token, identity, committed))
    logged = request.sources if is_done else committed.logged
    if manifest is not None and logged not in (None, manifest.sources):
        return Refusal(refusals.other_offsets(identity, token, manifest, logged))
    if committed.is_partial and refusals.partial_word(token) not in identity.accepted:
        return Refusal(refusals.partial(token, identity))
    if not is_done:
        return Run()
    assert manifest is not None, "a token without a manifest is refused above"
    return AlreadyCommitted(manifest)


FIRST_EPOCH = 1
"""The first of a loop of our own. The one before has no rows: there the lineage begins to read."""


class NextEpoch(NamedTuple):
    """The epoch that comes next.

    Args:
        checkpoint_id: its number.
        start: the offsets where it begins to read; empty: not known yet.
        state: the committed state that it goes on from.
    """

    checkpoint_id: int
    start: tuple[str, ...] = ()
    state: tuple[StepState, ...] = ()


def following(committed: CommittedEpoch, identity: Identity) -> NextEpoch:
    """Return the epoch to run after the committed one, or the first of a lineage."""
    token, manifest = identity.own(committed.token), committed.manifest
    if token is not None:
        epoch = token.checkpoint_id
    elif committed.bases:
        manifest = committed.bases[0].manifest
        epoch = manifest.checkpoint_id
    else:
        epoch = FIRST_EPOCH - 1
    if manifest is None:
        return NextEpoch(epoch + 1)
    return NextEpoch(epoch + 1, manifest.sources, manifest.state)


def look_back(committed: CommittedEpoch, identity: Identity) -> Refusal | Request | None:
    """Judge the newest epoch before a loop of our own plans the next: refuse, settle, or go on.

    Returns:
        A refusal; or a request for the newest epoch, which may not be settled in other sinks, and
        whose rows may not have been checked for strays; or None, to go on.
    """
    epoch, start, _ = following(committed, identity)
    sources = start or ("",)
    probe = Request(epoch, sources, may_skip=False, start=sources)
    judged = judge(probe, committed, identity)
    token, manifest = committed.token, committed.manifest
    if isinstance(judged, Open):
        are_known = committed.is_settled or all(is_seed(base.path) for base in committed.bases)
        return None if are_known else Refusal(refusals.base_unknown(epoch - 1, identity))
    if isinstance(judged, Refusal):
        return judged
    assert token is not None, "without a token a lineage is opened"
    if not token.manifest_path:
        return Refusal(refusals.no_base(identity))
    if committed.is_set_back or any(begun > epoch for begun in committed.begun):
        # An epoch begins only where the one before is decided, so the token was set back.
        return Refusal(refusals.wrong_epoch(probe, token, identity, committed))
    if manifest is None or committed.is_settled:
        return None
    if not manifest.produced and not manifest.committables:
        return None
    return Request(manifest.checkpoint_id, manifest.sources, may_skip=False)


def _follows(request: Request, token: Token, committed: CommittedEpoch, identity: Identity) -> bool:
    """True if nothing is missing between the token's epoch and the requested one."""
    if token.checkpoint_id >= request.checkpoint_id - 1:
        return token.checkpoint_id == request.checkpoint_id - 1
    return request.may_skip and _is_gap_known(request, token.checkpoint_id, committed, identity)


def _is_gap_known(
    request: Request, newest: int, committed: CommittedEpoch, identity: Identity
) -> bool:
    """True if nothing was begun after an epoch, or a person stated to go on without it."""
    return not committed.begun or refusals.skip_word(request, newest) in identity.accepted


def _begin(request: Request, committed: CommittedEpoch, identity: Identity) -> Verdict:
    """Open a lineage without a token of its own, where nothing is repeated or a person said so."""
    token, seed = committed.token, committed.seed
    if token is not None:
        is_new = not (committed.bases or committed.manifest_exists or committed.is_seeded)
        is_empty = is_new and _is_before_all(token, request)
        is_harmless = is_empty or _goes_on_exactly(token, seed)
        if not is_harmless and refusals.new_lineage_word(token) not in identity.accepted:
            return Refusal(refusals.other_lineage(token, identity, seed))
    elif seed is not None:
        if _is_of(identity, seed) and refusals.without_token(seed) not in identity.accepted:
            return Refusal(refusals.token_lost_after_savepoint(seed, identity, committed))
    elif committed.manifest_exists:
        return Refusal(refusals.token_lost(request, identity, committed))
    return _open(request, committed, identity)


def _is_of(identity: Identity, seed: Base) -> bool:
    """True if the savepoint may be of this very pipeline: then Kafka may have had a token of it.

    A savepoint of a fork before its first epoch holds a seed, which does not have the fork's name.
    A query of Spark's without a name is called by its id, and a restore draws a new id.
    """
    origin = seed.manifest.origin
    if origin is None:
        return False
    is_unnamed = origin.pipeline == origin.lineage and identity.pipeline == identity.lineage
    return is_unnamed or origin.pipeline == identity.pipeline or seed.manifest.is_of_seed


def _is_before_all(token: Token, request: Request) -> bool:
    """True if the lineage of a token ended before it committed any epoch: nothing can repeat.

    A loop of our own opens with a seed as its epoch 0. A query of Spark's opens without a manifest;
    its seed 0 would be a restored epoch.
    """
    is_of_loop = bool(request.start)
    if is_of_loop and token.checkpoint_id == FIRST_EPOCH - 1:
        return is_seed(token.manifest_path)
    return token.checkpoint_id < 0 and not token.manifest_path


def _goes_on_exactly(token: Token, seed: Base | None) -> bool:
    """True if Kafka's newest token names the very manifest that the savepoint holds."""
    origin = None if seed is None else seed.manifest.origin
    return origin is not None and (
        (token.lineage, token.manifest_path) == (origin.lineage, origin.manifest_path)
    )


def _open(request: Request, committed: CommittedEpoch, identity: Identity) -> Verdict:
    bases = committed.bases
    if any(base.manifest.lineage != identity.lineage for base in bases):
        return Refusal(refusals.half_restored(bases, identity))
    newest = bases[0].manifest.checkpoint_id if bases else -1
    if not _is_gap_known(request, newest, committed, identity):
        return Refusal(refusals.failed_before_the_first(request, newest, identity, committed))
    if not bases:
        is_bare = not committed.manifest_exists and not committed.is_seeded
        if is_bare and committed.has_state:
            return Refusal(refusals.state_without_manifest(identity))
        return Open() if is_bare else Refusal(refusals.base_gone(request, identity))
    has_state = any(base.manifest.state for base in bases)  # that of a user's function has none
    if has_state and bases[0].manifest.checkpoint_id != request.checkpoint_id - 1:
        return Refusal(refusals.base_gone(request, identity))
    if has_state and len(bases) > 1:
        return Refusal(refusals.several_bases(bases, identity))
    return Open(bases[0].path if len(bases) == 1 else "")
