"""Unions at the top of a schema: records of several types, null beside one; against fastavro."""

import io
import json
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.codec.avro.reader import AvroReader
from tallystick.codec.avro.writer import AvroWriter
from tallystick.codec.values import ParsedValues
from tallystick.errors import OptionError, RecordError
from tests.codec.test_avro_reader import (
    FIELDS,
    Leaf,
    Schemas,
    distinct_names,
    framed,
    record,
    schemas,
    where,
)
from tests.examples import drawn

ORDER = record(("id", "long"), ("amount", "double"), name="shop.Order")
PAYMENT = record(("id", "int"), ("payer", ["null", "string"]), name="shop.Payment")
BEAT = record(("at", "long"), name="shop.Beat")
NAMED_TEXT = {"type": "enum", "name": "shop.Mood", "symbols": ["GOOD"]}
UNION = ["null", ORDER, PAYMENT, BEAT, "string", NAMED_TEXT]
NULL, ORDERS, PAYMENTS, BEATS, STRINGS, MOODS, NO_BRANCH = (bytes([2 * n]) for n in range(7))
COLUMNS = pa.schema(
    [("payer", pa.string()), ("id", pa.int64()), ("amount", pa.float64()), ("kind", pa.string())]
)
MODES = ["failfast", "permissive", "dropmalformed", "deadletter"]


def written(schema: Any, value: Any) -> bytes:
    """A value of a union by fastavro; a record with the name of its type."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return framed(out.getvalue())


def parse(
    values: list[bytes | None],
    columns: pa.Schema,
    source: Schemas,
    mode: str = "failfast",
    *,
    has_name: bool = True,
) -> ParsedValues:
    parsed = AvroReader(columns, source, has_name).parse(pa.array(values, pa.binary()), mode, where)
    parsed.columns.validate(full=True)
    assert parsed.columns.schema == columns
    return parsed


def row(**known: Any) -> dict[str, Any]:
    return {**dict.fromkeys(COLUMNS.names), **known}


GOOD = written(UNION, ("shop.Order", {"id": 7, "amount": 2.5}))
PAID = written(UNION, ("shop.Payment", {"id": 3, "payer": "ann"}))
GOOD_ROW = row(id=7, amount=2.5, kind="shop.Order")


@pytest.mark.parametrize("branches", [["null", PAYMENT], [PAYMENT, "null"], [PAYMENT]], ids=str)
def test_a_null_beside_a_record_is_a_row_of_nulls_as_a_tombstone_is(branches: list[Any]) -> None:
    names = ["p", None, "q"] if len(branches) > 1 else ["p", "q"]
    values = [
        written(branches, name and ("shop.Payment", {"id": n, "payer": name}))
        for n, name in enumerate(names)
    ]
    columns = pa.schema([("id", pa.int32()), ("payer", pa.string())])
    parsed = parse([*values, None], columns, schemas(_1=branches), has_name=False)
    assert not parsed.reasons
    assert parsed.columns.to_pylist() == [
        {"id": n if name else None, "payer": name} for n, name in enumerate([*names, None])
    ]


def test_columns_are_the_fields_of_all_records_and_one_says_the_record() -> None:
    values = [
        GOOD,
        PAID,
        None,
        written(UNION, None),
        written(UNION, ("shop.Beat", {"at": 5})),
        written(UNION, ("shop.Payment", {"id": 4, "payer": None})),
    ]
    parsed = parse(values, COLUMNS, schemas(_1=UNION))
    assert parsed.columns.to_pylist() == [
        GOOD_ROW,
        row(id=3, payer="ann", kind="shop.Payment"),
        row(),
        row(),
        row(kind="shop.Beat"),
        row(id=4, kind="shop.Payment"),
    ]


def test_records_with_schemas_of_their_own_say_their_names_too() -> None:
    """Confluent's other way to several types of events in a topic: a subject for each record."""
    values = [GOOD, written(PAYMENT, {"id": 3, "payer": "ann"})[5:], framed(b"\x02", 2)]
    values[1] = framed(values[1], 2)
    parsed = parse(values, COLUMNS, schemas(_1=UNION, _2=PAYMENT), "permissive")
    assert parsed.columns.to_pylist() == [
        GOOD_ROW,
        row(id=3, payer="ann", kind="shop.Payment"),
        row(),
    ]
    assert "field 'payer' of schema 2" in parsed.reasons[2]


MALFORMED = [
    (b"", "the union of schema 1: the value ends inside"),
    (b"\x80", "the union of schema 1: the value ends inside"),
    (NO_BRANCH, "the union of schema 1: .*no branch of index 6"),
    (b"\x01", "the union of schema 1: .*no branch of index -1"),
    (b"\xff" * 9 + b"\x01", "no branch of index -9223372036854775808"),
    (b"\xff" * 9 + b"\x02", "the union of schema 1: .*64 bits"),
    (NULL + b"\x00", "1 bytes are left over after the null of schema 1"),
    (ORDERS, "field 'id' of shop.Order in schema 1: the value ends"),
    (PAYMENTS + b"\x02\x04", "field 'payer' of shop.Payment in schema 1: .*branch of index 2"),
    (PAYMENTS + b"\x02\x00\x00", "1 bytes are left over after the last field of shop.Payment in"),
    (STRINGS + b"\x02a", "by schema 1 it is of type string, and only records become columns"),
    (MOODS + b"\x00", "it is of type enum shop.Mood, and only records"),
]


@pytest.mark.parametrize(("body", "reason"), MALFORMED)
@pytest.mark.parametrize("mode", MODES)
def test_a_malformed_value_of_a_union_is_treated_by_the_mode(
    body: bytes, reason: str, mode: str
) -> None:
    values, source = [GOOD, framed(body), GOOD], schemas(_1=UNION)
    if mode == "failfast":
        with pytest.raises(RecordError, match=f"(?s)offset 1001: .*{reason}"):
            parse(values, COLUMNS, source)
        return
    parsed = parse(values, COLUMNS, source, mode)
    kept = [row()] if mode == "permissive" else []
    assert parsed.columns.to_pylist() == [GOOD_ROW, *kept, GOOD_ROW]
    with pytest.raises(RecordError, match=f"(?s){reason}"):
        raise RecordError(parsed.reasons[1])


def test_a_record_without_any_of_the_columns_is_malformed_unless_its_name_is_a_column() -> None:
    columns = pa.schema([("payer", pa.string()), ("amount", pa.float64())])
    beat = written(UNION, ("shop.Beat", {"at": 5}))
    parsed = parse([GOOD, beat], columns, schemas(_1=UNION), "deadletter", has_name=False)
    assert parsed.columns.to_pylist() == [{"payer": None, "amount": 2.5}]
    (reason,) = parsed.reasons.values()
    assert "it is a record shop.Beat, which has none of the fields" in reason
    assert "['at']" in reason
    assert "name_column=" in reason
    parsed = parse([beat], COLUMNS, schemas(_1=UNION))
    assert parsed.columns.to_pylist() == [row(kind="shop.Beat")]


CLASH = [
    record(("id", "long"), ("amount", "double"), name="shop.Order"),
    record(("id", "int"), ("amount", "string"), name="shop.Refund"),
]
CLASHING = [("shop.Order", {"id": 1, "amount": 2.5}), ("shop.Refund", {"id": 2, "amount": "3"})]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [pa.float64(), pa.string(), pa.bool_()], ids=str)
def test_one_field_of_two_types_is_an_error_that_names_both_and_the_remedy(
    mode: str, kind: pa.DataType
) -> None:
    columns = pa.schema([("id", pa.int64()), ("amount", kind)])
    with pytest.raises(RecordError) as caught:
        parse([written(CLASH, CLASHING[0])], columns, schemas(_1=CLASH), mode, has_name=False)
    message = str(caught.value)
    assert "field 'amount' was asked for as" in message
    assert "double in shop.Order, string in shop.Refund" in message
    assert "`Order` struct<`amount`: ...>, `Refund` struct<`amount`: ...>" in message


def test_a_struct_with_the_name_of_a_record_is_that_record() -> None:
    order = pa.struct([("id", pa.int64()), ("amount", pa.float64()), ("gone", pa.string())])
    columns = pa.schema(
        [
            ("Order", order),
            ("id", pa.int64()),
            ("shop.Refund", pa.struct([("amount", pa.string())])),
            ("kind", pa.string()),
        ]
    )
    values = [written(CLASH, value) for value in CLASHING]
    parsed = parse([*values, values[0][:-1]], columns, schemas(_1=CLASH), "permissive")
    nothing = dict.fromkeys(columns.names)
    assert parsed.columns.to_pylist() == [
        {
            **nothing,
            "Order": {"id": 1, "amount": 2.5, "gone": None},
            "id": 1,
            "kind": "shop.Order",
        },
        {**nothing, "id": 2, "shop.Refund": {"amount": "3"}, "kind": "shop.Refund"},
        nothing,
    ]
    twice = pa.schema([("Order", pa.struct([("id", pa.int64())])), ("id", pa.float64())])
    with pytest.raises(RecordError, match=r"'id' of the record shop.Order is asked for as int64"):
        parse(values, twice, schemas(_1=CLASH), has_name=False)


def test_a_field_of_another_wrong_type_keeps_its_own_message() -> None:
    columns = pa.schema([("id", pa.int64()), ("payer", pa.int32())])
    with pytest.raises(RecordError, match=r"field 'payer' was written as string.*as int32"):
        parse([GOOD], columns, schemas(_1=UNION), has_name=False)


def test_a_union_without_a_record_has_no_columns() -> None:
    with pytest.raises(RecordError, match=r"union \[null, string\], .* need a record"):
        parse([framed(b"\0")], COLUMNS, schemas(_1=["null", "string"]), "permissive")


def test_the_column_of_names_has_a_name_of_its_own() -> None:
    columns = pa.schema([("id", pa.int64()), ("id", pa.string())])
    with pytest.raises(OptionError, match=r"name_column='id'.*choose another"):
        AvroReader(columns, schemas(), has_name=True)


def test_a_union_may_consist_of_schemas_that_it_refers_to() -> None:
    texts = (json.dumps(ORDER), json.dumps(PAYMENT), '["null", "shop.Order", "shop.Payment"]')
    parsed = parse([GOOD], COLUMNS, Schemas(((1, texts),)))
    assert parsed.columns.to_pylist() == [GOOD_ROW]


# ---- random unions, against fastavro ----


@st.composite
def branches(draw: st.DrawFn) -> list[tuple[str, list[tuple[str, Leaf]]]]:
    """Records with their fields; names of fields are shared, their types by name are the same."""
    pool = {f"f{n}": draw(st.sampled_from(FIELDS)) for n in range(5)}
    taken = st.lists(st.sampled_from(sorted(pool)), min_size=1, unique=True)
    return [
        (f"space{n % 2}.R{n}", [(name, pool[name]) for name in draw(taken)])
        for n in range(draw(st.integers(1, 4)))
    ]


@given(branches(), st.data())
@drawn(80)
def test_values_of_random_unions_are_what_fastavro_reads(
    records: list[tuple[str, list[tuple[str, Leaf]]]], data: st.DataObject
) -> None:
    kinds: list[Any] = [
        record(
            *((field, distinct_names(leaf[0], f"{n}{field}")) for field, leaf in fields), name=name
        )
        for n, (name, fields) in enumerate(records)
    ]
    union = data.draw(st.permutations([*kinds, "null"]), label="union")
    values = st.none() | st.one_of(
        st.tuples(
            st.just(name), st.fixed_dictionaries({field: leaf[2] for field, leaf in fields})
        )
        for name, fields in records
    )  # fmt: skip
    written_values = [written(union, v) for v in data.draw(st.lists(values, max_size=8))]
    arrow = {field: leaf[1] for _, fields in records for field, leaf in fields}
    wanted = data.draw(st.lists(st.sampled_from(sorted(arrow)), min_size=1, unique=True))
    columns = pa.schema([*((name, arrow[name]) for name in wanted), ("kind", pa.string())])
    schema = fastavro.parse_schema(union)

    parsed = parse(written_values, columns, schemas(_1=union))

    expected = []
    for value in written_values:
        decoded = fastavro.schemaless_reader(
            io.BytesIO(value[5:]), schema, None, return_record_name=True
        )
        # fastavro names the record only where the union has several.
        name, fields = decoded if isinstance(decoded, tuple) else (records[0][0], decoded or {})
        of_row = {column: fields.get(column) for column in wanted}
        expected.append({**of_row, "kind": None if decoded is None else name})
    assert parsed.columns.to_pylist() == expected


# ---- damage ----


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good value with some bytes after the schema id changed, cut out or put in."""
    value = bytearray(draw(st.sampled_from([GOOD, PAID])))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(5, len(value)))
        length = draw(st.integers(0, 3))
        odd = st.sampled_from([0, 1, 2, 4, 6, 8, 12, 0x7F, 0x80, 0xFF]) | st.integers(0, 255)
        value[at : at + length] = bytes(draw(st.lists(odd, max_size=10)))
    return bytes(value)


@given(st.lists(damaged(), min_size=1, max_size=6))
@drawn(150)
def test_damage_is_malformed_or_what_fastavro_reads_and_never_reaches_a_neighbour(
    values: list[bytes],
) -> None:
    between: list[bytes | None] = [GOOD]
    for value in values:
        between += [value, GOOD]
    schema = fastavro.parse_schema(UNION)

    parsed = parse(between, COLUMNS, schemas(_1=UNION), "permissive")

    rows = parsed.columns.to_pylist()
    assert [rows[n] for n in range(0, len(rows), 2)] == [GOOD_ROW] * (len(values) + 1)
    for place, value in enumerate(values):
        if 2 * place + 1 in parsed.reasons:
            assert rows[2 * place + 1] == row()
            continue
        data = io.BytesIO(value[5:])
        decoded = fastavro.schemaless_reader(data, schema, None, return_record_name=True)
        assert not data.read()
        name, fields = decoded or (None, {})
        again = row(kind=name, **{f: v for f, v in fields.items() if f in COLUMNS.names})
        assert repr(rows[2 * place + 1]) == repr(again)  # NaN is not itself


@pytest.mark.parametrize("size", range(5, len(GOOD)))
def test_a_value_cut_anywhere_is_malformed(size: int) -> None:
    parsed = parse([GOOD[:size], GOOD], COLUMNS, schemas(_1=UNION), "permissive")
    assert list(parsed.reasons) == [0]


# ---- writing ----


@pytest.mark.parametrize("branches", [["null", ORDER], [ORDER, "null"], [ORDER], ORDER], ids=str)
def test_rows_are_written_as_the_only_record_of_a_union(branches: Any) -> None:
    rows = [{"id": n, "amount": n / 2} for n in range(3)]
    batch = pa.RecordBatch.from_pylist(rows)
    values = AvroWriter(1, (json.dumps(branches),)).write(batch).to_pylist()
    schema = fastavro.parse_schema(branches)
    assert [fastavro.schemaless_reader(io.BytesIO(v[5:]), schema, None) for v in values] == rows


@pytest.mark.parametrize(
    ("union", "what"),
    [
        ([ORDER, PAYMENT], "record shop.Order, record shop.Payment.*no column says which"),
        (["null", "string", ORDER], "rows need a record, or a union of null and one"),
        (["null"], "rows need a record"),
    ],
)
def test_a_union_that_leaves_open_what_a_row_is_cannot_be_written(
    union: list[Any], what: str
) -> None:
    with pytest.raises(OptionError, match=what):
        AvroWriter(1, (json.dumps(union),)).check(pa.schema([("id", pa.int64())]))
