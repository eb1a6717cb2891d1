"""Rows with the columns that were declared: the same values, or an error."""

import datetime as dt
import math
import random
from decimal import Decimal, localcontext
from typing import Any

import pyarrow as pa
import pytest

from tallystick.errors import OptionError, RecordError
from tallystick.tasks.frames import conform

UTC = pa.timestamp("us", tz="UTC")
FLOATS = pa.list_(pa.float32())
NOON = dt.datetime.fromisoformat("2024-01-01T12:00:00.000005")


def conformed(values: Any, actual: pa.DataType, declared: pa.DataType) -> list[Any]:
    rows = pa.record_batch({"x": pa.array(values, actual)})
    done = conform(rows, pa.schema([("x", declared)]), "step s: the output")
    assert done.schema.types == [declared]
    return done.column("x").to_pylist()


@pytest.mark.parametrize(
    ("values", "actual", "declared"),
    [
        ([1, None], pa.int8(), pa.int64()),
        ([1, None], pa.int64(), pa.int32()),
        ([1, None], pa.uint8(), pa.float64()),
        ([1.0, None], pa.float64(), pa.int64()),
        ([0.5, math.inf, None], pa.float64(), pa.float32()),
        ([0.1], pa.float32(), pa.float64()),
        ([Decimal("1.50"), None], pa.decimal128(5, 2), pa.decimal128(38, 2)),
        ([NOON, None], pa.timestamp("us"), pa.timestamp("ns")),
        (["a", None], pa.large_string(), pa.string()),
        (["a", None, "a"], pa.dictionary(pa.int8(), pa.string()), pa.string()),
        ([b"a", None], pa.large_binary(), pa.binary()),
        ([None, None], pa.null(), UTC),
        ([[0.5, None], None, []], pa.large_list(pa.float64()), FLOATS),
        ([], pa.list_(pa.float64()), FLOATS),
        ([{"a": 1}, None], pa.struct([("a", pa.int32())]), pa.struct([("a", pa.int64())])),
    ],
)
def test_values_of_one_kind_become_each_other(
    values: list[Any], actual: pa.DataType, declared: pa.DataType
) -> None:
    assert conformed(values, actual, declared) == pa.array(values, actual).to_pylist()


def test_not_a_number_stays_and_a_moment_without_zone_is_in_utc() -> None:
    assert math.isnan(conformed([math.nan], pa.float64(), pa.float32())[0])
    assert conformed([NOON], pa.timestamp("us"), UTC) == [NOON.replace(tzinfo=dt.UTC)]


@pytest.mark.parametrize(
    ("values", "actual", "declared"),
    [
        ([1_700_000_000_000], pa.int64(), UTC),
        ([NOON], pa.timestamp("us"), pa.int64()),
        ([NOON], pa.timestamp("us"), pa.date32()),
        (["12"], pa.string(), pa.int64()),
        ([12], pa.int64(), pa.string()),
        ([True], pa.bool_(), pa.int64()),
        ([Decimal("0.1")], pa.decimal128(5, 2), pa.float64()),
        ([0.1], pa.float64(), pa.decimal128(5, 2)),
        ([["12"]], pa.list_(pa.string()), pa.list_(pa.int64())),
    ],
)
def test_values_of_another_kind_are_refused(
    values: list[Any], actual: pa.DataType, declared: pa.DataType
) -> None:
    with pytest.raises(RecordError, match=r"'x' is .* was declared .*cast it in the function"):
        conformed(values, actual, declared)


@pytest.mark.parametrize(
    ("values", "actual", "declared"),
    [
        ([1e300], pa.float64(), pa.float32()),
        ([1.0, 16777217.0], pa.float64(), pa.float32()),
        ([[1.0], [0.1]], pa.list_(pa.float64()), FLOATS),
        ([2**40], pa.int64(), pa.int32()),
        ([1.5], pa.float64(), pa.int64()),
        ([2**53 + 1], pa.int64(), pa.float64()),
        ([Decimal("1.55")], pa.decimal128(5, 2), pa.decimal128(5, 1)),
        ([NOON], pa.timestamp("us"), pa.timestamp("ms")),
    ],
)
def test_a_value_that_the_declared_type_does_not_hold_is_refused(
    values: list[Any], actual: pa.DataType, declared: pa.DataType
) -> None:
    with pytest.raises(RecordError, match=r"'x' is .* was declared "):
        conformed(values, actual, declared)


AB = [("a", pa.string()), ("b", pa.int64())]
STRUCT, TURNED = pa.struct(AB), pa.struct(AB[::-1])
ONE, NONE_IN_IT = {"b": 1, "a": "x"}, {"b": None, "a": None}


@pytest.mark.parametrize(
    ("values", "actual", "declared"),
    [
        ([ONE, None, NONE_IN_IT], TURNED, STRUCT),
        ([[ONE, None], None, [], [NONE_IN_IT]], pa.list_(TURNED), pa.list_(STRUCT)),
        ([[ONE], None, [None, ONE]], pa.large_list(TURNED), pa.list_(STRUCT)),
        ([[ONE], None, [NONE_IN_IT]], pa.list_(TURNED, 1), pa.list_(STRUCT)),
        (
            [[("k", ONE)], None, [], [("l", None)]],
            pa.map_(pa.string(), TURNED),
            pa.map_(pa.string(), STRUCT),
        ),
        (
            [[{"c": ONE}], None, [{"c": None}, None]],
            pa.list_(pa.struct([("c", TURNED)])),
            pa.list_(pa.struct([("c", STRUCT)])),
        ),
    ],
)
def test_fields_of_structs_go_by_name_at_every_depth(
    values: list[Any], actual: pa.DataType, declared: pa.DataType
) -> None:
    expected = pa.array(values, declared).to_pylist()
    assert conformed(values, actual, declared) == expected

    rows = pa.record_batch({"x": pa.array([None, *values, None], actual)}).slice(1, len(values))
    done = conform(rows, pa.schema([("x", declared)]), "step s: the output")
    done.validate(full=True)
    assert done["x"].to_pylist() == expected, "also those of a slice"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": "x"}, "'x.s.b' is not there"),
        ({"a": "x", "b": 1, "c": 2}, "'x.s.c' is not declared"),
        ({"a": "x", "B": 1}, "'x.s.b' is not there"),
    ],
)
def test_a_struct_with_other_fields_is_refused(value: dict[str, Any], problem: str) -> None:
    rows = pa.record_batch({"x": pa.array([{"s": value}])})
    with pytest.raises(OptionError, match=f"step s: the output: field {problem}"):
        conform(rows, pa.schema([("x", pa.struct([("s", STRUCT)]))]), "step s: the output")


WIDE = Decimal("1208925819614629174706176")
"""24 digits: with 18 behind the point they are 42, which 128 bits do not hold."""


@pytest.mark.parametrize("nested", ["", "list", "struct", "map"])
def test_a_decimal_does_not_become_another_number_where_a_greater_scale_is_declared(
    nested: str,
) -> None:
    def inside(kind: pa.DataType) -> pa.DataType:
        kinds = {"list": pa.list_(kind), "struct": pa.struct([("d", kind)])}
        return {"": kind, "map": pa.map_(pa.string(), kind), **kinds}[nested]

    def put(value: Decimal) -> Any:
        return {"": value, "list": [value], "struct": {"d": value}, "map": [("d", value)]}[nested]

    actual, declared = inside(pa.decimal128(38, 0)), inside(pa.decimal128(38, 18))
    with pytest.raises(RecordError, match="step s: the output: column 'x'"):
        conformed([put(WIDE)], actual, declared)
    assert conformed([put(Decimal(5)), None], actual, declared) == [put(Decimal(5)), None]


def test_decimals_of_any_scale_are_the_same_numbers_or_an_error() -> None:
    dice, refused = random.Random(33), 0
    with localcontext(prec=100):
        for _ in range(2000):
            before, after = dice.randint(0, 38), dice.randint(0, 38)
            number = Decimal(dice.randrange(10 ** dice.randint(1, 38))).scaleb(-before)
            fits = number < 10 ** (38 - after) and number == round(number, after)
            kinds = pa.decimal128(38, before), pa.decimal128(38, after)
            if fits:
                assert conformed([number], *kinds) == [number]
                continue
            refused += 1
            with pytest.raises(RecordError):
                conformed([number], *kinds)
    assert 200 < refused < 1800
