"""A savepoint whose state of a step is a table, as `read_state` gives one: what `write_state` does.

Positions, watermarks and the state of all other steps come from a savepoint that exists; or there
are none yet, and the step is one of a program. Entries are laid out as the step itself writes them,
and sorted on the local disk as in a migration.
"""

import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.arguments import near
from tallystick.epoch.manifest import Manifest
from tallystick.epoch.savepoint import Savepoint
from tallystick.epoch.verdict import FIRST_EPOCH
from tallystick.errors import OptionError
from tallystick.ops import savepoints
from tallystick.ops.state_entries import computed_columns, entries_from
from tallystick.ops.state_table import schema_of
from tallystick.pipeline.input_planning import text_of
from tallystick.source.offsets import from_text
from tallystick.state.catalog import PLAIN_NAME, StepState
from tallystick.state.functions.processing import ELEMENTS
from tallystick.state.keys import KeyCodec
from tallystick.state.numpy_columns import places_in
from tallystick.state.operator_state import PLACE
from tallystick.storage.file_storage import FileStorage
from tallystick.storage.places import Place, resolved
from tallystick.values import Producer, TopicPartition

BATCH_ROWS = 50_000
"""Rows whose entries are in memory at a time, beside the table itself."""


@dataclass(frozen=True)
class Program:
    """A pipeline whose steps a savepoint may lack.

    Args:
        name: of the pipeline; "": there is none.
        steps: its keyed steps before their first epoch.
    """

    name: str = ""
    steps: tuple[StepState, ...] = ()


def write_table(
    rows: Any,
    savepoint: Place | None,
    step: str,
    *,
    to: Place,
    key: Sequence[str] | None = None,
    offsets: Mapping[str, Mapping[int, int]] | None = None,
    program: Program = Program(),
    scratch: Place | None = None,
) -> None:
    """Write a savepoint whose state of a step is a table; see `tallystick.write_state`."""
    table = _arrow(rows)
    if not PLAIN_NAME.fullmatch(step):
        raise OptionError(f"step={step!r}: expected the uid of a keyed step")
    if key is not None and not (key and all(name for name in key)):
        raise OptionError(f"key={key!r}: expected names of columns, e.g. ['user']")
    room = tempfile.gettempdir() if scratch is None else resolved(scratch, "scratch")
    target = FileStorage(resolved(to, "to"))
    if savepoint is None:
        source, saved = target, _nothing_saved(program)
    else:
        source = FileStorage(resolved(savepoint, "savepoint"))
        saved = savepoints.read(source)
    saved = _at(_with_step(saved, step, program), offsets or {})
    before = _step_of(saved, step, source.location)
    after = before if key is None else _with_key(before, list(key), table)
    table = _checked_columns(after, table)
    _refuse_equal_keys(after, table)
    table = _in_places(after, table)
    batches = table.to_batches(max_chunksize=BATCH_ROWS)
    now_ms = round(time.time() * 1000)
    savepoints.write_step(
        saved,
        source,
        target,
        after,
        (entries_from(after, batch, now_ms) for batch in batches if batch.num_rows),
        table.nbytes,
        Path(room),
    )


def _nothing_saved(program: Program) -> Savepoint:
    """Return the savepoint of a pipeline before its first epoch: it has read nothing.

    Its manifest has another name than the pipeline: there is no run that it goes on from, whose
    last commit Kafka would be asked for.
    """
    origin = f"{program.name} from a table"
    lineage = str(uuid.uuid4())
    manifest = Manifest(FIRST_EPOCH - 1, origin, lineage, (), (), Producer(origin, 0, 0))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Savepoint("", created, "", "", manifest)


def _with_step(saved: Savepoint, uid: str, program: Program) -> Savepoint:
    """Return a savepoint with a step of the program, where it has none of that uid."""
    state = saved.manifest.state
    new = [step for step in program.steps if step.uid == uid]
    if any(step.uid == uid for step in state) or not new:
        return saved
    return replace(saved, manifest=replace(saved.manifest, state=(*state, *new)))


def _at(saved: Savepoint, offsets: Mapping[str, Mapping[int, int]]) -> Savepoint:
    """Return a savepoint with other positions in some partitions.

    Raises:
        OptionError: it has no position in such a partition.
    """
    if not offsets:
        return saved
    if saved.spark or not saved.manifest.sources:
        why = "Spark keeps its positions" if saved.spark else "nothing was read yet"
        raise OptionError(
            f"offsets={dict(offsets)!r}: {why}: expected a savepoint of a pipeline that has read. "
            f"A new one begins where the starting_offsets= of its KafkaSource say"
        )
    wanted = {
        TopicPartition(topic, partition): offset
        for topic, by_partition in offsets.items()
        for partition, offset in by_partition.items()
    }
    sources = [from_text(text) for text in saved.manifest.sources]
    known = {at for source in sources for at in source.positions}
    for partition, offset in wanted.items():
        if partition not in known or offset < 0:
            raise OptionError(
                f"offsets={{{partition.topic!r}: {{{partition.partition}: {offset}}}}}: expected "
                f"an offset from 0, of a partition that the savepoint has a position in: "
                f"{', '.join(f'{at.topic} {at.partition}' for at in sorted(known))}"
            )
    moved = []
    for source in sources:
        own = {at: offset for at, offset in wanted.items() if at in source.positions}
        moved.append(text_of(replace(source, positions={**source.positions, **own})))
    return replace(saved, manifest=replace(saved.manifest, sources=tuple(moved)))


def _step_of(saved: Savepoint, uid: str, location: str) -> StepState:
    steps = {step.uid: step for step in saved.manifest.state}
    if uid not in steps:
        names = ", ".join(map(repr, steps)) or "none"
        raise OptionError(
            f"{location}: there is no step {uid!r}; its keyed steps are: {names}."
            f"{near(uid, list(steps))}"
        )
    return steps[uid]


def _arrow(rows: Any) -> pa.Table:
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, pa.Table):
        return rows
    for name in ("toArrow", "to_arrow"):  # Spark's, Polars'
        if hasattr(rows, name):
            table = getattr(rows, name)()
            if isinstance(table, pa.Table):
                return table
    raise OptionError(
        f"rows are a {type(rows).__name__}: expected an Arrow table, a Polars frame, or a "
        f"DataFrame of Spark's; of pandas, pyarrow.Table.from_pandas(frame)"
    )


def _with_key(step: StepState, names: list[str], table: pa.Table) -> StepState:
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise OptionError(
            f"key={names}: the rows have no column {missing[0]!r}; they have "
            f"{', '.join(table.column_names)}.{near(missing[0], table.column_names)}"
        )
    columns = [pa.field(name, _usual(table.schema.field(name).type)) for name in names]
    text = KeyCodec(pa.schema(columns)).schema_text
    return replace(step, key_schema=text)


def _usual(kind: pa.DataType) -> pa.DataType:
    """Return the type that a pipeline has where a library has a variant of its own."""
    if pa.types.is_dictionary(kind):
        return _usual(kind.value_type)
    for usual in (pa.string(), pa.binary()):
        if _fits(kind, usual):
            return usual
    return pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else kind


def _checked_columns(step: StepState, table: pa.Table) -> pa.Table:
    """Return the table's columns in the order and the types of `schema_of`.

    Raises:
        OptionError: a column is missing, unknown, there twice, or of another type.
    """
    wanted = schema_of(step)
    computed = {len(KeyCodec.from_text(step.key_schema).names), len(wanted) - 1}
    of_state = computed_columns(step)
    unknown = [name for name in table.column_names if name not in wanted.names]
    if unknown:
        raise OptionError(
            f"step {step.uid}: the rows have a column {unknown[0]!r} that its state has not: "
            f"expected {', '.join(wanted.names)}.{near(unknown[0], wanted.names)}"
        )
    columns = []
    for at, field in enumerate(wanted):
        count = table.column_names.count(field.name)
        if count == 0 and (at in computed or field.name in of_state):
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        if count != 1:
            raise OptionError(
                f"step {step.uid}: the rows have {count or 'no'} column{'s' * (count > 1)} "
                f"{field.name!r}: expected one, of {field.type}; they have "
                f"{', '.join(table.column_names)}."
            )
        columns.append(_cast(step, table.column(field.name), field))
    return pa.table(columns, schema=wanted)


def _in_places(step: StepState, table: pa.Table) -> pa.Table:
    """Return the elements of a list of tasks with places from 0 on; other tables as they are.

    Raises:
        OptionError: an element is of no task that there was.
    """
    if all(state.kind != ELEMENTS for state in step.fields):
        return table
    task, place = PLACE.names
    table = table.sort_by([(task, "ascending"), (place, "ascending")])
    tasks = table.column(task)
    strays = pc.fill_null(
        pc.or_(pc.less(tasks, 0), pc.greater_equal(tasks, step.parallelism)), True
    )
    if pc.any(strays).as_py():
        raise OptionError(
            f"step {step.uid}: an element is of task {tasks.filter(strays)[0]}: expected 0 to "
            f"{step.parallelism - 1}, the tasks that there were"
        )
    counts = np.bincount(tasks.to_numpy(), minlength=step.parallelism)
    places = pa.array(places_in(counts))
    return table.set_column(table.column_names.index(place), table.field(place), places)


def _cast(step: StepState, column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    if not _fits(column.type, field.type):
        raise OptionError(
            f"step {step.uid}: column {field.name!r} is {column.type}: expected {field.type}. Cast "
            f"it before."
        )
    try:
        return column if column.type == field.type else column.cast(field.type)
    except pa.ArrowException as error:
        raise OptionError(
            f"step {step.uid}: column {field.name!r}: a value does not fit {field.type}: {error}"
        ) from None


def _fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    """True if two types have the same values; libraries differ in widths of offsets and units."""
    kinds = pa.types
    if given == wanted or kinds.is_null(given):
        return True
    if kinds.is_dictionary(given):
        return _fits(given.value_type, wanted)
    if kinds.is_string(wanted):
        return bool(kinds.is_large_string(given) or kinds.is_string_view(given))
    if kinds.is_binary(wanted):
        return bool(kinds.is_large_binary(given) or kinds.is_binary_view(given))
    if kinds.is_timestamp(given) and kinds.is_timestamp(wanted):
        return (given.tz is None) == (wanted.tz is None)
    if kinds.is_map(given) and kinds.is_map(wanted):
        return _fits(given.key_type, wanted.key_type) and _fits(given.item_type, wanted.item_type)
    if kinds.is_list(wanted) and (kinds.is_list(given) or kinds.is_large_list(given)):
        return _fits(given.value_type, wanted.value_type)
    if kinds.is_struct(given) and kinds.is_struct(wanted):
        pairs = zip(given, wanted, strict=False)
        return given.names == wanted.names and all(_fits(a.type, b.type) for a, b in pairs)
    return False


def _refuse_equal_keys(step: StepState, table: pa.Table) -> None:
    codec = KeyCodec.from_text(step.key_schema)
    parts = [
        codec.encode(batch)
        for batch in table.select(codec.names).to_batches(max_chunksize=BATCH_ROWS)
    ]
    keys = pa.chunked_array(parts, pa.binary())
    counted = pc.value_counts(keys)
    twice = counted.filter(pc.greater(counted.field("counts"), 1))
    if len(twice):
        (row,) = codec.decode(twice.field("values").slice(0, 1)).to_pylist()
        raise OptionError(
            f"step {step.uid}: {len(twice)} of {len(counted)} keys have more than one row, as "
            f"{row}: expected one row per key. Merge them before."
        )
