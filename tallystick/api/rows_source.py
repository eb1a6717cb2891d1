"""`RowsSource`: rows of the program itself as a source, to try a pipeline before there is a Kafka.

Rows become Arrow columns here, before a pipeline starts, so that a mistake in a row shows where the
row is given. Rows of an iterator are read while the pipeline runs.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar

import pyarrow as pa

from tallystick.api.kafka_source import KafkaSource
from tallystick.arguments import checked, near
from tallystick.codec.ddl import ddl_of
from tallystick.codec.formats import Ddl, Json
from tallystick.errors import OptionError
from tallystick.host.failure import Failure
from tallystick.host.user_code import calling_user
from tallystick.options.source import SourceOptions
from tallystick.source.offsets import ONLY_INPUT
from tallystick.source.subscription import LATEST, AtOffsets
from tallystick.state.schema import schema_of
from tallystick.tasks.frames import conform
from tallystick.testing.columns import NO_SERVER

WHAT = "RowsSource"
TAKE_S = 0.1
"""The time for which rows of an iterator are collected for an epoch."""
TAKEN_MAX = 10_000
"""The most rows of an iterator in an epoch."""
_EXPECTED = "a list of dicts, an Arrow table, a pandas or Polars frame, or a generator of dicts"


class IteratedRows:
    """The rows of an iterator, of which each is read once.

    Args:
        rows: yields dicts.
        columns: of the rows; None: those of the first row.
    """

    def __init__(self, rows: Iterator[Any], columns: pa.Schema | None) -> None:
        self._rows, self._columns = rows, columns
        self._row_count = 0
        self._is_begun = False
        self.error: Exception | None = None
        """Raised by the iterator, after the rows that it gave before."""
        self.is_over = False

    def begin(self) -> None:
        """Begin to read, for one run.

        Raises:
            OptionError: an earlier run began.
        """
        if self._is_begun:
            raise OptionError(
                f"{WHAT}: an earlier start has read its generator, which gives each row once: make "
                f"the source again, with a new generator; or give it a list"
            )
        self._is_begun = True

    @property
    def columns(self) -> pa.Schema:
        """The columns; reads the first row if nobody declared columns."""
        if self._columns is None:
            first = self._next_rows(1, float("inf"))
            if self.error is not None:
                raise self.error
            if not first:
                raise OptionError(f"{WHAT}: {_NO_ROWS}")
            self._columns = _columns_of(_batch(first, None).schema)
            self._rows = chain(first, self._rows)
        return self._columns

    def take(self, count: int) -> pa.RecordBatch:
        """Return the rows that the iterator gives within `TAKE_S` seconds.

        Args:
            count: the most rows.
        """
        columns = self.columns
        rows = self._next_rows(min(count, TAKEN_MAX), time.monotonic() + TAKE_S)
        self._row_count += len(rows)
        return _batch(rows, columns, self._row_count - len(rows))

    def _next_rows(self, count: int, until_s: float) -> list[Any]:
        rows: list[Any] = []
        try:
            while len(rows) < count and time.monotonic() < until_s and self.error is None:
                with calling_user(f"{WHAT}: the iterator"):
                    row = next(self._rows)
                rows.append(deepcopy(row))  # it may be the dict, or hold the list, of the next row
        except StopIteration:
            self.is_over = True
        except Exception as error:
            self.error = Failure.of(error).to_error(error)
        return rows


@checked
@dataclass(frozen=True, eq=False)
class RowsSource:
    """Rows that the program has, as a source: a pipeline to try, without Kafka.

    A pipeline of such sources runs in this process, whatever its sinks. It reads from the first
    row at each start, ends with the last one, and keeps nothing.

    Args:
        rows: a list of dicts, an Arrow table, a pandas or Polars frame, or a generator of dicts,
            which is read once.
        schema: the columns, as DDL or as a schema: values are cast where none changes, and a column
            that a dict lacks is null. None: the columns that the rows have, and of a generator
            those of its first row.
        rate: rows per second; None: as fast as they are read.

    Raises:
        OptionError: there are no rows and no schema, or a row has other columns than the first.
    """

    rows: Any = field(repr=False)
    _: KW_ONLY
    schema: Ddl | None = None
    rate: float | None = None

    group_id: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise OptionError(f"{WHAT}(rate={self.rate}): expected rows per second, more than 0")
        declared = None if self.schema is None else schema_of(self.schema, f"{WHAT}(schema)")
        rows: Any = self.rows
        if isinstance(rows, Iterator):
            object.__setattr__(self, "rows", IteratedRows(rows, declared))
            return
        batch = _given(rows, declared)
        if self.rate is not None:
            iterated = IteratedRows(iter(batch.to_pylist()), batch.schema)
            object.__setattr__(self, "rows", iterated)
            return
        object.__setattr__(self, "rows", batch)

    @property
    def columns(self) -> pa.Schema:
        """The columns of the rows."""
        rows: pa.RecordBatch | IteratedRows = self.rows
        return rows.columns if isinstance(rows, IteratedRows) else rows.schema

    def read_options(self, owner: str) -> SourceOptions:
        """Return the options with which the rows are read, as if they were JSON in a topic.

        Args:
            owner: the pipeline, or the pipeline and the uid of the input.
        """
        _, _, uid = owner.partition("/")
        topic = f"rows-{uid}" if uid not in ("", ONLY_INPUT) else "rows"
        form = Json(ddl_of(self.columns))
        source = KafkaSource(NO_SERVER, topics=[topic], value=form, starting_offsets="earliest")
        is_bounded = not isinstance(self.rows, IteratedRows)
        stop = AtOffsets(LATEST) if is_bounded else None
        options = source.read_options(owner)
        return replace(options, metadata_columns=(), group="", stop=stop)


_NO_ROWS = (
    "there are no rows, and so no columns: give it some, or schema='dest string, dep_delay double'"
)


def _given(rows: Any, declared: pa.Schema | None) -> pa.RecordBatch:
    """Return rows as a batch with declared columns, or with their own."""
    if isinstance(rows, pa.RecordBatch | pa.Table) or hasattr(rows, "__arrow_c_stream__"):
        table = pa.table(rows).combine_chunks()
        if not table.num_columns:
            raise OptionError(f"{WHAT}: {_NO_ROWS}")
        columns = declared or _columns_of(table.schema)
        batches = table.to_batches()
        batch = batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
        return conform(batch, columns, f"{WHAT}, schema=")
    if callable(rows):
        name = getattr(rows, "__name__", "function")
        raise OptionError(f"{WHAT}(rows): {name} is a function: call it, {WHAT}({name}())")
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise OptionError(f"{WHAT}(rows): expected {_EXPECTED}; found {type(rows).__name__}")
    listed = list(rows)
    if not listed and declared is None:
        raise OptionError(f"{WHAT}: {_NO_ROWS}")
    batch = _batch(listed, declared)
    return batch if declared else conform(batch, _columns_of(batch.schema), WHAT)


def _batch(rows: Sequence[Any], columns: pa.Schema | None, begin: int = 0) -> pa.RecordBatch:
    """Return dicts as a batch.

    Args:
        rows: the dicts.
        columns: of the rows; None: those of the first row.
        begin: how many rows came before.

    Raises:
        OptionError: a row is no dict, has other columns, or a value of another type.
    """
    _check_names(rows, columns, begin)
    names = list(rows[0]) if columns is None else columns.names
    arrays = []
    for name in names:
        kind = None if columns is None else columns.field(name).type
        try:
            # `pa.array` would import pandas.
            values = pa.scalar([row.get(name) for row in rows], kind and pa.list_(kind)).values
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            expected = "" if kind is None else f" as {kind}"
            raise OptionError(f"{WHAT}: column {name!r}{expected}: {error}") from None
        arrays.append(values)
    return pa.RecordBatch.from_arrays(arrays, names=names)


def _check_names(rows: Sequence[Any], columns: pa.Schema | None, begin: int) -> None:
    first = None if columns is not None or not rows else rows[0]
    for number, row in enumerate(rows, start=begin + 1):
        if not isinstance(row, Mapping):
            raise OptionError(
                f"{WHAT}(rows): row {number} is of type {type(row).__name__}: expected dicts, such "
                f"as {{'dest': 'JFK', 'dep_delay': 20.0}}"
            )
        known = columns.names if columns is not None else list(first or ())
        for name in row:
            if name not in known:
                raise OptionError(
                    f"{WHAT}: row {number} has a column {name!r}, and the columns are "
                    f"{', '.join(map(str, known))}.{near(name, known)} Name all in schema="
                )
        if columns is None and (missing := [name for name in known if name not in row]):
            raise OptionError(
                f"{WHAT}: row {number} has no {missing[0]!r}, which row 1 has: give each row the "
                f"same columns; or name them in schema=, and a missing one is null"
            )


def _columns_of(schema: pa.Schema) -> pa.Schema:
    """Return Arrow's columns with the types of Spark's that Tallystick reads.

    Raises:
        OptionError: a column has no type, or one that Spark has not.
    """
    fields = []
    for column in schema:
        kind = _read_as(column.type)
        if pa.types.is_null(kind):
            raise OptionError(
                f"{WHAT}: column {column.name!r} is None in every row, and so has no type: name "
                f"the columns in schema="
            )
        fields.append(pa.field(column.name, kind))
    text = ddl_of(pa.schema(fields))
    return schema_of(text, f"{WHAT}: the columns of the rows")


def _read_as(kind: pa.DataType) -> pa.DataType:
    """Return the type of Spark's that holds the values of a type of Arrow's."""
    if pa.types.is_dictionary(kind):
        return _read_as(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_unsigned_integer(kind):
        return pa.int64()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_read_as(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(one.name, _read_as(one.type)) for one in kind])
    return kind
