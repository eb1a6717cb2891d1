"""The reason why a record does not fit its schema names the field, and what to declare."""

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
