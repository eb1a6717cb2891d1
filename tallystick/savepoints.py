"""Savepoints on storage: taken of a checkpoint, described, restored into a new one, deleted.

None of it needs Spark. Kafka is asked only where the checkpoint alone cannot say which of several
manifests of its newest epoch counts. A running pipeline need not stop: what vanishes while it is
copied was superseded, and the newest epoch is taken anew.
"""

import json
import logging
import time
import uuid
from dataclasses import replace
from urllib.parse import quote

from tallystick.checkpoint import manifest as m
from tallystick.checkpoint import savepoint as s
from tallystick.checkpoint.retention import EPOCHS_RETAINED, retained
from tallystick.checkpoint.savepoint import Savepoint
from tallystick.errors import (
    ManifestError,
    OptionError,
    StateFileError,
    StorageError,
    TallystickError,
)
from tallystick.newest_committed import Newest, newest_committed
from tallystick.newest_epoch import Ask, Epochs
from tallystick.ports import Storage
from tallystick.savepoint_claims import claims_of, now, own_claim, put_claim, refuse_in_use
from tallystick.savepoint_files import (
    SupersededError,
    check_files,
    copy_files,
    files_of,
    is_own,
    name_of,
    place,
    referable,
    uri_in,
    whole_uri,
)
from tallystick.savepoint_target import (
    Written,
    all_or_none,
    held_to_delete,
    put_description,
    refuse_at_work,
    remove,
    taken,
)
from tallystick.state.handles import FOLDER as STATE_FOLDER
from tallystick.state.handles import StepState
from tallystick.storage import FileStorage, local_path, shown

logger = logging.getLogger(__name__)

TRIES_MAX = 5
TRY_PAUSE_S = 1.0


def create(
    checkpoint: Storage,
    target: Storage,
    *,
    reference: bool = False,
    epoch: int | None = None,
    ask_kafka: Ask | None = None,
    pause_s: float = TRY_PAUSE_S,
) -> Savepoint:
    """Save the newest committed epoch of a checkpoint, whether its pipeline runs or not.

    Args:
        checkpoint: what is saved.
        target: a folder of the savepoint's own, empty.
        reference: name the checkpoint's files of state instead of copying them, and claim them.
        epoch: an older one that is still retained, as when the newest has damaged files.
        ask_kafka: see `newest_committed`.
        pause_s: before another try, where the pipeline was faster.

    Raises:
        OptionError: the folder is in use, or see `newest_committed`.
        StateFileError: a file of state is missing or damaged; there is no savepoint.
    """
    holder = referable(target)
    _refuse_sparks_state(checkpoint)
    with taken(target, "savepoint create"):
        for claim in claims_of(checkpoint, holder, only_tries=True):  # that were killed
            checkpoint.delete(claim)
        for attempt in range(TRIES_MAX):
            newest = newest_committed(checkpoint, ask_kafka, epoch)
            try:
                return _create(checkpoint, target, newest, reference)
            except SupersededError as error:
                is_same = newest_committed(checkpoint, ask_kafka, epoch).epoch == newest.epoch
                if is_same or attempt == TRIES_MAX - 1:
                    raise StateFileError(str(error)) from None
                time.sleep(pause_s)
    raise AssertionError("the last try raises")


def _refuse_sparks_state(checkpoint: Storage) -> None:
    if checkpoint.names("state"):
        raise OptionError(
            f"checkpoint {checkpoint.location} has a folder state: its query has state of Spark's "
            f"own, which a savepoint does not hold. Nothing was saved. Stop the query and copy the "
            f"whole checkpoint folder."
        )


def _create(checkpoint: Storage, target: Storage, newest: Newest, reference: bool) -> Savepoint:
    """A claim keeps the collector off the files meanwhile; a reference has one that stays.

    It stays when the next savepoint takes the place, too: this one may have been moved since.
    """
    holder = referable(target)
    with all_or_none() as written:
        claim = (_claim if reference else _try_to_claim)(checkpoint, newest, holder, written)
        spark = _sparks_logs(checkpoint, newest.epoch)  # first: no claim keeps Spark from purging
        saved = _save_files(checkpoint, target, newest.manifest.state, reference, written)
        kept = ""
        if reference:
            state = newest.manifest.state
            kept = put_claim(checkpoint, uuid.uuid4().hex, holder, state, written)
        savepoint = Savepoint(
            name=name_of(target),
            created=now(),
            checkpoint=whole_uri(checkpoint.location),
            manifest_path=newest.manifest_path,
            manifest=replace(newest.manifest, state=saved),
            spark=spark,
            claim=kept,
        )
        if claim:  # before the savepoint is whole: behind that, nobody would look for it
            remove(checkpoint, claim)
        put_description(target, savepoint, written)
    return savepoint


def _claim(checkpoint: Storage, newest: Newest, holder: str, written: Written) -> str:
    """Keep the collector off the epoch's files; made before any epoch could let go of them."""
    name = f"{s.TRY}{uuid.uuid4().hex}"
    path = put_claim(checkpoint, name, holder, newest.manifest.state, written)
    manifests = m.manifests(checkpoint.names(m.FOLDER))
    reached = max(map(m.epoch_of, manifests))
    if newest.epoch not in map(m.epoch_of, retained(manifests, reached)):
        raise SupersededError(
            f"checkpoint {checkpoint.location} has reached epoch {reached}: files of epoch "
            f"{newest.epoch} may be collected already, so they cannot be claimed. Copy them, "
            f"without --reference; or name one of the newest {EPOCHS_RETAINED} epochs that ran."
        )
    return path


def _try_to_claim(checkpoint: Storage, newest: Newest, holder: str, written: Written) -> str:
    """A copy proves each file whole, so it needs no claim: but without, it may never end."""
    name = f"{s.TRY}{uuid.uuid4().hex}"
    try:
        return put_claim(checkpoint, name, holder, newest.manifest.state, written)
    except StorageError:  # no right to write there
        return ""


def _save_files(
    checkpoint: Storage,
    target: Storage,
    state: tuple[StepState, ...],
    reference: bool,
    written: Written,
) -> tuple[StepState, ...]:
    """The state with its files as the savepoint names them; those that it has to hold are copied.

    Files that the checkpoint itself only refers to are another's, which knows of no claim of ours.
    """
    if reference:
        own, home = files_of(state, is_own), referable(checkpoint)
        check_files(checkpoint, own)
        named = {file.path: uri_in(home, file) for file in own}
    else:
        named = {}
    copied = s.with_files(state, lambda step, file: named.get(file.path, place(step, file)))
    copy_files(checkpoint, target, state, copied, written)
    return copied


def _sparks_logs(checkpoint: Storage, epoch: int) -> dict[str, str]:
    """Spark's entries about an epoch that it has run; none about one of a loop of our own."""
    if epoch not in s.epochs_logged(checkpoint.names("commits")) and Epochs(checkpoint).is_loops:
        return {}
    sources = [path for folder in checkpoint.names("sources") for path in checkpoint.names(folder)]
    strange = [path for path in sources if not s.is_sources_path(path)]
    if strange:
        raise OptionError(
            f"checkpoint {checkpoint.location} has {strange[0]!r}: expected of a source files "
            f"sources/<number>/<name>, and a savepoint holds no others. Nothing was saved. Stop "
            f"the query and copy the whole checkpoint folder."
        )
    found = {}
    for path in (*s.log_paths(epoch), *sources):
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
    return s.decode(_description(location), f"{location.location}/{s.FILE}")


def _description(location: Storage, *, or_tombstone: bool = False) -> bytes:
    data = location.get(s.FILE)
    if data is not None:
        return data
    data = location.get(s.TOMBSTONE)
    if data is None:
        raise OptionError(
            f"{location.location} holds no savepoint (no {s.FILE}): `tallystick savepoint list` "
            f"shows those in a folder."
        )
    if not or_tombstone:
        raise OptionError(s.unfinished_deletion(location.location))
    return data


def find(parent: str) -> list[tuple[str, Savepoint | TallystickError]]:
    """The savepoints in a folder, with their locations; a savepoint's own folder has that one.

    Of what cannot be read, a damaged one, one that is being deleted or a neighbour that may be
    none, the error.
    """
    storage = FileStorage(parent)
    home = whole_uri(storage.location)
    is_local = local_path(home) is not None
    found: list[tuple[str, Savepoint | TallystickError]] = []
    for name in ("", *storage.names("")):
        location = f"{home}/{quote(name) if is_local else name}".rstrip("/")
        try:
            folder = f"{name}/" if name else ""
            data = storage.get(folder + s.FILE)
            if data is not None:
                found.append((location, s.decode(data, f"{location}/{s.FILE}")))
            elif storage.get(folder + s.TOMBSTONE) is not None:
                found.append((location, OptionError(s.unfinished_deletion(location))))
        except TallystickError as error:
            found.append((location, error))
    return found


def restore(savepoint_at: Storage, checkpoint: Storage, *, claim: bool = False) -> Savepoint:
    """Make a new checkpoint that goes on from a savepoint.

    The seed is written first, and the folder's `metadata` last: what was interrupted in between is
    refused, by its verdict.

    Args:
        savepoint_at: where the savepoint is.
        checkpoint: the new one's location, an empty folder.
        claim: use the savepoint's files of state where they are instead of copying them.

    Returns:
        What was restored.

    Raises:
        OptionError: the folder is not empty, or there is no savepoint.
        StateFileError: a file of state is missing or damaged.
    """
    savepoint = read(savepoint_at)
    try:
        with taken(checkpoint, "savepoint restore"), all_or_none() as written:
            _restore(savepoint, savepoint_at, checkpoint, claim, written)
    except SupersededError as error:
        raise StateFileError(f"{error}: the savepoint cannot be restored.") from None
    return savepoint


def _restore(
    savepoint: Savepoint, savepoint_at: Storage, checkpoint: Storage, claim: bool, written: Written
) -> None:
    def put(path: str, data: bytes) -> None:
        written.append((checkpoint, path))
        checkpoint.put(path, data)

    lineage = str(uuid.uuid4())
    before = savepoint.manifest.state
    if claim:
        home, holder = referable(savepoint_at), referable(checkpoint)
        state = s.with_files(before, lambda _, file: uri_in(home, file))
    else:
        state = s.with_files(before, place)
    seed = s.seed_of(savepoint, whole_uri(savepoint_at.location), lineage, state)
    put(m.manifest_path(seed, f"{m.SEED}{uuid.uuid4().hex[:12]}"), seed.encode())
    if claim:
        put_claim(savepoint_at, lineage, holder, state, written)
        if read(savepoint_at) != savepoint:  # deleted before anybody could see the claim
            raise OptionError(
                f"savepoint {savepoint_at.location} was replaced by another one meanwhile. Nothing "
                f"was restored. Try again."
            )
        check_files(savepoint_at, files_of(before))
    copy_files(savepoint_at, checkpoint, before, state, written)
    for path, text in savepoint.spark.items():
        put(path, text.encode())
    put("metadata", json.dumps({"id": lineage}, separators=(",", ":")).encode())


def delete(savepoint_at: Storage, *, force: bool = False) -> Savepoint | None:
    """Remove a savepoint, and its claim on the checkpoint's files.

    Only what the savepoint names: other files in its folder are somebody else's. Its description
    goes last, and has another name from the beginning: what was interrupted is no savepoint any
    more, and can be done again.

    Args:
        savepoint_at: where it is.
        force: even if a checkpoint uses its files; or its description is damaged, then all files of
            state in the folder are removed, and its claim stays (see `release`), as does one that
            is somebody else's or cannot be read.

    Returns:
        What was deleted; None: its description was damaged.

    Raises:
        OptionError: there is none; or a checkpoint uses its files; or its claim is another's; or
            another command is at work there.
        ManifestError: its description is damaged, or its claim.
    """
    _description(savepoint_at, or_tombstone=True)  # no mark where there is no savepoint
    with held_to_delete(savepoint_at):
        savepoint = _delete(savepoint_at, force)
    savepoint_at.delete(s.TOMBSTONE)  # behind the mark: a deletion that is cut off is known by it
    return savepoint


def _delete(savepoint_at: Storage, force: bool) -> Savepoint | None:
    """Remove all but the description under its other name."""
    data = _description(savepoint_at, or_tombstone=True)
    savepoint = _decoded_unless(force, data, savepoint_at)
    if savepoint_at.get("metadata") is not None:
        raise OptionError(
            f"{savepoint_at.location} is a checkpoint too: what the savepoint names may be its "
            f"state. Nothing was removed. If only the savepoint is to go, remove {s.FILE} by hand."
        )
    if savepoint is None:
        steps = savepoint_at.names(STATE_FOLDER)
        own = [path for step in steps for path in savepoint_at.names(step)]
    else:
        own = [file.path for file in files_of(savepoint.manifest.state, is_own)]
    claim_in = None if savepoint is None else own_claim(savepoint, savepoint_at, force)
    try:
        _bury(savepoint_at, data, force)
    except OptionError:  # behind any other error its files may be gone: it stays a tombstone
        _bring_back(savepoint_at, data)
        raise
    for path in own:
        _remove_file(savepoint_at, path, force)
    if savepoint is not None and claim_in is not None:
        claim_in.delete(savepoint.claim)
    for path in savepoint_at.names(s.CLAIMS):
        _remove_file(savepoint_at, path, force)
    return savepoint


def _remove_file(savepoint_at: Storage, path: str, force: bool) -> None:
    try:
        savepoint_at.delete(path)
    except StorageError as error:
        if not force or not isinstance(error.__cause__, IsADirectoryError):
            raise
        logger.warning("%s: %s is left: it is no file", savepoint_at.location, path)


def _bury(savepoint_at: Storage, data: bytes, force: bool) -> None:
    """Make a savepoint unusable, unless a checkpoint uses it.

    This looks for claims once the description is gone, a restore for the description once its claim
    is there: whichever comes second sees the other.
    """
    if not force:
        refuse_in_use(savepoint_at)  # as a rule nothing needs to be brought back
    savepoint_at.put(s.TOMBSTONE, data)
    savepoint_at.delete(s.FILE)
    if not force:
        refuse_in_use(savepoint_at)


def _bring_back(savepoint_at: Storage, data: bytes) -> None:
    if savepoint_at.get(s.TOMBSTONE) is not None:
        savepoint_at.put(s.FILE, data)
        savepoint_at.delete(s.TOMBSTONE)


def _decoded_unless(forced: bool, data: bytes, savepoint_at: Storage) -> Savepoint | None:
    try:
        return s.decode(data, f"{savepoint_at.location}/{s.FILE}")
    except ManifestError:
        if forced:
            return None
        raise


def release(checkpoint: Storage, holder: str) -> None:
    """Remove the claims of somebody who is gone: a killed command, a savepoint deleted by hand.

    Args:
        checkpoint: whose files are claimed; or a savepoint.
        holder: the location of who claimed them, as `inspect` shows it.

    Raises:
        OptionError: it claims nothing; or it is there, or being written, so the files are in use.
    """
    holder = whole_uri(shown(holder))
    claims = claims_of(checkpoint, holder)
    if not claims:
        raise OptionError(f"{checkpoint.location}: {holder} claims none of its files.")
    place = checkpoint.at(holder)
    refuse_at_work(place, checkpoint.location)  # first: whoever is done has one of these
    for name in (s.FILE, "metadata"):
        if place.get(name) is not None:
            raise OptionError(
                f"{holder} has {name}: it is there, and uses files of {checkpoint.location}. "
                f"Nothing was changed. Delete it first; a savepoint by `tallystick savepoint "
                f"delete`, which ends its claim too."
            )
    if place.get(s.TOMBSTONE) is not None:
        raise OptionError(s.unfinished_deletion(holder))
    for path in claims:  # no others: a command that began since has its own
        checkpoint.delete(path)
