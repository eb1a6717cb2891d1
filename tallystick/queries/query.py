"""`ts.sql`: a query over streams as a pipeline of the steps that there are."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sqlglot import exp

from tallystick.api.kafka_source import KafkaSource
from tallystick.api.pipeline import Pipeline
from tallystick.api.routing import RoutedSink
from tallystick.api.streams import Stream, stream
from tallystick.arguments import checked, near
from tallystick.epoch.two_phase import Sink
from tallystick.errors import OptionError
from tallystick.expressions.parsing import DIALECT
from tallystick.pipeline.keyed import columns_of
from tallystick.queries.grouping import grouped, is_grouped, table_function, unknown_function
from tallystick.queries.joining import joined
from tallystick.queries.outputs import (
    apart,
    as_declared,
    by_source,
    named_as,
    output_name,
    routed,
    sink_of,
    under,
    views_and_inserts,
)
from tallystick.queries.parsing import (
    alias_name,
    conjuncts,
    from_of,
    milliseconds,
    place_of,
    shown,
    statements_of,
)
from tallystick.queries.ranking import Places
from tallystick.queries.relations import Relation, add_output, known_columns
from tallystick.queries.window_joins import (
    best_of_windows,
    is_of_windows,
    of_windows,
    window_joined,
)
from tallystick.spark.cluster import Cluster
from tallystick.state.functions.ready_made import deduplicate

_REFUSED = {
    "order": ("ORDER BY", "a stream has no end to sort by; sort what the sink holds"),
    "limit": ("LIMIT", "rows of a stream have no order to count by"),
    "offset": ("OFFSET", "rows of a stream have no order to count by"),
    "qualify": ("QUALIFY", "write the ROW_NUMBER in a subquery, and WHERE rn = 1 around it"),
    "laterals": ("LATERAL VIEW", "write a map_batches before the query"),
    "pivots": ("PIVOT", "write CASE WHEN … in aggregates"),
    "windows": ("WINDOW", "write OVER (PARTITION BY …)"),
    "sort": ("SORT BY", "a stream has no end to sort by"),
    "cluster": ("CLUSTER BY", "a stream has no end to sort by"),
    "distribute": ("DISTRIBUTE BY", "rows go by the key of GROUP BY"),
}
_WATERMARK = re.compile(r"\s*`?(\w+)`?\s*(?:-\s*(.+))?", re.S)


@checked
def sql(
    text: str,
    *,
    name: str = "sql",
    watermark: Mapping[str, str] | None = None,
    uid: str | None = None,
    sinks: Mapping[str, Sink] | None = None,
    **tables: KafkaSource | Stream,
) -> Pipeline:
    """Translate a query in Spark's SQL into a pipeline, to `write` and `start` as any other.

    WHERE and expressions become `filter` and `select`, GROUP BY `aggregate` or `windowed`, JOIN
    `interval_join` or `temporal_join`, ROW_NUMBER() … = 1 and DISTINCT `deduplicate`, UNION ALL
    several sources. The windowing table functions of Flink (FLIP-145) are understood too.

    Args:
        text: SELECT …, or INSERT INTO sink SELECT …; several of these, of the same rows, or of
            tables with WHERE and expressions. CREATE VIEW name AS SELECT … before them.
        name: of the pipeline.
        watermark: by table, the column of event times, and how late rows may be behind the latest,
            such as "at - 10 seconds".
        uid: names the state of the outermost keyed step. None: "group", "join" or "distinct"; that
            of a subquery or a WITH has the subquery's name.
        sinks: by the names of INSERT INTO.
        tables: the sources, by the names that the query has for them.

    Returns:
        The pipeline, whole but for `write` where the text has no INSERT INTO.

    Raises:
        OptionError: the text is no SQL, or has a clause that would need retractions or has no bound
            on its state; the message names the clause and what to write instead.
    """
    return pipeline_of(text, name, tables, watermark or {}, sinks or {}, uid=uid)


def pipeline_of(
    text: str,
    name: str,
    tables: Mapping[str, KafkaSource | Stream],
    watermark: Mapping[str, str],
    sinks: Mapping[str, Sink],
    *,
    uid: str | None = None,
    declared: Mapping[str, Sequence[str]] | None = None,
) -> Pipeline:
    """Translate a text as `sql` does.

    Args:
        text: of the statements.
        name: of the pipeline.
        tables: the sources.
        watermark: as of `sql`.
        sinks: by name.
        uid: as of `sql`.
        declared: the columns of sinks, by the sink's name; not named: those of the query.

    Raises:
        OptionError: as of `sql`.
    """
    statements = statements_of(text)
    try:
        return _translated(
            statements, name, _relations(tables, watermark), sinks, uid, declared or {}
        )
    except OptionError:
        # The mistake itself, rather than what follows from it; a translation may change its trees.
        if unknown := unknown_function(statements_of(text)):
            raise OptionError(unknown) from None
        raise


def _translated(
    statements: list[exp.Expression],
    name: str,
    tables: dict[str, Relation],
    sinks: Mapping[str, Sink],
    uid: str | None,
    declared: Mapping[str, Sequence[str]],
) -> Pipeline:
    views, inserts = views_and_inserts(statements)
    translation = Translation(name, tables)
    columns = {one.target: declared.get(one.target, ()) for one in inserts}
    inserts = [replace(one, query=named_as(one.query, columns[one.target])) for one in inserts]
    if len(inserts) == 1:
        target = inserts[0].target
        relation = translation.of(inserts[0].query, views, uid or "")
        pipeline = as_declared(relation, columns[target], target).pipeline(name)
        return pipeline.write(sink_of(target, sinks)) if target else pipeline
    groups = by_source(inserts)
    relations = [translation.table(source, views) for source, _ in groups]
    bases = [relation.pipeline(name) for relation in relations]
    routes: list[list[Sink | RoutedSink]] = []
    for (_, members), shared, base in zip(groups, relations, bases, strict=True):
        routes.append([])
        for one in members:
            query = translation.plain(one.query, under(replace(shared, rows=base), one.query))
            query = as_declared(query, columns[one.target], one.target)
            routes[-1].append(routed(base, query, sink_of(one.target, sinks)))
    if len(groups) > 1:
        bases[0] = Pipeline(name).read(*apart(groups, relations))
    others = {output_name(number): routes[number] for number in range(1, len(groups))}
    return bases[0].write(*routes[0], **others)


def _relations(
    tables: Mapping[str, KafkaSource | Stream], watermarks: Mapping[str, str]
) -> dict[str, Relation]:
    for table in watermarks.keys() - tables.keys():
        raise OptionError(
            f"sql: watermark of {table!r}: there is no such table, only {', '.join(tables)}."
            f"{near(table, list(tables))}"
        )
    relations = {}
    for table, source in tables.items():
        rows = source if isinstance(source, Stream) else stream(source)
        relation = Relation(rows, frozenset([table]), known_columns(rows), star=_star(rows))
        if table in watermarks:
            match = _WATERMARK.fullmatch(watermarks[table])
            if match is None:
                raise OptionError(
                    f"sql: watermark={{{table!r}: {watermarks[table]!r}}}: expected a column and a "
                    f"delay, such as 'at - 10 seconds'"
                )
            delay = milliseconds(exp.Literal.string(match[2]), "watermark") if match[2] else 0
            relation = replace(relation, times=frozenset([match[1]]), delay_ms=delay)
        relations[table] = relation
    return relations


def _star(rows: Stream) -> tuple[str, ...] | None:
    """Return the columns of a source's value, without Kafka's own; None: all that there are."""
    schema = getattr(getattr(rows.source, "value", None), "schema", None)
    if rows.steps or not isinstance(schema, str):
        return None
    return tuple(columns_of(Cluster.at_hand(None), schema).names)


@dataclass
class Translation:
    """A translation of one text.

    Args:
        name: of the pipeline.
        tables: the sources' rows by name.
        uids: those that steps have.
        reads: how often each table is read.
    """

    name: str
    tables: Mapping[str, Relation]
    uids: set[str] = field(default_factory=set)
    reads: dict[str, int] = field(default_factory=dict)

    def of(self, query: exp.Expression, outer: Mapping[str, exp.Query], uid: str) -> Relation:
        """Translate a query.

        Args:
            query: SELECT, UNION ALL or a subquery in parentheses.
            outer: the queries of WITH that it may name.
            uid: of its keyed step; "": by its kind.
        """
        if isinstance(query, exp.Subquery):
            return self.of(query.this, outer, uid)
        named = dict(outer)
        if (with_ := query.args.get("with_") or query.args.get("with")) is not None:
            for cte in with_.expressions:
                named[cte.alias] = cte.this
        if isinstance(query, exp.SetOperation):
            return self._union(query, named)
        if not isinstance(query, exp.Select):
            raise OptionError(f"sql: {query.key.upper()}: expected SELECT")
        return self._select(query.copy(), named, uid)

    def _union(self, query: exp.SetOperation, named: Mapping[str, exp.Query]) -> Relation:
        if not isinstance(query, exp.Union) or query.args.get("distinct"):
            raise OptionError(
                f"sql: {query.key.upper()}: streams are joined by UNION ALL alone; DISTINCT goes "
                f"around it: SELECT DISTINCT * FROM (… UNION ALL …)"
            )
        for clause in ("order", "limit"):
            if query.args.get(clause):
                raise _refused(clause)
        sides = [self.of(side, named, "") for side in (query.left, query.right)]
        streams: list[Stream] = []
        for side in sides:
            if isinstance(side.rows, Stream):
                streams.append(side.rows)
            elif not side.rows.steps and not side.rows.inputs.are_named:
                streams += [one for _, one in side.rows.inputs.streams]
            else:
                raise OptionError(
                    "sql: UNION ALL behind GROUP BY, DISTINCT or JOIN: rows of several sources "
                    "become one stream before the first keyed step: write GROUP BY around it"
                )
        assert all(one.uid is not None for one in streams), "each table's stream has its name"
        rows = Pipeline(self.name).read(*streams)
        times = frozenset.intersection(*(side.times for side in sides))
        delay = max(side.delay_ms for side in sides)
        return Relation(rows, frozenset(), sides[0].columns, times, delay)

    def _select(self, select: exp.Select, named: Mapping[str, exp.Query], uid: str) -> Relation:
        for clause in _REFUSED:
            if select.args.get(clause):
                raise _refused(clause)
        if (first := self._first_rows(select, named, uid)) is not None:
            return first
        source = from_of(select)
        if source is None:
            raise OptionError("sql: SELECT without FROM: name a table")
        _refuse_subqueries(select)
        joins = select.args.get("joins") or []
        if len(joins) > 1:
            raise OptionError(
                f"sql: a join of {len(joins) + 1} tables: a pipeline joins two; write the first "
                f"join to a topic, and join that"
            )
        by_windows = window_joined(self, select, named, uid)
        relation = by_windows if by_windows is not None else self.table(source, named)
        if joins and by_windows is None:
            second = self.table(joins[0].this, named)
            step_uid = self.new_uid("" if is_grouped(select) else uid, "join")
            relation = joined(select, joins[0], relation, second, step_uid, self.name)
        where = select.args.get("where")
        if where is not None:
            relation.refuse_updates("WHERE around")
            relation = relation.filter(relation.resolve(where.this))
        for node in select.find_all(exp.Window):
            raise OptionError(
                f"sql: {node.sql(DIALECT)}: OVER windows: only ROW_NUMBER() … in a subquery with "
                f"WHERE rn = 1 around it; others are a vectorised function"
            )
        if is_grouped(select):
            relation = grouped(select, relation, self.new_uid(uid, "group"), self.name)
        else:
            relation = self._projected(select, relation)
        if (distinct := select.args.get("distinct")) is not None:
            if distinct.args.get("on") is not None:
                raise OptionError(
                    "sql: DISTINCT ON: write ROW_NUMBER() OVER (PARTITION BY … ORDER BY …) AS rn "
                    "in a subquery, and WHERE rn = 1 around it"
                )
            relation = self._distinct(relation, uid)
        return relation

    def plain(self, query: exp.Query, relation: Relation) -> Relation:
        """Translate WHERE and the projection of a query whose rows are translated already."""
        for clause in _REFUSED:
            if query.args.get(clause):
                raise _refused(clause)
        assert isinstance(query, exp.Select)
        _refuse_subqueries(query)
        if (where := query.args.get("where")) is not None:
            relation.refuse_updates("WHERE around")
            relation = relation.filter(relation.resolve(where.this))
        return self._projected(query, relation)

    def _projected(self, select: exp.Select, relation: Relation) -> Relation:
        if relation.windows is not None:
            raise OptionError(
                f"sql: {relation.windows.name.upper()}(…) without GROUP BY window_start, "
                f"window_end: rows go into windows to be aggregated"
            )
        nodes = select.expressions
        if all(node.is_star for node in nodes) and relation.qualified is None:
            if relation.star is None:
                return relation
            return relation.select({one: exp.column(one, quoted=True) for one in relation.star})
        outputs: dict[str, exp.Expression] = {}
        for node in nodes:
            if node.is_star:
                if relation.columns is None:
                    raise OptionError(
                        "sql: SELECT * beside other columns: those of the table are not known: "
                        "name them"
                    )
                names = {(one, one): one for one in relation.star or relation.columns}
                for (table, name), text in (relation.qualified or names).items():
                    if relation.star is None or text in relation.star:
                        where = f", in {table} and before it" if relation.qualified else ""
                        add_output(outputs, name, exp.column(text, quoted=True), where)
            else:
                add_output(outputs, alias_name(node), relation.resolve(node.unalias()))
        return relation.select(outputs)

    def _distinct(self, relation: Relation, uid: str) -> Relation:
        relation.refuse_updates("DISTINCT over")
        if relation.columns is None:
            raise OptionError("sql: SELECT DISTINCT *: the columns are not known: name them")
        rows = relation.pipeline(self.name).key_by(*relation.columns)
        processed = rows.process(deduplicate(), uid=self.new_uid(uid, "distinct"))
        return Relation(processed, columns=relation.columns)

    def _first_rows(
        self, select: exp.Select, named: Mapping[str, exp.Query], uid: str
    ) -> Relation | None:
        """Translate ROW_NUMBER() OVER (PARTITION BY …) = 1 around a subquery; None: it is none."""
        source = from_of(select)
        inner = source.this if isinstance(source, exp.Subquery) else None
        if isinstance(source, exp.Table) and isinstance(named.get(source.name), exp.Select):
            inner = named[source.name]
        if source is None or not isinstance(inner, exp.Select):
            return None
        numbers = {
            node.alias: node.this
            for node in inner.expressions
            if isinstance(node, exp.Alias)
            and isinstance(node.this, exp.Window)
            and isinstance(node.this.this, exp.RowNumber)
        }
        if not numbers:
            return None
        where = select.args.get("where")
        conditions = conjuncts(where.this if where is not None else None)
        alias, window = next(iter(numbers.items()))
        wanted = [
            one for one in conditions if any(c.name == alias for c in one.find_all(exp.Column))
        ]
        orders = window.args.get("order")
        order = _only_order(orders) if orders is not None else None
        keys = window.args.get("partition_by") or []
        source_select = inner.copy()
        kept = [node for node in source_select.expressions if node.alias != alias]
        source_select.set("expressions", kept or [exp.Star()])
        count = _count_of(wanted, alias) if len(numbers) == 1 else None
        name = uid or source.alias_or_name or "first"
        if is_of_windows(inner) and order is not None and count == 1:
            first = best_of_windows(self, source_select, keys, order, named, name)
        else:
            relation = self.of(source_select, named, "")
            self._check_order(inner, orders)
            columns = [relation.resolve(key) for key in keys]
            if not columns or not all(isinstance(one, exp.Column) for one in columns):
                raise OptionError("sql: ROW_NUMBER() OVER: expected PARTITION BY columns")
            names = [one.name for one in columns]
            if count and relation.ends & {*names} and _is_by_column(orders, relation):
                assert order is not None
                order_of_rows = Places(order.this.name, bool(order.args.get("desc")), count)
                first = of_windows(self, relation, names, order_of_rows, name, alias)
            else:
                _check_first_of_all(alias, count, orders)
                rows = relation.pipeline(self.name).key_by(*names)
                processed = rows.process(deduplicate(), uid=self.new_uid(name, "first"))
                first = Relation(processed, columns=relation.columns)
        first = replace(first, names=frozenset([source.alias_or_name]))
        others = [one for one in conditions if one not in wanted]
        if others:
            first = first.filter(first.resolve(exp.and_(*others)))
        return self._projected(select, first)

    def _check_order(self, inner: exp.Select, orders: exp.Expression | None) -> None:
        """Refuse a column of ORDER BY that is neither in the table of a query nor in its output."""
        source = from_of(inner)
        table = self.tables.get(source.name) if isinstance(source, exp.Table) else None
        if orders is None or table is None:
            return
        outputs = {node.alias_or_name for node in inner.expressions}
        for column in orders.find_all(exp.Column):
            if not column.table and column.name not in outputs:
                table.resolve(column)

    def table(self, node: exp.Expression, named: Mapping[str, exp.Query]) -> Relation:
        """Translate a table of FROM or JOIN."""
        alias = node.alias
        if isinstance(node, exp.Subquery):
            relation = self.of(node.this, named, alias)
            return replace(relation, names=frozenset([alias]) if alias else frozenset())
        if not isinstance(node, exp.Table):
            raise OptionError(f"sql: {node.sql(DIALECT)}: expected the name of a table")
        if (function := table_function(node.this)) is not None:
            if not isinstance(function.expressions[0], exp.Column):
                raise OptionError(
                    f"sql: {function.name}({shown(function.expressions[0])[:40]}…): expected TABLE "
                    f"and a name: write the query into WITH name AS (…)"
                )
            inner = exp.to_table(function.expressions[0].name)
            relation = self.table(inner, named)
            names = relation.names | ({alias} if alias else set())
            return replace(relation, windows=function, names=names)
        name = node.name
        if name in named:
            others = {key: query for key, query in named.items() if key != name}
            relation = self.of(named[name], others, name)
            return replace(relation, names=frozenset([alias or name]))
        if name not in self.tables:
            raise OptionError(
                f"sql: {place_of(node)}there is no table {name!r}; tables: "
                f"{', '.join([*self.tables, *named]) or 'none'}.{near(name, list(self.tables))}"
            )
        relation = self.tables[name]
        self.reads[name] = number = self.reads.get(name, 0) + 1
        rows = relation.rows
        assert isinstance(rows, Stream)
        if rows.uid is None:
            rows = replace(rows, uid=name if number == 1 else f"{name}-{number}")
        return replace(relation, rows=rows, names=frozenset([alias or name]))

    def new_uid(self, given: str, kind: str) -> str:
        """Return a uid that no other step has."""
        base = given or kind
        uid, number = base, 1
        while uid in self.uids:
            number += 1
            uid = f"{base}-{number}"
        self.uids.add(uid)
        return uid


def _count_of(wanted: Sequence[exp.Expression], alias: str) -> int | None:
    """Return up to which number rows are kept; None: the conditions are others."""
    if len(wanted) != 1 or not isinstance(wanted[0], exp.EQ | exp.LTE | exp.LT):
        return None
    one = wanted[0]
    number = one.expression
    if one.this.name != alias or not isinstance(number, exp.Literal) or not number.name.isdigit():
        return None
    count = int(number.name) - isinstance(one, exp.LT)
    return count if count == 1 or (count > 1 and not isinstance(one, exp.EQ)) else None


def _only_order(orders: exp.Expression) -> exp.Ordered:
    """Return the order of an ORDER BY.

    Raises:
        OptionError: there are several, or nulls are elsewhere than Spark has them by default.
    """
    first, *others = orders.expressions
    is_default = bool(first.args.get("nulls_first")) != bool(first.args.get("desc"))
    if others or not is_default:
        raise OptionError(
            f"sql: ROW_NUMBER() OVER (… {shown(orders)}): expected one column or expression, and "
            f"no NULLS FIRST or LAST: a null is less than all values"
        )
    assert isinstance(first, exp.Ordered)
    return first


def _is_by_column(orders: exp.Expression | None, relation: Relation) -> bool:
    """True if an ORDER BY is of one column of the rows."""
    if orders is None or len(orders.expressions) != 1:
        return False
    column = orders.expressions[0].this
    return isinstance(column, exp.Column) and column.name in (relation.columns or ())


def _check_first_of_all(alias: str, count: int | None, orders: exp.Expression | None) -> None:
    """Refuse another ROW_NUMBER than that of the first row of a key.

    Raises:
        OptionError: more rows are asked for, or the newest.
    """
    if count != 1:
        raise OptionError(
            f"sql: ROW_NUMBER() AS {alias}: expected WHERE {alias} = 1, the first row of each "
            f"key, or PARTITION BY the start and end of windows that a GROUP BY made; of the "
            f"greatest values of a column, ts.top_n(n, column) keeps n"
        )
    if orders is not None and any(one.args.get("desc") for one in orders.expressions):
        raise OptionError(
            "sql: ROW_NUMBER() … ORDER BY … DESC = 1: the newest row of a key changes: write "
            "last(…) in a GROUP BY of the key"
        )


def _refuse_subqueries(select: exp.Select) -> None:
    """Refuse a query in an expression or a condition, and an aggregate in WHERE.

    Raises:
        OptionError: there is one.
    """
    where = select.args.get("where")
    for node in () if where is None else where.find_all(exp.AggFunc):
        raise OptionError(
            f"sql: {node.sql(DIALECT)} in WHERE: rows are chosen there before they are grouped: "
            f"write HAVING, with a window in GROUP BY"
        )
    parts = [*select.expressions]
    parts += [select.args[name] for name in ("where", "having", "group") if select.args.get(name)]
    for part in parts:
        for node in part.find_all(exp.Subquery, exp.Exists, exp.Select):
            raise OptionError(
                f"sql: {node.sql(DIALECT)}: a query in a condition: write a JOIN; values that "
                f"change seldom are a broadcast table, ts.enrich(…)"
            )


def _refused(clause: str) -> OptionError:
    word, reason = _REFUSED[clause]
    return OptionError(f"sql: {word}: {reason}")
