"""Notes about what a user's own `foreachBatch` function did with a micro-batch.

Spark logs a micro-batch as done once the function returns, even if our part in it failed. Two
things cannot be seen afterwards, so they are written down beside the manifests while they happen:

    failed-N         a call for epoch N failed: if the function returns all the same, and the epoch
                     was not committed, its rows are lost
    failed-N-M       the same, after manifest M of the epoch: what it decided may not be committed
    partial-N-M      the function called a sink again after manifest M: those rows are missing

Runs of one checkpoint share these names, so a note about M is written by who knows what became of
M. A second call that does not know writes one about each manifest of its epoch: an earlier run may
have committed it. A note that a call failed puts all manifests of its epoch in doubt: an earlier
run may have left one whose fate that call did not get to know. It is removed when the epoch is
settled after all, or a later one is committed.

A loop of our own leaves one when it ends in order, so that a sink may be taken out of a pipeline,
and that a token which is set back shows:

    settled-N-M      what manifest M of epoch N decided is committed in all sinks

It leaves one more in each checkpoint that it runs, for those who look at it from outside:

    own-loop         epochs are planned here that Spark's log knows nothing of
"""

import re
from collections.abc import Callable, Iterable, Iterator

from tallystick.epoch.manifest import FOLDER, epoch_of, manifests

OWN_LOOP = f"{FOLDER}/own-loop"
_NOTE = re.compile(rf"{FOLDER}/(partial|failed|settled)-(\d+)(?:-.+)?", re.ASCII)


def partial_path(manifest_path: str) -> str:
    """Return the path of the note that another call was refused after a manifest."""
    return f"{FOLDER}/partial-{_name(manifest_path)}"


def settled_path(manifest_path: str) -> str:
    """Return the path of the note that a manifest's epoch is committed in all sinks."""
    return f"{FOLDER}/settled-{_name(manifest_path)}"


def failure_paths(
    paths: Iterable[str], checkpoint_id: int, manifest_path: str, *, is_second: bool
) -> list[str]:
    """Return the paths of the notes that a call of a sink failed.

    Args:
        paths: the files of the folder; needed for a second call without a manifest alone.
        checkpoint_id: the epoch that the sink was called for.
        manifest_path: of its manifest if the run knows that it is committed, else "".
        is_second: the sink was called for this epoch before.
    """
    if not is_second:
        return [failed_path(checkpoint_id, manifest_path)]
    if manifest_path:
        return [partial_path(manifest_path)]
    undecided = (path for path in manifests(paths) if epoch_of(path) == checkpoint_id)
    return [failed_path(checkpoint_id), *map(partial_path, undecided)]


def failed_path(checkpoint_id: int, manifest_path: str = "") -> str:
    """Return the path of the note that a call failed: after a manifest, or before any."""
    return f"{FOLDER}/failed-{_name(manifest_path) or f'{checkpoint_id:012d}'}"


def _name(manifest_path: str) -> str:
    return manifest_path.rpartition("/")[2].removesuffix(".json")


def traces_between(paths: Iterable[str], first: int, stop: int) -> tuple[int, ...]:
    """Return the epochs in a range that were begun, by their manifests and notes.

    An epoch is committed only after its manifest is durable. So one without a trace was never
    committed, and no call for it failed: the function left it out.
    """
    listed = list(paths)
    begun = {epoch_of(path) for path in manifests(listed)}
    begun |= {epoch for _, kind, epoch in _notes(listed) if kind != "settled"}
    return tuple(sorted(epoch for epoch in begun if first <= epoch < stop))


def failures(paths: Iterable[str], epoch: int) -> list[str]:
    """Return the notes that a call for an epoch failed, after a manifest or before any."""
    return [
        path
        for path, kind, noted_epoch in _notes(paths)
        if kind == "failed" and noted_epoch == epoch
    ]


def doubts(paths: Iterable[str], manifest_path: str, base_of: Callable[[str], str]) -> list[str]:
    """Return the notes that put a manifest in doubt: of failed calls, or of a refused second call.

    Spark may have logged the epoch as done all the same. Once a later manifest goes on from this
    one, no doubt is left: the epoch was committed, and what was missing made good, or stated to be.

    Args:
        paths: the files of the folder.
        manifest_path: the manifest's, one of them.
        base_of: returns the path of the manifest that another one goes on from.
    """
    listed, epoch = list(paths), epoch_of(manifest_path)
    notes = failures(listed, epoch)
    notes += [path for path in listed if path == partial_path(manifest_path)]
    later = (path for path in manifests(listed) if epoch_of(path) > epoch)
    if notes and any(base_of(path) == manifest_path for path in later):
        return []
    return notes


def newest_settled(paths: Iterable[str]) -> int:
    """Return the newest epoch that a run noted as settled; -1 if there is none."""
    return max((epoch for _, kind, epoch in _notes(paths) if kind == "settled"), default=-1)


def settled_notes(paths: Iterable[str], committed_epoch: int) -> list[str]:
    """Return the notes about epochs before the committed one, which are no longer needed."""
    return [path for path, _, epoch in _notes(paths) if epoch < committed_epoch]


def _notes(paths: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    for path in paths:
        if note := _NOTE.fullmatch(path):
            yield path, note[1], int(note[2])
