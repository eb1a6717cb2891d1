"""Batches, not rows, travel between tasks: finished Kafka record batches, routed to their writers.

A frame is one encoded record batch for one output partition. Every output partition has one writing
task per epoch. A writer gets frames sorted by (source, sequence): the task that encoded a frame,
and the number of the frame in that task. Rows of one input partition are read by one source task,
so the order per input partition, and with it per key, survives any reordering of blobs by Spark.

Between two steps the same frames carry rows to the tasks that own their key groups; such a frame
has no topic. Rows of side outputs pass by those tasks, with the output's name in the topic's place
(see `outputs.passing`). A step's tasks are sources for the next ones, with a stage number above
theirs.

All writers must see the same attempt of a source. When Spark runs a source again after some writers
are done (shuffle files were lost), the new attempt may route rows elsewhere: a function of the user
that is not deterministic, or rows without a key. So an attempt draws a number, says it to every
writer, also to those that get no rows, and `check_same_attempts` compares. With its number the
first writer gets the attempt's note: the files of state that the attempt left, and the attempts
from which it had rows itself. So the files that count are of the attempt whose rows are written.

The rows in a frame have the columns that were declared, and travel as bytes of Arrow IPC.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum, auto
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc

from tallystick.codec.values import with_wide_decimals
from tallystick.errors import EpochAbortedError, OptionError, RecordError
from tallystick.host.stopwatch import ROWS_IN, count
from tallystick.source.splits import assign
from tallystick.values import TopicPartition

COMPRESSED_BYTES_MIN = 4096
"""Smaller batches are not worth compressing."""


def conform(rows: pa.RecordBatch, columns: pa.Schema, what: str) -> pa.RecordBatch:
    """Return rows with exactly these columns, in this order, cast where no value changes.

    Columns go by name, and so do the fields of structs, at every depth.

    Args:
        rows: as a function returned them.
        columns: as they were declared.
        what: they are, for messages.

    Raises:
        OptionError: a column, or a field of a struct, is missing, or there is one too many.
        RecordError: a value does not fit the declared type.
    """
    if not isinstance(rows, pa.RecordBatch):
        raise OptionError(f"{what}: expected a pyarrow RecordBatch, found {type(rows).__name__}")
    if rows.schema.equals(columns):
        return rows
    _check_names(rows.schema.names, columns.names, f"{what}: column")
    cast = [_cast(rows.column(field.name), field, what) for field in columns]
    return pa.RecordBatch.from_arrays(cast, schema=columns)


def _check_names(names: list[str], declared: list[str], what: str, above: str = "") -> None:
    """Raise OptionError unless the declared names are there, each once, and no others."""
    for name in declared:
        if names.count(name) != 1:
            problem = "is not there" if name not in names else "is there more than once"
            raise OptionError(
                f"{what} {above + name!r} {problem}: expected {declared}, found {names}"
            )
    for name in names:
        if name not in declared:
            raise OptionError(
                f"{what} {above + name!r} is not declared: expected {declared}, found {names}. "
                f"Declare it, or leave it out"
            )


def _in_order(column: pa.Array, declared: pa.DataType, what: str, path: str) -> pa.Array:
    """Return a column with the fields of all structs in it in the order of the declared type.

    Arrow casts structs by position, or fills fields that are missing with nulls.

    Raises:
        OptionError: a field is missing, or there is one too many.
    """
    actual = column.type
    if actual == declared or not _is_nested_alike(actual, declared):
        return column
    # In memory of its own a slice begins at 0, and its offsets do.
    column = pa.concat_arrays([column])
    is_null = column.is_null()
    if _is.is_struct(actual):
        _check_names(_field_names(actual), _field_names(declared), f"{what}: field", f"{path}.")
        parts = {field.name: column.field(at) for at, field in enumerate(actual)}
        arrays = [
            _in_order(parts[field.name], field.type, what, f"{path}.{field.name}")
            for field in declared
        ]
        return pa.StructArray.from_arrays(arrays, names=_field_names(declared), mask=is_null)
    if _is.is_map(actual):
        keys = _in_order(column.keys, declared.key_type, what, f"{path}.key")
        items = _in_order(column.items, declared.item_type, what, f"{path}.value")
        return pa.MapArray.from_arrays(column.offsets, keys, items, mask=is_null)
    values = _in_order(column.values, declared.value_type, what, f"{path}.element")
    if _is.is_fixed_size_list(actual):
        return pa.FixedSizeListArray.from_arrays(values, actual.list_size, mask=is_null)
    make = pa.LargeListArray if _is.is_large_list(actual) else pa.ListArray
    return make.from_arrays(column.offsets, values, mask=is_null)


def _field_names(kind: pa.DataType) -> list[str]:
    return [field.name for field in kind]


def _is_nested_alike(actual: pa.DataType, declared: pa.DataType) -> bool:
    return any(test(actual) and test(declared) for test in (_is.is_struct, _is.is_map, _is_list))


def _cast(column: pa.Array, declared: pa.Field, what: str) -> pa.Array:
    column = _in_order(column, declared.type, what, declared.name)
    if column.type == declared.type:
        return column
    problem = f"{what}: column {declared.name!r} is {column.type}, and was declared {declared.type}"
    if not _is_same_kind(column.type, declared.type):
        raise RecordError(
            f"{problem}: only values of the same kind become each other by themselves (numbers, "
            f"timestamps, text). Declare it as it is, or cast it in the function"
        )
    try:
        cast = column.cast(with_wide_decimals(declared.type)).cast(declared.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise RecordError(f"{problem}: {error}") from None
    if not _is_same(column, cast):
        raise RecordError(
            f"{problem}, which does not hold all its values exactly. Declare it double, or round "
            f"it in the function"
        )
    return cast


_is = pa.types


def _is_integer_or_float(kind: pa.DataType) -> bool:
    return bool(_is.is_integer(kind) or _is.is_floating(kind))


def _is_exact(kind: pa.DataType) -> bool:
    return bool(_is.is_integer(kind) or _is.is_decimal(kind))


def _is_date(kind: pa.DataType) -> bool:
    return bool(_is.is_date(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    """True for text and binary, whose bytes stay the same."""
    texts = (_is.is_string, _is.is_large_string, _is.is_string_view)
    blobs = (_is.is_binary, _is.is_large_binary, _is.is_binary_view, _is.is_fixed_size_binary)
    return any(test(kind) for test in (*texts, *blobs))


_KINDS: tuple[Callable[[pa.DataType], bool], ...] = (
    _is_integer_or_float,
    _is_exact,
    _is_date,
    _is_bytes,
    _is.is_timestamp,
    _is.is_time,
    _is.is_duration,
)
"""Arrow's safe casts within each keep values, or fail; but for floats, see `_is_same`.

A timestamp without a zone counts as UTC, as numpy has it.
"""


def _is_list(kind: pa.DataType) -> bool:
    return bool(_is.is_list(kind) or _is.is_large_list(kind) or _is.is_fixed_size_list(kind))


def _is_same_kind(actual: pa.DataType, declared: pa.DataType) -> bool:
    """True if a cast keeps what values mean."""
    if actual == declared or _is.is_null(actual):
        return True
    if _is.is_dictionary(actual):
        return _is_same_kind(actual.value_type, declared)
    if _is_list(actual):
        return _is_list(declared) and _is_same_kind(actual.value_type, declared.value_type)
    if _is.is_map(actual):
        return (
            _is.is_map(declared)
            and _is_same_kind(actual.key_type, declared.key_type)
            and _is_same_kind(actual.item_type, declared.item_type)
        )
    if _is.is_struct(actual):
        return (
            _is.is_struct(declared)
            and [field.name for field in actual] == [field.name for field in declared]
            and all(
                map(_is_same_kind, *([field.type for field in kind] for kind in (actual, declared)))
            )
        )
    return any(test(actual) and test(declared) for test in _KINDS)


def _is_same(column: pa.Array, cast: pa.Array) -> bool:
    """True if a cast that Arrow calls safe kept the values: it lets floats lose digits."""
    if _is.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_list(column.type) or _is.is_struct(column.type):
        if not len(column):
            return True
        parts = [array.flatten() for array in (column, cast)]
        pairs = zip(*parts, strict=True) if _is.is_struct(column.type) else [tuple(parts)]
        return all(_is_same(one, two) for one, two in pairs)
    if _is.is_map(column.type):
        return _is_same(column.keys, cast.keys) and _is_same(column.items, cast.items)
    if not (_is.is_floating(column.type) and _is.is_floating(cast.type)):
        return True
    if column.type.bit_width <= cast.type.bit_width:
        return True
    same = pc.or_(pc.equal(cast.cast(column.type), column), pc.is_nan(column))
    return pc.all(same).as_py() is not False


def to_ipc(rows: pa.RecordBatch) -> bytes:
    """Encode a batch and its schema as an Arrow stream, the data of a frame."""
    codec = "lz4" if rows.nbytes >= COMPRESSED_BYTES_MIN else None
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_batch(rows)
    return bytes(sink.getvalue())


def from_ipc(data: bytes) -> pa.RecordBatch:
    """Read back what `to_ipc` made."""
    with pa.ipc.open_stream(data) as reader:
        return reader.read_next_batch()


class Frame(NamedTuple):
    """An encoded record batch on the way from its source task to its target task."""

    target: int
    source: int
    sequence: int
    topic: str
    partition: int
    record_count: int
    data: bytes
    attempt: int

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition that the batch is written to."""
        return TopicPartition(self.topic, self.partition)


FRAME_DDL = (
    "target int, source int, sequence int, topic string, partition int, record_count int, "
    "data binary, attempt bigint"
)
"""The columns of a frame where it travels as a row."""

GROUP_BYTES = 8 << 20
GROUP_FRAMES = 64


def target_of(topic_partition: TopicPartition, task_count: int) -> int:
    """Return the writing task of an output partition."""
    return assign(topic_partition.topic, topic_partition.partition, task_count)


NO_TOPIC = ""


class NoteKind(StrEnum):
    """The subject of a task's note to the driver, and the class that reads its fields."""

    KEYED = auto()
    """The result of a keyed task: `keyed.TaskNote`."""
    SINKS = auto()
    """Transactions that a task prepared: `write.SinkNote`."""
    TIMES = auto()
    """The times of a task: `stopwatch.TaskTimes`."""
    EVENT_TIMES = auto()
    """The latest event times that a reader saw: `event_times.latest_of`."""
    TABLE = auto()
    """A broadcast table after the epoch: `operator_state.tables_after`."""
    LIST = auto()
    """A reader's list after the epoch: `operator_state.lists_after`."""


class Note(NamedTuple):
    """A note of a task's attempt to the driver; it travels with the attempt's last frames."""

    kind: NoteKind
    fields: Any
    """The contents, as JSON has them."""

    def encode(self) -> bytes:
        """Return the data of a frame."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read back what `encode` made."""
        return cls.of(json.loads(data))

    @classmethod
    def of(cls, parts: Sequence[Any]) -> Self:
        """Return the note that JSON has as a list of kind and fields."""
        kind, fields = parts
        return cls(NoteKind(kind), fields)


def last_frames(
    source: int, sequence: int, attempt: int, task_count: int, notes: Iterable[Note] = ()
) -> Iterator[Frame]:
    """Yield a source's last frame to every writer: the number of the attempt, and no rows.

    The first writer gets the notes too, a frame each.
    """
    for target in range(task_count):
        yield Frame(target, source, sequence, NO_TOPIC, 0, 0, b"", attempt)
    for number, note in enumerate(notes, start=1):
        yield Frame(0, source, sequence + number, NO_TOPIC, 0, 0, note.encode(), attempt)


class Attempt(NamedTuple):
    """An attempt of a task that sends frames."""

    stage: int
    source: int
    attempt: int


class FrameSources:
    """The attempts of sources from which a task had frames, and the notes of the attempts.

    Args:
        stage: of the sources: 0 reads, each keyed step is one more.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._attempts: set[Attempt] = set()
        self.notes: list[Note] = []

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every attempt heard of, in order."""
        return tuple(sorted(self._attempts))

    def with_rows(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        """Yield the frames with rows; keep the attempts of all frames, and the notes."""
        for frame in frames:
            self._attempts.add(Attempt(self._stage, frame.source, frame.attempt))
            if frame.record_count:
                count(ROWS_IN, frame.record_count)
                yield frame
            elif frame.data:
                self.notes.append(Note.decode(frame.data))


def check_same_attempts(attempts_by_task: Iterable[Iterable[Attempt]]) -> None:
    """Check that all tasks got their rows from the same attempt of each source.

    Args:
        attempts_by_task: per task, the attempts of sources that sent its frames.

    Raises:
        EpochAbortedError: a source was run again in between.
    """
    attempts: dict[tuple[int, int], int] = {}
    for task_attempts in attempts_by_task:
        for stage, source, attempt in task_attempts:
            if attempts.setdefault((stage, source), attempt) != attempt:
                raise EpochAbortedError(
                    f"task {source} of stage {stage} ran a second time after some of its rows were "
                    f"used, and may have routed rows elsewhere: the epoch is aborted and runs again"
                )


def grouped(frames: Iterator[Frame]) -> Iterator[list[Frame]]:
    """Yield frames in groups that are worth a round trip, and small enough to hold."""
    group: list[Frame] = []
    size = 0
    for frame in frames:
        group.append(frame)
        size += len(frame.data)
        if size >= GROUP_BYTES or len(group) >= GROUP_FRAMES:
            yield group
            group, size = [], 0
    if group:
        yield group
