"""The nodes of an expression, between its text and its types."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pyarrow as pa

from tallystick.errors import OptionError
from tallystick.state.meaning import name_text

Value: TypeAlias = Any
"""A `pyarrow.Array`, or a `pyarrow.Scalar` that is the value of all rows."""


@dataclass(frozen=True, slots=True)
class Node:
    """A column, a literal, or a function of other nodes.

    Args:
        name: "column", "literal", or the function, as Spark's SQL names it.
        args: nodes.
        text: of the node in the expression, for messages.
        value: of a literal, the name of a column or field, the type of a cast.
        at: the place of its first name or literal in the expression, counted from 1; 0: it has
            neither.
    """

    name: str
    args: tuple["Node", ...] = ()
    text: str = ""
    value: Any = None
    at: int = 0

    def columns(self) -> frozenset[str]:
        """Return the names of the columns in the expression, as it writes them."""
        own = {self.value[0]} if self.name == "column" else set()
        return frozenset(own).union(*(arg.columns() for arg in self.args))

    def over(self, definitions: Mapping[str, "Node"]) -> "Node":
        """Return the expression with the definitions of its columns in their places.

        Args:
            definitions: of columns by name; others stay, and capitals count as in `bind`.
        """
        if self.name != "column":
            return replace(self, args=tuple(arg.over(definitions) for arg in self.args))
        name, *fields = self.value
        alike = [one for one in definitions if one.lower() == name.lower()]
        if name not in definitions and len(alike) != 1:
            return self
        definition = definitions[name if name in definitions else alike[0]]
        if not fields:
            return definition
        if definition.name == "column":
            return replace(definition, value=(*definition.value, *fields))
        return Node("field", (definition,), value=".".join(map(name_text, fields)))

    def canonical(self) -> str:
        """Return the expression as text that does not depend on how it was written.

        Part of the meaning of states, so the same in every release.
        """
        match self.name:
            case "column":
                return ".".join(map(name_text, self.value))
            case "literal":
                value, _ = self.value
                quoted = str(value).replace("\\", "\\\\").replace("'", "\\'")
                return f"'{quoted}'" if isinstance(value, str) else str(value)
        args = [arg.canonical() for arg in self.args]
        if self.value is not None:
            return f"{self.name}({', '.join([*args, str(self.value)])})"
        if self.name.isidentifier() or len(args) != 2:
            return f"{self.name}({', '.join(args)})"
        return f"({args[0]} {self.name} {args[1]})"


@dataclass(frozen=True, slots=True)
class Bound:
    """A node of known type.

    Args:
        kind: of its values.
        run: computes the values of a batch's rows; a scalar is the value of all rows.
        may_fail: some rows may raise an error, so it runs for the rows that need it alone.
    """

    kind: pa.DataType
    run: Callable[[pa.RecordBatch], Value]
    may_fail: bool = False
    literal: Any = None
    is_literal: bool = False


class ExpressionError(OptionError):
    """An expression that cannot be parsed, or does not fit the columns of the rows."""
