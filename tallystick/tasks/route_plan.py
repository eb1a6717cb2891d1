"""The way of rows to the tasks of a keyed step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tallystick.host.stopwatch import EXCHANGE
from tallystick.state.key_groups import key_groups_of
from tallystick.tasks.exchange import NO_TOPIC, Frame
from tallystick.tasks.frames import conform, to_ipc
from tallystick.tasks.keyed import KeyedStep
from tallystick.tasks.outputs import passing
from tallystick.tasks.read import BatchFunction, OpenOutlet, Sent, StatelessOutlet, apply


@dataclass(frozen=True)
class RoutePlan:
    """The way of rows to the tasks that own their keys.

    Args:
        step: whose tasks they are.
        max_parallelism: its key groups.
        target_count: its tasks.
        functions: what rows pass through first.
    """

    step: KeyedStep
    max_parallelism: int
    target_count: int
    functions: tuple[BatchFunction, ...] = ()
    part: ClassVar[str] = EXCHANGE

    def begun(self, source: int, attempt: int, attempt_number: int) -> OpenOutlet:
        """See `Outlet.begun`."""
        return StatelessOutlet(self.frames, source, attempt)

    def frames(self, sent: Sent, source: int, sequence: int, attempt: int) -> Iterator[Frame]:
        """Yield a batch's frames; what only passes through goes by one task, and stays in order."""
        parts = apply(self.functions, sent) if isinstance(sent, pa.RecordBatch) else [sent]
        for part in parts:
            if not isinstance(part, pa.RecordBatch):
                yield passing(part, source % self.target_count, source, sequence, attempt)
                sequence += 1
                continue
            for target, rows in self._split(part):
                yield Frame(
                    target, source, sequence, NO_TOPIC, 0, rows.num_rows, to_ipc(rows), attempt
                )
                sequence += 1

    def _split(self, rows: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each task, in their order."""
        rows = conform(rows, self.step.columns, f"step {self.step.uid}: the rows that come to it")
        rows = rows.select(self.step.routed.names)
        if self.target_count == 1:
            yield 0, rows
            return
        groups = key_groups_of(self.step.key.hash_codes(rows), self.max_parallelism)
        # As `operator_index`; 16 bits are sorted by radix.
        targets = (groups * self.target_count // self.max_parallelism).astype(np.uint16)
        order = np.argsort(targets, kind="stable")
        ordered = rows.take(pa.array(order))
        bounds = np.searchsorted(targets[order], np.arange(self.target_count + 1))
        for target in np.flatnonzero(np.diff(bounds)).tolist():
            first, stop = int(bounds[target]), int(bounds[target + 1])
            yield target, ordered.slice(first, stop - first)
