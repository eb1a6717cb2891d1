"""Changes of a state's columns between two programs, and the conversion of entries between schemas.

A program may add columns, widen and reorder them, and, where the user says so, drop and rename
them: the rules of Avro's resolution. Nothing is rewritten: a state file names the schema of its
entries (`StateFile.schema`), and whoever reads entries gets them in the step's newest schema. So
functions, views, local copies and merged files know one schema alone, and former schemas end with
the last file that has entries of one.

    file of schema ""  ─► as of schema "7-…"  ─► as of the newest: a conversion per change, in order

Invariants: a conversion loses no value of a column that stays. The keys of a state's entries stay
as they are, and with them key groups and timers; indexes by time follow a time to live that comes
or goes.
"""

import decimal
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tallystick.codec.ddl import ddl_of_type
from tallystick.codec.spans import Int64Array
from tallystick.errors import UNREADABLE, ManifestError
from tallystick.state.catalog import FormerSchema, FormerState, StateField, StepState
from tallystick.state.entries import REST_AT, ids_of
from tallystick.state.functions.processing import COLUMNS, LIST, OWN_KINDS, ROWS
from tallystick.state.functions.row_state import with_rows
from tallystick.state.functions.vectorised import TIMER
from tallystick.state.keys import KeyCodec, tails
from tallystick.state.overlay import ENTRIES
from tallystick.state.row_codec import BoolArray, ColumnsCodec
from tallystick.state.schema import schema_from_text
from tallystick.state.time_to_live import (
    EXPIRY_SIZE,
    has_ttl,
    ttl_change,
    with_expiries,
    with_ttl,
)

ADDED, REMOVED, WIDENED, REFUSED = "added", "removed", "widened", "refused"

Renamed = Mapping[str, str]
"""Old names of columns by their new names."""
Json = Any
"""A type of Spark's, as JSON."""


class ColumnChange(NamedTuple):
    """The change of one column, or of one field of a struct.

    Args:
        what: `ADDED`, `REMOVED`, `WIDENED`, or `REFUSED`: to a type that does not hold all values.
        column: the name, with the names of the structs around a field.
        before, now: the types, as DDL; "" where there is no such column.
    """

    what: str
    column: str
    before: str
    now: str

    @property
    def text(self) -> str:
        """The change in words."""
        if self.what == ADDED:
            return f"column {self.column!r} ({self.now}) is added"
        if self.what == REMOVED:
            return f"column {self.column!r} ({self.before}) is dropped"
        return f"column {self.column!r} goes from {self.before} to {self.now}"


def column_changes(kind: str, before: str, now: str, renamed: Renamed) -> list[ColumnChange]:
    """Return the changes from one schema of a state to another.

    Args:
        kind: of the state.
        before: the former schema, as `StateField.value_schema`.
        now: the schema that the program declares.
        renamed: as `renames` gives them.
    """
    if kind in OWN_KINDS:
        return list(_struct_changes(_struct_of(before), _struct_of(now), "", renamed))
    old, new = schema_from_text(before), schema_from_text(now)
    old_types = {field.name: field.type for field in old}
    new_types = {renamed.get(field.name, field.name): field.type for field in new}
    names = {renamed.get(field.name, field.name): field.name for field in new}
    changes = [
        ColumnChange(ADDED, names[name], "", _arrow_text(kind_now))
        for name, kind_now in new_types.items()
        if name not in old_types
    ]
    for name, kind_before in old_types.items():
        text = _arrow_text(kind_before)
        if name not in new_types:
            changes.append(ColumnChange(REMOVED, name, text, ""))
        elif new_types[name] != kind_before:
            what = WIDENED if _is_wider(kind_before, new_types[name]) else REFUSED
            changes.append(ColumnChange(what, names[name], text, _arrow_text(new_types[name])))
    return changes


def renames(kind: str, before: str, now: str, renamed: Renamed) -> dict[str, str]:
    """Return the columns that are renamed from one schema to another: old names by new ones.

    A rename that a program still states after it was done changes nothing: the old name is gone.
    Accumulators of windows, `name.part`, follow the name of their aggregate, and fields the name of
    their struct, which they do not leave.
    """
    old, new = _names(kind, before), _names(kind, now)
    done: dict[str, str] = {}
    for name, (whole, part) in new.items():
        around = done.get(whole, renamed.get(whole, whole) if kind not in OWN_KINDS else whole)
        former = renamed.get(name, f"{around}{part}")
        stays = not whole or former.startswith(f"{around}.") or kind not in OWN_KINDS
        if former != name and former in old and name not in old and former not in new and stays:
            done[name] = former
    return done


def ambiguous(kind: str, before: str, renamed: Renamed) -> tuple[str, str] | None:
    """Return a new and an old name that a state holds both, of which no rename can be told."""
    if not renamed:
        return None
    old = _names(kind, before)
    return next(((new, was) for new, was in renamed.items() if {new, was} <= {*old}), None)


def evolved(
    base: StepState,
    fields: Sequence[StateField],
    next_id: int,
    renamed: Renamed,
    timestamp_ms: int,
    defaults: Mapping[str, Mapping[str, str]],
) -> StepState:
    """Return a step's state with the states of a program, which `settle` has accepted.

    The name of the new schema follows from the changes alone, so every attempt of a first epoch
    has the same, and another program another. A time to live that is new counts from the clock of
    the attempt, which is part of its change.

    Args:
        base: the committed state.
        fields: the states now.
        next_id: as `settle` gives it.
        renamed: old names of columns by their new names.
        timestamp_ms: the clock of the epoch.
        defaults: of new columns, by state and column; see `pyspark.defaults.stored_defaults`.
    """
    after = replace(base, fields=tuple(fields), next_id=next_id)
    now = {field.state_id: field for field in fields}
    changed = tuple(
        _former(field, new, renamed, timestamp_ms, defaults.get(field.name, {}))
        for field in base.fields
        if (new := now.get(field.state_id))
        and (new.value_schema != field.value_schema or has_ttl(field) != has_ttl(new))
    )
    if base.version is None or not changed:
        return after
    former = FormerSchema(base.schema, changed)
    texts = [former.to_json(), [now[state.state_id].value_schema for state in changed]]
    name = f"{base.version.epoch}-{zlib.crc32(json.dumps(texts).encode()):08x}"
    return replace(after, schema=name, former=(*base.former, former))


def _former(
    before: StateField,
    now: StateField,
    renamed: Renamed,
    timestamp_ms: int,
    defaults: Mapping[str, str],
) -> FormerState:
    names = renames(before.kind, before.value_schema, now.value_schema, renamed)
    changes = column_changes(before.kind, before.value_schema, now.value_schema, names)
    added = {change.column for change in changes if change.what == ADDED}
    return FormerState(
        before.state_id,
        before.value_schema,
        tuple(names.items()),
        ttl_change(before, now, timestamp_ms),
        tuple((name, digits) for name, digits in defaults.items() if name in added),
    )


def change_texts(before: StepState, after: StepState) -> Iterator[str]:
    """Yield the changes that `evolved` found, in words: a text for each state of the step."""
    if before.schema == after.schema:
        return
    fields = {field.state_id: field for field in after.fields}
    for state in after.former[-1].states:
        field, renamed = fields[state.state_id], dict(state.renamed)
        columns = column_changes(field.kind, state.value_schema, field.value_schema, renamed)
        texts = [
            f"column {old!r} is now called {new!r}"
            for new, old in state.renamed
            if not _is_of_struct(new, old, renamed)
        ]
        given = dict(state.defaults)
        for change in columns:
            value = "its default" if change.column in given else "null"
            default = f", {value} for what is held" if change.what == ADDED else ""
            texts += [f"{change.text}{default}"] if change.column != TIMER else []
        if state.ttl is not None:
            added = f"entries of before live for {field.ttl_ms} ms from that epoch on"
            removed = "entries that live then stay for ever"
            texts.append(
                f"it gets a time to live: {added}"
                if state.ttl.is_added
                else f"it has no time to live any more: {removed}"
            )
        what = "; ".join(texts) or "its columns have another order"
        yield f"step {after.uid}, state {field.name!r} changes with the next epoch: {what}"


def _is_of_struct(new: str, old: str, renamed: Renamed) -> bool:
    """True if a field has another path because its struct has another name."""
    around, _, name = new.rpartition(".")
    return around in renamed and old == f"{renamed[around]}.{name}"


def changed_since(step: StepState) -> str:
    """Return the last epoch before the newest schema, in words for refusals; "": there is none."""
    if not step.schema:
        return ""
    epoch = step.schema.partition("-")[0]
    return (
        f". Its columns changed after epoch {epoch}: a program from before goes on from a "
        f"savepoint of epoch {epoch} or before, restored to a checkpoint of its own"
    )


def converted(entries: pa.RecordBatch, step: StepState, schema: str) -> pa.RecordBatch:
    """Return entries of a former schema in the newest schema of a step.

    Args:
        entries: `ENTRIES`.
        step: the state of the step.
        schema: the schema of the entries, as `StateFile.schema`.

    Raises:
        ManifestError: an entry is not of that schema, or a text that was binary is no UTF-8.
    """
    start = [former.schema for former in step.former].index(schema)
    for number, former in enumerate(step.former[start:], start):
        for state in former.states:
            field = _next_form(step, state.state_id, number)
            if field is None:
                continue
            where = np.flatnonzero(ids_of(entries.column(0)) == state.state_id)
            is_all = len(where) == entries.num_rows
            of_state = entries if is_all else entries.take(pa.array(where))
            if len(where):
                values = _converted_state(step, state, field, of_state)
                entries = _with_values(entries, where, values)
            if state.ttl is not None:
                entries = with_expiries(entries, of_state, field, state.ttl)
    return entries


def _next_form(step: StepState, state_id: int, number: int) -> StateField | None:
    """Return a state as the schema after a former one has it; None: it was dropped since."""
    field = next((field for field in step.fields if field.state_id == state_id), None)
    if field is None:
        return None
    all_later = (state for former in step.former[number + 1 :] for state in former.states)
    later = [state for state in all_later if state.state_id == state_id]
    schema = later[0].value_schema if later else field.value_schema
    changes = [state.ttl for state in later if state.ttl is not None]
    ttl_ms = int(not changes[0].is_added) if changes else field.ttl_ms
    return replace(field, value_schema=schema, ttl_ms=ttl_ms)


def _with_values(
    entries: pa.RecordBatch, where: Int64Array, values: pa.BinaryArray
) -> pa.RecordBatch:
    if len(where) == entries.num_rows:
        return pa.RecordBatch.from_arrays([entries.column(0), values], schema=ENTRIES)
    places = np.arange(entries.num_rows)
    places[where] = entries.num_rows + np.arange(len(where))
    both = pa.concat_arrays([entries.column(1), values])
    return pa.RecordBatch.from_arrays(
        [entries.column(0), both.take(pa.array(places))], schema=ENTRIES
    )


def _converted_state(
    step: StepState, before: FormerState, now: StateField, entries: pa.RecordBatch
) -> pa.BinaryArray:
    """Return the values of a state's entries as of the next schema."""
    keys, values = entries.columns
    renamed = dict(before.renamed)
    if before.ttl is not None:
        values = with_ttl(values, before, now.kind, before.ttl)
    if before.value_schema == now.value_schema:
        return values
    try:
        if now.kind not in (ROWS, *OWN_KINDS):
            return _converted_columns(values, before, now, renamed)
        is_head = _have_no_rest(step, keys)
        if now.kind == ROWS:
            convert = partial(_converted_columns, before=before, now=now, renamed=renamed)
            return with_rows(values, is_head, convert)
        converts = ~is_head if now.kind == LIST else np.ones(len(keys), np.bool_)
        return _converted_structs(values, converts, before, now, renamed)
    except (pa.ArrowInvalid, msgspec.MsgspecError, *UNREADABLE) as error:
        raise ManifestError(
            f"step {step.uid}, state {now.name!r}: a value of {before.value_schema} does not "
            f"become one of {now.value_schema}: {error}. Set the columns back; a text that is kept "
            f"as binary stays binary if it is no UTF-8"
        ) from error


def _have_no_rest(step: StepState, keys: pa.BinaryArray) -> BoolArray:
    """Return a mask of the entries with nothing in their keys after the step's key."""
    after_id = tails(keys, REST_AT)
    _, sizes = KeyCodec.from_text(step.key_schema).decode_start(after_id)
    lengths = pc.binary_length(after_id).to_numpy()
    ends: BoolArray = np.asarray(sizes) == lengths
    return ends


# --- columns ------------------------------------------------------------------------------------


def _converted_columns(
    values: pa.BinaryArray, before: FormerState, now: StateField, renamed: Renamed
) -> pa.BinaryArray:
    old, new = schema_from_text(before.value_schema), schema_from_text(now.value_schema)
    if not (len(old) and len(new)):  # rows of a join may be known by their key and time alone
        return pa.nulls(len(values), pa.binary())
    rows, codec = ColumnsCodec(old).decode(values), ColumnsCodec(new)
    columns, defaults = [], dict(before.defaults)
    for field in new:
        name = renamed.get(field.name, field.name)
        if name in old.names:
            columns.append(_cast(rows.column(name), field.type))
        elif field.name == TIMER and before.ttl is not None:
            expiry = pa.scalar(before.ttl.at_ms, field.type)
            columns.append(pc.if_else(values.is_valid(), expiry, None))
        elif field.name in defaults:
            stored = pa.array([bytes.fromhex(defaults[field.name])], pa.binary())
            default = ColumnsCodec(pa.schema([field])).decode(stored).column(0)
            columns.append(default.take(pc.if_else(values.is_valid(), pa.scalar(0), None)))
        else:
            # `pa.nulls` gives lists without offsets.
            columns.append(pa.array([None] * len(values), field.type))
    encoded = codec.encode(pa.RecordBatch.from_arrays(columns, schema=new))
    if now.kind in (COLUMNS, ROWS):
        return encoded  # columns that are all null are no entry, as in `VectorisedFunction`
    return pc.if_else(values.is_valid(), encoded.fill_null(codec.all_null), encoded)


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    inner = kind.value_type if pa.types.is_list(kind) else kind
    if pa.types.is_timestamp(inner) and inner.tz:  # a date becomes its midnight in UTC
        plain = pa.timestamp(inner.unit)
        column = column.cast(pa.list_(plain) if pa.types.is_list(kind) else plain)
    return column.cast(kind)


_INTS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


def _is_wider(before: pa.DataType, now: pa.DataType) -> bool:
    """True if a type holds each value of another type exactly."""
    types = pa.types
    if before == now:
        return True
    if types.is_list(before) and types.is_list(now):
        return _is_wider(before.value_type, now.value_type)
    if before in _INTS:
        if now in _INTS:
            return _INTS.index(before) < _INTS.index(now)
        bits = {pa.float32(): 16, pa.float64(): 32}.get(now, 0)
        return int(before.bit_width) <= bits
    if before == pa.float32():
        return bool(now == pa.float64())
    if types.is_decimal128(before) and types.is_decimal128(now):
        return _holds_digits(before.precision, before.scale, now.precision, now.scale)
    if types.is_date32(before):
        return types.is_timestamp(now) and now.unit == "us" and now.tz in (None, "UTC")
    return {before, now} == {pa.string(), pa.binary()}


def _holds_digits(precision: int, scale: int, new_precision: int, new_scale: int) -> bool:
    return new_scale >= scale and new_precision - new_scale >= precision - scale


def _arrow_text(kind: pa.DataType) -> str:
    return ddl_of_type(kind)


# --- tuples, as `pyspark.values` stores them ------------------------------------------------------


_NUMBERS = {"byte": 8, "short": 16, "integer": 32, "long": 64}
_FLOATS = {"float": 16, "double": 32}
"""The greatest whole numbers that they hold, in bits of their types."""
_DDL = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint"}
_DAY_US = 86_400_000_000
_DECIMALS = decimal.Context(prec=76)
_Convert = Callable[[Any], Any]


def _struct_changes(before: Json, now: Json, path: str, renamed: Renamed) -> Iterator[ColumnChange]:
    old = {field["name"]: field["type"] for field in before["fields"]}
    new = {_former_name(path, field["name"], renamed): field for field in now["fields"]}
    for name, field in new.items():
        column = f"{path}{field['name']}"
        if name not in old:
            yield ColumnChange(ADDED, column, "", _spark_text(field["type"]))
        else:
            yield from _type_changes(old[name], field["type"], column, renamed)
    for name, kind in old.items():
        if name not in new:
            yield ColumnChange(REMOVED, f"{path}{name}", _spark_text(kind), "")


def _former_name(path: str, name: str, renamed: Renamed) -> str:
    """Return the name that a field had in its struct."""
    former = renamed.get(f"{path}{name}")
    if former is None:
        return name
    return former.rpartition(".")[2] if path else former


def _type_changes(before: Json, now: Json, column: str, renamed: Renamed) -> Iterator[ColumnChange]:
    kinds = {kind["type"] if isinstance(kind, dict) else "" for kind in (before, now)}
    if kinds == {"struct"}:
        yield from _struct_changes(before, now, f"{column}.", renamed)
    elif kinds == {"array"}:
        element = f"{column}.element"
        yield from _type_changes(before["elementType"], now["elementType"], element, renamed)
    elif kinds == {"map"} and not [*_type_changes(before["keyType"], now["keyType"], "", {})]:
        yield from _type_changes(before["valueType"], now["valueType"], f"{column}.value", renamed)
    elif before != now or kinds != {""}:
        is_wider = kinds == {""} and _is_wider_in_spark(before, now)
        what = WIDENED if is_wider else REFUSED
        yield ColumnChange(what, column, _spark_text(before), _spark_text(now))


def _struct_of(text: str) -> Json:
    """Read `StructType.json()`; types are looked at where they are compared."""
    try:
        struct = json.loads(text)
        if not all(isinstance(field["name"], str) for field in struct["fields"]):
            raise TypeError("a field's name is no text")
        return struct
    except UNREADABLE as error:
        raise ManifestError(
            f"a schema in the checkpoint is {text[:200]!r}: expected one of Spark's, as JSON. It "
            f"was edited, or made by somebody else."
        ) from error


def _is_wider_in_spark(before: str, now: str) -> bool:
    if before in _NUMBERS:
        return _NUMBERS[before] <= {**_NUMBERS, **_FLOATS}.get(now, 0)
    if before.startswith("decimal") and now.startswith("decimal"):
        return _holds_digits(*_digits(before), *_digits(now))
    if before.startswith(("char(", "varchar(")):
        return now == "string"
    return (before, now) in {
        ("float", "double"),
        ("date", "timestamp"),
        ("date", "timestamp_ntz"),
        ("string", "binary"),
        ("binary", "string"),
    }


def _digits(kind: str) -> tuple[int, int]:
    precision, scale = kind.removeprefix("decimal(").removesuffix(")").split(",")
    return int(precision), int(scale)


def _converted_structs(
    values: pa.BinaryArray,
    converts: BoolArray,
    before: FormerState,
    now: StateField,
    renamed: Renamed,
) -> pa.BinaryArray:
    old, new = _struct_of(before.value_schema), _struct_of(now.value_schema)
    unpack_one = msgspec.msgpack.decode
    defaults = {name: unpack_one(bytes.fromhex(data))[0] for name, data in before.defaults}
    convert = _struct_converter(old, new, "", _Names(renamed, defaults))
    start = EXPIRY_SIZE if now.ttl_ms else 0
    pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
    stored = [
        data[:start] + pack(convert(unpack(data[start:]))) if data is not None and is_own else data
        for data, is_own in zip(values.to_pylist(), converts.tolist(), strict=True)
    ]
    return pa.array(stored, pa.binary())


_NOWHERE = -1
"""The place of a field that a struct did not have."""


class _Names(NamedTuple):
    """The renamed columns and the defaults of new ones in a conversion, by their paths."""

    renamed: Renamed
    defaults: Mapping[str, Any]


def _struct_converter(before: Json, now: Json, path: str, named: _Names) -> _Convert:
    places = {field["name"]: at for at, field in enumerate(before["fields"])}
    parts: list[tuple[int, _Convert]] = []
    for field in now["fields"]:
        column = f"{path}{field['name']}"
        at = places.get(_former_name(path, field["name"], named.renamed))
        if at is None:
            parts.append((_NOWHERE, partial(_constant, named.defaults.get(column))))
        else:
            old = before["fields"][at]["type"]
            parts.append((at, _converter(old, field["type"], column, named)))

    def convert(value: Sequence[Any]) -> list[Any]:
        if len(value) != len(places):
            raise ValueError(f"{len(value)} values, expected {len(places)}")
        fields = [*value, _NOWHERE]  # of which a new field is made
        return [None if fields[at] is None else part(fields[at]) for at, part in parts]

    return convert


def _same(value: Any) -> Any:
    return value


def _constant(value: Any, _: Any) -> Any:
    return value


def _converter(before: Json, now: Json, column: str, named: _Names) -> _Convert:
    """Return a function between the stored forms of a value, not None, of two types."""
    if isinstance(now, dict):
        if now["type"] == "struct":
            return _struct_converter(before, now, f"{column}.", named)
        if now["type"] == "array":
            old, new = before["elementType"], now["elementType"]
            element = _converter(old, new, f"{column}.element", named)
            return lambda value: [None if part is None else element(part) for part in value]
        return _map_converter(before, now, column, named)
    if before == now or (before in _NUMBERS and now in _NUMBERS):
        return _same
    if now in _FLOATS:
        return float
    if now == "binary":
        return lambda text: text.encode()
    if before == "binary":
        return lambda data: data.decode()
    if before == "date":
        return lambda days: days * _DAY_US
    if now.startswith("decimal"):
        step = decimal.Decimal(1).scaleb(-_digits(now)[1])
        return lambda text: str(decimal.Decimal(text).quantize(step, context=_DECIMALS))
    return _same


def _map_converter(before: Json, now: Json, column: str, named: _Names) -> _Convert:
    part = _converter(before["valueType"], now["valueType"], f"{column}.value", named)
    is_plain = _is_plain(now)

    def convert(value: Any) -> Any:
        items = value.items() if isinstance(value, dict) else value
        pairs = [(key, None if one is None else part(one)) for key, one in items]
        return dict(pairs) if is_plain else pairs

    return convert


def _is_plain(kind: Json) -> bool:
    """True if values of a type are stored as they are; as `pyspark.values` has it."""
    if isinstance(kind, dict):
        if kind["type"] == "array":
            return _is_plain(kind["elementType"])
        is_map = kind["type"] == "map" and kind["keyType"] in (*_NUMBERS, "string")
        return is_map and _is_plain(kind["valueType"])
    return kind in (*_NUMBERS, "string", "double", "boolean", "binary")


def _spark_text(kind: Json) -> str:
    if not isinstance(kind, dict):
        return _DDL.get(kind, str(kind))
    if kind["type"] == "array":
        return f"array<{_spark_text(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"map<{_spark_text(kind['keyType'])},{_spark_text(kind['valueType'])}>"
    fields = (f"{field['name']}:{_spark_text(field['type'])}" for field in kind["fields"])
    return f"struct<{','.join(fields)}>"


def _names(kind: str, text: str) -> dict[str, tuple[str, str]]:
    """Return the names of columns, and of fields, which follow that of their struct.

    Returns:
        What stands around each, and its name behind that; an aggregate around an accumulator.
    """
    if kind in OWN_KINDS:
        return dict(_paths(_struct_of(text), "", ""))
    parts = {name: name.partition(".") for name in schema_from_text(text).names}
    return {name: (whole, f"{dot}{part}") for name, (whole, dot, part) in parts.items()}


def _paths(kind: Json, around: str, part: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the path of each field within a type, with what stands around it and the rest."""
    if not isinstance(kind, dict):
        return
    if kind["type"] == "struct":
        for field in kind["fields"]:
            rest = f"{part}.{field['name']}" if around else field["name"]
            yield f"{around}{rest}", (around, rest)
            yield from _paths(field["type"], f"{around}{rest}", "")
    elif kind["type"] == "array":
        yield from _paths(kind["elementType"], around, f"{part}.element")
    else:
        yield from _paths(kind["valueType"], around, f"{part}.value")
