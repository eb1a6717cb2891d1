"""The text of a query as sqlglot's tree, with what Spark's dialect of sqlglot does not read.

Source: Spark SQL (`window`, `session_window`), Flink SQL (`TUMBLE`, `HOP`, `CUMULATE`, `SESSION` as
table functions, of FLIP-145, and as functions of GROUP BY).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, TokenError
from sqlglot.tokens import Token, Tokenizer, TokenType

from tallystick.errors import OptionError
from tallystick.expressions.parsing import DIALECT, refuse_misread

WINDOW = "time_window"
"""The name of Spark's `window` in a tree: to sqlglot, WINDOW begins a clause."""
TABLE_FUNCTIONS = ("TUMBLE", "HOP", "CUMULATE", "SESSION")
PARTITION = "_PARTITION_BY"
"""A function that stands for the PARTITION BY of a table in `SESSION(TABLE …)`."""
_PRECISIONS = {"0": "timestamp_seconds", "3": "timestamp_millis"}
_SET = re.compile(
    r"(?:^|(?<=;))\s*(?:EXECUTE\s+STATEMENT\s+SET\s+BEGIN\b|BEGIN\s+STATEMENT\s+SET\s*;)"
    r"|(?<=;)\s*END\s*;?\s*$",
    re.I,
)
"""The words around a statement set of Flink."""
_UNITS = {"MILLISECOND": 1, "SECOND": 1_000, "MINUTE": 60_000, "HOUR": 3_600_000}
_UNITS |= {"DAY": 24 * _UNITS["HOUR"], "WEEK": 7 * 24 * _UNITS["HOUR"]}


def statements_of(text: str) -> list[exp.Expression]:
    """Parse a text of one statement or of several.

    Raises:
        OptionError: the text is no SQL; the message has the line and the column.
    """
    refuse_misread(text, "sql")
    if any(token.text.upper() == "MATCH_RECOGNIZE" for token in _tokens(text)):
        raise OptionError(
            "sql: MATCH_RECOGNIZE: patterns of rows are a StatefulProcessor, or a vectorised "
            "function, behind key_by"
        )
    if any(token.token_type == TokenType.FARROW for token in _tokens(text)):
        raise OptionError(
            "sql: =>: arguments of TUMBLE and the like go by their place here: leave DATA => and "
            "the other names out"
        )
    try:
        trees = sqlglot.parse(_rewritten(text), read=DIALECT)
    except ParseError as error:
        at = error.errors[0]
        raise OptionError(
            f"sql: line {at['line']}, column {at['col']}, at {at['highlight']!r}: {_problem(at)}"
        ) from None
    _place(trees, text)
    statements = [tree.transform(_of_flink) for tree in trees if tree is not None]
    if not statements:
        raise OptionError("sql: the text has no statement; expected SELECT … FROM …")
    return statements


def _place(trees: Sequence[exp.Expression | None], text: str) -> None:
    """Note in names, functions and literals where they begin in the text as the user wrote it."""
    shifts = [
        (end, len(word) - (end - start))
        for start, end, word in _replacements(_tokens(without_set(text)))
    ]
    for node in (node for tree in trees if tree is not None for node in tree.walk()):
        if "start" in node.meta:
            at = node.meta["start"]
            for end, longer in shifts:
                if at - longer >= end:
                    at -= longer
            node.meta["line"] = text.count("\n", 0, at) + 1
            node.meta["col"] = at - text.rfind("\n", 0, at)


def place_of(node: exp.Expression) -> str:
    """Return the place of a part in the text, for messages; "" where none is known."""
    placed = [one.meta for one in node.walk() if "line" in one.meta]
    if not placed:
        return ""
    line, column = min((one["line"], one["col"]) for one in placed)
    return f"line {line}, column {column}: "


def _problem(at: Mapping[str, Any]) -> str:
    """Return what is wrong at a place of the text, in words of SQL."""
    what, word = str(at["description"]), str(at["highlight"])
    if what.startswith("Required keyword"):
        return "something is missing there: an expression, or a column"
    if what.startswith("Expected table name"):
        return "expected the name of a table after it"
    if what.startswith("Expecting") and word.isidentifier():
        return f"{what}. If it is the name of a column, write it as `{word}`: it is a word of SQL"
    return what


def _of_flink(node: exp.Expression) -> exp.Expression:
    """Return Spark's function for one of Flink, or the node.

    Raises:
        OptionError: the precision of a time is neither 0 nor 3.
    """
    if isinstance(node, exp.Anonymous) and node.name.upper() == "TO_TIMESTAMP_LTZ":
        number, *digits = node.expressions
        unit = _PRECISIONS.get(digits[0].name if digits else "3")
        if unit is None or len(digits) > 1:
            raise OptionError(f"sql: {node.sql(DIALECT)}: expected the precision 0 or 3")
        return exp.func(unit, number, dialect=DIALECT)
    return node


def as_spark(text: str) -> str:
    """Return an expression that may have functions of Flink in Spark's spelling.

    Raises:
        OptionError: the text is no expression.
    """
    (query,) = statements_of(f"SELECT {text}")
    return str(query.expressions[0].sql(DIALECT))


def without_set(text: str) -> str:
    """Replace the words around a statement set by blanks, and leave all else where it is."""
    return _SET.sub(lambda match: " " * len(match[0]), text)


def _rewritten(text: str) -> str:
    """Replace the words that sqlglot takes for others, and leave all else where it is."""
    text = without_set(text)
    tokens = _tokens(text)
    parts, at = [], 0
    for start, end, word in _replacements(tokens):
        parts += [text[at:start], word]
        at = end
    return "".join([*parts, text[at:]])


def _replacements(tokens: Sequence[Token]) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and new text of the tokens to replace."""
    for number, token in enumerate(tokens):
        following = tokens[number + 1].token_type if number + 1 < len(tokens) else None
        word = token.text.upper()
        if word == "WINDOW" and following in (TokenType.L_PAREN, TokenType.DOT):
            is_call = following == TokenType.L_PAREN
            yield token.start, token.end + 1, WINDOW if is_call else f"`{WINDOW}`"
        elif word == "SESSION" and following == TokenType.L_PAREN:
            yield token.start, token.end + 1, "`SESSION`"
        elif (
            token.token_type == TokenType.TABLE
            and number >= 2
            and tokens[number - 2].text.upper() in TABLE_FUNCTIONS
        ):
            yield token.start, token.end + 1, ""  # TUMBLE(TABLE bids, …)
        elif (
            token.token_type == TokenType.PARTITION_BY
            and number >= 4
            and tokens[number - 4].text.upper() in TABLE_FUNCTIONS
        ):
            yield token.start, token.end + 1, f", {PARTITION}("
            last = next(
                (n for n in range(number, len(tokens)) if tokens[n].text.upper() == "DESCRIPTOR"),
                number + 1,
            )
            yield tokens[last - 1].start, tokens[last - 1].start, ")"


def _tokens(text: str) -> list[Token]:
    try:
        return list(Tokenizer(dialect=DIALECT).tokenize(text))
    except TokenError as error:
        raise OptionError(f"sql: {str(error).splitlines()[0]}") from None


def conjuncts(condition: exp.Expression | None) -> list[exp.Expression]:
    """Return the conditions that an AND joins; none for no condition."""
    if condition is None:
        return []
    condition = condition.unnest()
    return list(condition.flatten()) if isinstance(condition, exp.And) else [condition]


def milliseconds(node: exp.Expression, what: str) -> int:
    """Return the length of an INTERVAL, or of a text such as '10 minutes'.

    Raises:
        OptionError: it is no length of time, or one without a fixed length, as a month.
    """
    if isinstance(node, exp.Neg):
        return -milliseconds(node.this, what)
    if isinstance(node, exp.Paren):
        return milliseconds(node.this, what)
    if isinstance(node, exp.Interval):
        count, unit = node.this, (node.text("unit") or "").upper()
        text = f"{count.name if count is not None else ''} {unit}"
    elif isinstance(node, exp.Literal):
        text = node.name.replace("'", "")  # INTERVAL '10' SECOND
    else:
        text = ""
    total, rest = 0, text.strip()
    while match := re.match(r"(?:INTERVAL\s+)?(-?\d+)\s*([a-zA-Z]+?)s?(?:\s+|$)", rest, re.I):
        unit = match[2].upper()
        if unit not in _UNITS:
            break
        total, rest = total + int(match[1]) * _UNITS[unit], rest[match.end() :]
    if rest or not text.strip():
        raise OptionError(
            f"sql: {what}: {node.sql(DIALECT)}: expected a length of time with a fixed unit, such "
            f"as INTERVAL '10' SECOND or '10 seconds' ({', '.join(_UNITS).lower()})"
        )
    return total


def shown(node: exp.Expression) -> str:
    """Return the text of a part of a query, as the user wrote it."""
    text = str(node.sql(DIALECT)).replace(f"{WINDOW.upper()}(", "window(")
    return text.replace(f"`{WINDOW}`.", "window.")


def from_of(select: exp.Expression) -> exp.Expression | None:
    """Return the table or subquery of FROM."""
    from_ = select.args.get("from_") or select.args.get("from")
    return None if from_ is None else from_.this


def alias_name(node: exp.Expression) -> str:
    """Return the name of a projection: its alias, or that of a plain column.

    Raises:
        OptionError: it has none.
    """
    if isinstance(node, exp.Alias | exp.Column | exp.Dot):
        return str(node.alias_or_name or node.expression.name)
    raise OptionError(f"sql: {shown(node)} has no name in the output: write {shown(node)} AS …")
