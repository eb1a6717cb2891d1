"""Rows of tests as records of a source's topics."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import pyarrow as pa

from tallystick.arguments import near
from tallystick.codec.formats import REGISTERED, Format, Text
from tallystick.codec.rows import HEADERS_TYPE
from tallystick.errors import OptionError
from tallystick.kafka.registry import value_writer
from tallystick.pipeline.inputs import PipelineInput
from tallystick.testing.columns import columns_read
from tallystick.testing.memory import Clock, Topics, sent
from tallystick.values import TopicPartition

RAW = ("key", "value", "headers", "timestamp")
"""The columns of a record that is given as it is."""


class Feeder:
    """Appends rows to the topics of a pipeline's sources.

    Args:
        inputs: of the pipeline, those of broadcast tables too.
        topics: where the records go.
        clock: the timestamp of records without one.
    """

    def __init__(self, inputs: Sequence[PipelineInput], topics: Topics, clock: Clock) -> None:
        self._inputs, self._topics, self._clock = inputs, topics, clock

    def feed(self, name: str, rows: Any, partition: int, at: datetime | int | None) -> None:
        """Append rows to a partition; see `Driver.feed`."""
        source, topic = self._source(name)
        given = _GivenRows(f"feed({name!r})", rows)
        if isinstance(at, datetime):
            at = round(at.timestamp() * 1000)
        at_ms = self._clock() if at is None else at
        if (columns := columns_read(source)) is not None:
            batch = given.batch(columns)
            self._topics.append_columns(TopicPartition(topic, partition), batch, at_ms)
            return
        batch = sent(_records(given, source, topic), at_ms)
        if batch.num_rows:
            self._topics.append(TopicPartition(topic, partition), batch)

    def by_source(self, inputs: Any) -> Mapping[str, Any]:
        """Return input rows by source; rows alone are those of the only topic.

        Raises:
            OptionError: there are several topics.
        """
        if isinstance(inputs, Mapping):
            return inputs
        named = self._named
        if len(named) != 1:
            raise OptionError(f"run(): which rows are whose? Give a dict: {', '.join(named)}")
        return {named[0]: inputs}

    @property
    def _named(self) -> list[str]:
        subscriptions = [source.options.subscription for source in self._inputs]
        return list(dict.fromkeys(name for one in subscriptions for name in one.named or ()))

    def _source(self, name: str) -> tuple[PipelineInput, str]:
        for source in self._inputs:
            if source.options.subscription.partitions(name, 1 << 16):
                return source, name
        for source in self._inputs:
            named = source.options.subscription.named or ()
            if name in (source.name, source.uid) and len(named) == 1:
                return source, named[0]
        known = [*self._named, *(source.name for source in self._inputs if source.name)]
        raise OptionError(
            f"feed({name!r}): the pipeline reads no such topic, only {', '.join(known)}."
            f"{near(name, known)}"
        )


class _GivenRows:
    """Rows as a test has them: by column, with the types of the source where it has some."""

    def __init__(self, what: str, rows: Any) -> None:
        self.what = what
        self._columns: Mapping[str, Any]
        if isinstance(rows, pa.RecordBatch | pa.Table) or hasattr(rows, "__arrow_c_stream__"):
            table = rows if isinstance(rows, pa.RecordBatch | pa.Table) else pa.table(rows)
            self.count = int(table.num_rows)
            self._columns = dict(zip(table.schema.names, table.columns, strict=True))
            return
        if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
            raise OptionError(
                f"{what}: expected rows as a list of dicts, a table or a frame, found "
                f"{reprlib.repr(rows)}"
            )
        rows = [{"value": row} if isinstance(row, bytes | str) else row for row in rows]
        for row in rows:
            if not isinstance(row, Mapping):
                raise OptionError(f"{what}: expected rows as dicts, found {type(row).__name__}")
        self.count = len(rows)
        names = dict.fromkeys(name for row in rows for name in row)
        self._columns = {name: [row.get(name) for row in rows] for name in names}

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self._columns)

    def check(self, known: Iterable[str]) -> None:
        """Raise OptionError for a column that the source does not have."""
        names = list(known)
        for name in self._columns:
            if name not in names:
                raise OptionError(
                    f"{self.what}: the source has no column {name!r}, only {', '.join(names)}."
                    f"{near(name, names)} Other bytes are raw records: dicts with 'value'"
                )

    def batch(self, columns: pa.Schema) -> pa.RecordBatch:
        """Return the rows with declared columns.

        Raises:
            OptionError: they have another column, or a value of another type.
        """
        self.check(columns.names)
        arrays = [self.column(field.name, field.type) for field in columns]
        return pa.RecordBatch.from_arrays(arrays, schema=columns)

    def column(self, name: str, kind: pa.DataType | None) -> pa.Array:
        """Return a column of a type, null where the rows lack the column; with no type, unchanged.

        Raises:
            OptionError: a value is of another type.
        """
        values = self._columns.get(name)
        try:
            if values is None:
                return pa.nulls(self.count, kind)
            if isinstance(values, list):
                return pa.array(values, kind)
            if isinstance(values, pa.ChunkedArray):
                values = values.combine_chunks()
            return values if kind is None else values.cast(kind)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise OptionError(f"{self.what}: column {name!r}: {error}") from None


def _records(rows: _GivenRows, source: PipelineInput, topic: str) -> pa.RecordBatch:
    """Return rows as records: encoded by the source's formats, or raw."""
    options, layout = source.options, source.declared
    form, reader = options.value, layout.value
    fields: list[str] = [] if reader is None else reader.schema.names
    is_raw = "value" in rows.names and "value" not in fields
    if reader is None or isinstance(form, Text | None) or is_raw:
        rows.check(RAW)
        binary = {name: rows.column(name, pa.binary()) for name in ("key", "value")}
        return pa.RecordBatch.from_pydict({**binary, **_beside(rows, {name: name for name in RAW})})
    names = {name: options.metadata_prefix + name for name in RAW if name != "value"}
    names = {name: column for name, column in names.items() if column not in fields}
    keys: dict[str, pa.Field] = {}
    if layout.key is not None:
        keys = {layout.key_prefix + field.name: field for field in layout.key.schema}
        names.pop("key", None)
    rows.check([*fields, *keys, *names.values()])
    columns = {"value": _written(rows, form, {field.name: field for field in reader.schema}, topic)}
    if keys:
        columns["key"] = _written(rows, options.key, keys, topic, "key")
    elif "key" in names:
        columns["key"] = rows.column(names["key"], pa.binary())
    return pa.RecordBatch.from_pydict({**columns, **_beside(rows, names)})


def _beside(rows: _GivenRows, names: Mapping[str, str]) -> dict[str, pa.Array]:
    """Return the headers and timestamps of records, by their columns' names, if there are any."""
    columns = {}
    if names.get("headers") in rows.names:
        columns["headers"] = rows.column(names["headers"], HEADERS_TYPE)
    if names.get("timestamp") in rows.names:
        times = rows.column(names["timestamp"], None)
        if pa.types.is_timestamp(times.type):
            times = times.cast(pa.timestamp("ms", times.type.tz), safe=False)
        columns["timestamp"] = times.cast(pa.int64())
    return columns


def _written(
    rows: _GivenRows,
    form: Format | None,
    fields: Mapping[str, pa.Field],
    topic: str,
    part: str = "value",
) -> pa.Array:
    """Return columns as the values or keys that a source's format reads.

    Args:
        rows: with the columns.
        form: of the source.
        fields: of the format, by the names of the columns.
        topic: names the subject in a registry.
        part: of the record, names it too.

    Raises:
        OptionError: the format does not say how to write.
    """
    arrays = [rows.column(name, field.type) for name, field in fields.items()]
    names = [field.name for field in fields.values()]
    columns = pa.RecordBatch.from_arrays(arrays, names=names)
    if form is not None and not isinstance(form, REGISTERED):
        return value_writer(form, "", registers=False).write(columns)
    if form is None or form.registry is None:
        raise OptionError(
            f"{rows.what}: {type(form).__name__}() without a registry= says how {part}s are read, "
            f"and not how they are written: give raw records, dicts with 'value' and 'key' as bytes"
        )
    # A source's schema is of the fields to read; what to write is the subject's newest.
    writer = value_writer(replace(form, schema=None), f"{topic}-{part}", registers=False)
    return writer.write(columns)
