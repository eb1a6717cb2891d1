"""Text is UTF-8 or malformed: the same as Python's own strict decoder finds, in every mode."""

import pickle

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tallystick.codec.formats import MODES
from tallystick.codec.json.read import JsonReader
from tallystick.codec.values import TextReader
from tallystick.errors import RecordError

VALUES = st.lists(
    st.none() | st.text(max_size=4).map(lambda text: text.encode()) | st.binary(max_size=4)
)


def where(row: int) -> str:
    return f"topic t, partition 3, offset {1000 + row}"


def texts_of(values: list[bytes | None], mode: str) -> tuple[list[str | None], list[int]]:
    """The texts, and the rows that are malformed."""
    parsed = TextReader().parse(pa.array(values, pa.binary()), mode, where)
    parsed.columns.validate(full=True)
    assert parsed.columns.schema == TextReader().schema
    return parsed.columns.column("value").to_pylist(), list(parsed.reasons)


def decoded(value: bytes | None) -> str | None:
    """The text; raises UnicodeDecodeError for what is none."""
    return None if value is None else value.decode()


def is_text(value: bytes | None) -> bool:
    try:
        decoded(value)
    except UnicodeDecodeError:
        return False
    return True


@settings(deadline=None)
@given(VALUES)
@example([b"\xff"])
@example([b"\xed\xa0\x80", b"", None, b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xc3", b"\xa9"])
def test_every_value_is_judged_as_if_it_stood_alone(values):
    """A character cut in two by a record's end is no character: neighbours do not complete it."""
    good = [decoded(value) for value in values if is_text(value)]
    bad = [row for row, value in enumerate(values) if not is_text(value)]

    assert texts_of(values, "dropmalformed") == (good, bad)
    assert texts_of(values, "deadletter") == (good, bad)
    nulls = [decoded(value) if is_text(value) else None for value in values]
    assert texts_of(values, "permissive") == (nulls, bad)


@settings(deadline=None)
@given(VALUES, st.integers(0, 3))
def test_a_slice_gives_the_same_texts(values, start):
    array = pa.array(values, pa.binary())[start:]
    parsed = TextReader().parse(array, "dropmalformed", where)

    assert parsed.columns.column(0).to_pylist() == texts_of(values[start:], "dropmalformed")[0]
    kept = range(len(array)) if parsed.rows is None else parsed.rows.tolist()
    assert [decoded(array[row].as_py()) for row in kept] == parsed.columns.column(0).to_pylist()


@pytest.mark.parametrize("mode", MODES)
def test_text_and_tombstones_pass_in_every_mode(mode):
    assert texts_of([b"a", None, "é😀".encode(), b""], mode) == (["a", None, "é😀", ""], [])


def test_the_first_malformed_value_stops_a_failfast_reader_and_is_named():
    with pytest.raises(RecordError) as caught:
        texts_of([b"a", None, b"ab\xff" + b"x" * 200 + b"secret", b"\xfe"], "failfast")

    message = str(caught.value)
    assert message.startswith("topic t, partition 3, offset 1002: the value is not UTF-8 text: ")
    assert "invalid start byte at byte 2" in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("reader", "value"),
    [
        (TextReader(), b"S3CR3T \xff"),
        (JsonReader(pa.schema([("amount", pa.decimal128(9, 2))])), b'{"amount": "S3CR3T"}'),
        (JsonReader(pa.schema([("amount", pa.int64())])), b'{"amount": "S3CR3T"}'),
        (JsonReader(pa.schema([("amount", pa.int64())])), b"S3CR3T"),
    ],
    ids=["text", "decimal", "number", "no-json"],
)
def test_a_malformed_value_is_told_with_and_without_its_bytes(reader, value):
    """A page shows the text without; both travel with the error, from another process."""
    with pytest.raises(RecordError) as caught:
        reader.parse(pa.array([value], pa.binary()), "failfast", where)
    error = pickle.loads(pickle.dumps(caught.value))  # noqa: S301

    assert "S3CR3T" in str(error)
    assert error.without_values.startswith("topic t, partition 3, offset 1000: the value is not ")
    assert "deadletter" in error.without_values
    assert "S3CR3T" not in error.without_values
