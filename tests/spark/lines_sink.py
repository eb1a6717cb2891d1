"""A sink as a user writes one for a system of his own: text lines in files, hidden until decided.

<folder>/pending/<name>.part ─ prepare ─► <folder>/pending/<name> ─ commit ─► <folder>/<name>
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from tallystick.epoch.two_phase import Committable, Outcome, Owner, Place, RunFacts, Timeout

PART = ".part"


@dataclass(frozen=True)
class LinesSink:
    """Keys and values as lines of text below a folder."""

    folder: str
    uid: str | None = None
    kind: str = "lines"

    def open(self, owner: Owner, facts: RunFacts) -> "OpenLines":
        """Make the folders."""
        (Path(self.folder) / "pending").mkdir(parents=True, exist_ok=True)
        return OpenLines(self.folder)


@dataclass(frozen=True)
class LinesPlan:
    """Tells tasks where."""

    folder: str

    def begin(self, place: Place) -> "Lines":
        """One file per attempt."""
        return Lines(self.folder, place)


class Lines:
    """What an attempt writes into."""

    def __init__(self, folder: str, place: Place) -> None:
        self._place, self._count = place, 0
        self._name = f"{place.checkpoint_id}-{place.task}-{place.nonce}"
        self._path = f"{folder}/pending/{self._name}"
        self._file = open(self._path + PART, "w")  # noqa: SIM115

    def write(self, rows: pa.RecordBatch) -> None:
        """One line per row."""
        pairs = zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True)
        self._file.writelines(f"{key.decode()} {value.decode()}\n" for key, value in pairs)
        self._count += rows.num_rows

    def prepare(self) -> list[Committable]:
        """It is whole, and has its name in the hidden folder."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.rename(self._path + PART, self._path)
        place = self._place
        return [
            Committable(
                place.owner.sink, place.checkpoint_id, place.task, self._name, self._count, 0
            )
        ]

    def abort(self) -> None:
        """The driver finds it."""
        self._file.close()


@dataclass(frozen=True)
class OpenLines:
    """The driver's side."""

    folder: str

    @property
    def timeout(self) -> Timeout | None:
        """Files wait."""
        return None

    def plan(self) -> LinesPlan:
        """The same for all epochs."""
        return LinesPlan(self.folder)

    def commit(self, committable: Committable) -> Outcome:
        """Move it to where it is seen; nobody takes it from there, so the file is the proof."""
        final = Path(self.folder, committable.name)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._pending(committable), final)
        return Outcome.COMMITTED if final.exists() else Outcome.LOST

    def abort(self, committable: Committable) -> None:
        """Remove it, finished or not."""
        self._pending(committable).unlink(missing_ok=True)

    def lingering(self, owner: Owner) -> Iterator[Committable]:
        """Every hidden file: the folder is one pipeline's."""
        for name in sorted(os.listdir(f"{self.folder}/pending")):
            epoch, task, _ = name.split("-")
            yield Committable(owner.sink, int(epoch), int(task), name, 0, 0)

    def describe(self, committable: Committable) -> str:
        """Where it is."""
        return str(self._pending(committable))

    def close(self) -> None:
        """Nothing is open."""

    def _pending(self, committable: Committable) -> Path:
        return Path(self.folder, "pending", committable.name)
