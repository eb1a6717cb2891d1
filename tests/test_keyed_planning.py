"""Keyed steps before anything starts: what is read for them, and what is refused."""

import pyarrow as pa

import tallystick as ts
from tallystick.keyed_task import KeyedStep
from tallystick.source.columns import Layout
from tallystick.source.json_reader import JsonReader
from tallystick.spark.keyed import lean
from tallystick.state.key_bytes import KeyCodec
from tallystick.task import ReadPlan


def test_a_field_of_the_value_may_be_called_headers():
    fields = pa.schema([("user", pa.string()), ("headers", pa.string())])
    layout = Layout(JsonReader(fields))
    key = KeyCodec(pa.schema([fields.field("user")]))
    step = KeyedStep("count", key, layout.schema, ts.deduplicate(), (), layout.schema)

    read, _ = lean(ReadPlan(None, layout), step)

    assert read.layout.schema.names[:2] == ["user", "headers"]
    assert not read.layout.headers
