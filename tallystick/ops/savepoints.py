"""Savepoints on storage: taken, described, restored, deleted, migrated to other key groups.

No command here needs Spark. Kafka is asked only where the checkpoint alone cannot say which of
several manifests of its newest epoch counts. A running pipeline need not stop, and knows nothing of
the copy: where it has removed a file before the file was copied, the newest epoch by then is taken.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar
from urllib.parse import quote

import pyarrow as pa

from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.forks import refuse_fork
from tallystick.checkpoint.local.store import open_store
from tallystick.checkpoint.newest import Ask, Epochs, Newest, newest_committed
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
from tallystick.checkpoint.state_files import chunks_of, contents_of, write_snapshot
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
from tallystick.state.catalog import StateFile, StepState, Version
from tallystick.state.compatibility import is_operator_state
from tallystick.state.entries import regrouped
from tallystick.state.key_groups import KeyGroupRange, check_parallelism
from tallystick.state.keys import HASH_VERSION, KeyCodec
from tallystick.state.overlay import StateView
from tallystick.storage.file_storage import FileStorage
from tallystick.storage.places import local_path

Result = TypeVar("Result")

TRIES_MAX = 5
"""Each copies only what is new since the one before, so they get shorter."""
TRY_PAUSE_S = 1.0
SNAPSHOT_BYTES = 32 << 20
"""About the size of a file that a migration writes."""


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
        checkpoint: the checkpoint to save.
        target: a folder of the savepoint's own, empty.
        epoch: an older one that is still retained, as when the newest has damaged files.
        ask_kafka: see `newest_committed`.
        pause_s: before another try, where the pipeline was faster.

    Raises:
        OptionError: the folder is in use, or see `newest_committed`.
        StateFileError: a file of state is missing or damaged, or the pipeline was faster each time;
            there is no savepoint.
    """
    refuse_fork(
        checkpoint,
        "A savepoint of it would carry its state into the output of the original: take one of the "
        "original, and start the program that was tried on that.",
    )
    _refuse_sparks_state(checkpoint)

    def save(new: NewFolder) -> Savepoint:
        savepoint = copied(checkpoint, newest_committed(checkpoint, ask_kafka, epoch), new)
        new.complete(savepoint)
        return savepoint

    with filled(target, "savepoint create") as new:
        return tried(checkpoint, partial(save, new), pause_s, is_newest=epoch is None)


def tried(
    checkpoint: Storage,
    save: Callable[[], Result],
    pause_s: float = TRY_PAUSE_S,
    *,
    is_newest: bool = True,
) -> Result:
    """Copy the newest epoch of a checkpoint, again where the pipeline was faster.

    Args:
        checkpoint: the checkpoint.
        save: looks for the epoch, and copies it.
        pause_s: before another try.
        is_newest: a later epoch will do as well.

    Raises:
        StateFileError: a file of state is missing or damaged, or the pipeline was faster each time.
    """
    for attempt in range(TRIES_MAX):
        if attempt:
            time.sleep(pause_s)
        listed = CheckpointFolder(checkpoint).files()
        try:
            return save()
        except (SupersededError, ManifestError) as error:
            if not is_newest or CheckpointFolder(checkpoint).files() == listed:
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


def copied(checkpoint: Storage, newest: Newest, new: NewFolder) -> Savepoint:
    """Copy the files of an epoch to a new folder, and return the savepoint that they make."""
    spark = _sparks_logs(checkpoint, newest.epoch)  # first: Spark may purge it during a long copy
    new.copy(checkpoint, newest.manifest.state)
    return Savepoint(
        name=name_of(new.storage),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        checkpoint=whole_uri(checkpoint.location),
        manifest_path=newest.manifest_path,
        manifest=newest.manifest,
        spark=spark,
    )


def _sparks_logs(checkpoint: Storage, epoch: int) -> dict[str, str]:
    """Return the entries of Spark's logs about an epoch; empty for an epoch of our own loop."""
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
    contents = {}
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
            contents[path] = data.decode()
        except UnicodeDecodeError:
            raise OptionError(
                f"checkpoint {checkpoint.location}: {path} is no text, and a savepoint holds no "
                f"others. Nothing was saved. Stop the query and copy the whole checkpoint folder."
            ) from None
    return contents


def read(location: Storage) -> Savepoint:
    """Return the savepoint in a folder.

    Raises:
        OptionError: the folder holds no savepoint.
        ManifestError: the savepoint is damaged.
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
    """Return the savepoints in a folder, with locations; or the savepoint that the folder is.

    In place of a savepoint that cannot be read (damaged, being deleted, or a neighbour that may be
    no savepoint) stands the error.
    """
    kept = FileStorage(parent)
    home = whole_uri(kept.location)
    is_local = local_path(home) is not None
    listed: list[tuple[str, Savepoint | TallystickError]] = []
    for name in ("", *kept.names("")):
        location = f"{home}/{quote(name) if is_local else name}".rstrip("/")
        try:
            folder = f"{name}/" if name else ""
            data = kept.get(folder + FILE)
            if data is not None:
                listed.append((location, decode(data, f"{location}/{FILE}")))
            elif kept.get(folder + TOMBSTONE) is not None:
                listed.append((location, OptionError(unfinished_deletion(location))))
        except TallystickError as error:
            listed.append((location, error))
    return listed


def restore(savepoint_at: Storage, checkpoint: Storage) -> Savepoint:
    """Make a new checkpoint that goes on from a savepoint.

    The seed is written first, and the folder's `metadata` last: a folder left by an interrupted
    call is refused, by its verdict.

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
        new.put_seed(seed)
        new.copy(savepoint_at, seed.state)
        for path, text in savepoint.spark.items():
            new.put(path, text.encode())
        new.begin(lineage)
    return savepoint


def migrate(
    source: Storage, target: Storage, max_parallelism: Mapping[str, int], scratch: Path
) -> Savepoint:
    """Copy a savepoint, with the state of some steps in other key groups.

    Every entry is read, put under its new key group, sorted on this host's disk, and written as
    snapshots: the whole state is rewritten, in bounded memory.

    All or nothing: files written before an error are removed again. Files of a killed process stay,
    and another attempt in the same folder is refused.

    Args:
        source: where the savepoint is; it stays as it is.
        target: an empty folder.
        max_parallelism: the new number of key groups, by the step's uid.
        scratch: a folder on a local disk, with room for the largest step's state.

    Returns:
        The new savepoint.

    Raises:
        OptionError: a step is unknown, a number is out of its bounds, or the folder is in use.
        StateFileError: a file of state is missing or damaged.
    """
    savepoint = read(source)
    state = savepoint.manifest.state
    uids = [step.uid for step in state]
    for uid, count in max_parallelism.items():
        check_parallelism(1, count)
        if uid not in uids:
            raise OptionError(
                f"savepoint {source.location} has no step {uid!r}: it has {', '.join(uids)}."
            )
        if any(step.uid == uid and is_operator_state(step) for step in state):
            raise OptionError(
                f"{uid!r} is operator state, which is not divided by key groups: it fits any "
                f"parallelism as it is. Leave it out."
            )
    moved: list[StepState] = []
    with filled(target, "savepoint migrate") as new:
        for step in state:
            if step.uid in max_parallelism:
                moved.append(_migrated_step(step, max_parallelism[step.uid], source, new, scratch))
            else:
                new.copy(source, [step])
                moved.append(step)
        manifest = replace(savepoint.manifest, state=tuple(moved))
        migrated = replace(savepoint, name=name_of(target), manifest=manifest)
        new.complete(migrated)
    return migrated


def write_step(
    saved: Savepoint,
    source: Storage,
    target: Storage,
    step: StepState,
    entries: Iterable[pa.RecordBatch],
    size: int,
    scratch: Path,
) -> None:
    """Copy a savepoint, with other state of one step; all or nothing, as `migrate`.

    Args:
        saved: what lies in `source`.
        source: where the savepoint is.
        target: an empty folder.
        step: the step with its key and its states, as they are declared from now on.
        entries: all entries of the step: batches of `ENTRIES`, sorted by key, in any order.
        size: about how many bytes they are.
        scratch: a folder on a local disk, with room for them.

    Raises:
        OptionError: the folder is in use.
        StateFileError: a file of another step is missing or damaged.
    """
    epoch = saved.manifest.checkpoint_id if step.version is None else step.version.epoch
    state: list[StepState] = []
    with filled(target, "write_state") as new:
        for other in saved.manifest.state:
            if other.uid == step.uid:
                state.append(_rewritten(step, epoch, entries, size, new, scratch))
            else:
                new.copy(source, [other])
                state.append(other)
        manifest = replace(saved.manifest, state=tuple(state))
        new.complete(replace(saved, name=name_of(target), manifest=manifest))


def _migrated_step(
    step: StepState, max_parallelism: int, source: Storage, new: NewFolder, scratch: Path
) -> StepState:
    after = replace(
        step, max_parallelism=max_parallelism, parallelism=min(step.parallelism, max_parallelism)
    )
    if step.version is None:
        return replace(after, hash_version=HASH_VERSION, files=(), schema="", former=())
    size = sum(file.size for file in step.files)
    entries = _entries_of(step, max_parallelism, source)
    return _rewritten(after, step.version.epoch, entries, size, new, scratch)


def _rewritten(
    step: StepState,
    epoch: int,
    entries: Iterable[pa.RecordBatch],
    size: int,
    new: NewFolder,
    scratch: Path,
) -> StepState:
    """Return the step with the given entries as its whole state, in new files."""
    version = Version(epoch, uuid.uuid4().hex)
    everything = KeyGroupRange(0, step.max_parallelism - 1)
    files: list[StateFile] = []
    with TemporaryDirectory(dir=scratch, prefix="tallystick-migrate-") as folder:
        store = open_store(Path(folder), "migration", step.uid, everything)
        done = store.apply(None, version, entries)
        assert done, "the folder is nobody else's"
        with store.view(version) as view:
            assert view is not None, "just written"
            for file in _snapshots(step, version, size, view, new.storage):
                new.will_have(file.path)
                files.append(file)
    return replace(
        step,
        hash_version=HASH_VERSION,
        files=tuple(files),
        trail=(version,),
        schema="",  # every file is new
        former=(),
    )


def _entries_of(step: StepState, max_parallelism: int, source: Storage) -> Iterator[pa.RecordBatch]:
    codec = KeyCodec.from_text(step.key_schema)
    for groups in chunks_of(step, KeyGroupRange(0, step.max_parallelism - 1)):
        entries = contents_of(step, groups, source)
        if entries.num_rows:
            yield regrouped(entries, codec, max_parallelism)


def _snapshots(
    step: StepState, version: Version, size: int, view: StateView, target: Storage
) -> Iterator[StateFile]:
    count = max(1, min(step.max_parallelism, size // SNAPSHOT_BYTES))
    for index, groups in enumerate(KeyGroupRange(0, step.max_parallelism - 1).parts(count)):
        nonce = uuid.uuid4().hex[:16]
        yield write_snapshot(
            target,
            step.uid,
            version.epoch,
            index,
            nonce,
            view,
            groups,
            state_ids=[field.state_id for field in step.fields],
        )


def delete(savepoint_at: Storage) -> Savepoint:
    """Remove a savepoint.

    Only the files that the savepoint names: other files in its folder belong to others. The
    description is renamed first and removed last: after an interruption the folder is no longer a
    savepoint, and the deletion can be repeated.

    Args:
        savepoint_at: where it is.

    Returns:
        What was deleted.

    Raises:
        OptionError: the folder holds no savepoint, or a checkpoint too, or another command is at
            work there.
        ManifestError: the savepoint's description is damaged.
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
