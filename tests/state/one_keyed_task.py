"""One task of a keyed step over a state in a dict: epoch after epoch, without files and Spark."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from tallystick.state.catalog import StateField
from tallystick.state.compatibility import settle
from tallystick.state.functions.processing import Processor, Work
from tallystick.state.functions.vectorised import ByColumns
from tallystick.state.key_groups import KeyGroupRange
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
    """

    def __init__(self, processor: Processor, key: pa.Schema, rows: pa.Schema | None = None) -> None:
        if isinstance(processor, ByColumns):
            assert rows is not None
            processor = processor.make(rows)
        self.entries: dict[bytes, bytes] = {}
        self.written = 0
        self.output: list[pa.RecordBatch] = []
        self._processor = processor
        self._key = KeyCodec(key)
        fields, _ = settle("step", processor.declared(self._key), None)
        self._fields: dict[str, StateField] = {field.name: field for field in fields}

    def epoch(
        self, rows: pa.RecordBatch, *, timestamp_ms: int = 0, watermark_ms: int | None = None
    ) -> list[dict[str, Any]]:
        """The output of one epoch; its changes become the committed state."""
        overlay = Overlay(DictView(self.entries))
        rows = _as_from_a_frame(rows)
        work = Work(
            rows=rows,
            key=self._key,
            max_parallelism=MAX_PARALLELISM,
            groups=KeyGroupRange(0, MAX_PARALLELISM - 1),
            fields=self._fields,
            overlay=overlay,
            time=EpochTime(timestamp_ms, watermark_ms),
        )
        self.output = list(self._processor.run(work))
        output = [row for batch in self.output for row in batch.to_pylist()]
        changes = overlay.changes()
        keys = changes["key"].to_pylist()
        assert keys == sorted(set(keys)), "each key is written once"
        for key, value in zip(keys, changes["value"].to_pylist(), strict=True):
            assert self.entries.get(key) != value, "what did not change is not written"
            if value is None:
                del self.entries[key]
            else:
                self.entries[key] = value
        self.written = len(keys)
        return output


def _as_from_a_frame(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows in memory that cannot be written to, as tasks get them."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    with pa.ipc.open_stream(sink.getvalue().to_pybytes()) as stream:
        return stream.read_next_batch()
