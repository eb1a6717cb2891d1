"""Keys as columns: with every format of the value, in every mode."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.codec.formats import MODES
from tallystick.codec.json.read import JsonReader
from tallystick.codec.layout import Layout, LayoutRows
from tallystick.codec.values import TextReader, ValueReader
from tallystick.errors import OptionError, RecordError
from tests.codec.test_layout import FROM, decoded

NUMBERS = JsonReader(pa.schema([("n", pa.int64())]))
KEYS = JsonReader(pa.schema([("user", pa.string()), ("day", pa.date32())]))
GOOD_KEY = b'{"user":"a","day":"2024-02-29"}'


def build(records: pa.RecordBatch, value: ValueReader | None, mode: str) -> LayoutRows:
    layout = Layout(
        value, mode, key=KEYS, key_prefix="key_", metadata=("key", "offset", "timestamp")
    )
    built = layout.build(records, FROM)
    assert built.rows.schema == layout.schema
    built.rows.validate(full=True)
    return built


@pytest.mark.parametrize("value", [None, TextReader(), NUMBERS])
def test_a_key_becomes_columns_in_its_place(value):
    records = decoded([(GOOD_KEY, b'{"n":1}', None), (None, b'{"n":2}', None)])

    rows = build(records, value, "failfast").rows

    assert rows.column("key_user").to_pylist() == ["a", None]
    assert rows.column("key_day").cast(pa.string()).to_pylist() == ["2024-02-29", None]
    first = {None: "key_user", NUMBERS: "n"}.get(value, "key_user")
    assert rows.schema.names[0] == first
    assert "key" not in rows.schema.names


KEY = st.sampled_from([None, GOOD_KEY, b'{"user":"b"}', b"{}"])
BAD = st.sampled_from([b"", b"a", b'{"user":1}', b'{"day":"yesterday"}'])
VALUE = st.sampled_from([None, b'{"n":1}', b"no"])


@settings(deadline=None)
@given(st.lists(st.tuples(KEY | BAD, VALUE), max_size=8), st.sampled_from(MODES), st.booleans())
def test_a_malformed_key_is_a_malformed_record(records, mode, is_late):
    """In each mode what happens is what happens to a malformed value, and beside it."""
    batch = decoded([(key, value, None) for key, value in records])
    if is_late and records:  # the first has a timestamp that no column can hold
        times = pa.array([2**62, *batch.column("timestamp").to_pylist()[1:]], pa.int64())
        batch = batch.set_column(batch.schema.get_field_index("timestamp"), "timestamp", times)
    good_keys = (None, GOOD_KEY, b'{"user":"b"}', b"{}")
    bad_key = [key not in good_keys for key, _ in records]
    bad = [b or value == b"no" for b, (_, value) in zip(bad_key, records, strict=True)]
    late = [is_late and mode != "permissive" and row == 0 for row in range(len(records))]
    bad = [b or is_late for b, is_late in zip(bad, late, strict=True)]
    bad_key = [b and not is_late for b, is_late in zip(bad_key, late, strict=True)]
    offsets = batch.column("offset").to_pylist()

    if mode == "failfast" and any(bad):
        with pytest.raises(RecordError, match=r"topic flights, partition 3, offset 1"):
            build(batch, NUMBERS, mode)
        return
    built = build(batch, NUMBERS, mode)

    assert list(built.reasons) == [o for o, b in zip(offsets, bad, strict=True) if b]
    for offset, is_key in zip(offsets, bad_key, strict=True):
        assert built.reasons.get(offset, "").startswith("its key: ") == is_key
    if mode == "permissive":
        assert built.rows.column("offset").to_pylist() == offsets
        corrupt = built.rows.column("_corrupt_key").to_pylist()
        assert corrupt == [k if b else None for b, (k, _) in zip(bad_key, records, strict=True)]
        corrupt = built.rows.column("_corrupt_record").to_pylist()
        assert corrupt == [v if v == b"no" else None for _, v in records]
    elif mode in ("dropmalformed", "deadletter"):
        kept = [o for o, b in zip(offsets, bad, strict=True) if not b]
        assert built.rows.column("offset").to_pylist() == kept
    if mode == "deadletter" and any(bad):
        letters = [(letter["key"], letter["value"]) for letter in built.dead_letters.to_pylist()]
        assert letters == [record for record, b in zip(records, bad, strict=True) if b]


def test_a_name_that_is_there_twice_is_refused():
    value = JsonReader(pa.schema([("user", pa.string())]))

    with pytest.raises(OptionError, match="column 'user' is both a field of the key"):
        Layout(value, key=KEYS)
