"""The parts of expressions that Spark computes in the session's time zone, and we in UTC."""

import re

import pyarrow as pa

from tallystick.expressions.binding import Condition, Projection, bind
from tallystick.expressions.casts import TIMESTAMP
from tallystick.expressions.nodes import ExpressionError, Node

T = pa.types
_UTC_NAMES = ("UTC", "Etc/UTC", "GMT", "Etc/GMT", "UCT", "Universal", "Zulu", "Z", "+00:00")
_OF_A_DAY = {"year", "quarter", "month", "day", "dayofyear", "weekofyear", "dayofweek", "weekday"}
_OF_CLOCKS = {"hour", "minute", "second", "date_format"}
_TO_DATES = {"to_date", "date_add", "date_sub", "datediff", "last_day"}
_BY_ZONE = _OF_A_DAY | _OF_CLOCKS | _TO_DATES
"""Functions that say what a calendar or a clock shows at a moment."""
_OF_ONE_TYPE = {"=", "<>", "<", "<=", ">", ">=", "<=>", "in", "case", "if", "coalesce", "nullif"}
_OF_ONE_TYPE |= {"greatest", "least"}
"""Functions that cast their arguments to one type."""
_DAY_US = 86_400_000_000
_WITH_OFFSET = re.compile(r"(Z|[+-]\d\d:\d\d)\s*$")
_DATE = re.compile(r"\s*\d{4}-\d\d-\d\d")


def check_zone(
    function: Condition | Projection, columns: pa.Schema | None, zone: str | None
) -> None:
    """Refuse expressions that give something else in the time zone of a user's session.

    Args:
        function: of a step.
        columns: of the rows that it gets; None: they show in the tasks only.
        zone: that of the session; None: the user gave no session.

    Raises:
        ExpressionError: a part is in UTC here, and in another zone in the session; or it may be,
            by the types of its columns, which nobody says.
    """
    if zone is None or zone in _UTC_NAMES:
        return
    if isinstance(function, Condition):
        nodes = [function.node]
    else:
        there = columns.names if function.only_missing and columns is not None else ()
        nodes = [node for name, node in function.columns if name not in there]
    for part in filter(None, (_part_by_zone(node, columns) for node in nodes)):
        raise ExpressionError(
            f"{function.__name__}: {part.text} is computed in UTC"
            f"{', if it is about timestamps' if columns is None else ''}, and the time zone of "
            f"the session is {zone}: set spark.sql.session.timeZone to UTC"
            f"{', or give map_batches before it schema=' if columns is None else ''}. Where "
            f"{zone} is meant, write from_utc_timestamp(…, {zone!r}) around the timestamp, or "
            f"the offset in the text, '2026-11-28 14:03:00+01:00'"
        )


def _part_by_zone(node: Node, columns: pa.Schema | None) -> Node | None:
    """Return the first part of an expression that depends on the zone; None: none does."""
    for arg in node.args:
        if (part := _part_by_zone(arg, columns)) is not None:
            return part
    kinds = [_kind(arg, columns) for arg in node.args]
    return node if _depends(node, kinds, columns) else None


def _kind(node: Node, columns: pa.Schema | None) -> pa.DataType | None:
    """Return the type of a part; None: it is of columns that nobody knows yet."""
    if columns is not None:
        return bind(node, columns).kind
    try:
        return bind(node, pa.schema([])).kind
    except ExpressionError:
        return None


def _depends(node: Node, kinds: list[pa.DataType | None], columns: pa.Schema | None) -> bool:
    may_be_moments = sum(kind in (TIMESTAMP, None) for kind in kinds)
    match node.name:
        case "date_trunc":
            return True  # of a date too, which begins at the zone's midnight
        case "cast":
            return _casts_by_zone(node, kinds[0], _kind(node, columns))
        case "+" | "-":
            if not any(kind is not None and T.is_duration(kind) for kind in kinds):
                return False
            gives_moment = _kind(node, columns) in (TIMESTAMP, None)
            return gives_moment and (TIMESTAMP not in kinds or any(map(_is_of_days, node.args)))
        case name if name in _BY_ZONE:
            return bool(may_be_moments)
        case name if name in _OF_ONE_TYPE:
            texts = any(_is_local_moment(arg) for arg in node.args)
            dates = any(kind is not None and T.is_date(kind) for kind in kinds)
            unknown = None in kinds and may_be_moments > 1
            return bool(may_be_moments) and (texts or dates or unknown)
    return False


def _casts_by_zone(node: Node, one: pa.DataType | None, other: pa.DataType | None) -> bool:
    if one is None:
        return node.value in ("date", "string", "timestamp")
    if T.is_string(one):
        return other == TIMESTAMP and _is_local_moment(node.args[0])
    return TIMESTAMP in (one, other) and one != other and not T.is_null(one)


def _is_of_days(node: Node) -> bool:
    """True for an interval of a day or more: a day is of 23 to 25 hours where clocks change."""
    if node.name != "literal":
        return False
    value, kind = node.value
    return bool(T.is_duration(kind)) and abs(value) >= _DAY_US


def _is_local_moment(node: Node) -> bool:
    """True for a text that names a moment without its offset from UTC."""
    if node.name != "literal" or not isinstance(text := node.value[0], str):
        return False
    return bool(_DATE.match(text)) and not _WITH_OFFSET.search(text)
