"""Savepoints on storage: taken of a checkpoint, described, restored into a new one, deleted.

None of it needs Spark. Kafka is asked only where the checkpoint alone cannot say which of several
manifests of its newest epoch counts. A running pipeline need not stop, and knows nothing of it:
where it has removed a file before that was copied, the then newest epoch is taken.
"""

import time
import uuid
from datetime import UTC, datetime
from urllib.parse import quote

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.newest_committed import Newest, newest_committed
from tallystick.checkpoint.newest_epoch import Ask, Epochs
from tallystick.checkpoint.savepoint_folder import (
    DELETION,
    NewFolder,
    SupersededError,
    files_of,
    filled,
    marked,
    name_of,
    whole_uri,
)
from tallystick.epoch import manifest
from tallystick.epoch.savepoint import (
    FILE,
    TOMBSTONE,
    Savepoint,
    decode,
    is_sources_path,
    log_paths,
    seed_of,
    unfinished_deletion,
)
from tallystick.errors import ManifestError, OptionError, StateFileError, TallystickError
from tallystick.ports import Storage
from tallystick.storage.file_storage import FileStorage, local_path

TRIES_MAX = 5
"""Each copies only what is new since the one before, so they get shorter."""
TRY_PAUSE_S = 1.0


def create(
    checkpoint: Storage,
    target: Storage,
    *,
    epoch: int | None = None,
    ask_kafka: Ask | None = None,
    pause_s: float = TRY_PAUSE_S,
) -> Savepoint:
    """Copy the newest committed epoch of a checkpoint, whether its pipeline runs or not.

    Args:
        checkpoint: what is saved.
        target: a folder of the savepoint's own, empty.
        epoch: an older one that is still retained, as when the newest has damaged files.
        ask_kafka: see `newest_committed`.
        pause_s: before another try, where the pipeline was faster.

    Raises:
        OptionError: the folder is in use, or see `newest_committed`.
        StateFileError: a file of state is missing or damaged, or the pipeline was faster each time;
            there is no savepoint.
    """
    _refuse_sparks_state(checkpoint)
    with filled(target, "savepoint create") as new:
        for attempt in range(TRIES_MAX):
            if attempt:
                time.sleep(pause_s)
            listed = CheckpointFolder(checkpoint).files()
            try:
                return _save(checkpoint, newest_committed(checkpoint, ask_kafka, epoch), new)
            except (SupersededError, ManifestError) as error:
                if epoch is not None or CheckpointFolder(checkpoint).files() == listed:
                    raise  # no later epoch has replaced it: it is missing
                gone = error
        raise StateFileError(
            f"checkpoint {checkpoint.location}: in {TRIES_MAX} tries its pipeline removed what was "
            f"to be copied before it was; the last time: {gone}. Nothing was saved. Stop the "
            f"pipeline meanwhile, or name a folder that can be written to faster."
        )


def _refuse_sparks_state(checkpoint: Storage) -> None:
    if CheckpointFolder(checkpoint).has_sparks_state:
        raise OptionError(
            f"checkpoint {checkpoint.location} has a folder state: its query has state of Spark's "
            f"own, which a savepoint does not hold. Nothing was saved. Stop the query and copy the "
            f"whole checkpoint folder."
        )


def _save(checkpoint: Storage, newest: Newest, new: NewFolder) -> Savepoint:
    spark = _sparks_logs(checkpoint, newest.epoch)  # first: Spark may purge it during a long copy
    new.copy(checkpoint, newest.manifest.state)
    savepoint = Savepoint(
        name=name_of(new.storage),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        checkpoint=whole_uri(checkpoint.location),
        manifest_path=newest.manifest_path,
        manifest=newest.manifest,
        spark=spark,
    )
    new.complete(savepoint)
    return savepoint


def _sparks_logs(checkpoint: Storage, epoch: int) -> dict[str, str]:
    """Spark's entries about an epoch that it has run; none about one of a loop of our own."""
    folder = CheckpointFolder(checkpoint)
    if epoch not in folder.done_by_spark() and Epochs(checkpoint).is_loops:
        return {}
    sources = folder.files_of_sparks_sources()
    strange = [path for path in sources if not is_sources_path(path)]
    if strange:
        raise OptionError(
            f"checkpoint {checkpoint.location} has {strange[0]!r}: expected of a source files "
            f"sources/<number>/<name>, and a savepoint holds no others. Nothing was saved. Stop "
            f"the query and copy the whole checkpoint folder."
        )
    found = {}
    for path in (*log_paths(epoch), *sources):
        data = checkpoint.get(path)
        if data is None:
            raise SupersededError(
                f"{path} is missing from checkpoint {checkpoint.location}: Spark keeps the entries "
                f"of a hundred micro-batches, with those that a function of foreachBatch leaves "
                f"out. Try again when one has been written; or stop the query and copy the whole "
                f"checkpoint folder."
            )
        try:
            found[path] = data.decode()
        except UnicodeDecodeError:
            raise OptionError(
                f"checkpoint {checkpoint.location}: {path} is no text, and a savepoint holds no "
                f"others. Nothing was saved. Stop the query and copy the whole checkpoint folder."
            ) from None
    return found


def read(location: Storage) -> Savepoint:
    """The savepoint in a folder.

    Raises:
        OptionError: there is none.
        ManifestError: it is damaged.
    """
    return decode(_description(location), f"{location.location}/{FILE}")


def _description(location: Storage, *, or_tombstone: bool = False) -> bytes:
    data = location.get(FILE)
    if data is not None:
        return data
    data = location.get(TOMBSTONE)
    if data is None:
        raise OptionError(
            f"{location.location} holds no savepoint (no {FILE}): `tallystick savepoint list` "
            f"shows those in a folder."
        )
    if not or_tombstone:
        raise OptionError(unfinished_deletion(location.location))
    return data


def find(parent: str) -> list[tuple[str, Savepoint | TallystickError]]:
    """The savepoints in a folder, with their locations; a savepoint's own folder has that one.

    Of what cannot be read, a damaged one, one that is being deleted or a neighbour that may be
    none, the error.
    """
    kept = FileStorage(parent)
    home = whole_uri(kept.location)
    is_local = local_path(home) is not None
    found: list[tuple[str, Savepoint | TallystickError]] = []
    for name in ("", *kept.names("")):
        location = f"{home}/{quote(name) if is_local else name}".rstrip("/")
        try:
            folder = f"{name}/" if name else ""
            data = kept.get(folder + FILE)
            if data is not None:
                found.append((location, decode(data, f"{location}/{FILE}")))
            elif kept.get(folder + TOMBSTONE) is not None:
                found.append((location, OptionError(unfinished_deletion(location))))
        except TallystickError as error:
            found.append((location, error))
    return found


def restore(savepoint_at: Storage, checkpoint: Storage) -> Savepoint:
    """Make a new checkpoint that goes on from a savepoint.

    The seed is written first, and the folder's `metadata` last: what was interrupted in between is
    refused, by its verdict.

    Args:
        savepoint_at: where the savepoint is.
        checkpoint: the new one's location, an empty folder.

    Returns:
        What was restored.

    Raises:
        OptionError: the folder is not empty, or there is no savepoint.
        StateFileError: a file of state is missing or damaged.
    """
    savepoint = read(savepoint_at)
    lineage = str(uuid.uuid4())
    with filled(checkpoint, "savepoint restore") as new:
        seed = seed_of(savepoint, whole_uri(savepoint_at.location), lineage)
        new.put(
            manifest.manifest_path(seed, f"{manifest.SEED}{uuid.uuid4().hex[:12]}"), seed.encode()
        )
        new.copy(savepoint_at, seed.state)
        for path, text in savepoint.spark.items():
            new.put(path, text.encode())
        new.begin(lineage)
    return savepoint


def delete(savepoint_at: Storage) -> Savepoint:
    """Remove a savepoint.

    Only what the savepoint names: other files in its folder are somebody else's. Its description
    goes last, and has another name from the beginning: what was interrupted is no savepoint any
    more, and can be done again.

    Args:
        savepoint_at: where it is.

    Returns:
        What was deleted.

    Raises:
        OptionError: there is none; or it is a checkpoint too; or another command is at work there.
        ManifestError: its description is damaged.
    """
    _description(savepoint_at, or_tombstone=True)  # no marker where there is no savepoint
    with marked(savepoint_at, DELETION):
        data = _description(savepoint_at, or_tombstone=True)
        savepoint = decode(data, f"{savepoint_at.location}/{FILE}")
        if CheckpointFolder(savepoint_at).is_begun:
            raise OptionError(
                f"{savepoint_at.location} is a checkpoint too: what the savepoint names may be its "
                f"state. Nothing was removed. If only the savepoint is to go, remove {FILE} by "
                f"hand."
            )
        savepoint_at.put(TOMBSTONE, data)
        savepoint_at.delete(FILE)
        for file in files_of(savepoint.manifest.state):
            savepoint_at.delete(file.path)
    savepoint_at.delete(TOMBSTONE)  # after the marker: a deletion that is cut off is known by it
    return savepoint
