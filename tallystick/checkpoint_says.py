"""What a checkpoint says of transactions: what is decided last, what is prepared behind it.

Reads, never changes anything; the pipeline may run meanwhile. Kafka is asked for its token where it
is the one that decides.
"""

import json
from collections.abc import Iterable
from typing import NamedTuple

from tallystick.checkpoint import manifest as m
from tallystick.checkpoint.manifest import Manifest
from tallystick.decision_log import Entry, kafka_places, transactional_ids
from tallystick.errors import OptionError
from tallystick.newest_epoch import Ask, Epochs, deciders
from tallystick.ports import Storage
from tallystick.sink.transaction import Token
from tallystick.sink.transactional_ids import checkpoint_prefix, default_prefix, parse
from tallystick.sink.two_phase import Owner
from tallystick.transactions import Told

SINKS_OF_A_KIND = 20
"""So many sinks without a uid are looked for, of a run that died before its first manifest."""
LOOKS_MAX = 3
"""How often a checkpoint is looked at that a running pipeline changes meanwhile."""


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
            f"query. Check the path."
        ) from None


def _look(checkpoint: Storage, ask: Ask, stated: Stated) -> Told:
    lineage, epochs = lineage_in(checkpoint), Epochs(checkpoint)
    last = epochs.last(ask, lineage)
    manifests = newest_manifests(checkpoint)  # behind the question: what is decided is among them
    own = {path: each for path, each in manifests.items() if each.lineage == lineage}
    pipeline = next((each.pipeline for each in reversed(own.values())), stated.pipeline or "")
    if stated.pipeline not in (None, pipeline):
        raise OptionError(
            f"checkpoint {checkpoint.location} is one of pipeline {pipeline!r}, and --pipeline "
            f"names {stated.pipeline!r}: give the checkpoint of that one."
        )
    token, doubt = last.decided, last.doubt
    path = "" if token is None else token.manifest_path
    decided = own.get(path)
    if path and decided is None:
        doubt = f"epoch {m.epoch_of(path)} is decided last, and its manifest {path} is missing"
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
        under_way=epochs.under_way,
        done=last.settled,
        planned_ms=0 if epochs.is_loops else _planned_ms(checkpoint, epochs.newest_begun),
    )


def _epoch_of(token: Token | None) -> int:
    return -1 if token is None else token.checkpoint_id


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
