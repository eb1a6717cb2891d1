"""Spark's log in a checkpoint: `offsets/N` before micro-batch N runs, `commits/N` after it.

Spark syncs neither, so a power cut may lose the newest entries or leave them empty; and on an
object store a late rename of another driver replaces them. The manifests do not have these faults,
so they are the truth about committed epochs, and Spark's log is kept in line with them.

Invariants:
    * Before anything of epoch N is decided, `metadata`, `offsets/N` and `offsets/N-1` are durable.
      So what a power cut takes belongs to epochs that were not decided; and `commits/N` may go,
      since Spark asks for N again then.
    * An entry of a committed epoch is never removed, only replaced by what its manifest says. Who
      cannot know whether an epoch was committed leaves every entry alone that has a manifest.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tallystick.epoch.manifest import FOLDER, decode, epoch_of
from tallystick.epoch.manifest import manifests as manifest_paths
from tallystick.errors import (
    UNREADABLE,
    DataLossError,
    OptionError,
    OtherOffsetsError,
    SparkLogError,
)
from tallystick.ports import Storage

logger = logging.getLogger(__name__)

FORMAT = "v1"
OFFSETS, COMMITS, METADATA = "offsets", "commits", "metadata"
SPARKS_STATE = "state"
"""The folder of the state of Spark's own operators; not there if a query has none."""
SOURCES = "sources"
"""The folder of what Spark's own sources need, by index."""
_FILES = re.compile(r'"logOffset"\s*:\s*(\d+)')
"""The offset of Spark's FileStreamSource: the number of the newest entry of its own log."""


@dataclass(frozen=True, slots=True)
class LoggedBatch:
    """Spark's log entry of a micro-batch, from before it ran: the same for each of its attempts.

    Args:
        head: the version, and a line of metadata.
        sources: the end offsets of each source.
    """

    head: tuple[str, str]
    sources: tuple[str, ...]

    @property
    def timestamp_ms(self) -> int:
        """The clock of the micro-batch."""
        return int(json.loads(self.head[1] or "{}").get("batchTimestampMs", 0))

    def encode(self) -> bytes:
        """Return the entry as Spark's OffsetSeqLog reads it."""
        return "\n".join((*self.head, *self.sources)).encode()


def replaced(location: str, batch_id: int, logged: Sequence[str], read: Sequence[str]) -> str:
    """Return the message about a running micro-batch whose entry differs from what Spark reads."""
    return (
        f"checkpoint {location}: offsets/{batch_id} has {tuple(logged)}, while Spark runs "
        f"micro-batch {batch_id} up to {tuple(read)}: another query writes the same checkpoint, or "
        f"the file was replaced. Nothing of the micro-batch is committed. See that only one query "
        f"runs, then start it again: it goes on exactly."
    )


def entry_put_right(location: str, differing: OtherOffsetsError) -> SparkLogError:
    """Return the error for a start whose log was put right, as the manifest has it."""
    epoch = differing.checkpoint_id
    return SparkLogError(
        f"{differing.committed}, but {_path(OFFSETS, epoch)} in checkpoint {location} has "
        f"{differing.logged}: it was lost and planned again, or replaced. It was put right, as the "
        f"manifest has it. Nothing is lost or repeated: start the query again.",
        epoch,
        differing.sources,
    )


def parse_entry(data: bytes | None) -> LoggedBatch | None:
    """Read an entry of `offsets/`; None where it is missing, or not whole.

    Source: Spark's OffsetSeqLog: a version, a line of metadata, a line per source.
    """
    lines = _lines(data)
    if len(lines) < 3 or not lines[0].startswith("v") or "\0" in "".join(lines):
        return None
    if not all(_is_json(line) for line in lines[1:] if line.startswith("{")):
        return None
    batch = LoggedBatch((lines[0], lines[1]), tuple(lines[2:]))
    try:
        _ = batch.timestamp_ms
    except UNREADABLE:
        return None
    return batch


class SparkLog:
    """The log of a query, which Spark writes and we sync and mend."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._synced: int | None = None  # the newest entry that is certainly durable

    def batch(self, batch_id: int) -> LoggedBatch:
        """Return Spark's log entry of a micro-batch.

        Raises:
            DataLossError: the entry is missing or damaged.
        """
        path = _path(OFFSETS, batch_id)
        data = self._storage.get(path)
        entry = parse_entry(data)
        if entry is None:
            what = "no such file" if data is None else f"{len(data)} bytes"
            raise DataLossError(
                f"checkpoint {self._storage.location}: {path} should hold Spark's offsets of "
                f"micro-batch {batch_id}, found {what}. Nothing was changed. Put a whole copy of "
                f"the checkpoint back."
            )
        if entry.head[0] != FORMAT:
            raise OptionError(
                f"checkpoint {self._storage.location}: {path} has format {entry.head[0]}, which "
                f"Spark writes with spark.sql.streaming.offsetLog.formatVersion=2; known is "
                f"{FORMAT}. Nothing was changed. Start the query from a new checkpoint without "
                f"that setting."
            )
        return entry

    def sources(self, batch_id: int) -> tuple[str, ...] | None:
        """Return the end offsets of a micro-batch; None if Spark has removed its entry."""
        entry = self._entry(batch_id)
        return None if entry is None else entry.sources

    def sync(self, batch_id: int) -> None:
        """Make the entries durable that Spark needs to ask for a micro-batch again."""
        if self._synced is None:
            self._storage.sync(METADATA)
        for number in (batch_id - 1, batch_id):
            if number >= 0 and (self._synced is None or number > self._synced):
                self._sync_sources(number)
                self._storage.sync(_path(OFFSETS, number))
        self._synced = batch_id

    def _sync_sources(self, batch_id: int) -> None:
        """Make the entries durable that Spark's own file sources keep of a micro-batch.

        Their offset is the number of an entry in a log of their own, which names the files; every
        tenth entry stands for the ones before it.
        """
        entry = self._entry(batch_id)
        for index, text in enumerate(() if entry is None else entry.sources):
            match = _FILES.search(text)
            if match:
                path = f"{SOURCES}/{index}/{match[1]}"
                self._storage.sync(path)
                self._storage.sync(f"{path}.compact")

    def put_right(
        self, batch_id: int, sources: tuple[str, ...], prove_owner: Callable[[], None]
    ) -> None:
        """Set a committed micro-batch's end offsets as in its manifest; remove all later entries.

        Later micro-batches were planned from the wrong position, and none of them is decided. Their
        manifests are removed too, since `mend` must not take those for committed.

        Args:
            batch_id: the micro-batch.
            sources: the end offsets that its manifest has.
            prove_owner: raises where another run has taken over. That run may have put the log
                right and decided epochs since; so only files from before the proof are removed.
        """
        manifests = manifest_paths(self._storage.names(FOLDER))
        logged = _numbers(self._storage.names(OFFSETS))
        prove_owner()
        entry = self._entry(batch_id)
        assert entry is not None, "it was compared"
        for path in manifests:
            if epoch_of(path) > batch_id:
                self._storage.delete(path)
        for number in reversed(logged):  # so that a crash in between leaves no hole
            if number > batch_id:
                self._remove(OFFSETS, number)
                self._remove(COMMITS, number)
        self._write(batch_id, LoggedBatch(entry.head, sources))

    def mend(self) -> None:
        """Mend the log after a power cut; called before Spark reads the log.

        The newest entries may be missing or torn. Those of epochs with a manifest are written
        again, the others are removed: Spark plans and runs them again. So are those after a hole,
        as a query leaves it that goes on although its log was put right.
        """
        commits = _numbers(self._storage.names(COMMITS))  # first: another driver may add to both
        paths = manifest_paths(self._storage.names(FOLDER))
        metadata = self._storage.get(METADATA)
        if not paths and metadata is not None and not metadata.strip(b"\0"):
            self._storage.delete(".metadata.crc")
            self._storage.delete(METADATA)
        newest = max(map(epoch_of, paths), default=-1)
        oldest = min(_numbers(self._storage.names(OFFSETS)), default=0)
        # After many micro-batches that a user's function left out Spark has removed them itself.
        is_removed = oldest > newest + 1
        for epoch in () if is_removed else range(max(0, newest - 1), newest + 1):
            if self._entry(epoch) is None and (epoch == 0 or self._entry(epoch - 1) is not None):
                self._write_from_manifests(epoch, paths)
        entries = _numbers(self._storage.names(OFFSETS))
        hole = next((n for n in entries[1:] if n > newest and n - 1 not in entries), None)
        while entries and entries[-1] > newest:
            if (hole is None or entries[-1] < hole) and self._is_usable(entries[-1]):
                break
            self._remove(OFFSETS, entries.pop())
        last = entries[-1] if entries else -1
        while commits and (commits[-1] > last or not self._is_whole_commit(commits[-1])):
            self._remove(COMMITS, commits.pop())

    def _write_from_manifests(self, epoch: int, paths: Iterable[str]) -> None:
        data = [(p, self._storage.get(p)) for p in paths if epoch_of(p) == epoch]
        sources = {decode(content, p).sources for p, content in data if content is not None}
        if len(sources) != 1:
            return  # only the decision shows which of them counts: the driver asks for it
        before = self._entry(epoch - 1)
        head = (FORMAT, "{}") if before is None else before.head
        self._write(epoch, LoggedBatch(head, sources.pop()))

    def _is_usable(self, batch_id: int) -> bool:
        """True if Spark can start from an entry, for which the previous entry must exist too."""
        before = batch_id == 0 or self._entry(batch_id - 1) is not None
        return before and self._entry(batch_id) is not None

    def _is_whole_commit(self, batch_id: int) -> bool:
        data = self._storage.get(_path(COMMITS, batch_id))
        lines = _lines(data)
        return len(lines) > 1 and lines[0].startswith("v") and _is_json(lines[1])

    def _entry(self, batch_id: int) -> LoggedBatch | None:
        return parse_entry(self._storage.get(_path(OFFSETS, batch_id)))

    def _write(self, batch_id: int, entry: LoggedBatch) -> None:
        logger.warning(
            "checkpoint %s: %s is written again, as the manifest of epoch %d has it",
            self._storage.location,
            _path(OFFSETS, batch_id),
            batch_id,
        )
        self._storage.delete(_path(OFFSETS, batch_id, is_checksum=True))
        self._storage.delete(_path(OFFSETS, batch_id))
        self._storage.put(_path(OFFSETS, batch_id), entry.encode())

    def _remove(self, folder: str, batch_id: int) -> None:
        path = _path(folder, batch_id)
        logger.warning("checkpoint %s: %s is removed", self._storage.location, path)
        self._storage.delete(_path(folder, batch_id, is_checksum=True))
        self._storage.delete(path)


def _path(folder: str, batch_id: int, *, is_checksum: bool = False) -> str:
    """Return the path of an entry, or of the checksum that Hadoop keeps beside the entry."""
    return f"{folder}/.{batch_id}.crc" if is_checksum else f"{folder}/{batch_id}"


def _numbers(paths: Iterable[str]) -> list[int]:
    names = (path.rpartition("/")[2] for path in paths)
    return sorted(int(name) for name in names if name.isdecimal())


def _lines(data: bytes | None) -> list[str]:
    """Split as Spark does: in its JSON stand other characters that Python takes for ends of lines.

    Source: Scala's Source.getLines.
    """
    text = "" if data is None else data.decode(errors="replace").replace("\r\n", "\n")
    lines = text.replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
