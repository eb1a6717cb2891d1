"""The text of an expression as nodes; only the driver needs the parser (the extra `sql`)."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa

from tallystick.arguments import near
from tallystick.expressions.functions import ALIASES, FUNCTIONS
from tallystick.expressions.nodes import ExpressionError, Node
from tallystick.host.installed import pip_install

DIALECT = "spark"
_TEXTS = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
OF_JSON_TEXTS = ("from_json", "get_json_object", "json_tuple")
_BEFORE = "SELECT "
"""The clause before an expression when it is parsed."""


def parser() -> Any:
    """Return sqlglot.

    Raises:
        ExpressionError: it is not installed.
    """
    try:
        import sqlglot
    except ModuleNotFoundError:
        raise ExpressionError(f"expressions need sqlglot: {pip_install('sql')}") from None
    return sqlglot


def refuse_misread(text: str, what: str) -> None:
    """Refuse a text that sqlglot would read otherwise than Spark does, without an error.

    Raises:
        ExpressionError: two texts stand side by side, or a number has the letter of a type.
    """
    if any(text[one.end() :].startswith(one[0][0]) for one in _TEXTS.finditer(text)):
        # Two texts to sqlglot, a quote in one to Spark.
        raise ExpressionError(f"{what}: write a quote in a text as \\'")
    if number := re.search(r"(?<![\w.])\d+[lsy]\b", _TEXTS.sub("''", text), re.IGNORECASE):
        raise ExpressionError(f"{what}: {number[0]}: write CAST(… AS bigint)")


def parsed(text: str, what: str) -> tuple[str, Node]:
    """Parse one expression, with or without a name: `price * 2 AS doubled`.

    Args:
        text: in Spark's SQL.
        what: the step that has it, for messages.

    Returns:
        The name, "" without one, and the expression.

    Raises:
        ExpressionError: it is no expression; the message has the place in the text.
    """
    sqlglot = parser()
    from sqlglot.errors import ParseError, TokenError

    if not isinstance(text, str) or not text.strip():
        raise ExpressionError(f"{what}: expected an expression, such as 'price > 10'")
    refuse_misread(text, what)
    try:
        tree = sqlglot.parse_one(f"{_BEFORE}{text}", read=DIALECT)
    except ParseError as error:
        at = error.errors[0]
        column = max(1, int(at["col"]) - len(_BEFORE) - len(str(at["highlight"])) + 1)
        raise ExpressionError(
            f"{what}: at character {column}, {at['highlight']!r}: {at['description']}"
        ) from None
    except TokenError as error:
        raise ExpressionError(f"{what}: {str(error).splitlines()[0]}") from None
    exp = sqlglot.exp
    others = [
        key for key, value in tree.args.items() if value and key not in ("expressions", "kind")
    ]
    if not isinstance(tree, exp.Select) or len(tree.expressions) != 1 or others:
        raise ExpressionError(f"{what}: expected one expression, such as 'price > 10'")
    node = tree.expressions[0]
    reader = Reader(exp, text, what)
    if isinstance(node, exp.Alias) and isinstance(node.args["alias"], exp.Placeholder):
        raise ExpressionError(
            f"{what}: {text!r}: expected a dot before a field, or AS before a name, not a colon"
        )
    if isinstance(node, exp.Alias):
        return str(node.alias), reader.node(node.this)
    name = str(node.name) if isinstance(node, exp.Column | exp.Dot) else ""
    return name, reader.node(node)


def operators_in(exp: Any) -> dict[Any, str]:
    """Return the names of functions with `this` and `expression`, by sqlglot's classes."""
    return {
        exp.Add: "+",
        exp.Sub: "-",
        exp.Mul: "*",
        exp.Div: "/",
        exp.IntDiv: "div",
        exp.Mod: "%",
        exp.EQ: "=",
        exp.NEQ: "<>",
        exp.GT: ">",
        exp.GTE: ">=",
        exp.LT: "<",
        exp.LTE: "<=",
        exp.NullSafeEQ: "<=>",
        exp.And: "and",
        exp.Or: "or",
        exp.Like: "like",
        exp.Nullif: "nullif",
        exp.BitwiseAnd: "&",
        exp.BitwiseOr: "|",
        exp.BitwiseXor: "^",
    }


def functions_in(exp: Any) -> dict[Any, str]:
    """Return the names of functions whose arguments stand in their order, by sqlglot's classes."""
    return {
        exp.Neg: "negative",
        exp.Not: "not",
        exp.Lower: "lower",
        exp.Upper: "upper",
        exp.Length: "length",
        exp.Abs: "abs",
        exp.Sqrt: "sqrt",
        exp.IsNan: "isnan",
        exp.Round: "round",
        exp.Floor: "floor",
        exp.Ceil: "ceil",
        exp.Substring: "substring",
        exp.StartsWith: "startswith",
        exp.EndsWith: "endswith",
        exp.Contains: "contains",
        exp.Reverse: "reverse",
        exp.Replace: "replace",
        exp.Year: "year",
        exp.Quarter: "quarter",
        exp.Month: "month",
        exp.Day: "day",
        exp.DayOfMonth: "day",
        exp.DayOfYear: "dayofyear",
        exp.DayOfWeek: "dayofweek",
        exp.WeekOfYear: "weekofyear",
        exp.Hour: "hour",
        exp.Minute: "minute",
        exp.Second: "second",
        exp.ArraySize: "size",
        exp.UnixMicros: "unix_micros",
        exp.UnixMillis: "unix_millis",
        exp.UnixSeconds: "unix_seconds",
        exp.DateDiff: "datediff",
        exp.LastDay: "last_day",
        exp.UnixDate: "unix_date",
        exp.AtTimeZone: "from_utc_timestamp",
        exp.FromTimeZone: "to_utc_timestamp",
        exp.TimeToStr: "date_format",
        exp.Left: "left",
        exp.Right: "right",
        exp.Repeat: "repeat",
        exp.StrPosition: "instr",
        exp.RegexpLike: "rlike",
        exp.RegexpExtract: "regexp_extract",
        exp.RegexpReplace: "regexp_replace",
        exp.RegexpSplit: "split",
        exp.ArrayContains: "array_contains",
    }


def shapes_in(exp: Any) -> dict[Any, Callable[[Any], tuple[str, list[Any]]]]:
    """Return functions that name a function and its arguments, by sqlglot's classes."""
    shapes: dict[Any, Callable[[Any], tuple[str, list[Any]]]] = {
        exp.In: lambda tree: ("in", [tree.this, *tree.expressions]),
        exp.If: lambda tree: (
            "if",
            [tree.this, tree.args["true"], tree.args.get("false") or exp.null()],
        ),
        exp.Coalesce: lambda tree: ("coalesce", [tree.this, *tree.expressions]),
        exp.Greatest: lambda tree: ("greatest", [tree.this, *tree.expressions]),
        exp.Least: lambda tree: ("least", [tree.this, *tree.expressions]),
        exp.Concat: lambda tree: ("concat", tree.expressions),
        exp.DPipe: lambda tree: ("concat", [tree.this, tree.expression]),
        exp.Trim: lambda tree: (_TRIMS.get(tree.text("position").upper(), "trim"), [tree.this]),
        exp.TsOrDsToDate: lambda tree: ("to_date", [tree.this]),
        exp.Date: lambda tree: ("to_date", [tree.this]),
        exp.TsOrDsAdd: lambda tree: ("date_add", [tree.this, tree.expression]),
        exp.DateAdd: lambda tree: ("date_add", [tree.this, tree.expression]),
        exp.DateSub: lambda tree: ("date_sub", [tree.this, tree.expression]),
        exp.TsOrDsDiff: lambda tree: ("datediff", [tree.this, tree.expression]),
    }
    shapes[exp.Bracket] = lambda tree: (
        "element_at" if tree.args.get("offset") == 1 else "[]",
        [tree.this, *tree.expressions],
    )
    shapes[exp.Pad] = lambda tree: (
        "lpad" if tree.args.get("is_left") else "rpad",
        [tree.this, tree.expression, tree.args.get("fill_pattern") or exp.Literal.string(" ")],
    )
    shapes[exp.ConcatWs] = lambda tree: ("concat_ws", tree.expressions)
    shapes[exp.Nvl2] = lambda tree: (
        "if",
        [_there(exp, tree.this), tree.args["true"], tree.args["false"]],
    )
    shapes[exp.Struct] = lambda tree: (
        "named_struct",
        [part for one in tree.expressions for part in _field_of(exp, one)],
    )
    shapes[exp.Extract] = lambda tree: (_PARTS.get(tree.name.lower(), "extract"), [tree.expression])
    shapes[exp.TimestampTrunc] = lambda tree: (
        "date_trunc",
        [exp.Literal.string(tree.text("unit")), tree.this],
    )
    return shapes


def _there(exp: Any, tree: Any) -> Any:
    return exp.not_(exp.Is(this=tree, expression=exp.null()))


def _field_of(exp: Any, tree: Any) -> tuple[Any, Any]:
    """Return the name of a struct's field, and its value."""
    return exp.Literal.string(tree.name), tree.expression


def no_function(name: str, text: str = "", others: Iterable[str] = ()) -> str:
    """Return the words about a function that expressions do not have, with the nearest name.

    Args:
        name: of the function.
        text: of the call, in brackets; "": it begins with the name.
        others: the functions that there are beside those of expressions.
    """
    known = [*others, *(one for one in (*FUNCTIONS, *ALIASES) if one[0].isalpha())]
    return (
        f"there is no function {name!r} here{text}.{near(name, known)} A function of map_batches "
        f"can do what lacks"
    )


class Reader:
    """Nodes of sqlglot's trees.

    Args:
        exp: its module of expressions.
        text: that was parsed, and `what` it belongs to, for messages.
    """

    def __init__(self, exp: Any, text: str, what: str) -> None:
        self._exp, self._text, self._what = exp, text, what
        self._operators, self._functions = operators_in(exp), functions_in(exp)
        self._shapes = shapes_in(exp)

    def node(self, tree: Any) -> Node:
        """Return the node of a tree.

        Raises:
            ExpressionError: there is no such function here.
        """
        starts = [part.meta["start"] for part in tree.walk() if "start" in part.meta]
        return replace(self._node(tree), at=min(starts) + 1 - len(_BEFORE) if starts else 0)

    def _node(self, tree: Any) -> Node:
        exp, text = self._exp, tree.sql(DIALECT)
        if isinstance(tree, exp.Paren):
            return self.node(tree.this)
        if tree.args.get("negate"):  # s NOT LIKE 'a%'
            tree = tree.copy()
            tree.set("negate", False)
            return Node("not", (self.node(tree),), text)
        if isinstance(tree, exp.Column | exp.Dot):
            return Node("column", (), text, tuple(self._path(tree)))
        if isinstance(tree, exp.Literal | exp.Boolean | exp.Null | exp.Interval):
            return self._literal(tree)
        if isinstance(tree, exp.Cast) and "try_cast" not in self._text.lower():
            return self._cast(tree)  # sqlglot takes Spark's CAST for TRY_CAST
        if isinstance(tree, exp.TimeStrToTime):  # around what becomes a timestamp
            return Node("cast", (self.node(tree.this),), text, "timestamp")
        if isinstance(tree, exp.Neg) and tree.this.is_number and isinstance(tree.this, exp.Literal):
            return Node("literal", (), text, number_of(f"-{tree.this.name}"))
        if type(tree) in self._operators:
            return self._call(self._operators[type(tree)], [tree.this, tree.expression], text)
        special = self._special(tree)
        if special is not None:
            return special
        if type(tree) in self._functions:
            arguments = [value for value in tree.args.values() if isinstance(value, exp.Expression)]
            return self._call(self._functions[type(tree)], arguments, text)
        if isinstance(tree, exp.Anonymous) and tree.name.lower() == "isnotnull":
            return self.node(_there(exp, tree.expressions[0]))
        if isinstance(tree, exp.Anonymous):
            return self._call(str(tree.this).lower(), tree.expressions, text)
        name = tree.sql_name().lower() if isinstance(tree, exp.Func) else tree.key
        raise self._unknown(name, text)

    def _path(self, tree: Any) -> Iterator[str]:
        if isinstance(tree, self._exp.Dot):
            yield from self._path(tree.this)
            yield str(tree.expression.name)
        elif not isinstance(tree, self._exp.Column | self._exp.Identifier):
            text = tree.sql(DIALECT)
            raise ExpressionError(
                f"{self._what}: a field of {text}: give that a name in a step before, such as "
                f"with_columns(one={text!r}), and write one.field"
            )
        else:
            yield from (str(part.name) for part in tree.parts)

    def _call(self, name: str, arguments: list[Any], text: str) -> Node:
        name = ALIASES.get(name, name)
        if name not in FUNCTIONS:
            raise self._unknown(name, text)
        return Node(name, tuple(self.node(one) for one in arguments), text)

    def _unknown(self, name: str, text: str) -> ExpressionError:
        if (spelled := text.partition("(")[0].lower()) in OF_JSON_TEXTS:
            return ExpressionError(
                f"{self._what}: there is no function {spelled!r} here ({text}): declare the fields "
                f"in the source, value=ts.Json('user struct<name string>'), and write user.name; a "
                f"function of map_batches parses a text that stands in a field"
            )
        at = self._text.lower().find(name)
        place = f" at character {at + 1}:" if at >= 0 else ""
        shown_text = "" if text.lower().startswith(name) else f" ({text})"
        return ExpressionError(f"{self._what}:{place} {no_function(name, shown_text)}")

    def _literal(self, tree: Any) -> Node:
        exp, text = self._exp, tree.sql(DIALECT)
        if isinstance(tree, exp.Null):
            return Node("literal", (), text, (None, pa.null()))
        if isinstance(tree, exp.Boolean):
            return Node("literal", (), text, (bool(tree.this), pa.bool_()))
        if isinstance(tree, exp.Interval):
            return Node("literal", (), text, (self._interval(tree), pa.duration("us")))
        if tree.is_string:
            return Node("literal", (), text, (str(tree.this), pa.string()))
        return Node("literal", (), text, number_of(str(tree.this)))

    def _interval(self, tree: Any) -> int:
        unit = tree.text("unit").lower().rstrip("s")
        try:
            return round(Decimal(tree.this.name) * _UNITS[unit])
        except (ArithmeticError, KeyError, AttributeError):
            raise ExpressionError(
                f"{self._what}: {tree.sql(DIALECT)}: expected a number of {', '.join(_UNITS)}s"
            ) from None

    def _cast(self, tree: Any) -> Node:
        kind = tree.to.sql(DIALECT).lower()
        return Node("cast", (self.node(tree.this),), tree.sql(DIALECT), kind)

    def _special(self, tree: Any) -> Node | None:
        """Return the node of a tree whose arguments have other places; None: it is another."""
        exp, text = self._exp, tree.sql(DIALECT)
        if isinstance(tree, exp.Is):
            return self._is(tree, text)
        if isinstance(tree, exp.Case):
            return self._case(tree, text)
        is_trim_of = isinstance(tree, exp.Trim) and tree.expression is not None
        if is_trim_of or tree.args.get("query") or tree.args.get("symmetric"):
            raise self._unknown(tree.key, text)
        if isinstance(tree, exp.Between):
            low = self._call(">=", [tree.this, tree.args["low"]], text)
            high = self._call("<=", [tree.this, tree.args["high"]], text)
            return Node("and", (low, high), text)
        if isinstance(tree, exp.DPipe) and isinstance(tree.expression, exp.Add | exp.Sub):
            raise ExpressionError(  # Spark goes from left to right here, sqlglot does not
                f"{self._what}: {self._text!r}: write brackets: a || (b + c)"
            )
        if type(tree) in self._shapes:
            name, arguments = self._shapes[type(tree)](tree)
            return self._call(name, arguments, text)
        return None

    def _is(self, tree: Any, text: str) -> Node:
        exp = self._exp
        if isinstance(tree.expression, exp.Null):
            return self._call("isnull", [tree.this], text)
        if isinstance(tree.expression, exp.Boolean):
            return self._call("istrue" if tree.expression.this else "isfalse", [tree.this], text)
        raise self._unknown("is", text)

    def _case(self, tree: Any, text: str) -> Node:
        exp, parts = self._exp, []
        for branch in tree.args["ifs"]:
            condition = branch.this
            if tree.this is not None:
                condition = exp.EQ(this=tree.this, expression=condition)
            parts += [condition, branch.args["true"]]
        return self._call("case", [*parts, tree.args.get("default") or exp.null()], text)


_PARTS = {one: one for one in ("year", "quarter", "month", "day", "hour", "minute")} | {
    "week": "weekofyear",
    "doy": "dayofyear",
    "dayofweek": "dayofweek",
}
"""Functions by the units of EXTRACT; its seconds have a fraction in Spark."""
_TRIMS = {"LEADING": "ltrim", "TRAILING": "rtrim"}
_UNITS = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 7 * 86_400_000_000,
}


def number_of(text: str) -> tuple[Any, pa.DataType]:
    """Return a number's value and type, as Spark reads it: 1.5 is a decimal, 1e3 a double."""
    if text.removeprefix("-").isdigit():
        value = int(text)
        if -(1 << 31) <= value < 1 << 31:
            return value, pa.int32()
        if -(1 << 63) <= value < 1 << 63:
            return value, pa.int64()
        return Decimal(text), pa.decimal128(len(str(abs(value))), 0)
    if "e" in text.lower():
        return float(text), pa.float64()
    exact = Decimal(text)
    _, digits, exponent = exact.as_tuple()
    scale = -int(exponent)
    return exact, pa.decimal128(max(len(digits), scale), scale)
