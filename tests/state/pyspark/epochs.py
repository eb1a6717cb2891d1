"""A keyed step in one process: epochs by hand, its state in a dict."""

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from tallystick.state.catalog import StateField, StepState
from tallystick.state.compatibility import settle
from tallystick.state.functions.processing import Work
from tallystick.state.key_groups import KeyGroupRange, key_group_range, key_groups_of
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import EpochTime, Overlay
from tallystick.state.pyspark.processor import RowProcessor, row_processor

KEY = KeyCodec(pa.schema([("k", pa.string())]))
ROWS = pa.schema([("k", pa.string()), ("v", pa.string()), ("ms", pa.int64())])


class DictView:
    """A committed state: a sorted dict."""

    def __init__(self, entries: Mapping[bytes, bytes]) -> None:
        self._entries = dict(entries)
        self._keys = sorted(entries)
        self.scans = 0

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        return pa.array([self._entries.get(key) for key in keys.to_pylist()], pa.binary())

    def scan(self, first: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        self.scans += 1
        for at in range(bisect.bisect_left(self._keys, first), len(self._keys)):
            if self._keys[at] >= end:
                return
            yield self._keys[at], self._entries[self._keys[at]]

    def batches(self, groups: KeyGroupRange) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError


def rows(*values: tuple[Any, ...], schema: pa.Schema = ROWS) -> pa.RecordBatch:
    """Rows from tuples; what is missing at the end is null."""
    names = schema.names
    return pa.RecordBatch.from_pylist(
        [dict(zip(names, value, strict=False)) for value in values], schema=schema
    )


@dataclass
class Epochs:
    """A step that runs epoch after epoch, split among `parallelism` tasks."""

    processor: RowProcessor
    key: KeyCodec = KEY
    max_parallelism: int = 8
    parallelism: int = 1
    entries: dict[bytes, bytes] = field(default_factory=dict)
    fields: tuple[StateField, ...] = ()
    next_id: int = 1
    epoch_count: int = 0

    def restart(self, processor: RowProcessor | None = None) -> None:
        """What a driver does at its start."""
        self.processor = processor or self.processor
        base = StepState("step", self.max_parallelism, 1, "", 1, self.fields, self.next_id)
        self.fields, self.next_id = settle("step", self.processor.declared(self.key), base)

    def run(
        self, batch: pa.RecordBatch, now: int = 0, watermark: int | None = None
    ) -> list[tuple[Any, ...]]:
        """One epoch; returns its rows."""
        if not self.epoch_count:
            self.restart()
        groups = key_groups_of(self.key.hash_codes(batch), self.max_parallelism)
        returned: list[tuple[Any, ...]] = []
        changes: dict[bytes, bytes | None] = {}
        for index in range(self.parallelism):
            mine = key_group_range(self.max_parallelism, self.parallelism, index)
            overlay = Overlay(DictView(self.entries))
            is_mine = pa.array((groups >= mine.first) & (groups <= mine.last))
            work = Work(
                batch.filter(is_mine),
                self.key,
                self.max_parallelism,
                mine,
                {state.name: state for state in self.fields},
                overlay,
                EpochTime(now, watermark),
                is_first=self.epoch_count == 0,
            )
            for out in self.processor.run(work):
                returned.extend(tuple(row.values()) for row in out.to_pylist())
            table = overlay.changes()
            changes.update(zip(*(column.to_pylist() for column in table.columns), strict=True))
        self.commit(changes)
        return returned

    def commit(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Make an epoch's changes the state."""
        self.epoch_count += 1
        for key, value in changes.items():
            if value is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = value


def epochs_of(
    processor: Any, output: Any = "k string, what string, val string", **given: Any
) -> Epochs:
    """A step of a StatefulProcessor; `of_step` are arguments of `Epochs`."""
    of_step = {
        name: given.pop(name) for name in ("key", "parallelism", "max_parallelism") if name in given
    }
    return replace(Epochs(row_processor(processor, output=output, **given)), **of_step)


def values(answers: Iterable[tuple[Any, ...]], what: str) -> list[Any]:
    """The third column of the rows whose second is `what`."""
    return [row[2] for row in answers if row[1] == what]
