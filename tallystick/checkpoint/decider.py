"""The one decider of a checkpoint: who decides its epochs, from the first start on.

    tallystick/decider.json     {decided_by, transactional_id, cluster_id}

Invariants:
    * The file is created before the first fence and never changed (`Storage.put_new`): of two first
      starts with different deciders, one is refused before it has fenced or written anything.
    * A start with another decider is refused. So whoever runs asks, and fences, the only place
      where an epoch of this checkpoint can be decided.
"""

from tallystick.checkpoint.decision_log import newest_entry
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.epoch.manifest import CHECKPOINT, FOLDER, KAFKA, LOG, DeciderName
from tallystick.epoch.sealed import seal, unseal
from tallystick.errors import OptionError, StorageError
from tallystick.ports import Storage

PATH = f"{FOLDER}/decider.json"
VERSION = 1


def decider_of(checkpoint: Storage) -> DeciderName | None:
    """Return who decides a checkpoint; None if nothing can have been decided there.

    Where the file is missing, the newest manifests or the log of decisions name the decider.

    Raises:
        ManifestError: a file is damaged.
    """
    data = checkpoint.get(PATH)
    return _decode(data) if data is not None else _implied(checkpoint)


def claim(checkpoint: Storage, decider: DeciderName) -> None:
    """Make sure that this decider, and no other, decides the epochs of the checkpoint.

    Args:
        checkpoint: its location.
        decider: of the run that starts.

    Raises:
        OptionError: another one decides; nothing was fenced or written.
        StorageError: whether the file is there is unknown: claim again.
        ManifestError: a file is damaged.
    """
    data = checkpoint.get(PATH)
    if data is None:
        _refuse_another(checkpoint, _implied(checkpoint), decider)
        if checkpoint.put_new(PATH, seal(VERSION, decider._asdict())):
            return
        data = checkpoint.get(PATH)
        if data is None:
            raise StorageError(
                f"checkpoint {checkpoint.location}: {PATH} exists and cannot be read. Start again."
            )
    _refuse_another(checkpoint, _decode(data), decider)


def _implied(checkpoint: Storage) -> DeciderName | None:
    """Return the decider of a checkpoint without the file, as its manifests or its log tell."""
    folder = CheckpointFolder(checkpoint)
    for path in reversed(folder.manifest_paths()):
        manifest = folder.manifest(path)
        if manifest is None or manifest.origin is not None:
            continue  # removed since it was listed; or a savepoint's, which others decided
        if manifest.decided_by == CHECKPOINT:
            return LOG
        return DeciderName(KAFKA, manifest.producer.transactional_id)
    return None if newest_entry(checkpoint) is None else LOG


def _refuse_another(checkpoint: Storage, found: DeciderName | None, decider: DeciderName) -> None:
    if found is None or found == decider:
        return
    if found == decider._replace(cluster_id="") and found.decided_by == KAFKA:
        return  # manifests do not name the cluster
    raise OptionError(
        f"checkpoint {checkpoint.location}: its epochs are decided by {found}, and with these "
        f"settings they would be decided by {decider}. The decider of a checkpoint does not "
        f"change: which epoch was committed last is not asked elsewhere. Nothing was fenced or "
        f"written. Start as before (transactions=, transactional_id_prefix= and cluster of the "
        f"KafkaSink). Or, to change it: start once as before with availableNow, take a savepoint, "
        f"and restore that into a new checkpoint."
    )


def _decode(data: bytes) -> DeciderName:
    remedy = (
        "Who decides the epochs of this checkpoint cannot be told. Nothing was changed. Put back "
        "a whole copy of the checkpoint; or start from a new one, stating where to read from."
    )
    return unseal(data, PATH, VERSION, remedy, lambda held: DeciderName(**held))
