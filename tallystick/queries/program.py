"""Programs in SQL: tables declared as in Flink's SQL, and one INSERT INTO.

    CREATE TABLE flights (dest STRING, delay DOUBLE, at TIMESTAMP(3),
        WATERMARK FOR at AS at - INTERVAL '10' SECOND)
    WITH ('connector' = 'kafka', 'topic' = 'flights', 'format' = 'json',
        'properties.bootstrap.servers' = 'localhost:9092');
    CREATE TABLE late (dest STRING, delay DOUBLE)
    WITH ('connector' = 'kafka', 'topic' = 'late', 'format' = 'json', 'key.fields' = 'dest',
        'properties.bootstrap.servers' = 'localhost:9092');
    INSERT INTO late SELECT dest, delay FROM flights WHERE delay > 15;

Source: Flink's CREATE TABLE, and the options of its connectors kafka, filesystem and print.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlglot.tokens import Tokenizer, TokenType

from tallystick.api.console_sink import ConsoleSink
from tallystick.api.kafka_sink import KafkaSink
from tallystick.api.kafka_source import KafkaSource
from tallystick.api.pipeline import Pipeline
from tallystick.arguments import near
from tallystick.codec.formats import Json
from tallystick.epoch.transactional_ids import ID_PREFIX
from tallystick.epoch.two_phase import Sink
from tallystick.errors import OptionError
from tallystick.expressions.parsing import DIALECT
from tallystick.files.sink import FileSink
from tallystick.queries.query import sql

SERVERS = "properties.bootstrap.servers"
_PROPERTIES = "properties."
_CREATE = re.compile(r"CREATE\s+TABLE\s+`?(\w+)`?\s*\((.*)\)\s*WITH\s*\((.*)\)\s*", re.I | re.S)
_WATERMARK = re.compile(
    r"WATERMARK\s+FOR\s+`?(\w+)`?\s+AS\s+`?(\w+)`?\s*(?:-\s*(.*))?", re.I | re.S
)
_COLUMN = re.compile(r"`?(\w+)`?\s+(.*)", re.S)
_COMMENT = re.compile(r"('(?:[^'\\]|\\.)*')|--[^\n]*|/\*.*?\*/", re.S)
"""A text, which stays as it is, or a comment."""
_OPTION = re.compile(r"\s*'((?:[^']|'')*)'\s*=\s*'((?:[^']|'')*)'\s*", re.S)
_TYPES = (
    (re.compile(r"TIMESTAMP(_LTZ)?\s*(\(\d\))?(\s+WITH.*)?", re.I), "timestamp"),
    (re.compile(r"(VARCHAR|CHAR)\s*(\(\d+\))?", re.I), "string"),
    (re.compile(r"BYTES|VARBINARY\s*(\(\d+\))?", re.I), "binary"),
    (re.compile(r"INTEGER", re.I), "int"),
)
"""Flink's types that Spark's DDL calls otherwise."""
STARTS = {"earliest-offset": "earliest", "latest-offset": "latest"}
_KNOWN = {
    "kafka": {
        *("topic", "format", "scan.startup.mode", "key.fields", SERVERS, "properties.group.id"),
        "sink.transactional-id-prefix",
    },
    "filesystem": {"path", "format"},
    "print": set(),
}


@dataclass(frozen=True)
class Table:
    """A declared table.

    Args:
        name: of the table.
        columns: as DDL.
        watermark: the column of event times and the delay, as of `ts.sql`; "" without one.
        options: of WITH.
    """

    name: str
    columns: str
    watermark: str
    options: Mapping[str, str]

    def source(self) -> KafkaSource:
        """Return the table as a source.

        Raises:
            OptionError: it has another connector than kafka, or lacks an option.
        """
        if self.connector() != "kafka":
            raise OptionError(f"table {self.name}: it is read, and only a topic of Kafka can be")
        start = self.options.get("scan.startup.mode", "earliest-offset")
        if start not in STARTS:
            raise OptionError(
                f"table {self.name}: 'scan.startup.mode' = {start!r}: expected one of "
                f"{', '.join(STARTS)}"
            )
        return KafkaSource(
            self._option(SERVERS),
            topics=self._option("topic").split(";"),
            value=Json(self.columns),
            starting_offsets=STARTS[start],
            group_id=self.options.get("properties.group.id"),
            options=self._client(),
        )

    def sink(self) -> Sink:
        """Return the table as a sink.

        Raises:
            OptionError: an option is missing.
        """
        match self.connector():
            case "print":
                return ConsoleSink()
            case "filesystem":
                if self.options.get("format", "parquet") != "parquet":
                    raise OptionError(f"table {self.name}: files are Parquet: 'format' = 'parquet'")
                return FileSink(self._option("path"))
        return KafkaSink(
            self._option(SERVERS),
            topic=self._option("topic"),
            key=self.options.get("key.fields"),
            value=Json(),
            transactional_id_prefix=self.options.get("sink.transactional-id-prefix", ID_PREFIX),
            options=self._client(),
        )

    def connector(self) -> str:
        """Return the name of the connector, its options and format checked.

        Raises:
            OptionError: there is no such connector, or it has no such option.
        """
        name = self._option("connector")
        if name not in _KNOWN:
            raise OptionError(
                f"table {self.name}: 'connector' = {name!r}: expected one of {', '.join(_KNOWN)}."
                f"{near(name, list(_KNOWN))}"
            )
        for option in self.options:
            is_client = name == "kafka" and option.startswith(_PROPERTIES)
            if option != "connector" and option not in _KNOWN[name] and not is_client:
                raise OptionError(
                    f"table {self.name}: connector {name} has no option {option!r} here."
                    f"{near(option, list(_KNOWN[name]))} A program in Python has more of them"
                )
        if name == "kafka" and self.options.get("format", "json") != "json":
            raise OptionError(
                f"table {self.name}: 'format' = {self.options['format']!r}: expected json; other "
                f"formats are for ts.sql(…) in a program"
            )
        return name

    def _option(self, name: str) -> str:
        if name not in self.options:
            raise OptionError(f"table {self.name}: WITH lacks {name!r}")
        return self.options[name]

    def _client(self) -> dict[str, str]:
        return {
            f"kafka.{name.removeprefix(_PROPERTIES)}": value
            for name, value in self.options.items()
            if name.startswith(_PROPERTIES) and name not in (SERVERS, "properties.group.id")
        }


def program(text: str, name: str) -> Pipeline:
    """Return the pipeline of a program in SQL.

    Args:
        text: CREATE TABLE …, and one INSERT INTO … SELECT ….
        name: of the pipeline.

    Raises:
        OptionError: a statement cannot be read, or there is another number of INSERT INTO.
    """
    tables: dict[str, Table] = {}
    inserts: list[str] = []
    for statement in _statements(text):
        if re.match(r"CREATE\s+TABLE\b", statement, re.I):
            table = _table(statement)
            tables[table.name] = table
        else:
            inserts.append(statement)
    if len(inserts) != 1:
        raise OptionError(
            f"{len(inserts)} statements beside CREATE TABLE: expected one INSERT INTO … SELECT …, "
            f"which is one pipeline"
        )
    words = {token.text for token in Tokenizer(dialect=DIALECT).tokenize(inserts[0])}
    match = re.match(r"INSERT\s+INTO\s+`?(\w+)`?", inserts[0], re.I)
    if match is None:
        raise OptionError(f"{inserts[0][:40]!r}…: expected INSERT INTO table SELECT …")
    target = match[1]
    if target not in tables:
        raise OptionError(
            f"INSERT INTO {target}: there is no such table, only {', '.join(tables)}."
            f"{near(target, list(tables))}"
        )
    read = [table for table in tables.values() if table.name in words and table.name != target]
    sources: dict[str, Any] = {table.name: table.source() for table in read}
    return sql(
        inserts[0],
        name=name,
        sinks={target: tables[target].sink()},
        watermark={table.name: table.watermark for table in read if table.watermark},
        **sources,
    )


def _statements(text: str) -> list[str]:
    """Return the statements of a text, without comments and the semicolons between them."""
    parts, start = [], 0
    for token in Tokenizer(dialect=DIALECT).tokenize(text):
        if token.token_type == TokenType.SEMICOLON:
            parts.append(text[start : token.start])
            start = token.end + 1
    parts.append(text[start:])
    plain = (_COMMENT.sub(lambda match: match[1] or " ", part).strip() for part in parts)
    return [part for part in plain if part]


def _table(statement: str) -> Table:
    match = _CREATE.fullmatch(statement)
    if match is None:
        raise OptionError(
            f"{statement[:60]!r}…: expected CREATE TABLE name (column type, …) WITH ('connector' = "
            f"'kafka', …)"
        )
    name, body, given = match[1], match[2], match[3]
    columns, watermark = [], ""
    for part in _split(body):
        if timed := _WATERMARK.fullmatch(part):
            watermark = timed[1] + (f" - {timed[3]}" if timed[3] else "")
        elif re.match(r"PRIMARY\s+KEY\b", part, re.I):
            continue  # a sink's key is its option 'key.fields'
        elif column := _COLUMN.fullmatch(part):
            columns.append(f"`{column[1]}` {_type(column[2], f'table {name}, column {column[1]}')}")
        else:
            raise OptionError(f"table {name}: {part!r}: expected a column and its type")
    options = {}
    for part in _split(given):
        option = _OPTION.fullmatch(part)
        if option is None:
            raise OptionError(f"table {name}: WITH ({part}): expected 'option' = 'value'")
        options[option[1]] = option[2].replace("''", "'")
    return Table(name, ", ".join(columns), watermark, options)


def _type(text: str, what: str) -> str:
    plain = re.sub(r"\s+(NOT\s+)?NULL\s*$", "", text.strip(), flags=re.I)
    if re.search(r"\bMETADATA\b|\bAS\b|\bROW\s*<", plain, re.I):
        raise OptionError(
            f"{what}: {plain!r}: computed columns, METADATA and ROW are for ts.sql(…) in a program"
        )
    for pattern, name in _TYPES:
        if pattern.fullmatch(plain):
            return name
    return plain.lower()


def _split(text: str) -> list[str]:
    """Split a list at its commas, but for those in brackets and quotes."""
    parts, depth, quoted, start = [], 0, False, 0
    for at, sign in enumerate(text):
        if sign == "'":
            quoted = not quoted
        elif not quoted:
            depth += (sign in "(<") - (sign in ")>")
            if sign == "," and depth == 0:
                parts.append(text[start:at])
                start = at + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]
