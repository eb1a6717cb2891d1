"""Joins of two tables: `interval_join`, and `temporal_join` for FOR SYSTEM_TIME AS OF.

Source: Flink SQL's interval joins and temporal joins; Spark's stream-stream joins.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sqlglot import exp

from tallystick.api.pipeline import Pipeline
from tallystick.api.streams import Stream
from tallystick.errors import OptionError
from tallystick.expressions.parsing import DIALECT
from tallystick.queries.parsing import conjuncts, milliseconds
from tallystick.queries.relations import Relation, tables_in
from tallystick.state.functions.joins import interval_join, temporal_join

_COMPARED: dict[type[exp.Expression], tuple[bool, int]] = {
    exp.GTE: (True, 0),
    exp.GT: (True, 1),
    exp.LTE: (False, 0),
    exp.LT: (False, -1),
}
"""The side that a comparison bounds, true for its left one from below, and by how many ms more."""
_MIRRORED = {exp.GTE: exp.LTE, exp.LTE: exp.GTE, exp.GT: exp.LT, exp.LT: exp.GT}
KEY = "_key_"


@dataclass
class Conditions:
    """The conditions of a join.

    Args:
        keys: pairs of expressions that are equal, of the first table and of the second one.
        lower, upper: by how much a second row may be later than a first one, in ms.
        rest: what is first to filter by.
    """

    keys: list[tuple[exp.Expression, exp.Expression]] = field(default_factory=list)
    lower: int | None = None
    upper: int | None = None
    rest: list[exp.Expression] = field(default_factory=list)


def joined(
    select: exp.Select, join: exp.Join, first: Relation, second: Relation, uid: str, name: str
) -> Relation:
    """Translate the join of a query.

    Args:
        select: the query; conditions of an inner join may stand in its WHERE.
        join: its join.
        first: the rows of the first table.
        second: those of the second.
        uid: of the keyed step.
        name: of the pipeline.

    Raises:
        OptionError: there is no such join over streams; the message names what it lacks.
    """
    (left_name,), (right_name,) = first.names, second.names
    how = _how(join)
    version = join.this.args.get("version")
    given = conjuncts(join.args.get("on"))
    if using := join.args.get("using"):
        given += [
            exp.EQ(
                this=exp.column(one.name, left_name), expression=exp.column(one.name, right_name)
            )
            for one in using
        ]
    if how == "inner":
        where = select.args.get("where")
        given += conjuncts(where.this if where is not None else None)
        select.set("where", None)
    conditions = _sorted(given, first, second)
    if not conditions.keys:
        raise OptionError(
            f"sql: join of {left_name} and {right_name}: ON has no equality of their columns, and "
            f"rows meet by key: write ON {left_name}.… = {right_name}.… AND …"
        )
    if how != "inner" and conditions.rest:
        of_both = tables_in(conditions.rest[0], (left_name, right_name)) == {left_name, right_name}
        raise OptionError(
            f"sql: {conditions.rest[0].sql(DIALECT)}: an outer join takes equalities and the "
            f"bounds of the times alone; "
            + (
                "a condition of both tables is for an inner JOIN, which filters by it"
                if of_both
                else "filter the tables before, in WITH … AS (SELECT … WHERE …)"
            )
        )
    return _step(select, (first, second), conditions, how, version, uid, name)


def _how(join: exp.Join) -> str:
    side, kind = join.side.upper(), join.kind.upper()
    if kind in ("SEMI", "ANTI") or join.method:
        raise OptionError(
            f"sql: {(join.method or kind)} JOIN: there are JOIN, LEFT, RIGHT and FULL JOIN with an "
            f"equality and bounds of the times"
        )
    return side.lower() or "inner"


def _sorted(given: Iterable[exp.Expression], first: Relation, second: Relation) -> Conditions:
    (left_name,), (right_name,) = first.names, second.names
    names = (left_name, right_name)
    result = Conditions()
    for condition in given:
        if isinstance(condition, exp.Between):
            bounds = [
                exp.GTE(this=condition.this, expression=condition.args["low"]),
                exp.LTE(this=condition.this, expression=condition.args["high"]),
            ]
        else:
            bounds = [condition]
        sides = (
            (tables_in(condition.this, names), tables_in(condition.expression, names))
            if (isinstance(condition, exp.EQ))
            else (set(), set())
        )
        if sides == ({left_name}, {right_name}):
            result.keys.append((condition.this, condition.expression))
        elif sides == ({right_name}, {left_name}):
            result.keys.append((condition.expression, condition.this))
        else:
            spans = [_bound(bound, first, second) for bound in bounds]
            if None in spans:
                result.rest.append(condition)
                continue
            for is_lower, span in filter(None, spans):
                if is_lower:
                    result.lower = span if result.lower is None else max(result.lower, span)
                else:
                    result.upper = span if result.upper is None else min(result.upper, span)
    return result


def _bound(node: exp.Expression, first: Relation, second: Relation) -> tuple[bool, int] | None:
    """Return a bound of how much later a second row may be; None: the condition is none.

    Returns:
        True for a lower bound, and the bound in ms.
    """
    if type(node) not in _COMPARED:
        return None
    sides = (_moment(node.this), _moment(node.expression))
    if None in sides:
        return None
    (one, one_ms), (other, other_ms) = (side for side in sides if side is not None)
    kind = type(node)
    if _is_time(one, first) and _is_time(other, second):
        one, one_ms, other, other_ms, kind = other, other_ms, one, one_ms, _MIRRORED[kind]
    if not (_is_time(one, second) and _is_time(other, first)):
        return None
    is_lower, more = _COMPARED[kind]
    return is_lower, other_ms - one_ms + more


def _is_time(column: exp.Column, relation: Relation) -> bool:
    return column.table in relation.names and column.name in relation.times


def _moment(node: exp.Expression) -> tuple[exp.Column, int] | None:
    """Return a column and the milliseconds that are added to it."""
    node = node.unnest()
    if isinstance(node, exp.Column):
        return node, 0
    if isinstance(node, exp.Add | exp.Sub) and (inner := _moment(node.this)) is not None:
        column, before = inner
        span = milliseconds(node.expression, "join")
        return column, before + (span if isinstance(node, exp.Add) else -span)
    return None


def _step(
    select: exp.Select,
    sides: tuple[Relation, Relation],
    conditions: Conditions,
    how: str,
    version: exp.Expression | None,
    uid: str,
    name: str,
) -> Relation:
    names = [next(iter(side.names)) for side in sides]
    streams, qualified, times = {}, {}, {}
    needed = list(_needed(select, sides, conditions))
    for at, side in enumerate(sides):
        if not isinstance(side.rows, Stream):
            raise OptionError(
                f"sql: join of {names[at]}: its rows come from a GROUP BY, a DISTINCT or a join, "
                f"and joins here are of tables: write it to a topic, and join that"
            )
        if version is None and None in (conditions.lower, conditions.upper):
            raise OptionError(_unbounded(names, sides, conditions.rest))
        time = _time_of(side, names[at])
        key = [side.resolve(pair[at]) for pair in conditions.keys]
        columns = {f"{KEY}{n}": one for n, one in enumerate([*key, *_side_of_nulls(key, how, at)])}
        for column in dict.fromkeys([time, *(one for table, one in needed if table == names[at])]):
            qualified[names[at], column] = text = f"{names[at]}_{column}"
            columns[text] = side.resolve(exp.column(column, quoted=True))
        times[names[at]] = f"{names[at]}_{time}"
        side = side.select(columns)
        if how not in ("full", ("left", "right")[at]):
            side = side.without_null([name for name in columns if name.startswith(KEY)])
        stream = side.rows
        assert isinstance(stream, Stream)
        streams[names[at]] = stream
    keys = [f"{KEY}{n}" for n in range(len(conditions.keys) + (how == "full"))]
    if version is not None:
        _check_version(version.expression, names[0], times[names[0]])
        function = temporal_join(names[0], names[1], how=how)
    else:
        assert conditions.lower is not None
        assert conditions.upper is not None
        function = interval_join(
            names[0], names[1], lower=conditions.lower, upper=conditions.upper, how=how
        )
    rows = (
        Pipeline(name)
        .read(**streams)
        .key_by(max_parallelism=None, **dict.fromkeys(names, keys))
        .process(
            function,
            event_time=times,
            watermark_delay=max(side.delay_ms for side in sides),
            uid=uid,
        )
    )
    relation = Relation(
        rows,
        frozenset(names),
        (*keys, *qualified.values()),
        frozenset(times.values()),
        qualified=qualified,
        star=tuple(
            text
            for (table, column), text in qualified.items()
            for side in sides
            if table in side.names and column in (side.star or side.columns or ())
        ),
    )
    condition = exp.and_(*conditions.rest) if conditions.rest else None
    return relation.filter(None if condition is None else relation.resolve(condition))


def _check_version(moment: exp.Expression, name: str, time: str) -> None:
    """Refuse FOR SYSTEM_TIME AS OF another moment than the event time of the first table.

    Raises:
        OptionError: it is another column, as Flink's PROCTIME().
    """
    if f"{name}_{moment.name}" != time or moment.text("table") not in ("", name):
        raise OptionError(
            f"sql: FOR SYSTEM_TIME AS OF {moment.sql(DIALECT)}: expected the event time "
            f"{name}.{time.removeprefix(f'{name}_')}; the newest row of a table that changes "
            f"seldom is a broadcast table, ts.enrich(…)"
        )


def _side_of_nulls(key: list[exp.Expression], how: str, at: int) -> Iterator[exp.Expression]:
    """Yield one more column of the key of a FULL JOIN, so that null meets no null."""
    if how == "full":
        nulls = exp.or_(*(exp.Is(this=one.copy(), expression=exp.null()) for one in key))
        yield exp.Case().when(nulls, str(at + 1)).else_("0")


def _unbounded(
    names: list[str], sides: tuple[Relation, Relation], others: list[exp.Expression]
) -> str:
    first, second = names
    untimed = [name for name, side in zip(names, sides, strict=True) if not side.times]
    needs = f" Event times first: a watermark for {' and '.join(untimed)}." if untimed else ""
    of_both = [one for one in others if tables_in(one, (first, second)) == {first, second}]
    if of_both:
        needs += (
            f" {of_both[0].sql(DIALECT)} is no bound: expected the event times of both tables, and "
            f"lengths of time"
        )
    left_time, right_time = (next(iter(sorted(side.times)), "at") for side in sides)
    return (
        f"sql: join of {first} and {second}: nothing bounds how far their times are apart, and its "
        f"state would grow for ever: add AND {second}.{right_time} BETWEEN {first}.{left_time} AND "
        f"{first}.{left_time} + INTERVAL 1 HOUR, or FOR SYSTEM_TIME AS OF {first}.{left_time}."
        f"{needs}"
    )


def _time_of(side: Relation, name: str) -> str:
    if len(side.times) != 1:
        raise OptionError(
            f"sql: join of {name}: it needs one column of event times, and has "
            f"{', '.join(sorted(side.times)) or 'none'}: watermark={{'{name}': 'at - 10 seconds'}}"
        )
    return next(iter(side.times))


def _needed(
    select: exp.Select, sides: tuple[Relation, Relation], conditions: Conditions
) -> Iterator[tuple[str, str]]:
    """Yield the columns of both tables that the query reads, each with its table's name.

    Raises:
        OptionError: a column's table is not known.
    """
    names = [next(iter(side.names)) for side in sides]
    is_all = any(node.find(exp.Star) and not node.find(exp.AggFunc) for node in select.expressions)
    for name, side in zip(names, sides, strict=True):
        if is_all and side.columns is None:
            raise OptionError(f"sql: SELECT *: the columns of {name} are not known: name them")
        yield from ((name, column) for column in side.star or side.columns or () if is_all)
    parts = [*select.expressions, *conditions.rest]
    parts += [
        select.args[clause] for clause in ("where", "group", "having") if select.args.get(clause)
    ]
    for column in (column for part in parts for column in part.find_all(exp.Column)):
        if column.table in names:
            yield column.table, column.name
        elif not column.table and not column.is_star:
            for name, side in zip(names, sides, strict=True):
                if column.name in (side.columns or ()):
                    yield name, column.name
