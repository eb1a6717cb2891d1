"""One task of a keyed step over a state in a dict: epoch after epoch, without files and Spark."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from tallystick.state.catalog import StateField
from tallystick.state.compatibility import settle
from tallystick.state.functions.processing import Processor, SideRows, Work
from tallystick.state.functions.vectorised import ByColumns
from tallystick.state.key_groups import KeyGroupRange, key_group_range, key_groups_of
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import EpochTime, Overlay

MAX_PARALLELISM = 16


class DictView:
    """A committed state in a dict."""

    def __init__(self, entries: dict[bytes, bytes]) -> None:
        self._entries = entries

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        assert keys.to_pylist() == sorted(keys.to_pylist()), "quickest where they are sorted"
        return pa.array([self._entries.get(key) for key in keys.to_pylist()], pa.binary())

    def scan(self, first: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key in sorted(self._entries):
            if first <= key < end:
                yield key, self._entries[key]

    def batches(self, groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError


class OneTask:
    """Runs a processor on all key groups.

    Args:
        processor: what is tested.
        key: the names and types of the key's columns.
        rows: those of the rows, for a function that goes by them.
        event_time: the column that holds it.
    """

    def __init__(
        self,
        processor: Processor,
        key: pa.Schema,
        rows: pa.Schema | None = None,
        event_time: str | None = None,
    ) -> None:
        if isinstance(processor, ByColumns):
            assert rows is not None
            processor = processor.make(rows)
        self.entries: dict[bytes, bytes] = {}
        self.written = 0
        self.output: list[pa.RecordBatch] = []
        self.side: list[SideRows] = []
        self.late = 0
        self._event_time = event_time
        self._processor = processor
        self._key = KeyCodec(key)
        fields, _ = settle("step", processor.declared(self._key), None)
        self._fields: dict[str, StateField] = {field.name: field for field in fields}

    def epoch(
        self,
        rows: pa.RecordBatch,
        *,
        timestamp_ms: int = 0,
        watermark_ms: int | None = None,
        parallelism: int = 1,
    ) -> list[dict[str, Any]]:
        """The output of one epoch; its changes become the committed state.

        Args:
            rows: all of the epoch.
            timestamp_ms: its clock.
            watermark_ms: of earlier epochs.
            parallelism: how many tasks share the key groups; it may be another in each epoch.
        """
        self.output, self.side, self.late, self.written = [], [], 0, 0
        changes = [
            self._task(rows, index, parallelism, EpochTime(timestamp_ms, watermark_ms))
            for index in range(parallelism)
        ]
        for change in changes:
            self._commit(change)
        return [row for batch in self.output for row in batch.to_pylist()]

    def _task(
        self, rows: pa.RecordBatch, index: int, parallelism: int, time: EpochTime
    ) -> pa.Table:
        groups = key_group_range(MAX_PARALLELISM, parallelism, index)
        of_rows = key_groups_of(self._key.hash_codes(rows), MAX_PARALLELISM)
        is_own = (of_rows >= groups.first) & (of_rows <= groups.last)
        work = Work(
            rows=_as_from_a_frame(rows.filter(pa.array(is_own))),
            key=self._key,
            max_parallelism=MAX_PARALLELISM,
            groups=groups,
            fields=self._fields,
            overlay=Overlay(DictView(self.entries)),
            time=time,
            event_time=self._event_time,
        )
        for batch in self._processor.run(work):
            (self.side if isinstance(batch, SideRows) else self.output).append(batch)
        self.late += sum(work.late)
        changes = work.overlay.changes()
        for key in changes["key"].to_pylist():
            assert groups.first <= int.from_bytes(key[:2], "big") <= groups.last, "not its own"
        return changes

    def _commit(self, changes: pa.Table) -> None:
        keys = changes["key"].to_pylist()
        assert keys == sorted(set(keys)), "each key is written once"
        for key, value in zip(keys, changes["value"].to_pylist(), strict=True):
            assert self.entries.get(key) != value, "what did not change is not written"
            if value is None:
                del self.entries[key]
            else:
                self.entries[key] = value
        self.written += len(keys)


def _as_from_a_frame(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows in memory that cannot be written to, as tasks get them."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    with pa.ipc.open_stream(sink.getvalue().to_pybytes()) as stream:
        return stream.read_next_batch()
