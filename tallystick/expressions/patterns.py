"""Functions with regular expressions, and texts of moments by a pattern.

Patterns are Java's, and RE2 runs them: those that the two read alike, or that can be written so
that they do. All others are refused.
"""

import re
from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tallystick.expressions.casts import TIMESTAMP, checked
from tallystick.expressions.nodes import Bound, ExpressionError, Value
from tallystick.expressions.operators import check_count, shown_or

T = pa.types
_LINE_ENDS = r"\n\r\x{85}\x{2028}\x{2029}"
_BLANKS = r" \t\n\x{b}\f\r"
_AT_END = rf"(?:\r\n|[{_LINE_ENDS}])?\z"
"""Java's `$`: the end, or before the last line's end."""
_TOKEN = re.compile(
    r"(?P<escape>\\.)|(?P<group>\((?:\?:)?(?!\?))|(?P<bounds>\{\d{1,3}(?:,\d{0,3})?\}[?]?(?![+?*]))"
    r"|(?P<count>[*+?]\??(?![+?*]))|(?P<class>\[\^?)|(?P<any>\.)|(?P<end>\$\Z)|(?P<plain>[^\\({*+?\[\].$}])",
    re.DOTALL,
)
_IN_CLASS = re.compile(r"(?P<escape>\\.)|(?P<close>\])|(?P<plain>[^\\\[\]&])", re.DOTALL)


def translated(pattern: str, what: str) -> tuple[str, int, bool]:
    """Return a pattern of Java's as RE2 reads it.

    Its groups have the names g1, g2 and so on.

    Returns:
        The pattern, the number of its groups, and whether it ends with `$`.

    Raises:
        ExpressionError: the two read something in it otherwise.
    """
    parts: list[str] = []
    at = group_count = 0
    is_class = False
    while at < len(pattern):
        token = (_IN_CLASS if is_class else _TOKEN).match(pattern, at)
        if token is None:
            raise ExpressionError(
                f"{what}: {pattern[at:]!r} in the pattern is not read alike by Java and RE2: "
                f"there are . [] () (?:) | * + ? {{m,n}} ^, $ at the end, \\d \\w \\s and \\."
            )
        text, kind = token[0], token.lastgroup
        if kind == "group" and text == "(":
            group_count += 1
            text = f"(?P<g{group_count}>"
        elif kind == "any":
            text = f"[^{_LINE_ENDS}]"
        elif kind == "end":
            text = _AT_END
        elif kind == "escape":
            text = _escape(text, is_class, what)
        is_class = (is_class and kind != "close") or kind == "class"
        if kind == "class" and pattern[token.end() : token.end() + 1] == "]":
            raise ExpressionError(f"{what}: write \\] for a bracket in brackets")
        parts.append(text)
        at = token.end()
    result = "".join(parts)
    try:
        pc.match_substring_regex(pa.array([""]), result)
    except pa.ArrowInvalid as error:
        raise ExpressionError(f"{what}: {pattern!r}: {error}") from None
    return result, group_count, pattern.endswith("$") and not pattern.endswith("\\$")


def _escape(text: str, is_class: bool, what: str) -> str:
    letter = text[1]
    if letter == "s" or (letter == "S" and not is_class):
        return _BLANKS if is_class else f"[{'^' if letter == 'S' else ''}{_BLANKS}]"
    if letter in "dDwWtnrf" or not (letter.isalnum() or letter.isspace()):
        return text
    raise ExpressionError(f"{what}: {text} in the pattern is not read alike by Java and RE2")


def constant(bound: Bound, what: str) -> str:
    """Return the text of a literal.

    Raises:
        ExpressionError: it is none.
    """
    if not bound.is_literal or not isinstance(bound.literal, str):
        raise ExpressionError(f"{what}: this argument has to be a literal text here")
    return bound.literal


def _text(args: Sequence[Bound], counts: Sequence[int], what: str) -> Bound:
    check_count(args, counts, what)
    if not T.is_string(args[0].kind):
        raise ExpressionError(f"{what}: expected a string, not {shown_or(args[0].kind)}")
    return args[0]


def _on(text: Bound, kind: pa.DataType, call: Callable[[Value], Value]) -> Bound:
    return Bound(kind, lambda rows: call(text.run(rows)), text.may_fail)


def rlike(args: Sequence[Bound], what: str) -> Bound:
    """True if a pattern matches somewhere."""
    text = _text(args, (2,), what)
    pattern, _, _ = translated(constant(args[1], what), what)
    return _on(text, pa.bool_(), lambda value: pc.match_substring_regex(value, pattern))


def regexp_extract(args: Sequence[Bound], what: str) -> Bound:
    """Return what a group of a pattern matches first; "" if nothing does."""
    text = _text(args, (2, 3), what)
    pattern, count, has_end = translated(constant(args[1], what), what)
    group = 1 if len(args) < 3 else args[2].literal
    if not isinstance(group, int) or not 0 <= group <= count:
        raise ExpressionError(f"{what}: the pattern has {count} groups: expected 0 to {count}")
    if group == 0 and has_end:
        raise ExpressionError(f"{what}: $ in a pattern: write a group, and its number")
    if group == 0:
        pattern = f"(?P<g0>{pattern})"

    def call(value: Value) -> Value:
        matches = pc.struct_field(pc.extract_regex(value, pattern), [0 if not group else group - 1])
        return pc.if_else(pc.is_valid(value), pc.fill_null(matches, ""), None)

    return _on(text, pa.string(), call)


def regexp_replace(args: Sequence[Bound], what: str) -> Bound:
    """Replace all that a pattern matches."""
    text = _text(args, (3,), what)
    pattern, _, has_end = translated(constant(args[1], what), what)
    new = constant(args[2], what)
    if has_end or pc.match_substring_regex(pa.scalar(""), pattern).as_py():
        raise ExpressionError(f"{what}: a pattern that can match nothing, or has a $, is not here")
    if "\\" in new or re.sub(r"\$\d(?!\d)", "", new).count("$"):
        raise ExpressionError(f"{what}: {new!r}: expected a text with $1 to $9 for groups")
    new = re.sub(r"\$(\d)", r"\\\1", new)
    return _on(text, pa.string(), lambda value: pc.replace_substring_regex(value, pattern, new))


def split(args: Sequence[Bound], what: str) -> Bound:
    """Return the parts of a text between those that are equal to a plain text."""
    text = _text(args, (2,), what)
    pattern = constant(args[1], what)
    plain = re.sub(r"\\(\W)", r"\1", pattern)
    if not plain or re.search(r"[\\.\[\](){}*+?|^$]", re.sub(r"\\\W", "", pattern)):
        raise ExpressionError(f"{what}: {pattern!r}: expected a plain text, such as ',' or '\\\\|'")
    return _on(text, pa.list_(pa.string()), lambda value: pc.split_pattern(value, plain))


_DATE_PARTS = {"%Y": "%Y", "%mstrict": "%m", "%dstrict": "%d", "%Hstrict": "%H"}
_DATE_PARTS |= {"%Mstrict": "%M", "%Sstrict": "%S"}
_YEARS = (1000, 9999)


def date_format(args: Sequence[Bound], what: str) -> Bound:
    """Return the text of a moment in UTC; the pattern is as sqlglot writes that of Spark."""
    check_count(args, (2,), what)
    pattern, one = constant(args[1], what), args[0]
    parts = re.findall(r"%\w(?:strict)?|[^%\w']", pattern)
    if (
        one.kind != TIMESTAMP
        or "".join(parts) != pattern
        or not {part for part in parts if part[0] == "%"} <= {*_DATE_PARTS}
    ):
        raise ExpressionError(
            f"{what}: expected a timestamp, and a pattern of yyyy MM dd HH mm ss and signs"
        )
    text = "".join(_DATE_PARTS.get(part, part) for part in parts)

    def run(rows: pa.RecordBatch) -> Value:
        moments = pc.floor_temporal(one.run(rows), unit="second").cast(pa.timestamp("s", "UTC"))

        def call() -> Value:
            years = pc.year(moments)
            inside = pc.and_(pc.greater_equal(years, _YEARS[0]), pc.less_equal(years, _YEARS[1]))
            inside = inside.as_py() if isinstance(inside, pa.Scalar) else pc.all(inside).as_py()
            if inside is False:
                raise pa.ArrowInvalid("years")
            return pc.strftime(moments, format=text, locale="C")

        return checked(call, what, "beyond the years 1000 to 9999")

    return Bound(pa.string(), run, True)
