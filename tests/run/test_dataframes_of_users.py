"""Functions of `map_batches` whose annotations name frames of pandas or Polars get such frames."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas
import pandas as pd
import pyarrow as pa
import pytest
from pyspark import cloudpickle

import tallystick as ts
from tallystick.tasks.dataframes import DataFrameFunction, with_frames
from tallystick.tasks.outputs import DeclaredFunction
from tallystick.tasks.read import apply

if TYPE_CHECKING:
    import polars as pl

LARGE = 2**62 + 1
"""No double has it."""
MOMENT_US = 2**50 + 1
ROWS = pa.record_batch(
    {
        "whole": pa.array([1, None, LARGE], pa.int64()),
        "number": pa.array([1.5, math.nan, None]),
        "price": pa.array([Decimal("1.10"), None, Decimal("99999999.99")], pa.decimal128(10, 2)),
        "at": pa.array([1, None, MOMENT_US], pa.timestamp("us", tz="UTC")),
        "local": pa.array([1, None, MOMENT_US], pa.timestamp("us")),
        "precise": pa.array([1, None, MOMENT_US], pa.timestamp("ns")),
        "text": pa.array(["a", None, "é"]),
        "bytes": pa.array([b"\xff", None, b""]),
        "day": pa.array([datetime.date(2020, 1, 1), None, datetime.date(1, 1, 1)]),
        "flag": pa.array([True, None, False]),
        "list": pa.array([[1], None, []], pa.list_(pa.int32())),
        "struct": pa.array([{"x": 1, "y": "q"}, None, {"x": None, "y": None}]),
        "map": pa.array([[("k", "v")], None, []], pa.map_(pa.string(), pa.string())),
    }
)


def same_pandas(rows: pd.DataFrame) -> pd.DataFrame:
    assert isinstance(rows, pandas.DataFrame)
    return rows


def same_polars(rows: pl.DataFrame) -> pl.DataFrame:
    import polars

    assert isinstance(rows, polars.DataFrame)
    return rows


LIBRARIES = [
    pytest.param(same_pandas, id="pandas"),
    pytest.param(same_polars, id="polars"),
]


@pytest.fixture(autouse=True)
def is_installed(request: pytest.FixtureRequest) -> None:
    if "polars" in request.node.name:
        pytest.importorskip("polars")


def called(function: Callable[..., Any], rows: pa.RecordBatch = ROWS, **declared: Any) -> Any:
    """The rows that a step with the function puts out, as a task calls the function."""
    (step,) = ts.Pipeline("frames").map_batches(function, **declared).steps
    schema = declared.get("schema")
    whole: Any = step.function if schema is None else DeclaredFunction(step.function, {}, schema)
    sent = cloudpickle.loads(cloudpickle.dumps(whole))
    return [*apply([sent], rows)]


def texts(rows: pa.RecordBatch) -> list[str]:
    """Rows as texts, in which NaN equals NaN and null does not."""
    return [str(row) for row in rows.to_pylist()]


@pytest.mark.parametrize("same", LIBRARIES)
def test_every_value_comes_back_as_it_went(same: Callable[..., Any]) -> None:
    """Null is null, NaN is NaN, a large number keeps its last digit."""
    (rows,) = called(same)

    assert texts(rows) == texts(ROWS)
    assert rows.schema.equals(ROWS.schema)
    assert rows.schema.metadata is None
    (declared,) = called(same, schema=ROWS.schema)
    assert texts(declared) == texts(ROWS)


@pytest.mark.parametrize("same", LIBRARIES)
def test_columns_that_were_declared_are_checked_as_those_of_arrow(same: Callable[..., Any]) -> None:
    fewer = ROWS.schema.remove(0)
    other = ROWS.schema.set(6, pa.field("text", pa.int64()))

    with pytest.raises(ts.OptionError, match="'whole' is not declared"):
        called(same, schema=fewer)
    with pytest.raises(ts.RecordError, match="text"):
        called(same, schema=other)


def of_pandas(rows: pandas.DataFrame) -> pandas.DataFrame:
    rows = rows[rows["whole"].notna()]
    numpy_column = [float("nan"), 2.0]
    return rows.assign(numpy=numpy_column, twice=rows["price"] * 2, name=rows["text"].str.upper())[
        ["whole", "numpy", "twice", "name"]
    ]


def of_polars(rows: pl.DataFrame) -> pl.DataFrame:
    import polars

    return rows.filter(polars.col("whole").is_not_null()).select(
        "whole",
        polars.col("text").cast(polars.Categorical).alias("kind"),
        polars.len().alias("n"),
    )


def test_what_pandas_makes_of_columns_becomes_rows() -> None:
    """NaN of a column of numpy's is null: there it means that a value is missing."""
    (rows,) = called(of_pandas)

    assert rows.to_pydict() == {
        "whole": [1, LARGE],
        "numpy": [None, 2.0],
        "twice": [Decimal("2.20"), Decimal("199999999.98")],
        "name": ["A", "É"],
    }
    assert rows.schema.field("name").type == pa.string()


def test_what_polars_makes_of_columns_becomes_rows() -> None:
    (rows,) = called(of_polars)

    assert rows.to_pydict() == {"whole": [1, LARGE], "kind": ["a", "é"], "n": [2, 2]}
    assert rows.schema.field("kind").type == pa.string()


def test_an_index_with_a_name_is_refused_and_one_without_is_dropped() -> None:
    def counted(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.groupby("text")[["whole"]].sum()

    def shuffled(rows: pd.DataFrame) -> pd.DataFrame:
        return rows[["text"]].iloc[::-1]

    with pytest.raises(ts.OptionError, match=r"counted .*'text' in its index.*reset_index"):
        called(counted)
    (rows,) = called(shuffled)
    assert rows.to_pydict() == {"text": ["é", None, "a"]}


def arrow_to_arrow(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows


def without_annotations(rows):
    return rows


def arrow_to_pandas(rows: pa.RecordBatch) -> pd.DataFrame | None:
    assert isinstance(rows, pa.RecordBatch)
    return rows.select(["text"]).to_pandas()


def pandas_to_arrow(rows: pd.DataFrame) -> pa.RecordBatch:
    return pa.RecordBatch.from_pandas(rows[["text"]], preserve_index=False)


def pandas_to_anything(rows: pd.DataFrame):
    return rows[["text"]]


class Callee:
    def __call__(self, rows: pd.DataFrame) -> pd.DataFrame:
        return rows[["text"]]

    def method(self, rows: pd.DataFrame) -> pd.DataFrame:
        return rows[["text"]]


def with_setting(column: str, rows: pd.DataFrame) -> pd.DataFrame:
    return rows[[column]]


@pytest.mark.parametrize("function", [arrow_to_arrow, without_annotations])
def test_arrow_stays_the_default(function: Callable[..., Any]) -> None:
    assert with_frames(function, 1) is function
    assert called(function) == [ROWS]


@pytest.mark.parametrize(
    "function",
    [
        arrow_to_pandas,
        pandas_to_arrow,
        pandas_to_anything,
        Callee(),
        Callee().method,
        partial(with_setting, "text"),
    ],
)
def test_any_function_with_such_an_annotation_is_understood(function: Callable[..., Any]) -> None:
    (rows,) = called(function)

    assert rows.to_pydict() == {"text": ["a", None, "é"]}


@pytest.mark.parametrize(
    "annotation",
    [pd.DataFrame, "pd.DataFrame", "pandas.DataFrame", pd.DataFrame | None, "None | pd.DataFrame"],
)
def test_annotations_are_classes_or_texts(annotation: object) -> None:
    def function(rows: Any) -> Any:
        return rows

    function.__annotations__ = {"rows": annotation, "return": annotation}

    assert isinstance(with_frames(function, 1), DataFrameFunction)


def test_a_name_that_only_the_enclosing_function_knows_is_understood() -> None:
    import pandas as frames

    def function(rows: frames.DataFrame) -> frames.DataFrame:
        return frames.DataFrame(rows)

    assert isinstance(with_frames(function, 1), DataFrameFunction)


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (pd.Series, "annotated with pandas.Series: expected a pyarrow.RecordBatch"),
        ("pyspark.sql.DataFrame", "Spark's DataFrames are for transform"),
    ],
)
def test_other_frames_are_refused_with_what_may_stand_there(
    annotation: object, message: str
) -> None:
    import pyspark.sql

    def function(rows: Any) -> Any:
        return pyspark.sql and rows

    function.__annotations__ = {"rows": annotation}

    with pytest.raises(ts.OptionError, match=message):
        with_frames(function, 1)


def test_side_outputs_and_no_rows_pass() -> None:
    def split(rows: pd.DataFrame) -> ts.Rows:
        return ts.Rows(None, {"texts": rows[["text"]]})

    step = ts.Pipeline("p").map_batches(split, outputs={"texts": "text string"}).steps[0]
    declared = DeclaredFunction(step.function, {"texts": pa.schema([("text", pa.string())])})
    (side,) = apply([declared], ROWS)

    assert side.rows.to_pydict() == {"text": ["a", None, "é"]}
    assert called(lambda rows: None) == []


def test_rows_on_their_way_to_a_sink_may_be_frames_too() -> None:
    (function,) = ts.mapped(ts.KafkaSink("localhost:9092", topic="t"), pandas_to_anything).functions

    (rows,) = apply([function], ROWS)
    assert rows.to_pydict() == {"text": ["a", None, "é"]}


def test_a_function_with_state_gets_frames_where_it_names_them() -> None:
    def joined(rows: pd.DataFrame, table: pa.Table) -> pd.DataFrame:
        assert isinstance(rows, pd.DataFrame)
        assert isinstance(table, pa.Table)
        return rows

    def kept(rows: pd.DataFrame, elements: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        return rows, pd.concat([elements, rows[["text"]]])

    with_table = with_frames(joined, 2)
    output, elements = with_frames(kept, 2)(ROWS, ROWS.select(["text"]))

    assert texts(with_table(ROWS, pa.Table.from_batches([ROWS])))
    assert output.num_rows == 3
    assert elements.to_pydict() == {"text": ["a", None, "é"] * 2}


def test_an_error_of_the_function_names_the_function() -> None:
    def mistaken(rows: pd.DataFrame) -> pd.DataFrame:
        return rows["txt"]

    with pytest.raises(KeyError, match="txt"):
        called(mistaken)
    assert with_frames(mistaken, 1).__name__ == "mistaken"


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "polars", None)

    with pytest.raises(ts.OptionError, match=r"same_polars \(.*pip install polars"):
        with_frames(same_polars, 1)
