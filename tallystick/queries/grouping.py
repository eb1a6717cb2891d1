"""GROUP BY: the keyed step of a query, `aggregate` or `windowed`.

Source: Spark SQL's `window` and `session_window`; Flink SQL's windowing table functions (FLIP-145)
and group windows.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from sqlglot import exp

from tallystick.errors import OptionError
from tallystick.expressions.functions import ALIASES, FUNCTIONS
from tallystick.expressions.parsing import DIALECT, OF_JSON_TEXTS, no_function
from tallystick.queries.parsing import (
    PARTITION,
    TABLE_FUNCTIONS,
    WINDOW,
    alias_name,
    milliseconds,
    place_of,
    shown,
)
from tallystick.queries.relations import WINDOW_NAMES, Relation, add_output, is_column
from tallystick.state.functions import aggregates
from tallystick.state.functions.aggregates import Aggregate
from tallystick.state.functions.ready_made import aggregate
from tallystick.state.functions.windowed import windowed
from tallystick.state.functions.windows import (
    Sessions,
    Windows,
    cumulative,
    hopping,
    session,
    tumbling,
)

START, END = "window_start", "window_end"
_BOUNDS = {"start": START, "end": END, START: START, END: END}
_GROUP_WINDOWS = {"TUMBLE", "HOP", "CUMULATE", "SESSION", WINDOW.upper(), "SESSION_WINDOW"}
_FLINK_BOUNDS = {
    f"{kind}_{bound.upper()}": column
    for kind in ("TUMBLE", "HOP", "SESSION")
    for bound, column in (("start", START), ("end", END))
}
_OF_QUERIES = {
    *_GROUP_WINDOWS,
    *_FLINK_BOUNDS,
    *(f"{kind}_{time}" for kind in _GROUP_WINDOWS for time in ("ROWTIME", "PROCTIME")),
    *("TABLE", "DESCRIPTOR", "PROCTIME", "WINDOW_TIME", "ISNOTNULL"),
}
"""Functions of queries that are taken, or refused with words of their own."""
ALL_ROWS = "_all_rows"
"""The key of an aggregate over all rows."""


@dataclass
class Group:
    """A GROUP BY during the translation, with the columns that replace expressions.

    Args:
        relation: the rows.
        keys: the expressions of the key.
        replaced: the columns behind the keyed step, by the text of what they replace.
        aggregates: by their columns.
        inputs: the columns to compute before the step.
    """

    relation: Relation
    keys: dict[str, exp.Expression] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    aggregates: dict[str, Aggregate] = field(default_factory=dict)
    inputs: dict[str, exp.Expression] = field(default_factory=dict)
    window: exp.Expression | None = None

    def after(self, node: exp.Expression) -> exp.Expression:
        """Return an expression over the rows that the step puts out.

        Raises:
            OptionError: it reads a column that is neither of the key nor in an aggregate.
        """
        result = self.relation.resolve(node).transform(self._after)
        if isinstance(result, exp.Expression):
            known = {*self.keys, *self.aggregates, *(self.replaced.values())}
            known |= set() if self.window is None else {START, END}
            for column in result.find_all(exp.Column):
                if column.name not in known:
                    raise OptionError(
                        f"sql: {place_of(column)}column {shown(column)!r} is neither in GROUP BY "
                        f"nor in an aggregate: name it in GROUP BY, or write first({shown(column)})"
                    )
        return result

    def _after(self, node: exp.Expression) -> exp.Expression:
        if (text := node.sql(DIALECT)) in self.replaced:
            return exp.column(self.replaced[text], quoted=True)
        if bound := self._bound(node):
            return exp.column(bound, quoted=True)
        if self._is_window(node):
            bounds = {"start": START, "end": END}
            fields = [
                exp.PropertyEQ(
                    this=exp.to_identifier(name), expression=exp.column(one, quoted=True)
                )
                for name, one in bounds.items()
            ]
            return exp.Struct(expressions=fields)
        if is_aggregate(node):
            return self._aggregate(node)
        return node

    def _is_window(self, node: exp.Expression) -> bool:
        """True for the struct of a window's start and end that Spark's functions put out."""
        is_sparks = function_name(self.window) in {name.upper() for name in WINDOW_NAMES}
        return (
            is_sparks
            and isinstance(node, exp.Column)
            and not node.table
            and node.name in ("window", "session_window")
        )

    def _bound(self, node: exp.Expression) -> str | None:
        """Return the column of a window's start or end, if an expression is that."""
        if self.window is None:
            return None
        if isinstance(node, exp.Column):
            if node.table in WINDOW_NAMES:
                if node.name not in _BOUNDS:
                    raise OptionError(
                        f"sql: {shown(node)}: a window has start and end: window.start"
                    )
                return _BOUNDS[node.name]
            return node.name if node.name in (START, END) and not node.table else None
        if isinstance(node, exp.Dot) and function_name(node.this) in _GROUP_WINDOWS:
            return _BOUNDS.get(node.expression.name)
        name = function_name(node)
        if name.endswith(("_ROWTIME", "_PROCTIME")) or name == "WINDOW_TIME":
            raise OptionError(
                f"sql: {shown(node)}: the last moment of a window: write its end, window.end or "
                f"TUMBLE_END(…)"
            )
        return _FLINK_BOUNDS.get(name)

    def _aggregate(self, node: exp.Expression) -> exp.Expression:
        text = node.sql(DIALECT)
        if text not in self.replaced:
            condition = None
            if isinstance(node, exp.Filter):
                condition, node = node.expression.this, node.this
            return self._of_function(node, condition, text)
        return exp.column(self.replaced[text], quoted=True)

    def _of_function(
        self, node: exp.Expression, condition: exp.Expression | None, text: str
    ) -> exp.Expression:
        argument = node.this if not isinstance(node, exp.Anonymous) else None
        if isinstance(argument, exp.Distinct):
            raise OptionError(
                f"sql: {text}: exact distinct counts keep every value: write "
                f"approx_count_distinct(…), or GROUP BY the value first"
            )
        if isinstance(node, exp.Count):
            return self._count(argument, condition, text)
        if isinstance(node, exp.Avg) and self.window is None:  # ts.aggregate has none
            total = self._add(
                aggregates.sum, exp.cast(argument, "double"), condition, text + " sum"
            )
            count = self._count(argument, condition, text + " count")
            return exp.paren(exp.Div(this=total, expression=exp.func("nullif", count, "0")))
        if type(node) not in _FUNCTIONS:
            raise OptionError(f"sql: {text}: no such aggregate here; there are {_NAMES}")
        return self._add(_FUNCTIONS[type(node)], argument, condition, text)

    def _count(
        self, argument: exp.Expression | None, condition: exp.Expression | None, text: str
    ) -> exp.Expression:
        whole = argument is None or isinstance(argument, exp.Star | exp.Literal)
        if whole and condition is None:
            return self._named(text, aggregates.count())
        is_there = exp.true() if whole else exp.not_(exp.Is(this=argument, expression=exp.null()))
        both = is_there if condition is None else exp.and_(condition, is_there)
        one = exp.Case().when(both, "1").else_("0")
        total = self._add(aggregates.sum, exp.cast(one, "bigint"), None, text)
        return exp.Coalesce(this=total, expressions=[exp.Literal.number(0)])

    def _add(
        self,
        make: Callable[[str], Aggregate],
        argument: exp.Expression,
        condition: exp.Expression | None,
        text: str,
    ) -> exp.Expression:
        """Add an aggregate; a column for its argument is computed first where none exists."""
        argument = self.relation.resolve(argument)
        if condition is not None:
            argument = exp.Case().when(self.relation.resolve(condition), argument)
        if isinstance(argument, exp.Column) and not argument.table:
            return self._named(text, make(argument.name))
        column = next(
            (name for name, known in self.inputs.items() if known == argument),
            f"_input_{len(self.inputs) + 1}",
        )
        self.inputs[column] = argument
        return self._named(text, make(column))

    def _named(self, text: str, one: Aggregate) -> exp.Expression:
        name = self.replaced.setdefault(text, f"_{len(self.aggregates) + 1}")
        self.aggregates[name] = one
        return exp.column(name, quoted=True)


_FUNCTIONS: Mapping[type[exp.Expression], Callable[[str], Aggregate]] = {
    exp.Sum: aggregates.sum,
    exp.Min: aggregates.minimum,
    exp.Max: aggregates.maximum,
    exp.Avg: aggregates.average,
    exp.First: aggregates.first_value,
    exp.FirstValue: aggregates.first_value,
    exp.Last: aggregates.last_value,
    exp.LastValue: aggregates.last_value,
    exp.ApproxDistinct: aggregates.approximate_distinct_count,
    exp.ArrayAgg: aggregates.collect,
}


_NAMES = "count, sum, avg, min, max, first, last, approx_count_distinct, collect_list"


def is_aggregate(node: exp.Expression) -> bool:
    """True for an aggregate that is no window function, with its FILTER."""
    if isinstance(node.parent, exp.Filter | exp.Window):
        return False
    return isinstance(node, exp.AggFunc) or (
        isinstance(node, exp.Filter) and isinstance(node.this, exp.AggFunc)
    )


def is_grouped(select: exp.Select) -> bool:
    """True if a query has GROUP BY or an aggregate."""
    if select.args.get("group"):
        return True
    parts = [*select.expressions, select.args.get("having")]
    return any(
        is_aggregate(node) for part in parts if part is not None for node in part.find_all(exp.Func)
    )


def grouped(select: exp.Select, relation: Relation, uid: str, name: str) -> Relation:
    """Translate GROUP BY, the aggregates, HAVING and the projection of a query.

    Args:
        select: the query.
        relation: its rows, behind WHERE.
        uid: of the keyed step.
        name: of the pipeline.

    Raises:
        OptionError: a clause has no translation.
    """
    relation.refuse_updates("GROUP BY over")
    group = Group(relation)
    names = {str(node.alias): node for node in select.expressions if isinstance(node, exp.Alias)}
    for expression in _group_expressions(select, names):
        _add_key(group, expression, names)
    outputs: dict[str, exp.Expression] = {}
    for node in select.expressions:
        if isinstance(node, exp.Star) or (isinstance(node, exp.Column) and node.is_star):
            raise OptionError("sql: SELECT * beside GROUP BY: name the columns")
        after = group.after(node.unalias())
        add_output(outputs, _output_name(node, after), after)
    having = select.args.get("having")
    condition = None
    if having is not None:
        aliases = {alias: node.this for alias, node in names.items()}
        expanded = having.this.transform(
            lambda node: (
                aliases[node.name].copy()
                if isinstance(node, exp.Column) and not node.table and node.name in aliases
                else node
            )
        )
        condition = group.after(expanded)
    rows = _step(group, uid, name)
    if condition is not None and group.window is None:
        raise OptionError(
            "sql: HAVING without a window: a group that no longer passes would have to be taken "
            "back from the output; group by window(…), or choose where the output is read"
        )
    return rows.filter(condition).select(outputs)


def _output_name(node: exp.Expression, after: exp.Expression) -> str:
    if not isinstance(node, exp.Alias) and isinstance(after, exp.Column):
        bound = {START: "start", END: "end"}.get(after.name)
        if bound and isinstance(node, exp.Dot | exp.Column) and node.name == bound:
            return bound
    if not isinstance(node, exp.Alias) and function_name(node) in _FLINK_BOUNDS:
        return _FLINK_BOUNDS[function_name(node)]
    return alias_name(node)


def _group_expressions(
    select: exp.Select, names: Mapping[str, exp.Expression]
) -> Iterable[exp.Expression]:
    group = select.args.get("group")
    if group is None:
        return
    if any(isinstance(node, exp.Rollup | exp.Cube | exp.GroupingSets) for node in group.walk()):
        raise OptionError(
            "sql: GROUPING SETS, ROLLUP and CUBE: write a query for each grouping, joined by "
            "UNION ALL"
        )
    for node in group.expressions:
        if isinstance(node, exp.Literal) and not node.is_string:
            node = select.expressions[int(node.name) - 1]
        yield node.unalias()


def _add_key(group: Group, node: exp.Expression, names: Mapping[str, exp.Expression]) -> None:
    """Add an expression of GROUP BY to the key, or the windows."""
    if function_name(node) in _GROUP_WINDOWS:
        _set_window(group, node)
        return
    if isinstance(node, exp.Column) and node.name in (START, END) and group.relation.windows:
        group.window = group.relation.windows
        return
    if isinstance(node, exp.Column) and not node.table and node.name in names:
        columns = group.relation.columns
        if columns is None or node.name not in columns:  # the alias of a projection
            node = names[node.name].unalias()
            if function_name(node) in _GROUP_WINDOWS:
                _set_window(group, node)
                return
    resolved = group.relation.resolve(node)
    plain = isinstance(resolved, exp.Column) and not resolved.table
    alias = next((alias for alias, one in names.items() if one.this == node), None)
    name = resolved.name if plain else alias or f"_key_{len(group.keys) + 1}"
    group.keys[name] = resolved
    group.replaced[node.sql(DIALECT)] = name
    group.replaced[resolved.sql(DIALECT)] = name


def _set_window(group: Group, node: exp.Expression) -> None:
    if group.window is not None:
        raise OptionError("sql: two windows in one GROUP BY: a row is in the windows of one kind")
    group.window = node


def _step(group: Group, uid: str, name: str) -> Relation:
    """Return the rows that the keyed step puts out."""
    relation = group.relation
    computed = {
        column: node for column, node in group.keys.items() if not is_column(node, column)
    } | group.inputs
    if not group.keys:
        computed[ALL_ROWS] = exp.true()
    keys = tuple(group.keys) or (ALL_ROWS,)
    if not group.aggregates:
        group.aggregates["_1"] = aggregates.count()
    pipeline = relation.with_columns(computed).pipeline(name).key_by(*keys)
    if group.window is None:
        rows = pipeline.process(aggregate(group.aggregates), uid=uid)
        return Relation(rows, columns=(*keys, *group.aggregates), has_updates=True)
    windows, time = windows_of(group.window, relation)
    _check_partition(group)
    if time in relation.clocks:
        rows = pipeline.process(windowed(windows, group.aggregates, time="processing"), uid=uid)
    else:
        rows = pipeline.process(
            windowed(windows, group.aggregates),
            event_time=time,
            watermark_delay=relation.delay_ms,
            uid=uid,
        )
    columns = (*keys, START, END, *group.aggregates)
    return Relation(rows, columns=columns, times=frozenset([START, END]), ends=frozenset([END]))


def _check_partition(group: Group) -> None:
    """Refuse sessions of other keys than those of the GROUP BY around them.

    Raises:
        OptionError: PARTITION BY of SESSION(TABLE …) has other columns.
    """
    window = group.window
    if window is not group.relation.windows or window is None:
        return
    given: list[exp.Expression] = [
        one for one in window.expressions if function_name(one) == PARTITION
    ]
    columns = [group.relation.resolve(one) for part in given for one in part.args["expressions"]]
    keys = {str(column.name) for column in columns}
    if function_name(window) == "SESSION" and keys != set(group.keys):
        raise OptionError(
            f"sql: SESSION(TABLE … PARTITION BY {', '.join(sorted(keys)) or 'nothing'}) in a GROUP "
            f"BY {', '.join(group.keys) or 'of the windows alone'}: sessions here are of the keys "
            f"of GROUP BY: name the same columns in both"
        )


def function_name(node: exp.Expression | None) -> str:
    """Return the name of a function that sqlglot does not know, in capitals; "" for others."""
    return str(node.name).upper() if isinstance(node, exp.Anonymous) else ""


def windows_of(node: exp.Expression, relation: Relation) -> tuple[Windows | Sessions, str]:
    """Return the windows of a function of GROUP BY or of a table function, and the time's column.

    Raises:
        OptionError: the arguments do not fit, or the column has no watermark.
    """
    kind = function_name(node)
    arguments = list(node.expressions)
    if relation.windows is node:  # TUMBLE(bids, DESCRIPTOR(at), …)
        arguments = [one for one in arguments[1:] if function_name(one) != PARTITION]
    if not arguments:
        raise OptionError(f"sql: {kind}(): expected the column of the time, and a size")
    at = arguments[0]
    if function_name(at) == "DESCRIPTOR":
        at = at.expressions[0]
    time = relation.resolve(at)
    if not isinstance(time, exp.Column) or time.name not in relation.times | relation.clocks:
        known = ", ".join(sorted(relation.times)) or "none"
        raise OptionError(
            f"sql: {shown(node)}: {at.sql(DIALECT)} has no watermark; columns with one: "
            f"{known}. Declare it: watermark={{'<table>': '{at.name} - 10 seconds'}}"
        )
    spans = [milliseconds(argument, kind) for argument in arguments[1:]]
    return _windows(kind, spans, node), time.name


def _windows(kind: str, spans: list[int], node: exp.Expression) -> Windows | Sessions:
    match kind, spans:
        case ("TUMBLE" | "TIME_WINDOW", [size]):
            return tumbling(size)
        case ("TUMBLE", [size, offset]):
            return tumbling(size, offset=offset)
        case ("TIME_WINDOW", [size, every]):
            return hopping(size, every=every)
        case ("TIME_WINDOW", [size, every, offset]):
            return hopping(size, every=every, offset=offset)
        case ("HOP", [every, size]):
            return hopping(size, every=every)
        case ("HOP", [every, size, offset]):
            return hopping(size, every=every, offset=offset)
        case ("CUMULATE", [step, size]):
            return cumulative(size, step=step)
        case ("CUMULATE", [step, size, offset]):
            return cumulative(size, step=step, offset=offset)
        case ("SESSION" | "SESSION_WINDOW", [gap]):
            return session(gap)
    raise OptionError(
        f"sql: {shown(node)}: expected window(at, size[, every]), session_window(at, gap), "
        f"TUMBLE(at, size), HOP(at, every, size), CUMULATE(at, step, size) or SESSION(at, gap)"
    )


def table_function(node: exp.Expression | None) -> exp.Anonymous | None:
    """Return the windowing table function of a FROM, with or without TABLE( ) around it."""
    if isinstance(node, exp.Anonymous):
        if node.name.upper() == "TABLE" and len(node.expressions) == 1:
            return table_function(node.expressions[0])
        if node.name.upper() in TABLE_FUNCTIONS:
            return node
    return None


def unknown_function(statements: Iterable[exp.Expression]) -> str:
    """Return the message about the first function that neither Spark, Flink nor a step here has."""
    unknown = [
        node
        for statement in statements
        for node in statement.find_all(exp.Anonymous)
        if place_of(node)
        and function_name(node) not in _OF_QUERIES
        and node.name.lower() not in {*FUNCTIONS, *ALIASES, *OF_JSON_TEXTS}
    ]
    if not unknown:
        return ""
    first = min(unknown, key=lambda node: (node.meta.get("line", 0), node.meta.get("col", 0)))
    words = no_function(first.name.lower(), others=_NAMES.split(", "))
    return f"sql: {place_of(first)}{words}"
