"""Readers of values and writers of values: their interfaces; and text, the simplest format.

Text is strictly valid UTF-8, checked for a whole column in one pass: Spark's own
`cast(value as string)` puts U+FFFD where bytes are no text, without a warning.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tallystick.codec.formats import FAILFAST, MODES, PERMISSIVE
from tallystick.errors import OptionError, RecordError

SHOWN_BYTES_MAX = 100
DECIMAL_DIGITS_MAX = 76
"""The digits of Arrow's widest decimal: 10^76 has fewer than 255 bits."""

Where = Callable[[int], str]
"""Names the topic, partition and offset of an input row."""


@dataclass(frozen=True, slots=True)
class ParsedValues:
    """Typed rows, and the reasons of malformed records.

    Args:
        columns: exactly the asked-for schema; one row per kept record.
        rows: the indices of the kept input rows; None: all were kept.
        reasons: the reason of each malformed input row, by its index.
    """

    columns: pa.RecordBatch
    rows: NDArray[np.int64] | None = None
    reasons: Mapping[int, str] = field(default_factory=dict)


class ValueReader(Protocol):
    """Turns values into columns; a plain value, pickled to tasks.

    One is made for the columns that a pipeline uses, which may be some of the declared ones.
    """

    @property
    def schema(self) -> pa.Schema:
        """The columns that `parse` returns."""
        ...

    def parse(self, values: pa.Array, mode: str, where: Where) -> ParsedValues:
        """Parse one value per record.

        Args:
            values: binary; a null (tombstone) is a row of nulls in every mode, never malformed.
            mode: one of `formats.MODES`: failfast raises at the first malformed record;
                permissive keeps it as a row of nulls; dropmalformed and deadletter leave it out.
                All but failfast say why in `ParsedValues.reasons`.
            where: for messages.

        Raises:
            RecordError: a record is malformed, in mode failfast; the first one is named.
        """
        ...


def malformed_error(values: pa.Array, row: int, expected: str, reason: str, at: str) -> RecordError:
    """Return the error of mode failfast: the record, the reason, how to see and allow the record.

    Args:
        values: all values; only the beginning of the malformed one is shown.
        row: the malformed one.
        expected: such as "a JSON object of the schema asked for".
        reason: why it is malformed.
        at: its topic, partition and offset.
    """
    record = values[row].as_py()
    rest = f" … ({len(record)} bytes)" if len(record) > SHOWN_BYTES_MAX else ""
    problem = f"{at}: the value is not {expected}"
    remedy = (
        "Read without a format, the source shows all of its bytes. Mode permissive makes such a "
        "record a row of nulls with its bytes in _corrupt_record; dropmalformed leaves it out and "
        "counts it; deadletter, in a Pipeline, writes it to a topic of its own."
    )
    return RecordError(  # the reason may be Arrow's, which quotes the value
        f"{problem}: {reason}. It is {record[:SHOWN_BYTES_MAX]!r}{rest}. {remedy}",
        without_values=f"{problem}. {remedy}",
    )


def by_mode(
    values: pa.Array,
    columns: pa.RecordBatch,
    reasons: Mapping[int, str],
    mode: str,
    expected: str,
    where: Where,
) -> ParsedValues:
    """Return parsed rows, with the malformed records treated as a mode says.

    The end of every `ValueReader.parse`, so that all formats have the same four modes.

    Args:
        values: see `ValueReader.parse`.
        columns: a row per value; nulls for a malformed one.
        reasons: the reason of each malformed row, in the order of the rows.
        mode: one of `formats.MODES`.
        expected: see `malformed_error`.
        where: names the topic, partition and offset of an input row.

    Raises:
        RecordError: a record is malformed, in mode failfast.
    """
    assert mode in MODES, mode
    if reasons and mode == FAILFAST:
        row, reason = next(iter(reasons.items()))
        raise malformed_error(values, row, expected, reason, where(row))
    if not reasons or mode == PERMISSIVE:
        return ParsedValues(columns, None, reasons)
    kept = np.delete(np.arange(len(values)), list(reasons))
    return ParsedValues(columns.take(pa.array(kept)), kept, reasons)


def check_names(fields: Sequence[pa.Field], path: str, form: str) -> None:
    """Check that fields have different names.

    Args:
        fields: the fields of a record.
        path: where they stand, for messages.
        form: the format, for messages.

    Raises:
        OptionError: there is no field, or a name comes twice.
    """
    names = [field.name for field in fields]
    if not names:
        raise OptionError(f"{path} has no fields: name at least one, e.g. 'dest string'")
    for name in names:
        if names.count(name) > 1:
            raise OptionError(
                f"{path} names field {name!r} twice: {form} finds fields by their name"
            )


def nulls(schema: pa.Schema, row_count: int) -> pa.RecordBatch:
    """Return rows of nulls: for tombstones, and in mode permissive for malformed records."""
    arrays = [pa.nulls(row_count, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


TEXT_SCHEMA = pa.schema([pa.field("value", pa.string())])


@dataclass(frozen=True)
class TextReader:
    """A `ValueReader` of UTF-8 text, as the column `value`."""

    schema: ClassVar[pa.Schema] = TEXT_SCHEMA

    def parse(self, values: pa.Array, mode: str, where: Where) -> ParsedValues:
        """See `ValueReader.parse`."""
        assert mode in MODES, mode
        try:
            return ParsedValues(_batch(values.cast(pa.string())))
        except pa.ArrowInvalid:
            reasons = _reasons(values)
        good = np.ones(len(values), np.bool_)
        good[list(reasons)] = False
        readable = pc.if_else(pa.array(good), values, pa.scalar(None, values.type))
        columns = _batch(readable.cast(pa.string()))
        return by_mode(values, columns, reasons, mode, "UTF-8 text", where)


def _batch(texts: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([texts], schema=TEXT_SCHEMA)


def _reasons(values: pa.Array) -> dict[int, str]:
    """Return the reason of each row that is no text, by a pass over a batch with such rows."""
    reasons = {}
    for row, value in enumerate(values.to_pylist()):
        try:
            if value is not None:
                value.decode()
        except UnicodeDecodeError as error:
            reasons[row] = f"it is not valid UTF-8: {error.reason} at byte {error.start}"
    assert reasons, "Arrow and Python disagree about what UTF-8 is"
    return reasons


class ValueWriter(Protocol):
    """Turns columns into values; a plain value, pickled to tasks."""

    def check(self, columns: pa.Schema) -> None:
        """Refuse columns that the format cannot hold, before any rows come.

        Raises:
            OptionError: a column is of the wrong type, missing, or one that the format cannot hold.
        """
        ...

    def write(self, columns: pa.RecordBatch) -> pa.Array:
        """Write one value per row, of all columns.

        Returns:
            binary, never null; large_binary where it is more than 2 GiB.

        Raises:
            OptionError: `check` would have raised it.
            RecordError: a row holds a value that the format cannot hold.
        """
        ...


def with_wide_decimals(kind: pa.DataType) -> pa.DataType:
    """Return a type with decimals of 256 bits at every depth, through which values are cast.

    In 128 bits Arrow multiplies to a greater scale, and does not notice that they are full.
    """
    if pa.types.is_decimal128(kind):
        return pa.decimal256(DECIMAL_DIGITS_MAX, kind.scale)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(with_wide_decimals(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(with_wide_decimals(kind.value_type)))
    if pa.types.is_map(kind):
        item = kind.item_field.with_type(with_wide_decimals(kind.item_type))
        return pa.map_(kind.key_field, item)
    return kind
