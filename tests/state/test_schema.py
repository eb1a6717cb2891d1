"""DDL as Spark reads it, without a JVM."""

import pyarrow as pa
import pytest

from tallystick.codec.ddl import ddl_of
from tallystick.errors import OptionError
from tallystick.state.schema import schema_of


def test_plain_types_and_arrays() -> None:
    columns = schema_of(
        "n bigint, `odd ``name` STRING NOT NULL, price decimal(12, 2), d decimal,"
        " tags array<array<string>>, at timestamp, x: int",
        "state",
    )

    assert columns == pa.schema(
        [
            pa.field("n", pa.int64()),
            pa.field("odd `name", pa.string(), nullable=False),
            pa.field("price", pa.decimal128(12, 2)),
            pa.field("d", pa.decimal128(10, 0)),
            pa.field("tags", pa.list_(pa.list_(pa.string()))),
            pa.field("at", pa.timestamp("us", tz="UTC")),
            pa.field("x", pa.int32()),
        ]
    )


def test_a_schema_as_ddl_is_read_back_as_it_was() -> None:
    ddl = "n bigint, `odd ``name` string, p decimal(12, 2), tags array<array<int>>, at timestamp"

    assert ddl_of(schema_of(ddl, "state")) == ddl
    assert ddl_of(pa.schema([("a", pa.uint8())])) == "a uint8"
    nested = "m map<string, struct<`a b`: int, c: array<date>>>"
    assert ddl_of(schema_of(nested, "state")) == nested


def test_a_ready_schema_stays_and_nothing_is_no_columns() -> None:
    schema = pa.schema([("a", pa.uint8())])
    assert schema_of(schema, "state") is schema
    assert schema_of(" ", "state") == pa.schema([])


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("n bigin", "state: .* at 'bigin' .* is not a type"),
        ("n", "state: .* at its end: expected a type"),
        ("n int,", "expected the name of a column"),
        ("n int, N long", "has 'n' twice"),
        ("n decimal(39, 1)", "expected at most 38"),
        (7, "expected DDL like .*, not int"),
    ],
)
def test_what_cannot_be_read_is_refused(ddl: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        schema_of(ddl, "state")
