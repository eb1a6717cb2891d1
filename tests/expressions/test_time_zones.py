"""Expressions that depend on a time zone are refused where the session's is not UTC."""

import re

import pyarrow as pa
import pytest

from tallystick.expressions.binding import (
    Condition,
    condition_of,
    named_by_expressions,
    selected,
)
from tallystick.expressions.nodes import ExpressionError
from tallystick.expressions.zones import check_zone

COLUMNS = pa.schema([("at", pa.timestamp("us", "UTC")), ("day", pa.date32()), ("n", pa.int64())])
ZONE = "Europe/Berlin"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("n > 1 AND hour(at) = 3", "HOUR(at)"),
        ("at < '2026-03-29 02:30:00'", "at < '2026-03-29 02:30:00'"),
        ("at > day", "at > day"),
        ("CAST(at AS date) = day", "CAST(at AS DATE)"),
        ("at + INTERVAL 1 DAY > at", "at + INTERVAL '1' DAY"),
        ("day + INTERVAL 1 HOUR > at", "day + INTERVAL '1' HOUR"),
    ],
)
def test_a_part_that_depends_on_the_zone_is_named_with_what_to_write(text: str, part: str) -> None:
    with pytest.raises(ExpressionError) as raised:
        check_zone(condition_of(text), COLUMNS, ZONE)
    assert re.sub(r"\s+", " ", str(raised.value)) == (
        f"{text!r}: {part} is computed in UTC, and the time zone of the session is {ZONE}: set "
        f"spark.sql.session.timeZone to UTC. Where {ZONE} is meant, write from_utc_timestamp(…, "
        f"'{ZONE}') around the timestamp, or the offset in the text, '2026-11-28 14:03:00+01:00'"
    )
    for zone in ("UTC", "Etc/UTC", None):
        check_zone(condition_of(text), COLUMNS, zone)


@pytest.mark.parametrize(
    "text",
    [
        "at < '2026-03-29 02:30:00+01:00'",
        "at + INTERVAL 23 HOUR > at",
        "year(day) = 2026 AND day < '2026-03-29'",
        "unix_micros(at) > n",
        "at > from_utc_timestamp(at, 'Asia/Kathmandu')",
        "at IS NULL",
    ],
)
def test_what_does_not_depend_on_the_zone_is_taken(text: str) -> None:
    check_zone(condition_of(text), COLUMNS, ZONE)


def test_behind_a_function_without_schema_what_may_depend_on_the_zone_is_refused() -> None:
    with pytest.raises(ExpressionError, match=r"hour.*if it is about timestamps.*schema="):
        check_zone(selected(["hour(at) AS h"]), None, ZONE)
    with pytest.raises(ExpressionError, match=r"a < b .*if it is about timestamps"):
        check_zone(condition_of("a < b"), None, ZONE)


@pytest.mark.parametrize("text", ["a > 15", "lower(a) = 'x'", "a + 1 < 10", "a IN ('x', 'y')"])
def test_behind_a_function_without_schema_what_cannot_depend_on_it_is_taken(text: str) -> None:
    assert isinstance(condition_of(text), Condition)
    check_zone(condition_of(text), None, ZONE)


def test_a_column_that_has_an_expression_for_its_name_is_taken() -> None:
    columns = COLUMNS.append(pa.field("user-id", pa.string())).append(
        pa.field("hour(at)", pa.int32())
    )
    names, function = named_by_expressions(["user-id", "hour(at)"], "key_by", may_have_alias=True)
    assert names == ("user-id", "hour(at)")
    assert function is not None
    check_zone(function, columns, ZONE)
    with pytest.raises(ExpressionError, match="is computed in UTC"):
        check_zone(function, columns.remove(columns.get_field_index("hour(at)")), ZONE)
