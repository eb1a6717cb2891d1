"""A savepoint: a committed epoch, kept by its owner, from which a new checkpoint can begin.

A folder of its own with one file, `savepoint.json` (a line of JSON and its CRC-32, as a manifest),
that holds the epoch's manifest and Spark's own log entries for it. Copies of the files of state lie
beside it, under the paths that the manifest names. See docs/decisions/0020.

Invariant: a savepoint that was read names nothing but files of state below its own folder: it may
come from another user. See `catalog`.

A restored checkpoint begins with a seed: the savepoint's manifest under the new checkpoint's
lineage, with nothing produced. See `verdict` for when it may go on.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tallystick.epoch.manifest import KAFKA, Manifest, Origin, from_fields, is_seed, seal, unseal

VERSION = 1
FILE = "savepoint.json"
TOMBSTONE = "savepoint-being-deleted.json"
"""The description's name while the savepoint is being deleted."""
_SOURCES_PATH = re.compile(r"sources/[0-9]+/[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Savepoint:
    """The content of `savepoint.json`.

    Args:
        name: its folder's.
        created: UTC, as ISO 8601.
        checkpoint: the location that it was taken from.
        manifest_path: the path of the epoch's manifest in that checkpoint.
        manifest: of the epoch; its files have the same paths in the savepoint.
        spark: Spark's log entries, path to content: `offsets/N`, the one before, `commits/N` and
            whatever the sources keep; nothing of an epoch that a loop of our own has run.
    """

    name: str
    created: str
    checkpoint: str
    manifest_path: str
    manifest: Manifest
    spark: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the content of `savepoint.json`."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        return seal(VERSION, {**content, "manifest": self.manifest.to_fields()})


def decode(data: bytes, path: str) -> Savepoint:
    """Read back what `Savepoint.encode` wrote; `path` is for the messages.

    Raises:
        ManifestError: the bytes are torn, edited, or of a newer release.
    """
    remedy = (
        "Nothing was changed. Put back a whole copy of it, or use another one; if it is of no use, "
        "remove its folder by hand."
    )
    return unseal(data, f"savepoint {path}", VERSION, remedy, _savepoint)


def _savepoint(content: dict[str, Any]) -> Savepoint:
    savepoint = Savepoint(**content | {"manifest": from_fields(content["manifest"])})
    names = (savepoint.name, savepoint.created, savepoint.checkpoint, savepoint.manifest_path)
    if not all(
        isinstance(text, str) for text in (*names, *savepoint.spark, *savepoint.spark.values())
    ):
        raise TypeError("expected texts for names, paths and the content of Spark's log")
    logs = log_paths(savepoint.manifest.checkpoint_id) if savepoint.spark else ()
    for path in sorted(savepoint.spark.keys() ^ {*logs}):
        if path in logs or not is_sources_path(path):
            raise ValueError(f"Spark's log {[*savepoint.spark]}: expected {logs}, and sources/…")
    return savepoint


def unfinished_deletion(location: str) -> str:
    """Return the message about a folder with a tombstone."""
    return (
        f"{location} has a savepoint that is being deleted, or whose deletion was cut off "
        f"({TOMBSTONE}). Delete it once more (`tallystick savepoint delete {location}`): that "
        f"finishes it."
    )


def log_paths(epoch: int) -> tuple[str, ...]:
    """Return the entries of Spark's logs that a query needs to go on after an epoch.

    Spark reads the ends of the epoch before the newest one too, as where that one started.
    """
    before = (f"offsets/{epoch - 1}",) if epoch else ()
    return (*before, f"offsets/{epoch}", f"commits/{epoch}")


def is_sources_path(path: str) -> bool:
    """True if a path is that of a file which a source keeps in the checkpoint."""
    return _SOURCES_PATH.fullmatch(path) is not None


def epochs_logged(paths: list[str]) -> list[int]:
    """Return the epochs that a folder of Spark's log has entries of, in order."""
    names = [path.rpartition("/")[2] for path in paths]
    return sorted(int(name) for name in names if name.isdecimal())


def seed_of(savepoint: Savepoint, location: str, lineage: str) -> Manifest:
    """Return the manifest that a checkpoint restored from a savepoint begins with.

    Args:
        savepoint: what is restored.
        location: of the savepoint.
        lineage: of the new checkpoint.
    """
    manifest = savepoint.manifest
    # That of a seed stays: it is what Kafka committed last, as long as no epoch has run.
    origin = manifest.origin or Origin(
        pipeline=manifest.pipeline,
        lineage=manifest.lineage,
        checkpoint=savepoint.checkpoint,
        manifest_path=savepoint.manifest_path,
        savepoint=location,
    )
    # What the epoch prepared is the original's to commit: Spark logged it as done only after that.
    return replace(
        manifest,
        lineage=lineage,
        produced=(),
        origin=replace(origin, savepoint=location),
        committables=(),
        decided_by=KAFKA,
        base_path=savepoint.manifest_path if is_seed(savepoint.manifest_path) else "",
    )
