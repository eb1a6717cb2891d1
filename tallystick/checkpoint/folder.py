"""The folder of a checkpoint: the one place that knows what lies where below it.

    metadata                            the id of the checkpoint, its lineage; Spark's, of its query
    offsets/, commits/                  Spark's log, of a query of the user's own (`spark_log`)
    tallystick/decider.json             who decides its epochs (`decider`)
    tallystick/decisions/               the log of decisions, where that decides (`decision_log`)
    tallystick/<epoch>-….json           manifests (`epoch.manifest` has their names)
    tallystick/settled-…, failed-…      notes about epochs (`epoch.micro_batches` has their names)
    keyed-state/                        files of state (`state_files`)

Outside of this layer nobody names a path, lists a folder or reads a file of a checkpoint.
"""

import json
import uuid
from collections.abc import Iterable

from tallystick.checkpoint.spark_log import (
    COMMITS,
    METADATA,
    OFFSETS,
    SOURCES,
    SPARKS_STATE,
    SparkLog,
)
from tallystick.epoch import manifest as names
from tallystick.epoch.manifest import Manifest
from tallystick.epoch.savepoint import epochs_logged
from tallystick.errors import DataLossError, OptionError
from tallystick.ports import Storage


class CheckpointFolder:
    """A checkpoint's location, and what is there.

    Args:
        storage: the location.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.log = SparkLog(storage)

    @property
    def location(self) -> str:
        """Its URI, without credentials."""
        return self.storage.location

    # --- whose it is ----------------------------------------------------------------------

    def lineage(self) -> str | None:
        """Return the checkpoint's id, which no other checkpoint has; None: it has none yet.

        Raises:
            DataLossError: it is damaged.
        """
        data = self.storage.get(METADATA)
        if data is None:
            return None
        try:
            return str(json.loads(data)["id"])
        except (ValueError, KeyError, TypeError):
            raise DataLossError(
                f"checkpoint {self.location}: its file {METADATA} should hold the query's id, "
                f"found {len(data)} bytes that do not. Nothing was changed. Put a whole copy of "
                f"the checkpoint back; or start from a new checkpoint."
            ) from None

    @property
    def is_begun(self) -> bool:
        """True if it has an id, damaged or not."""
        return self.storage.get(METADATA) is not None

    def begin(self) -> str:
        """Give the checkpoint an id where it has none, and return the one it has.

        Raises:
            DataLossError: the one it has is damaged.
        """
        found = self.lineage()
        if found is None:  # if another run is quicker, its id counts
            self.storage.put_new(METADATA, encode_lineage(str(uuid.uuid4())))
            found = self.lineage()
        assert found is not None, "it has one now"
        return found

    # --- what it has of epochs ------------------------------------------------------------

    def files(self) -> list[str]:
        """Return the paths of all manifests and notes, at one look."""
        return self.storage.names(names.FOLDER)

    def manifest_paths(self) -> list[str]:
        """Return the paths of all manifests, of all attempts, the newest last."""
        return sorted(names.manifests(self.files()), key=names.attempt_of)

    def manifest(self, path: str) -> Manifest | None:
        """Return a manifest; None: it is gone, or `path` is empty.

        Raises:
            ManifestError: it is damaged.
        """
        data = self.storage.get(path) if path else None
        return None if data is None else names.decode(data, path)

    def manifests(self, paths: Iterable[str]) -> dict[str, Manifest]:
        """Return those that are still there, by path.

        Raises:
            ManifestError: one of them is damaged.
        """
        found = ((path, self.manifest(path)) for path in paths)
        return {path: manifest for path, manifest in found if manifest is not None}

    def newest_manifests(self, epochs: int) -> list[Manifest]:
        """Return the manifests of the newest epochs that have any, of all attempts.

        Args:
            epochs: of how many.
        """
        paths = self.manifest_paths()
        newest = sorted({names.epoch_of(path) for path in paths})[-epochs:]
        found = self.manifests(path for path in paths if names.epoch_of(path) in newest)
        return list(found.values())

    def put_manifest(self, manifest: Manifest, nonce: str, *, is_seed: bool = False) -> str:
        """Write a manifest, durably, and return its path.

        Args:
            manifest: what it holds.
            nonce: a name that no other run draws.
            is_seed: it begins the checkpoint, and no epoch of it has written it.
        """
        path = names.manifest_path(manifest, names.SEED + nonce if is_seed else nonce)
        self.storage.put(path, manifest.encode())
        return path

    def note(self, path: str, text: str = "") -> None:
        """Write a note about an epoch, unless it is there; `epoch.micro_batches` names them."""
        if self.storage.get(path) is None:
            self.storage.put(path, text.encode())

    # --- Spark's log, of a query of the user's own ------------------------------------------

    def planned_by_spark(self) -> list[int]:
        """Return the micro-batches that Spark has logged before it ran them."""
        return epochs_logged(self.storage.names(OFFSETS))

    def files_of_sparks_sources(self) -> list[str]:
        """Return what Spark's own sources keep beside its log."""
        storage = self.storage
        return [path for source in storage.names(SOURCES) for path in storage.names(source)]

    @property
    def has_sparks_state(self) -> bool:
        """True if the query has state of Spark's own operators."""
        return bool(self.storage.names(SPARKS_STATE))

    def done_by_spark(self) -> list[int]:
        """Return the micro-batches that Spark has logged as done."""
        return epochs_logged(self.storage.names(COMMITS))


def encode_lineage(lineage: str) -> bytes:
    """Return the file that makes a folder a checkpoint of this id."""
    return json.dumps({"id": lineage}, separators=(",", ":")).encode()


def existing_lineage(folder: CheckpointFolder) -> str:
    """Return the id of a checkpoint that must be there.

    Raises:
        OptionError: there is nothing.
        DataLossError: it is damaged.
    """
    found = folder.lineage()
    if found is None:
        raise OptionError(
            f"{folder.location} is no checkpoint: expected a file {METADATA}, which the first "
            f"start of a pipeline or query writes. Nothing was changed. Check the path."
        )
    return found
