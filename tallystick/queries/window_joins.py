"""Joins of windows: of two tables by key and window, and of a query with its windows' greatest.

Source: Flink SQL's window joins; the queries 5 and 8 of nexmark/nexmark.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from sqlglot import exp

from tallystick.api.pipeline import Pipeline
from tallystick.api.streams import Stream
from tallystick.errors import OptionError
from tallystick.expressions.parsing import DIALECT
from tallystick.queries.grouping import ALL_ROWS, END, START, is_grouped, table_function, windows_of
from tallystick.queries.parsing import alias_name, conjuncts, from_of
from tallystick.queries.ranking import ORDER, ROW, FirstOfBatch, Places, best_row, ranked
from tallystick.queries.relations import Relation, known_schema
from tallystick.state.functions import aggregates
from tallystick.state.functions.joins import window_join
from tallystick.state.functions.windowed import windowed
from tallystick.state.functions.windows import Sessions, Windows

KEY, TIME = "_key_", "_time"
Named = Mapping[str, exp.Query]
Rows = TypeVar("Rows", Stream, Pipeline)


class Translates(Protocol):
    """The translation of a text, as far as joins of windows need it."""

    name: str

    def of(self, query: exp.Expression, outer: Named, uid: str) -> Relation:
        """Translate a query."""
        ...

    def table(self, node: exp.Expression, named: Named) -> Relation:
        """Translate a table."""
        ...

    def new_uid(self, given: str, kind: str) -> str:
        """Return a uid that no other step has."""
        ...


def is_of_windows(select: exp.Expression | None) -> bool:
    """True for a query of a windowing table function."""
    source = None if select is None else from_of(select)
    return isinstance(source, exp.Table) and table_function(source.this) is not None


def window_joined(
    translation: Translates, select: exp.Select, named: Named, uid: str
) -> Relation | None:
    """Translate a join by windows.

    Returns:
        The rows; None: the query is no such join.

    Raises:
        OptionError: the join is by windows, and has no translation.
    """
    joins = select.args.get("joins") or []
    sides = [from_of(select), *(join.this for join in joins)]
    if len(sides) != 2 or not all(isinstance(side, exp.Subquery) for side in sides):
        return None
    first_side, second_side = (side for side in sides if side is not None)
    pairs, others = [], []
    for one in conjuncts(joins[0].args.get("on")):
        columns = {side.table: side.name for side in _columns_of_equality(one)}
        if columns.keys() == {first_side.alias, second_side.alias}:
            pairs.append((columns[first_side.alias], columns[second_side.alias]))
        else:
            others.append(one)
    bounds = [pair for pair in pairs if pair in ((START, START), (END, END))]
    if not bounds:
        return None
    if joins[0].side or joins[0].kind.upper() not in ("", "INNER"):
        words = " ".join(word for word in (joins[0].side, joins[0].kind) if word)
        raise OptionError(f"sql: {words} JOIN of windows: expected JOIN")
    if all(is_of_windows(side.this) for side in (first_side, second_side)):
        keys = [pair for pair in pairs if pair not in bounds]
        rows = _join_of_tables(translation, (first_side, second_side), keys, named, uid)
        return rows.filter(rows.resolve(exp.and_(*others))) if others else rows
    if len(bounds) == len(pairs) == 2 and len(others) == 1:
        return _greatest(translation, (first_side, second_side), others[0], named, uid)
    return None


def _columns_of_equality(condition: exp.Expression) -> list[exp.Column]:
    """Return the two columns that a condition says to be equal; none: it says something else."""
    if not isinstance(condition, exp.EQ):
        return []
    sides = [condition.this, condition.expression]
    return sides if all(isinstance(side, exp.Column) for side in sides) else []


def _greatest(
    translation: Translates,
    sides: tuple[exp.Expression, exp.Expression],
    condition: exp.Expression,
    named: Named,
    uid: str,
) -> Relation | None:
    """Translate the join of a query's windows with the greatest values of these same windows.

    Returns:
        The rows of the first query that have the greatest value of their window; None: the second
        query is not of the first one's greatest.
    """
    counts, most = sides
    maximum = most.this
    inner = from_of(maximum)
    items = {alias_name(node): node.unalias() for node in maximum.expressions}
    greatest = [name for name, node in items.items() if isinstance(node, exp.Max)]
    group = maximum.args.get("group")
    keys = {node.sql(DIALECT) for node in group.expressions} if group else set()
    is_same = isinstance(inner, exp.Subquery) and inner.this == counts.this
    if not is_same or keys != {START, END} or {START, END, *greatest} != {*items}:
        return None
    if not isinstance(condition, exp.GTE | exp.EQ) or len(greatest) != 1:
        return None
    column, other = condition.this, condition.expression
    if not (isinstance(column, exp.Column) and isinstance(other, exp.Column)):
        return None
    if (other.table, other.name) != (most.alias, greatest[0]) or column.table != counts.alias:
        return None
    if items[greatest[0]].this.name != column.name:
        return None
    relation = translation.of(counts.this, named, counts.alias)
    result = of_windows(
        translation, relation, [START, END], Places(column.name, True, 1, True), uid or "greatest"
    )
    assert result.columns is not None
    qualified = {(counts.alias, name): name for name in result.columns}
    qualified |= {(most.alias, START): START, (most.alias, END): END}
    qualified |= {(most.alias, greatest[0]): column.name}
    names = frozenset([counts.alias, most.alias])
    return replace(result, names=names, qualified=qualified)


def of_windows(
    translation: Translates,
    relation: Relation,
    keys: list[str],
    order_of_rows: Places,
    uid: str,
    place: str | None = None,
) -> Relation:
    """Keep the first rows of each key, of which the window's end is a part: they come together.

    Args:
        translation: of the text.
        relation: rows of windows that are done.
        keys: the columns.
        order_of_rows: of the rows.
        uid: of the step.
        place: as of `ranked`.
    """
    pipeline = relation.pipeline(translation.name).key_by(*keys)
    rows = pipeline.process(ranked(order_of_rows, place), uid=translation.new_uid(uid, "first"))
    columns = relation.columns
    if place is not None and columns is not None:
        columns = (*columns, place)
    return replace(relation, rows=rows, columns=columns)


def _join_of_tables(
    translation: Translates,
    sides: tuple[exp.Expression, exp.Expression],
    keys: list[tuple[str, str]],
    named: Named,
    uid: str,
) -> Relation:
    """Translate the join of two windowing table functions, rows as they are or grouped.

    Raises:
        OptionError: the windows differ or are not tumbling, or a side has aggregates.
    """
    names = [side.alias for side in sides]
    what = f"sql: join of {names[0]} and {names[1]} by windows"
    if not keys:
        raise OptionError(f"{what}: ON has no equality of their columns beside the windows")
    is_distinct = [is_grouped(side.this) for side in sides]
    if is_distinct[0] != is_distinct[1]:
        raise OptionError(f"{what}: one of them has GROUP BY: write it for both or for neither")
    parts = [
        _side(translation, side, [pair[at] for pair in keys], named, what)
        for at, side in enumerate(sides)
    ]
    first, second = (part.windows for part in parts)
    if first != second or not isinstance(first, Windows) or first.kind != "tumbling":
        raise OptionError(
            f"{what}: expected TUMBLE of one size for both; they are {first}, {second}"
        )
    qualified = {pair: text for part in parts for pair, text in part.qualified.items()}
    times = {name: f"{name}{TIME}" for name in names}
    key_columns = [f"{KEY}{n}" for n in range(len(keys))]
    rows = (
        Pipeline(translation.name)
        .read(**{name: part.stream for name, part in zip(names, parts, strict=True)})
        .key_by(max_parallelism=None, **dict.fromkeys(names, key_columns))
        .process(
            window_join(
                names[0], names[1], size=first.size_us // 1000, offset=first.offset_us // 1000
            ),
            event_time=times,
            watermark_delay=max(part.delay_ms for part in parts),
            uid=translation.new_uid(uid, "join"),
        )
    )
    if any(is_distinct):
        rows = rows.key_by(*dict.fromkeys((*key_columns, *qualified.values()))).process(
            windowed(first, {"_n": aggregates.count()}),
            event_time=times[names[0]],
            uid=translation.new_uid(f"{uid}-once" if uid else "", "once"),
        )
    for name in names:
        qualified |= {(name, START): START, (name, END): END}
    columns_out = tuple(dict.fromkeys((*key_columns, *qualified.values())))
    return Relation(
        rows, frozenset(names), columns_out, frozenset([START, END]), qualified=qualified
    )


@dataclass(frozen=True)
class _Side:
    """One side of a join by windows: its rows with the columns of the join, and its windows."""

    stream: Stream
    windows: Windows | Sessions
    delay_ms: int
    qualified: Mapping[tuple[str, str], str]


def _side(
    translation: Translates, side: exp.Expression, keys: list[str], named: Named, what: str
) -> _Side:
    source, name = from_of(side.this), side.alias
    assert source is not None
    relation, outputs = _of_side(side.this, translation.table(source, named), what)
    assert relation.windows is not None
    windows, time = windows_of(relation.windows, relation)
    if missing := [key for key in keys if key not in outputs]:
        raise OptionError(f"{what}: {name} has no column {missing[0]!r}, only {', '.join(outputs)}")
    qualified = {(name, column): f"{name}_{column}" for column in outputs}
    columns = {qualified[name, column]: node for column, node in outputs.items()}
    for n, key in enumerate(keys):
        columns.pop(qualified[name, key], None)
        qualified[name, key] = f"{KEY}{n}"
        columns[f"{KEY}{n}"] = outputs[key]
    moment = f"{name}{TIME}"
    computed = {**columns, moment: exp.column(time, quoted=True)}
    relation = replace(relation, windows=None).select(computed)
    rows = relation.without_null([f"{KEY}{n}" for n in range(len(keys))]).rows
    if not isinstance(rows, Stream):
        raise OptionError(f"{what}: their rows have to be those of tables")
    if is_grouped(side.this):
        rows = _first_of_batches(rows, windows, moment, tuple(columns))
    return _Side(rows, windows, relation.delay_ms, qualified)


def _of_side(
    select: exp.Expression, relation: Relation, what: str
) -> tuple[Relation, dict[str, exp.Expression]]:
    """Return the rows of a side behind WHERE, and its columns but for the windows' bounds."""
    outputs: dict[str, exp.Expression] = {}
    for node in select.expressions:
        if node.is_star:
            raise OptionError(f"{what}: SELECT *: name the columns")
        name, plain = alias_name(node), node.unalias()
        if name not in (START, END):
            outputs[name] = relation.resolve(plain)
    group = select.args.get("group")
    if group is not None:
        keys = {node.sql(DIALECT) for node in group.expressions}
        items = {node.unalias().sql(DIALECT) for node in select.expressions}
        if not items <= keys or not {START, END} <= keys or keys - items - {START, END}:
            raise OptionError(
                f"{what}: {select.sql(DIALECT)[:60]}…: expected the columns of GROUP BY and no "
                f"aggregates: write the aggregates to a topic, and join that"
            )
    if (where := select.args.get("where")) is not None:
        relation = relation.filter(relation.resolve(where.this))
    return relation, outputs


def best_of_windows(
    translation: Translates,
    select: exp.Select,
    keys: list[exp.Expression],
    order: exp.Ordered,
    named: Named,
    uid: str,
) -> Relation:
    """Keep one row of each window of a table function, the first one in an order.

    Args:
        translation: of the text.
        select: the query of the table function, without the ROW_NUMBER.
        keys: of PARTITION BY.
        order: of the rows.
        named: the queries of WITH.
        uid: of the step.

    Raises:
        OptionError: PARTITION BY lacks the window, or the types of the columns are not known.
    """
    source = from_of(select)
    assert source is not None
    relation = translation.table(source, named)
    assert relation.windows is not None
    windows, time = windows_of(relation.windows, relation)
    if (where := select.args.get("where")) is not None:
        relation = relation.filter(relation.resolve(where.this))
    parts = [key for key in keys if key.name not in (START, END)]
    if len(keys) - len(parts) != 2:
        raise OptionError(
            "sql: ROW_NUMBER() of a windowing table function: expected PARTITION BY window_start, "
            "window_end and further columns"
        )
    outputs, bounds = _outputs(select, relation)
    places = {f"{KEY}{n}": relation.resolve(key) for n, key in enumerate(parts)}
    computed = {
        **outputs,
        **(places or {ALL_ROWS: exp.true()}),
        TIME: exp.column(time, quoted=True),
        ORDER: relation.resolve(order.this),
    }
    rows = replace(relation, windows=None).select(computed).rows
    schema = known_schema(rows) if isinstance(rows, Stream) else None
    if schema is None:
        raise OptionError("sql: ROW_NUMBER() of windows: the types of the columns are not known")
    kinds = {name: schema.field(name).type for name in outputs}
    order_of_rows = Places(ORDER, bool(order.args.get("desc")))
    pipeline = replace(relation, rows=rows).pipeline(translation.name)
    row = best_row(order_of_rows, kinds)
    thinned = _first_of_batches(pipeline, windows, TIME, (*places,), order_of_rows)
    done = thinned.key_by(*(places or [ALL_ROWS])).process(
        windowed(windows, {ROW: row}),
        event_time=TIME,
        watermark_delay=relation.delay_ms,
        uid=translation.new_uid(uid, "first"),
    )
    picked: dict[str, exp.Expression] = {
        name: exp.column(name, table=ROW, quoted=True) for name in outputs
    }
    picked |= {name: exp.column(name, quoted=True) for name in dict.fromkeys(bounds)}
    result = Relation(done, times=frozenset([START, END]), ends=frozenset([END]))
    return result.select(picked)


def _first_of_batches(
    rows: Rows,
    windows: Windows | Sessions,
    time: str,
    keys: tuple[str, ...],
    order_of_rows: Places | None = None,
) -> Rows:
    """Leave out rows that cannot be first in a window; a session may end later by any of them."""
    if isinstance(windows, Sessions):
        return rows
    return rows.filter(FirstOfBatch(windows, time, keys, order_of_rows))


def _outputs(select: exp.Select, relation: Relation) -> tuple[dict[str, exp.Expression], list[str]]:
    """Return the columns of a query of a windowing table function, and those of the window."""
    bounds: list[str] = []
    outputs: dict[str, exp.Expression] = {}
    for node in select.expressions:
        if node.is_star:
            stars = relation.star or relation.columns or ()
            outputs |= {name: exp.column(name, quoted=True) for name in stars}
            bounds += [START, END]
        elif node.unalias().name in (START, END) and isinstance(node.unalias(), exp.Column):
            bounds.append(node.unalias().name)
        else:
            outputs[alias_name(node)] = relation.resolve(node.unalias())
    return outputs, bounds
