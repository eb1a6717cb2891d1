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
    """Abort what tasks of an epoch prepared, unless it is decided.

    A decision of a later epoch names none of it either: that follows only once all that earlier
    ones name is committed, and then an abort does nothing. Where it is not certain that the newest
    decision is known (another lineage's, an older one, a missing manifest), nothing is aborted.

    Args:
        prepared: by a run that can decide nothing more: it was replaced, or has fenced itself.
        decider: of the checkpoint.
        folder: the checkpoint's.
        sinks: where it was prepared.
        identity: of the run.

    Raises:
        TallystickError: it failed; the next recovery finds what is left.
    """
    decided = identity.own(decider.last_decision()) if prepared else None
    if decided is None or decided.checkpoint_id < prepared[0].checkpoint_id - 1:
        return
    if not decided.manifest_path:  # the token before the first epoch
        sinks.abort(prepared)
    elif (manifest := folder.manifest(decided.manifest_path)) is not None:
        sinks.abort(to_abort(prepared, manifest.committables))
