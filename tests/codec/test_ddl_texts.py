"""DDL without a JVM. That it is read as Spark reads it: tests/spark/test_ddl_as_spark.py."""

import pyarrow as pa
import pytest

from tallystick.codec import ddl
from tallystick.errors import OptionError
from tallystick.state.schema import arrow_schema, arrow_type


def test_columns_become_arrows_with_maps_structs_and_comments() -> None:
    text = """
        id BIGINT NOT NULL COMMENT 'it''s the key', -- the rest may be null
        `odd ``name`: decimal(12, 2),
        tags array<struct<name: string, at: timestamp not null>>,
        counts Map<String, Array<Int>> /* nested */
    """
    assert arrow_schema(ddl.columns(text, "value"), "value") == pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("odd `name", pa.decimal128(12, 2)),
            pa.field(
                "tags",
                pa.list_(
                    pa.struct(
                        [
                            pa.field("name", pa.string()),
                            pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
                        ]
                    )
                ),
            ),
            pa.field("counts", pa.map_(pa.string(), pa.list_(pa.int32()))),
        ]
    )


def test_a_type_alone_is_a_column_named_value() -> None:
    assert arrow_type(ddl.parse("map<string, int>", "x"), "x") == pa.map_(pa.string(), pa.int32())
    assert arrow_schema(ddl.columns("int", "x"), "x") == pa.schema([("value", pa.int32())])
    assert ddl.columns("", "x") == {"type": "struct", "fields": []}


def test_a_timestamp_without_more_is_what_the_session_says() -> None:
    assert ddl.parse("timestamp", "x", timestamp="timestamp_ntz") == "timestamp_ntz"
    assert ddl.parse("timestamp_ltz", "x", timestamp="timestamp_ntz") == "timestamp"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n bigin", r"at 'bigin' \(character 3\): 'bigin' is not a type that Spark has"),
        ("n", "at its end: expected a type"),
        ("n int,", "at its end: expected the name of a column"),
        ("n int m long", r"at 'm long' \(character 7\): expected ',' or the end"),
        ("a struct<b: int, c: map<string>>", r"at '>>' \(character 31\): expected ','"),
        ("n decimal(39, 1)", r"at '39, 1\)' .*: expected at most 38"),
        ("n decimal(3, 4)", r"at '4\)' .*: expected at most 3"),
        ("größe int", "the name 'größe' needs backquotes"),
        ("a-b int", "'-' has no meaning here; names with it need backquotes"),
        ("n int comment", "at its end: expected a text in quotes"),
        ("n string collate unicode", "COLLATE is left to Spark's own parser"),
        ("n int /* and", "the comment has no end"),
        ("n timestamp(3)", "a timestamp has 6 digits"),
        ("n interval day to year", "expected a smaller unit than day"),
    ],
)
def test_an_error_names_the_place(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=f"^state: .*cannot be read .*{message}"):
        ddl.parse(text, "state")


def test_types_without_rows_in_arrow_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"^out, column a, column b: type interval has no"):
        arrow_schema(ddl.columns("a struct<b: interval>", "out"), "out")
