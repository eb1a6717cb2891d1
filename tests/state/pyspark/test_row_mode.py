"""A StatefulProcessor on our state: what Spark passes over is an error here; nothing is lost."""

import datetime
import decimal
import math
import pickle
import threading
from array import array
from collections import Counter, namedtuple
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row, types
from pyspark.sql.streaming import StatefulProcessor

from tallystick.errors import OptionError, StateError
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.keys import KeyCodec
from tallystick.state.overlay import Overlay
from tallystick.state.pyspark.current_key import TimeIndex
from tallystick.state.pyspark.processor import row_processor
from tallystick.state.pyspark.values import ValueCodec
from tests.state.pyspark.epochs import DictView, epochs_of, rows

ONE = rows(("k", "v", 1))
NOTHING = rows()


class Tried(StatefulProcessor):
    """Does one thing with its state and its handle, and says what came of it."""

    def __init__(self, action: Any, schema: Any = "n int, s string", ttl_ms: int | None = None):
        self.action, self.schema, self.ttl_ms = action, schema, ttl_ms

    def init(self, handle):
        self.handle = handle
        self.value = handle.getValueState("value", self.schema, self.ttl_ms)
        self.list = handle.getListState("list", self.schema, self.ttl_ms)
        self.map = handle.getMapState("map", "key string", self.schema, self.ttl_ms)

    def handleInputRows(self, key, rows, timerValues):
        yield Row(k=key[0], what="did", val=repr(self.action(self, list(rows))))


def tried(action: Any, **given: Any) -> str:
    """What came of it."""
    mode = given.pop("time_mode", "None")
    return epochs_of(Tried(action, **given), time_mode=mode).run(ONE)[0][2]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "it is no tuple"),
        ("ab", "it is no tuple"),
        ({"n": 1, "s": "a"}, "it is no tuple"),
        ((1,), "it has 1 values, expected a tuple of 2"),
        ((1, "a", 2), "it has 3 values"),
        (("x", "a"), "n: 'x' is a str, expected int"),
        ((1.5, "a"), "n: 1.5 is a float"),
        ((True, "a"), "n: True is a bool"),
        ((2**31, "a"), "n: 2147483648 does not fit int"),
        ((-(2**31) - 1, "a"), "does not fit int"),
        ((1, 5), "s: 5 is a int, expected string"),
        ((1, b"a"), "s: b'a' is a bytes"),
        ((1, datetime.date(2024, 1, 2)), "is a date, expected string"),  # msgpack would write text
        ((1, decimal.Decimal(1)), "is a Decimal, expected string"),
    ],
)
def test_what_does_not_fit_is_named(value, reason):
    for state in ("value.update(x)", "list.appendValue(x)", "map.updateValue(('a',), x)"):
        with pytest.raises(StateError) as error:
            tried(lambda it, _, code=state: eval(f"it.{code}", {"it": it, "x": value}))  # noqa: S307

        name = state.split(".")[0]
        assert f"state '{name}' holds (n int, s string), and was given {value!r}" in str(
            error.value
        )
        assert reason in str(error.value)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda it, _: it.list.put([]), "state 'list' was given an empty list"),
        (lambda it, _: it.list.appendList([]), "state 'list' was given an empty list"),
        (lambda it, _: it.map.getValue(None), "state 'map', the key holds \\(key string\\)"),
        (lambda it, _: it.handle.getValueState("new", "n int"), "value state 'new': only init"),
        (lambda it, _: it.handle.deleteIfExists("list"), "deleteIfExists\\('list'\\): only init"),
        (lambda it, _: it.handle.registerTimer(1), "registerTimer: there are no timers"),
        (lambda it, _: list(it.handle.listTimers()), "listTimers: there are no timers"),
    ],
)
def test_calls_that_cannot_be_say_why(action, message):
    with pytest.raises(StateError, match=message):
        tried(action)


def test_a_timer_is_a_whole_number_of_milliseconds():
    for at in (1.5, "1", None, True, 2**63):
        with pytest.raises(StateError, match="a timer was given"):
            tried(lambda it, _, at=at: it.handle.registerTimer(at), time_mode="ProcessingTime")


def test_what_is_like_a_tuple_is_taken_and_comes_back_as_spark_gives_it():
    def action(it, _):
        values = []
        for value in ([1, "a"], Row(n=1, s="a"), (np.int64(1), np.str_("a"))):
            it.value.update(value)
            it.map.updateValue(("x",), value)
            assert type(it.map.getValue(("x",))) is not tuple
            values.append((it.value.get(), it.map.getValue(("x",)).s, type(it.value.get()[0])))
        return values

    assert tried(action) == repr([((1, "a"), "a", int)] * 3)


@pytest.mark.parametrize(
    ("in_init", "message"),
    [
        (lambda h: (h.getValueState("s", "n int"), h.getListState("s", "n int")), "twice"),
        (lambda h: h.getValueState("$s", "n int"), "begins with \\$"),
        (lambda h: h.getValueState("s", "n int", 1000), "which needs time_mode 'ProcessingTime'"),
        (lambda h: h.getValueState("s", "n int", -1), "TTL of -1"),
        (lambda h: h.getValueState("s", "not a schema"), "cannot be read|not a type"),
        (lambda h: h.getValueState("s", 7), "is no schema"),
        (lambda h: (h.getValueState("s", "n int"), h.deleteIfExists("s")), "do one of both"),
        (lambda h: (h.deleteIfExists("s"), h.getValueState("s", "n int")), "do one of both"),
    ],
)
def test_states_that_cannot_be_declared_are_found_on_the_driver(in_init, message):
    class Declares(Tried):
        def init(self, handle):
            in_init(handle)

    with pytest.raises(OptionError, match=message):
        epochs_of(Declares(None)).restart()


def test_init_and_close_have_no_key():
    class Early(Tried):
        def init(self, handle):
            super().init(handle)
            self.value.update((1, "a"))

    class Late(Tried):
        def close(self):
            if hasattr(self, "ran"):
                self.value.get()

        def handleInputRows(self, key, rows, timerValues):
            self.ran = True
            return []

    for processor in (Early(None), Late(None)):
        with pytest.raises(StateError, match="belong to a key"):
            epochs_of(processor).run(ONE)


def test_a_task_declares_what_the_driver_did():
    class Fickle(Tried):
        def init(self, handle):
            handle.getValueState("first" if self.action else "second", "n int")

    processor = Fickle(None)
    epochs = epochs_of(processor)
    epochs.restart()
    epochs.processor._processor.action = True
    epochs.epoch_count = 1

    with pytest.raises(StateError, match=r"'first'.*declare the same states"):
        epochs.run(ONE)


def test_what_a_processor_keeps_in_itself_ends_with_the_epoch():
    """An epoch that runs again must not see what its first attempt left."""

    class Hoards(Tried):
        def init(self, handle):
            self.seen = getattr(self, "seen", 0)

        def handleInputRows(self, key, rows, timerValues):
            self.seen += 1
            yield Row(k=key[0], what="seen", val=str(self.seen))

    epochs = epochs_of(Hoards(None))

    assert [epochs.run(ONE)[0][2] for _ in range(3)] == ["1", "1", "1"]


def test_a_processor_may_hold_a_module_and_says_what_it_must_not_hold():
    class Holds(Tried):
        def handleInputRows(self, key, rows, timerValues):
            yield Row(k=key[0], what="pi", val=str(self.action.floor(self.action.pi)))

    assert epochs_of(Holds(math)).run(ONE) == [("k", "pi", "3")]
    with pytest.raises(OptionError, match=r"a Holds cannot be copied: .*lock.*in init\(\)"):
        epochs_of(Holds(threading.Lock())).restart()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([Row(k="a", what="b", val=5)], "do not fit its output"),
        ([("a", "b", "c")], r"\('a', 'b', 'c'\) is a tuple, expected a Row"),
        ([Row(k="a", what="b", val="c"), {"k": "a"}], "is a dict, expected a Row"),
        ([None], "None is a NoneType, expected a Row"),
        (None, r"returned None.*iter\(\[\]\)"),
    ],
)
def test_rows_that_are_not_those_of_the_output_are_refused(returned, message):
    class Returns(Tried):
        def handleInputRows(self, key, rows, timerValues):
            return returned

    with pytest.raises(StateError, match=message):
        epochs_of(Returns(None)).run(ONE)


@pytest.mark.parametrize("rows_are", ["row", "pandas"])
def test_a_timer_that_returns_nothing_is_refused(rows_are):
    class Returns(Tried):
        def handleInputRows(self, key, rows, timerValues):
            self.handle.registerTimer(1)
            return iter([])

        def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
            return None

    with pytest.raises(StateError, match="a processor returned None"):
        epochs_of(Returns(None), time_mode="ProcessingTime", rows=rows_are).run(ONE, now=5)


@pytest.mark.parametrize(
    ("value", "kind", "place"),
    [
        (1.5, pa.int64(), "a: 1.5 is a float"),
        (np.float64(1.5), pa.int32(), "a: .*1.5.* is a float64"),
        (decimal.Decimal("1.5"), pa.int64(), "a: .* is a Decimal"),
        (1.5, pa.timestamp("us", "UTC"), "a: 1.5 is a float"),
        (Row(x=1.5), pa.struct([("x", pa.int64())]), "a.x: 1.5 is a float"),
        ([None, [1.5]], pa.list_(pa.list_(pa.int64())), "a, an element, an element: 1.5"),
        ({1.5: 1}, pa.map_(pa.int64(), pa.int64()), "a, a key: 1.5"),
        ({1: 1.5}, pa.map_(pa.int64(), pa.int64()), "a, a value: 1.5"),
    ],
)
def test_fractions_are_not_cut_off(value, kind, place):
    class Returns(Tried):
        def handleInputRows(self, key, rows, timerValues):
            return [Row(a=None), Row(a=value)]

    with pytest.raises(StateError, match=place):
        epochs_of(Returns(None), output=pa.schema([("a", kind)])).run(ONE)


def test_another_keys_null_takes_no_digits_from_a_frame():
    big = 2**53 + 1
    kinds = {"k": pa.string(), "n": pa.int64(), "i": pa.int32(), "f": pa.bool_()}
    schema = pa.schema(list(kinds.items()))

    class Frames(Tried):
        def handleInputRows(self, key, rows, timerValues):
            for frame in rows:
                kinds = " ".join(map(str, frame.dtypes[1:]))
                yield pd.DataFrame({"k": key, "kinds": kinds, "n": [int(frame.n[0])]})

    epochs = epochs_of(Frames(None), output="k string, kinds string, n bigint", rows="pandas")
    batch = rows(("a", big, 1, True), ("b", 5), ("b", None), ("c", big, 1, False), schema=schema)

    assert epochs.run(batch) == [
        ("a", "int64 int64 bool", big),
        ("b", "float64 float64 object", 5),
        ("c", "int64 int64 bool", big),
    ]


class Returns(StatefulProcessor):
    """Puts out what it was given."""

    def __init__(self, *returned: Any) -> None:
        self.returned = returned

    def init(self, handle):
        pass

    def handleInputRows(self, key, rows, timerValues):
        return iter(self.returned)

    def close(self):
        pass


def test_rows_are_matched_by_name():
    returned = Row(val="1", k="a", what=None), Row(k="b", what="w", val="2")
    assert epochs_of(Returns(*returned)).run(ONE) == [("a", None, "1"), ("b", "w", "2")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(k="a", waht="w", val="1"), "a Row has a field 'waht', .* nearest one is 'what'"),
        (Row(k="a", val="1"), "a Row has no field 'what': give it None"),
        (Row(k="a", what="w", val="1", vals="2"), "a field 'vals', .* nearest one is 'val'"),
        (Row("k", "what", "what", "val")("a", "w", "w", "1"), "twice: k, what, what, val"),
        ({"k": "a", "what": "w", "val": "1"}, "is a dict, expected a Row"),
    ],
)
def test_a_row_with_other_fields_is_refused(row, message):
    """Spark makes null what is missing, and drops what is more, without a word."""
    for returned in ([row], [Row(k="b", what="w", val="2"), row]):
        with pytest.raises(StateError, match=message):
            epochs_of(Returns(*returned)).run(ONE)


INNER = pa.struct([("x", pa.int32()), ("word", pa.string())])
NESTED = pa.schema(
    [
        ("one", INNER),
        ("many", pa.list_(INNER)),
        ("by", pa.map_(pa.string(), INNER)),
        ("deep", pa.struct([("in", INNER)])),
    ]
)
NONE = {"one": None, "many": None, "by": None, "deep": None}


def named(**fields: Any) -> Any:
    """A named tuple."""
    return namedtuple("Named", fields)(*fields.values())


@pytest.mark.parametrize(
    "make", [dict, lambda **fields: Row(**fields), named], ids=["dict", "Row", "named tuple"]
)
@pytest.mark.parametrize("wrap", NESTED.names)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": 1, "wrod": "a"}, "a struct has a field 'wrod', .* nearest one is 'word'"),
        ({"x": 1}, "a struct has no field 'word'"),
        ({"x": 1, "word": "a", "y": 2}, "a struct has a field 'y', which is none"),
    ],
)
def test_a_struct_with_other_fields_is_refused(make, wrap, fields, message):
    def whole(inner: Any) -> dict[str, Any]:
        wrapped = {"one": inner, "many": [inner], "by": {"k": inner}, "deep": {"in": inner}}
        return {**NONE, wrap: wrapped[wrap]}

    right = whole(make(word="a", x=1))
    ((row,),) = [epochs_of(Returns(Row(**right)), output=NESTED).run(ONE)]
    assert "'x': 1, 'word': 'a'" in str(row)
    with pytest.raises(StateError, match=f"{wrap}.*: {message}"):
        epochs_of(Returns(Row(**whole(make(**fields)))), output=NESTED).run(ONE)
    frame = pd.DataFrame({name: [value] for name, value in whole(make(**fields)).items()})
    with pytest.raises(StateError, match=f"{wrap}.*: {message}"):
        epochs_of(Returns(frame), output=NESTED, rows="pandas").run(ONE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1,), "Tuple size must be equal"),
        ((1, "a", 2), "Tuple size must be equal"),
        ((1.5, "a"), "one.x: 1.5 is a float"),
        ([("x", 1)], "a struct has no field 'word'"),
        ([("x", 1.5), ("word", "a")], "one.x: 1.5 is a float"),
    ],
)
def test_a_struct_of_another_length_is_refused(value, message):
    with pytest.raises(StateError, match=message):
        epochs_of(Returns(Row(**{**NONE, "one": value})), output=NESTED).run(ONE)


def test_pairs_in_a_struct_are_looked_at_within():
    deep = [("in", [("x", 1), ("wrod", "a")])]
    with pytest.raises(StateError, match=r"deep\.in: a struct has a field 'wrod'"):
        epochs_of(Returns(Row(**{**NONE, "deep": deep})), output=NESTED).run(ONE)


@pytest.mark.parametrize("null", [None, float("nan"), pd.NA, pd.NaT], ids=str)
def test_a_nested_value_that_is_missing_in_a_frame_is_null(null):
    """As pandas writes what is not there, after a merge, say."""
    inner = {"x": 1, "word": "a"}
    full = {"one": inner, "many": [inner], "by": [("k", inner)], "deep": {"in": inner}}
    frame = pd.DataFrame({name: [value, null] for name, value in full.items()}, dtype=object)
    _, row = epochs_of(Returns(frame), output=NESTED, rows="pandas").run(ONE)
    assert row == (None, None, None, None)


def test_a_row_in_a_frame_counts_by_position_so_its_fields_stand_in_order():
    frame = pd.DataFrame({name: [value] for name, value in NONE.items()}, dtype=object)
    frame.at[0, "one"] = Row(word="a", x=1)
    with pytest.raises(StateError, match="in another order than x, word"):
        epochs_of(Returns(frame), output=NESTED, rows="pandas").run(ONE)


@pytest.mark.parametrize("rows_are", [list, tuple])
def test_a_named_tuple_in_a_struct_goes_by_its_names(rows_are):
    """Arrow and Spark take it by position, and exchange its values without a word."""
    inner = named(word="a", x=1)
    fields = {"one": inner, "many": rows_are([inner]), "by": {"k": inner}, "deep": {"in": inner}}
    right = {"x": 1, "word": "a"}
    ((one, many, by, deep),) = epochs_of(Returns(Row(**fields)), output=NESTED).run(ONE)
    assert (one, many, dict(by), deep) == (right, [right], {"k": right}, {"in": right})


def test_a_nested_row_that_has_a_field_twice_is_refused():
    twice = Row("x", "word", "x")(1, "a", 2)
    with pytest.raises(StateError, match="one: a struct has a field twice: x, word, x"):
        epochs_of(Returns(Row(**{**NONE, "one": twice})), output=NESTED).run(ONE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, named(word="a", x=1)), "in another order than x, word, and counts by position"),
        (named(inner=(1, "a"), n=1), "it has its fields in another order than n, inner"),
        ((1, {"x": 1}), "inner: .*has no field 'word': give it None"),
        ((1, {"x": 1, "wrod": "a"}), "'wrod', which is none; the nearest one is 'word'"),
        ((1, {"x": 1, "word": "a", "y": 1}), "has a field 'y', which is none"),
        ((1, (1,)), "has not the 2 fields"),
        ((1, Row(word="a", x=1)), "in another order than x, word, and counts by position"),
        (Row(inner=(1, "a"), n=1), "it has its fields in another order than n, inner"),
        (Row(inner=1, other=(1, "a")), "it has its fields in another order than n, inner"),
        ((1, Row(other=1, x="a")), "in another order than x, word, and counts by position"),
    ],
)
def test_a_value_of_state_with_other_fields_is_refused(value, message):
    """A Row counts by position in state, as in Spark: names in another order are exchanged."""
    with pytest.raises(StateError, match=message):
        tried(
            lambda it, _: it.value.update(value), schema="n int, inner struct<x int, word string>"
        )


def test_a_row_of_one_state_goes_into_another_by_position():
    schema = "n int, inner struct<x int, word string>"
    values = ((1, {"word": "a", "x": 2}), Row(a=1, b=Row(c=2, d="a")), Row(n=1, inner=(2, "a")))
    for value in values:
        text = tried(lambda it, _, v=value: (it.value.update(v), it.value.get()), schema=schema)
        assert "(n=1, inner=Row(x=2, word='a'))" in text or "(1, " in text, text


def test_nested_rows_and_frames_become_the_output():
    output = pa.schema([("at", pa.struct([("x", pa.int32())])), ("ts", pa.timestamp("us", "UTC"))])
    moment = datetime.datetime(2024, 1, 2, 3, 4, 5)  # noqa: DTZ001  naive: of the session

    class Rows(Tried):
        def handleInputRows(self, key, rows, timerValues):
            return [Row(at=Row(x=1), ts=moment), Row(at=None, ts=None)]

    class Frames(Tried):
        def handleInputRows(self, key, rows, timerValues):
            yield pd.DataFrame({"ts": [moment], "at": [{"x": 1}]})

    utc = moment.replace(tzinfo=datetime.UTC)
    assert epochs_of(Rows(None), output=output).run(ONE) == [({"x": 1}, utc), (None, None)]
    rows_out = epochs_of(Frames(None), output=output, rows="pandas", timezone="Asia/Tokyo").run(ONE)
    assert rows_out == [({"x": 1}, utc - datetime.timedelta(hours=9))]


class Everything(StatefulProcessor):
    """Uses all there is, so that a split of the keys among tasks would show."""

    def init(self, handle):
        self.handle = handle
        self.count = handle.getValueState("count", "n bigint", 400)
        self.list = handle.getListState("list", "v string", 300)
        self.map = handle.getMapState("map", "v string", "ms bigint", 200)

    def handleInputRows(self, key, rows, timerValues):
        for row in rows:
            self.count.update(((self.count.get() or (0,))[0] + 1,))
            self.list.appendValue((row.v,))
            self.map.updateValue((row.v,), (row.ms,))
            self.handle.registerTimer(row.ms)
        values = self.count.get(), list(self.list.get()), list(self.map.iterator())
        yield Row(k=key[0], what="rows", val=repr(values))

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        at = expiredTimerInfo.getExpiryTimeInMs()
        if at % 3 == 0:
            self.handle.registerTimer(at + 250)
        values = at, self.count.get(), list(self.list.get()), sorted(self.handle.listTimers())
        yield Row(k=key[0], what="fired", val=repr(values))


@pytest.mark.parametrize("parallelism", [2, 3, 8])
def test_any_number_of_tasks_gives_the_same(parallelism):
    one = epochs_of(Everything(), time_mode="ProcessingTime")
    many = epochs_of(Everything(), time_mode="ProcessingTime", parallelism=parallelism)
    for epoch in range(8):
        batch = rows(
            *((f"key-{(7 * n + epoch) % 11}", f"v{n % 3}", 100 * epoch + 17 * n) for n in range(12))
        )
        outputs = one.run(batch, now=100 * epoch), many.run(batch, now=100 * epoch)

        assert sorted(outputs[0]) == sorted(outputs[1])
        assert one.entries == many.entries


def test_nothing_is_left_of_what_expired():
    epochs = epochs_of(Everything(), time_mode="ProcessingTime")
    epochs.run(rows(*((f"k{n}", "v", 10) for n in range(20))), now=0)
    assert len(epochs.entries) > 100
    for now in (399, 1000):
        epochs.run(NOTHING, now=now)

    assert epochs.entries == {}


def test_a_list_that_expired_in_part_goes_on():
    appended = epochs_of(
        Tried(
            lambda it, rows: (it.list.appendValue((rows[0].ms, "")), list(it.list.get()))[1],
            ttl_ms=100,
        ),
        time_mode="ProcessingTime",
    )
    outputs = [appended.run(rows(("k", "v", now)), now=now)[0][2] for now in (0, 60, 120, 500)]

    assert outputs == [repr([(n, "") for n in kept]) for kept in ([0], [0, 60], [60, 120], [500])]


def test_a_list_keeps_its_elements_when_its_time_to_live_gets_shorter():
    """The older elements were promised to live longer than those that are appended now."""
    output = "k string, what string, val string"

    class Appends(Tried):
        def handleInputRows(self, key, rows, timerValues):
            for row in rows:
                if row.v:
                    self.list.appendValue((1, row.v))
            values = [v for _, v in self.list.get()]
            yield Row(k=key[0], what="", val=f"{values} {self.list.exists()}")

    def step(ttl_ms):
        return row_processor(
            Appends(None, ttl_ms=ttl_ms), output=output, time_mode="ProcessingTime"
        )

    epochs = epochs_of(Appends(None, ttl_ms=100_000), time_mode="ProcessingTime")
    epochs.run(rows(("a", "A"), ("a", "B")), now=1000)
    epochs.restart(step(1000))
    outputs = [
        epochs.run(rows(("a", v)), now=now)[0][2]
        for v, now in (("C", 2000), (None, 5000), ("D", 6000), (None, 102_000))
    ]

    assert outputs == [
        "['A', 'B', 'C'] True",
        "['A', 'B'] True",
        "['A', 'B', 'D'] True",
        "[] False",
    ]
    assert not epochs.entries


WRITES = {
    "value": lambda it, _: it.value.update((1, "")),
    "map": lambda it, _: it.map.updateValue(("m",), (1, "")),
    "list": lambda it, _: it.list.put([(1, "")]),
}


@pytest.mark.parametrize("kind", WRITES)
def test_an_entry_written_again_and_again_has_one_expiry(kind):
    epochs = epochs_of(Tried(WRITES[kind], ttl_ms=1000), time_mode="ProcessingTime")
    sizes = []
    for now in range(5):
        epochs.run(ONE, now=now)
        sizes.append(len(epochs.entries))
    assert sizes == [sizes[0]] * 5

    epochs.run(rows(), now=1003)
    assert len(epochs.entries) == sizes[0], "it was written at 4"
    epochs.run(rows(), now=1004)
    assert not epochs.entries


def test_an_entry_that_is_removed_leaves_no_expiry():
    def write_or_clear(it, taken):
        for state, write in (
            (it.value, lambda: it.value.update((1, ""))),
            (it.map, lambda: it.map.updateValue(("m",), (1, ""))),
            (it.list, lambda: it.list.appendList([(1, ""), (2, "")])),
        ):
            state.clear() if taken[0].v == "clear" else write()

    epochs = epochs_of(Tried(write_or_clear, ttl_ms=1000), time_mode="ProcessingTime")
    epochs.run(rows(("k", "write")), now=0)
    assert epochs.entries
    epochs.run(rows(("k", "clear")), now=10)
    assert not epochs.entries


def test_appending_to_a_long_list_costs_what_is_appended():
    epochs = epochs_of(Tried(lambda it, rows: it.list.appendList([(1, "")] * 50)))
    scans = []
    for _ in range(3):
        view = DictView(epochs.entries)
        epochs.run(ONE)
        scans.append(view.scans)

    assert scans == [0, 0, 0]
    assert len(epochs.entries) == 151


def test_rows_of_one_key_are_handed_over_in_chunks_of_whole_keys(monkeypatch):
    monkeypatch.setattr("tallystick.state.pyspark.rows.CHUNK_ROWS", 3)
    monkeypatch.setattr("tallystick.state.pyspark.processor.TIMER_CHUNK", 2)
    keys = ["a", "b", "a", "c", "a", "a", "d", "d", "e", "b", "a"]
    small = epochs_of(Everything(), time_mode="ProcessingTime")
    batch = rows(*((key, f"v{at}", at) for at, key in enumerate(keys)))
    rows_out = small.run(batch, now=5)
    monkeypatch.undo()

    assert rows_out == epochs_of(Everything(), time_mode="ProcessingTime").run(batch, now=5)
    assert len({row[0] for row in rows_out if row[1] == "rows"}) == len(set(keys))


def test_initial_state_comes_first_and_only_in_the_first_epoch():
    class Starts(Tried):
        def handleInitialState(self, key, initialState, timerValues):
            self.list.appendValue((initialState.start, key[0]))

        def handleInputRows(self, key, rows, timerValues):
            yield Row(k=key[0], what="held", val=repr([n for n, _ in self.list.get()]))

    initial = pa.table({"k": ["b", "a", "b"], "start": [1, 2, 3]})
    epochs = epochs_of(Starts(None), initial_state=initial, parallelism=4)
    batch = rows(("b", "v", 1), ("c", "v", 1))

    assert sorted(epochs.run(batch)) == [("b", "held", "[1, 3]"), ("c", "held", "[]")]
    assert sorted(epochs.run(rows(("a", "v", 1), ("b", "v", 1)))) == [
        ("a", "held", "[2]"),
        ("b", "held", "[1, 3]"),
    ]


def test_initial_state_in_batches_counts_whole():
    class Starts(Tried):
        def handleInitialState(self, key, initialState, timerValues):
            self.list.appendValue((initialState.start, key[0]))

        def handleInputRows(self, key, rows, timerValues):
            yield Row(k=key[0], what="did", val=repr([n for n, _ in self.list.get()]))

    tables = [pa.table({"k": [k], "start": [start]}) for k, start in (("a", 1), ("b", 2), ("a", 3))]
    epochs = epochs_of(Starts(None), initial_state=pa.concat_tables(tables))
    assert epochs.run(rows(("a",), ("b",))) == [("a", "did", "[1, 3]"), ("b", "did", "[2]")]


def test_initial_state_does_not_travel_with_later_epochs():
    initial = pa.table({"k": ["a"] * 1000, "start": range(1000)})
    processor = row_processor(Everything(), output="k string", initial_state=initial)

    assert len(pickle.dumps(processor)) > initial.nbytes
    assert len(pickle.dumps(processor.started())) < 2000
    assert len(pickle.dumps(processor)) > initial.nbytes, "another pipeline may start with it"


def test_initial_state_without_the_key_is_refused():
    with pytest.raises(OptionError, match="no column 'k'"):
        epochs_of(Tried(None), initial_state=pa.table({"start": [1]})).restart()


@pytest.mark.parametrize("wrong", [{"rows": "arrow"}, {"time_mode": "Sometimes"}])
def test_arguments_are_checked(wrong):
    with pytest.raises(OptionError, match=next(iter(wrong.values()))):
        row_processor(Tried(None), output="n int", **wrong)


def test_time_modes_are_read_as_spark_reads_them():
    assert (
        row_processor(Tried(None), output="n int", time_mode="eventtime").time_mode == "EventTime"
    )


def test_moments_in_rows_and_keys_are_in_the_sessions_time_zone():
    schema = pa.schema([("k", pa.timestamp("us", "UTC")), ("v", pa.string()), ("ms", pa.int64())])
    epochs = epochs_of(
        Tried(lambda it, rows: (rows[0].k.hour, rows[0].k.utcoffset())),
        output=pa.schema(
            [("k", pa.timestamp("us", "UTC")), ("what", pa.string()), ("val", pa.string())]
        ),
        key=KeyCodec(schema.empty_table().select(["k"]).schema),
        timezone="Asia/Tokyo",
    )
    moment = datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.UTC)

    outputs = epochs.run(rows((moment, "v", 1), schema=schema))

    assert outputs == [(moment, "did", repr((12, datetime.timedelta(hours=9))))]


GROUPS = KeyGroupRange(2, 9)
DUE = st.tuples(st.integers(2, 9), st.integers(-5, 5), st.sampled_from([b"", b"a", b"\xff\xff"]))


@settings(deadline=None)
@given(st.sets(DUE), st.sets(DUE), st.sets(DUE), st.integers(-6, 6), st.sets(st.integers(0, 12)))
def test_all_that_is_due_is_found_and_nothing_else(committed, put, removed, until, others):
    def build(overlay, entries):
        index = TimeIndex(overlay, 0xFC)
        for group, at, what in entries:
            index.put(group.to_bytes(2, "big"), at, what)
        return index

    before = Overlay(DictView({}))
    build(before, committed)
    entries = dict(zip(*(column.to_pylist() for column in before.changes().columns), strict=True))
    for group in others:  # what else a group has, before and after the index
        entries |= {group.to_bytes(2, "big") + tail: b"x" for tail in (b"\x01a", b"\xfd", b"\xfea")}
    view = DictView(entries)
    index = build(Overlay(view), put)
    for group, at, what in removed:
        index.remove(group.to_bytes(2, "big"), at, what)

    due = index.due(GROUPS, until)

    timers_left = (committed | put) - removed
    assert due == sorted((at, w, g.to_bytes(2, "big")) for g, at, w in timers_left if at <= until)
    assert view.scans <= 1 + 2 * len({g for g, *_ in committed} | (others & set(range(2, 10))))


def test_a_wide_empty_range_is_one_look():
    view = DictView({b"\x00\x07\xfc" + bytes([255] * 8) + b"k": b""})

    assert TimeIndex(Overlay(view), 0xFC).due(KeyGroupRange(0, 32767), 0) == []
    assert view.scans <= 3


STORED = types.StructType.fromJson(
    {
        "type": "struct",
        "fields": [
            {"name": name, "type": kind, "nullable": True, "metadata": {}}
            for name, kind in (
                ("n", "long"),
                ("s", "string"),
                ("b", "binary"),
                ("x", "double"),
                ("day", "date"),
                ("at", "timestamp_ntz"),
                ("amount", "decimal(20,3)"),
                ("flag", "boolean"),
            )
        ],
    }
)
MOMENTS = st.datetimes(datetime.datetime(1, 1, 2), datetime.datetime(9999, 12, 30))  # noqa: DTZ001


@settings(deadline=None)
@given(
    st.tuples(
        st.none() | st.integers(-(2**63), 2**63 - 1),
        st.none() | st.text(),
        st.none() | st.binary(),
        st.none() | st.floats(allow_nan=False),
        st.none() | st.dates(),
        st.none() | MOMENTS,
        st.none() | st.decimals(-(10**16), 10**16, places=3),
        st.none() | st.booleans(),
    )
)
def test_a_value_comes_back_as_it_was(value):
    codec = ValueCodec("state", STORED)

    decoded = codec.decode(codec.encode(value))

    assert decoded == value
    assert [type(part) for part in decoded] == [type(part) for part in value]


def test_what_a_type_cannot_hold_is_refused():
    codec = ValueCodec("state 's'", STORED)
    wrong = {
        "n": 1 << 63,
        "b": "text",
        "x": "1.0",
        "day": "2024-01-01",
        "at": datetime.date(2024, 1, 1),
        "amount": decimal.Decimal(10) ** 17,
        "flag": 1,
    }
    for name, value in wrong.items():
        fields = [value if field == name else None for field in STORED.names]
        with pytest.raises(StateError, match=f": {name}: "):
            codec.encode(tuple(fields))

    with pytest.raises(OptionError, match="interval"):
        ValueCodec("state 's'", types.StructType().add("i", types.CalendarIntervalType()))


def test_floats_are_rounded_as_their_type_is_and_every_number_of_a_double_is_kept():
    codec = ValueCodec("state", types.StructType().add("f", "float").add("d", "double"))

    assert codec.decode(codec.encode((0.1, 0.1))) == (0.10000000149011612, 0.1)
    nan = codec.decode(codec.encode((float("nan"), float("inf"))))
    assert math.isnan(nan[0])
    assert nan[1] == math.inf


@pytest.mark.parametrize(
    ("kind", "equal"),
    [
        ("double", (10, 10.0)),
        ("double", (0.0, -0.0, 0)),
        ("double", (math.nan, -math.nan)),
        ("float", (0.0, -0.0)),
        ("array<double>", ([1, 0.0], [1.0, -0.0])),
        ("decimal(5,2)", (decimal.Decimal(0), decimal.Decimal("-0.001"))),
    ],
)
def test_equal_keys_of_a_map_are_one_entry(kind, equal):
    if kind.startswith("array"):
        key = types.StructType().add("k", types.ArrayType(types.DoubleType()))
    else:
        key = types.StructType().add("k", kind)

    class Counts(Tried):
        def init(self, handle):
            self.map = handle.getMapState("map", key, "n int")

        def handleInputRows(self, _, rows, timerValues):
            for equal_key in equal:
                seen = self.map.getValue((equal_key,))
                self.map.updateValue((equal_key,), ((seen.n if seen else 0) + 1,))
            yield Row(k="", what="", val=repr([n for (n,) in self.map.values()]))

    assert epochs_of(Counts(None)).run(ONE) == [("", "", f"[{len(equal)}]")]


def test_keys_come_in_their_order_and_rows_in_theirs():
    class Orders(Tried):
        def handleInputRows(self, key, rows, timerValues):
            yield Row(k=key[0], what="rows", val=",".join(row.v for row in rows))

    batch = rows(
        ("é", "1", 0), ("b", "2", 0), (None, "3", 0), ("B", "4", 0), ("b", "5", 0), ("", "6", 0)
    )

    rows_out = epochs_of(Orders(None)).run(batch)

    assert [(k, v) for k, _, v in rows_out] == [
        (None, "3"),
        ("", "6"),
        ("B", "4"),
        ("b", "2,5"),
        ("é", "1"),
    ]
    assert Counter(k for k, *_ in rows_out).most_common(1)[0][1] == 1


class OfOneBuffer(StatefulProcessor):
    """Yields rows that hold the same list, map, bytes and the like, filled anew for each."""

    def init(self, handle):
        self.many, self.by_name, self.data = [0], {"n": [0]}, bytearray(1)
        self.numbers, self.plain = np.zeros(1, np.int64), array("q", [0])
        self.lists = np.array([self.many, None], object)[:1]

    def handleInputRows(self, key, rows, timerValues):
        for row in rows:
            self.many[0] = self.by_name["n"][0] = self.data[0] = row.ms
            self.numbers[0] = self.plain[0] = row.ms
            part = Row(n=self.plain)
            yield Row(
                l=self.many, m=self.by_name, d=self.data, a=self.numbers, b=self.lists, s=part
            )


def test_rows_of_a_processor_that_uses_its_lists_again_stay_as_they_were_yielded():
    """They wait for those of later keys."""
    output = "l array<bigint>, m map<string,array<bigint>>, d binary, a array<bigint>"
    output += ", b array<array<bigint>>"
    step = epochs_of(OfOneBuffer(), output=f"{output}, s struct<n:array<bigint>>")
    returned = step.run(rows(("a", "", 1), ("a", "", 2), ("b", "", 3)))
    assert returned == [([n], [("n", [n])], bytes([n]), [n], [[n]], {"n": [n]}) for n in (1, 2, 3)]
