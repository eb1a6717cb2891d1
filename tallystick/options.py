"""Every option of the data source, once: its name, its type, its default, what it rules out.

The names are those of Spark's own Kafka connector, so that a query needs one word changed. Settings
of the Kafka client itself carry the prefix `kafka.` and go to `kafka.config`.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tallystick.errors import OptionError
from tallystick.json_format import FAILFAST, MODES
from tallystick.topic_partition import TopicPartition

EARLIEST = -2
"""Kafka's own marker for the first offset that is left, in options and in ListOffsets."""
LATEST = -1
"""Kafka's own marker for the end of the log."""
KAFKA_PREFIX = "kafka."
GROUP_OPTION = "kafka.group.id"


@dataclass(frozen=True, slots=True)
class TopicList:
    """Read these topics, all partitions."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """Read all topics whose whole name matches, those created later too; internal ones never."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """Read exactly these partitions."""

    partitions: tuple[TopicPartition, ...]


Subscription = TopicList | TopicPattern | Assignment


@dataclass(frozen=True, slots=True)
class OffsetSpec:
    """Where to start or end: one marker for all, and single partitions that differ."""

    default: int
    partitions: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What the options of a `readStream` or `read` say, checked."""

    subscription: Subscription
    client: Mapping[str, str] = field(repr=False)  # may hold secrets
    group: str = ""
    starting_offsets: OffsetSpec = field(default_factory=lambda: OffsetSpec(LATEST))
    ending_offsets: OffsetSpec = field(default_factory=lambda: OffsetSpec(LATEST))
    offset_count_max: int | None = None
    split_count_min: int | None = None
    headers: bool = False
    fail_on_data_loss: bool = True
    value_format: str = "raw"
    value_schema: str | None = None
    value_mode: str = FAILFAST
    metadata_prefix: str = ""


_NAMES = {
    name.lower(): name
    for name in (
        "subscribe",
        "subscribePattern",
        "assign",
        "startingOffsets",
        "endingOffsets",
        "maxOffsetsPerTrigger",
        "minPartitions",
        "includeHeaders",
        "failOnDataLoss",
        "value.format",
        "value.schema",
        "value.mode",
        "metadata.prefix",
    )
}
_VALUE_FORMATS = ("raw", "json")


def parse_source_options(options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Check the options of a query and give them their types.

    Args:
        options: as Spark hands them over; names in any case.
        streaming: `readStream` (starts at latest by default) or `read` (at earliest).

    Raises:
        OptionError: an option is unknown, missing, contradictory, or not of its type.
    """
    given = {name.lower(): str(value) for name, value in options.items()}
    client = _client_options(given)
    plain = {name: value for name, value in given.items() if not name.startswith(KAFKA_PREFIX)}
    _refuse_unknown(plain)
    value_format = _choice(plain, "value.format", _VALUE_FORMATS, "raw")
    if (value_format == "json") != ("value.schema" in plain):
        raise OptionError(
            "value.format=json needs value.schema, and value.schema needs value.format=json: "
            'give both, e.g. .option("value.format", "json").option("value.schema", "dest string")'
        )
    if streaming and "endingoffsets" in plain:
        raise OptionError("endingOffsets is for spark.read; a stream ends with its trigger")
    default_start = "latest" if streaming else "earliest"
    return SourceOptions(
        subscription=_subscription(plain),
        client=client,
        group=given.get(GROUP_OPTION, ""),
        starting_offsets=_offsets(plain, "startingOffsets", default_start),
        ending_offsets=_offsets(plain, "endingOffsets", "latest"),
        offset_count_max=_count(plain, "maxOffsetsPerTrigger"),
        split_count_min=_count(plain, "minPartitions"),
        headers=_flag(plain, "includeHeaders", default=False),
        fail_on_data_loss=_flag(plain, "failOnDataLoss", default=True),
        value_format=value_format,
        value_schema=plain.get("value.schema"),
        value_mode=_choice(plain, "value.mode", MODES, FAILFAST),
        metadata_prefix=plain.get("metadata.prefix", ""),
    )


def _client_options(given: Mapping[str, str]) -> dict[str, str]:
    client = {
        name.removeprefix(KAFKA_PREFIX): value
        for name, value in given.items()
        if name.startswith(KAFKA_PREFIX) and name != GROUP_OPTION
    }
    if not client.get("bootstrap.servers"):
        raise OptionError(
            "kafka.bootstrap.servers is missing: expected the brokers to start from, "
            'e.g. .option("kafka.bootstrap.servers", "host1:9092,host2:9092")'
        )
    return client


def _refuse_unknown(plain: Mapping[str, str]) -> None:
    for name in plain:
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"did you mean {_NAMES[near[0]]!r}?" if near else f"known: {_known()}"
            raise OptionError(f"unknown option {name!r} of the tallystick source: {hint}")


def _known() -> str:
    return ", ".join([*_NAMES.values(), "kafka.*"])


def _subscription(plain: Mapping[str, str]) -> Subscription:
    given = [name for name in ("subscribe", "subscribepattern", "assign") if name in plain]
    if len(given) != 1:
        found = ", ".join(_NAMES[name] for name in given) or "none of them"
        raise OptionError(
            f"expected exactly one of subscribe, subscribePattern, assign; found {found}"
        )
    text = plain[given[0]]
    match given[0]:
        case "subscribe":
            return TopicList(_topics(text))
        case "subscribepattern":
            return TopicPattern(_pattern(text))
        case _:
            partitions = _per_partition(
                text, "assign", '{"topic": [0, 1]}', lambda ids: {int(i): 0 for i in ids}
            )
            return Assignment(tuple(sorted(partitions)))


def _topics(text: str) -> tuple[str, ...]:
    topics = tuple(dict.fromkeys(topic.strip() for topic in text.split(",") if topic.strip()))
    if not topics:
        raise OptionError(f"subscribe={text!r} names no topic: expected e.g. 'flights,orders'")
    return topics


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise OptionError(f"subscribePattern={text!r} is no regular expression: {error}") from None
    return text


def _offsets(plain: Mapping[str, str], name: str, default: str) -> OffsetSpec:
    text = plain.get(name.lower(), default).strip()
    markers = {"earliest": EARLIEST, "latest": LATEST}
    if text.lower() in markers:
        return OffsetSpec(markers[text.lower()])
    example = '"earliest", "latest" or {"topic": {"0": 23, "1": -2}} (-2 earliest, -1 latest)'
    partitions = _per_partition(
        text, name, example, lambda column: {int(p): int(offset) for p, offset in column.items()}
    )
    wrong = {p: offset for p, offset in partitions.items() if offset < EARLIEST}
    if wrong:
        raise OptionError(f"{name}: {wrong}: expected an offset, -2 (earliest) or -1 (latest)")
    return OffsetSpec(markers[default], partitions)


def _per_partition(
    text: str, name: str, example: str, read: Callable[[Any], dict[int, int]]
) -> dict[TopicPartition, int]:
    try:
        return {
            TopicPartition(topic, partition): offset
            for topic, column in json.loads(text).items()
            for partition, offset in read(column).items()
        }
    except (ValueError, AttributeError, TypeError, AssertionError):
        raise OptionError(f"{name}={text!r}: expected {example}") from None


def _count(plain: Mapping[str, str], name: str) -> int | None:
    text = plain.get(name.lower())
    if text is None:
        return None
    if not text.strip().isdigit() or int(text) < 1:
        raise OptionError(f"{name}={text!r}: expected a whole number from 1")
    return int(text)


def _flag(plain: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = plain.get(name.lower(), str(default)).strip().lower()
    if text not in ("true", "false"):
        raise OptionError(f"{name}={text!r}: expected true or false")
    return text == "true"


def _choice(plain: Mapping[str, str], name: str, choices: tuple[str, ...], default: str) -> str:
    text = plain.get(name, default).strip().lower()
    if text not in choices:
        raise OptionError(f"{name}={text!r}: expected one of {', '.join(choices)}")
    return text
