"""A checkpoint's view of transactions: what is decided last, what is prepared after it.

Reads, never changes anything; the pipeline may run meanwhile. Kafka is asked for its token where it
is the one that decides.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tallystick.checkpoint.decision_log import transactional_ids
from tallystick.checkpoint.folder import CheckpointFolder, existing_lineage
from tallystick.checkpoint.newest_epoch import Ask, Epochs
from tallystick.epoch.manifest import Manifest, epoch_of
from tallystick.epoch.transactional_ids import checkpoint_prefix, default_prefix, parse
from tallystick.epoch.two_phase import Owner
from tallystick.errors import OptionError
from tallystick.ports import Storage

SINKS_OF_A_KIND = 20
"""How many sinks without a uid are looked for, of a run that died before its first manifest."""
LOOKS_MAX = 3
"""How often a checkpoint is looked at that a running pipeline changes meanwhile."""


class StatedPipeline(NamedTuple):
    """The user's statement about a pipeline, besides its checkpoint.

    Args:
        pipeline: its name.
        prefix: of its transactional ids.
    """

    pipeline: str | None = None
    prefix: str | None = None

    @property
    def prefixes(self) -> frozenset[str]:
        """The prefixes of transactional ids that it means."""
        names = () if self.pipeline is None else (default_prefix(self.pipeline),)
        return frozenset(names if self.prefix is None else (*names, self.prefix))


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """The content of a checkpoint, with what Kafka knows of it.

    Args:
        location: the checkpoint's.
        pipeline: its name; "": no epoch has left a manifest.
        lineage: of the checkpoint.
        is_loops: it is a pipeline's; else a query's of Structured Streaming.
        prefixes: the ids and prefixes of ids that are this pipeline's.
        decided_path: the newest decided manifest; "": none is.
        decided: the same.
        doubt: why it is not known what is decided last; "": it is.
        undecided: manifests after it, by path: of attempts that failed, or wait for the decision.
    """

    location: str
    pipeline: str
    lineage: str
    is_loops: bool = True
    prefixes: frozenset[str] = frozenset()
    decided_path: str = ""
    decided: Manifest | None = None
    doubt: str = ""
    undecided: tuple[tuple[str, Manifest], ...] = ()


def look(
    checkpoint: Storage,
    ask: Ask,
    stated: StatedPipeline = StatedPipeline(),  # noqa: B008  a value
) -> CheckpointView:
    """Read what a checkpoint says now.

    Args:
        checkpoint: its location.
        ask: Kafka, for its token.
        stated: what the user says besides.

    Raises:
        OptionError: it is no checkpoint, or one of another pipeline.
        ManifestError: a manifest, or the log of decisions, is damaged.
    """
    for _ in range(LOOKS_MAX):
        view = _look(checkpoint, ask, stated)
        if not view.decided_path or view.decided is not None:
            return view
    return view


def owners_of(
    checkpoint: Storage, view: CheckpointView, uids: Iterable[str], system: str
) -> tuple[Owner, ...]:
    """Return the sinks that a pipeline may have in a system: those that manifests or the user name.

    And those that have no uid of their own: the kind, and a number.
    """
    numbered = (f"{system}-{number}" for number in range(1, SINKS_OF_A_KIND + 1))
    named = {each.sink for it in _manifests(checkpoint).values() for each in it.committables}
    uids = sorted({*named, *uids, *numbered})
    return tuple(Owner(view.pipeline, uid, view.lineage) for uid in uids)


def _look(checkpoint: Storage, ask: Ask, stated: StatedPipeline) -> CheckpointView:
    lineage, epochs = existing_lineage(CheckpointFolder(checkpoint)), Epochs(checkpoint)
    last = epochs.last(ask, lineage)
    manifests = _manifests(checkpoint)  # after the question: what is decided is among them
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
        doubt = f"epoch {epoch_of(path)} is decided last, and its manifest {path} is missing"
    newest = -1 if token is None else token.checkpoint_id
    prefixes = _prefixes(own.values(), lineage) | transactional_ids(checkpoint) | stated.prefixes
    return CheckpointView(
        location=checkpoint.location,
        pipeline=pipeline,
        lineage=lineage,
        is_loops=epochs.is_loops,
        prefixes=prefixes | {checkpoint_prefix(each, lineage) for each in prefixes},
        decided_path=path,
        decided=decided,
        doubt=doubt,
        undecided=tuple(
            (each, manifest)
            for each, manifest in own.items()
            if each != path and epoch_of(each) >= newest
        ),
    )


def _manifests(checkpoint: Storage) -> dict[str, Manifest]:
    """The retained manifests by path, of all attempts, oldest first."""
    folder = CheckpointFolder(checkpoint)
    return folder.manifests(folder.manifest_paths())


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
