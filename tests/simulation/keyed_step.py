"""The keyed step of the simulated world: it counts the records of each key.

A key's second entry is there while its count is odd, so that entries are deleted too. The function
reports a count of -1 where the two do not fit: state of two different moments.

A changed program gives both a time to live, in which they never end, or takes it away. Then an
expiry stands before each value, and each entry is in the index by time: the function reports -1
where it is otherwise.

In worlds of two inputs rows have event times, and those that come later than the watermark are not
counted; it is the earliest of the latest times of all partitions.

Some worlds have a second step: windows of event time, keyed by a part of the first one's key, which
hold all rows and put them out when they close. Its function is a real one, with timers. It is
handed the watermark that the first step went by, and that step then waits for all partitions.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import pyarrow as pa

from tallystick.state.entries import ID_AT, TTL_INDEX, time_bytes
from tallystick.state.functions.aggregates import collect
from tallystick.state.functions.processing import (
    EVENT_TIME,
    NO_TIME,
    StateDeclaration,
    Work,
)
from tallystick.state.functions.windowed import windowed
from tallystick.state.functions.windows import tumbling
from tallystick.state.key_groups import key_groups_of
from tallystick.state.keys import KeyCodec
from tallystick.state.meaning import meaning_of
from tallystick.state.overlay import Overlay
from tallystick.state.time_to_live import EXPIRY_SIZE
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.tasks.keyed import KeyedStep, WorkerHost
from tests.simulation.pipelines import Pipeline

UID = "counts"
WINDOWS_UID = "windows"
KEY_COUNT = 7
GROUP_COUNT = 4
"""Keys of the second step: not a part of the first one's, so that rows go to other tasks."""
WINDOW_MS = 8
WINDOW_DELAY_MS = 4
IDLE_AFTER_MS = 1 << 40
"""More than a world lasts, and less than a jump of a clock: no partition becomes idle."""
MAX_PARALLELISM = 8
COLUMNS = pa.schema(
    [
        pa.field("key", pa.int64()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int64()),
        pa.field("offset", pa.int64()),
        pa.field("time", pa.int64()),
    ]
)
OUTPUT_COLUMNS = pa.schema([*list(COLUMNS), pa.field("count", pa.int64())])
GROUP_COLUMNS = pa.schema(
    [
        pa.field("group", pa.int64()),
        pa.field("time", pa.int64()),
        pa.field("row", pa.string()),
    ]
)
KEY = KeyCodec(pa.schema([COLUMNS.field("key")]))
NOT_OF_ONE_MOMENT = -1
ODD = b"odd"
LASTING_MS = 1 << 40
"""A time to live after which no world is there."""
RECORDS = "records"
"""What the first step says that it counts."""


@dataclass(frozen=True)
class Counter:
    """Counts records by key; see `Processor`."""

    time_mode: str
    counted: str = RECORDS
    ttl_ms: int = 0
    reads = None
    has_timers = False

    def declared(self, key: KeyCodec) -> tuple[StateDeclaration, ...]:
        """See `Processor.declared`."""
        meaning = meaning_of("counter", {"counted": self.counted})
        return tuple(
            StateDeclaration(name, "value", "", "{}", self.ttl_ms, meaning)
            for name in ("count", "odd")
        )

    def output(self, key: pa.Schema, rows: pa.Schema) -> pa.Schema:
        """See `Processor.output`."""
        return OUTPUT_COLUMNS

    def run(self, work: Work) -> Iterator[pa.RecordBatch]:
        """See `Processor.run`."""
        ids = [work.fields[name].state_id for name in ("count", "odd")]
        counts = []
        for place in _places(work.rows, work.max_parallelism):
            count_key, odd_key = (_entry_key(*place, state_id) for state_id in ids)
            count, odd = (self._taken(work.overlay, key) for key in (count_key, odd_key))
            before = int.from_bytes(count or b"", "big")
            fits = {len(count or bytes(4)), len(odd or ODD)} == {4, len(ODD)}
            is_one = fits and (odd is not None) == bool(before % 2)
            counts.append(before + 1 if is_one else NOT_OF_ONE_MOMENT)
            before = before if fits else 0
            self._put(work, count_key, _encoded(before + 1))
            self._put(work, odd_key, None if odd is not None else ODD)
        columns = [*work.rows.columns, pa.array(counts, pa.int64())]
        yield pa.RecordBatch.from_arrays(columns, schema=OUTPUT_COLUMNS)

    def _taken(self, overlay: Overlay, key: bytes) -> bytes | None:
        """Return the value of an entry, and take it out of the index; a strange one as it is."""
        data = overlay.get(key)
        if not self.ttl_ms or data is None:
            return data
        place = _place_in_index(key, data)
        if overlay.get(place) is None:
            return data
        overlay.put(place, None)
        return data[EXPIRY_SIZE:]

    def _put(self, work: Work, key: bytes, value: bytes | None) -> None:
        if self.ttl_ms and value is not None:
            value = (work.time.timestamp_ms + self.ttl_ms).to_bytes(EXPIRY_SIZE, "big") + value
            work.overlay.put(_place_in_index(key, value), b"")
        work.overlay.put(key, value)


def _place_in_index(key: bytes, data: bytes) -> bytes:
    expiry_ms = int.from_bytes(data[:EXPIRY_SIZE], "big", signed=True)
    return key[:ID_AT] + bytes([TTL_INDEX]) + time_bytes(expiry_ms) + key[ID_AT:]


def keyed_steps(
    parallelism: int,
    worker_host: WorkerHost,
    pipeline: Pipeline,
    counted: str = RECORDS,
    ttl_ms: int = 0,
) -> PipelinePlan:
    """The keyed steps of a run: this one, and perhaps the windows after it.

    With one input the event time is drawn again by another attempt, as the rows are, and no row is
    late: the step has no time mode. With two, each partition is waited for.
    """
    has_two_inputs = pipeline.has_two_inputs
    is_timed = has_two_inputs or pipeline.has_windows
    processor = Counter(EVENT_TIME if has_two_inputs else NO_TIME, counted, ttl_ms)
    step = KeyedStep(
        uid=UID,
        key=KEY,
        columns=COLUMNS,
        processor=processor,
        declared=processor.declared(KEY),
        output=OUTPUT_COLUMNS,
        functions=(_grouped,) if pipeline.has_windows else (),
        max_parallelism=MAX_PARALLELISM,
        parallelism=parallelism,
        event_time="time" if is_timed else "key",
        idle_after_ms=IDLE_AFTER_MS if is_timed else 0,
    )
    steps = (step, _windows_step(parallelism)) if pipeline.has_windows else (step,)
    return PipelinePlan(steps, parallelism, worker_host)


def _windows_step(parallelism: int) -> KeyedStep:
    """The second step, made as `spark.keyed` makes it."""
    function = windowed(tumbling(WINDOW_MS), {"rows": collect("row")}).make(GROUP_COLUMNS)
    key = KeyCodec(pa.schema([GROUP_COLUMNS.field("group")]))
    output = function.output(key.schema, GROUP_COLUMNS)
    assert output is not None, "windows know their columns"
    return KeyedStep(
        uid=WINDOWS_UID,
        key=key,
        columns=GROUP_COLUMNS,
        processor=function,
        declared=function.declared(key),
        output=output,
        max_parallelism=MAX_PARALLELISM,
        parallelism=parallelism,
        event_time="time",
        watermark_delay_ms=WINDOW_DELAY_MS,
    )


def _grouped(rows: pa.RecordBatch) -> pa.RecordBatch:
    """What comes to the second step: a counted row as text, with its time, under another key."""
    groups = [key % GROUP_COUNT for key in rows["key"].to_pylist()]
    names = ("key", "topic", "partition", "offset", "count")
    texts = [
        json.dumps(values)
        for values in zip(*(rows[name].to_pylist() for name in names), strict=True)
    ]
    columns = [pa.array(groups, pa.int64()), rows["time"], pa.array(texts, pa.string())]
    return pa.RecordBatch.from_arrays(columns, schema=GROUP_COLUMNS)


def counted_in(rows: pa.RecordBatch) -> list[tuple[int, str, int, int, int]]:
    """Key, topic, partition, offset and count of all that the last step put out."""
    if "rows" in rows.schema.names:
        return [tuple(json.loads(text)) for texts in rows["rows"].to_pylist() for text in texts]
    names = ("key", "topic", "partition", "offset", "count")
    return list(zip(*(rows[name].to_pylist() for name in names), strict=True))


def entries_of(counts: Mapping[int, int], ids: tuple[int, int]) -> dict[bytes, bytes]:
    """What the state must be when so many records of each key were counted.

    Args:
        counts: by key.
        ids: of the states "count" and "odd".
    """
    entries = {}
    for key, count in counts.items():
        place = _places_of_all_keys()[key]
        entries[_entry_key(*place, ids[0])] = _encoded(count)
        if count % 2:
            entries[_entry_key(*place, ids[1])] = ODD
    return entries


def without_expiries(entries: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the entries of files as a program without a time to live has them."""
    sizes = (EXPIRY_SIZE + 4, EXPIRY_SIZE + len(ODD))
    return {
        key: value[EXPIRY_SIZE:] if len(value) in sizes else value
        for key, value in entries.items()
        if key[ID_AT] != TTL_INDEX
    }


def _encoded(count: int) -> bytes:
    return count.to_bytes(4, "big")


def _entry_key(group: int, key: bytes, state_id: int) -> bytes:
    return group.to_bytes(2, "big") + bytes([state_id]) + key


def _places(rows: pa.RecordBatch, max_parallelism: int) -> list[tuple[int, bytes]]:
    """The key group and the bytes of each row's key."""
    groups = key_groups_of(KEY.hash_codes(rows), max_parallelism)
    return list(zip(groups.tolist(), KEY.encode(rows).to_pylist(), strict=True))


@cache
def _places_of_all_keys() -> list[tuple[int, bytes]]:
    rows = pa.RecordBatch.from_pydict({"key": pa.array(range(KEY_COUNT), pa.int64())})
    return _places(rows, MAX_PARALLELISM)
