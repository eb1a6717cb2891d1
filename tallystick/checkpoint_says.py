"""What a checkpoint says of transactions: what is decided last, what is prepared behind it.

Reads, never changes anything; the pipeline may run meanwhile. Kafka is asked for its token where it
is the one that decides.
"""

import json
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tallystick.checkpoint import manifest as m
from tallystick.checkpoint import savepoint as s
from tallystick.checkpoint.manifest import KAFKA, Manifest
from tallystick.decision_log import Entry, kafka_places, newest_entry, transactional_ids
from tallystick.errors import OptionError
from tallystick.ports import Storage
from tallystick.sink.transaction import Token
from tallystick.sink.transactional_ids import checkpoint_prefix, default_prefix, parse
from tallystick.sink.two_phase import Owner
from tallystick.transactions import Told

DECIDING_EPOCHS = 2
"""Of so many of the newest epochs the deciders are asked: a change of mode is at most one old."""
SINKS_OF_A_KIND = 20
"""So many sinks without a uid are looked for, of a run that died before its first manifest."""
LOOKS_MAX = 3
"""How often a checkpoint is looked at that a running pipeline changes meanwhile."""


class Heard(NamedTuple):
    """What Kafka said of a pipeline's token.

    Args:
        token: None: it holds none, or it cannot be told.
        doubt: why it cannot be told; "": it holds none.
    """

    token: Token | None
    doubt: str = ""


Ask = Callable[[str, str], Heard]
"""What Kafka holds of a deciding transactional id, and a lineage."""


class Stated(NamedTuple):
    """What the user says of a pipeline, besides its checkpoint.

    Args:
        pipeline: its name.
        prefix: of its transactional ids.
        decider: whether the user says which cluster decides.
    """

    pipeline: str | None = None
    prefix: str | None = None
    decider: bool = False

    @property
    def prefixes(self) -> frozenset[str]:
        """As they begin transactional ids."""
        names = () if self.pipeline is None else (default_prefix(self.pipeline),)
        return frozenset(names if self.prefix is None else (*names, self.prefix))


def look(checkpoint: Storage, ask: Ask, stated: Stated = Stated()) -> Told:  # noqa: B008  a value
    """See what a checkpoint says now.

    Args:
        checkpoint: its location.
        ask: Kafka, for its token.
        stated: what the user says besides.

    Raises:
        OptionError: it is no checkpoint, or one of another pipeline.
        ManifestError: a manifest, or the log of decisions, is damaged.
    """
    for _ in range(LOOKS_MAX):
        told = _look(checkpoint, ask, stated)
        if not told.decided_path or told.decided is not None:
            return told
    return told


def deciders(manifests: Iterable[Manifest], lineage: str) -> list[str]:
    """The transactional ids whose transactions decided, or may decide, one of these epochs."""
    return sorted(
        {
            each.producer.transactional_id
            for each in manifests
            if each.decided_by == KAFKA and each.lineage == lineage and each.origin is None
        }
    )


def deciding_ids(
    checkpoint: Storage, entry: Entry | None, lineage: str, cluster_id: str
) -> list[str]:
    """The transactional ids under which more may be decided than the log says.

    As a start of the pipeline finds them; never by the pipeline's name alone, under which another
    checkpoint may run.

    Args:
        checkpoint: its location.
        entry: what the log says.
        lineage: of the checkpoint.
        cluster_id: of the cluster that is thought to decide.

    Raises:
        OptionError: another cluster may decide.
        ManifestError: a file is damaged.
    """
    places = kafka_places(checkpoint, entry)
    for place in sorted(places):
        if place.cluster_id not in ("", cluster_id):
            raise OptionError(
                f"checkpoint {checkpoint.location}: transactional id {place.transactional_id!r} of "
                f"cluster {place.cluster_id} may decide the epoch that is under way, and this is "
                f"cluster {cluster_id}: give the servers of that one (--decider)."
            )
    newest = -1 if entry is None else _epoch_of(entry.token)
    later = (each for each in newest_manifests(checkpoint).values() if each.checkpoint_id > newest)
    return sorted({*(each.transactional_id for each in places), *deciders(later, lineage)})


def owners_of(
    checkpoint: Storage, told: Told, uids: Iterable[str], system: str
) -> tuple[Owner, ...]:
    """The sinks that a pipeline may have in a system: those that manifests or the user name.

    And those that have no uid of their own: the kind, and a number.
    """
    numbered = (f"{system}-{number}" for number in range(1, SINKS_OF_A_KIND + 1))
    named = {each.sink for it in newest_manifests(checkpoint).values() for each in it.committables}
    return tuple(Owner(told.pipeline, uid, told.lineage)
                 for uid in sorted({*named, *uids, *numbered}))  # fmt: skip


def newest_manifests(checkpoint: Storage) -> dict[str, Manifest]:
    """The retained manifests by path, of all attempts, oldest first."""
    paths = m.manifests(checkpoint.names(m.FOLDER))
    found = ((path, checkpoint.get(path)) for path in sorted(paths, key=m.attempt_of))
    return {path: m.decode(data, path) for path, data in found if data is not None}


def lineage_in(checkpoint: Storage) -> str:
    """The id of the query that a checkpoint is of.

    Raises:
        OptionError: it is no checkpoint.
    """
    data = checkpoint.get("metadata")
    try:
        return str(json.loads(data or b"")["id"])
    except (ValueError, KeyError, TypeError):
        raise OptionError(
            f"{checkpoint.location} is no checkpoint: expected a file metadata with the id of the "
            f"query, as Spark leaves it. Check the path."
        ) from None


def _look(checkpoint: Storage, ask: Ask, stated: Stated) -> Told:
    lineage = lineage_in(checkpoint)
    done = max(s.epochs_logged(checkpoint.names("commits")), default=-1)
    manifests = newest_manifests(checkpoint)
    own = {path: each for path, each in manifests.items() if each.lineage == lineage}
    pipeline = next((each.pipeline for each in reversed(own.values())), stated.pipeline or "")
    if stated.pipeline not in (None, pipeline):
        raise OptionError(
            f"checkpoint {checkpoint.location} is one of pipeline {pipeline!r}, and --pipeline "
            f"names {stated.pipeline!r}: give the checkpoint of that one."
        )
    token, doubt = _decided_last(checkpoint, own, lineage, done, ask)
    path = "" if token is None else token.manifest_path
    decided = own.get(path)
    if path and decided is None:
        doubt = f"epoch {m.epoch_of(path)} is decided last, and its manifest {path} is missing"
    logged = max(s.epochs_logged(checkpoint.names("offsets")), default=-1)
    prefixes = _prefixes(own.values(), lineage) | transactional_ids(checkpoint) | stated.prefixes
    return Told(
        pipeline=pipeline,
        lineage=lineage,
        prefixes=prefixes | {checkpoint_prefix(each, lineage) for each in prefixes},
        decided_path=path,
        decided=decided,
        doubt=doubt,
        undecided=tuple(
            (each, manifest)
            for each, manifest in own.items()
            if each != path and m.epoch_of(each) >= _epoch_of(token)
        ),
        under_way=logged if logged > done else None,
        done=done,
        planned_ms=_planned_ms(checkpoint, logged),
    )


def _decided_last(
    checkpoint: Storage, manifests: dict[str, Manifest], lineage: str, done: int, ask: Ask
) -> tuple[Token | None, str]:
    """The newest token of this lineage, of wherever decisions were kept; and a doubt about it.

    Where no epoch has left a manifest behind the last one that Spark logged, nobody has to be
    asked: that one is settled, and nothing else can have been decided.
    """
    entry = newest_entry(checkpoint)
    tokens = [] if entry is None or entry.token is None else [entry.token]
    epochs = sorted({m.epoch_of(path) for path in manifests})[-DECIDING_EPOCHS:]
    newest = {path: each for path, each in manifests.items() if m.epoch_of(path) in epochs}
    doubts = []
    for transactional_id in deciders(newest.values(), lineage):
        heard = ask(transactional_id, lineage)
        if heard.token is not None and heard.token.lineage == lineage:
            tokens.append(heard.token)
        else:
            doubts.append(heard.doubt or _no_token(transactional_id, heard.token))
    own = [token for token in tokens if token.lineage == lineage]
    last = max(own, key=lambda token: token.checkpoint_id, default=None)
    if len({each.manifest_path for each in own if each.checkpoint_id == _epoch_of(last)}) > 1:
        doubts.append(f"epoch {_epoch_of(last)} is decided in two places, with two manifests")
        return last, doubts[-1]
    if not doubts or epochs[-1] <= max(done, _epoch_of(last)):
        return last, ""
    return last, doubts[0]


def _epoch_of(token: Token | None) -> int:
    return -1 if token is None else token.checkpoint_id


def _no_token(transactional_id: str, found: Token | None) -> str:
    held = "no token" if found is None else f"a token of lineage {found.lineage}"
    return (
        f"Kafka decides for this checkpoint, and holds {held} of {transactional_id!r}: is it "
        f"another cluster that decides (--decider), or has another checkpoint taken over?"
    )


def _prefixes(manifests: Iterable[Manifest], lineage: str) -> frozenset[str]:
    """Every one that manifests prove, and that of a query on this checkpoint."""
    found = {default_prefix(lineage)}
    for manifest in manifests:
        if manifest.origin is None:
            found.add(manifest.producer.transactional_id)
        for each in manifest.committables:
            pooled = parse(each.name.rsplit(":", 2)[0])
            if pooled is not None and pooled.sink == each.sink:
                found.add(pooled.prefix)
    return frozenset(found)


def _planned_ms(checkpoint: Storage, epoch: int) -> int:
    """When Spark planned an epoch, as its own log has it; 0: it does not say."""
    lines = (checkpoint.get(f"offsets/{epoch}") or b"").decode(errors="replace").splitlines()
    try:
        return int(json.loads(lines[1])["batchTimestampMs"])
    except (IndexError, ValueError, KeyError, TypeError):
        return 0
