"""One task's part of one epoch: the calls to a `StatefulProcessor`, in Spark's order."""

import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    TimerValues,
)

from tallystick.errors import StateError
from tallystick.processors.handle import Found, Handle
from tallystick.processors.keyed_rows import (
    KeyedRows,
    as_frames,
    as_rows,
    in_timezone,
    key_tuples,
    sort_by_key,
)
from tallystick.processors.output import frame_to_batch, rows_to_batch
from tallystick.processors.place import Place, expiry_of
from tallystick.processors.row_class import row_maker
from tallystick.processors.states import LIST, VALUE
from tallystick.processors.timers import Timers
from tallystick.state.key_bytes import entry_keys
from tallystick.state.processing import EVENT_TIME, NO_TIME, PROCESSING_TIME, Work

Visit = tuple[bytes, bytes, tuple[Any, ...], Iterator[Any]]
"""A key's bytes, its group's, the key as the user sees it, and its rows or frames."""
OUTPUT_ROWS = 1 << 14
TIMER_CHUNK = 1 << 14


class RowTask:
    """A processor at work.

    Args:
        processor: of this run alone.
        work: what to do.
        output: the columns of what it returns.
        is_pandas: whether it takes and returns pandas frames.
        time_mode: one of `TIME_MODES`.
        timezone: of moments in rows.
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        work: Work,
        output: pa.Schema,
        is_pandas: bool,
        time_mode: str,
        timezone: str,
    ) -> None:
        self._processor, self._work, self._output = processor, work, output
        self._is_pandas, self._time_mode, self._timezone = is_pandas, time_mode, timezone
        now, watermark = work.time.timestamp_ms, work.time.watermark_ms or 0
        self._times = {
            NO_TIME: TimerValues(-1, -1),
            PROCESSING_TIME: TimerValues(now, 0),
            EVENT_TIME: TimerValues(now, watermark),
        }[time_mode]
        self._due_until = watermark if time_mode == EVENT_TIME else now
        self._place = Place(work.overlay, now)
        self._timers = Timers(work.overlay, self._place)
        self._single = [f for f in work.fields.values() if f.kind in (VALUE, LIST)]
        self._returned: list[Row] = []

    def run(self, initial: pa.RecordBatch | None) -> Iterator[pa.RecordBatch]:
        """Everything, in order; the overlay is complete at the end.

        Args:
            initial: the rows of the initial state, in the first epoch.
        """
        work = self._work
        handle = Handle(Found(work.fields.get), self._place, self._timers, self._time_mode)
        self._processor.init(handle)
        handle.close_init()
        keyed = self._sorted(work.rows)
        if initial is None:
            yield from self._rows(keyed)
        else:
            yield from self._initial_and_rows(self._sorted(initial), keyed)
        if self._time_mode != NO_TIME:
            yield from self._fire()
        yield from self._batches_left()
        self._place.leave()
        if self._time_mode == PROCESSING_TIME:
            self._expire()
        self._processor.close()

    def _rows(self, keyed: KeyedRows) -> Iterator[pa.RecordBatch]:
        """`handleInputRows` of each key."""
        handle_rows, go_to, times = self._processor.handleInputRows, self._place.go_to, self._times
        returned, is_pandas = self._returned, self._is_pandas
        for data, group, key, rows in self._visits(keyed):
            go_to(group, data)
            made = handle_rows(key, rows, times)
            if made is None:
                raise _returned_nothing()
            if is_pandas:
                yield from self._frames(made)
            else:
                returned.extend(made)
                if len(returned) >= OUTPUT_ROWS:
                    yield from self._batches_left()

    def _initial_and_rows(self, initial: KeyedRows, keyed: KeyedRows) -> Iterator[pa.RecordBatch]:
        """Each key's initial state before its rows; a key with initial state alone gets no rows."""
        both = heapq.merge(
            ((visit, False) for visit in self._visits(initial)),
            ((visit, True) for visit in self._visits(keyed)),
            key=lambda one: (one[0][0], one[1]),
        )
        for (data, group, key, rows), is_input in both:
            self._place.go_to(group, data)
            if is_input:
                yield from self._take(self._processor.handleInputRows(key, rows, self._times))
                continue
            for row in rows:
                self._processor.handleInitialState(key, row, self._times)

    def _visits(self, keyed: KeyedRows) -> Iterator[Visit]:
        """Each key, its state read ahead, with its rows."""
        for first, stop in keyed.chunks():
            keys, groups = keyed.keys[first:stop], keyed.groups[first:stop]
            starts = keyed.starts[first : stop + 1]
            rows = keyed.rows.slice(int(starts[0]), int(starts[-1] - starts[0]))
            self._prefetch(keys, groups)
            yield from zip(
                keys.to_numpy(zero_copy_only=False).tolist(),
                np.ascontiguousarray(groups.astype(">u2")).view("V2").tolist(),
                key_tuples(keys, self._work.key, self._timezone),
                self._inputs(rows, (starts - starts[0]).tolist()),
                strict=True,
            )

    def _fire(self) -> Iterator[pa.RecordBatch]:
        """`handleExpiredTimer` of what is due now; what is registered meanwhile waits."""
        due = self._timers.due(self._work.groups, self._due_until)
        make = row_maker(self._work.key.names)
        for start in range(0, len(due), TIMER_CHUNK):
            chunk = due[start : start + TIMER_CHUNK]
            data = pa.array([key for _, key, _ in chunk], pa.binary())
            groups = np.frombuffer(b"".join(group for *_, group in chunk), ">u2")
            self._prefetch(data, groups.astype(np.int32))
            # A Row here, a tuple elsewhere: as in Spark.
            keys = map(make, key_tuples(data, self._work.key, self._timezone))
            for key, (expiry, key_bytes, group) in zip(keys, chunk, strict=True):
                self._place.go_to(group, key_bytes)
                returned = self._processor.handleExpiredTimer(
                    key=key, timerValues=self._times, expiredTimerInfo=ExpiredTimerInfo(expiry)
                )
                yield from self._take(returned)
                # Also where the handler set it again: as in Spark.
                self._timers.delete(expiry)

    def _expire(self) -> None:
        """Remove what has expired; the index names candidates, the entry's own expiry decides."""
        assert self._place.expiries is not None, "an overlay has them"
        overlay, now = self._work.overlay, self._work.time.timestamp_ms
        due = self._place.expiries.due(self._work.groups, now)
        for start in range(0, len(due), TIMER_CHUNK):
            chunk = due[start : start + TIMER_CHUNK]
            entries = [group + what for _, what, group in chunk]
            overlay.prefetch(pa.array(sorted(set(entries)), pa.binary()))
            for entry, (expiry, what, group) in zip(entries, chunk, strict=True):
                data = overlay.get(entry)
                if data is not None and expiry_of(data) <= now:
                    overlay.put(entry, None)
                self._place.expiries.remove(group, expiry, what)

    def _take(self, returned: Iterable[Any] | None) -> Iterator[pa.RecordBatch]:
        if returned is None:
            raise _returned_nothing()
        if self._is_pandas:
            yield from self._frames(returned)
        else:
            self._returned.extend(returned)
            if len(self._returned) >= OUTPUT_ROWS:
                yield from self._batches_left()

    def _frames(self, returned: Iterable[Any]) -> Iterator[pa.RecordBatch]:
        for frame in returned:
            if len(frame):
                yield frame_to_batch(frame, self._output, self._timezone)

    def _batches_left(self) -> Iterator[pa.RecordBatch]:
        if self._returned:
            yield rows_to_batch(self._returned, self._output)
            self._returned.clear()

    def _inputs(self, rows: pa.RecordBatch, starts: list[int]) -> Iterator[Iterator[Any]]:
        """Per key, an iterator of its rows, or of its one frame."""
        rows = in_timezone(rows, self._timezone)
        spans = list(itertools.pairwise(starts))
        if self._is_pandas:
            return (iter([frame]) for frame in as_frames(rows, spans))
        made = as_rows(rows)
        if len(made) == len(spans):
            return (iter((row,)) for row in made)
        return (iter(made[start:stop]) for start, stop in spans)

    def _sorted(self, rows: pa.RecordBatch) -> KeyedRows:
        work = self._work
        return sort_by_key(rows, work.key, work.max_parallelism)

    def _prefetch(self, keys: pa.BinaryArray, groups: Any) -> None:
        """Read the entries that the processor will ask for, in the order of the store."""
        order = np.argsort(groups, kind="stable")
        sorted_keys, sorted_groups = keys.take(pa.array(order)), groups[order]
        wanted = [entry_keys(sorted_groups, field.state_id, sorted_keys) for field in self._single]
        self._work.overlay.prefetch(
            pa.concat_arrays(wanted) if wanted else pa.array([], pa.binary())
        )


def _returned_nothing() -> StateError:
    return StateError(
        "a processor returned None: expected an iterator of rows or frames. Use yield, or return "
        "iter([]) where there is nothing to put out"
    )
