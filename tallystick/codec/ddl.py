"""Spark's DDL read without a JVM: `"n bigint, tags array<struct<name: string>>"`.

The result is the JSON form of Spark's `DataType`, as its own parser makes it, so that both can be
compared: `tests/spark/test_ddl_as_spark.py` does. Collations, geometry and `IDENTIFIER('name')` are
left to Spark; every error names the place in the text.

    schema   column [, column …]  |  type
    column   name [:] type [NOT NULL] [COMMENT 'text']
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from tallystick.arguments import near
from tallystick.errors import NeedsSparkError, OptionError

Json: TypeAlias = str | dict[str, Any]
"""A type in the form of Spark's `DataType.json()`."""

INT_MAX = 2**31 - 1
DECIMAL_DIGITS_MAX = 38
TIME_DIGITS_MAX = 9
TIMESTAMP_DIGITS = 6

PLAIN = {
    "boolean": "boolean",
    "tinyint": "byte",
    "byte": "byte",
    "smallint": "short",
    "short": "short",
    "int": "integer",
    "integer": "integer",
    "bigint": "long",
    "long": "long",
    "float": "float",
    "real": "float",
    "double": "double",
    "date": "date",
    "binary": "binary",
    "void": "void",
    "variant": "variant",
}
"""Types of one word that take nothing in brackets -> their names in JSON."""

_OTHER_TYPES = dict.fromkeys(("str", "text", "utf8", "object"), " Did you mean 'string'?")
_OTHER_TYPES |= dict.fromkeys(("int64", "uint32", "number", "i64"), " Did you mean 'bigint'?")
_OTHER_TYPES |= dict.fromkeys(("int32", "i32"), " Did you mean 'int'?")
_OTHER_TYPES |= dict.fromkeys(("float64", "f64"), " Did you mean 'double'?")
_OTHER_TYPES |= {"float32": " Did you mean 'float'?", "bool": " Did you mean 'boolean'?"}
_OTHER_TYPES |= {"datetime": " Did you mean 'timestamp'?", "bytes": " Did you mean 'binary'?"}
_OTHER_TYPES |= {"list": " Did you mean 'array<…>'?", "dict": " Did you mean 'map<…>'?"}
"""Names of types elsewhere -> the question about Spark's."""

_DAY_TIME = ("day", "hour", "minute", "second")
_YEAR_MONTH = ("year", "month")
_LEFT_TO_SPARK = "is left to Spark's own parser, which needs a running SparkContext"

_TOKEN = re.compile(
    r"""(?P<space>[ \t\n\f\r\x0b\xa0\u1680\u2000-\u200a\u2028\u202f\u205f\u3000]+)
      | (?P<line_comment>--(?:\\\n|[^\r\n])*)
      | (?P<comment>/\*(?!\+))
      | (?P<raw>[rR](?:'[^']*'|"[^"]*"))
      | (?P<string>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")
      | (?P<quoted>`(?:[^`]|``)*`)
      | (?P<integer>[0-9]+(?!\w))
      | (?P<number>[0-9]+(?:[lsy]|(?:e[0-9]+)?(?:f|d|bd)|e[0-9]+)(?!\w))
      | (?P<word>\w+)
      | (?P<symbol><>|::|[<>(),:])
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\([01][0-7]{2})|\\(.)", re.DOTALL)
_ESCAPED = {"0": "\0", "b": "\b", "n": "\n", "r": "\r", "t": "\t", "Z": "\x1a"}
_ESCAPED |= {"%": "\\%", "_": "\\_"}


_DDL_NAMES = {
    pa.bool_(): "boolean",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us", tz="UTC"): "timestamp",
    pa.timestamp("us"): "timestamp_ntz",
    pa.null(): "void",
}


class DdlError(OptionError):
    """A text is no schema; Spark may accept more than this parser does."""


class LeftToSparkError(DdlError, NeedsSparkError):
    """A text is for Spark's own parser to judge."""


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


@dataclass
class _MisplacedError(Exception):
    """A token stands where the grammar does not allow it."""

    at: int
    reason: str


def parse(text: str, name: str, *, timestamp: str = "timestamp") -> Json:
    """Read DDL as `DataType.fromDDL` does: columns, or a type alone.

    Args:
        text: the DDL.
        name: the thing that the DDL describes, for errors.
        timestamp: the type of a bare `timestamp`; `timestamp_ntz` where a session says so.

    Raises:
        DdlError: the text cannot be read.
    """
    try:
        tokens = list(_tokens(text))
    except _MisplacedError as refused:
        raise _error(text, name, refused) from None
    refusals: list[_MisplacedError] = []
    for read in (_Parser.columns, _Parser.type):
        parser = _Parser(tokens, len(text), timestamp)
        try:
            result = read(parser)
            parser.expect_end()
        except _MisplacedError as refused:
            refusals.append(refused)
        else:
            return result
    raise _error(text, name, max(refusals, key=lambda refused: refused.at))


def columns(text: str, name: str, *, timestamp: str = "timestamp") -> dict[str, Any]:
    """Read DDL as `createDataFrame` does: a type alone becomes a column `value`.

    Raises:
        DdlError: the text cannot be read.
    """
    return as_columns(parse(text, name, timestamp=timestamp))


def check_fields(what: str, text: str | None) -> None:
    """Refuse the fields to read of a format, unless they are for Spark to judge, or no DDL.

    Raises:
        DdlError: the text cannot be read.
    """
    if text is not None and not text.lstrip().startswith(("{", "[", '"')):  # a schema to write
        with suppress(LeftToSparkError):
            parse(text.rstrip().removesuffix(","), what)  # Spark takes a comma at the end


def as_columns(kind: Json) -> dict[str, Any]:
    """Return the columns of a type: a struct's fields, or a single column `value`."""
    if isinstance(kind, dict) and kind["type"] == "struct":
        return kind
    return {"type": "struct", "fields": [_field("value", kind)]}


def ddl_of(schema: pa.Schema) -> str:
    """Return a schema as DDL for people, with Arrow's names for types that DDL does not know."""
    return ", ".join(f"{quoted(field.name)} {ddl_of_type(field.type)}" for field in schema)


def quoted(name: str) -> str:
    """Return a column's name as DDL has it, in backticks unless it is a plain word."""
    return name if re.fullmatch(r"\w+", name) else "`" + name.replace("`", "``") + "`"


def ddl_of_type(kind: pa.DataType) -> str:
    """Return a type as DDL, as `ddl_of` does."""
    if pa.types.is_list(kind):
        return f"array<{ddl_of_type(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<{ddl_of_type(kind.key_type)}, {ddl_of_type(kind.item_type)}>"
    if pa.types.is_struct(kind):
        fields = (f"{quoted(field.name)}: {ddl_of_type(field.type)}" for field in kind)
        return f"struct<{', '.join(fields)}>"
    if pa.types.is_decimal128(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    return _DDL_NAMES.get(kind, str(kind))


def no_dict(columns: Any) -> Any:
    """Return columns as they are.

    Raises:
        ValueError: a dict was given: the message says the text that is meant by it.
    """
    if isinstance(columns, Mapping):
        meant = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        raise ValueError(f"the columns as a text, {meant!r}")
    return columns


def text_of(columns: Any) -> Any:
    """Return columns, given as Spark's or Arrow's type, as DDL; anything else as it is.

    Raises:
        ValueError: see `no_dict`.
    """
    if isinstance(no_dict(columns), pa.Schema):
        return ddl_of(columns)
    fields = getattr(columns, "fields", None)
    if isinstance(fields, list):  # a StructType of Spark, which is not imported for this
        return ", ".join(f"{quoted(one.name)} {one.dataType.simpleString()}" for one in fields)
    return columns


def _error(text: str, name: str, refused: _MisplacedError) -> DdlError:
    rest = text[refused.at :]
    where = f"at {rest[:30]!r} (character {refused.at + 1})" if rest.strip() else "at its end"
    end = "" if refused.reason.endswith("?") else "."
    kind = LeftToSparkError if _LEFT_TO_SPARK in refused.reason else DdlError
    return kind(
        f"{name}: {text!r} cannot be read {where}: {refused.reason}{end} Write it as Spark's DDL, "
        f"'name type, name type', or give a pyarrow.Schema"
    )


def _field(
    name: str, kind: Json, *, nullable: bool = True, comment: str | None = None
) -> dict[str, Any]:
    metadata = {} if comment is None else {"comment": comment}
    return {"name": name, "type": kind, "nullable": nullable, "metadata": metadata}


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None, "the last alternative takes anything"
        kind, word = str(match.lastgroup), match[0]
        if kind == "comment":
            at = _end_of_comment(text, at)
            continue
        if kind == "other":
            raise _MisplacedError(
                at, f"{word!r} has no meaning here; names with it need backquotes"
            )
        if kind == "word" and not word.isascii():
            raise _MisplacedError(
                at, f"the name {word!r} needs backquotes, for letters beyond a to z"
            )
        if kind not in ("space", "line_comment"):
            yield _Token(kind, word, at)
        at = match.end()


def _end_of_comment(text: str, begin: int) -> int:
    """Return the end of a comment, which may hold other comments."""
    depth = 0
    for mark in re.finditer(r"/\*|\*/", text[begin:]):
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return begin + mark.end()
    raise _MisplacedError(begin, "the comment has no end")


class _Parser:
    """Reads tokens from left to right."""

    def __init__(self, tokens: list[_Token], length: int, timestamp: str) -> None:
        self._tokens = tokens
        self._next = 0
        self._length = length
        self._timestamp = timestamp
        self._types: dict[str, Callable[[], Json]] = {
            "array": self._array,
            "map": self._map,
            "struct": self._struct,
            "string": self._string,
            "char": lambda: self._sized("char"),
            "character": lambda: self._sized("char"),
            "varchar": lambda: self._sized("varchar"),
            "decimal": self._decimal,
            "dec": self._decimal,
            "numeric": self._decimal,
            "timestamp": self._moment,
            "timestamp_ltz": lambda: self._exact_moment("timestamp"),
            "timestamp_ntz": lambda: self._exact_moment("timestamp_ntz"),
            "time": self._time,
            "interval": self._interval,
        }

    def columns(self) -> Json:
        """Read columns, or nothing."""
        fields = []
        if self._peek() is not None:
            fields.append(self._column())
            while self._take(","):
                fields.append(self._column())
        return {"type": "struct", "fields": fields}

    def type(self) -> Json:
        """Read a type."""
        token = self._peek()
        if token is None or token.kind != "word":
            raise self._refused("expected a type")
        word = token.text.lower()
        if word in ("geometry", "geography"):
            raise self._refused(f"type {token.text!r} {_LEFT_TO_SPARK}")
        if word not in PLAIN and word not in self._types:
            hint = _OTHER_TYPES.get(word) or near(word, [*PLAIN, *self._types])
            raise self._refused(f"{token.text!r} is not a type that Spark has.{hint}")
        self._next += 1
        return PLAIN[word] if word in PLAIN else self._types[word]()

    def expect_end(self) -> None:
        """Refuse any token that is left."""
        if self._peek() is not None:
            raise self._refused("expected ',' or the end")

    def _column(self) -> dict[str, Any]:
        name = self._name()
        self._take(":")
        kind = self.type()
        nullable = not self._take("not")
        if not nullable:
            self._expect("null")
        comment = self._texts() if self._take("comment") else None
        return _field(name, kind, nullable=nullable, comment=comment)

    def _name(self) -> str:
        token = self._peek()
        if token is None or token.kind not in ("word", "quoted"):
            raise self._refused("expected the name of a column")
        self._next += 1
        if token.kind == "quoted":
            return token.text[1:-1].replace("``", "`")
        if token.text.lower() == "identifier" and self._is("("):
            raise self._refused(f"IDENTIFIER(…) {_LEFT_TO_SPARK}")
        return token.text

    def _array(self) -> Json:
        self._expect("<")
        element = self.type()
        self._expect(">")
        return {"type": "array", "elementType": element, "containsNull": True}

    def _map(self) -> Json:
        self._expect("<")
        key = self.type()
        self._expect(",")
        value = self.type()
        self._expect(">")
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}

    def _struct(self) -> Json:
        fields: list[dict[str, Any]] = []
        if not self._take("<>"):
            self._expect("<")
            if not self._is(">"):
                fields.append(self._column())
                while self._take(","):
                    fields.append(self._column())
            self._expect(">")
        return {"type": "struct", "fields": fields}

    def _string(self) -> Json:
        self._refuse_collation()
        return "string"

    def _sized(self, name: str) -> Json:
        self._expect("(")
        length = self._integer(INT_MAX)
        self._expect(")")
        self._refuse_collation()
        return f"{name}({length})"

    def _decimal(self) -> Json:
        precision, scale = 10, 0
        if self._take("("):
            precision = self._integer(DECIMAL_DIGITS_MAX)
            if self._take(","):
                scale = self._integer(precision)
            self._expect(")")
        return f"decimal({precision},{scale})"

    def _moment(self) -> Json:
        self._microseconds()
        if self._take("without"):
            self._words("time", "zone")
            return "timestamp_ntz"
        if self._take("with"):
            self._words("local", "time", "zone")
        return self._timestamp

    def _exact_moment(self, name: str) -> Json:
        self._microseconds()
        return name

    def _microseconds(self) -> None:
        if self._take("("):
            if self._integer(INT_MAX) != TIMESTAMP_DIGITS:
                self._next -= 1
                raise self._refused("a timestamp has 6 digits of a second")
            self._expect(")")

    def _time(self) -> Json:
        digits = TIMESTAMP_DIGITS
        if self._take("("):
            digits = self._integer(TIME_DIGITS_MAX)
            self._expect(")")
        if self._take("without"):
            self._words("time", "zone")
        return f"time({digits})"

    def _interval(self) -> Json:
        for units in (_YEAR_MONTH, _DAY_TIME):
            first = next((unit for unit in units if self._take(unit)), None)
            if first is None:
                continue
            if not self._take("to"):
                return f"interval {first}"
            for last in units[units.index(first) + 1 :]:
                if self._take(last):
                    return f"interval {first} to {last}"
            raise self._refused(f"expected a smaller unit than {first}")
        return "interval"

    def _refuse_collation(self) -> None:
        if self._is("collate"):
            raise self._refused(f"COLLATE {_LEFT_TO_SPARK}")

    def _texts(self) -> str:
        """Read a text in quotes; adjacent texts are joined."""
        texts = []
        while (token := self._peek()) is not None and token.kind in ("string", "raw"):
            self._next += 1
            texts.append(token.text[2:-1] if token.kind == "raw" else _unescaped(token.text))
        if not texts:
            raise self._refused("expected a text in quotes")
        return "".join(texts)

    def _integer(self, largest: int) -> int:
        token = self._peek()
        if token is None or token.kind != "integer":
            raise self._refused("expected a whole number")
        if len(token.text.lstrip("0")) > len(str(INT_MAX)) or int(token.text) > largest:
            raise self._refused(f"expected at most {largest}")
        self._next += 1
        return int(token.text)

    def _words(self, *words: str) -> None:
        for word in words:
            self._expect(word)

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise self._refused(f"expected {text.upper()!r}")

    def _take(self, text: str) -> bool:
        is_next = self._is(text)
        self._next += is_next
        return is_next

    def _is(self, text: str) -> bool:
        """True if a symbol or a word stands next."""
        token = self._peek()
        return token is not None and token.kind in ("word", "symbol") and token.text.lower() == text

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _refused(self, reason: str) -> _MisplacedError:
        token = self._peek()
        return _MisplacedError(self._length if token is None else token.at, reason)


def _unescaped(literal: str) -> str:
    """Return the text of a literal in quotes."""
    quote = literal[0]
    # Two quotes are one, unless a backslash made the first of them.
    parts = re.findall(rf"\\.|{quote}{quote}|[^\\]", literal[1:-1], re.DOTALL)
    text = "".join(quote if part == 2 * quote else part for part in parts)
    return _ESCAPE.sub(_meant, text)


def _meant(escape: re.Match[str]) -> str:
    if short := escape[1] or escape[2]:
        code = int(short, 16)
        if code > 0x10FFFF:
            raise _MisplacedError(0, f"{escape[0]!r} is no character")
        return chr(code)
    if escape[3]:
        return chr(int(escape[3], 8))
    return _ESCAPED.get(escape[4], escape[4])
