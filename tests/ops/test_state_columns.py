"""Entries of each kind of state become columns, aligned by key."""

import datetime
import time

import numpy as np
import pyarrow as pa
from pyspark.sql import types

from tallystick.ops.state_table import schema_of, table_of
from tallystick.state.catalog import StateField, StepState
from tallystick.state.entries import regrouped
from tallystick.state.key_groups import key_groups_of
from tallystick.state.keys import KeyCodec, entry_keys
from tallystick.state.overlay import ENTRIES
from tallystick.state.pyspark.values import ValueCodec
from tallystick.state.row_codec import ColumnsCodec
from tallystick.state.schema import text_of

KEY = KeyCodec(pa.schema([("user", pa.string()), ("n", pa.int64())]))
TOTALS = pa.schema([("count", pa.int64()), ("last", pa.string())])
NAME = types.StructType([types.StructField("name", types.StringType())])
PAIR = types.StructType(
    [types.StructField("a", types.LongType()), types.StructField("b", types.DateType())]
)
FIELDS = (
    StateField("totals", 1, "columns", "", text_of(TOTALS)),
    StateField("pair", 2, "value", "", PAIR.json(), ttl_ms=1000),
    StateField("names", 3, "list", "", NAME.json()),
    StateField("by_name", 5, "map", NAME.json(), NAME.json()),
)
STEP = StepState("step", 128, 2, KEY.schema_text, 1, FIELDS, 6)
A_DAY = datetime.date(2026, 11, 21)
USERS = ("ann", "bob", "cid\x00", None)
name, pair = ValueCodec("name", NAME), ValueCodec("pair", PAIR)


def time_bytes(time_ms: int) -> bytes:
    return (time_ms + (1 << 63)).to_bytes(8, "big")


def entries_of(max_parallelism: int = 128) -> pa.RecordBatch:
    """State of each kind for some of the users."""
    rows = pa.record_batch({"user": pa.array(USERS), "n": pa.array([1, 2, 3, 4])})
    keys = dict(zip(USERS, KEY.encode(rows).to_pylist(), strict=True))
    groups = dict(zip(USERS, key_groups_of(KEY.hash_codes(rows), max_parallelism), strict=True))
    entries: list[tuple[bytes, bytes]] = []

    def put(user: str | None, state_id: int, value: bytes, rest=b"", before=b"") -> None:
        data = pa.array([before + keys[user] + rest], pa.binary())
        (key,) = entry_keys(np.array([groups[user]], np.int32), state_id, data).to_pylist()
        entries.append((key, value))

    totals = pa.record_batch({"count": pa.array([7, None]), "last": pa.array(["x", "y"])})
    for user, value in zip(("ann", None), ColumnsCodec(TOTALS).encode(totals), strict=True):
        put(user, 1, value.as_py())
    put("bob", 2, (5).to_bytes(8, "big") + pair.encode((1, A_DAY)))
    for user, elements in (("ann", ["p", "q"]), ("cid\x00", [])):
        put(user, 3, len(elements).to_bytes(8, "big"))
        for at, element in enumerate(elements):
            put(user, 3, name.encode((element,)), at.to_bytes(8, "big"))
    put("bob", 5, name.encode(("v",)), name.encode(("k",)))
    for user, time_ms in (("ann", -3), ("ann", 9), ("bob", 4)):
        put(user, 0xFE, b"", rest=time_bytes(time_ms))
        put(user, 0xFC, b"", before=time_bytes(time_ms))
    put("bob", 0xFD, b"", before=time_bytes(5) + b"\x02")
    put("ann", 4, b"of a dropped state")
    columns = [pa.array(column, pa.binary()) for column in zip(*sorted(entries), strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=ENTRIES)


def test_every_kind_of_state_is_a_column():
    table = table_of(STEP, entries_of())

    rows = {row["user"]: row for row in table.to_pylist()}
    assert table.schema == schema_of(STEP)
    assert set(rows) == set(USERS)
    assert [rows[user]["n"] for user in USERS] == [1, 2, 3, 4]
    codes = KEY.hash_codes(table)
    assert table.column("key_group").to_pylist() == key_groups_of(codes, 128).tolist()
    assert (rows["ann"]["count"], rows["ann"]["last"]) == (7, "x")
    assert (rows[None]["count"], rows[None]["last"]) == (None, "y")
    assert (rows["bob"]["count"], rows["bob"]["pair"]) == (
        None,
        {"a": 1, "b": A_DAY, "$expiry": 5},
    )
    assert rows["ann"]["names"] == [{"name": "p"}, {"name": "q"}]
    assert rows["cid\x00"]["names"] is None
    assert rows["bob"]["by_name"] == [({"name": "k"}, {"name": "v"})]
    assert [rows[user]["timers"] for user in USERS] == [[-3, 9], [4], None, None]


def test_moments_are_those_that_were_stored_wherever_they_are_read(monkeypatch):
    """Also where the local time is not that of a cluster's other hosts."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        inner = types.StructType().add("at", types.TimestampType())
        schema = (
            types.StructType()
            .add("at", types.TimestampType())
            .add("local", types.TimestampNTZType())
            .add("all", types.ArrayType(inner))
        )
        noon = datetime.datetime(2026, 7, 1, 12, tzinfo=datetime.UTC)
        local = datetime.datetime(2026, 7, 1, 9)  # noqa: DTZ001  of no zone
        key = KEY.encode(pa.record_batch({"user": ["ann"], "n": [1]}))
        data = ValueCodec("state", schema).encode((noon, local, [(noon,), None]))
        columns = [entry_keys(np.zeros(1, np.int32), 1, key), pa.array([data])]
        step = StepState(
            "s", 1, 1, KEY.schema_text, 1, (StateField("seen", 1, "value", "", schema.json()),)
        )

        (row,) = table_of(step, pa.RecordBatch.from_arrays(columns, schema=ENTRIES)).to_pylist()
    finally:
        monkeypatch.undo()
        time.tzset()

    assert row["seen"] == {"at": noon, "local": local, "all": [{"at": noon}, None]}


def test_a_name_that_is_taken_gets_an_underscore():
    twice = (StateField("key_group", 1, "value", "", NAME.json()), FIELDS[0])

    assert schema_of(StepState("s", 1, 1, KEY.schema_text, 1, twice)).names == [
        "user", "n", "key_group", "key_group_", "count", "last", "timers",
    ]  # fmt: skip


def test_entries_move_to_the_key_groups_that_another_max_parallelism_gives():
    """Those of every kind: the same as if they had been written there."""
    for count in (1, 7, 128, 4000):
        assert regrouped(entries_of(), KEY, count).equals(entries_of(count))
