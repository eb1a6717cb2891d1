"""Files of keyed state: written by tasks, read back into their stores, collected by the driver.

A file counts only when a committed manifest names it. Names are never used twice: attempts that do
not know of each other cannot collide, and files of failed ones are found by the epoch in the name.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.errors import RetriableError, StateFileError
from tallystick.host.stopwatch import REBUILT_COPIES, REUSED_COPIES, count
from tallystick.ports import DeletesMany, StateStore, Storage
from tallystick.state.catalog import (
    CHANGELOG,
    FOLDER,
    PLAIN_NAME,
    SNAPSHOT,
    StateFile,
    StepState,
    Version,
)
from tallystick.state.changelog import (
    DamagedError,
    EncodedFile,
    Segment,
    decode,
    encode,
    parse_index,
    segments_of,
)
from tallystick.state.entries import living
from tallystick.state.evolution import converted
from tallystick.state.file_sets import Load, Step, needed, steps_from
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import ENTRIES, StateView, one_batch

WHOLE_FILE_BYTES = 256 << 10
"""A file up to this size is read whole, whatever is wanted of it: a request costs more."""

ROUNDS_MAX = 100
CHUNK_BYTES = 16 << 20
"""About this many bytes of files are in memory at a time while they are examined."""


class RestoreCost(NamedTuple):
    """The cost of bringing a store forward."""

    bytes_read: int
    requests: int


@dataclass
class _Reader:
    """Reads parts of state files, and counts; entries come in the step's newest schema.

    Args:
        storage: the checkpoint location.
        step: the state that names the files.
    """

    storage: Storage
    step: StepState
    bytes_read: int = 0
    requests: int = 0
    indexes: dict[str, list[Segment]] = field(default_factory=dict)

    def read(self, load: Load) -> Iterator[pa.RecordBatch]:
        """Return the entries of the load, in order.

        Raises:
            StateFileError: the file is missing or damaged.
        """
        try:
            entries = self._stored(load)
            if load.file.schema != self.step.schema:
                entries = (converted(batch, self.step, load.file.schema) for batch in entries)
            yield from entries
        except DamagedError as error:
            raise self._error(load.file, f"damaged: {error}") from None

    def _stored(self, load: Load) -> Iterator[pa.RecordBatch]:
        if self._is_read_whole(load):
            yield from self._whole(load)
        else:
            for groups in load.groups:
                yield from self._slice(load.file, groups)

    def _is_read_whole(self, load: Load) -> bool:
        return load.file.size <= WHOLE_FILE_BYTES or load.groups == (load.file.groups,)

    def _whole(self, load: Load) -> Iterator[pa.RecordBatch]:
        file = load.file
        data = self._fetched(file, self.storage.get(file.path), file.size)
        segments = parse_index(data[file.size - file.index_size :], file.checksum)
        for groups in load.groups:
            yield from _decoded(data, 0, segments_of(segments, groups), groups)

    def _slice(self, file: StateFile, groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        segments = segments_of(self._index(file), groups)
        if not segments:
            return
        start, stop = segments[0].offset, segments[-1].offset + segments[-1].length
        if stop > file.size:
            raise DamagedError(f"its index names bytes {start} to {stop} of {file.size}")
        fetched = self.storage.get_range(file.path, start, stop - start)
        data = self._fetched(file, fetched, stop - start)
        yield from _decoded(data, start, segments, groups)

    def _index(self, file: StateFile) -> list[Segment]:
        if file.path not in self.indexes:
            start = file.size - file.index_size
            fetched = self.storage.get_range(file.path, start, file.index_size)
            tail = self._fetched(file, fetched, file.index_size)
            self.indexes[file.path] = parse_index(tail, file.checksum)
        return self.indexes[file.path]

    def _fetched(self, file: StateFile, data: bytes | None, size: int) -> bytes:
        self.requests += 1
        if data is None:
            raise self._error(file, "missing")
        self.bytes_read += len(data)
        if len(data) != size:
            raise self._error(file, f"damaged: {len(data)} bytes where {size} were written")
        return data

    def _error(self, file: StateFile, what: str) -> StateFileError:
        return StateFileError(
            f"state file {file.path} of checkpoint {self.storage.location}, {file.kind} of epoch "
            f"{file.epoch}, key groups {file.first} to {file.last}: it is {what}. Nothing was "
            f"changed. Restore the file from a backup of the checkpoint, or start from a savepoint "
            f"or an older checkpoint that is whole (`tallystick inspect` names them)."
        )


def _decoded(
    data: bytes, start: int, segments: Sequence[Segment], groups: KeyGroupRange
) -> Iterator[pa.RecordBatch]:
    view = memoryview(data)
    for segment in segments:
        at = segment.offset - start
        yield decode(view[at : at + segment.length], segment, groups)


def bring_forward(
    store: StateStore, step: StepState, groups: KeyGroupRange, storage: Storage
) -> RestoreCost:
    """Bring a worker's store to the committed state, by the entries that it lacks.

    Args:
        store: of these key groups.
        step: the committed state.
        groups: those of the task.
        storage: the checkpoint location.

    Raises:
        StateFileError: a file is missing or damaged; the store has no version, or the one it had.
        RetriableError: others kept setting the store back.
    """
    reader, is_rebuilt = _Reader(storage, step), False
    for _ in range(ROUNDS_MAX):
        have = store.version()
        if step.version is None or have == step.version:
            if step.version is not None and not is_rebuilt:
                count(REUSED_COPIES, 1)
            return RestoreCost(reader.bytes_read, reader.requests)
        steps = steps_from(step, have, groups)
        if have not in step.trail:
            count(REBUILT_COPIES, 1)
            is_rebuilt = True
        store.apply(have, step.version, _read(steps, reader))
    raise RetriableError(
        f"the local copy of {step.uid!r}, key groups {groups.first} to {groups.last}: another "
        f"process set it back {ROUNDS_MAX} times. An older run of the pipeline lives on this host."
    )


def _read(steps: Iterable[Step], reader: _Reader) -> Iterator[KeyGroupRange | pa.RecordBatch]:
    for step in steps:
        if isinstance(step, Load):
            yield from reader.read(step)
        else:
            yield step


def read_entries(step: StepState, groups: KeyGroupRange, storage: Storage) -> pa.Table:
    """Return the committed entries of some key groups, without a store: for looking inside.

    Returns:
        `ENTRIES`, sorted by key.

    Raises:
        StateFileError: a file is missing or damaged.
    """
    reader = _Reader(storage, step)
    loads = needed(step.files, groups)
    newest = newest_entries([batch for load in loads for batch in reader.read(load)])
    return newest.filter(pc.is_valid(newest.column(1)))


class ChangedEntries(NamedTuple):
    """The way from one version of state to another.

    Args:
        is_whole: nothing of the version before counts.
        entries: `ENTRIES`, sorted by key, each key once.
    """

    is_whole: bool
    entries: pa.RecordBatch


def changes_since(
    step: StepState, have: Version | None, groups: KeyGroupRange, storage: Storage
) -> ChangedEntries:
    """Return the entries that lead from a version to the committed one, for copies in memory.

    Args:
        step: the committed state.
        have: what is there; None: nothing is.
        groups: all key groups of the copy.
        storage: the checkpoint location.

    Raises:
        StateFileError: a file is missing or damaged.
        OptionError: the entries are too many for one batch.
    """
    reader, is_whole = _Reader(storage, step), False
    batches: list[pa.RecordBatch] = []
    for part in _read(steps_from(step, have, groups), reader):
        if isinstance(part, pa.RecordBatch):
            batches.append(part)
        else:
            assert part == groups, "files of one copy speak for all of its key groups"
            is_whole, batches = True, []
    what = f"the entries of {step.uid}"
    newest = one_batch(newest_entries(batches), what, "narrow the rows that it keeps")
    return ChangedEntries(is_whole, newest)


def contents_of(step: StepState, groups: KeyGroupRange, storage: Storage) -> pa.RecordBatch:
    """Return the entries of some key groups, sorted by key; `ENTRIES`.

    Raises:
        StateFileError: a file is missing or damaged.
        OptionError: they are too many for one batch.
    """
    what = f"the entries of key groups {groups.first} to {groups.last} of step {step.uid}"
    return one_batch(read_entries(step, groups, storage), what, "spread them over more key groups")


def chunks_of(step: StepState, groups: KeyGroupRange) -> Iterator[KeyGroupRange]:
    """Return the key groups in parts that are small enough to hold, as far as single groups are."""
    size = sum(
        file.size * file.groups.intersection(groups).count // file.groups.count
        for file in step.files
    )
    count = max(1, min(groups.count, -(-size // CHUNK_BYTES)))
    yield from groups.parts(count)


def write_changelog(
    storage: Storage, uid: str, epoch: int, index: int, nonce: str, table: pa.Table
) -> StateFile | None:
    """Write the entries that an epoch changed.

    Args:
        storage: the checkpoint location.
        uid: of the step.
        epoch: the one that runs.
        index: of the task.
        nonce: that no other attempt has drawn.
        table: `ENTRIES`, sorted by key.

    Returns:
        The file, as the manifest is to name it; None where nothing was changed.
    """
    if table.num_rows == 0:
        return None
    path = _path(uid, epoch, index, nonce, CHANGELOG)
    return _put(storage, path, CHANGELOG, epoch, encode(table))


def write_snapshot(
    storage: Storage,
    uid: str,
    epoch: int,
    index: int,
    nonce: str,
    view: StateView,
    groups: KeyGroupRange,
    *,
    written_in: int | None = None,
    state_ids: Collection[int] | None = None,
) -> StateFile:
    """Write all entries of some key groups, as they are before the epoch that runs.

    Args:
        storage: the checkpoint location.
        uid: of the step.
        epoch: the last one that the view includes.
        index: of the task.
        nonce: that no other attempt has drawn.
        view: the committed state.
        groups: those of the snapshot.
        written_in: the epoch that runs, which the file's name carries: no driver collects the files
            of an epoch that it does not know to be committed. None: the one after `epoch`.
        state_ids: of the step's states: entries of deleted ones end here. None: all are kept.
    """
    entries = view.batches(groups)
    if state_ids is not None:
        entries = (living(batch, state_ids) for batch in entries)
    table = pa.Table.from_batches(entries, ENTRIES)
    path = _path(uid, _next(epoch, written_in), index, nonce, SNAPSHOT)
    return _put(storage, path, SNAPSHOT, epoch, encode(table, groups))


def write_merged(
    storage: Storage,
    uid: str,
    epoch: int,
    index: int,
    nonce: str,
    loads: Sequence[Load],
    *,
    base: StepState,
    written_in: int | None = None,
) -> StateFile:
    """Merge several changelogs into a new one: of each key, the newest entry.

    Args:
        storage: the checkpoint location.
        uid: of the step.
        epoch: the last one that is committed, as for `write_snapshot`.
        index: of the task.
        nonce: that no other attempt has drawn.
        loads: what `due_merges` gave.
        base: the state that names the files.
        written_in: as for `write_snapshot`.

    Raises:
        StateFileError: a file is missing or damaged.
    """
    reader = _Reader(storage, base)
    merged = newest_entries([batch for load in loads for batch in reader.read(load)])
    first = min(part.first for load in loads for part in load.groups)
    last = max(part.last for load in loads for part in load.groups)
    path = _path(uid, _next(epoch, written_in), index, f"{nonce}-merged", CHANGELOG)
    encoded = encode(merged, KeyGroupRange(first, last))
    first_epoch = min(load.file.epochs.start for load in loads)
    return _put(storage, path, CHANGELOG, epoch, encoded, first_epoch)


def _next(epoch: int, written_in: int | None) -> int:
    return epoch + 1 if written_in is None else written_in


def newest_entries(batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """Return the last entry of each key, sorted by key."""
    together = pa.Table.from_batches(batches, ENTRIES).combine_chunks()
    order = pa.array(np.arange(together.num_rows))
    numbered = together.append_column("order", order)
    ranks = pc.sort_indices(numbered, sort_keys=[("key", "ascending"), ("order", "ascending")])
    sorted_rows = together.take(ranks).combine_chunks()
    keys = sorted_rows.column("key").combine_chunks()
    if len(keys) < 2:
        return sorted_rows
    is_last = pc.not_equal(keys.slice(0, len(keys) - 1), keys.slice(1))
    return sorted_rows.filter(pa.concat_arrays([is_last, pa.array([True])]))


def state_files(storage: Storage) -> list[str]:
    """Return the names of all files of state in a checkpoint, of all steps."""
    folders = {"/".join(name.split("/")[:2]) for name in storage.names(FOLDER)}
    return [name for folder in sorted(folders) for name in storage.names(folder)]


def delete_all(storage: Storage, paths: Sequence[str], at_a_time: int = 1) -> None:
    """Remove files, several at a time: an object store takes its time for each.

    Args:
        storage: the checkpoint location.
        paths: what to remove.
        at_a_time: 1: one after the other, in this thread, as the simulated world needs it.
    """
    if at_a_time == 1:
        for path in paths:
            storage.delete(path)
        return
    if isinstance(storage, DeletesMany) and storage.delete_many(paths):
        return
    with ThreadPoolExecutor(at_a_time) as threads:
        list(threads.map(storage.delete, paths))


def _path(uid: str, epoch: int, index: int, nonce: str, kind: str) -> str:
    assert PLAIN_NAME.fullmatch(uid), uid
    return f"{FOLDER}/{uid}/{epoch:012d}-{index}-{nonce}.{kind}"


def _put(
    storage: Storage,
    path: str,
    kind: str,
    epoch: int,
    encoded: EncodedFile,
    first_epoch: int | None = None,
) -> StateFile:
    storage.put(path, encoded.data)
    return StateFile(
        path=path,
        kind=kind,
        epoch=epoch,
        first=encoded.first,
        last=encoded.last,
        size=len(encoded.data),
        index_size=encoded.index_size,
        checksum=encoded.checksum,
        rows=encoded.rows,
        first_epoch=first_epoch,
    )
