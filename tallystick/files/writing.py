"""The task's side of the sink: rows are written into drafts by partition, in bounded memory.

A partition is a folder, `col=value/…`, as Hive and Spark name them.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.epoch.two_phase import Committable, Guarantee, LossyTransaction, Place, Transaction
from tallystick.errors import OptionError, RecordError, StorageError
from tallystick.files.drafts import Drafts, File, check_disk, hidden_folder, name_of
from tallystick.files.folder import Folder
from tallystick.files.parquet import OpenParquet, WaitingRows
from tallystick.host.stopwatch import WRITTEN_FILE_BYTES, WRITTEN_FILES, count

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
"""The folder of null; also of the empty text, which Hive and Spark cannot distinguish from it."""
NAME_BYTES_MAX = 255
"""The longest name of a file or folder on the usual file systems."""

_ESCAPED = {chr(code) for code in range(0x20)} | set("\x7f\"#%'*/:=?\\{[]^")
"""Source: Spark's ExternalCatalogUtils.escapePathName."""


def escape(text: str) -> str:
    """Return the name or the value of a column as a part of a path."""
    return "".join(f"%{ord(char):02X}" if char in _ESCAPED else char for char in text)


def is_possible(kind: pa.DataType) -> bool:
    """True if values of a type have a text that every reader parses to the same value."""
    if pa.types.is_dictionary(kind):
        return is_possible(kind.value_type)
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_null(kind)
    )


def split(rows: pa.RecordBatch, by: Sequence[str]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield the rows of each folder, in their order, without the columns in the folder's name.

    Raises:
        RecordError: a column is missing, or a value cannot be part of a path.
    """
    for values, part in split_by_values(rows, by):
        yield _folder(by, values), part


def split_by_values(
    rows: pa.RecordBatch, by: Sequence[str]
) -> Iterator[tuple[list[str | None], pa.RecordBatch]]:
    """Yield the rows of each partition, in their order, without the columns that partition them.

    Raises:
        RecordError: a column is missing, or of a type that `is_possible` refuses.
    """
    columns = [_as_text(rows, name) for name in by]
    rest = rows.drop_columns(list(by))
    groups, index = _numbered(columns)
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        picked = order[start:stop]
        values = [column.dictionary[int(codes[picked[0]])].as_py() for column, codes in index]
        yield values, rest if len(picked) == len(order) else rest.take(picked)


def _as_text(rows: pa.RecordBatch, name: str) -> Any:
    place = rows.schema.get_field_index(name)
    if place < 0:
        raise RecordError(
            f"file sink: partition_by names column {name!r}, and the rows have "
            f"{', '.join(rows.schema.names)}"
        )
    column = rows.column(place)
    if not is_possible(column.type):
        raise RecordError(
            f"file sink: partition_by column {name!r} is {column.type}: expected text, integers, "
            f"booleans or dates. Partition by a column made of it, such as its date."
        )
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.string()).dictionary_encode(null_encoding="encode")


def _numbered(columns: list[Any]) -> tuple[np.ndarray, list[tuple[Any, np.ndarray]]]:
    """Return a number per row, the same for equal rows; and each column with its codes."""
    index = [(column, column.indices.to_numpy(zero_copy_only=False)) for column in columns]
    groups = np.zeros(len(columns[0]), np.int64)
    for column, codes in index:
        _, groups = np.unique(groups * (len(column.dictionary) + 1) + codes, return_inverse=True)
    return groups, index


def _folder(by: Sequence[str], values: list[str | None]) -> str:
    names = [
        f"{escape(name)}={escape(text) if text else NULL_FOLDER}"
        for name, text in zip(by, values, strict=True)
    ]
    for name in names:
        if len(name.encode()) > NAME_BYTES_MAX:
            raise RecordError(
                f"file sink: a value of partition_by column {name.partition('=')[0]!r} is too long "
                f"for a folder's name: {len(name.encode())} bytes of at most {NAME_BYTES_MAX}: "
                f"{name[:80]}…"
            )
    return "/".join(names)


def bare(kind: pa.DataType) -> pa.DataType:
    """Return a type whose every field may be null."""
    if pa.types.is_struct(kind):
        return pa.struct([bare_field(kind.field(place)) for place in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, bare_field(kind.item_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(bare_field(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(bare_field(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(bare_field(kind.value_field))
    return kind


def bare_field(field: pa.Field) -> pa.Field:
    """Return a field that may be null, as may all fields inside."""
    return pa.field(field.name, bare(field.type), nullable=True)


def bare_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema whose every field may be null, without metadata."""
    return pa.schema([bare_field(field) for field in schema])


def conformed(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows in a schema whose every field may be null.

    Raises:
        RecordError: the schemas differ in more than nulls and metadata.
    """
    if rows.schema.equals(schema):
        return rows
    actual = bare_schema(rows.schema)
    if not actual.equals(schema):
        raise RecordError(
            f"file sink: one file has one schema: expected {_shown(schema)}; found "
            f"{_shown(actual)}. Cast the rows before the sink, or state the columns by schema=."
        )
    return pa.RecordBatch.from_arrays(
        [pc.cast(column, field.type) for column, field in zip(rows.columns, schema, strict=True)],
        schema=schema,
    )


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


FILE_BYTES_MAX = 4 << 30
"""A file that is longer is followed by another: S3 copies 5 GB in one request, not more."""
BUFFER_BYTES_MAX = 64 << 20
"""Rows that wait for their row group, of all partitions of a task."""
NUMBER_MAX = 9999
"""The number of a task's file in one partition for which a name must have room."""
OPEN_PARTITIONS_MAX = 500
"""Each has an open file: processes may often have no more than 1024."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FilePlan:
    """The settings by which tasks write files.

    Args:
        folder: the sink's path.
        partition_by: columns that become folders.
        compression: of Parquet.
        row_group_rows: the most rows of a row group.
        guarantee: of the sink.
        schema: of all files; None: the schema of a task's first rows.
    """

    folder: Folder
    partition_by: tuple[str, ...]
    compression: str
    row_group_rows: int
    guarantee: Guarantee
    schema: pa.Schema | None

    def begin(self, place: Place) -> Transaction:
        """See `TransactionPlan.begin`; names of an attempt are unique, so none collide."""
        check_disk(self.folder, place.owner)
        if self.guarantee is Guarantee.NONE:
            return LossyTransaction(
                lambda: FileTransaction(self, place),
                place,
                (StorageError,),
                logger.warning,
                by_batch=False,
            )
        return FileTransaction(self, place)


class FileTransaction:
    """The drafts of one attempt of a task. See `epoch.two_phase.Transaction`."""

    def __init__(self, plan: FilePlan, place: Place) -> None:
        self._plan = plan
        self._place = place
        self._drafts = Drafts(plan.folder.location, hidden_folder(place.owner), name_of(place))
        self._schema = plan.schema and bare_schema(plan.schema)
        self._parts: dict[str, _Part] = {}
        self._row_count = 0
        self._begun_ms = int(time.time() * 1000)
        self._buffered = 0

    def write(self, rows: pa.RecordBatch) -> None:
        """See `Transaction.write`."""
        if self._schema is None:
            self._schema = bare_schema(rows.schema)
        rows = conformed(rows, self._schema)
        by = self._plan.partition_by
        if set(by) >= set(rows.schema.names):  # a file without columns holds no rows
            raise OptionError(
                f"file sink {self._drafts.location}: partition_by={list(by)!r} names all columns "
                f"of the rows: no column is left for the files"
            )
        for folder, part_rows in split(rows, by) if by else [("", rows)]:
            part = self._parts.get(folder) or self._new_part(folder, part_rows.schema)
            self._buffered += part.waiting.take(part_rows)
            if part.waiting.row_count >= self._plan.row_group_rows:
                self._buffered -= part.flush()
        while self._buffered > BUFFER_BYTES_MAX:
            largest = max(self._parts.values(), key=lambda part: part.waiting.byte_count)
            self._buffered -= largest.flush()
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
        """See `Transaction.prepare`; below exactly-once, files are visible after the call."""
        files = tuple(file for part in self._parts.values() for file in part.close())
        if not files:
            return ()
        count(WRITTEN_FILES, len(files))
        count(WRITTEN_FILE_BYTES, sum(file.size for file in files))
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


class _Part:
    """The files of one partition, the last still open, and the rows that wait to be written."""

    def __init__(self, plan: FilePlan, drafts: Drafts, folder: str, schema: pa.Schema) -> None:
        self.plan, self.drafts, self.folder = plan, drafts, folder
        self.waiting = WaitingRows(schema)
        self._files: list[File] = []
        self._open: OpenParquet | None = None

    def flush(self) -> int:
        """Write the waiting rows; return their size in bytes."""
        if self.waiting:
            with self._failing():
                if self._open is None:
                    draft = self.drafts.draft(File(self.folder, len(self._files), 0))
                    schema, compression = self.waiting.schema, self.plan.compression
                    self._open = OpenParquet(self.plan.folder, draft, schema, compression)
                size = self._open.write(self.waiting.table(), self.plan.row_group_rows)
            if size > FILE_BYTES_MAX:
                self._close_file(self._open)
        return self.waiting.clear()

    def close(self) -> list[File]:
        """Write the waiting rows and end the file; return all files of the partition."""
        self.flush()
        if self._open is not None:
            self._close_file(self._open)
        return self._files

    def drop(self) -> None:
        """Close the open file."""
        if self._open is not None:
            self._open.drop()

    def _close_file(self, file: OpenParquet) -> None:
        with self._failing():
            size = file.close()
        self._files.append(File(self.folder, len(self._files), size))
        self._open = None

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
