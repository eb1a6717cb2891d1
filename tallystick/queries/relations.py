"""Rows while a query is translated: a stream of one source, or a pipeline."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self

import pyarrow as pa
from sqlglot import exp, parse_one
from sqlglot.errors import SqlglotError

from tallystick.api.pipeline import Pipeline
from tallystick.api.streams import Stream
from tallystick.arguments import near
from tallystick.errors import OptionError, TallystickError
from tallystick.expressions.parsing import DIALECT
from tallystick.pipeline.keyed import columns_of
from tallystick.pipeline.sinks import with_columns
from tallystick.pipeline.topics import columns_ddl
from tallystick.queries.parsing import WINDOW, place_of
from tallystick.spark.cluster import Cluster
from tallystick.tasks.outputs import Filter
from tallystick.tasks.steps import Columns, MapBatches

WINDOW_NAMES = (WINDOW, "session_window")
"""Tables of `window.start` and the like."""
_OF_WINDOWS = (*WINDOW_NAMES, "window", "window_start", "window_end")
"""Columns that stand for a window, and are in no rows before they are grouped."""


@dataclass(frozen=True)
class Relation:
    """Rows that a part of a query yields.

    Args:
        rows: a stream with steps, as long as the rows are those of one source without a keyed step.
        names: the names by which the query may qualify columns.
        columns: in their order; None: not known.
        times: the columns of event times.
        clocks: the columns that stand for the clock, PROCTIME(); no row has them.
        delay_ms: how much later than the latest row another one may come.
        qualified: the columns of a join by table and name in the query.
        ends: the columns of the ends of windows that are done: rows of one end come together.
        windows: of a table function, which a GROUP BY applies.
        star: the columns of `*`, where they are not all.
        has_updates: a row stands for its group, and replaces an earlier one.
    """

    rows: Stream | Pipeline
    names: frozenset[str] = frozenset()
    columns: tuple[str, ...] | None = None
    times: frozenset[str] = frozenset()
    delay_ms: int = 0
    qualified: "Mapping[tuple[str, str], str] | None" = None
    windows: exp.Anonymous | None = None
    star: tuple[str, ...] | None = None
    has_updates: bool = False
    clocks: frozenset[str] = frozenset()
    ends: frozenset[str] = frozenset()

    def resolve(self, node: exp.Expression) -> exp.Expression:
        """Return an expression with the columns as they are called in the rows.

        Raises:
            OptionError: a column is of no table of the query, or of more than one.
        """
        return node.copy().transform(self._plain)

    def _plain(self, node: exp.Expression) -> exp.Expression:
        if not isinstance(node, exp.Column) or isinstance(node.this, exp.Star):
            return node
        if node.table in WINDOW_NAMES:
            return node
        table, name = node.table, node.name
        if self.qualified is not None:
            return exp.column(self._of_join(table, name))
        parts = list(node.parts)
        if len(parts) > 1 and parts[0].name in self.names:
            parts = parts[1:]
        self._check(node, parts)
        return exp.column(*(part.copy() for part in reversed(parts)))

    def _check(self, node: exp.Column, parts: Sequence[exp.Expression]) -> None:
        """Refuse a column that the rows do not have.

        Args:
            node: as it was written.
            parts: its names, without that of the table.

        Raises:
            OptionError: the rows have no such column; the message has the line and the column.
        """
        name, columns = parts[0].name, self.columns
        if columns is None or name in self.clocks or name in _OF_WINDOWS:
            return
        if name.lower() in {known.lower() for known in columns}:
            return
        if len(parts) > 1:
            raise OptionError(
                f"sql: {place_of(node)}{node.sql(DIALECT)}: there is no table {name!r} here, only "
                f"{', '.join(sorted(self.names)) or 'one without a name'}, and no column of that "
                f"name"
            )
        raise OptionError(
            f"sql: {place_of(node)}there is no column {name!r}, only {', '.join(columns)}."
            f"{near(name, list(columns))}"
        )

    def _of_join(self, table: str, name: str) -> str:
        assert self.qualified is not None
        if table:
            if (table, name) in self.qualified:
                return self.qualified[table, name]
            raise OptionError(
                f"sql: {table}.{name}: no table of the join is called {table!r}; they are "
                f"{' and '.join(sorted(self.names))}"
            )
        if name in self.qualified.values():
            return name
        matches = {text for (_, column), text in self.qualified.items() if column == name}
        if len(matches) != 1:
            reason = "is in both tables" if matches else "is in no table"
            raise OptionError(
                f"sql: column {name!r} {reason} of the join: qualify it by its table's name"
            )
        return matches.pop()

    def refuse_updates(self, clause: str) -> None:
        """Refuse a clause that would have to take back rows that are replaced.

        Raises:
            OptionError: rows of this relation replace earlier ones.
        """
        if self.has_updates:
            raise OptionError(
                f"sql: {clause} a GROUP BY without a window: its rows replace earlier ones, which "
                f"would have to be taken back; group by window(…) first, or read the groups from "
                f"their topic as a table"
            )

    def filter(self, condition: exp.Expression | None) -> Self:
        """Keep the rows of a condition, whose columns are resolved; None: all."""
        if condition is None:
            return self
        return replace(self, rows=self.rows.filter(condition.sql(DIALECT)))

    def without_null(self, columns: Collection[str]) -> Self:
        """Leave out rows with a null in a column of a join's key: null equals nothing."""
        there = [
            exp.not_(exp.Is(this=exp.column(name, quoted=True), expression=exp.null()))
            for name in columns
        ]
        return self.filter(exp.and_(*there))

    def select(self, expressions: Mapping[str, exp.Expression]) -> Self:
        """Compute columns from resolved expressions, by their new names."""
        clocks = {
            name
            for name, node in expressions.items()
            if (isinstance(node, exp.Anonymous) and node.name.upper() == "PROCTIME")
            or (isinstance(node, exp.Column) and node.name in self.clocks)
        }
        expressions = {name: node for name, node in expressions.items() if name not in clocks}
        texts = [
            quoted(name) if is_column(node, name) else f"{node.sql(DIALECT)} AS {quoted(name)}"
            for name, node in expressions.items()
        ]
        times = {
            name
            for name, node in expressions.items()
            if isinstance(node, exp.Column) and node.name in self.times and not node.table
        }
        return replace(
            self,
            rows=self.rows.select(*texts),
            columns=tuple(expressions),
            times=frozenset(times),
            clocks=frozenset(clocks),
            ends=frozenset(
                name
                for name, node in expressions.items()
                if isinstance(node, exp.Column) and node.name in self.ends
            ),
            qualified=None,
            star=None,
        )

    def with_columns(self, expressions: Mapping[str, exp.Expression]) -> Self:
        """Compute further columns."""
        if not expressions:
            return self
        texts = {name: node.sql(DIALECT) for name, node in expressions.items()}
        columns = None if self.columns is None else (*self.columns, *texts)
        return replace(self, rows=self.rows.with_columns(**texts), columns=columns)

    def pipeline(self, name: str) -> Pipeline:
        """Return the rows as a pipeline."""
        return self.rows if isinstance(self.rows, Pipeline) else Pipeline(name).read(self.rows)


def add_output(
    outputs: dict[str, exp.Expression], name: str, node: exp.Expression, origin: str = ""
) -> None:
    """Add a column to those that a SELECT puts out.

    Raises:
        OptionError: there is one of that name already; `origin` says where both come from.
    """
    if name in outputs:
        raise OptionError(
            f"sql: column {name!r} is there twice{origin}: give one another name: … AS {name}_2"
        )
    outputs[name] = node


def quoted(name: str) -> str:
    """Return a name of a column as it stands in an expression."""
    try:
        plain = parse_one(f"SELECT {name}", read=DIALECT).expressions[0]
    except SqlglotError:
        plain = None
    if isinstance(plain, exp.Column) and plain.sql(DIALECT) == name:
        return name
    return str(exp.to_identifier(name, quoted=True).sql(DIALECT))


def is_column(node: exp.Expression, name: str) -> bool:
    """True if a resolved expression is the column of that name alone."""
    return isinstance(node, exp.Column) and not node.table and node.name == name


def tables_in(node: exp.Expression, tables: Collection[str]) -> set[str]:
    """Return the tables of a join whose columns an expression reads."""
    return {column.table for column in node.find_all(exp.Column)} & set(tables)


def known_schema(rows: Stream) -> pa.Schema | None:
    """Return a stream's columns; None: they are not known without Kafka."""
    with suppress(TallystickError):
        cluster = Cluster.at_hand(None)
        columns: Columns | None = columns_ddl(rows.source.read_options("sql"))
        for step in with_columns(cluster, rows.steps, columns or ""):
            if isinstance(step, MapBatches) and not isinstance(step.function, Filter):
                columns = step.schema
        if columns is not None:
            return columns_of(cluster, columns)
    return None


def known_columns(rows: Stream) -> tuple[str, ...] | None:
    """Return the names of a stream's columns; None: they are not known without Kafka."""
    schema = known_schema(rows)
    return None if schema is None else tuple(schema.names)
