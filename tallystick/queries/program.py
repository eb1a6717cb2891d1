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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from sqlglot.tokens import Tokenizer, TokenType

from tallystick.api.console_sink import ConsoleSink
from tallystick.api.file_sink import FileSink
from tallystick.api.kafka_sink import KafkaSink
from tallystick.api.kafka_source import KafkaSource
from tallystick.api.pipeline import Pipeline
from tallystick.api.streams import Stream, stream
from tallystick.arguments import near
from tallystick.codec.formats import Json
from tallystick.codec.layout import METADATA
from tallystick.epoch.transactional_ids import ID_PREFIX
from tallystick.epoch.two_phase import Sink
from tallystick.errors import OptionError
from tallystick.expressions.parsing import DIALECT
from tallystick.queries.parsing import as_spark, without_set
from tallystick.queries.query import pipeline_of

_Value = TypeVar("_Value")
SERVERS = "properties.bootstrap.servers"
_PROPERTIES = "properties."
_CREATE = re.compile(r"CREATE\s+TABLE\s+`?(\w+)`?\s*\((.*)\)\s*WITH\s*\((.*)\)\s*", re.I | re.S)
_WATERMARK = re.compile(
    r"WATERMARK\s+FOR\s+`?(\w+)`?\s+AS\s+`?(\w+)`?\s*(?:-\s*(.*))?", re.I | re.S
)
_COMPUTED = re.compile(r"`?(\w+)`?\s+AS\s+(.*)", re.I | re.S)
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
_NO_METADATA = {"metadata.columns": "none"}
ENDS = {"unbounded": None, "latest-offset": "latest"}
GUARANTEES = {
    "exactly-once": "exactly_once",
    "at-least-once": "at_least_once",
    "none": "none",
}
STARTS = {"earliest-offset": "earliest", "latest-offset": "latest"}
_KNOWN = {
    "kafka": {
        *(
            "topic",
            "format",
            "scan.startup.mode",
            "scan.bounded.mode",
            "key.fields",
            SERVERS,
            "properties.group.id",
        ),
        *("sink.transactional-id-prefix", "sink.delivery-guarantee"),
    },
    "upsert-kafka": {
        *("topic", "key.format", "value.format", SERVERS, "sink.transactional-id-prefix"),
        "sink.delivery-guarantee",
    },
    "filesystem": {"path", "format"},
    "print": set(),
}


@dataclass(frozen=True)
class Table:
    """A declared table.

    Args:
        name: of the table.
        columns: the types, as in DDL, of the columns of the value.
        watermark: the column of event times and the delay, as of `ts.sql`; "" without one.
        options: of WITH.
        computed: the expressions of computed columns, by name.
        names: of all columns.
        key: the column of PRIMARY KEY, which the records of upsert-kafka have as theirs.
        is_without_metadata: nothing reads Kafka's own columns.
    """

    name: str
    columns: Mapping[str, str]
    watermark: str
    options: Mapping[str, str]
    computed: Mapping[str, str]
    names: tuple[str, ...]
    key: str | None = None
    is_without_metadata: bool = False

    def with_used(self, words: Collection[str]) -> Self:
        """Return the table with the columns that a program may read, so that others are not parsed.

        Args:
            words: of the program, in small letters; with "*", all columns are read.
        """
        if "*" in words:
            return self
        timed = re.split(r"\W", self.watermark, maxsplit=1)[0]
        used = {name for name in self.names if name.lower() in words or name == timed}
        computed = {name: text for name, text in self.computed.items() if name in used}
        for text in computed.values():
            used |= {token.text for token in Tokenizer(dialect=DIALECT).tokenize(text)}
        small = {name.lower() for name in used}
        names = tuple(name for name in self.names if name.lower() in small)
        columns = {name: kind for name, kind in self.columns.items() if name.lower() in small}
        if not columns:  # count(*)
            return self
        is_plain = not {*words} & {name.lower() for name in METADATA}
        return replace(
            self, columns=columns, computed=computed, names=names, is_without_metadata=is_plain
        )

    def rows(self) -> KafkaSource | Stream:
        """Return the table's rows, with the computed columns."""
        if not self.computed:
            return self.source()
        texts = [
            f"{self.computed[name]} AS `{name}`" if name in self.computed else f"`{name}`"
            for name in self.names
        ]
        return stream(self.source()).select(*texts)

    def source(self) -> KafkaSource:
        """Return the table as a source.

        Raises:
            OptionError: it has another connector than kafka, or lacks an option.
        """
        if self.connector() != "kafka":
            raise OptionError(f"table {self.name}: it is read, and only a topic of Kafka can be")
        return KafkaSource(
            self._option(SERVERS),
            topics=self._option("topic").split(";"),
            value=Json(", ".join(f"`{name}` {kind}" for name, kind in self.columns.items())),
            starting_offsets=self._chosen("scan.startup.mode", STARTS, "earliest-offset"),
            ending_offsets=self._chosen("scan.bounded.mode", ENDS, "unbounded"),
            group_id=self.options.get("properties.group.id"),
            options=self._client() | (_NO_METADATA if self.is_without_metadata else {}),
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
        client = self._client()
        timeout = client.pop("kafka.transaction.timeout.ms", None)
        if timeout is not None and not timeout.isdigit():
            raise OptionError(
                f"table {self.name}: 'properties.transaction.timeout.ms' = {timeout!r}: expected a "
                f"number of milliseconds"
            )
        sink = KafkaSink(
            self._option(SERVERS),
            topic=self._option("topic"),
            key=self.key if self.connector() == "upsert-kafka" else self.options.get("key.fields"),
            value=Json(),
            guarantee=self._chosen("sink.delivery-guarantee", GUARANTEES, "exactly-once"),
            transactional_id_prefix=self.options.get("sink.transactional-id-prefix", ID_PREFIX),
            options=client,
        )
        return sink if timeout is None else replace(sink, transaction_timeout_ms=int(timeout))

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
            is_client = name.endswith("kafka") and option.startswith(_PROPERTIES)
            if option != "connector" and option not in _KNOWN[name] and not is_client:
                raise OptionError(
                    f"table {self.name}: connector {name} has no option {option!r} here."
                    f"{near(option, list(_KNOWN[name]))} A program in Python has more of them"
                )
        for option in ("format", "key.format", "value.format"):
            if "kafka" in name and (given := self.options.get(option, "json")) != "json":
                raise OptionError(
                    f"table {self.name}: {option!r} = {given!r}: expected json; other formats are "
                    f"for ts.sql(…) in a program"
                )
        if name == "upsert-kafka" and self.key is None:
            raise OptionError(
                f"table {self.name}: upsert-kafka needs PRIMARY KEY (column) NOT ENFORCED"
            )
        return name

    def _chosen(self, option: str, known: Mapping[str, _Value], default: str) -> _Value:
        given = self.options.get(option, default)
        if given not in known:
            raise OptionError(
                f"table {self.name}: {option!r} = {given!r}: expected one of {', '.join(known)}"
            )
        return known[given]

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
    others: list[str] = []
    for statement in _statements(text):
        if re.match(r"CREATE\s+TABLE\b", statement, re.I):
            table = _table(statement)
            tables[table.name] = table
        else:
            others.append(statement)
    targets = _targets(others)
    for target in targets:
        if target not in tables:
            raise OptionError(
                f"INSERT INTO {target}: there is no such table, only {', '.join(tables)}."
                f"{near(target, list(tables))}"
            )
    words = {token.text for one in others for token in Tokenizer(dialect=DIALECT).tokenize(one)}
    read = [table for table in tables.values() if table.name in words - {*targets}]
    return pipeline_of(
        ";\n".join(others),
        name,
        {table.name: table.with_used(_words_read(others)).rows() for table in read},
        {table.name: table.watermark for table in read if table.watermark},
        {target: tables[target].sink() for target in targets},
        declared={target: tables[target].names for target in targets},
    )


def _words_read(statements: Sequence[str]) -> set[str]:
    """Return the words of statements in small letters, and "*" if one selects all columns."""
    words = set()
    for statement in statements:
        before = ""
        for token in Tokenizer(dialect=DIALECT).tokenize(statement):
            word = token.text.lower()
            if word != "*" or before in ("select", "distinct", "all", ",", "."):
                words.add(word)
            before = word
    return words


def _targets(statements: Sequence[str]) -> list[str]:
    """Return the tables of INSERT INTO.

    Raises:
        OptionError: there is none, or a statement is neither that nor CREATE VIEW.
    """
    targets = []
    for statement in statements:
        if re.match(r"CREATE\s+(TEMPORARY\s+)?VIEW\b", statement, re.I):
            continue
        match = re.match(r"INSERT\s+INTO\s+`?(\w+)`?", statement, re.I)
        if match is None:
            raise OptionError(f"{statement[:40]!r}…: expected INSERT INTO table SELECT …")
        targets.append(match[1])
    if not targets:
        raise OptionError(
            "0 statements beside CREATE: expected INSERT INTO … SELECT …, which is the pipeline"
        )
    return targets


def _statements(text: str) -> list[str]:
    """Return the statements of a text, without comments and the semicolons between them."""
    text = without_set(_COMMENT.sub(lambda match: match[1] or " ", text))
    parts, start = [], 0
    for token in Tokenizer(dialect=DIALECT).tokenize(text):
        if token.token_type == TokenType.SEMICOLON:
            parts.append(text[start : token.start])
            start = token.end + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _table(statement: str) -> Table:
    match = _CREATE.fullmatch(statement)
    if match is None:
        raise OptionError(
            f"{statement[:60]!r}…: expected CREATE TABLE name (column type, …) WITH ('connector' = "
            f"'kafka', …)"
        )
    name, body, given = match[1], match[2], match[3]
    columns, watermark = {}, ""
    names, computed, key = [], {}, None
    for part in _split(body):
        if timed := _WATERMARK.fullmatch(part):
            watermark = timed[1] + (f" - {timed[3]}" if timed[3] else "")
        elif re.match(r"PRIMARY\s+KEY\b", part, re.I):
            primary = re.match(r"PRIMARY\s+KEY\s*\(\s*`?(\w+)`?\s*\)", part, re.I)
            key = primary[1] if primary else None
        elif derived := _COMPUTED.fullmatch(part):
            if re.fullmatch(r"PROCTIME\s*\(\s*\)", derived[2], re.I):
                raise OptionError(
                    f"table {name}, column {derived[1]}: write it where it is used: CREATE VIEW "
                    f"… AS SELECT …, PROCTIME() AS {derived[1]} FROM {name}"
                )
            names.append(derived[1])
            computed[derived[1]] = as_spark(derived[2])
        elif column := _COLUMN.fullmatch(part):
            names.append(column[1])
            columns[column[1]] = _type(column[2], f"table {name}, column {column[1]}")
        else:
            raise OptionError(f"table {name}: {part!r}: expected a column and its type")
    options = {}
    for part in _split(given):
        option = _OPTION.fullmatch(part)
        if option is None:
            raise OptionError(f"table {name}: WITH ({part}): expected 'option' = 'value'")
        options[option[1]] = option[2].replace("''", "'")
    return Table(name, columns, watermark, options, computed, tuple(names), key)


def _type(text: str, what: str) -> str:
    plain = re.sub(r"\s+(NOT\s+)?NULL\s*$", "", text.strip(), flags=re.I)
    if re.search(r"\bMETADATA\b|\bROW\s*<", plain, re.I):
        raise OptionError(f"{what}: {plain!r}: METADATA and ROW are for ts.sql(…) in a program")
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
