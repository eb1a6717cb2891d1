"""The task's side: rows go into drafts, one per partition, as they come; memory is bounded."""

import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tallystick.errors import OptionError, RecordError, StorageError
from tallystick.files import partitions
from tallystick.files.drafts import SEEN, Drafts, File, hidden_folder, name_of
from tallystick.files.folder import Folder
from tallystick.sink.two_phase import Committable, Guarantee, Place

FILE_BYTES_MAX = 4 << 30
"""A file that is longer is followed by another: S3 copies 5 GB in one request, not more."""
BUFFER_BYTES_MAX = 64 << 20
"""Rows that wait for their row group, of all partitions of a task."""
NUMBER_MAX = 9999
"""Of a task's files of one partition, as far as their names' length goes."""
OPEN_PARTITIONS_MAX = 500
"""Each has an open file: processes may often have no more than 1024."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FilePlan:
    """How tasks write files.

    Args:
        folder: the sink's path.
        partition_by: columns that become folders.
        compression: of Parquet.
        row_group_rows: the most rows of a row group.
        guarantee: of the sink.
        schema: of all files; None: that of a task's first rows.
    """

    folder: Folder
    partition_by: tuple[str, ...]
    compression: str
    row_group_rows: int
    guarantee: Guarantee
    schema: pa.Schema | None

    def begin(self, place: Place) -> "FileTransaction | WarnedTransaction":
        """See `TransactionPlan.begin`; no other attempt has its names, so none is in the way."""
        self._check_disk(place)
        transaction = FileTransaction(self, place)
        if self.guarantee is Guarantee.NONE:
            return WarnedTransaction(transaction, place)
        return transaction

    def _check_disk(self, place: Place) -> None:
        """A driver that does not see the drafts would take them for lost."""
        seen = f"{hidden_folder(place.owner)}/{SEEN}"
        if self.folder.is_local and not self.folder.sizes([seen]):
            raise OptionError(
                f"file sink {self.folder.location}: a task on {socket.gethostname()} does not find "
                f"{seen} there, which the driver wrote: expected one disk that the driver and all "
                f"executors see. Mount it everywhere, or write to S3, HDFS or the like."
            )


class FileTransaction:
    """Drafts of one attempt of a task. See `sink.two_phase.Transaction`."""

    def __init__(self, plan: FilePlan, place: Place) -> None:
        self._plan = plan
        self._place = place
        self._drafts = Drafts(plan.folder.location, hidden_folder(place.owner), name_of(place))
        self._schema = plan.schema and partitions.bare_schema(plan.schema)
        self._parts: dict[str, _Part] = {}
        self._row_count = 0
        self._begun_ms = int(time.time() * 1000)
        self._buffered = 0

    def write(self, rows: pa.RecordBatch) -> None:
        """See `Transaction.write`."""
        if self._schema is None:
            self._schema = partitions.bare_schema(rows.schema)
        rows = partitions.conformed(rows, self._schema)
        by = self._plan.partition_by
        if set(by) >= set(rows.schema.names):  # a file without columns holds no rows
            raise OptionError(
                f"file sink {self._drafts.location}: partition_by={list(by)!r} names all columns "
                f"of the rows: no column is left for the files"
            )
        for folder, part_rows in partitions.split(rows, by) if by else [("", rows)]:
            part = self._parts.get(folder) or self._new_part(folder, part_rows.schema)
            self._buffered += part.take(part_rows)
            if part.row_count >= self._plan.row_group_rows:
                self._buffered -= part.flush()
        while self._buffered > BUFFER_BYTES_MAX:
            self._buffered -= max(self._parts.values(), key=lambda part: part.byte_count).flush()
        self._row_count += rows.num_rows

    def _new_part(self, folder: str, schema: pa.Schema) -> "_Part":
        if len(self._parts) == OPEN_PARTITIONS_MAX:
            raise RecordError(
                f"file sink {self._drafts.location}: one task writes into more than "
                f"{OPEN_PARTITIONS_MAX} partitions of {', '.join(self._plan.partition_by)} in one "
                f"epoch, the newest is {folder}. Partition by a coarser column, or key the rows by "
                f"the same columns first, so that a task has few of them."
            )
        draft = self._drafts.draft(File(folder, NUMBER_MAX, 0))
        room = self._plan.folder.room_for(draft)
        if room < 0:
            raise RecordError(
                f"file sink {self._drafts.location}: the path of a file would be {-room} bytes "
                f"longer than its file system allows, with the values of partition_by in it: "
                f"{folder[:200]}… Partition by fewer columns, or by shorter values; or choose a "
                f"shorter path."
            )
        self._parts[folder] = _Part(self._plan, self._drafts, folder, schema)
        return self._parts[folder]

    def prepare(self) -> Sequence[Committable]:
        """See `Transaction.prepare`; below exactly-once, the files are visible when it returns."""
        files = tuple(file for part in self._parts.values() for file in part.close())
        if not files:
            return ()
        drafts, folder = self._drafts._replace(files=files), self._plan.folder
        folder.sync_files(drafts.draft(file) for file in files)
        if self._plan.guarantee is not Guarantee.EXACTLY_ONCE:
            folder.reveal((drafts.draft(file), drafts.final(file)) for file in files)
            folder.remove(drafts.pending)
            return ()
        place = self._place
        return (
            Committable(
                sink=place.owner.sink,
                checkpoint_id=place.checkpoint_id,
                task=place.task,
                name=drafts.name,
                record_count=self._row_count,
                begun_ms=self._begun_ms,
                details=drafts.details,
            ),
        )

    def abort(self) -> None:
        """See `Transaction.abort`."""
        for part in self._parts.values():
            with contextlib.suppress(Exception):
                part.drop()
        with contextlib.suppress(Exception):
            self._plan.folder.remove(self._drafts.pending)


class WarnedTransaction:
    """A transaction that nothing depends on: what fails is said, with its rows, and passed over."""

    def __init__(self, transaction: FileTransaction, place: Place) -> None:
        self._transaction = transaction
        self._place = place
        self._row_count = 0
        self._error: StorageError | None = None

    def write(self, rows: pa.RecordBatch) -> None:
        """See `Transaction.write`."""
        self._row_count += rows.num_rows
        if self._error is None:
            try:
                self._transaction.write(rows)
            except StorageError as error:
                self._error = error

    def prepare(self) -> Sequence[Committable]:
        """See `Transaction.prepare`."""
        if self._error is None:
            try:
                return self._transaction.prepare()
            except StorageError as error:
                self._error = error
        self._transaction.abort()
        logger.warning(
            "%d rows of epoch %d, task %d are lost, and guarantee='none' goes on without them: %s",
            self._row_count,
            self._place.checkpoint_id,
            self._place.task,
            self._error,
        )
        return ()

    def abort(self) -> None:
        """See `Transaction.abort`."""
        self._transaction.abort()


@dataclass
class _Part:
    """The files of one partition, of which the last one is open, and rows that wait for it."""

    plan: FilePlan
    drafts: Drafts
    folder: str
    schema: pa.Schema
    row_count: int = 0
    byte_count: int = 0
    _waiting: list[pa.RecordBatch] = field(default_factory=list)
    _files: list[File] = field(default_factory=list)
    _stream: Any = None
    _writer: Any = None

    def take(self, rows: pa.RecordBatch) -> int:
        """Let rows wait; how many bytes they have."""
        self._waiting.append(rows)
        byte_count = int(rows.nbytes)
        self.row_count += rows.num_rows
        self.byte_count += byte_count
        return byte_count

    def flush(self) -> int:
        """Write what waits; how many bytes that were."""
        if self._waiting:
            with self._failing():
                self._open()
                table = pa.Table.from_batches(self._waiting, self.schema)
                self._writer.write_table(table, row_group_size=self.plan.row_group_rows)
            if self._stream.tell() > FILE_BYTES_MAX:
                self._close_file()
        flushed, self._waiting = self.byte_count, []
        self.row_count = self.byte_count = 0
        return flushed

    def close(self) -> list[File]:
        """Write the rest, and end the file; all files of the partition."""
        self.flush()
        if self._stream is not None:
            self._close_file()
        return self._files

    def drop(self) -> None:
        """Let go of the open file."""
        with contextlib.suppress(Exception):
            if self._writer is not None:
                self._writer.close()
        if self._stream is not None:
            self._stream.close()

    def _open(self) -> None:
        if self._stream is None:
            file = File(self.folder, len(self._files), 0)
            self._stream = self.plan.folder.create(self.drafts.draft(file))
            self._writer = pq.ParquetWriter(
                self._stream, self.schema, compression=self.plan.compression
            )

    def _close_file(self) -> None:
        with self._failing():
            self._writer.close()
            size = self._stream.tell()
            self._stream.close()
        self._files.append(File(self.folder, len(self._files), size))
        self._stream = self._writer = None

    @contextlib.contextmanager
    def _failing(self) -> Any:
        try:
            yield
        except pa.ArrowNotImplementedError as error:
            raise RecordError(
                f"file sink {self.drafts.location}: Parquet has no place for these columns: {error}"
            ) from None
        except (OSError, pa.ArrowException) as error:
            file = File(self.folder, len(self._files), 0)
            name = self.drafts.final(file)
            raise self.plan.folder.failed(f"writing {name}", error) from None
