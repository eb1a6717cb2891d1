"""Inputs whose rows are columns already, as of a `RowsSource`: no value is parsed.

Their options say JSON in a topic, so that they are planned, checked and shown as others.
"""

from dataclasses import dataclass, replace

import pyarrow as pa

from tallystick.codec.values import ParsedValues, Where
from tallystick.pipeline.compiled import PipelineRun
from tallystick.pipeline.inputs import PipelineInput
from tallystick.tasks.read_plan import ReadPlan

NO_SERVER = "in-this-process:1"
"""Stands for the cluster of such an input."""


@dataclass(frozen=True)
class ColumnsReader:
    """The reader of values that are structs of columns; see `codec.values.ValueReader`."""

    schema: pa.Schema

    def parse(self, values: pa.Array, mode: str, where: Where) -> ParsedValues:
        """Return the columns of the schema, which may be some of those that were given."""
        given = dict(zip((field.name for field in values.type), values.flatten(), strict=True))
        arrays = [given[name] for name in self.schema.names]
        return ParsedValues(pa.RecordBatch.from_arrays(arrays, schema=self.schema))


def columns_read(source: PipelineInput) -> pa.Schema | None:
    """Return the columns of an input of columns; None: it reads records."""
    value = source.declared.value
    if value is None or source.config.bootstrap_servers != NO_SERVER:
        return None
    return value.schema


def read_columns(run: PipelineRun) -> None:
    """Replace the parsers of a run's inputs where their values are columns already."""
    here = {source.uid for source in run.all_inputs if columns_read(source) is not None}
    for source in run.all_inputs:
        if source.uid in here:
            source.read = _of_columns(source.read)
    tables = (
        replace(step, read=_of_columns(step.read)) if step.uid in here else step
        for step in run.keyed.tables
    )
    run.keyed = replace(run.keyed, tables=tuple(tables))


def _of_columns(read: ReadPlan) -> ReadPlan:
    assert read.layout.value is not None, "JSON"
    value = ColumnsReader(read.layout.value.schema)
    return replace(read, layout=replace(read.layout, value=value))
