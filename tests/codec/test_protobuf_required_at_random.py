"""Random Protobuf schemas with required fields, and rows with nulls at any depth.

A row that lacks what its schema requires is refused; each that is written is whole to Google's
reader.
"""

import random
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.descriptor_pb2 import FeatureSet as Features
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Proto
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from hypothesis import given
from hypothesis import strategies as st

from tallystick.codec.protobuf.writer import ProtobufWriter
from tallystick.errors import RecordError
from tests.examples import drawn
from tests.protobuf_schemas import add_field, classes_of, text_of

MESSAGES = ("A", "B", "C")
BEFORE_VALUE = 6
"""Confluent's bytes before a value of the file's first type: a zero, the schema's id, the index."""


def schema_at_random(draw: random.Random, syntax: str) -> FileDescriptorProto:
    """Return messages that hold the ones after them, plain and in lists, required and not."""
    file = FileDescriptorProto(name="q.proto", package="q", syntax=syntax)
    if syntax == "editions":
        file.edition = 1000  # 2023
    for place, name in enumerate(MESSAGES):
        message = file.message_type.add(name=name)
        later = [f".q.{other}" for other in MESSAGES[place + 1 :]]
        for number in range(draw.randrange(1, 6)):
            kind, is_list = draw.choice(["int32", "string", *later]), draw.random() < 0.3
            add_field(message, f"f{number}", kind, repeated=is_list)
            if is_list or draw.random() < 0.5:
                continue
            if syntax == "proto2":
                message.field[-1].label = Proto.LABEL_REQUIRED
            else:
                message.field[-1].options.features.field_presence = Features.LEGACY_REQUIRED
    return file


def kind_of(field: Any) -> pa.DataType:
    if field.message_type is None:
        kind = pa.int32() if field.type == Proto.TYPE_INT32 else pa.string()
    else:
        kind = pa.struct([(inner.name, kind_of(inner)) for inner in field.message_type.fields])
    return pa.list_(kind) if field.is_repeated else kind


def row_of(draw: random.Random, descriptor: Any, nulls: float) -> dict[str, Any]:
    return {field.name: value_of(draw, field, nulls) for field in descriptor.fields}


def value_of(draw: random.Random, field: Any, nulls: float) -> Any:
    if field.is_repeated:
        return [single_of(draw, field, nulls) for _ in range(draw.randrange(3))]
    return None if draw.random() < nulls else single_of(draw, field, nulls)


def single_of(draw: random.Random, field: Any, nulls: float) -> Any:
    if field.message_type is not None:
        return row_of(draw, field.message_type, nulls)
    return draw.choice([0, 7]) if field.type == Proto.TYPE_INT32 else draw.choice(["", "x"])


def lacks_something(row: dict[str, Any], descriptor: Any) -> bool:
    for field in descriptor.fields:
        value = row[field.name]
        if value is None and field.is_required:
            return True
        inner = value if field.is_repeated else [] if value is None else [value]
        if field.message_type and any(lacks_something(one, field.message_type) for one in inner):
            return True
    return False


@pytest.mark.parametrize("syntax", ["proto2", "editions"])
@drawn(60)
@given(seed=st.integers(0, 2**40), nulls=st.sampled_from([0.0, 0.1, 0.4]))
def test_what_a_schema_requires_is_there_or_the_rows_are_refused(
    syntax: str, seed: int, nulls: float
) -> None:
    draw = random.Random(seed)
    file = schema_at_random(draw, syntax)
    judge = classes_of(file)["A"]
    columns = pa.schema([(field.name, kind_of(field)) for field in judge.DESCRIPTOR.fields])
    rows = [row_of(draw, judge.DESCRIPTOR, nulls) for _ in range(4)]
    batch = pa.RecordBatch.from_pylist(rows, schema=columns).slice(1)
    writer = ProtobufWriter(5, (text_of(file),), "q.A")

    if any(lacks_something(row, judge.DESCRIPTOR) for row in rows[1:]):
        with pytest.raises(RecordError, match="never null"):
            writer.write(batch)
        return
    for value in writer.write(batch).to_pylist():
        assert judge.FromString(value[BEFORE_VALUE:]).IsInitialized()
