"""Notes about what a user's own `foreachBatch` function did with a micro-batch.

Spark logs a micro-batch as done once the function returns, whatever became of our part in it. Two
things cannot be seen afterwards, so they are written down beside the manifests while they happen:

    partial-N   the function called a sink again after epoch N was committed: those rows are missing
    failed-N    the call for epoch N failed; a function that returns all the same loses its rows

A loop of our own leaves one when it ends in order, so that a sink may be taken out of a pipeline:

    settled-N   epoch N is committed in all sinks
"""

import re
from collections.abc import Iterable, Iterator

from tallystick.checkpoint.manifest import FOLDER, epoch_of, manifests
from tallystick.errors import SecondCallError

_NOTE = re.compile(rf"{FOLDER}/(partial|failed|settled)-(\d+)", re.ASCII)


def partial_path(checkpoint_id: int) -> str:
    """Return the path of the note that a second call for an epoch was refused."""
    return f"{FOLDER}/partial-{checkpoint_id:012d}"


def settled_path(checkpoint_id: int) -> str:
    """Return the path of the note that an epoch is committed in all sinks."""
    return f"{FOLDER}/settled-{checkpoint_id:012d}"


def failed_path(checkpoint_id: int) -> str:
    """Return the path of the note that the call for an epoch failed."""
    return f"{FOLDER}/failed-{checkpoint_id:012d}"


def traces_between(paths: Iterable[str], first: int, stop: int) -> tuple[int, ...]:
    """Return the epochs in a range that were begun, by their manifests and notes of failure.

    An epoch is committed only after its manifest is durable. So one without a trace was never
    committed, and no call for it failed: the function left it out.
    """
    listed = list(paths)
    begun = {epoch_of(path) for path in manifests(listed)}
    begun |= {epoch for _, kind, epoch in _notes(listed) if kind == "failed"}
    return tuple(sorted(epoch for epoch in begun if first <= epoch < stop))


def settled_notes(paths: Iterable[str], committed_epoch: int) -> list[str]:
    """Return the notes about epochs before the committed one: nothing asks for them any more."""
    return [path for path, _, epoch in _notes(paths) if epoch < committed_epoch]


def notes_of(paths: Iterable[str], checkpoint_id: int) -> list[str]:
    """Return the notes about an epoch; once it is run again, they are about nothing."""
    return [path for path, _, epoch in _notes(paths) if epoch == checkpoint_id]


def _notes(paths: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    for path in paths:
        if note := _NOTE.fullmatch(path):
            yield path, note[1], int(note[2])


def second_call(pipeline: str, checkpoint_id: int, whose: str = "the sink") -> SecondCallError:
    """Return the refusal of another call in a micro-batch whose first call has been taken."""
    return SecondCallError(
        f"pipeline {pipeline!r}: the function of foreachBatch called {whose} a second time in "
        f"micro-batch {checkpoint_id}. One call is one transaction: the first one's rows are "
        f"committed, those of the second call are not written. Write all rows of a micro-batch "
        f"with one call of one sink: union the DataFrames, with a column 'topic' where they go to "
        f"several topics (topic=None, token_topic=…). The next start names what to do about "
        f"micro-batch {checkpoint_id}."
    )
