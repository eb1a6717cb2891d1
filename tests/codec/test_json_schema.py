"""JSON Schema against `jsonschema`, an independent validator, and JSON in Confluent's frame."""

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.codec.formats import MODES
from tallystick.codec.json.read import FramedJsonReader, JsonReader
from tallystick.codec.json.schema import JsonSchemaWriter, columns_of, parse_shape
from tallystick.errors import OptionError, RecordError
from tests.examples import drawn
from tests.json_validator import Draft202012Validator

FRAME = b"\0\0\0\0\7"
UTC_MICROS = pa.timestamp("us", tz="UTC")


def shape_columns(**properties: Any) -> pa.Schema:
    return columns_of(parse_shape(json.dumps({"type": "object", "properties": properties})))


def test_properties_become_columns_in_their_order():
    columns_read = columns_of(
        parse_shape(
            json.dumps(
                {
                    "$schema": "http://json-schema.org/draft-07/schema#",
                    "title": "Order",
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["id"],
                    "definitions": {
                        "line/1": {"type": "object", "properties": {"n": {"type": "number"}}}
                    },
                    "properties": {
                        "id": {"type": "integer", "minimum": 1},
                        "name": {"oneOf": [{"type": "null"}, {"type": "string"}]},
                        "day": {"type": "string", "format": "date"},
                        "at": {"type": ["string", "null"], "format": "date-time"},
                        "kind": {"type": "string", "enum": ["a", "b"], "format": "uuid"},
                        "lines": {"type": "array", "items": {"$ref": "#/definitions/line~11"}},
                        "ok": {"anyOf": [{"type": "boolean"}]},
                    },
                }
            )
        )
    )

    assert columns_read == pa.schema(
        [
            ("id", pa.int64()),
            ("name", pa.string()),
            ("day", pa.date32()),
            ("at", UTC_MICROS),
            ("kind", pa.string()),
            ("lines", pa.list_(pa.struct([("n", pa.float64())]))),
            ("ok", pa.bool_()),
        ]
    )


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({}, "it is of type any or null"),
        ({"enum": ["a"]}, "of type any or null"),
        (False, "it allows no value"),
        ({"type": "null"}, "of type null"),
        ({"type": ["string", "integer"]}, "its type allows string and integer"),
        ({"oneOf": [{"type": "string"}, {"type": "object"}]}, "its oneOf allows string and object"),
        ({"allOf": [{"type": "string"}]}, "it says allOf"),
        ({"$ref": "other.json"}, "it refers to another schema, 'other.json'"),
        ({"$ref": "#"}, "'a.a' of the JSON Schema cannot be a column.*it holds itself"),
        ({"type": "object"}, "an object without properties"),
        ({"type": "array"}, r"property 'a\[\]'.*of type any"),
        ({"type": "array", "items": [{"type": "string"}]}, "its items are a tuple"),
        ({"type": "text"}, "its type is 'text'"),
    ],
)
def test_what_cannot_be_a_column_is_refused_with_the_reason(part, message):
    with pytest.raises(OptionError, match=message):
        shape_columns(a=part)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON text"),
        ("[1]", "no valid JSON Schema"),
        ('{"$ref": "#/gone"}', "refers to what it does not have, '#/gone'"),
        ('{"properties": 1, "type": "object"}', "no valid JSON Schema"),
        ('{"not":' * 5000, "no JSON text|nested too deep"),
        ('{"type": "string"}', "describes of type string|describes"),
    ],
)
def test_a_text_that_is_no_schema_of_an_object_is_refused(text, message):
    with pytest.raises(OptionError, match=message):
        columns_of(parse_shape(text))


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "oneOf", "$ref", "required", "a", "not"]
            ),
            inner | st.sampled_from(["object", "array", "string", "#", "#/a", "#/properties/a"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(JSONS)
def test_any_json_is_a_schema_or_refused(schema):
    try:
        columns = columns_of(parse_shape(json.dumps(schema)))
    except OptionError:
        return
    assert columns.names == list(schema["properties"])


Kind = tuple[Any, pa.DataType, st.SearchStrategy[Any]]
SCALARS: list[Kind] = [
    ({"type": "integer"}, pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    ({"type": "integer"}, pa.uint8(), st.integers(0, 255)),
    ({"type": "number"}, pa.int32(), st.integers(-5, 5)),
    ({"type": "number"}, pa.float64(), st.floats()),
    ({"type": "number"}, pa.float32(), st.floats(width=32)),
    ({"type": "number"}, pa.decimal128(9, 2), st.decimals(-9, 9, places=2)),
    ({"type": "string"}, pa.string(), st.text(st.characters(exclude_categories=["Cs"]))),
    ({"type": "string"}, pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "b"])),
    ({"type": "string"}, pa.date32(), st.dates()),
    ({"type": "string"}, pa.binary(), st.binary()),
    ({"type": "boolean"}, pa.bool_(), st.booleans()),
    (True, pa.int64(), st.integers(0, 9)),
]


def nested(inner: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
    def nullable(kind: Kind) -> Kind:
        return {"oneOf": [{"type": "null"}, kind[0]]}, kind[1], st.none() | kind[2]

    def listed(kind: Kind) -> Kind:
        items = st.lists(st.none() | kind[2], max_size=3)
        return {"type": "array", "items": kind[0]}, pa.list_(kind[1]), items

    def mapped(kind: Kind) -> Kind:
        schema = {"type": "object", "additionalProperties": kind[0]}
        values = st.dictionaries(st.text("ab", max_size=2), st.none() | kind[2], max_size=3)
        return schema, pa.map_(pa.string(), kind[1]), values

    def structured(kind: Kind) -> Kind:
        schema = {"type": "object", "properties": {"p": kind[0]}, "required": ["p"]}
        fields = st.fixed_dictionaries({"p": st.none() | kind[2]})
        return schema, pa.struct([("p", kind[1])]), fields

    return inner.map(nullable) | inner.map(listed) | inner.map(mapped) | inner.map(structured)


@drawn(200)
@given(st.recursive(st.sampled_from(SCALARS), nested, max_leaves=3), st.data())
def test_what_is_written_is_valid_and_what_would_not_be_is_an_error(kind, data):
    """`jsonschema` agrees: where it would find a fault, nothing is written."""
    schema, arrow, values = kind
    text = json.dumps({"type": "object", "properties": {"a": schema}})
    rows = data.draw(st.lists(st.none() | values, min_size=1, max_size=4))
    columns = pa.RecordBatch.from_pydict({"a": pa.array(rows, arrow)})
    columns = columns.slice(data.draw(st.integers(0, len(rows) - 1)))
    plain = JsonSchemaWriter(7, '{"type": "object"}').write(columns).to_pylist()
    validator = Draft202012Validator(json.loads(text))
    is_valid = all(validator.is_valid(json.loads(value[5:])) for value in plain)

    try:
        written = JsonSchemaWriter(7, text).write(columns).to_pylist()
    except RecordError:
        assert not is_valid
        return
    assert is_valid
    assert written == plain
    assert all(value.startswith(FRAME + b'{"a":') for value in written)


@pytest.mark.parametrize(
    ("schema", "columns", "message"),
    [
        ({"a": {"type": "string"}}, {"a": pa.int64()}, "column 'a' is of type int64.*as string"),
        ({"a": {"type": "integer"}}, {"a": pa.float64()}, "as integer"),
        ({"a": {"type": "integer"}}, {"a": pa.null()}, "as integer"),
        ({"a": {"allOf": []}}, {"a": pa.int64()}, r"as unfit \(it says allOf\)"),
        (
            {"a": {"type": "array", "items": {"type": "string"}}},
            {"a": pa.list_(pa.int8())},
            "a\\[\\]",
        ),
        (
            {"a": {"type": "object", "required": ["b"]}},
            {"a": pa.struct([])},
            "have no columns|no column 'a.b'",
        ),
        ({}, {"b": pa.int64()}, "has no such property, only \\[\\], and allows no others"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_there_are_rows(schema, columns, message):
    text = json.dumps({"type": "object", "properties": schema, "additionalProperties": False})

    with pytest.raises(OptionError, match=message):
        JsonSchemaWriter(7, text).check(pa.schema(list(columns.items())))


def test_a_property_that_is_required_needs_a_column_and_others_may_be_there():
    text = '{"type": "object", "properties": {}, "required": ["a"]}'

    with pytest.raises(OptionError, match="no column 'a'"):
        JsonSchemaWriter(7, text).check(pa.schema([("b", pa.int64())]))
    JsonSchemaWriter(7, text).check(pa.schema([("a", pa.int64()), ("b", pa.int64())]))
    with pytest.raises(OptionError, match="rows need an object"):
        JsonSchemaWriter(7, '{"type": "string"}').check(pa.schema([("b", pa.int64())]))


READER = FramedJsonReader(JsonReader(pa.schema([("n", pa.int64()), ("d", pa.decimal128(9, 2))])))


def where(row: int) -> str:
    return f"row {row}"


def test_a_frame_is_taken_off_and_ids_may_differ():
    values = [FRAME + b'{"n": 1, "d": 1.25}', b"\0\xff\xff\xff\xff{}", None]

    parsed = READER.parse(pa.array(values, pa.binary()), "failfast", where)

    assert parsed.columns.to_pylist() == [
        {"n": 1, "d": Decimal("1.25")},
        {"n": None, "d": None},
        {"n": None, "d": None},
    ]


TAIL = st.sampled_from([b'{"n": 1}', b"{}", b"", b"no", b'{"n": "x"}'])
VALUE = st.none() | st.binary(max_size=12) | TAIL | TAIL.map(lambda tail: FRAME + tail)


@settings(deadline=None)
@given(st.lists(VALUE, max_size=8), st.sampled_from(MODES), st.integers(0, 2))
def test_any_bytes_are_read_or_malformed_in_every_mode(values, mode, start):
    """What is good is what the reader of plain JSON says of the bytes behind the frame."""
    column, values = pa.array(values, pa.binary())[start:], values[start:]

    def alone(value: bytes | None) -> list[dict[str, Any]]:
        if value is not None and (len(value) < 5 or value[0] != 0):
            return []
        text = None if value is None else value[5:]
        parsed = READER.json.parse(pa.array([text], pa.binary()), "dropmalformed", where)
        return parsed.columns.to_pylist()

    good = [alone(value) for value in values]
    bad = [row for row, is_good in enumerate(good) if not is_good]
    if mode == "failfast" and bad:
        with pytest.raises(RecordError, match=rf"^row {bad[0]}: .*wire format"):
            READER.parse(column, mode, where)
        return
    parsed = READER.parse(column, mode, where)

    assert list(parsed.reasons) == bad
    empty = [{"n": None, "d": None}] if mode == "permissive" else []
    assert parsed.columns.to_pylist() == [row for rows in good for row in rows or empty]
    if parsed.rows is not None:
        assert parsed.rows.tolist() == [row for row in range(len(values)) if row not in bad]


NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
OLD, NEW = "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"


@pytest.mark.parametrize(
    ("reference", "more"),
    [
        ("#/definitions/a%25b", {"definitions": {"a%b": NUMBER, "a%25b": TEXT}}),
        ("#/definitions/a%22b", {"definitions": {'a"b': NUMBER}}),
        ("#/$defs/%C3%BC", {"$defs": {"ü": NUMBER}}),
        ("#/$defs/a~1b~0c%7E1", {"$defs": {"a/b~c/": NUMBER}}),
        ("#/$defs/~01", {"$defs": {"~1": NUMBER, "/": TEXT}}),
        ("#/$defs//$defs/", {"$defs": {"": {"$defs": {"": NUMBER}}}}),
        ("#/$defs/a/anyOf/1", {"$defs": {"a": {"anyOf": [TEXT, NUMBER]}}}),
        ("#/unknown/0/more", {"unknown": [{"more": NUMBER}]}),
        ("#foo", {"$defs": {"A": {"$anchor": "foo", **NUMBER}}}),
        ("#foo", {"$schema": OLD, "definitions": {"A": {"$id": "#foo", **NUMBER}}}),
        ("#foo", {"$schema": DRAFT_4, "definitions": {"A": {"id": "#foo", **NUMBER}}}),
        (
            "http://x/b.json",
            {"$id": "http://x/a.json", "$defs": {"b": {"$id": "b.json", **NUMBER}}},
        ),
        (
            "b.json",
            {"$id": "http://x/a.json", "$defs": {"b": {"$id": "http://x/b.json", **NUMBER}}},
        ),
        ("a.json#/$defs/b", {"$id": "http://x/a.json", "$defs": {"b": NUMBER}}),
        (
            "/dir/b#c",
            {"$id": "http://x/a", "$defs": {"b": {"$id": "dir/b", "$anchor": "c", **NUMBER}}},
        ),
        ("urn:x:1#/$defs/b", {"$id": "urn:x:1", "$defs": {"b": NUMBER}}),
        ("urn:x:1#b", {"$id": "urn:x:1", "$defs": {"b": {"$anchor": "b", **NUMBER}}}),
        (
            "#/$defs/b",
            {
                "$defs": {
                    "b": {"$id": "http://x/", "$ref": "#/$defs/c", "$defs": {"c": NUMBER}},
                    "c": TEXT,
                }
            },
        ),
        (
            "#/$defs/c",
            {
                "$schema": OLD,
                "$defs": {"c": {"$id": "http://x/", "$ref": "#/$defs/d"}, "d": NUMBER},
            },
        ),
        (
            "#/$defs/b",
            {"$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/d"}, "d": NUMBER}},
        ),
        (
            "#a",
            {"$defs": {"x": {"enum": [{"$anchor": "a", **TEXT}]}, "y": {"$anchor": "a", **NUMBER}}},
        ),
    ],
)
def test_references_are_followed(reference, more):
    schema = {"type": "object", "properties": {"n": {"$ref": reference}}, **more}
    assert columns_of(parse_shape(json.dumps(schema))) == pa.schema([("n", pa.int64())])
    if "$schema" not in more:
        judge = Draft202012Validator(schema)
        assert judge.is_valid({"n": 1})
        assert not judge.is_valid({"n": "a"})


MANY = {
    f"d{number}": {
        "type": "object",
        "properties": {name: {"$ref": f"#/$defs/d{number + 1}"} for name in "ab"},
    }
    for number in range(40)
}
CHAIN = {f"c{number}": {"$ref": f"#/$defs/c{number + 1}"} for number in range(5000)}


@pytest.mark.parametrize(
    "part",
    [
        {"$ref": "#/gone"},
        {"$ref": "#gone"},
        {"$ref": "#/properties/id/type/x"},
        {"$ref": "#/required/01"},
        {"$ref": "#/required/7"},
        {"$ref": "#/required/-"},
        {"$ref": "other.json#/a"},
        {"$ref": "http://[x"},
        {"$ref": 1},
        {"$ref": "#/properties/other"},
        {"type": "array", "items": {"$ref": "#"}},
        {"$ref": "#/$defs/d0"},
        {"$ref": "#/$defs/c0"},
        {"$dynamicRef": "#x"},
        {"$recursiveRef": "#"},
    ],
    ids=str,
)
def test_a_reference_that_leads_nowhere_concerns_its_own_property_alone(part):
    schema = {
        **{"type": "object", "required": ["id"], "$defs": {**MANY, **CHAIN}},
        "properties": {"id": NUMBER, "other": part, "z": {"$ref": "#/properties/id"}},
    }
    text = json.dumps(schema)
    writer = JsonSchemaWriter(7, text)
    writer.check(pa.schema([("id", pa.int64()), ("z", pa.int64())]))
    with pytest.raises(OptionError, match="property 'other"):
        columns_of(parse_shape(text))
