"""Keyed steps before anything starts: what is read for them, and what is refused."""

from dataclasses import replace

import pyarrow as pa
import pytest

import tallystick as ts
from tallystick.codec.json.read import JsonReader
from tallystick.codec.layout import Layout
from tallystick.errors import OptionError
from tallystick.pipeline.keyed import keyed_steps, lean_layout
from tallystick.state.functions.processing import EVENT_TIME, NO_TIME, PROCESSING_TIME
from tallystick.tasks.keyed import KeyedStep
from tallystick.tasks.steps import Process, Transform, arrange

EVENTS = pa.schema([("user", pa.string()), ("at", pa.int64()), ("seen_at", pa.int64())])


def planned(processor, **settings) -> KeyedStep:
    """Only DDL needs Spark, and DataFrame code."""
    process = Process(None, ("user",), processor, output=None, **settings)
    (step,) = keyed_steps(None, arrange((process,), EVENTS))
    return step


def test_a_field_of_the_value_may_be_called_headers():
    fields = pa.schema([("user", pa.string()), ("headers", pa.string())])
    layout = Layout(JsonReader(fields))

    read = lean_layout(layout, {"user"})

    assert read.schema.names[:2] == ["user", "headers"]
    assert not read.headers


def idle(time_mode):
    return ts.vectorised(
        lambda batch: ts.Update(), state="n bigint", time_mode=time_mode, output=lambda key, _: key
    )


@pytest.mark.parametrize(
    ("time_mode", "settings", "message"),
    [
        (EVENT_TIME, {}, "needs event_time="),
        (NO_TIME, {"watermark_delay_ms": 5}, "watermark_delay= does nothing without event_time="),
        (NO_TIME, {"idle_after_ms": 5}, "idle_after= does nothing without event_time="),
        (NO_TIME, {"watermark_column": "at"}, "watermark_column= does nothing without event_time="),
        (
            EVENT_TIME,
            {"event_time": "at", "watermark_column": "user"},
            "watermark_column='user' is of type string",
        ),
        (NO_TIME, {"event_time": "at"}, "event_time='at' does nothing with time mode 'None'"),
        (EVENT_TIME, {"event_time": "user"}, "event_time='user' is of type string"),
    ],
)
def test_times_that_a_step_would_not_go_by_are_refused(time_mode, settings, message):
    with pytest.raises(OptionError, match=f"step process-1: .*{message}"):
        planned(idle(time_mode), **settings)


def test_waiting_for_a_partition_is_refused_where_rows_come_from_none():
    process = Process("first", ("user",), idle(EVENT_TIME), output=None, event_time="at")
    second = replace(process, uid="second", idle_after_ms=5)
    keyed_steps(None, arrange((second,), EVENTS))
    with pytest.raises(OptionError, match=r"step second: idle_after= is .* by step first"):
        keyed_steps(None, arrange((process, second), EVENTS))
    transform = Transform(lambda rows: rows)
    with pytest.raises(OptionError, match="step second: idle_after= does nothing behind a transf"):
        keyed_steps(None, arrange((transform, second), EVENTS))
    promised = replace(process, uid="second", watermark_column="at")
    with pytest.raises(OptionError, match=r"step second: watermark_column= is .* by step first"):
        keyed_steps(None, arrange((process, promised), EVENTS))
    second = replace(process, uid="second", max_drift_ms=5)
    assert keyed_steps(None, arrange((second,), EVENTS))[0].max_drift_ms == 5
    with pytest.raises(OptionError, match=r"step second: max_drift= is .* by step first"):
        keyed_steps(None, arrange((process, second), EVENTS))


def passing(name: str, mode: str = NO_TIME) -> object:
    """A function that puts the user and a time out, under a name of its own."""
    columns = pa.schema([("user", pa.string()), (name, pa.int64())])
    return ts.vectorised(
        lambda batch: ts.Update(), state="n bigint", time_mode=mode, output=lambda *_: columns
    )


def test_times_that_no_reader_knows_are_named_by_the_first_step_or_refused():
    second = Process("second", ("user",), idle(EVENT_TIME), output=None, event_time="made")
    first = Process("first", ("user",), passing("made"), output=None)
    with pytest.raises(OptionError, match=r"step second: event_time='made' is .* of step first"):
        keyed_steps(None, arrange((first, second), EVENTS))
    named = replace(first, event_time="at")
    assert [step.event_time for step in keyed_steps(None, arrange((named, second), EVENTS))] == [
        "at",
        "made",
    ]
    by_clock = replace(first, processor=passing("made", PROCESSING_TIME))
    keyed_steps(None, arrange((by_clock, second), EVENTS))  # its times are those of the clock
    same = replace(first, processor=passing("at"))
    keyed_steps(None, arrange((same, replace(second, event_time="at")), EVENTS))
    with pytest.raises(OptionError, match=r"event_time='at' does nothing .* no later step asks"):
        keyed_steps(None, arrange((named,), EVENTS))


@pytest.mark.parametrize("time_mode", [EVENT_TIME, PROCESSING_TIME])
def test_event_time_goes_with_timers(time_mode):
    step = planned(idle(time_mode), event_time="at", watermark_delay_ms=5)
    assert (step.event_time, step.watermark_delay_ms) == ("at", 5)


def test_sessions_go_by_the_event_time_of_their_step():
    assert planned(ts.sessions(5, "at"), event_time="at").event_time == "at"
    with pytest.raises(OptionError, match="event_time='seen_at', but its function goes by 'at'"):
        planned(ts.sessions(5, "at"), event_time="seen_at")


def test_types_that_are_not_said_are_settled_before_the_tasks_get_the_function():
    step = planned(ts.aggregate({"last": ts.maximum("at")}))
    assert step.output == pa.schema([("user", pa.string()), ("last", pa.int64())])
    assert step.declared[0].kind == "columns"
