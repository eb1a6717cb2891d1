"""Rows of several outputs, on the way from functions to the sinks that get them."""

from collections import defaultdict
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.codec.json.write import JsonWriter
from tallystick.codec.rows import RowLayout
from tallystick.errors import OptionError, RecordError
from tallystick.state.functions.keyed_batch import KeyedBatch, Update
from tallystick.state.functions.processing import SideRows
from tallystick.state.functions.vectorised import vectorised
from tallystick.tasks.outputs import (
    OF_MAIN,
    DeadLetters,
    DeclaredFunction,
    Rows,
    Selection,
    check_output_name,
    passed_by,
    passing,
)
from tallystick.tasks.read import EncodePlan, Route, apply, send
from tallystick.tasks.write import Branch, FanOut
from tests.examples import drawn
from tests.keyed_job import EVENTS, Job, events, routed, step, values_of
from tests.run.test_sink_task import Notebook, Owner

ALERTS = pa.schema([("user", pa.string()), ("why", pa.string())])
EVEN, ODD = (Selection("", lambda rows, rest=rest: is_rest(rows, rest)) for rest in (0, 1))


def is_rest(rows: pa.RecordBatch, rest: int) -> pa.BooleanArray:
    return pc.equal(pc.bit_wise_and(rows["n"], 1), rest)


def alerts_of(rows: pa.RecordBatch, why: str = "thirds") -> pa.RecordBatch:
    """An alert for each third number."""
    third = rows.filter(
        pc.equal(pc.subtract(rows["n"], pc.multiply(pc.divide(rows["n"], 3), 3)), 0)
    )
    return pa.record_batch({"user": third["user"], "why": pa.array([why] * third.num_rows)})


def splitting(rows: pa.RecordBatch) -> Rows:
    return Rows(rows, {"alerts": alerts_of(rows)})


SPLITTING = DeclaredFunction(splitting, {"alerts": ALERTS})


def route(topic: str, selection: Selection = OF_MAIN, count: int = 1, key: str = "user") -> Route:
    return Route(
        RowLayout({topic: count}, topic, value=JsonWriter(), key=key), "none", 900_000, selection
    )


def written(frames) -> dict[str, list[dict]]:
    """By topic, in the order of the writers."""
    rows_by_topic = defaultdict(list)
    ordered = sorted(frames, key=lambda frame: (frame.source, frame.sequence))
    for frame in ordered:
        if frame.record_count:
            rows_by_topic[frame.topic] += values_of(frame)
    return dict(rows_by_topic)


@drawn(60)
@given(st.lists(st.lists(st.integers(0, 30), max_size=9), max_size=4))
def test_every_sink_of_the_transaction_gets_its_rows_in_order(batches):
    """Two of the main output by predicates, two of the side output, one of them by a predicate."""
    none = Selection("alerts", lambda rows: pc.equal(rows["user"], "nobody"))
    plan = EncodePlan(
        (
            route("even", EVEN),
            route("odd", ODD),
            route("alerts", Selection("alerts")),
            route("none", none),
        ),
        1,
        (SPLITTING,),
    )
    numbers = [n for batch in batches for n in batch]

    frames = list(send(plan, [events(*((f"u{n}", n) for n in batch)) for batch in batches], 0))
    rows_by_name = written(frames)

    assert [row["n"] for row in rows_by_name.get("even", [])] == [n for n in numbers if n % 2 == 0]
    assert [row["n"] for row in rows_by_name.get("odd", [])] == [n for n in numbers if n % 2]
    users = [row["user"] for row in rows_by_name.get("alerts", [])]
    assert users == [f"u{n}" for n in numbers if n % 3 == 0]
    assert "none" not in rows_by_name
    assert [frame.sequence for frame in frames if frame.record_count] == list(
        range(sum(1 for frame in frames if frame.record_count))
    )


def test_a_side_output_passes_by_the_functions_after_it_and_null_is_no_match():
    twice = DeclaredFunction(
        lambda rows: Rows(None, {"alerts": alerts_of(rows, "again")}), {"alerts": ALERTS}
    )
    rows = events(("a", 3), ("b", 4))

    outputs = list(apply((SPLITTING, twice, splitting), rows))

    assert [output.rows["why"].to_pylist() for output in outputs] == [["again"], ["thirds"]]
    nothing = Selection("", lambda rows: pa.nulls(rows.num_rows, pa.bool_()))
    assert nothing.of(rows) is None


def test_rows_that_pass_by_are_what_they_were_and_no_topic_has_their_name():
    for sent in (SideRows("alerts", alerts_of(events(("a", 3)))), DeadLetters(events(("a", 1)))):
        frame = passing(sent, 1, 2, 3, 4)
        assert frame[:3] == (1, 2, 3)
        assert "/" in frame.topic
        assert passed_by(frame) == sent


def test_side_rows_of_a_first_step_pass_by_a_second_whatever_the_parallelism():
    """And those of functions in the reader, of the second step, of functions after it; letters."""

    def numbering(batch: KeyedBatch) -> Update:
        numbers, totals = batch.running_count(start=batch.held("n"))
        columns = {"user": batch.rows["user"], "n": batch.rows["n"], "at": numbers}
        main = pa.record_batch(columns, schema=EVENTS)
        return Update(main, {"n": totals}, outputs={"seen": alerts_of(batch.rows, "seen")})

    processor = vectorised(numbering, state="n bigint", outputs={"seen": ALERTS})
    first = step(processor, outputs={"seen": ALERTS}, functions=(SPLITTING,))
    second = replace(first, uid="again")
    routes = tuple(route(f"{name}-out", Selection(name), 3) for name in ("alerts", "seen"))
    for parallelism in (1, 2, 3):
        job = Job((first, second), routes=routes)
        for first_number in (0, 20):  # the second epoch goes on from the state of the first
            numbers = range(first_number, first_number + 20)
            early = SideRows("seen", pa.record_batch({"user": ["r"], "why": ["early"]}))
            letters = DeadLetters(pa.record_batch({"value": [b"x"]}))
            planned = job.plan(parallelism=parallelism)
            sent = [
                [early, events(*((f"u{n % 4}", n) for n in numbers if n % 2 == half)), letters]
                for half in (0, 1)
            ]
            frames = [f for share in job.written(planned, sent) for f in share]
            rows_by_topic = written(frames)
            thirds = [f"u{n % 4}" for n in numbers if n % 3 == 0]
            # Both steps see each number, and so do the functions behind both.
            assert sorted(row["user"] for row in rows_by_topic["alerts-out"]) == sorted(2 * thirds)
            seen = sorted(row["user"] for row in rows_by_topic["seen-out"])
            assert seen == sorted(["r", "r", *2 * thirds])
            assert [row["dead"] for row in rows_by_topic["dead"]] == ["x", "x"]
            assert sorted(row["n"] for row in rows_by_topic["out"]) == list(numbers)


def test_rows_of_a_reader_keep_their_order_past_a_keyed_step():
    job = Job(
        (step(vectorised(lambda batch: Update(), state="")),),
        routes=(route("alerts-out", Selection("alerts")),),
    )
    sent = [
        SideRows("alerts", pa.record_batch({"user": ["a"], "why": [str(number)]}))
        for number in range(9)
    ]
    planned = job.plan(parallelism=3)
    frames = [f for share in job.written(planned, [sent[:5], sent[5:]]) for f in share]
    assert [row["why"] for row in written(frames)["alerts-out"]] == [str(n) for n in range(9)]


def test_participants_get_their_output_alone_and_begin_nothing_without_rows():
    main, alerts, even, none = (Notebook(name) for name in ("main", "alerts", "even", "none"))
    selections = {
        "alerts": Selection("alerts"),
        "even": EVEN,
        "none": Selection("", lambda rows: pa.array([False] * rows.num_rows)),
    }
    branches = tuple(
        Branch(Owner("p", sink.name, "l"), sink, selection=selections.get(sink.name, OF_MAIN))
        for sink in (main, alerts, even, none)
    )
    encode = EncodePlan((route("out"), route("alerts-out", Selection("alerts"))), 1)
    outlet = FanOut(branches, encode, 7, (SPLITTING,))

    frames = list(send(outlet, [events(*(("u", n) for n in range(7)))], 4))

    assert main.calls == ["begin 7/4/0", "write 7", "prepare"]
    assert alerts.calls == ["begin 7/4/0", "write 3", "prepare"]
    assert even.calls == ["begin 7/4/0", "write 4", "prepare"]
    assert none.calls == []
    assert {topic: len(rows) for topic, rows in written(frames).items()} == {
        "out": 7,
        "alerts-out": 3,
    }
    assert len(routed(frames, 1)[0]) == len(frames)


def in_step(outputs: dict) -> Job:
    def putting_out(batch: KeyedBatch) -> Update:
        return Update(outputs=outputs)

    processor = vectorised(putting_out, state="", outputs={"alerts": ALERTS})
    return Job((step(processor, outputs={"alerts": ALERTS}),))


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        ({"alarms": alerts_of(events())}, OptionError, "'alarms', and declares alerts"),
        ({"alerts": events(("a", 1))}, OptionError, "output 'alerts': column 'why' is not there"),
        (
            {"alerts": pa.record_batch({"user": ["a"], "why": [1.5]})},
            RecordError,
            "column 'why' is double, and was declared string",
        ),
        ({"alerts": None}, OptionError, r"Update.outputs\['alerts'\] is a NoneType"),
    ],
)
def test_side_rows_that_are_not_as_declared_are_refused(outputs, error, message):
    job = in_step(outputs)
    with pytest.raises(error, match=message):
        job.run([events(("a", 1))])
    if outputs["alerts" if "alerts" in outputs else "alarms"] is not None:
        mapped = DeclaredFunction(lambda rows: Rows(rows, outputs), {"alerts": ALERTS})
        with pytest.raises(error, match=message):
            list(apply((mapped,), events(("a", 1))))


def test_outputs_without_names_are_refused():
    rows = events(("a", 1))
    with pytest.raises(OptionError, match=r"Rows\(outputs=.*expected a dict"):
        Rows(rows, rows)
    with pytest.raises(OptionError, match=r"vectorised\(outputs=\['alerts'\]\): expected a dict"):
        vectorised(lambda _: Update(), state="", outputs=["alerts"])
    job = Job((step(vectorised(lambda _: Update(outputs=rows), state="")),))
    with pytest.raises(OptionError, match=r"Update\.outputs is RecordBatch"):
        job.run([rows])


def test_a_function_of_batches_that_declares_nothing_has_no_side_outputs():
    with pytest.raises(
        OptionError, match=r"map_batches splitting puts out rows for 'alerts'.*none"
    ):
        list(apply((splitting,), events(("a", 1))))
    with pytest.raises(OptionError, match=r"returned list: expected .*ts\.Rows"):
        list(apply((lambda rows: [rows],), events(("a", 1))))


@pytest.mark.parametrize(
    "column", [None, True, pa.array([1]), pa.array([True, False]), pa.chunked_array([[1]])]
)
def test_a_predicate_that_returns_no_column_of_booleans_is_refused(column):
    with pytest.raises(OptionError, match=r"when\(\): the predicate returned"):
        Selection("", lambda rows: column).of(events(("a", 1)))


@pytest.mark.parametrize("name", ["main", "", "a b", "dead letters", "_x", "ä", "x" * 31, "1st"])
def test_a_name_that_write_could_not_have_is_refused(name):
    with pytest.raises(OptionError, match="step x"):
        check_output_name(name, "step x")
