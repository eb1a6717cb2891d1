"""Expressions as steps of a pipeline: bound to the columns of the rows, then run on batches."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from tallystick.arguments import near
from tallystick.expressions.casts import cast, type_named
from tallystick.expressions.functions import FUNCTIONS
from tallystick.expressions.nodes import Bound, ExpressionError, Node
from tallystick.expressions.operators import column_of, literal, shown_or
from tallystick.expressions.parsing import parsed

T = pa.types
_ALIAS = re.compile(r"\sAS\s", re.IGNORECASE)
WIDE = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}


def bind(node: Node, schema: pa.Schema) -> Bound:
    """Return a node as a function of batches with the columns of a schema.

    Raises:
        ExpressionError: a column is not there, or a function does not take values of its type.
    """
    args = [bind(arg, schema) for arg in node.args]
    try:
        match node.name:
            case "column":
                return _column(node, schema)
            case "literal":
                return literal(*node.value)
            case "cast":
                return cast(args[0], type_named(node.value, node.text), node.text)
            case "mistake":
                raise ExpressionError(node.value)
        return FUNCTIONS[node.name](args, node.text)
    except ExpressionError as error:
        place = f"at character {node.at}, " if node.at else ""
        raise ExpressionError(f"{place}{error}") from None


def _column(node: Node, schema: pa.Schema) -> Bound:
    name, *fields = node.value
    at = _index(schema, name)
    if at is None:
        known = ", ".join(schema.names)
        raise ExpressionError(
            f"{node.text}: there is no column {name!r}, only {known}.{near(name, schema.names)}"
        )
    kind = schema.field(at).type
    path = []
    for one in fields:
        if not T.is_struct(kind) or kind.get_field_index(one) < 0:
            inner = (
                [kind.field(i).name for i in range(kind.num_fields)] if T.is_struct(kind) else []
            )
            raise ExpressionError(
                f"{node.text}: {name!r} ({shown_or(kind)}) has no field {one!r}.{near(one, inner)}"
            )
        path.append(kind.get_field_index(one))
        kind = kind.field(path[-1]).type
    wanted = WIDE.get(kind, kind)
    if T.is_timestamp(kind):
        wanted = pa.timestamp("us", "UTC") if kind.tz else pa.timestamp("us")

    def run(rows: pa.RecordBatch) -> pa.Array:
        column = rows.column(at)
        if path:
            column = pc.struct_field(column, path)
        return column if column.type == wanted else pc.cast(column, wanted)

    return Bound(wanted, run)


def _index(schema: pa.Schema, name: str) -> int | None:
    """Return a column's place: by its name, else by its name in other capitals, as Spark does."""
    matches = schema.get_all_field_indices(name) or [
        at for at, known in enumerate(schema.names) if known.lower() == name.lower()
    ]
    return matches[0] if len(matches) == 1 else None


Plan = TypeVar("Plan")


class Newest(Generic[Plan]):
    """The newest plan of a step, and its rows' columns, which seldom change; one per process.

    A plan holds functions that are made in the process, so a copy for another one has none.
    """

    def __init__(self) -> None:
        self.newest: tuple[pa.Schema, Plan] | None = None

    def __reduce__(self) -> tuple[type["Newest[Plan]"], tuple[()]]:
        return type(self), ()

    def plan(self, schema: pa.Schema, make: Callable[[pa.Schema], Plan]) -> Plan:
        """Return the plan for rows with the columns of a schema."""
        newest = self.newest
        if newest is None or not newest[0].equals(schema):
            newest = self.newest = (schema, make(schema))
        return newest[1]


@dataclass(frozen=True)
class Condition:
    """A predicate in Spark's SQL: a function of a batch that returns booleans.

    Args:
        text: as it was written.
        node: as it was parsed.
    """

    text: str
    node: Node
    plans: Newest[Bound] = field(default_factory=Newest, compare=False, repr=False)
    reuses_memory: ClassVar[bool] = False

    @property
    def __name__(self) -> str:
        """The text, as the function's name in messages."""
        return repr(self.text)

    def check(self, schema: pa.Schema) -> None:
        """Refuse columns to which the predicate cannot be bound.

        Raises:
            ExpressionError: a column is missing, or it is no predicate.
        """
        self.plans.plan(schema, self._bound)

    def _bound(self, schema: pa.Schema) -> Bound:
        try:
            bound = bind(self.node, schema)
        except ExpressionError as error:
            raise ExpressionError(f"{self.text!r}: {error}") from None
        if not T.is_boolean(bound.kind):
            raise ExpressionError(
                f"filter({self.text!r}): it is {shown_or(bound.kind)}: expected a condition, such "
                f"as {self.text!r} > 10"
            )
        return bound

    def __call__(self, rows: pa.RecordBatch) -> pa.Array:
        """Return true for the rows that the condition holds for."""
        return column_of(self.plans.plan(rows.schema, self._bound).run(rows), rows)


def condition_of(text: str, step: str = "filter") -> Condition:
    """Parse a predicate of a step.

    Raises:
        ExpressionError: it is no expression.
    """
    return Condition(text, parsed(text, f"{step}(predicate={text!r})")[1])


@dataclass(frozen=True)
class Projection:
    """A function of `map_batches` that computes columns.

    Args:
        what: the step, for messages.
        columns: expressions by the names of their columns, in order.
        beside: the other columns stay, those of the same name in their place.
        drops: columns that go.
        renames: new names by old ones.
        only_missing: a column that the rows have already stays as it is.
    """

    what: str
    columns: tuple[tuple[str, Node], ...] = ()
    beside: bool = False
    drops: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    only_missing: bool = False
    plans: Newest[tuple[dict[str, Bound], pa.Schema]] = field(
        default_factory=Newest, compare=False, repr=False
    )
    reuses_memory: ClassVar[bool] = False

    @property
    def __name__(self) -> str:
        """The step, as the function's name in messages."""
        return self.what

    def names(self) -> frozenset[str]:
        """Return the names of all columns that the step reads, makes, renames or drops."""
        made_or_gone = {name for name, _ in self.columns} | {*self.drops, *dict(self.renames)}
        return frozenset(made_or_gone).union(*(node.columns() for _, node in self.columns))

    def definitions(self) -> dict[str, Node]:
        """Return the columns that the step computes or renames, over those before it, by name."""
        renamed = {new: Node("column", value=(old,)) for old, new in self.renames}
        return renamed | {name: node for name, node in self.columns if node.name != "mistake"}

    def output(self, schema: pa.Schema) -> pa.Schema:
        """Return the columns that rows with the columns of a schema have afterwards.

        Raises:
            ExpressionError: a column is missing or there twice, or a function does not take values
                of its type.
        """
        return self.plans.plan(schema, self._bound)[1]

    def _bound(self, schema: pa.Schema) -> tuple[dict[str, Bound], pa.Schema]:
        there = schema.names if self.only_missing else ()
        try:
            bound = {name: bind(node, schema) for name, node in self.columns if name not in there}
        except ExpressionError as error:
            raise ExpressionError(f"{self.what}: {error}") from None
        for name, one in bound.items():
            if T.is_null(one.kind) or T.is_duration(one.kind):
                raise ExpressionError(
                    f"{self.what}: column {name!r} would be {shown_or(one.kind)}: CAST it to a type"
                )
        computed = {name: pa.field(name, one.kind) for name, one in bound.items()}
        if not self.beside:
            return bound, pa.schema(list(computed.values()))
        self._check_names(schema)
        renamed = dict(self.renames)
        kept = [
            computed.pop(column.name, column).with_name(renamed.get(column.name, column.name))
            for column in schema
            if column.name not in self.drops
        ]
        result = pa.schema([*kept, *computed.values()])
        if twice := [name for name in result.names if result.names.count(name) > 1]:
            raise ExpressionError(f"{self.what}: column {twice[0]!r} would be there twice")
        return bound, result

    def _check_names(self, schema: pa.Schema) -> None:
        for name in (*self.drops, *(old for old, _ in self.renames)):
            if name not in schema.names:
                raise ExpressionError(
                    f"{self.what}: there is no column {name!r}, only {', '.join(schema.names)}."
                    f"{near(name, schema.names)}"
                )

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with their new columns."""
        bound, schema = self.plans.plan(rows.schema, self._bound)
        computed = {name: column_of(one.run(rows), rows) for name, one in bound.items()}
        if not self.beside:
            return pa.RecordBatch.from_arrays(list(computed.values()), schema=schema)
        kept = [
            computed.pop(name, rows.column(at))
            for at, name in enumerate(rows.schema.names)
            if name not in self.drops
        ]
        return pa.RecordBatch.from_arrays([*kept, *computed.values()], schema=schema)


def selected(texts: Sequence[str]) -> Projection:
    """Return the function of `select`.

    Raises:
        ExpressionError: a text is no expression, or has no name.
    """
    what = f"select({', '.join(map(repr, texts))})"
    columns: list[tuple[str, Node]] = []
    for text in texts:
        name, node = parsed(text, what)
        if not name:
            raise ExpressionError(f"{what}: {text!r} has no name: write '{text} AS …'")
        if name in dict(columns):
            raise ExpressionError(f"{what}: column {name!r} is there twice")
        columns.append((name, node))
    if not columns:
        raise ExpressionError(
            "select(): expected columns, such as select('dest', 'delay * 60 AS s')"
        )
    return Projection(what, tuple(columns))


def with_columns_of(texts: Mapping[str, str]) -> Projection:
    """Return the function of `with_columns`.

    Raises:
        ExpressionError: a text is no expression.
    """
    what = f"with_columns({', '.join(f'{name}={text!r}' for name, text in texts.items())})"
    columns = tuple((name, parsed(text, what)[1]) for name, text in texts.items())
    if not columns:
        raise ExpressionError("with_columns(): expected columns, such as late='delay > 15'")
    return Projection(what, columns, beside=True)


def named_by_expressions(
    names: Iterable[str], step: str, *, may_have_alias: bool
) -> tuple[tuple[str, ...], Projection | None]:
    """Return the names of columns, and the function that computes the expressions among them.

    "lower(user)" is the name of its column, unless "lower(user) AS name" says another. A column of
    the rows may have any name, so what an expression is shows where the columns are known.

    Args:
        names: of columns, or expressions.
        step: that has them, for messages.
        may_have_alias: AS gives a name.

    Returns:
        The names in their order, and the function; None: all are plain names.
    """
    columns: dict[str, Node] = {}
    result, expressions = [], []
    for text in names:
        name = text
        if not text.isidentifier():
            try:
                alias, node = parsed(text, step)
            except ExpressionError as error:  # of a name, if the rows have such a column
                node = Node("mistake", text=text, value=str(error))
            else:
                name = alias if may_have_alias and _ALIAS.search(text) and alias else text
            columns[name] = node
            expressions.append(text)
        result.append(name)
    what = f"{step}({', '.join(map(repr, expressions))})"
    function = Projection(what, tuple(columns.items()), beside=True, only_missing=True)
    return tuple(result), function if columns else None


def dropped(names: Sequence[str]) -> Projection:
    """Return the function of `drop`."""
    return Projection(f"drop({', '.join(map(repr, names))})", beside=True, drops=tuple(names))


def renamed(names: Mapping[str, str]) -> Projection:
    """Return the function of `rename`, of new names by old ones."""
    what = f"rename(columns={dict(names)!r})"
    return Projection(what, beside=True, renames=tuple(names.items()))
