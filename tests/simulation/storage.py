"""The checkpoint location of the simulated world: whole files, and writes that go wrong."""

from typing import Protocol, Self, TypeVar

from tallystick.errors import BrokenInvariantError, StorageError
from tests.simulation.scheduler import Process
from tests.simulation.spark import Checkpoint
from tests.simulation.wire import Call

Result = TypeVar("Result")


class Sender(Protocol):
    """What a request goes through."""

    def send(self, process: Process, call: Call[Result]) -> Result:
        """Make the call take effect: at once, later, or not at all."""
        ...


class SimulatedStorage:
    """One driver's view of the files of a checkpoint, which it shares with others."""

    def __init__(
        self, wire: Sender, process: Process, location: str, files: dict[str, bytes]
    ) -> None:
        self._wire = wire
        self._process = process
        self._location = location
        self._files = files
        self._unsynced: set[str] = set()

    @classmethod
    def of(cls, wire: Sender, process: Process, checkpoint: Checkpoint) -> Self:
        """Return the storage of a checkpoint, in which Spark's own files may be not durable."""
        storage = cls(wire, process, checkpoint.location, checkpoint.files)
        storage._unsynced = checkpoint.unsynced
        return storage

    def seen_from(self, process: str) -> Self:
        """Return it as another process has it, which remembers nothing of what others read."""
        location = f"{self._location}, seen from {process}"
        return type(self)(self._wire, self._process, location, self._files)

    @property
    def location(self) -> str:
        """See `ports.Storage.location`."""
        return self._location

    def put(self, path: str, data: bytes) -> None:
        """See `ports.Storage.put`."""

        def effect() -> None:
            if self._files.get(path, data) != data:  # two runs may leave one note
                raise BrokenInvariantError(f"{path} is written a second time, and is another")
            self._files[path] = data

        self._wire.send(self._process, Call("put", effect, StorageError))

    def put_new(self, path: str, data: bytes) -> bool:
        """See `ports.Storage.put_new`."""

        def effect() -> bool:
            if path in self._files:
                return False
            self._files[path] = data
            return True

        # The name decides which faults there are: those of any other write.
        return self._wire.send(self._process, Call("put", effect, StorageError))

    def get(self, path: str) -> bytes | None:
        """See `ports.Storage.get`."""
        return self._wire.send(
            self._process, Call("get", lambda: self._files.get(path), StorageError)
        )

    def get_range(self, path: str, offset: int, length: int) -> bytes | None:
        """See `ports.Storage.get_range`."""
        data = self.get(path)
        if data is None:
            return None
        start = offset if offset >= 0 else max(0, len(data) + offset)
        return data[start : start + length]

    def delete(self, path: str) -> None:
        """See `ports.Storage.delete`."""

        def effect() -> None:
            self._files.pop(path, None)

        self._wire.send(self._process, Call("delete", effect, StorageError))

    def names(self, folder: str) -> list[str]:
        """See `ports.Storage.names`."""

        def effect() -> list[str]:
            return sorted(path for path in self._files if path.startswith(f"{folder}/"))

        return self._wire.send(self._process, Call("names", effect, StorageError))

    def sync(self, path: str) -> None:
        """See `ports.Storage.sync`."""
        self._wire.send(
            self._process, Call("sync", lambda: self._unsynced.discard(path), StorageError)
        )
