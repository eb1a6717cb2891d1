"""Columns as the bytes of rows: read back as they were."""

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.errors import ManifestError, OptionError
from tallystick.state.row_codec import ColumnsCodec, changed_rows
from tests.examples import drawn
from tests.state.damage import damaged

LONG = st.integers(-(1 << 63), (1 << 63) - 1)
PLAIN: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), LONG),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.decimal128(38, 0), st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal)),
    (pa.string(), st.text(max_size=5)),
    (pa.binary(), st.binary(max_size=5)),
]
KINDS = [
    *PLAIN,
    *((pa.list_(kind), st.lists(values | st.none(), max_size=3)) for kind, values in PLAIN),
]


@settings(deadline=None)
@given(st.data())
def test_columns_are_read_back_as_they_were(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=10))
    row = st.tuples(*(values | st.none() for _, values in kinds))
    rows = data.draw(st.lists(row, max_size=6))
    schema = pa.schema([(str(at), kind) for at, (kind, _) in enumerate(kinds)])
    arrays = [pa.array([r[at] for r in rows], f.type) for at, f in enumerate(schema)]
    columns = pa.RecordBatch.from_arrays(arrays, schema=schema)
    codec = ColumnsCodec(schema)

    values = codec.encode(columns)

    decoded = codec.decode(values)
    decoded.validate(full=True)
    assert decoded.schema == schema
    assert decoded.to_pylist() == columns.to_pylist()
    assert values.is_null().to_pylist() == [all(value is None for value in r) for r in rows]
    assert codec.encode(columns.slice(1)).to_pylist() == values.to_pylist()[1:]
    assert codec.decode(values.slice(1)).to_pylist() == columns.to_pylist()[1:]
    assert codec.encode(decoded).to_pylist() == values.to_pylist(), "the same row is the same bytes"


def test_the_layout_is_frozen() -> None:
    """Checkpoints hold these bytes."""
    columns = pa.record_batch(
        {
            "n": pa.array([258, None]),
            "s": ["ab", "c"],
            "flags": pa.array([[True, None], None], pa.list_(pa.bool_())),
            "tags": [["x", None, ""], []],
        }
    )

    first, second = ColumnsCodec(columns.schema).encode(columns).to_pylist()

    assert first.hex(" ") == (
        "00 02 01 00 00 00 00 00 00 02 00 00 00 04 00 00 00 0d 00 00 00 "
        "61 62 01 01 00 00 01 00 00 00 78 ff ff ff ff 00 00 00 00"
    )
    assert second.hex(" ") == ("05 00 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 00 00 00 00 63")


def test_what_stands_under_a_null_is_no_part_of_the_bytes() -> None:
    """Else a state that did not change would be written again."""
    buffers = [pa.py_buffer(b"\x01"), pa.py_buffer(b"\x01" + bytes(7) + b"\x63" + bytes(7))]
    dirty = pa.Array.from_buffers(pa.int64(), 2, buffers, 1)
    columns = pa.record_batch({"a": [1, 1], "n": dirty})
    clean = pa.record_batch({"a": [1, 1], "n": pa.array([1, None])})
    codec = ColumnsCodec(columns.schema)
    assert codec.encode(columns).to_pylist() == codec.encode(clean).to_pylist()


@drawn(500)
@given(st.data(), st.sampled_from(KINDS))
def test_bytes_that_are_no_rows_are_refused_or_read_inside_their_bounds(
    data: st.DataObject, of: tuple[pa.DataType, st.SearchStrategy[Any]]
) -> None:
    """What is read is a row like any other: written again, it is the same bytes each time."""
    kind, values = of
    codec = ColumnsCodec(pa.schema([("a", kind), ("b", pa.string())]))
    value, text = data.draw(st.tuples(values | st.none(), st.none() | st.text(max_size=5)))
    row = pa.record_batch([pa.array([value], kind), pa.array([text])], codec.schema)
    whole = codec.encode(row)[0].as_py() or b""
    junk = data.draw(damaged(whole) | st.binary(max_size=40))
    try:
        decoded = codec.decode(pa.array([b"", junk, None], pa.binary()).slice(1))
    except ManifestError:
        return
    decoded.validate(full=True)
    again = codec.encode(decoded)
    assert codec.encode(codec.decode(again)).to_pylist() == again.to_pylist()
    if junk[0] == 0 and not (pa.types.is_boolean(kind) or pa.types.is_list(kind)):
        assert again.to_pylist() == [junk, None], "no null, and one way to write each value"


def test_a_row_cut_short_or_too_long_is_refused() -> None:
    columns = pa.record_batch({"n": [1], "s": ["abc"], "t": [["a"]]})
    codec = ColumnsCodec(columns.schema)
    whole = codec.encode(columns)[0].as_py()
    for cut in [*(whole[:size] for size in range(len(whole))), whole + b"\0"]:
        with pytest.raises(ManifestError, match=r"not of the columns \[\[\"n\",\"int64\"\]"):
            codec.decode(pa.array([cut], pa.binary()))


@pytest.mark.parametrize("kind", [pa.struct([("a", pa.int64())]), pa.timestamp("ns")], ids=str)
def test_what_cannot_be_stored_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(OptionError, match="state, column 'x' is"):
        ColumnsCodec(pa.schema([("x", kind)]))
    with pytest.raises(OptionError, match="no columns"):
        ColumnsCodec(pa.schema([]))


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.none() | st.sampled_from([b"", b"a", b"b", b"aa"])] * 2)))
def test_changed_rows_are_those_that_are_not_the_same(
    pairs: list[tuple[bytes | None, bytes | None]],
) -> None:
    before = pa.array([one for one, _ in pairs], pa.binary())
    after = pa.array([other for _, other in pairs], pa.binary())
    assert changed_rows(before, after).tolist() == [one != other for one, other in pairs]
