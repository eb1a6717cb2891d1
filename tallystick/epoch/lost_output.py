"""Output that was decided and can no longer be committed: run the epoch again, or ask a person."""

from tallystick.epoch.facts import CommittedEpoch, Identity
from tallystick.epoch.manifest import CHECKPOINT, Manifest
from tallystick.epoch.two_phase import Committable, Lost
from tallystick.errors import DataLossError, EpochAbortedError, OptionError
from tallystick.source.offsets import parse_source

SHOWN_MAX = 20


def is_replayable(committed: CommittedEpoch, lost: tuple[Lost, ...]) -> bool:
    """True if running the newest decided epoch again repeats nothing.

    So if nothing of it is visible, and the state that it went on from is still there.
    """
    manifest = committed.manifest
    if manifest is None or not is_invisible(manifest, lost):
        return False
    return committed.before is not None or not manifest.base_path


def is_invisible(manifest: Manifest, lost: tuple[Lost, ...]) -> bool:
    """True if all output is lost, with nothing in the transaction of a deciding producer."""
    if manifest.decided_by != CHECKPOINT or manifest.produced:
        return False
    return {each.committable for each in lost} == set(manifest.committables)


def accepting_word(manifest: Manifest) -> str:
    """Return what a person states to go on without the lost output of an epoch."""
    return f"lost-output-of-epoch-{manifest.checkpoint_id}"


def is_accepted(identity: Identity, manifest: Manifest) -> bool:
    """True if a person stated so."""
    return accepting_word(manifest) in identity.accepted


def error(
    identity: Identity, manifest: Manifest, lost: tuple[Lost, ...], *, is_logged: bool = False
) -> DataLossError:
    """Say which transactions are lost, with how many records, and of which input.

    `is_logged`: Spark has the epoch for done, as after a function that caught what a sink raised.
    """
    why = (
        "The function of foreachBatch caught what the sink raised, so Spark has logged the epoch "
        "as done and does not ask for it again."
        if is_logged
        else "The other output of the epoch is visible, and its state and positions count, so "
        "running it again would repeat records."
    )
    known = sum(each.committable.record_count for each in lost)
    shown = "; ".join(each.what for each in lost[:SHOWN_MAX])
    more = f"; and {len(lost) - SHOWN_MAX} more" if len(lost) > SHOWN_MAX else ""
    ends = [
        f"{partition} up to offset {offset}"
        for source in map(parse_source, manifest.sources)
        if source is not None
        for partition, offset in sorted(source.positions.items())
    ]
    more_ends = f" and {len(ends) - SHOWN_MAX} partitions more" if len(ends) > SHOWN_MAX else ""
    where = f" Its input: {', '.join(ends[:SHOWN_MAX])}{more_ends}." if ends else ""
    return DataLossError(
        f"pipeline {identity.pipeline!r}: epoch {manifest.checkpoint_id} was decided, and "
        f"{len(lost)} of its {len(manifest.committables)} transactions with {known} records were "
        f"aborted before they could be committed, by a timeout or by hand: {shown}{more}.{where} "
        f"{why} Write the lost records by other means (the offsets say "
        f"which input they come from); then start once with "
        f"accept={accepting_word(manifest)!r}. To make it less likely, give transactions a longer "
        f"timeout than the longest down time."
    )


def again_and_again(
    identity: Identity, manifest: Manifest, lost: tuple[Lost, ...]
) -> DataLossError | EpochAbortedError:
    """An epoch was lost as often as it was run; unless some of it is visible, nothing is amiss."""
    if not is_invisible(manifest, lost):
        return error(identity, manifest, lost)
    shown = "; ".join(each.what for each in lost[:SHOWN_MAX])
    return EpochAbortedError(
        f"pipeline {identity.pipeline!r}: epoch {manifest.checkpoint_id} was decided, and all of "
        f"its {len(lost)} transactions were aborted before they could be committed, by a timeout "
        f"or by hand, each time that it was run: {shown}. Nothing of it is visible. Give "
        f"transactions a longer timeout, and start again: the epoch runs again, nothing is lost "
        f"or repeated."
    )


def no_sinks(identity: Identity, decided: tuple[Committable, ...]) -> OptionError:
    """Sinks that have decided transactions are gone from the pipeline."""
    uids = sorted({each.sink for each in decided})
    return OptionError(
        f"pipeline {identity.pipeline!r}: checkpoint {identity.checkpoint} holds {len(decided)} "
        f"decided transactions of sinks that the pipeline does not have any more: "
        f"{', '.join(uids)}. They are prepared and have to be committed. Nothing was changed. Add "
        f"the sinks again, with these uids, for one start."
    )
