"""`tallystick topic …`: topics made, written and read, as JSON lines.

`read` decodes records without compiled kernels (docs/decisions/0062): its first line is on the
screen before the kernels could have been loaded.
"""

import base64
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from tallystick.errors import OptionError
from tallystick.ops.cli_savepoint import PATIENCE, KafkaOptions, errors_as_messages, options_in

if TYPE_CHECKING:
    from tallystick.codec.records.plain import PlainRecord
    from tallystick.kafka.client import Client

app = typer.Typer(help="Topics: create, write, read.", no_args_is_help=True)

LOCAL = "127.0.0.1:9092"
"""The servers of `tallystick broker start`."""
CHUNK_BYTES = 1 << 20
Servers = Annotated[
    str, typer.Option("--bootstrap-servers", help="Of the cluster: host:port,host:port.")
]
Topic = Annotated[str, typer.Argument(help="The topic.")]


@app.command("create")
def create(
    topics: Annotated[
        list[str], typer.Argument(help="NAME or NAME:PARTITIONS, such as flights:3; 1 without.")
    ],
    config: Annotated[
        list[str] | None,
        typer.Option(help="A setting of the topics, such as retention.ms=60000; may be repeated."),
    ] = None,
    bootstrap_servers: Servers = LOCAL,
    kafka_options: KafkaOptions = None,
) -> None:
    """Create topics; existing topics with as many partitions stay as they are."""
    from tallystick.kafka.topics import create_topic, partitions_of

    with errors_as_messages():
        counts = partition_counts(topics)
        settings = dict(_setting(text) for text in config or ())
        with connected(bootstrap_servers, kafka_options) as client:
            for name, count in counts.items():
                create_topic(client, name, count, config=settings)
                there = len(partitions_of(client, name))
                if there != count:
                    raise OptionError(
                        f"topic {name!r} exists already, with {_many(there, 'partition')}: "
                        f"expected {count}. Ask for {name}:{there}, or create one of another name"
                    )
                typer.echo(f"Topic {name!r} has {_many(count, 'partition')}.", err=True)


@app.command("put")
def put(
    topic: Topic,
    file: Annotated[
        Path | None, typer.Argument(help="JSON lines: one value each; without it, stdin.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="The field whose text is the record's key; without it, none has a key."),
    ] = None,
    bootstrap_servers: Servers = LOCAL,
    kafka_options: KafkaOptions = None,
) -> None:
    """Write JSON lines to a topic, as they are; each is one record, visible at once."""
    with errors_as_messages():
        stream = _opened(file)
        with connected(bootstrap_servers, kafka_options) as client:
            from tallystick.kafka.topic_writer import TopicWriter

            writer, written = TopicWriter(client, topic), 0
            try:
                for records, wrong in _records(stream, key):
                    if records:
                        keys, values = zip(*records, strict=True)
                        writer.write(keys, values)
                    written += len(records)
                    if wrong is not None:
                        raise wrong
            finally:
                typer.echo(f"{_many(written, 'record')} to {topic!r}.", err=True)


@app.command("read")
def read(
    topic: Topic,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on at the end, until Ctrl-C.")
    ] = False,
    keys: Annotated[bool, typer.Option("--keys", help="With keys, as text.")] = False,
    headers: Annotated[
        bool, typer.Option("--headers", help="With headers, as pairs of name and value.")
    ] = False,
    count: Annotated[
        bool, typer.Option("--count", help="The number of records alone, by partition and in all.")
    ] = False,
    bootstrap_servers: Servers = LOCAL,
    kafka_options: KafkaOptions = None,
) -> None:
    """Print the committed records of a topic, from its beginning to its end, as JSON lines.

    A line is the record's value; with --keys or --headers it is an object with the place of the
    record too. A value that is no JSON is a JSON string; one that is no text is {"base64": …}.
    """
    from tallystick.kafka.topics import read_topic

    counts: dict[int, int] = {}
    with errors_as_messages(), connected(bootstrap_servers, kafka_options) as client:
        try:
            for records in read_topic(client, topic, follow=follow):
                for partition, record in records:
                    counts[partition] = counts.get(partition, 0) + 1
                    if not count:
                        sys.stdout.write(_line(partition, record, keys, headers) + "\n")
                sys.stdout.flush()
        except KeyboardInterrupt:
            pass
        except BrokenPipeError:  # `| head` has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
        if count:
            by_partition = {str(partition): counts[partition] for partition in sorted(counts)}
            typer.echo(json.dumps({"records": sum(counts.values()), "partitions": by_partition}))
        else:
            typer.echo(f"{_many(sum(counts.values()), 'record')} of {topic!r}.", err=True)


def partition_counts(topics: list[str]) -> dict[str, int]:
    """Return the number of partitions of each topic, as `NAME:PARTITIONS` texts have them.

    Raises:
        OptionError: a text is no such pair, or two are of one topic.
    """
    counts: dict[str, int] = {}
    for text in topics:
        name, colon, number = text.partition(":")
        if not name or (colon and not (number.isdecimal() and int(number) > 0)):
            raise OptionError(f"topic {text!r}: expected NAME:PARTITIONS, such as flights:3")
        if name in counts:
            raise OptionError(f"topic {name!r} is named twice")
        counts[name] = int(number) if colon else 1
    return counts


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise OptionError(f"--config {text}: expected NAME=VALUE, such as retention.ms=60000")
    return name, value


@contextmanager
def connected(servers: str, options_file: Path | None) -> "Iterator[Client]":
    """Yield a client of a cluster that answers.

    Raises:
        OptionError: no server can be reached, or an option cannot work.
    """
    from tallystick.kafka.client import Client
    from tallystick.kafka.config import KafkaConfig
    from tallystick.kafka.reach import check_reachable

    given = {} if options_file is None else options_in(options_file)
    config = KafkaConfig.from_options({**PATIENCE, **given, "bootstrap.servers": servers})
    try:
        check_reachable(config)
    except OptionError as error:
        if servers != LOCAL:
            raise
        raise OptionError(
            f"{error} `tallystick broker start` starts one there, for trying things out; "
            f"--bootstrap-servers names another"
        ) from None
    client = Client(config)
    try:
        yield client
    finally:
        client.close()


def _opened(file: Path | None) -> BinaryIO:
    if file is None:
        return sys.stdin.buffer
    try:
        return file.open("rb")
    except OSError as error:
        raise OptionError(f"{file}: {(error.strerror or str(error)).lower()}") from None


def _chunks(stream: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the lines that are there by now, again and again, to the end."""
    rest = b""
    while chunk := stream.read1(CHUNK_BYTES):  # type: ignore[attr-defined]
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


def _records(
    stream: BinaryIO, key: str | None
) -> Iterator[tuple[list[tuple[bytes | None, bytes]], OptionError | None]]:
    """Yield keys and values, those before a wrong line with the error of that line."""
    before = 0
    for lines in _chunks(stream):
        records: list[tuple[bytes | None, bytes]] = []
        for number, line in enumerate(lines, start=before + 1):
            try:
                records += [(_key(line, key), line.rstrip(b"\r"))] if line.strip() else []
            except ValueError as error:
                yield records, OptionError(f"line {number}: {error}")
                return
        yield records, None
        before += len(lines)


def _key(line: bytes, field: str | None) -> bytes | None:
    """Return the key of a value.

    Raises:
        ValueError: the value is no JSON, or has no such field.
    """
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}: {_start(line)}") from None
    if field is None:
        return None
    if not isinstance(value, dict) or field not in value:
        from tallystick.arguments import near

        known = [*value] if isinstance(value, dict) else []
        raise ValueError(f"no field {field!r} for the key.{near(field, known)} {_start(line)}")
    key = value[field]
    if key is None or isinstance(key, str):
        return None if key is None else key.encode()
    return json.dumps(key, separators=(",", ":")).encode()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _start(line: bytes) -> str:
    text = line[:80].decode(errors="replace")
    return text + ("…" if len(line) > len(text) else "")


def _line(partition: int, record: "PlainRecord", keys: bool, headers: bool) -> str:
    value = _shown(record.value)
    if not (keys or headers):
        return value
    fields = [
        f'"partition":{partition},"offset":{record.offset},"timestamp":{record.timestamp}',
        *([f'"key":{_text(record.key)}'] if keys else []),
    ]
    if headers:
        pairs = (f"[{_text(name.encode())},{_text(value)}]" for name, value in record.headers)
        fields.append(f'"headers":[{",".join(pairs)}]')
    return f'{{{",".join(fields)},"value":{value}}}'


def _shown(value: bytes | None) -> str:
    """Return a value as one line of JSON."""
    try:
        text = (value or b"").decode()
        json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        return _text(value)
    return text if text.isprintable() else "".join(map(_one_line, text.strip()))


def _one_line(letter: str) -> str:
    """Return a letter of a JSON text so that it neither ends the line nor steers the terminal."""
    if letter.isprintable():
        return letter
    return " " if letter in "\r\n\t" else json.dumps(letter)[1:-1]


def _text(data: bytes | None) -> str:
    """Return bytes as a JSON string, or as base64 if they are no text."""
    if data is None:
        return "null"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return json.dumps({"base64": base64.b64encode(data).decode()})
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
