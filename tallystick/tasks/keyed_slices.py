"""The rows of a keyed task in slices of its key groups, so that they need not be in memory at once.

A slice is what a task of its own would have: all rows of some key groups, in their order of
arrival. So each key is in one slice only, and a function sees no difference between ten slices of
one task and ten tasks.

Rows stay in memory as long as they fit. Else they go to a file of this host, sorted by runs of key
groups; its pieces are read back run by run. The rows of one key group are always one slice: only
the size of an epoch bounds them.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, NamedTuple, Self

import numpy as np
import pyarrow as pa

from tallystick.state.key_groups import KeyGroupRange, key_groups_of
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import one_batch
from tallystick.tasks.frames import from_ipc, to_ipc

SLICE_BYTES = 64 << 20
"""The default number of bytes of rows that a task holds at a time."""
RUN_COUNT = 64
"""The key groups of a task are at most this many runs; larger slices are several of them."""
FOLDERS_VARIABLE = "SPARK_LOCAL_DIRS"
"""The variable in which Spark gives its Python workers the folders for what exceeds memory."""


class Slice(NamedTuple):
    """Some of a task's key groups, with all their rows."""

    groups: KeyGroupRange
    rows: pa.RecordBatch


class _Piece(NamedTuple):
    """Rows of one run in the file."""

    offset: int
    length: int
    size: int  # in memory


class Slices:
    """Takes in a task's rows, and gives them back in slices.

    Args:
        columns: of the rows.
        key: of the step.
        max_parallelism: of the step.
        groups: those of the task.
        bytes_max: rows to hold at a time.
        what: they are, for messages.
    """

    def __init__(
        self,
        columns: pa.Schema,
        key: KeyCodec,
        max_parallelism: int,
        groups: KeyGroupRange,
        bytes_max: int,
        what: str,
    ) -> None:
        self._columns, self._key, self._max_parallelism = columns, key, max_parallelism
        self._groups, self._bytes_max, self._what = groups, bytes_max, what
        self._batches: list[pa.RecordBatch] = []
        self._batch_bytes = 0
        self._open = ExitStack()
        self._file: IO[bytes] | None = None
        self._file_size = 0
        group_count = groups.last + 1 - groups.first
        count = min(RUN_COUNT, group_count)
        self._firsts = groups.first + np.arange(count + 1) * group_count // count
        self._runs: list[list[_Piece]] = [[] for _ in range(count)]
        self.row_count = 0
        self.byte_count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, rows: pa.RecordBatch) -> None:
        """Take in rows that arrived after all others."""
        if rows.num_rows == 0:
            return
        size = rows.nbytes
        if self._batches and self._batch_bytes + size > self._bytes_max:
            self._put_away()
        self._batches.append(rows)
        self._batch_bytes += size
        self.row_count += rows.num_rows
        self.byte_count += size

    def __iter__(self) -> Iterator[Slice]:
        """Yield all key groups of the task, ascending; those without rows too. Works only once."""
        if self._file is None:
            rows, self._batches = self._together(self._batches), []
            yield Slice(self._groups, rows)
            return
        self._put_away()
        first, pieces, size = 0, list[_Piece](), 0
        for run, run_pieces in enumerate(self._runs):
            more = sum(piece.size for piece in run_pieces)
            if pieces and size + more > self._bytes_max:
                yield self._slice(first, run, pieces)
                first, pieces, size = run, [], 0
            pieces, size = pieces + run_pieces, size + more
        yield self._slice(first, len(self._runs), pieces)

    def _slice(self, first: int, stop: int, pieces: list[_Piece]) -> Slice:
        groups = KeyGroupRange(int(self._firsts[first]), int(self._firsts[stop]) - 1)
        # In the order of the file: that of arrival.
        return Slice(groups, self._together([self._read(piece) for piece in sorted(pieces)]))

    def _read(self, piece: _Piece) -> pa.RecordBatch:
        assert self._file is not None, "there are pieces"
        self._file.seek(piece.offset)
        return from_ipc(self._file.read(piece.length))

    def _put_away(self) -> None:
        """Sort what is held by runs of key groups, and append it to the file."""
        if self._file is None:
            self._file = self._open.enter_context(overflow_file())
        rows, self._batches, self._batch_bytes = self._together(self._batches), [], 0
        groups = key_groups_of(self._key.hash_codes(rows), self._max_parallelism)
        runs = (np.searchsorted(self._firsts, groups, "right") - 1).astype(np.uint16)
        order = np.argsort(runs, kind="stable")
        ordered = rows.take(pa.array(order))
        del rows
        bounds = np.searchsorted(runs[order], np.arange(len(self._runs) + 1))
        self._file.seek(0, os.SEEK_END)
        for run in np.flatnonzero(np.diff(bounds)).tolist():
            first, stop = int(bounds[run]), int(bounds[run + 1])
            part = ordered.slice(first, stop - first)
            data = to_ipc(part)
            self._file.write(data)
            self._runs[run].append(_Piece(self._file_size, len(data), part.nbytes))
            self._file_size += len(data)

    def _together(self, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        return one_batch(
            pa.Table.from_batches(batches, self._columns),
            self._what,
            "set max_offsets_per_trigger, or a larger parallelism",
        )


def overflow_file() -> IO[bytes]:
    """Make a file without a name in the first folder that Spark names, or the system's own."""
    folder = os.environ.get(FOLDERS_VARIABLE, "").split(",")[0] or None
    return tempfile.TemporaryFile(prefix="tallystick-", dir=folder)
