"""`docs/json-beside-from-json.md` names where `from_json` and `ts.Json` differ, and nothing else.

Spark and we read the same records. Each row of the page has records here that show its difference,
and of the other records both make the same.
"""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as fn

from tallystick.codec.json.read import parse_json
from tallystick.state.schema import schema_of

pytestmark = [pytest.mark.spark]

PAGE = Path(__file__).parents[2] / "docs" / "json-beside-from-json.md"
MALFORMED = "malformed"
Case = tuple[str, str]
"""The type of the column `a`, and a record."""

DIFFERENT: dict[str, list[Case]] = {
    "a number, boolean or object for a `string`": [
        ("string", '{"a": 5}'),
        ("string", '{"a": true}'),
        ("string", '{"a": {"b": [1]}}'),
    ],
    "a declared field twice": [("bigint", '{"a": 1, "a": 2}')],
    '`"\\ud800"` for a `string`': [("string", '{"a": "\\ud800"}')],
    "`-0` for a `double`": [("double", '{"a": -0}')],
    "`-INF`, `+Infinity`, in any field": [
        ("double", '{"a": -INF}'),
        ("bigint", '{"a": 1, "z": -INF}'),
        ("bigint", '{"a": 1, "z": +Infinity}'),
    ],
    '`"NaN"` and `"Infinity"` in quotes for a `double`': [
        ("double", '{"a": "NaN"}'),
        ("double", '{"a": "Infinity"}'),
    ],
    "a decimal with more digits behind the point than its type": [("decimal(4,2)", '{"a": 1.555}')],
    'something behind the object, such as `{"a": 1} x`': [
        ("bigint", '{"a": 1} x'),
        ("bigint", '{"a": 1}]'),
        ("bigint", '{"a": 1} {"a": 2}'),
    ],
    "single quotes, `{'a': 1}`": [("bigint", "{'a': 1}")],
    "a whole number for a `timestamp`": [("timestamp", '{"a": 1700000000}')],
    "`2024`, `2024-01` or `2024-1-2`": [
        ("timestamp", '{"a": "2024"}'),
        ("timestamp", '{"a": "2024-01"}'),
        ("timestamp", '{"a": "2024-1-2"}'),
        ("date", '{"a": "2024-1-2"}'),
    ],
    "years beyond 9999": [
        ("timestamp", '{"a": "12024-01-02T03:04:05Z"}'),
        ("timestamp", '{"a": "+12024-01-02T03:04:05Z"}'),
        ("date", '{"a": "12024-01-02"}'),
    ],
    "a date-time for a `date`": [("date", '{"a": "2024-01-02T03:04:05Z"}')],
    "an offset without minutes, `T03:04:05+01`": [("timestamp", '{"a": "2024-01-02T03:04:05+01"}')],
    "the name of a zone, `03:04:05 Europe/Paris`": [
        ("timestamp", '{"a": "2024-01-02T03:04:05 Europe/Paris"}')
    ],
    "a blank before a `timestamp`": [("timestamp", '{"a": " 2024-01-02T03:04:05Z"}')],
    "small letters, `2024-01-02t03:04:05z`": [("timestamp", '{"a": "2024-01-02t03:04:05z"}')],
    "a leap second, `23:59:60Z`": [("timestamp", '{"a": "2016-12-31T23:59:60Z"}')],
    "an offset or `Z` for a `timestamp_ntz`": [
        ("timestamp_ntz", '{"a": "2024-01-02T03:04:05Z"}'),
        ("timestamp_ntz", '{"a": "2024-01-02T03:04:05+01:00"}'),
    ],
}
"""By the first cell of a row of the page."""
SAME: list[Case] = [
    ("bigint", '{"a": "5"}'),
    ("bigint", '{"a": 1.0}'),
    ("bigint", '{"a": 1e2}'),
    ("double", '{"a": "1.5"}'),
    ("boolean", '{"a": "true"}'),
    ("int", '{"a": 3000000000}'),
    ("float", '{"a": 1e39}'),
    ("bigint", '{"A": 1}'),
    ("bigint", '{"a": 1, "z": 1, "z": 2}'),
    ("bigint", '{"a": 1, "z": 1e400}'),
    ("bigint", '{"a": 1, "z": "\\ud800"}'),
    ("bigint", '{"a": 1, "z": [NaN, -Infinity]}'),
    ("bigint", '{"a": 1, "z": Inf}'),
    ("bigint", '{"a": 1, "z": -NaN}'),
    ("bigint", '{"a": 1, "z": 01}'),
    ("bigint", '{"a": 1,}'),
    ("bigint", '{"a": 1 /* one */}'),
    ("bigint", '[{"a": 1}]'),
    ("bigint", "null"),
    ("bigint", '{"a": [1]}'),
    ("array<bigint>", '{"a": 1}'),
    ("string", '{"a": "x\ty"}'),
    ("string", '{"a": "\\q"}'),
    ("timestamp", '{"a": 1700000000.5}'),
    ("timestamp", '{"a": "1700000000"}'),
    ("timestamp", '{"a": "2024-01-02"}'),
    ("timestamp", '{"a": "2024-01-02T03"}'),
    ("timestamp", '{"a": "2024-01-02T03:04"}'),
    ("timestamp", '{"a": "2024-01-02T03:04:05"}'),
    ("timestamp", '{"a": "2024-01-02T03:04:05.123456789Z"}'),
    ("timestamp", '{"a": "2024-01-02 03:04:05+01"}'),
    ("timestamp", '{"a": "2024-01-02T03:04:05+0100"}'),
    ("timestamp", '{"a": "2024-01-02T03:04:05[Europe/Paris]"}'),
    ("date", '{"a": 19000}'),
    ("decimal(4,2)", '{"a": 100}'),
    ("decimal(4,2)", '{"a": "1.5"}'),
    ("decimal(4,2)", '{"a": 1e1}'),
    ("decimal(4,2)", '{"a": 0e785}'),
    ("decimal(4,2)", '{"a": NaN}'),
    ("double", '{"a": 0e785}'),
    ("double", '{"a": 1e400}'),
    ("double", '{"a": -0.0}'),
    ("bigint", '{"a": -0}'),
    ("double", '{"a": NaN}'),
    ("double", '{"a": -Infinity}'),
    ("double", '{"a": Inf}'),
    ("double", '{"a": 123456789012345678901234567890}'),
]


def of_spark(spark: SparkSession, cases: list[Case]) -> list[Any]:
    """Read `a` in each record by Spark's `from_json`."""
    columns = []
    for number, (kind, record) in enumerate(cases):
        options = {"columnNameOfCorruptRecord": "wrong", "mode": "PERMISSIVE"}
        parsed = fn.from_json(fn.lit(record), f"a {kind}, wrong string", options)
        value = parsed["a"]
        if kind.startswith("timestamp"):
            value = fn.unix_micros(value.cast("timestamp"))
        elif kind == "date":
            value = fn.unix_date(value)
        columns.append(
            fn.when(parsed["wrong"].isNotNull(), fn.lit(MALFORMED)).alias(f"wrong{number}")
        )
        columns.append(value.alias(f"a{number}"))
    row = spark.range(1).select(*columns).collect()[0]
    return [row[f"wrong{number}"] or row[f"a{number}"] for number in range(len(cases))]


def of_ours(kind: str, record: str) -> Any:
    """Read `a` in a record by our JSON reader."""
    values = pa.array([record.encode()], pa.binary())
    parsed = parse_json(values, schema_of(f"a {kind}", "value.schema"), "permissive", str)
    column = parsed.columns.column(0)
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    elif pa.types.is_date(column.type):
        column = column.cast(pa.int32())
    return MALFORMED if parsed.reasons else column[0].as_py()


def rows_of_page() -> dict[str, tuple[str, str]]:
    """Return the page's two cells, of Spark and of ours, by the first cell of their row."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][2:]
    cells = [re.split(r" *\| *", line.strip("| ")) for line in lines]
    return {name: (theirs, ours) for name, theirs, ours in cells}


def test_the_page_has_a_row_for_each_difference_and_none_where_both_agree(
    shared_spark: SparkSession,
) -> None:
    rows = rows_of_page()
    assert set(rows) == set(DIFFERENT)
    cases = [case for of_row in DIFFERENT.values() for case in of_row] + SAME

    theirs = dict(zip(cases, of_spark(shared_spark, cases), strict=True))
    ours = {case: of_ours(*case) for case in cases}

    # As texts, -0.0 is not 0.0, and NaN is itself.
    differing = [case for case in cases if str(theirs[case]) != str(ours[case])]
    shown = [(case, theirs[case], ours[case]) for case in cases]
    assert differing == cases[: -len(SAME)], shown
    for name, (said_of_spark, said_of_us) in rows.items():
        for case in DIFFERENT[name]:
            assert (theirs[case] == MALFORMED) == said_of_spark.startswith(MALFORMED), case
            assert (ours[case] == MALFORMED) == said_of_us.startswith(MALFORMED), case
