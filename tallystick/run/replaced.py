"""The end of a replaced run: abort transactions prepared too late for the successor to find.

The successor looks through its sinks when it starts, and later with its epochs or now and again.
A query of Structured Streaming with nothing to read has no such moment, and readers would wait.
"""

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch.facts import Identity
from tallystick.epoch.two_phase import Committable, to_abort
from tallystick.ports import Decider, Participants


def abort_undecided(
    prepared: tuple[Committable, ...],
    decider: Decider,
    folder: CheckpointFolder,
    sinks: Participants,
    identity: Identity,
) -> None:
    """Abort the transactions that tasks of an epoch prepared, unless the epoch is decided.

    A later epoch's decision names none of them, but follows only once all transactions of earlier
    decisions are committed: an abort then does nothing. Where it is not certain that the newest
    decision is known (another lineage's, an older one, a missing manifest), nothing is aborted.

    Args:
        prepared: the transactions of a run that can decide nothing more: replaced, or self-fenced.
        decider: of the checkpoint.
        folder: the checkpoint's.
        sinks: of the transactions.
        identity: of the run.

    Raises:
        TallystickError: an abort failed; the next recovery finds the transactions left.
    """
    decided = identity.own(decider.last_decision()) if prepared else None
    if decided is None or decided.checkpoint_id < prepared[0].checkpoint_id - 1:
        return
    if not decided.manifest_path:  # the token before the first epoch
        sinks.abort(prepared)
    elif (manifest := folder.manifest(decided.manifest_path)) is not None:
        sinks.abort(to_abort(prepared, manifest.committables))
