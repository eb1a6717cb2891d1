"""The nodes of an expression, between its text and its types."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from tallystick.errors import OptionError

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
