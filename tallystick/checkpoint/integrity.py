"""The integrity of a checkpoint: which retained epochs have all their files."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tallystick.checkpoint.state_files import state_files
from tallystick.epoch import retention
from tallystick.epoch.manifest import FOLDER, Manifest, decode, epoch_of, manifests
from tallystick.errors import ManifestError
from tallystick.ports import Storage
from tallystick.state.catalog import StateFile
from tallystick.state.changelog import damage_of


@dataclass(frozen=True, slots=True)
class Epoch:
    """A retained epoch; without problems it is whole."""

    number: int
    manifest_path: str
    problems: tuple[str, ...]


def newest_whole(epochs: Iterable[Epoch]) -> int | None:
    """The newest epoch each manifest of which has all its files; None: there is none.

    Of several manifests of an epoch only one counts, and which one is not known here.
    """
    epochs = list(epochs)
    broken = {each.number for each in epochs if each.problems}
    return max({each.number for each in epochs} - broken, default=None)


@dataclass
class Wholeness:
    """Looks at the files that manifests name; at each of them once.

    Args:
        storage: the checkpoint location.
        verify: read every file, and compare it with its checksums; else it is enough that it is
            there.
        known_bad: a text, such as an error's: files that it names are not whole.
    """

    storage: Storage
    verify: bool = False
    known_bad: str = ""
    _problems: dict[str, str] = field(default_factory=dict)
    _names: set[str] | None = None

    def epochs(self, committed_epoch: int) -> list[Epoch]:
        """The retained epochs up to the committed one, oldest first."""
        found = []
        paths = manifests(self.storage.names(FOLDER))
        for path in retention.retained(paths, committed_epoch):
            if epoch_of(path) <= committed_epoch:
                found.append(Epoch(epoch_of(path), path, self._problems_of(path)))
        return sorted(found, key=lambda epoch: epoch.number)

    def newest_whole(self, committed_epoch: int) -> int | None:
        """The newest of them that has all its files; None: there is none."""
        return newest_whole(self.epochs(committed_epoch))

    def names(self) -> set[str]:
        """All files of state in the checkpoint."""
        if self._names is None:
            self._names = set(state_files(self.storage))
        return self._names

    def _problems_of(self, path: str) -> tuple[str, ...]:
        try:
            manifest = read_manifest(self.storage, path)
        except ManifestError as error:
            return (str(error),)
        files: Iterable[StateFile] = (file for step in manifest.state for file in step.files)
        return tuple(filter(None, map(self._problem, files)))

    def _problem(self, file: StateFile) -> str:
        if file.path not in self._problems:
            wrong = self._wrong(file)
            name = named(file, self.storage.location)
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
        return "" if file.path in self.names() else "missing"


def read_manifest(checkpoint: Storage, path: str) -> Manifest:
    """A manifest of a checkpoint.

    Raises:
        ManifestError: it is missing or damaged, or is not what its name says.
    """
    data = checkpoint.get(path)
    if data is None:
        raise ManifestError(
            f"manifest {path} is missing from checkpoint {checkpoint.location}: it was removed. "
            f"Put it back from a backup."
        )
    manifest = decode(data, path)
    if manifest.checkpoint_id != epoch_of(path):
        raise ManifestError(
            f"manifest {path} of checkpoint {checkpoint.location} is that of epoch "
            f"{manifest.checkpoint_id}: it was renamed, or copied. Put it back from a backup."
        )
    return manifest


def named(file: StateFile, location: str) -> str:
    """A file of state, for a message."""
    return (
        f"state file {file.path} of {location}, {file.kind} of epoch {file.epoch}, key groups "
        f"{file.first} to {file.last}"
    )
