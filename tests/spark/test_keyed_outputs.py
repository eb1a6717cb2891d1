"""What keyed steps put out: told by the function, by the user, or by both alike."""

import pyarrow as pa
import pytest

import tallystick as ts
from tallystick.codec.ddl import ddl_of
from tallystick.errors import OptionError
from tallystick.pipeline.keyed import keyed_steps, output_of
from tallystick.state.schema import schema_of
from tallystick.tasks.keyed import KeyedStep
from tallystick.tasks.steps import Process, arrange

EVENTS = schema_of("user string, at timestamp, amount double", "events")


def planned(*steps: Process) -> tuple[KeyedStep, ...]:
    """Only DDL needs Spark, and DataFrame code."""
    return keyed_steps(None, arrange(steps, EVENTS))


def process(key: str, function, output: pa.Schema | None = None, **settings) -> Process:
    return Process(settings.pop("uid", None), (key,), function, output, **settings)


def test_steps_without_output_follow_each_other():
    first, second, third = planned(
        process("user", ts.deduplicate(), uid="first"),
        process("user", ts.aggregate({"n": ts.count()}, keep=["at"]), uid="second"),
        process("n", ts.top_n(2, "at", "timestamp"), uid="third"),
    )

    assert first.output == EVENTS
    assert ddl_of(second.output) == "user string, at timestamp, n bigint"
    assert second.columns == first.output
    assert ddl_of(third.output) == "n bigint, at array<timestamp>"


def test_a_function_of_ones_own_needs_output():
    mine = ts.vectorised(lambda batch: ts.Update(), state="n bigint")

    with pytest.raises(OptionError, match=r"step process-1: process\(\) needs output="):
        planned(process("user", mine))
    (step,) = planned(process("user", mine, schema_of("x int", "output")))
    assert ddl_of(step.output) == "x int"


KNOWN = schema_of("user string, n int, tags array<string>", "known")


@pytest.mark.parametrize(
    "given", ["user string, n int, tags array<string>", "n bigint, tags array<string>, user string"]
)
def test_output_may_be_said_in_another_order_and_in_wider_types(given):
    schema = schema_of(given, "output")

    assert output_of("s", schema, KNOWN) == schema


def test_a_list_is_a_list_whatever_its_elements_are_called():
    schema = pa.schema([("tags", pa.list_(pa.field("element", pa.string())))])

    assert output_of("s", schema, pa.schema([KNOWN.field("tags")])) is schema


def test_types_that_no_row_could_be_brought_to_are_refused():
    with pytest.raises(OptionError, match="output= says 'price double'"):
        output_of("s", schema_of("price double", "o"), schema_of("price decimal(9, 2)", "o"))


@pytest.mark.parametrize(
    "given",
    [
        "user string, n int",
        "user string, n int, tags array<string>, more int",
        "user string, m int, tags array<string>",
        "user string, n smallint, tags array<string>",
        "user string, n string, tags array<string>",
        "user string, n int, tags string",
    ],
)
def test_other_columns_than_the_functions_are_refused_before_anything_starts(given):
    with pytest.raises(OptionError, match=r"step s: output= says .*leave output= out") as refused:
        output_of("s", schema_of(given, "output"), KNOWN)

    assert ddl_of(KNOWN) in str(refused.value)
