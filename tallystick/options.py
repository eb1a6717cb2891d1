"""The options of the data source, checked and typed; `option_table` says what there is.

Settings of the Kafka client itself carry the prefix `kafka.` and go to `kafka.config`.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tallystick.errors import OptionError
from tallystick.formats import FAILFAST, MODES, Avro
from tallystick.option_table import BY_NAME, GROUP_OPTION, KAFKA_PREFIX, OPTIONS, VALUE_FORMATS
from tallystick.source import losses
from tallystick.source.bounds import EARLIEST, LATEST, AtCommitted, AtOffsets, AtTime, Bound
from tallystick.source.columns import METADATA
from tallystick.source.losses import LossPolicy
from tallystick.source.subscription import Assignment, Subscription, TopicList, TopicPattern
from tallystick.topic_partition import TopicPartition

DISCOVERY_INTERVAL_MS = 300_000
TRIGGER_DELAY_MS = 900_000
OFFSETS_MAX = 1_000_000
"""How many offsets an epoch spans at most, where the options do not say.

Without a bound the first epoch of a backlog is all of it: one transaction, which times out after
five minutes by default and never gets through, and keyed tasks that hold all of its rows. A million
records of 110 bytes take 2 to 5 s on two cores (benchmarks/README.md) and 200 s with a function
that does 5,000 a second; the fixed cost of an epoch, 0.2 s, is a tenth or less beside them.
"""
MAX_OFFSETS, ALL = "maxOffsetsPerTrigger", "all"
MAX_BYTES = "maxBytesPerTask"
TASK_BYTES_MAX = 64 << 20
_MARKERS = {"earliest": EARLIEST, "latest": LATEST}
_FALLBACKS: dict[str, int | None] = {"fail": None, "error": None, **_MARKERS}
_DURATION = re.compile(r"(\d+) ?(ms|s|m|min|h)")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000}
_WITH_SCHEMA = ("json", "avro")
TICK_INTERVAL = "internal.tick.interval.ms"
TICK_COUNT = "internal.tick.count"
"""What a pipeline with timers tells its planner; nobody else has a use for them."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What the options of a `readStream` or `read` say; each is explained in `option_table`.

    `tick_interval_ms` and `tick_count_max` are a pipeline's own: how often to plan an epoch without
    records (0: never), and how many of them at once behind one with records (0: none).
    """

    subscription: Subscription
    client: Mapping[str, str] = field(repr=False)  # may hold secrets
    start: Bound
    stop: Bound | None = None
    group: str = ""
    commit_offsets: bool = True
    discovery_interval_ms: int = DISCOVERY_INTERVAL_MS
    offset_count_max: int | None = OFFSETS_MAX
    task_bytes_max: int = TASK_BYTES_MAX
    offset_count_min: int = 1
    trigger_delay_max_ms: int = TRIGGER_DELAY_MS
    split_count_min: int | None = None
    policy: LossPolicy = field(default_factory=LossPolicy)
    headers: bool = False
    value_format: str = "raw"
    value_schema: str | None = None
    value_mode: str = FAILFAST
    avro: Avro | None = None
    metadata_prefix: str = ""
    metadata_columns: tuple[str, ...] = METADATA
    tick_interval_ms: int = 0
    tick_count_max: int = 0

    @property
    def shown_group(self) -> str:
        """The group that positions are committed to; "" for none."""
        return self.group if self.commit_offsets else ""


def parse_source_options(
    options: Mapping[str, str], *, streaming: bool | None = None
) -> SourceOptions:
    """Check the options of a query and give them their types.

    Args:
        options: as Spark hands them over; names in any case.
        streaming: `readStream` (starts at latest by default) or `read` (at earliest, to latest);
            None: not known yet, so an option that only one of them has is let through.

    Raises:
        OptionError: an option is unknown, missing, contradictory, or not of its type.
    """
    given = {name.lower(): str(value) for name, value in options.items()}
    client = _client_options(given)
    plain = {
        name: value
        for name, value in given.items()
        if not name.startswith(KAFKA_PREFIX) or name == GROUP_OPTION
    }
    _refuse_unknown(plain)
    _refuse_misplaced(plain, streaming)
    value_format = _choice(plain, "value.format", VALUE_FORMATS, "raw")
    _check_value(plain, value_format)
    return SourceOptions(
        subscription=_subscription(plain),
        client=client,
        start=_start(plain, streaming),
        stop=_stop(plain, streaming=bool(streaming)),
        group=plain.get(GROUP_OPTION, ""),
        commit_offsets=_flag(plain, "commit.offsets.on.checkpoint", default=True),
        discovery_interval_ms=_whole(
            plain, "partition.discovery.interval.ms", DISCOVERY_INTERVAL_MS
        ),
        offset_count_max=_offset_count_max(plain),
        task_bytes_max=_count(plain, MAX_BYTES) or TASK_BYTES_MAX,
        offset_count_min=_count(plain, "minOffsetsPerTrigger") or 1,
        trigger_delay_max_ms=_duration_ms(plain, "maxTriggerDelay", TRIGGER_DELAY_MS),
        split_count_min=_count(plain, "minPartitions"),
        policy=_policy(plain),
        headers=_flag(plain, "includeHeaders", default=False),
        value_format=value_format,
        value_schema=plain.get("value.schema"),
        value_mode=_choice(plain, "value.mode", MODES, FAILFAST),
        avro=_avro(plain) if value_format == "avro" else None,
        metadata_prefix=plain.get("metadata.prefix", ""),
        metadata_columns=_metadata(plain),
        tick_interval_ms=_whole(plain, TICK_INTERVAL, 0, least=0),
        tick_count_max=_whole(plain, TICK_COUNT, 0, least=0),
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
        if name not in BY_NAME and name not in (TICK_INTERVAL, TICK_COUNT):
            near = difflib.get_close_matches(name, BY_NAME, n=1)
            known = ", ".join([*(option.name for option in OPTIONS), "kafka.*"])
            hint = f"did you mean {BY_NAME[near[0]].name!r}?" if near else f"known: {known}"
            raise OptionError(f"unknown option {name!r} of the tallystick source: {hint}")


def _refuse_misplaced(plain: Mapping[str, str], streaming: bool | None) -> None:
    if streaming is None:
        return
    other, here = ("batch", "spark.readStream") if streaming else ("stream", "spark.read")
    for name in plain:
        if name in BY_NAME and BY_NAME[name].only == other:
            raise OptionError(
                f"{BY_NAME[name].name} means nothing for {here}: remove it (it is for a {other})"
            )


def _check_value(plain: Mapping[str, str], value_format: str) -> None:
    if (value_format in _WITH_SCHEMA) != ("value.schema" in plain):
        raise OptionError(
            "value.format=json or avro needs value.schema, and value.schema needs "
            "value.format=json or avro: "
            'give both, e.g. .option("value.format", "json").option("value.schema", "dest string")'
        )
    if value_format == "raw" and "value.mode" in plain:
        raise OptionError("value.mode is for a value.format: raw takes any bytes; remove it")
    if value_format not in _WITH_SCHEMA and plain.get("metadata.prefix"):
        raise OptionError(
            f"metadata.prefix is for values that become several columns, and "
            f"value.format={value_format} becomes one: remove it"
        )
    registry = [name for name in plain if name.startswith("value.registry.")]
    if registry and value_format != "avro":
        raise OptionError(
            f"{', '.join(registry)}: value.format={value_format} needs no registry: set it to "
            f"avro, or remove that"
        )


def _avro(plain: Mapping[str, str]) -> Avro:
    return Avro(
        plain["value.schema"],
        registry=plain.get("value.registry.url"),
        schemas=plain.get("value.registry.file"),
        mode=_choice(plain, "value.mode", MODES, FAILFAST),
        user_info=plain.get("value.registry.user.info"),
        ca=plain.get("value.registry.ca"),
    )


def _metadata(plain: Mapping[str, str]) -> tuple[str, ...]:
    text = plain.get("metadata.columns", ",".join(METADATA))
    wanted = {name.strip().lower() for name in text.split(",")} - {"", "none"}
    unknown = sorted(wanted - {name.lower() for name in METADATA})
    if unknown:
        raise OptionError(
            f"metadata.columns={text!r}: {unknown[0]!r} is none of {', '.join(METADATA)}; or none"
        )
    return tuple(name for name in METADATA if name.lower() in wanted)


def _subscription(plain: Mapping[str, str]) -> Subscription:
    given = [name for name in ("subscribe", "subscribepattern", "assign") if name in plain]
    if len(given) != 1:
        found = ", ".join(BY_NAME[name].name for name in given) or "none of them"
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
            assigned = _per_partition(text, "assign", '{"topic": [0, 1]}', _indexes)
            if not assigned:
                raise OptionError(f"assign={text!r} names no partition")
            return Assignment(tuple(sorted(assigned)))


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


def _start(plain: Mapping[str, str], streaming: bool | None) -> Bound:
    default = "latest" if streaming else "earliest"
    strategy = _choice(plain, "startingOffsetsByTimestampStrategy", ("error", "latest"), "error")
    if _the_one(plain, "starting") == "startingOffsets":
        if "startingoffsetsbytimestampstrategy" in plain:
            raise OptionError(
                "startingOffsetsByTimestampStrategy is for startingTimestamp and "
                "startingOffsetsByTimestamp: remove it"
            )
        text = plain.get("startingoffsets", default).strip().lower()
        fallback = _choice(plain, "committed.fallback", ("fail", *_MARKERS), "fail")
        if text != "committed":
            if "committed.fallback" in plain:
                raise OptionError("committed.fallback is for startingOffsets=committed: remove it")
            if text == "latest" and streaming is False:
                raise OptionError(
                    "startingOffsets=latest would read nothing in a batch: name offsets, a time, "
                    "or earliest"
                )
            return _offsets(plain, "startingOffsets", default)
        if not plain.get(GROUP_OPTION):
            raise OptionError(
                f"startingOffsets=committed: whose offsets? Name the group in {GROUP_OPTION}"
            )
        return AtCommitted(plain[GROUP_OPTION], _FALLBACKS[fallback])
    if "committed.fallback" in plain:
        raise OptionError("committed.fallback is for startingOffsets=committed: remove it")
    return _at_time(plain, "starting", _FALLBACKS[strategy])


def _stop(plain: Mapping[str, str], *, streaming: bool) -> Bound | None:
    if _the_one(plain, "ending") != "endingOffsets":
        return _at_time(plain, "ending", LATEST)
    if streaming and "endingoffsets" not in plain:
        return None
    stop = _offsets(plain, "endingOffsets", "latest")
    if EARLIEST in (stop.default, *stop.partitions.values()):
        raise OptionError("endingOffsets: -2 or earliest would read nothing: name an offset, or -1")
    return stop


def _the_one(plain: Mapping[str, str], side: str) -> str:
    """Which of the three options of one side is given; the plain one where none is."""
    names = [f"{side}Offsets", f"{side}Timestamp", f"{side}OffsetsByTimestamp"]
    given = [name for name in names if name.lower() in plain]
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} contradict each other: keep one")
    return given[0] if given else names[0]


def _at_time(plain: Mapping[str, str], side: str, fallback: int | None) -> AtTime:
    name = f"{side}Timestamp"
    if name.lower() in plain:
        return AtTime(_whole(plain, name, 0, least=0), fallback=fallback)
    name = f"{side}OffsetsByTimestamp"
    times = _per_partition(
        plain[name.lower()],
        name,
        '{"topic": {"0": 1700000000000}} (ms since 1970)',
        _by_index,
    )
    if min(times.values(), default=0) < 0:
        raise OptionError(f"{name}={plain[name.lower()]!r}: expected ms since 1970, from 0")
    return AtTime(None, times, fallback)


def _offsets(plain: Mapping[str, str], name: str, default: str) -> AtOffsets:
    text = plain.get(name.lower(), default).strip()
    if text.lower() in _MARKERS:
        return AtOffsets(_MARKERS[text.lower()])
    example = '"earliest", "latest" or {"topic": {"0": 23, "1": -2}} (-2 earliest, -1 latest)'
    partitions = _per_partition(text, name, example, _by_index)
    wrong = {p: offset for p, offset in partitions.items() if offset < EARLIEST}
    if wrong:
        raise OptionError(f"{name}: {wrong}: expected an offset, -2 (earliest) or -1 (latest)")
    return AtOffsets(_MARKERS[default], partitions)


def _indexes(listed: Any) -> dict[int, int]:
    """Of a list of partitions; TypeError where it is none."""
    if not isinstance(listed, list):
        raise TypeError
    return {_index(each): 0 for each in listed}


def _by_index(column: Any) -> dict[int, int]:
    """Of an object from partition to a whole number."""
    return {int(partition): _index(number) for partition, number in column.items()}


def _index(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError
    return number


def _per_partition(
    text: str, name: str, example: str, read: Callable[[Any], dict[int, int]]
) -> dict[TopicPartition, int]:
    try:
        found = {
            TopicPartition(topic, partition): offset
            for topic, column in json.loads(text).items()
            for partition, offset in read(column).items()
        }
    except (ValueError, AttributeError, TypeError):
        raise OptionError(f"{name}={text!r}: expected {example}") from None
    if any(partition < 0 for _, partition in found):
        raise OptionError(f"{name}={text!r}: partitions are numbered from 0: expected {example}")
    return found


def _policy(plain: Mapping[str, str]) -> LossPolicy:
    lenient = not _flag(plain, "failOnDataLoss", default=True)
    base = losses.LENIENT if lenient else LossPolicy()
    return LossPolicy(
        expired=_choice(plain, "when.expired", losses.ON_EXPIRED, base.expired),
        removed=_choice(plain, "when.removed", losses.ON_REMOVED, base.removed),
        recreated=_choice(plain, "when.recreated", losses.ON_RECREATED, base.recreated),
        truncated=_choice(plain, "when.truncated", losses.ON_TRUNCATED, base.truncated),
        keep_ms=_whole(plain, "when.removed.keep.ms", base.keep_ms, least=0),
    )


def _count(plain: Mapping[str, str], name: str) -> int | None:
    text = plain.get(name.lower())
    if text is None:
        return None
    if not text.strip().isdigit() or int(text) < 1:
        raise OptionError(f"{name}={text!r}: expected a whole number from 1")
    return int(text)


def _offset_count_max(plain: Mapping[str, str]) -> int | None:
    text = plain.get(MAX_OFFSETS.lower(), str(OFFSETS_MAX))
    if text.strip().lower() == ALL:
        return None
    if not text.strip().isdigit() or int(text) < 1:
        raise OptionError(f"{MAX_OFFSETS}={text!r}: expected a whole number from 1, or {ALL!r}")
    return int(text)


def is_bounded(options: Mapping[str, str]) -> bool:
    """Whether the options of a source say how many offsets an epoch spans, or `all`."""
    return any(name.lower() == MAX_OFFSETS.lower() for name in options)


def _whole(plain: Mapping[str, str], name: str, default: int, *, least: int | None = None) -> int:
    text = plain.get(name.lower(), str(default)).strip()
    if not re.fullmatch(r"-?\d+", text) or (least is not None and int(text) < least):
        bound = "" if least is None else f" from {least}"
        raise OptionError(f"{name}={text!r}: expected a whole number{bound} (milliseconds)")
    return int(text)


def _duration_ms(plain: Mapping[str, str], name: str, default: int) -> int:
    text = plain.get(name.lower(), f"{default}ms").strip().lower()
    found = _DURATION.fullmatch(text)
    if found is None:
        raise OptionError(f"{name}={text!r}: expected a duration such as 500ms, 30s, 15m or 1h")
    return int(found[1]) * _UNIT_MS[found[2]]


def _flag(plain: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = plain.get(name.lower(), str(default)).strip().lower()
    if text not in ("true", "false"):
        raise OptionError(f"{name}={text!r}: expected true or false")
    return text == "true"


def _choice(plain: Mapping[str, str], name: str, choices: tuple[str, ...], default: str) -> str:
    text = plain.get(name.lower(), default).strip().lower()
    if text not in choices:
        raise OptionError(f"{name}={text!r}: expected one of {', '.join(choices)}")
    return text
