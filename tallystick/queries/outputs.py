"""INSERT INTO: the statements of a program, and several outputs of the same rows.

Source: Flink SQL's statement sets (EXECUTE STATEMENT SET BEGIN … END).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pyarrow as pa
from sqlglot import exp

from tallystick.api.pipeline import Pipeline
from tallystick.api.routing import RoutedSink, mapped
from tallystick.api.streams import Stream
from tallystick.arguments import near
from tallystick.epoch.two_phase import Sink
from tallystick.errors import OptionError
from tallystick.queries.grouping import is_grouped
from tallystick.queries.parsing import from_of, shown
from tallystick.queries.relations import Relation, known_schema
from tallystick.tasks.outputs import Rows
from tallystick.tasks.steps import MapBatches


@dataclass(frozen=True)
class Insert:
    """A query and the name of its sink; "" is the sink of `write`."""

    target: str
    query: exp.Query


def views_and_inserts(
    statements: Sequence[exp.Expression],
) -> tuple[dict[str, exp.Query], list[Insert]]:
    """Return the queries of CREATE VIEW by name, and those that put rows out.

    Raises:
        OptionError: a statement is of another kind, or there are several without INSERT INTO.
    """
    views: dict[str, exp.Query] = {}
    inserts: list[Insert] = []
    for statement in statements:
        if isinstance(statement, exp.Create) and statement.kind == "VIEW":
            views[statement.this.name] = statement.expression
            continue
        target = ""
        if isinstance(statement, exp.Insert):
            table = statement.this
            target = (table.this if isinstance(table, exp.Schema) else table).name
            statement = statement.expression
        if isinstance(statement, exp.Set):
            raise OptionError(
                "sql: SET: there are no settings in a text. Times are in UTC; hours and days of a "
                "zone: hour(from_utc_timestamp(at, 'Europe/Berlin'))"
            )
        if not isinstance(statement, exp.Query):
            raise OptionError(
                f"sql: {statement.key.upper()}: expected SELECT or INSERT INTO … SELECT"
            )
        inserts.append(Insert(target, statement))
    targets = [insert.target for insert in inserts]
    if not inserts:
        raise OptionError("sql: the text has views alone; expected SELECT … FROM …")
    if len(inserts) > 1 and "" in targets:
        raise OptionError(
            f"sql: {len(inserts)} statements, and one is a pipeline: write a ts.sql(…) for "
            f"each, or INSERT INTO … before each SELECT of the same rows"
        )
    if twice := [target for target in targets if targets.count(target) > 1]:
        raise OptionError(
            f"sql: INSERT INTO {twice[0]} stands in the text {targets.count(twice[0])} times: "
            f"write one, with UNION ALL between the queries"
        )
    return views, inserts


def sink_of(target: str, sinks: Mapping[str, Sink]) -> Sink:
    """Return the sink of an INSERT INTO.

    Raises:
        OptionError: there is no sink of that name.
    """
    if target not in sinks:
        raise OptionError(
            f"sql: INSERT INTO {target}: there is no such sink; sinks={{{target!r}: "
            f"ts.KafkaSink(…)}}.{near(target, list(sinks))}"
        )
    return sinks[target]


def named_as(query: exp.Query, columns: Sequence[str]) -> exp.Query:
    """Give expressions without a name that of the table's column in their place.

    Args:
        query: of an INSERT INTO.
        columns: of the table; none: not declared.
    """
    if not isinstance(query, exp.Select) or any(node.is_star for node in query.expressions):
        return query
    nodes = query.expressions
    if len(nodes) != len(columns):
        return query
    query = query.copy()
    named = [
        node if isinstance(node, exp.Alias | exp.Column | exp.Dot) else exp.alias_(node, name)
        for node, name in zip(query.expressions, columns, strict=True)
    ]
    query.set("expressions", named)
    return query


def as_declared(relation: Relation, columns: Sequence[str], target: str) -> Relation:
    """Return the rows under the names of the table's columns, which go by their place.

    Raises:
        OptionError: the table has another number of columns, or the same ones in another order.
    """
    names = relation.columns
    if not columns or names is None or tuple(names) == tuple(columns):
        return relation
    if len(names) != len(columns):
        raise OptionError(
            f"sql: INSERT INTO {target}: the query has {len(names)} columns ({', '.join(names)}), "
            f"and the table {len(columns)} ({', '.join(columns)})"
        )
    if set(names) == set(columns):
        raise OptionError(
            f"sql: INSERT INTO {target}: the query has the columns {', '.join(names)}, and the "
            f"table {', '.join(columns)}: they go by their place, so name them in that order"
        )
    pairs = zip(columns, names, strict=True)
    return relation.select({column: exp.column(name, quoted=True) for column, name in pairs})


def source_of(insert: Insert) -> exp.Expression:
    """Return the table or subquery of FROM, of which a query keeps rows and computes columns.

    Raises:
        OptionError: the query does more, which is a chain of steps of its own.
    """
    select = insert.query
    source = from_of(select)
    is_select = isinstance(select, exp.Select)
    clauses = {
        "UNION": isinstance(select, exp.SetOperation),
        "a query in brackets": isinstance(select, exp.Subquery),
        "GROUP BY or an aggregate": is_select and is_grouped(select),
        "JOIN": select.args.get("joins"),
        "DISTINCT": select.args.get("distinct"),
        "WITH": select.args.get("with_") or select.args.get("with"),
        "OVER": is_select and select.find(exp.Window),
        "no FROM": is_select and source is None,
    }
    if surplus := [clause for clause, is_there in clauses.items() if is_there]:
        raise OptionError(
            f"sql: INSERT INTO {insert.target}: {', '.join(surplus)}: beside other INSERT INTO, a "
            f"query has FROM, WHERE and expressions alone: write what they share into CREATE VIEW "
            f"name AS …, and each as INSERT INTO … SELECT … FROM name WHERE …; or make it a "
            f"program of its own"
        )
    assert source is not None, "refused"
    source = source.copy()
    source.set("alias", None)
    return source


def by_source(inserts: Sequence[Insert]) -> list[tuple[exp.Expression, list[Insert]]]:
    """Return the tables and subqueries of FROM, each with the queries that read it.

    Raises:
        OptionError: as of `source_of`.
    """
    groups: list[tuple[exp.Expression, list[Insert]]] = []
    for insert in inserts:
        source = source_of(insert)
        known = next((members for one, members in groups if one == source), None)
        if known is None:
            groups.append((source, [insert]))
        else:
            known.append(insert)
    return groups


@dataclass(frozen=True)
class ToSideOutput:
    """A function of `map_batches` whose rows all leave by a side output."""

    output: str
    reuses_memory: ClassVar[bool] = False

    @property
    def __name__(self) -> str:
        """The output, as the function's name in messages."""
        return f"rows of {self.output}"

    def __call__(self, rows: pa.RecordBatch) -> Rows:
        """Return no row for the steps behind, and all for the output."""
        return Rows(None, {self.output: rows})


def apart(
    groups: Sequence[tuple[exp.Expression, list[Insert]]], relations: Sequence[Relation]
) -> list[Stream]:
    """Return the inputs of one pipeline for different rows: those of all but the first one leave.

    A keyed step would wait for the times of rows that never come to it, so there is none.

    Args:
        groups: the queries by their FROM.
        relations: the rows of each.

    Raises:
        OptionError: rows are not those of one table, or their columns are not known.
    """
    streams: list[Stream] = []
    columns: pa.Schema | None = None
    for number, ((source, members), relation) in enumerate(zip(groups, relations, strict=True)):
        rows = relation.rows
        schema = known_schema(rows) if isinstance(rows, Stream) else None
        if schema is None or not isinstance(rows, Stream):
            raise OptionError(
                f"sql: INSERT INTO {members[0].target} reads {shown(source)[:60]}, and others read "
                f"other rows: in one pipeline these are tables with known columns, WHERE and "
                f"expressions, without GROUP BY, DISTINCT, JOIN and UNION: make it a program of "
                f"its own"
            )
        columns = columns or schema
        output = output_name(number)
        leaving = rows.map_batches(ToSideOutput(output), schema=columns, outputs={output: schema})
        streams.append(leaving if number else rows)
    return streams


def output_name(number: int) -> str:
    """Return the name of the side output of a group of queries."""
    return f"insert_{number}"


def routed(base: Pipeline, rows: Relation, sink: Sink) -> Sink | RoutedSink:
    """Return a sink behind the steps that a query has after the rows that all share."""
    assert isinstance(rows.rows, Pipeline)
    result: Sink | RoutedSink = sink
    for step in reversed(rows.rows.steps[len(base.steps) :]):
        assert isinstance(step, MapBatches), step
        result = mapped(result, step.function)
    return result


def under(relation: Relation, select: exp.Query) -> Relation:
    """Return rows under the name of the table or subquery in FROM."""
    source = from_of(select)
    assert source is not None, "checked before"
    alias = source.alias or source.name
    return replace(relation, names=frozenset([alias]) if alias else frozenset())
