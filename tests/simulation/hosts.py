"""Workers' hosts, and the copies of state that they keep: lost, stale, torn, used by two at once.

Invariants of the StateStore port, which the copies here keep as the real ones must:
    * A change takes the version away when it begins, and gives the new one when it is through.
    * Each part of a change first looks whether it is still this change that is at work.
    * A view is what was there when it was taken.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa

from tallystick.ports import StateStore, Storage
from tallystick.state.catalog import Version
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import StateView
from tallystick.testing.memory_state import MemoryView, take


@dataclass(slots=True)
class LocalCopy:
    """What a host has of one key-group range."""

    version: Version | None = None
    entries: dict[bytes, bytes] = field(default_factory=dict)
    at_work: object = None

    def take(self, step: KeyGroupRange | pa.RecordBatch) -> None:
        """One step of a change."""
        take(self.entries, step)


CopyName = tuple[str, str, KeyGroupRange]
"""Lineage, uid and key groups."""


@dataclass(slots=True)
class Host:
    """A worker's machine."""

    number: int
    copies: dict[CopyName, LocalCopy] = field(default_factory=dict)
    losses: int = 0

    @property
    def name(self) -> str:
        """The name of it, of which there is another one once it has lost what it had."""
        return f"host {self.number} after {self.losses} losses"

    def lose_all(self) -> None:
        """Lose its copies, and the memory of its processes."""
        self.copies.clear()
        self.losses += 1


class SimulatedStore:
    """One task's way to a copy on its host; `pause` is called where others may come in between."""

    def __init__(self, host: Host, name: CopyName, pause: Callable[[], None]) -> None:
        self._host = host
        self._name = name
        self._pause = pause

    @property
    def _copy(self) -> LocalCopy:
        return self._host.copies.setdefault(self._name, LocalCopy())

    def version(self) -> Version | None:
        """See `ports.StateStore.version`."""
        return self._copy.version

    def apply(
        self,
        expected: Version | None,
        version: Version,
        steps: Iterable[KeyGroupRange | pa.RecordBatch],
    ) -> bool:
        """See `ports.StateStore.apply`."""
        self._pause()
        copy = self._copy
        if not self.may_begin(copy, expected):
            return False
        change = copy.at_work = object()
        self.begin(copy, version)
        for step in steps:
            if not self.is_at_work(copy, change):
                return False
            copy.take(step)
        if not self.is_at_work(copy, change):
            return False
        copy.version = version
        return True

    def may_begin(self, copy: LocalCopy, expected: Version | None) -> bool:
        """Whether the copy is what the change was made for."""
        return copy.version == expected

    def is_at_work(self, copy: LocalCopy, change: object) -> bool:
        """Whether no other change has begun since."""
        return copy.at_work is change

    def begin(self, copy: LocalCopy, version: Version) -> None:
        """From here on it is torn, until it is at the version."""
        copy.version = None

    @contextmanager
    def view(self, version: Version | None) -> Iterator[StateView | None]:
        """See `ports.StateStore.view`."""
        self._pause()
        copy = self._copy
        yield MemoryView(dict(copy.entries)) if copy.version == version else None


@dataclass(frozen=True)
class SimulatedWorkerHost:
    """What a task reaches from its host; see `keyed.WorkerHost`.

    Args:
        host: where it runs.
        lineage: of the checkpoint.
        files: the checkpoint's.
        pause: called where others may come in between.
    """

    host: Host
    lineage: str
    files: Storage
    pause: Callable[[], None]

    def storage(self) -> Storage:
        """See `keyed.WorkerHost.storage`."""
        return self.files

    def store(self, uid: str, groups: KeyGroupRange) -> StateStore:
        """See `keyed.WorkerHost.store`."""
        return SimulatedStore(self.host, (self.lineage, uid, groups), self.pause)
