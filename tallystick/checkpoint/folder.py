"""The folder of a checkpoint: the layout below it, and a check that no file is missing.

    metadata                            the id of the checkpoint, its lineage; Spark's, of its query
    offsets/, commits/                  Spark's log, of a query of the user's own (`spark_log`)
    tallystick/decider.json             the decider of its epochs (`decision_log`)
    tallystick/decisions/               the log of decisions, where that decides (`decision_log`)
    tallystick/fork.json                name and topics of a fork (`forks`)
    tallystick/<epoch>-….json           manifests (`epoch.manifest` has their names)
    tallystick/settled-…, failed-…      notes about epochs (`epoch.micro_batches` has their names)
    keyed-state/                        files of state (`state_files`)

Only this layer knows the layout: code outside of it names no path, lists no folder and reads no
file of a checkpoint.
"""

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from tallystick.checkpoint.spark_log import (
    COMMITS,
    METADATA,
    OFFSETS,
    SOURCES,
    SPARKS_STATE,
    SparkLog,
)
from tallystick.checkpoint.state_files import state_files
from tallystick.epoch import manifest as names
from tallystick.epoch.manifest import Manifest
from tallystick.epoch.savepoint import epochs_logged
from tallystick.errors import UNREADABLE, DataLossError, ManifestError, OptionError
from tallystick.ports import Storage
from tallystick.state.catalog import FOLDER as STATE_FOLDER
from tallystick.state.catalog import StateFile
from tallystick.state.changelog import damage_of


def state_path(uid: str) -> str:
    """Return the folder of a step's files of state, below the checkpoint."""
    return f"{STATE_FOLDER}/{uid}"


class CheckpointFolder:
    """A checkpoint's location, with its manifests, notes and Spark's log.

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
            DataLossError: the file with the id is damaged.
        """
        data = self.storage.get(METADATA)
        if data is None:
            return None
        try:
            return str(json.loads(data)["id"])
        except UNREADABLE:
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
        """Return the checkpoint's id; a checkpoint without an id is given a new one first.

        Raises:
            DataLossError: the file with the id is damaged.
        """
        lineage = self.lineage()
        if lineage is None:  # if another run is quicker, its id counts
            self.storage.put_new(METADATA, encode_lineage(str(uuid.uuid4())))
            lineage = self.lineage()
        assert lineage is not None, "it has one now"
        return lineage

    # --- what it has of epochs ------------------------------------------------------------

    def files(self) -> list[str]:
        """Return the paths of all manifests and notes, by one listing."""
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

    def read_manifest(self, path: str) -> Manifest:
        """Return a manifest; a missing file is an error, unlike in `manifest`.

        Raises:
            ManifestError: it is missing or damaged, or is not what its name says.
        """
        manifest = self.manifest(path)
        if manifest is None:
            raise ManifestError(
                f"manifest {path} is missing from checkpoint {self.location}: it was removed. "
                f"Put it back from a backup."
            )
        if manifest.checkpoint_id != names.epoch_of(path):
            raise ManifestError(
                f"manifest {path} of checkpoint {self.location} is that of epoch "
                f"{manifest.checkpoint_id}: it was renamed, or copied. Put it back from a backup."
            )
        return manifest

    def manifests(self, paths: Iterable[str]) -> dict[str, Manifest]:
        """Return the manifests that still exist, by path.

        Raises:
            ManifestError: one of them is damaged.
        """
        manifests = ((path, self.manifest(path)) for path in paths)
        return {path: manifest for path, manifest in manifests if manifest is not None}

    def newest_manifests(self, epochs: int) -> list[Manifest]:
        """Return the manifests of the newest epochs that have any, of all attempts.

        Args:
            epochs: the number of epochs.
        """
        paths = self.manifest_paths()
        newest = sorted({names.epoch_of(path) for path in paths})[-epochs:]
        manifests = self.manifests(path for path in paths if names.epoch_of(path) in newest)
        return list(manifests.values())

    def put_manifest(self, manifest: Manifest, nonce: str, *, is_seed: bool = False) -> str:
        """Write a manifest, durably, and return its path.

        Args:
            manifest: the content.
            nonce: a part of the name, which no other run draws.
            is_seed: the manifest begins the checkpoint, and no epoch of the checkpoint wrote it.
        """
        path = names.manifest_path(manifest, names.SEED + nonce if is_seed else nonce)
        self.storage.put(path, manifest.encode())
        return path

    def note(self, path: str, text: str = "") -> None:
        """Write a note about an epoch unless it exists; `epoch.micro_batches` has the names."""
        if self.storage.get(path) is None:
            self.storage.put(path, text.encode())

    # --- Spark's log, of a query of the user's own ------------------------------------------

    def planned_by_spark(self) -> list[int]:
        """Return the micro-batches in Spark's log `offsets/`, written before they run."""
        return epochs_logged(self.storage.names(OFFSETS))

    def files_of_sparks_sources(self) -> list[str]:
        """Return the files that Spark's own sources keep beside Spark's log."""
        storage = self.storage
        return [path for source in storage.names(SOURCES) for path in storage.names(source)]

    @property
    def has_sparks_state(self) -> bool:
        """True if the query has state of Spark's own operators."""
        return bool(self.storage.names(SPARKS_STATE))

    def done_by_spark(self) -> list[int]:
        """Return the micro-batches that Spark has logged as done, in `commits/`."""
        return epochs_logged(self.storage.names(COMMITS))


def encode_lineage(lineage: str) -> bytes:
    """Return the content of the file that makes a folder a checkpoint of a given id."""
    return json.dumps({"id": lineage}, separators=(",", ":")).encode()


def existing_lineage(folder: CheckpointFolder) -> str:
    """Return the id of a checkpoint; a missing checkpoint is an error.

    Raises:
        OptionError: there is no checkpoint.
        DataLossError: the file with the id is damaged.
    """
    lineage = folder.lineage()
    if lineage is None:
        raise OptionError(
            f"{folder.location} is no checkpoint: expected a file {METADATA}, which the first "
            f"start of a pipeline or query writes. Nothing was changed. Check the path."
        )
    return lineage


@dataclass(frozen=True, slots=True)
class RetainedEpoch:
    """A retained epoch; without problems it is whole."""

    number: int
    manifest_path: str
    problems: tuple[str, ...]


def newest_whole(epochs: Iterable[RetainedEpoch]) -> int | None:
    """Return the newest epoch none of whose manifests has a problem, or None.

    Of several manifests of an epoch only one counts; which one is unknown here.
    """
    epochs = list(epochs)
    broken = {epoch.number for epoch in epochs if epoch.problems}
    return max({epoch.number for epoch in epochs} - broken, default=None)


@dataclass
class Integrity:
    """A check of the files that manifests name; each file is looked at once.

    Args:
        storage: the checkpoint location.
        verify: read every file, and compare it with its checksums; else it is enough that the file
            exists.
        known_bad: a text, such as an error's: files that it names are not whole.
    """

    storage: Storage
    verify: bool = False
    known_bad: str = ""
    _problems: dict[str, str] = field(default_factory=dict)
    _paths: set[str] | None = None

    def epochs(self, committed_epoch: int) -> list[RetainedEpoch]:
        """Return the retained epochs up to the committed one, oldest first."""
        retained = []
        paths = CheckpointFolder(self.storage).manifest_paths()
        for path in names.retained_manifests(paths, committed_epoch):
            epoch = names.epoch_of(path)
            if epoch <= committed_epoch:
                retained.append(RetainedEpoch(epoch, path, self._problems_of(path)))
        return sorted(retained, key=lambda epoch: epoch.number)

    def newest_whole(self, committed_epoch: int) -> int | None:
        """Return the newest retained epoch that has all its files, or None."""
        return newest_whole(self.epochs(committed_epoch))

    def paths(self) -> set[str]:
        """Return the paths of all files of state in the checkpoint."""
        if self._paths is None:
            self._paths = set(state_files(self.storage))
        return self._paths

    def _problems_of(self, path: str) -> tuple[str, ...]:
        try:
            manifest = CheckpointFolder(self.storage).read_manifest(path)
        except ManifestError as error:
            return (str(error),)
        files: Iterable[StateFile] = (file for step in manifest.state for file in step.files)
        return tuple(filter(None, map(self._problem, files)))

    def _problem(self, file: StateFile) -> str:
        if file.path not in self._problems:
            wrong = self._wrong(file)
            name = named_file(file, self.storage.location)
            self._problems[file.path] = f"{name} is {wrong}" if wrong else ""
        return self._problems[file.path]

    def _wrong(self, file: StateFile) -> str:
        if file.path in self.known_bad:
            return "missing or damaged"
        if self.verify:
            data = self.storage.get(file.path)
            if data is None:
                return "missing"
            damage = damage_of(file, data)
            return f"damaged: {damage}" if damage else ""
        return "" if file.path in self.paths() else "missing"


def named_file(file: StateFile, location: str) -> str:
    """Return a file of state in words, for a message."""
    return (
        f"state file {file.path} of {location}, {file.kind} of epoch {file.epoch}, key groups "
        f"{file.first} to {file.last}"
    )
