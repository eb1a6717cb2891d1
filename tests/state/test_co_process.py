"""co_process and upsert joins against plain Python, epoch after epoch, at any parallelism."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from co_keyed_tasks import CoKeyedTasks
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import OptionError, RecordError
from tallystick.state.functions.co_process import CoKeyedBatch, co_process
from tallystick.state.functions.inputs import KeyedInput, KeyedInputs
from tallystick.state.functions.keyed_batch import Update
from tallystick.state.functions.processing import EVENT_TIME
from tallystick.state.functions.upsert_join import upsert_join
from tests.examples import drawn

USERS = pa.schema(
    [
        ("user", pa.string()),
        ("name", pa.string()),
        ("version", pa.int64()),
        ("gone", pa.bool_()),
    ]
)
ACCOUNTS = pa.schema(
    [
        ("user", pa.string()),
        ("name", pa.list_(pa.string())),
        ("version", pa.int64()),
        ("gone", pa.bool_()),
    ]
)
INPUTS = KeyedInputs(
    [KeyedInput("users", USERS, ("user",)), KeyedInput("accounts", ACCOUNTS, ("user",))]
)
ROW = st.tuples(
    st.integers(0, 1),
    st.sampled_from([None, "a", "b"]),
    st.none() | st.sampled_from("xyz"),
    st.integers(0, 5),
    st.sampled_from([None, False, True]),
)
EPOCHS = st.lists(st.tuples(st.lists(ROW, max_size=8), st.integers(1, 16)), max_size=6)
Record = tuple[int, str | None, str | None, int, bool | None]


def arrival(record: Record) -> tuple[int, dict[str, Any]]:
    side, user, name, version, gone = record
    shown = [name] if side and name else None if side else name
    return side, {"user": user, "name": shown, "version": version, "gone": gone}


def joined(how: str, left_row: Record | None, right: Record | None) -> dict[str, Any] | None:
    is_there = {
        "inner": left_row and right,
        "left": left_row,
        "right": right,
        "full": left_row or right,
    }[how]
    if not is_there:
        return None
    columns = ("name", "version", "gone")
    one = arrival(left_row)[1] if left_row else dict.fromkeys(columns)
    two = arrival(right)[1] if right else dict.fromkeys(columns)
    return {name: one[name] for name in columns} | {f"accounts_{n}": two[n] for n in columns}


@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
@drawn(40)
@given(epochs=EPOCHS, by_version=st.booleans(), deletes=st.booleans())
def test_an_upsert_join_puts_out_the_changes_of_the_joined_table(
    how: str, epochs: list[Any], by_version: bool, deletes: bool
) -> None:
    """Also: the table that the changes add up to is the one of all rows in one epoch."""
    both = ("users", "accounts")
    function = upsert_join(
        *both,
        how=how,
        newest_by=dict.fromkeys(both, "version") if by_version else None,
        deleted=dict.fromkeys(both, "gone") if deletes else None,
    )
    tasks = CoKeyedTasks(function, INPUTS)
    tables: tuple[dict[Any, Record], dict[Any, Record]] = ({}, {})
    before: dict[Any, Any] = {}
    for records, parallelism in epochs:
        rows_out = tasks.epoch([arrival(record) for record in records], parallelism=parallelism)

        for record in records:
            table, user = tables[record[0]], record[1]
            if not by_version or user not in table or record[3] >= table[user][3]:
                table[user] = record
        now = [
            {user: row for user, row in table.items() if not (deletes and row[4])}
            for table in tables
        ]
        after = {user: joined(how, now[0].get(user), now[1].get(user)) for user in (None, "a", "b")}
        expected = []
        for user, row in after.items():
            old = before.get(user)
            change = "insert" if old is None else "update" if row is not None else "delete"
            if row != old:
                expected.append({"user": user, "change": change, **(row or old)})
        assert sorted(map(str, rows_out)) == sorted(map(str, expected))
        before = after
    if deletes and not by_version:
        users = {user for table in now for user in table} if epochs else set()
        assert len(tasks.entries) == len(users), "a row that is gone leaves nothing"


def test_what_an_upsert_join_cannot_go_by() -> None:
    def make(**options: Any) -> Any:
        return upsert_join("users", "accounts", **options).make(INPUTS.columns)

    with pytest.raises(OptionError, match="newest_by names 'orders': expected 'users' or"):
        make(newest_by={"orders": "version"})
    with pytest.raises(OptionError, match="newest_by of 'users' is 'age', which is none of its"):
        make(newest_by={"users": "age"})
    with pytest.raises(OptionError, match="deleted of 'users': column 'version' is int64, expec"):
        make(deleted={"users": "version"})
    with pytest.raises(
        OptionError, match=r"how='outer'.: expected 'inner', 'left', 'right' or 'full"
    ):
        make(how="outer")
    function = upsert_join("users", "accounts", newest_by={"users": "version"})
    with pytest.raises(RecordError, match="input 'users': 1 rows have no 'version'"):
        CoKeyedTasks(function, INPUTS).epoch([(0, {"user": "a", "version": None})])


@drawn(30)
@given(epochs=EPOCHS)
def test_a_function_of_two_inputs_sees_each_with_its_columns_and_one_state(
    epochs: list[Any],
) -> None:
    """It counts users' rows, and sums up accounts' versions, from epoch to epoch."""

    def function(batch: CoKeyedBatch) -> Update:
        users, accounts = batch.of("users"), batch.of("accounts")
        assert users.rows.schema.names == USERS.names
        assert accounts.rows.schema == ACCOUNTS
        names = [batch.keys.column("user")[code].as_py() for code in batch.codes("accounts")]
        assert names == batch.rows("accounts").column("user").to_pylist()
        n = batch.held("n") + users.count()
        total = accounts.sum("version", start=batch.state["total"])
        state = {"n": n, "total": total}
        return Update(pa.record_batch({"user": batch.keys["user"], **state}), state)

    def output(key: pa.Schema, rows: pa.Schema) -> pa.Schema:
        return pa.schema([*key, ("n", pa.int64()), ("total", pa.int64())])

    tasks = CoKeyedTasks(
        co_process(function, state="n bigint, total bigint", output=output), INPUTS
    )
    counts: dict[Any, int] = {}
    totals: dict[Any, int] = {}
    for records, parallelism in epochs:
        rows_out = tasks.epoch([arrival(record) for record in records], parallelism=parallelism)
        for side, user, _, version, _ in records:
            counts[user] = counts.get(user, 0) + (side == 0)
            if side == 1:
                totals[user] = totals.get(user, 0) + version
        expected = [
            {"user": user, "n": counts[user], "total": totals.get(user)}
            for user in {record[1] for record in records}
        ]
        assert sorted(map(str, rows_out)) == sorted(map(str, expected))


def test_a_function_of_two_inputs_has_timers_and_event_times() -> None:
    schema = KeyedInputs(
        [
            KeyedInput("users", USERS, ("user",), "version"),
            KeyedInput("accounts", ACCOUNTS, ("user",), "version"),
        ]
    )

    def function(batch: CoKeyedBatch) -> Update:
        assert batch.time.watermark_ms == 3
        if batch.is_due:
            assert batch.known.all()
            assert batch.timers is not None
            return Update(pa.record_batch({"user": batch.keys["user"]}), {"n": [None] * len(batch)})
        due = np.full(len(batch), 99)
        due[batch.codes("accounts")] = batch.times("accounts").to_numpy()
        return Update(None, {"n": np.ones(len(batch), np.int64)}, due)

    function_with_timers = co_process(
        function, state="n bigint", time_mode=EVENT_TIME, output=lambda key, rows: key
    )
    assert function_with_timers.has_timers
    assert function_with_timers.time_mode == EVENT_TIME
    tasks = CoKeyedTasks(function_with_timers, schema)
    rows = [(0, "a", "x", 1, None), (1, "a", None, 3, None), (1, "b", None, 4, None)]
    assert tasks.epoch([arrival(row) for row in rows], watermark_ms=3) == [{"user": "a"}]
    assert len(tasks.entries) == 2, "b and its timer"


def test_a_function_names_inputs_that_are_there() -> None:
    tasks = CoKeyedTasks(co_process(lambda batch: batch.of("bids"), state=""), INPUTS)
    with pytest.raises(OptionError, match=r"no input 'bids'; .* name users, accounts"):
        tasks.epoch([(0, {"user": "a"})])
    with pytest.raises(OptionError, match="co_process: the step has a single input"):
        co_process(lambda batch: Update(), state="").make(USERS)
    with pytest.raises(OptionError, match=r"time_mode='Now'.: expected 'None'"):
        co_process(lambda batch: Update(), state="", time_mode="Now")
