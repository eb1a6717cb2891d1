"""What a state means is declared with it: no argument that decides what lies in it may change."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import tallystick as ts
from tallystick.errors import OptionError
from tallystick.state.catalog import StateField, StepState
from tallystick.state.compatibility import settle
from tallystick.state.functions.aggregates import Aggregate
from tallystick.state.functions.inputs import KeyedInput, KeyedInputs
from tallystick.state.functions.processing import DELETED, StateDeclaration
from tallystick.state.functions.vectorised import ByColumns
from tallystick.state.keys import KeyCodec
from tallystick.state.meaning import Change, changes, meaning_from_json

KEY = KeyCodec(pa.schema([("u", pa.string())]))
ROWS = pa.schema(
    [
        ("u", pa.string()),
        ("a", pa.float64()),
        ("b", pa.float64()),
        ("n", pa.int64()),
        ("s", pa.string()),
        ("at", pa.int64()),
    ]
)
SIDE = pa.schema(
    [
        ("u", pa.string()),
        ("v", pa.int64()),
        ("w", pa.int64()),
        ("gone", pa.bool_()),
        ("void", pa.bool_()),
        ("at", pa.int64()),
    ]
)
TABLE = KeyedInputs([KeyedInput("l", SIDE, ("u",), "at"), KeyedInput("r", SIDE, ("u",), "at")])
TUMBLING = ts.tumbling(1000)


def declared(function: Any, rows: pa.Schema | None = None) -> Any:
    if rows is None:
        rows = TABLE.columns if getattr(function, "carried", None) is not None else ROWS
    processor = function.make(rows) if isinstance(function, ByColumns) else function
    return processor.declared(KEY)


def start(old: Any, new: Any) -> tuple[StateField, ...]:
    """Go on from the state of one function with another one, as a start does."""
    fields, next_id = settle("step", old, None)
    before = StepState("step", 16, 1, KEY.schema_text, 1, fields, next_id)
    return settle("step", new, StepState.from_json(before.to_json()))[0]


def by(one: Aggregate) -> Any:
    return ts.windowed(TUMBLING, {"x": one})


def per_key(one: Aggregate) -> Any:
    return ts.aggregate({"x": one})


def own(reads: str, *names: str) -> Any:
    return by(
        ts.vectorised_aggregate(
            add=lambda batch: {},
            merge=lambda batch: {},
            result=lambda lines: lines.column(0),
            accumulators=", ".join(f"{name} double" for name in names),
            type="double",
            reads=[reads],
        )
    )


def upsert(**arguments: Any) -> Any:
    return ts.upsert_join("l", "r", **arguments)


def interval(left_input: str = "l", right: str = "r", upper: int = 1, how: str = "inner") -> Any:
    return ts.interval_join(left_input, right, lower=0, upper=upper, how=how)


def of_state(schema: str = "x double") -> Any:
    return ts.vectorised(lambda batch: ts.Update(), state=schema)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "sum, maximum": (by(ts.sum("a")), by(ts.maximum("a")), 'aggregates.x.*maximum."a"'),
    "maximum, minimum": (by(ts.maximum("a")), by(ts.minimum("a")), 'minimum."a".*maximum."a"'),
    "a column": (by(ts.sum("a")), by(ts.sum("b")), 'sum."b".*sum."a"'),
    "first, last": (by(ts.first_value("a")), by(ts.last_value("a")), "last_value.*first_value"),
    "an average": (by(ts.average("a")), by(ts.average("b")), 'average."b"'),
    "a list": (by(ts.collect("a")), by(ts.collect("b")), 'collect."b"'),
    "quantiles": (by(ts.quantiles("a", at=[0])), by(ts.quantiles("b", at=[0])), 'quantiles."b"'),
    "distinct": (
        by(ts.approximate_distinct_count("a")),
        by(ts.approximate_distinct_count("b")),
        'distinct_count."b"',
    ),
    "a count, a sum": (by(ts.count()), by(ts.sum("n")), r'sum."n".*count\(\)'),
    "two columns exchanged": (
        ts.windowed(TUMBLING, {"x": ts.sum("a"), "y": ts.sum("b")}),
        ts.windowed(TUMBLING, {"x": ts.sum("b"), "y": ts.sum("a")}),
        'aggregates.x is now sum."b".*; aggregates.y is now sum."a"',
    ),
    "own columns": (own("a", "low"), own("b", "low"), r'reads=\["b"\].*reads=\["a"\]'),
    "own accumulators": (own("a", "low"), own("a", "high"), r'accumulators=\["high"\]'),
    "sessions": (
        ts.windowed(ts.session(10), {"x": ts.sum("a")}),
        ts.windowed(ts.session(10), {"x": ts.maximum("a")}),
        "aggregates.x",
    ),
    "a session's gap": (
        ts.windowed(ts.session(10), {"x": ts.count()}),
        ts.windowed(ts.session(11), {"x": ts.count()}),
        "a gap of 10000 us",
    ),
    "count windows": (
        ts.windowed(ts.count_window(5), {"x": ts.first_value("a")}),
        ts.windowed(ts.count_window(5), {"x": ts.last_value("a")}),
        "aggregates.x",
    ),
    "a count window's size": (
        ts.windowed(ts.count_window(5), {"x": ts.count()}),
        ts.windowed(ts.count_window(6), {"x": ts.count()}),
        "count windows of 5 rows",
    ),
    "aggregate": (per_key(ts.sum("a")), per_key(ts.maximum("a")), 'columns.x is now maximum."a"'),
    "aggregate's column": (per_key(ts.last_value("a")), per_key(ts.last_value("b")), "columns.x"),
    "aggregate, own function": (per_key(ts.sum("a")), of_state(), "function is now a function"),
    "own function, aggregate": (of_state(), per_key(ts.sum("a")), "function is now aggregate"),
    "deduplicate, own function": (ts.deduplicate(), of_state("seen boolean"), "deduplicate"),
    "top n": (ts.top_n(3, "a"), ts.top_n(5, "a"), "n is now 5, .* with 3"),
    "top n's column": (ts.top_n(3, "a"), ts.top_n(3, "b"), 'column is now "b"'),
    "a gap": (ts.sessions(10, "at"), ts.sessions(20, "at"), "gap_ms is now 20, .* with 10"),
    "a time": (ts.sessions(10, "at"), ts.sessions(10, "n"), 'time_column is now "n"'),
    "newest by, arrival": (
        upsert(newest_by={"l": "v"}),
        upsert(),
        r'newest_by\["l"\] is now the order of arrival, .* with "v"',
    ),
    "arrival, newest by": (upsert(), upsert(newest_by={"r": "v"}), r'newest_by\["r"\] is now "v"'),
    "newest by": (upsert(newest_by={"l": "v"}), upsert(newest_by={"l": "w"}), 'now "w".* "v"'),
    "deleted": (upsert(deleted={"r": "gone"}), upsert(deleted={"r": "void"}), 'now "void".*"gone"'),
    "no longer deleted": (upsert(deleted={"r": "gone"}), upsert(), "is now no column"),
    "an upsert join's how": (upsert(how="left"), upsert(how="right"), 'how is now "right"'),
    "an interval join's how": (interval(how="left"), interval(how="inner"), "inner side"),
    "a temporal join's how": (
        ts.temporal_join("l", "r"),
        ts.temporal_join("l", "r", how="left"),
        'how is now "left", .* with "inner"',
    ),
    "sides exchanged": (interval("l", "r"), interval("r", "l"), 'left is now "r", .* with "l"'),
    "upsert sides": (upsert(), ts.upsert_join("r", "l"), 'left is now "r"'),
    "temporal sides": (ts.temporal_join("l", "r"), ts.temporal_join("r", "l"), 'left is now "r"'),
    "another join": (interval(), ts.window_join("l", "r", size=1), "interval_join"),
}

OTHER_FUNCTIONS: dict[str, Any] = {
    "aggregate": per_key(ts.sum("a")),
    "windowed": by(ts.count()),
    "session windows": ts.windowed(ts.session(1000), {"x": ts.count()}),
    "count_window": ts.windowed(ts.count_window(3), {"x": ts.count()}),
    "deduplicate": ts.deduplicate(1000),
    "sessions": ts.sessions(1000, "at"),
    "top_n": ts.top_n(3, "a"),
    "interval_join": interval(),
    "temporal_join": ts.temporal_join("l", "r"),
    "upsert_join": upsert(),
    "vectorised": of_state(),
}
"""A function of each kind; a step takes up the state of none but its own."""
OF_A_PROCESSOR = (StateDeclaration("seen", "value", "", "{}"),)
"""What a StatefulProcessor of a user's declares."""


@pytest.mark.parametrize("old", OTHER_FUNCTIONS)
def test_no_function_leaves_the_state_of_another_one_where_it_lies(old: str) -> None:
    """Also where they call it by other names, so that nothing of it would be read ever again."""
    before = declared(OTHER_FUNCTIONS[old])
    for new, function in OTHER_FUNCTIONS.items():
        if new != old:
            with pytest.raises(OptionError, match=r"step step: .*give the step a new uid"):
                start(before, declared(function))
    if old != "vectorised":
        for own in (OF_A_PROCESSOR, ()):
            with pytest.raises(OptionError, match=r"now a function of your own, .*deleteIfExists"):
                start(before, own)
        with pytest.raises(OptionError, match=r"'seen' that was made with a function of your own"):
            start(OF_A_PROCESSOR, before)


def test_a_function_of_your_own_may_drop_what_it_finds_and_forget_its_own_states() -> None:
    before = declared(OTHER_FUNCTIONS["aggregate"])
    dropped = StateDeclaration(before[0].name, DELETED, "", "")
    other = StateDeclaration("other", "list", "", "{}")

    assert [field.name for field in start(before, (*OF_A_PROCESSOR, dropped))] == ["seen"]
    assert [field.name for field in start(OF_A_PROCESSOR, (other,))] == ["seen", "other"]
    assert [field.name for field in start(OF_A_PROCESSOR, ())] == ["seen"]


FREE: dict[str, tuple[Any, Any]] = {
    "lateness, output": (
        by(ts.count()),
        ts.windowed(
            TUMBLING, {"x": ts.count()}, emit="update", allowed_lateness="1 hour", late="late"
        ),
    ),
    "which quantiles": (by(ts.quantiles("a", at=[0.5])), by(ts.quantiles("a", at=[0.1, 0.9]))),
    "each, keep": (
        per_key(ts.sum("a")),
        ts.aggregate({"x": ts.sum("a")}, each="record", keep=["at"]),
    ),
    "when a key is new": (ts.deduplicate(1000), ts.deduplicate(2000)),
    "an interval": (interval(upper=1), interval(upper=9)),
    "a window of a join": (
        ts.window_join("l", "r", size=10),
        ts.window_join("l", "r", size=20, offset=-5),
    ),
    "a user's function": (of_state(), ts.vectorised(lambda batch: ts.Update(), state="x double")),
    "its columns": (
        of_state(),
        ts.vectorised(lambda batch: ts.Update(), state="x double", reads=["a"]),
    ),
    "the same windows": (
        ts.windowed(ts.hopping(120, every=60, offset=-50), {"x": ts.count()}),
        ts.windowed(ts.hopping(120, every=60, offset=70), {"x": ts.count()}),
    ),
}


@pytest.mark.parametrize(("old", "new", "message"), REFUSED.values(), ids=REFUSED)
def test_another_meaning_is_refused_by_the_argument(old: Any, new: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as refused:
        start(declared(old), declared(new))
    for remedy in ("step step: ", "give the step a new uid", "allow_dropped_state=['step']"):
        assert remedy in str(refused.value)
    assert start(declared(old), declared(old))
    assert start(declared(new), declared(new))


@pytest.mark.parametrize(("old", "new"), FREE.values(), ids=FREE)
def test_other_arguments_are_free(old: Any, new: Any) -> None:
    assert start(declared(old), declared(new))


@pytest.mark.parametrize(("old", "new", "message"), REFUSED.values(), ids=REFUSED)
def test_a_checkpoint_without_meanings_is_taken_up_and_says_them_from_then_on(
    old: Any, new: Any, message: str
) -> None:
    """As release 0.1.0 wrote them: what it does not say is believed, once."""
    unknown = [replace(state, meaning=()) for state in declared(new)]
    fields, next_id = settle("step", unknown, None)
    before = StepState("step", 16, 1, KEY.schema_text, 1, fields, next_id)
    assert all("meaning" not in field for field in before.to_json()["fields"])
    settled, _ = settle("step", declared(new), StepState.from_json(before.to_json()))
    assert [field.meaning for field in settled] == [state.meaning for state in declared(new)]


def test_an_argument_that_the_release_before_did_not_know_is_taken_up() -> None:
    states = declared(ts.top_n(3, "a"))
    fewer = [replace(state, meaning=state.meaning[:-1]) for state in states]
    assert start(fewer, states)[0].meaning == states[0].meaning


def test_the_texts_are_frozen() -> None:
    """They lie in checkpoints: another text for the same arguments would refuse every start."""
    aggregates = {
        "count": ts.count(),
        "sum": ts.sum("a"),
        "least": ts.minimum("a"),
        "most": ts.maximum('"b"'),
        "first": ts.first_value("ü"),
        "last": ts.last_value("a"),
        "average": ts.average("a"),
        "texts": ts.approximate_distinct_count("s"),
        "numbers": ts.approximate_distinct_count("n"),
        "floats": ts.approximate_distinct_count("a"),
        "quantiles": ts.quantiles("a", at=[0.5]),
        "all": ts.collect("a"),
    }
    rows = pa.schema([*ROWS, pa.field('"b"', pa.int64()), pa.field("ü", pa.int64())])
    (state,) = declared(ts.windowed(TUMBLING, aggregates), rows)
    assert state.meaning == (
        ("function", "windowed"),
        ("aggregates.count", "count()"),
        ("aggregates.sum", 'sum("a")'),
        ("aggregates.least", 'minimum("a")'),
        ("aggregates.most", 'maximum("\\"b\\"")'),
        ("aggregates.first", 'first_value("ü")'),
        ("aggregates.last", 'last_value("a")'),
        ("aggregates.average", 'average("a")'),
        ("aggregates.texts", 'approximate_distinct_count("s") of texts in 4096 registers'),
        (
            "aggregates.numbers",
            'approximate_distinct_count("n") of whole numbers in 4096 registers',
        ),
        ("aggregates.floats", 'approximate_distinct_count("a") of floats in 4096 registers'),
        ("aggregates.quantiles", 'quantiles("a") in buckets of 1/128'),
        ("aggregates.all", 'collect("a")'),
    )
    texts: dict[str, tuple[Any, Mapping[str, str]]] = {
        "windowed": (
            own("a", "low", "high"),
            {"aggregates.x": 'vectorised_aggregate(reads=["a"], accumulators=["low", "high"])'},
        ),
        "aggregate": (per_key(ts.sum("a")), {"columns.x": 'sum("a")'}),
        "deduplicate": (ts.deduplicate(), {}),
        "top_n": (ts.top_n(3, "a"), {"n": "3", "column": '"a"'}),
        "sessions": (ts.sessions(10, "at"), {"gap_ms": "10", "time_column": '"at"'}),
        "a function of your own": (of_state(), {}),
        "interval_join": (interval(), {"left": '"l"', "right": '"r"', "how": '"inner"'}),
        "window_join": (
            ts.window_join("l", "r", size=1, how="full"),
            {"left": '"l"', "right": '"r"', "how": '"full"'},
        ),
        "temporal_join": (
            ts.temporal_join("l", "r", how="left"),
            {"left": '"l"', "right": '"r"', "how": '"left"'},
        ),
        "upsert_join": (
            upsert(how="right", newest_by={"l": "v"}, deleted={"r": "gone"}),
            {
                "left": '"l"',
                "right": '"r"',
                "how": '"right"',
                'newest_by["l"]': '"v"',
                'deleted["l"]': "no column",
                'newest_by["r"]': "the order of arrival",
                'deleted["r"]': '"gone"',
            },
        ),
    }
    for function, (function_made, arguments) in texts.items():
        for state in declared(function_made):
            assert state.meaning == (("function", function), *arguments.items())


KEPT, FREELY, COLUMNS = "in the meaning", "may change", "in the columns or the kind of the state"
SUCCESSION = ("renamed", "defaults", "previous_uid")
ARGUMENTS: dict[Callable[..., Any], dict[str, str]] = {
    ts.aggregate: {"columns": KEPT, "each": FREELY, "keep": FREELY},
    ts.deduplicate: {"forget_after_ms": FREELY},  # whether there is one: in the columns
    ts.top_n: {"n": KEPT, "column": KEPT, "type": COLUMNS},
    ts.sessions: {"gap_ms": KEPT, "time_column": KEPT},
    ts.windowed: {
        "windows": COLUMNS,
        "aggregates": KEPT,
        "time": COLUMNS,  # the time mode of the step
        "emit": FREELY,
        "allowed_lateness": FREELY,
        "late": FREELY,
    },
    ts.interval_join: {
        "left": KEPT,
        "right": KEPT,
        "lower": FREELY,
        "upper": FREELY,
        "how": KEPT,
        "columns": COLUMNS,
    },
    ts.window_join: {
        "left": KEPT,
        "right": KEPT,
        "size": FREELY,
        "offset": FREELY,
        "how": KEPT,
        "columns": COLUMNS,
    },
    ts.temporal_join: {"left": KEPT, "right": KEPT, "how": KEPT, "columns": COLUMNS},
    ts.upsert_join: {
        "left": KEPT,
        "right": KEPT,
        "how": KEPT,
        "newest_by": KEPT,
        "deleted": KEPT,
        "columns": COLUMNS,
    },
    ts.vectorised: {
        "function": FREELY,
        "state": COLUMNS,
        "time_mode": COLUMNS,
        "reads": FREELY,
        "output": FREELY,
        "outputs": FREELY,
    },
    ts.co_process: {"function": FREELY, "state": COLUMNS, "time_mode": COLUMNS, "output": FREELY},
    ts.tumbling: {"size": COLUMNS, "offset": COLUMNS, "time_zone": COLUMNS},
    ts.hopping: {"size": COLUMNS, "every": COLUMNS, "offset": COLUMNS, "time_zone": COLUMNS},
    ts.cumulative: {"size": COLUMNS, "step": COLUMNS, "offset": COLUMNS, "time_zone": COLUMNS},
    ts.session: {"gap": COLUMNS},
    ts.count_window: {"size": COLUMNS, "every": COLUMNS},
    ts.count: {},
    ts.sum: {"column": KEPT, "type": COLUMNS},
    ts.minimum: {"column": KEPT, "type": COLUMNS},
    ts.maximum: {"column": KEPT, "type": COLUMNS},
    ts.first_value: {"column": KEPT},
    ts.last_value: {"column": KEPT, "type": COLUMNS},
    ts.average: {"column": KEPT},
    ts.approximate_distinct_count: {"column": KEPT},
    ts.quantiles: {"column": KEPT, "at": FREELY},
    ts.collect: {"column": KEPT},
    ts.vectorised_aggregate: {
        "add": FREELY,
        "merge": FREELY,
        "result": FREELY,
        "accumulators": KEPT,
        "type": FREELY,
        "reads": KEPT,
    },
    ts.broadcast: {
        "source": FREELY,
        "key": COLUMNS,
        "uid": FREELY,
        "delete": FREELY,
        **dict.fromkeys(SUCCESSION, FREELY),
    },
    ts.list_state: {
        "columns": COLUMNS,
        "uid": FREELY,
        "union": FREELY,
        **dict.fromkeys(SUCCESSION, FREELY),
    },
}


@pytest.mark.parametrize("function", ARGUMENTS)
def test_it_is_decided_for_each_argument(function: Callable[..., Any]) -> None:
    """A new one too: is what lies in the state another thing with another value."""
    assert ARGUMENTS[function].keys() == inspect.signature(function).parameters.keys()


def test_only_what_both_say_is_compared() -> None:
    before, now = (("a", "1"), ("b", "2")), (("b", "3"), ("c", "4"))
    assert list(changes(before, now)) == [Change("b", "2", "3")]
    assert list(changes((), now)) == []


@pytest.mark.parametrize("value", [5, "ab", [["a"]], [["a", 1]], [["a", "b", "c"]], ["ab"], {}])
def test_a_manifest_with_another_thing_in_its_place_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="expected pairs of texts"):
        meaning_from_json(value)
