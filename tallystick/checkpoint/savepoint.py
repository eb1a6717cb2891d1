"""A savepoint: a committed epoch that its owner keeps, and from which a new checkpoint can begin.

A folder of its own with one file, `savepoint.json` (a line of JSON and its CRC-32, as a manifest),
that holds the epoch's manifest and Spark's own log entries for it. The files of state lie beside it
(a copy), or it names those of the checkpoint by their whole URI (a reference). A claim, in the
folder whose files are used from elsewhere, keeps them from being collected.

Invariant: a savepoint that was read names nothing but a savepoint's own files, and those that it
refers to below the checkpoint that it claims: it may come from somebody else. See `handles`.

A restored checkpoint begins with a seed: the savepoint's manifest under the new checkpoint's
lineage, with nothing produced. See `verdict` for when it may go on.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tallystick.checkpoint import manifest as m
from tallystick.checkpoint.manifest import Manifest, Origin
from tallystick.checkpoint.sealed import seal, unseal
from tallystick.state.handles import StateFile, StepState, is_whole_uri

VERSION = 1
FILE = "savepoint.json"
TOMBSTONE = "savepoint-being-deleted.json"
"""What the description is called as long as the savepoint is deleted."""
CLAIMS = "keyed-state-claims"
"""The folder of the claims: not inside of that of the state, where each name is a step's."""
TRY = "try-"
"""How the name of a claim begins that a command has while it copies, or looks at, files."""
_CLAIM = re.compile(rf"{CLAIMS}/[A-Za-z0-9-]+\.json")
_SOURCES_PATH = re.compile(r"sources/[0-9]+/[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Savepoint:
    """What `savepoint.json` holds.

    Args:
        name: its folder's.
        created: UTC, as ISO 8601.
        checkpoint: the location that it was taken from.
        manifest_path: there.
        manifest: of the epoch; its files are relative to the savepoint, or whole URIs.
        spark: Spark's log entries, path to content: `offsets/N`, the one before, `commits/N` and
            whatever the sources keep; nothing of an epoch that a loop of our own has run.
        claim: the path of its claim in the checkpoint; "": the files are copies.
    """

    name: str
    created: str
    checkpoint: str
    manifest_path: str
    manifest: Manifest
    spark: Mapping[str, str] = field(default_factory=dict)
    claim: str = ""

    @property
    def is_copy(self) -> bool:
        """Whether it can be used when the checkpoint is gone."""
        return not self.claim

    def encode(self) -> bytes:
        """The content of `savepoint.json`."""
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        return seal(VERSION, {**held, "manifest": self.manifest.to_fields()})


def decode(data: bytes, path: str) -> Savepoint:
    """Read back what `Savepoint.encode` wrote; `path` is for the messages.

    Raises:
        ManifestError: the bytes are torn, edited, or of a newer release.
    """
    way_on = "Nothing was changed. Put back a whole copy of it, or use another one."
    return unseal(data, f"savepoint {path}", (VERSION,), way_on, _savepoint)


def _savepoint(held: dict[str, Any]) -> Savepoint:
    found = Savepoint(**held | {"manifest": m.from_fields(held["manifest"])})
    names = (found.name, found.created, found.checkpoint, found.manifest_path, found.claim)
    if not all(isinstance(each, str) for each in (*names, *found.spark, *found.spark.values())):
        raise TypeError("expected texts for names, paths and the content of Spark's log")
    if found.claim and not (_CLAIM.fullmatch(found.claim) and is_whole_uri(found.checkpoint)):
        raise ValueError(f"claim {found.claim!r} in {found.checkpoint!r}: expected {CLAIMS}/…")
    home = found.checkpoint if found.claim else ""
    for file in (file for step in found.manifest.state for file in step.files):
        if file.home not in ("", home):
            raise ValueError(
                f"path {file.path!r}: expected its own, or in the checkpoint it claims"
            )
    logs = log_paths(found.manifest.checkpoint_id) if found.spark else ()
    for each in sorted(found.spark.keys() ^ {*logs}):
        if each in logs or not is_sources_path(each):
            raise ValueError(f"Spark's log {[*found.spark]}: expected {logs}, and sources/…")
    return found


@dataclass(frozen=True, slots=True)
class Claim:
    """That somebody elsewhere uses files of this folder.

    Args:
        holder: the location of the savepoint or checkpoint that does.
        created: UTC, as ISO 8601.
        state: the steps whose files are used, with paths as this folder has them.
    """

    holder: str
    created: str
    state: tuple[StepState, ...]

    def encode(self) -> bytes:
        """The content of the claim's file."""
        state = [step.to_json() for step in self.state]
        held = {"holder": self.holder, "created": self.created, "state": state}
        return seal(VERSION, held)


def decode_claim(data: bytes, path: str) -> Claim:
    """Read back what `Claim.encode` wrote.

    Raises:
        ManifestError: the bytes are torn, edited, or of a newer release. Whichever files it keeps
            from being collected, nobody knows: all are kept.
    """
    way_on = (
        "As long as it lies there, no file of state is collected. Put back a whole copy of it; or, "
        "if no savepoint made with --reference and no checkpoint restored with --claim needs files "
        "of this folder any more, remove it by hand."
    )
    return unseal(data, f"claim {path}", (VERSION,), way_on, _claim)


def _claim(held: dict[str, Any]) -> Claim:
    state = tuple(StepState.from_json(step) for step in held["state"])
    found = Claim(**held | {"state": state})
    if not is_whole_uri(found.holder):
        raise ValueError(f"holder {found.holder!r}: expected the whole URI of a folder")
    return found


def unfinished_deletion(location: str) -> str:
    """What to tell of a folder with a tombstone."""
    return (
        f"{location} has a savepoint that is being deleted, or whose deletion was cut off "
        f"({TOMBSTONE}). Delete it once more (`tallystick savepoint delete {location}`): that "
        f"finishes it, or brings the savepoint back if a checkpoint uses its files."
    )


def claim_path(name: str) -> str:
    """Where a claim goes; the name is unique."""
    return f"{CLAIMS}/{name}.json"


def is_try(path: str) -> bool:
    """Return whether a claim is that of a command, and ends with it."""
    return path.startswith(f"{CLAIMS}/{TRY}")


def log_paths(epoch: int) -> tuple[str, ...]:
    """The entries of Spark's logs that a query needs to go on behind an epoch.

    Spark reads the ends of the epoch before the newest one too, as where that one started.
    """
    before = (f"offsets/{epoch - 1}",) if epoch else ()
    return (*before, f"offsets/{epoch}", f"commits/{epoch}")


def is_sources_path(path: str) -> bool:
    """Return whether a path is that of a file which a source keeps in the checkpoint."""
    return _SOURCES_PATH.fullmatch(path) is not None


def epochs_logged(paths: list[str]) -> list[int]:
    """The epochs that a folder of Spark's log has entries of, in order."""
    names = [path.rpartition("/")[2] for path in paths]
    return sorted(int(name) for name in names if name.isdecimal())


def with_files(
    state: tuple[StepState, ...], move: Callable[[StepState, StateFile], str]
) -> tuple[StepState, ...]:
    """The same state with its files elsewhere: `move` gives each one's path."""
    return tuple(
        replace(step, files=tuple(replace(file, path=move(step, file)) for file in step.files))
        for step in state
    )


def seed_of(
    savepoint: Savepoint, location: str, lineage: str, state: tuple[StepState, ...]
) -> Manifest:
    """The manifest that a checkpoint restored from a savepoint begins with.

    Args:
        savepoint: what is restored.
        location: its own.
        lineage: of the new checkpoint.
        state: the savepoint's, with the files where the new checkpoint has them.
    """
    manifest = savepoint.manifest
    origin = Origin(
        pipeline=manifest.pipeline,
        lineage=manifest.lineage,
        checkpoint=savepoint.checkpoint,
        manifest_path=savepoint.manifest_path,
        savepoint=location,
    )
    # What the epoch prepared is the original's to commit: Spark logged it as done only behind that.
    return replace(
        manifest,
        lineage=lineage,
        produced=(),
        state=state,
        origin=origin,
        committables=(),
        decided_by=m.KAFKA,
        base_path="",
    )
