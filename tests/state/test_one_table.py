"""Rows of several inputs as one table."""

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import OptionError
from tallystick.state.functions.inputs import INPUT, TIME, KeyedInput, KeyedInputs
from tests.examples import drawn

BIDS = pa.schema([("bidder", pa.int64()), ("price", pa.float64()), ("at", pa.int64())])
PEOPLE = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("tags", pa.list_(pa.string())),
        ("at", pa.timestamp("us", tz="UTC")),
    ]
)
START, MICRO = dt.datetime(1970, 1, 1, tzinfo=dt.UTC), dt.timedelta(microseconds=1)
INPUTS = KeyedInputs(
    [
        KeyedInput("bids", BIDS, ("bidder",), "at"),
        KeyedInput("people", PEOPLE, ("id",), "at"),
        KeyedInput("others", PEOPLE, ("id",)),
    ]
)
BID = st.fixed_dictionaries(
    {
        "bidder": st.none() | st.integers(0, 3),
        "price": st.none() | st.floats(width=16, allow_nan=False),
        "at": st.none() | st.integers(-5, 5),
    }
)
PERSON = st.fixed_dictionaries(
    {
        "id": st.integers(0, 3),
        "tags": st.none() | st.lists(st.none() | st.text(max_size=3), max_size=2),
        "at": st.none() | st.integers(-(10**15), 10**15).map(lambda at: START + at * MICRO),
    }
)


def test_the_columns_are_the_key_the_input_the_time_and_a_struct_for_each() -> None:
    assert INPUTS.columns == pa.schema(
        [
            ("bidder", pa.int64()),
            (INPUT, pa.int8()),
            (TIME, pa.int64()),
            ("bids", pa.struct(list(BIDS))),
            ("people", pa.struct(list(PEOPLE))),
            ("others", pa.struct(list(PEOPLE))),
        ]
    )


@drawn(60)
@given(bids=st.lists(BID, max_size=5), people=st.lists(PERSON, max_size=5), data=st.data())
def test_rows_come_back_as_they_were_in_their_order(
    bids: list[Any], people: list[Any], data: st.DataObject
) -> None:
    """Mixed at will, and cut out of a larger batch; a row's time is that of its own column."""
    whole = pa.RecordBatch.from_pylist([*bids, *bids], BIDS)
    tables = [
        INPUTS.numbered(0, whole.slice(len(bids))),
        INPUTS.numbered(1, pa.RecordBatch.from_pylist(people, PEOPLE)),
        INPUTS.numbered(2, pa.RecordBatch.from_pylist(people, PEOPLE)),
    ]
    together = pa.Table.from_batches(tables, INPUTS.columns)
    order = data.draw(st.permutations(range(len(together))))
    mixed = together.take(pa.array(order, pa.int64())).combine_chunks()
    batch = pa.RecordBatch.from_struct_array(mixed.to_struct_array().combine_chunks())
    batch.validate(full=True)

    records = [(0, row) for row in bids] + [(n, row) for n in (1, 2) for row in people]
    arrived = [records[at] for at in order]
    for number, schema in enumerate((BIDS, PEOPLE, PEOPLE)):
        rows_out = INPUTS.rows_of(number, batch)
        assert rows_out.schema == schema
        assert rows_out.to_pylist() == [row for whose, row in arrived if whose == number]
    assert batch.column(INPUT).to_pylist() == [number for number, _ in arrived]
    keys = [row.get("bidder") if number == 0 else row["id"] for number, row in arrived]
    assert batch.column("bidder").to_pylist() == keys
    assert batch.column(TIME).to_pylist() == [time_of(*arrival) for arrival in arrived]


def time_of(number: int, row: Any) -> int | None:
    at = row["at"]
    if number == 2 or at is None:
        return None
    if number == 0:
        return int(at)
    return int((at - START) // dt.timedelta(milliseconds=1))


def test_keys_of_other_types_and_names_that_clash_are_refused() -> None:
    text = pa.schema([("id", pa.string())])
    with pytest.raises(OptionError, match="the key of input 'b' has types string, that of 'a' int"):
        KeyedInputs([KeyedInput("a", PEOPLE, ("id",)), KeyedInput("b", text, ("id",))])
    with pytest.raises(OptionError, match="'id' is the name of an input and of a key's column"):
        KeyedInputs([KeyedInput("a", text, ("id",)), KeyedInput("id", text, ("id",))])
    with pytest.raises(OptionError, match="'a' is the name of an input"):
        KeyedInputs([KeyedInput("a", text, ("id",)), KeyedInput("a", text, ("id",))])
    with pytest.raises(
        OptionError, match="input 'a': key_by or event_time names 'at': there is no"
    ):
        KeyedInput("a", text, ("id",), "at")
    with pytest.raises(OptionError, match="input 'a': key_by or event_time names 'no'"):
        KeyedInput("a", text, ("no",))
