"""The reason why a record does not fit its schema names the field, and what to declare."""

import re

import pyarrow as pa
import pytest

from tallystick.codec.json.read import parse_json
from tallystick.errors import RecordError
from tallystick.state.schema import schema_of


@pytest.mark.parametrize(
    ("ddl", "record", "reason"),
    [
        (
            "at timestamp",
            '{"at": 1795000000000}',
            "at: declared timestamp, found the number 1795",
        ),
        ("at timestamp", '{"at": "noon"}', 'at: declared timestamp, found the text "noon"'),
        ("dest int", '{"dest": "JFK"}', 'found the text "JFK": declare it string'),
        ("n bigint", '{"n": 1.5}', "n: declared bigint, found the number 1.5: declare it double"),
        ("n tinyint", '{"n": 1000}', "declare it bigint"),
        ("a struct<b: int>", '{"a": {"b": true}}', "a.b: declared int, found the boolean true"),
        ("a array<int>", '{"a": [1, "x"]}', "a[1]: declared int"),
        ("n int", '{"n": 1]}', "Missing a comma"),
        ("t timestamp", '{"t": ""}', 't: declared timestamp, found the text "": declare it string'),
        ("t timestamp_ntz", '{"t": ""}', 'found the text "": declare it string'),
        ("y date", '{"y": ""}', 'y: declared date, found the text "": declare it string'),
        ("a array<date>", '{"a": [""]}', 'a[0]: declared date, found the text "": declare it'),
        ("x decimal(10,2)", '{"x": ""}', 'x: declared decimal(10, 2), found the text "": declare'),
        ("x decimal(10,2)", '{"x": " 12"}', 'found the text " 12": declare it string'),
        ("x decimal(10,2)", '{"x": 12.345}', "found the number 12.345: declare it decimal(11, 3)"),
        ("x decimal(10,2)", '{"x": "12.345"}', 'the text "12.345": declare it decimal(11, 3)'),
        ("x decimal(10,2)", '{"x": 1e-3}', "found the number 0.001: declare it decimal(11, 3)"),
        ("x decimal(10,2)", '{"x": 123456789.00}', "declare it decimal(11, 2)"),
        ("x decimal(10,2)", '{"x": 1e9}', "declare it decimal(12, 2)"),
        ("x decimal(10,2)", '{"x": 1000000000}', "declare it decimal(12, 2)"),
        ("x decimal(38,2)", '{"x": 1.2345}', "declare it string"),
        ("x decimal(10,2)", '{"x": NaN}', "declare it double"),
        ("x decimal(10,2)", '{"x": "1_0"}', 'found the text "1_0": declare it string'),
        (
            "a array<decimal(38,4)>",
            '{"a": [1234567890123456789012345678901234.5678, 12.345678]}',
            "a[1]: declared decimal(38, 4), found the number 12.345678: declare it string",
        ),
    ],
)
def test_the_field_is_named_with_the_type_to_declare(ddl, record, reason):
    values = pa.array([record.encode()], pa.binary())
    with pytest.raises(RecordError) as refused:
        parse_json(values, schema_of(ddl, "x"), "failfast", lambda row: "flights-0 offset 3")
    assert reason in str(refused.value)
    assert "1795" not in refused.value.without_values

    parsed = parse_json(values, schema_of(ddl, "x"), "permissive", lambda row: "")
    assert reason in parsed.reasons[0]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b' [{"n": 1}, {"n": 2}]', "it is an array, and a value is one row. Write each item as"),
        (b"[]", "it is an array"),
        (b"5", "it is a text, number, boolean or null.*with ts.Text()"),
        (b'"text"', "it is a text"),
        (b"null", "it is a text, number, boolean or null"),
        (b'\0\0\0\0\1{"n": 1}', "begins with byte 0.*ts.JsonSchema"),
        (b"no document", "it is not one JSON object, from { to }$"),
        (b'{"n": 1}, 2', "it is not one JSON object, from { to }$"),
    ],
)
@pytest.mark.parametrize("ddl", ["n bigint", "n bigint, m array<struct<x: int>>"])
def test_a_document_that_is_no_object_says_what_it_is_and_what_to_do(ddl, record, reason):
    values = pa.array([b'{"n": 1}', record], pa.binary())
    parsed = parse_json(values, schema_of(ddl, "x"), "permissive", lambda row: "")
    assert re.search(reason.replace("()", r"\(\)"), parsed.reasons[1])
    with pytest.raises(RecordError, match=r"offset 1.*it is not one JSON object"):
        parse_json(values, schema_of(ddl, "x"), "failfast", lambda row: f"offset {row}")
