"""The epoch that a checkpoint can go on from, by `newest_epoch`; or the error if none exists."""

from typing import NamedTuple

from tallystick.checkpoint.newest_epoch import Ask, Epochs, ask_nobody, logged_decision
from tallystick.epoch.manifest import Manifest
from tallystick.errors import DataLossError, ManifestError, OptionError
from tallystick.ports import Storage


class Newest(NamedTuple):
    """The newest epoch of a checkpoint that is certainly settled."""

    epoch: int
    manifest_path: str
    manifest: Manifest


def newest_committed(
    checkpoint: Storage, ask: Ask | None = None, wanted: int | None = None
) -> Newest:
    """Return the epoch that the checkpoint can go on from: the newest settled one, or `wanted`.

    Args:
        checkpoint: its location.
        ask: asks Kafka; None: it cannot be asked.
        wanted: an older epoch, whose manifest is still there.

    Raises:
        DataLossError: a call of the sink failed in it, and the function of foreachBatch went on.
        OptionError: there is no settled epoch, or not the wanted one; or Kafka has to be asked, and
            cannot be.
        ManifestError: the epoch's manifest is missing or damaged.
        DataLossError: Kafka does not report what is decided last.
    """
    epochs = Epochs(checkpoint)
    refuse_nothing_settled(checkpoint, epochs)
    epoch, path = epochs.newest_written(), ""
    if wanted is not None and epochs.is_settled(wanted):
        epoch = wanted
    elif epochs.is_loops and epochs.newest_begun > epoch:
        last = epochs.last(ask or ask_nobody, epochs.lineage)
        if last.doubt:
            raise _not_told(checkpoint, epochs, last.doubt, ask)
        epoch, path = last.settled, last.settled_path
    if wanted not in (None, epoch):
        raise OptionError(
            f"checkpoint {checkpoint.location}: it has no committed epoch {wanted}; the "
            f"newest is {epoch}. `tallystick inspect` shows those that are retained."
            f"{_not_settled(checkpoint, wanted)}"
        )
    path = path or _counting(checkpoint, epochs, epoch, ask)
    if doubts := epochs.doubts(path):
        raise call_failed(checkpoint, epoch, doubts)
    if epochs.is_denied(path, ask or ask_nobody):
        raise DataLossError(
            f"checkpoint {checkpoint.location}: {never_committed(epoch, path)} Nothing was changed."
        )
    return Newest(epoch, path, epochs.manifest(path))


def refuse_nothing_settled(checkpoint: Storage, epochs: Epochs) -> None:
    """Raise OptionError where no epoch is settled."""
    if epochs.settled() < 0:
        raise OptionError(
            f"{checkpoint.location} holds no committed epoch: expected the checkpoint folder of a "
            f"pipeline that has run. Check the path.{_not_settled(checkpoint, None)}"
        )


def call_failed(checkpoint: Storage, epoch: int, notes: list[str]) -> DataLossError:
    """Return the error for an epoch that Spark has logged as done, and of which a call failed."""
    return DataLossError(
        f"checkpoint {checkpoint.location}: Spark logged epoch {epoch} as done, but a call of its "
        f"sink failed or was refused ({', '.join(notes)}): whether all its rows are in the output "
        f"is not known here. Start the query, with something to read: that commits what is left, "
        f"or says what is missing; then try again."
    )


def never_committed(epoch: int, path: str) -> str:
    """Return the message about a manifest that its decider denies; see `Epochs.is_denied`."""
    return (
        f"Spark logged epoch {epoch} as done, and its decider knows of earlier epochs only. As a "
        f"rule manifest {path} was never committed then: a run was killed before that, and the "
        f"function of foreachBatch has left the micro-batch out since; its rows are not in the "
        f"output. Or the decider was set back, or is another cluster. Start the query, with "
        f"something to read: it says which, and how to go on."
    )


def newest_decided(checkpoint: Storage, ask: Ask | None = None) -> int:
    """Return the newest epoch that is decided, settled or not; -1 where it is unknown."""
    epochs = Epochs(checkpoint)
    token = epochs.last(ask or ask_nobody, epochs.lineage).decided
    return -1 if token is None else token.checkpoint_id


def _counting(checkpoint: Storage, epochs: Epochs, epoch: int, ask: Ask | None) -> str:
    """Return the manifest of a settled epoch that counts; ask Kafka where nothing else shows it."""
    paths = epochs.of(epoch)
    if not paths and (failures := epochs.failures(epoch)):
        raise call_failed(checkpoint, epoch, failures)
    if not paths:
        raise ManifestError(
            f"checkpoint {checkpoint.location}: epoch {epoch} is done, as Spark's log has it, but "
            f"there is no manifest of it: the epoch is no longer retained, or files were "
            f"removed, or it is no checkpoint of a Tallystick pipeline. `tallystick inspect` shows "
            f"what there is."
        )
    path = epochs.counting(epoch)
    if path:
        return path
    several = f"checkpoint {checkpoint.location} has {len(paths)} manifests of epoch {epoch}"
    if ask is None:
        raise OptionError(
            f"{several}, since an attempt of it failed: only Kafka knows which one counts. Try "
            f"again after the next epoch; or let `tallystick savepoint create` ask Kafka, by "
            f"--bootstrap-servers, and use the savepoint."
        )
    last = epochs.last(ask, epochs.manifest(paths[0]).lineage)
    token, doubt = last.decided, last.doubt
    if token is not None and token.checkpoint_id > epoch:  # the pipeline runs
        path = Epochs(checkpoint).counting(epoch)
    elif token is not None and token.manifest_path in paths:
        path = token.manifest_path
    if not path:
        answer = (
            "nothing" if token is None else f"epoch {token.checkpoint_id} of {token.checkpoint}"
        )
        raise DataLossError(
            f"{several}, and Kafka, asked for what pipeline {epochs.manifest(paths[0]).pipeline!r} "
            f"committed last, says {answer}{doubt and f' ({doubt})'}: which one counts is "
            f"unknown. Start the pipeline, so that it finishes an epoch; then try again."
        )
    return path


def _not_told(
    checkpoint: Storage, epochs: Epochs, doubt: str, ask: Ask | None
) -> OptionError | DataLossError:
    """Return the error where nothing proves whether the newest epoch of a loop is decided."""
    known, begun = epochs.settled(), epochs.newest_begun
    what = (
        f"checkpoint {checkpoint.location}: epoch {begun} has left a manifest, and what is decided "
        f"last is unknown: {doubt}"
    )
    if ask is None:
        return OptionError(
            f"{what}. Give the servers of the cluster that the pipeline writes to; or stop the "
            f"pipeline, or wait until it has nothing to read, for then it notes what is done; or "
            f"save epoch {known} (`tallystick savepoint create --epoch {known}`)."
        )
    return DataLossError(
        f"{what}. Nothing was changed. Give the servers of the cluster that decides; or start the "
        f"pipeline, so that it finishes an epoch; then try again."
    )


def _not_settled(checkpoint: Storage, epoch: int | None) -> str:
    """Return a note on an epoch that is decided and may not be settled; None: the newest epoch.

    Settling takes the pipeline's sinks, so only the pipeline can do it.
    """
    token = logged_decision(checkpoint)
    if token is None or epoch not in (None, token.checkpoint_id):
        return ""
    return (
        f" Epoch {token.checkpoint_id} is decided, and not settled: what its sinks have prepared "
        f"may not be committed in all of them. Start the pipeline once, which settles it."
    )
