"""The tasks of a keyed step with several inputs, over state in a dict: epochs, rescaled at will."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from tallystick.state.catalog import StateField
from tallystick.state.compatibility import settle
from tallystick.state.entries import regrouped
from tallystick.state.functions.inputs import KeyedInputs
from tallystick.state.functions.processing import Processor, Work
from tallystick.state.functions.vectorised import ByColumns
from tallystick.state.key_groups import KeyGroupRange, key_group_range, key_groups_of
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import ENTRIES, EpochTime, Overlay
from tests.state.one_keyed_task import MAX_PARALLELISM, DictView, _as_from_a_frame

Arrival = tuple[int, Mapping[str, Any]]
"""A row: the number of its input, and its columns."""


class CoKeyedTasks:
    """Runs a processor on rows of several inputs.

    Args:
        processor: what is tested.
        inputs: of the step.
    """

    def __init__(self, processor: Processor, inputs: KeyedInputs) -> None:
        self.inputs = inputs
        if isinstance(processor, ByColumns):
            processor = processor.make(inputs.columns)
        self.processor = processor
        self.entries: dict[bytes, bytes] = {}
        self.max_parallelism = MAX_PARALLELISM
        self.batch_rows: list[int] = []
        self.late = 0
        names = inputs.inputs[0].key
        self.key = KeyCodec(pa.schema([inputs.columns.field(name) for name in names]))
        fields, _ = settle("step", processor.declared(self.key), None)
        self.fields: dict[str, StateField] = {field.name: field for field in fields}

    def table(self, arrivals: Iterable[Arrival]) -> pa.RecordBatch:
        """Rows in their order of arrival, as one table."""
        arrived = list(arrivals)
        parts, order = [], []
        for number, keyed_input in enumerate(self.inputs.inputs):
            of_it = [at for at, (whose, _) in enumerate(arrived) if whose == number]
            rows = [dict(arrived[at][1]) for at in of_it]
            columns = pa.RecordBatch.from_pylist(rows, keyed_input.columns)
            parts.append(self.inputs.numbered(number, columns))
            order += of_it
        places = sorted(range(len(order)), key=order.__getitem__)
        return one_table(self.inputs, parts).take(pa.array(places, pa.int64()))

    def epoch(
        self,
        rows: pa.RecordBatch | Sequence[Arrival],
        *,
        watermark_ms: int | None = None,
        timestamp_ms: int = 0,
        parallelism: int = 1,
    ) -> list[dict[str, Any]]:
        """The output of one epoch; its changes become the committed state."""
        if not isinstance(rows, pa.RecordBatch):
            rows = self.table(rows)
        groups_of_rows = key_groups_of(self.key.hash_codes(rows), self.max_parallelism)
        output: list[dict[str, Any]] = []
        works = []
        self.batch_rows, self.late = [], 0
        for index in range(parallelism):
            groups = key_group_range(self.max_parallelism, parallelism, index)
            mine = (groups_of_rows >= groups.first) & (groups_of_rows <= groups.last)
            part = _as_from_a_frame(rows.filter(pa.array(mine)))
            work = self.work(part, groups, timestamp_ms=timestamp_ms, watermark_ms=watermark_ms)
            works.append(work)
            for batch in self.processor.run(work):
                assert batch.schema == self.processor.output(self.key.schema, rows.schema)
                batch.validate(full=True)
                self.batch_rows.append(batch.num_rows)
                output += batch.to_pylist()
        for work in works:
            self.commit(work.overlay.changes())
            self.late += sum(work.late)
        return output

    def work(
        self,
        rows: pa.RecordBatch,
        groups: KeyGroupRange | None = None,
        *,
        timestamp_ms: int = 0,
        watermark_ms: int | None = None,
    ) -> Work:
        """One task's part of an epoch, which sees the state of its own key groups alone."""
        groups = groups or KeyGroupRange(0, self.max_parallelism - 1)
        entries = {
            key: value
            for key, value in self.entries.items()
            if groups.first <= int.from_bytes(key[:2], "big") <= groups.last
        }
        return Work(
            rows=rows,
            key=self.key,
            max_parallelism=self.max_parallelism,
            groups=groups,
            fields=self.fields,
            overlay=Overlay(DictView(entries)),
            time=EpochTime(timestamp_ms, watermark_ms),
        )

    def commit(self, changes: pa.Table) -> None:
        """Make changes the committed state."""
        keys = changes["key"].to_pylist()
        assert keys == sorted(set(keys)), "each key is written once"
        for key, value in zip(keys, changes["value"].to_pylist(), strict=True):
            assert self.entries.get(key) != value, "what did not change is not written"
            if value is None:
                del self.entries[key]
            else:
                self.entries[key] = value

    def migrate(self, max_parallelism: int) -> None:
        """Bring the state to another number of key groups, as `savepoint migrate` does."""
        keys = sorted(self.entries)
        columns = [pa.array(keys, pa.binary()), pa.array([self.entries[k] for k in keys])]
        entries = pa.RecordBatch.from_arrays(columns, schema=ENTRIES)
        if keys:
            moved = regrouped(entries, self.key, max_parallelism)
            self.entries = dict(zip(*(c.to_pylist() for c in moved.columns), strict=True))
        self.max_parallelism = max_parallelism


def one_table(inputs: KeyedInputs, parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Tables end to end."""
    batches = pa.Table.from_batches(parts, inputs.columns).combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], inputs.columns)
