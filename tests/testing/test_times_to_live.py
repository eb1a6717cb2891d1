"""State gets a time to live, or loses it: entries of before count from the new program's start."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import tallystick as ts
from tallystick.checkpoint.state_files import contents_of
from tallystick.state import evolution
from tallystick.state.catalog import FormerState, StepState
from tallystick.state.entries import TIMERS_BY_TIME, TTL_INDEX, ids_of
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.pyspark import processor
from tallystick.testing import Driver

NOBODY = "localhost:1"
KEYS = "abcde"
TTL_MS = 10_000
WEEK_MS = 7 * 86_400_000


class Kept(StatefulProcessor):
    """Counts rows per key, and keeps their numbers in a list and a map."""

    def __init__(self, ttl_ms: int | None, kind: str = "int") -> None:
        self.ttl_ms, self.kind = ttl_ms, kind

    def init(self, handle: Any) -> None:
        self.value = handle.getValueState("value", f"n {self.kind}", self.ttl_ms)
        self.list = handle.getListState("list", f"n {self.kind}", self.ttl_ms)
        self.map = handle.getMapState("map", "n int", f"n {self.kind}", self.ttl_ms)
        self.other = handle.getValueState("other", "n int", WEEK_MS * 1000)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.n < 0:
                for state in (self.value, self.list, self.map):
                    state.clear()
                continue
            (count,) = self.value.get() or (0,)
            self.value.update((count + 1,))
            self.list.appendValue((row.n,))
            self.map.updateValue((row.n,), (row.n,))
            self.other.update((row.n,))
        yield Row(
            k=key[0],
            count=(self.value.get() or (0,))[0],
            ns=[n for (n,) in self.list.get()],
            seen=sorted(n for ((n,), _) in self.map.iterator()),
        )

    def close(self) -> None:
        pass


OUTPUT = "k string, count bigint, ns array<bigint>, seen array<int>"


def kept(ttl_ms: int | None, kind: str = "int") -> ts.Pipeline:
    return _pipeline(Kept(ttl_ms, kind), output=OUTPUT, time_mode="ProcessingTime")


def first_rows(forget_after_ms: int | None) -> ts.Pipeline:
    return _pipeline(ts.deduplicate(forget_after_ms))


def _pipeline(function: Any, **step: Any) -> ts.Pipeline:
    return (
        ts.Pipeline("ttl")
        .read(ts.KafkaSource(NOBODY, topics=["in"], value=ts.Json("k string, n int")))
        .key_by("k")
        .process(function, uid="s", **step)
        .write(ts.KafkaSink(NOBODY, topic="out", value=ts.Json()))
    )


def ask(test: Driver, rows: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Feed rows, run epochs, and return what came out for them, by key."""
    before = test.output().num_rows
    test.feed("in", [{"k": k, "n": n} for k, n in rows])
    out = test.drain().output().slice(before).to_pylist()
    names = ("k", "count", "ns", "seen") if "count" in (out or [{}])[0] else ("k", "n")
    return sorted(({name: row[name] for name in names} for row in out), key=lambda row: row["k"])


def step_of(test: Driver) -> StepState:
    manifest = test._driver.coordinator.committed_manifest
    assert manifest is not None
    return manifest.state[0]


def ids_left(test: Driver) -> list[int]:
    """Return the ids of all committed entries, of states and of indexes."""
    step = step_of(test)
    whole = KeyGroupRange(0, step.max_parallelism - 1)
    return sorted(set(ids_of(contents_of(step, whole, test._host.files).column(0)).tolist()))


ROWS = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(-1, 5)), min_size=1, max_size=12)


@pytest.mark.parametrize("is_added", [True, False])
@settings(max_examples=25, deadline=None, phases=[Phase.generate])
@given(
    before=st.lists(st.tuples(ROWS, st.integers(0, 3000)), min_size=1, max_size=4),
    after=st.lists(st.tuples(ROWS, st.integers(0, 6000)), min_size=1, max_size=5),
    pause_ms=st.integers(0, 4000),
    tasks=st.integers(1, 4),
    kills=st.integers(0, 2),
    kind=st.sampled_from(["int", "bigint"]),
)
def test_entries_of_before_live_from_the_first_epoch_on(
    is_added: bool, before: Any, after: Any, pause_ms: int, tasks: int, kills: int, kind: str
) -> None:
    """Against a model: each entry is known with its expiry, and goes when that is past.

    With the change the schema may become wider, and the number of tasks another.
    """
    ttls = (None, TTL_MS) if is_added else (TTL_MS, None)
    test, model = Driver(kept(ttls[0])), _Model(ttls[0])
    for rows, pass_ms in before:
        assert ask(test, rows) == model.ask(rows, test._clock.now_ms)
        test.advance_clock(pass_ms)
    test.advance_clock(pause_ms)
    test.restart(tasks, pipeline=kept(ttls[1], kind))
    first = True
    for rows, pass_ms in after:
        if first:
            for _ in range(kills):
                test.feed("in", [{"k": "z", "n": -1}])
                test.crash()
                test.advance_clock(700)
            if not kills:
                test.feed("in", [{"k": "z", "n": -1}])
            test.drain()
            model.change(ttls[1], test._clock.now_ms)
            first = False
        assert ask(test, rows) == model.ask(rows, test._clock.now_ms)
        test.advance_clock(pass_ms)
    if is_added:
        test.advance_clock(TTL_MS)
        test.drain()
        assert not {1, 2, 3} & {*ids_left(test)}, "an entry was never removed"


class _Model:
    """The states of `Kept` in plain Python: of each item of a key, its expiry."""

    def __init__(self, ttl_ms: int | None) -> None:
        self.ttl_ms = ttl_ms
        self.items: dict[tuple[Any, ...], tuple[Any, float]] = {}
        self.number = 0

    def change(self, ttl_ms: int | None, now_ms: int) -> None:
        """Give all that lives an expiry, or none."""
        self.ttl_ms, living = ttl_ms, self._living(now_ms)
        expiry = float("inf") if ttl_ms is None else now_ms + ttl_ms
        self.items = {at: (value, expiry) for at, (value, _) in living.items()}

    def _living(self, now_ms: int) -> dict[tuple[Any, ...], tuple[Any, float]]:
        return {at: entry for at, entry in self.items.items() if entry[1] > now_ms}

    def ask(self, rows: list[tuple[str, int]], now_ms: int) -> list[dict[str, Any]]:
        """Take rows, and return the rows that come out."""
        self.items = self._living(now_ms)
        expiry = float("inf") if self.ttl_ms is None else now_ms + self.ttl_ms
        for k, n in rows:
            if n < 0:
                self.items = {at: entry for at, entry in self.items.items() if at[0] != k}
                continue
            count, _ = self.items.get((k, "value"), (0, 0.0))
            self.number += 1
            self.items[k, "value"] = count + 1, expiry
            self.items[k, "list", self.number] = n, expiry
            self.items[k, "map", n] = n, expiry
        return [
            {
                "k": k,
                "count": self.items.get((k, "value"), (0, 0.0))[0],
                "ns": [n for at, (n, _) in self.items.items() if at[:2] == (k, "list")],
                "seen": sorted(n for at, (n, _) in self.items.items() if at[:2] == (k, "map")),
            }
            for k in sorted({k for k, _ in rows})
        ]


def test_expired_entries_stay_expired_without_a_time_to_live() -> None:
    """Nothing ran after they expired, so nothing has removed them."""
    test = Driver(kept(TTL_MS))
    ask(test, [("a", 1)])
    test.advance_clock(TTL_MS // 2)
    ask(test, [("b", 2)])
    test.advance_clock(TTL_MS // 2)
    test.restart(2, pipeline=kept(None))
    assert ask(test, [("a", 3), ("b", 3)]) == [
        {"k": "a", "count": 1, "ns": [3], "seen": [3]},
        {"k": "b", "count": 2, "ns": [2, 3], "seen": [2, 3]},
    ]
    test.advance_clock(WEEK_MS)
    assert ask(test, [("b", 4)])[0]["count"] == 3


def test_back_and_forth_with_files_of_each_program() -> None:
    """Four programs, and no file rewritten: each conversion follows the one before it."""
    test = Driver(kept(None), parallelism=1)
    ask(test, [("a", 1), ("b", 1), ("c", 1)])
    for ttl_ms, key in ((TTL_MS, "b"), (None, "c"), (TTL_MS, "d")):
        test.restart(pipeline=kept(ttl_ms))
        ask(test, [(key, 2)])
        test.advance_clock(TTL_MS - 1)
    assert len({file.schema for file in step_of(test).files}) == 4
    assert ask(test, [("a", 3)])[0]["ns"] == [1, 3]
    test.advance_clock(1)
    assert [row["ns"] for row in ask(test, [("b", 4), ("c", 4), ("d", 4)])] == [[4]] * 3
    test.advance_clock(TTL_MS)
    test.drain()
    assert not {1, 2, 3} & {*ids_left(test)}


def test_the_first_epoch_decides_and_the_old_program_goes_on_before_it() -> None:
    test = Driver(kept(None))
    ask(test, [("a", 1)])
    test.restart(pipeline=kept(TTL_MS))
    test.feed("in", [{"k": "a", "n": 2}])
    test.crash()
    test.restart(pipeline=kept(None))
    test.advance_clock(2 * TTL_MS)
    test.drain()
    assert ask(test, [("a", 3)])[0]["ns"] == [1, 2, 3]

    test.restart(pipeline=kept(TTL_MS))
    test.advance_clock(TTL_MS)
    assert ask(test, [("a", 4)])[0]["ns"] == [1, 2, 3, 4]
    test.advance_clock(TTL_MS)
    assert ask(test, [("a", 5)])[0]["ns"] == [5]


def test_few_entries_of_many_are_removed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "EXPIRED_MAX", 40)
    test = Driver(kept(None), parallelism=1)
    ask(test, [(f"k{n}", 1) for n in range(40)])
    test.restart(pipeline=kept(TTL_MS))
    ask(test, [("b", 1)])
    test.advance_clock(TTL_MS)
    assert test.epoch()
    assert {1, 2, 3, TTL_INDEX} <= {*ids_left(test)}, "all were removed at once"
    assert ask(test, [("k7", 3)])[0]["ns"] == [3], "what had expired was read"
    for _ in range(10):
        test.advance_clock(2000)
        test.drain()
    assert not {1, 2, 3} & {*ids_left(test)}


@pytest.mark.parametrize("tasks", [1, 3])
def test_keys_of_deduplicate_are_forgotten_or_stay(tasks: int) -> None:
    test = Driver(first_rows(None))
    ask(test, [("a", 1), ("b", 1)])
    test.advance_clock(WEEK_MS)
    test.restart(tasks, pipeline=first_rows(TTL_MS))
    test.feed("in", [{"k": "a", "n": 2}])
    test.crash()
    assert ask(test, [("c", 2)]) == [{"k": "c", "n": 2}]
    test.advance_clock(TTL_MS - 1)
    assert ask(test, [("a", 3), ("b", 3)]) == []
    test.advance_clock(1)
    assert ask(test, [("a", 4)]) == [{"k": "a", "n": 4}]
    assert [row["k"] for row in test.state().to_pylist()] == ["a"], "b and c were never touched"

    test.restart(2, pipeline=first_rows(None))
    test.advance_clock(TTL_MS - 1)
    assert ask(test, [("a", 5), ("e", 5)]) == [{"k": "e", "n": 5}]
    test.advance_clock(WEEK_MS)
    assert ask(test, [("a", 6), ("e", 6)]) == []
    assert TIMERS_BY_TIME not in ids_left(test)


def test_a_key_that_was_due_is_forgotten_though_its_time_is_taken_away() -> None:
    test = Driver(first_rows(TTL_MS))
    ask(test, [("a", 1)])
    test.advance_clock(TTL_MS)
    test.restart(pipeline=first_rows(None))
    assert ask(test, [("a", 2)]) == [{"k": "a", "n": 2}]


def test_the_change_is_said_before_it_is_made() -> None:
    test = Driver(kept(None))
    ask(test, [("a", 1)])
    (added, *_) = Driver(kept(TTL_MS))._run.keyed.state_changes([step_of(test)])
    assert added == (
        "step s, state 'value' changes with the next epoch: it gets a time to live: entries of "
        "before live for 10000 ms from that epoch on"
    )
    test.restart(pipeline=kept(TTL_MS))
    ask(test, [("a", 1)])
    (removed, *_) = Driver(kept(None))._run.keyed.state_changes([step_of(test)])
    assert removed.endswith("it has no time to live any more: entries that live then stay for ever")


def test_a_change_of_a_time_to_live_is_in_the_manifest() -> None:
    for value in ([1, "{}", [], {"ttl": [True, 5]}], [1, "{}", []]):
        assert FormerState.from_json(value).to_json() == value
    for strange in ([1, 5], [True, None], [True]):
        with pytest.raises((TypeError, ValueError)):
            FormerState.from_json([1, "{}", [], {"ttl": strange}])


@pytest.mark.parametrize("guard", ["the index is converted", "an expiry stands before values"])
def test_a_guard_taken_away_is_noticed(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if guard == "the index is converted":
        monkeypatch.setattr(evolution, "with_expiries", lambda entries, *_: entries)
    else:
        monkeypatch.setattr(evolution, "with_ttl", lambda values, *_: values)
    with pytest.raises((AssertionError, ts.TallystickError)):
        test_back_and_forth_with_files_of_each_program()
