"""Claims: who uses files of a folder from elsewhere, so that nobody collects or deletes them.

See `checkpoint.savepoint.Claim`.
"""

import logging
from datetime import UTC, datetime

from tallystick.checkpoint import manifest as m
from tallystick.checkpoint import savepoint as s
from tallystick.checkpoint.savepoint import Claim, Savepoint
from tallystick.errors import ManifestError, OptionError, StorageError, TallystickError
from tallystick.ports import Storage
from tallystick.savepoint_files import files_of, whole_uri
from tallystick.savepoint_target import Written
from tallystick.state.handles import StepState
from tallystick.wholeness import read_manifest

logger = logging.getLogger(__name__)


def now() -> str:
    """The time of a claim or a savepoint."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def put_claim(
    folder: Storage, name: str, holder: str, state: tuple[StepState, ...], written: Written
) -> str:
    """Keep the collector off files; one that it could not read would keep it off for good.

    Args:
        folder: whose files are used.
        name: of the claim, a new one.
        holder: the location of the savepoint or checkpoint that uses them.
        state: the steps with these files.
        written: where the claim is listed.
    """
    path = s.claim_path(name)
    data = Claim(holder, now(), state).encode()
    s.decode_claim(data, path)
    written.append((folder, path))
    folder.put(path, data)
    return path


def claims_of(folder: Storage, holder: str, *, only_tries: bool = False) -> list[str]:
    """The paths of a holder's claims; one that cannot be read is logged, and nobody's."""
    found = []
    paths = folder.names(s.CLAIMS)
    for path in filter(s.is_try, paths) if only_tries else paths:
        try:
            data = folder.get(path)  # None: it has just ended
            if data is not None and s.decode_claim(data, path).holder == holder:
                found.append(path)
        except (ManifestError, StorageError) as error:  # a folder, for example
            logger.warning("%s: %s is passed over: %s", folder.location, path, error)
    return found


def own_claim(savepoint: Savepoint, savepoint_at: Storage, force: bool) -> Storage | None:
    """Return the folder that holds a savepoint's claim; None: there is none that it may end.

    Its text alone is no proof: it may name the claim of another savepoint, whose files would be
    collected without.
    """
    if not savepoint.claim:
        return None
    try:
        folder = savepoint_at.at(savepoint.checkpoint)
        data = folder.get(savepoint.claim)
        if data is None:
            return None
        holder = s.decode_claim(data, f"{savepoint.checkpoint}/{savepoint.claim}").holder
    except TallystickError as error:  # it may be out of reach for good
        if not force:
            raise
        logger.warning("%s: its claim is left: %s", savepoint_at.location, error)
        return None
    if holder == whole_uri(savepoint_at.location):
        return folder
    if force:
        return None
    raise OptionError(
        f"savepoint {savepoint_at.location} names the claim {savepoint.claim} in "
        f"{savepoint.checkpoint}, which {holder} holds. Nothing was removed. If that is where "
        f"the savepoint was before, end the claim by `tallystick savepoint release "
        f"{savepoint.checkpoint} {holder}`, then delete this one; with --force the claim stays."
    )


def refuse_in_use(savepoint_at: Storage) -> None:
    """Raise if a checkpoint may still use the files of a savepoint.

    Raises:
        OptionError: one does.
        ManifestError: a claim, or a manifest of who holds it, is damaged.
    """
    users = [each for path in savepoint_at.names(s.CLAIMS) if (each := _user(savepoint_at, path))]
    if users:
        raise OptionError(
            f"savepoint {savepoint_at.location} is in use: its files are the state of "
            f"{', '.join(users)} (restored with --claim). Delete it when these have written state "
            f"of their own; or, if they are gone for good, with --force: it destroys what is not."
        )


def _user(folder: Storage, path: str) -> str:
    """The holder of a claim that still uses the files; "": it does not."""
    data = folder.get(path)
    if data is None:
        return ""
    claim = s.decode_claim(data, path)
    claimed = {file.path for file in files_of(claim.state)}
    holder = folder.at(claim.holder)
    if holder.get("metadata") is None:
        return f"{claim.holder}, which cannot be read from here"
    for name in m.manifests(holder.names(m.FOLDER)):
        used = {file.path for file in files_of(read_manifest(holder, name).state)}
        if used & claimed:
            return claim.holder
    return ""
