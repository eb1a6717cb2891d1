"""The options of a source of Kafka: `SourceOptions`, and the table of their names and texts.

    texts, of `readStream.options(…)` ────────────┐
    texts, of `KafkaSource(options=…)` ───────────┴─► SOURCE.parse ─┬─► source_options ─► SourceOptions
    values, the other arguments of `KafkaSource` ───────────────────┘

Settings of the Kafka client itself carry the prefix `kafka.` and go to `kafka.config`.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from tallystick.codec.formats import (
    FAILFAST,
    MODES,
    Avro,
    Format,
    Json,
    JsonSchema,
    Protobuf,
    Text,
    columns_read,
)
from tallystick.codec.layout import METADATA
from tallystick.errors import BrokenInvariantError, OptionError
from tallystick.kafka.config import KafkaConfig
from tallystick.options.table import (
    COUNT,
    FLAG,
    GROUP,
    GROUP_OPTION,
    Kind,
    Option,
    OptionTable,
    ParsedOptions,
    choices,
    one_of,
    text_of,
    whole,
)
from tallystick.source.subscription import (
    EARLIEST,
    FAIL,
    KEEP_MS,
    LATEST,
    LENIENT,
    ON_EXPIRED,
    ON_RECREATED,
    ON_REMOVED,
    ON_TRUNCATED,
    ON_UNREADABLE,
    Assignment,
    AtCommitted,
    AtOffsets,
    AtTime,
    Bound,
    LossPolicy,
    Subscription,
    TopicList,
    TopicPattern,
    topic_problem,
)
from tallystick.text import WAIT_MAX_MS, WAIT_MAX_WORDS, span_ms
from tallystick.values import TopicPartition

VALUES = "What a record becomes"
"""The heading of the docs that these options stand under."""
_OF_REGISTRY = ("avro", "json_schema", "protobuf")
_NAMES = {Json: "json", Avro: "avro", JsonSchema: "json_schema", Protobuf: "protobuf"}
WITH_SCHEMA = tuple(_NAMES.values())
KEY_PREFIX = "key_"
_NOT_SET = "not set"
DISCOVERY_INTERVAL_MS = 300_000
TRIGGER_DELAY_MS = 900_000
OFFSETS_MAX = 1_000_000
"""The most offsets that an epoch spans, where the options do not say.

Without a bound the first epoch of a backlog is all of it: one transaction, which times out after
five minutes by default and never gets through, and keyed tasks that hold all of its rows. A million
records of 110 bytes take 2 to 5 s on two cores (benchmarks/README.md) and 200 s with a function
that does 5,000 a second; the fixed cost of an epoch, 0.2 s, is a tenth or less beside them.
"""
TASK_BYTES_MAX = 64 << 20
MAX_OFFSETS, ALL = "maxOffsetsPerTrigger", "all"
COMMITTED = "committed"
_MARKERS = {"earliest": EARLIEST, "latest": LATEST}
_FALLBACKS: dict[str, int | None] = {"fail": None, "error": None, **_MARKERS}
LOSS_OPTIONS = {
    "expired": "when.expired",
    "removed": "when.removed",
    "keep_ms": "when.removed.keep.ms",
    "recreated": "when.recreated",
    "truncated": "when.truncated",
    "unreadable": "when.unreadable",
}
"""The option of each field of `LossPolicy`."""


def _registry_options(part: str) -> tuple[Option, ...]:
    """Return the options of where the schemas of values or keys are, and of their names."""
    also = ", and `json_schema` with `value.registry.subject`" if part == "value" else ""
    return (
        Option(f"{part}.registry.url", text_of("URL"), None, f"For `{part}.format=avro` or `protobuf`{also}: a schema registry with Confluent's interface; user and password may stand in the URL.", "http://registry:8081", VALUES, _NOT_SET),
        Option(f"{part}.registry.user.info", text_of("`user:password`"), None, "Credentials for the registry, if they do not stand in its URL.", "reader:secret", VALUES, _NOT_SET),
        Option(f"{part}.registry.ca", text_of("path"), None, "PEM certificates that the registry's is signed with.", "/etc/ssl/registry.pem", VALUES, "the system's"),
        Option(f"{part}.registry.file", text_of("path"), None, f"For `{part}.format=avro`: instead of a registry, a JSON file `{{\"1\": <schema>, …}}` of schemas by id, or a folder of files `1.avsc`, …. Every worker reads it.", "schemas.json", VALUES, _NOT_SET),
        Option(f"{part}.name.column", text_of("column"), None, f"For `{part}.format=avro`: a column more, after the fields of `{part}.schema`, for the full name of the record's type, where a topic has records of several types.", "event_type", VALUES, _NOT_SET),
    )  # fmt: skip


VALUE_OPTIONS = (
    Option("value.format", one_of("raw", "string", *WITH_SCHEMA), "raw",
           "`raw`: the value stays binary; `string`: UTF-8 text; `json`, `avro`, `json_schema`, `protobuf`: the fields of `value.schema` become columns (the last three in Confluent's wire format).", "json", VALUES),
    Option("value.schema", text_of("Spark DDL"), None, "The fields to read; `json`, `avro` and `protobuf` need it; with `json_schema` the newest schema of `value.registry.subject` may say them instead. What a record has beyond them is ignored, what it lacks is null.",
           "dest string, dep_delay double", VALUES, "none"),
    Option("value.mode", one_of(*MODES), FAILFAST,
           "What a malformed value or key does. `failfast`: stop, and name the record; `permissive`: a row of nulls with the bytes in `_corrupt_record`, those of a key in `_corrupt_key`; `dropmalformed`: leave it out, counted in the log; `deadletter`: write it to the sink's dead-letter topic in the same transaction (pipelines only).",
           "permissive", VALUES),
    *_registry_options("value"),
    Option("value.registry.subject", text_of("subject"), None, "For `value.format=json_schema`, instead of `value.schema`: the subject whose newest schema says the fields, looked up when the query starts.", "orders-value", VALUES, _NOT_SET),
    Option("key.format", one_of("raw", *WITH_SCHEMA), "raw",
           "`raw`: the key stays binary; else the fields of `key.schema` become columns in the place of `key`.", "json", VALUES),
    Option("key.schema", text_of("Spark DDL"), None, "The fields of the key; every format but `raw` needs it.", "user string, day date", VALUES, "none"),
    Option("key.prefix", text_of("text"), KEY_PREFIX, "Put before the names of the key's columns; the value often has fields of the same names.", "k_", VALUES, f"`{KEY_PREFIX}`", "key_prefix"),
    *_registry_options("key"),
)  # fmt: skip


def _read_topics(text: str) -> TopicList:
    names = [name.strip() for name in text.split(",") if name.strip()]
    return _accept_topics(names, "'flights,orders'")


def _accept_topics(names: Iterable[str], example: str = "['flights', 'orders']") -> TopicList:
    topics = tuple(dict.fromkeys(names))
    if not topics:
        raise ValueError(f"names no topic: expected e.g. {example}")
    _check_topics(topics)
    return TopicList(topics)


def _check_topics(topics: Iterable[str]) -> None:
    for topic in topics:
        if problem := topic_problem(topic):
            raise ValueError(f"{topic!r}: {problem}")


def _read_pattern(text: str) -> TopicPattern:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from None
    return TopicPattern(text)


def _accept_assignment(partitions_by_topic: Mapping[str, Collection[int]]) -> Assignment:
    def partitions(numbers: Any) -> dict[int, int]:
        if isinstance(numbers, str | Mapping):
            raise TypeError
        return {_integer(partition): 0 for partition in numbers}

    assigned = _per_partition(partitions_by_topic, '{"topic": [0, 1]}', partitions)
    if not assigned:
        raise ValueError("names no partition")
    _check_topics(partition.topic for partition in assigned)
    return Assignment(tuple(sorted(assigned)))


def _kind_of_offsets(words: str, *markers: str) -> Kind:
    """Return the type of an option that takes one of a few words, or offsets per partition."""

    def accept(by_topic: object) -> dict[TopicPartition, int]:
        expected = '"earliest", "latest" or {"topic": {"0": 23, "1": -2}} (-2 earliest, -1 latest)'
        offsets = _per_partition(by_topic, expected, by_partition)
        if wrong := {p: offset for p, offset in offsets.items() if offset < EARLIEST}:
            raise ValueError(f"{wrong}: expected an offset, -2 (earliest) or -1 (latest)")
        return offsets

    def read(text: str) -> str | dict[TopicPartition, int]:
        word = text.strip().lower()
        return word if word in markers else accept(_json(text))

    return Kind(words, read, accept)


def _accept_times(by_topic: object) -> dict[TopicPartition, int]:
    times = _per_partition(
        by_topic, '{"topic": {"0": 1700000000000}} (ms since 1970)', by_partition
    )
    if min(times.values(), default=0) < 0:
        raise ValueError("expected ms since 1970, from 0")
    return times


def _per_partition(
    by_topic: Any, expected: str, numbers_of: Callable[[Any], dict[int, int]]
) -> dict[TopicPartition, int]:
    """Return a number per partition, of what a user says by topic.

    Args:
        by_topic: a mapping of topics' names.
        expected: the form, for the error.
        numbers_of: makes numbers by partition of the value of a topic.

    Raises:
        ValueError: it has another form.
    """
    try:
        numbers = {
            TopicPartition(topic, partition): number
            for topic, value in by_topic.items()
            for partition, number in numbers_of(value).items()
        }
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"expected {expected}") from None
    if any(partition < 0 for _, partition in numbers):
        raise ValueError(f"partitions are numbered from 0: expected {expected}")
    return numbers


def _kind_of_json(words: str, accept: Callable[[Any], Any]) -> Kind:
    """Return the type of an option whose texts are JSON of its values."""
    return Kind(words, lambda text: accept(_json(text)), accept)


def _json(text: str) -> Any:
    """Return the value of a JSON text, or None for another text."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def by_partition(numbers: Any) -> dict[int, int]:
    """Return numbers by partition; JSON has numbers of partitions as texts."""
    return {
        int(partition) if isinstance(partition, str) else _integer(partition): _integer(number)
        for partition, number in numbers.items()
    }


def _integer(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError
    return int(number)


def _read_limit(text: str) -> int | None:
    if text.strip().lower() == ALL:
        return None
    return _accept_limit(int(text) if text.strip().isdecimal() else 0)


def _accept_limit(number: object) -> int:
    try:
        count = _integer(number)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"expected a whole number from 1, or {ALL!r}")
    return count


def _read_duration(text: str) -> int:
    duration_ms = span_ms(text)
    if duration_ms is None:
        raise ValueError("expected a duration such as 500ms, 30s, 15m or 1h")
    if duration_ms > WAIT_MAX_MS:
        raise ValueError(f"expected {WAIT_MAX_WORDS}")
    return duration_ms


def _read_columns(text: str) -> tuple[str, ...]:
    names = {name.strip().lower() for name in text.split(",")} - {"", "none"}
    if unknown := sorted(names - {name.lower() for name in METADATA}):
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(METADATA)}; or none")
    return tuple(name for name in METADATA if name.lower() in names)


_PER_PARTITION = "JSON: topic → partition → "
_OFFSETS = choices("earliest", "latest", COMMITTED) + f", or {_PER_PARTITION}offset"
_TIME = whole("ms since 1970", 0, "milliseconds")
_TIMES = _kind_of_json(f"{_PER_PARTITION}{_TIME.words}", _accept_times)
_WHAT = "What to read"
_START = "Where to start and stop"
_RATE = "How much at a time"
_WORLD = "When the topics change"
_GROUP = "The consumer group"

PASSED_OVER = {
    "kafkaConsumer.pollTimeoutMs": "a fetch ends with kafka.request.timeout.ms",
    "fetchOffset.numRetries": "calls are tried again until kafka.delivery.timeout.ms",
    "fetchOffset.retryIntervalMs": "calls are tried again until kafka.delivery.timeout.ms",
    "groupIdPrefix": "nothing joins a group; the one that shows positions is kafka.group.id",
    "maxRecordsPerPartition": "minPartitions and maxBytesPerTask cut what a task reads",
}
"""Options of Spark's connector that no row depends on, and why they have no effect."""

SOURCE = OptionTable((
    Option("subscribe", Kind("topic names, by comma", _read_topics, _accept_topics), None,
           "Read these topics, all partitions. One of `subscribe`, `subscribePattern` and `assign` has to be given.",
           "flights,orders", _WHAT, "one of three"),
    Option("subscribePattern", Kind("regular expression (Python's)", _read_pattern), None,
           "Read every topic whose whole name matches, also those that are created later. Kafka's internal topics never match.",
           "flights-.*", _WHAT, "one of three"),
    Option("assign", _kind_of_json("JSON: topic → partitions", _accept_assignment), None, "Read exactly these partitions.",
           '{"flights": [0, 1]}', _WHAT, "one of three"),
    Option("partition.discovery.interval.ms", whole("ms", unit="milliseconds"), DISCOVERY_INTERVAL_MS,
           "How often to look for new partitions and topics; 0 or less: only when a query starts. What is found later is read from its first offset.",
           "10000", _WHAT, field="discovery_interval_ms", only="stream"),
    Option("startingOffsets", _kind_of_offsets(_OFFSETS, "earliest", "latest", COMMITTED), None,
           "Where a new query starts; a restarted one goes on where it was. In JSON -2 means earliest and -1 latest; partitions that it leaves out start at the default. `committed`: where `kafka.group.id` stands.",
           '{"flights": {"0": 23, "1": -2}}', _START, "latest for a stream, earliest for a batch"),
    Option("committed.fallback", one_of("fail", "earliest", "latest"), "fail",
           "For `startingOffsets=committed`: where a partition starts in which the group has committed nothing.", "earliest", _START),
    Option("startingTimestamp", _TIME, None, "Start at the first record at or after this time, in every partition.",
           "1700000000000", _START, _NOT_SET),
    Option("startingOffsetsByTimestamp", _TIMES, None,
           "Start at the first record at or after a time of each partition.", '{"flights": {"0": 1700000000000}}', _START, _NOT_SET),
    Option("startingOffsetsByTimestampStrategy", one_of("error", "latest"), "error",
           "What to do where no record of a partition is as late as the starting time: refuse the start, or begin at the end that the partition has then, which the checkpoint remembers. (`KafkaSource` says it as `starting_time_fallback`, and there `latest` is the default, as in Flink.)", "latest", _START),
    Option("endingOffsets", _kind_of_offsets(choices("latest") + f", or {_PER_PARTITION}offset", "earliest", "latest"), None,
           "Where reading ends, this offset not included. A stream remembers it in its checkpoint and, under the trigger `availableNow`, ends there; partitions found later are not read.",
           '{"flights": {"0": 50, "1": -1}}', _START, "latest for a batch, never for a stream"),
    Option("endingTimestamp", _TIME, None, "End before the first record at or after this time, in every partition; at the end of the log where there is none.",
           "1700000000000", _START, _NOT_SET),
    Option("endingOffsetsByTimestamp", _TIMES, None, "The same, with a time of each partition.",
           '{"flights": {"0": 1700000000000}}', _START, _NOT_SET),
    Option(MAX_OFFSETS, Kind(f"{COUNT.words}, or `all`", _read_limit, _accept_limit), OFFSETS_MAX,
           "The most that one micro-batch spans; a backlog becomes several. Each partition gets its share in proportion to what it has waiting, and at least one offset. `all`: no limit, as in Spark's connector by default.", "100000", _RATE,
           f"{OFFSETS_MAX}; in a pipeline what fits into a second, or into the trigger's interval", "offset_count_max", "stream"),
    Option("maxBytesPerTask", COUNT, TASK_BYTES_MAX,
           "Rows that a keyed task of a pipeline holds in memory at a time. What is more goes to a file on its host, and is processed some key groups at a time; the rows of one key group stay together. Epochs are made so small that this is rare.", "16777216", _RATE, f"{TASK_BYTES_MAX} ({TASK_BYTES_MAX >> 20} MiB)", "task_bytes_max", "stream"),
    Option("minOffsetsPerTrigger", COUNT, 1, "Wait until this many offsets are there, or `maxTriggerDelay` has passed. Not with the trigger `availableNow`.",
           "10000", _RATE, field="offset_count_min", only="stream"),
    Option("maxTriggerDelay", Kind("duration: `500ms`, `30s`, `15m`, `1h`", _read_duration), TRIGGER_DELAY_MS, "The longest that `minOffsetsPerTrigger` may hold a micro-batch back.", "1m", _RATE, f"{TRIGGER_DELAY_MS // 60_000}m", "trigger_delay_max_ms", "stream"),
    Option("minPartitions", COUNT, None, "Cut large partitions into ranges until there are about this many. A DataFrame's rows are then no longer in order within a partition, nor is what a query writes of them. In a pipeline they are: it cuts only where an exchange puts the pieces in order again, that of a keyed step or of `KafkaSink(transactions=\"epoch\")` as the only sink.",
           "16", _RATE, "one task per partition", "split_count_min"),
    *VALUE_OPTIONS,
    Option("includeHeaders", FLAG, False, "Add the column `headers`.", "true", VALUES, "false", "headers"),
    Option("metadata.columns", Kind("names, by comma, or `none`", _read_columns), METADATA, "Which of Kafka's columns there are beside the value: `key`, `topic`, `partition`, `offset`, `timestamp`, `timestampType`. Spark cannot leave out what a query does not use, so naming what you need makes reading cheaper.",
           "key,offset", VALUES, "all", "metadata_columns"),
    Option("metadata.prefix", text_of("text"), "", "Put before the names of Kafka's own columns when a value has fields of the same name.", "kafka_", VALUES, "empty", "metadata_prefix"),
    Option("when.expired", one_of(*ON_EXPIRED), FAIL,
           "Records were deleted before they were read. `skip`: go on at the first that is left; the log, `skipped` in the offsets and the metrics say from where to where.", "skip", _WORLD),
    Option("when.removed", one_of(*ON_REMOVED), FAIL,
           "A topic is gone. `drop`: go on without it; `keep`: hold its position between epochs for `when.removed.keep.ms` in case it comes back, then drop it; an epoch that was planned before fails.", "drop", _WORLD),
    Option("when.removed.keep.ms", whole("ms", 0, "milliseconds"), KEEP_MS, "See `when.removed`.", "60000", _WORLD),
    Option("when.recreated", one_of(*ON_RECREATED), FAIL,
           "A topic was deleted and created again (its id differs, KIP-516). `restart`: read the new one from its beginning.", "restart", _WORLD),
    Option("when.truncated", one_of(*ON_TRUNCATED), FAIL,
           "A log ends before the next offset to read (unclean leader election). `resume`: go on at its new end.", "resume", _WORLD),
    Option("when.unreadable", one_of(*ON_UNREADABLE), FAIL,
           "A record batch has its checksum and cannot be read: a faulty producer wrote it so. `skip`: leave the whole batch out; the log names its offsets and its producer. A batch whose checksum is wrong is damaged, and ends the query in any case.", "skip", _WORLD),
    Option("failOnDataLoss", FLAG, True, "`false` is short for `skip`, `drop`, `restart` and `resume` in the options above.", "false", _WORLD, "true"),
    Option(GROUP_OPTION, GROUP, "",
           "The consumer group under which Kafka's own tools see positions and lag. Nobody joins it.", "billing", _GROUP, "none; in a pipeline `tallystick-<name>`", "group"),
    Option("commit.offsets.on.checkpoint", FLAG, True,
           "Commit the positions to the group: inside the epoch's transaction where the sink is `KafkaSink` on the same cluster, else right after the micro-batch was committed.", "false", _GROUP, "true", "commit_offsets", "stream"),
), PASSED_OVER)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of a source, typed; what each of them means stands in `SOURCE`."""

    subscription: Subscription
    config: KafkaConfig
    """The configuration of the client of the cluster."""
    start: Bound
    stop: Bound | None
    """The end of reading; None: there is none."""
    policy: LossPolicy
    value: Format | Text | None
    """The format of the value; None: it stays binary."""
    key: Format | None
    """The format of the key; None: it stays binary."""
    group: str
    commit_offsets: bool
    discovery_interval_ms: int
    offset_count_max: int | None
    """The most offsets that an epoch spans; None: no limit."""
    is_bounded: bool
    """True if the user says how many offsets an epoch spans, or that there is no limit."""
    task_bytes_max: int
    offset_count_min: int
    trigger_delay_max_ms: int
    split_count_min: int | None
    headers: bool
    key_prefix: str
    metadata_prefix: str
    metadata_columns: tuple[str, ...]

    @property
    def own_count_max(self) -> int | None:
        """The most offsets that an epoch spans, as the user says; None: unlimited, or not said."""
        return self.offset_count_max if self.is_bounded else None

    @property
    def takes_all(self) -> bool:
        """True if the user wants all readable records in one epoch."""
        return self.is_bounded and self.offset_count_max is None

    @property
    def value_mode(self) -> str:
        """The treatment of malformed values and keys."""
        form = self.value or self.key
        return FAILFAST if form is None else form.mode

    @property
    def value_schema(self) -> str | None:
        """The fields of the value as DDL; None: the value is one column, or a registry has them."""
        if self.value is None or isinstance(self.value, Text):
            return None
        return columns_read(self.value)

    @property
    def asks_registry(self) -> bool:
        """True if reading a record needs the writer's schema, from a registry."""
        return any(isinstance(form, Avro | Protobuf) for form in (self.value, self.key))

    @property
    def shown_group(self) -> str:
        """The group that positions are committed to; "" for none."""
        return self.group if self.commit_offsets else ""


def parse_source_options(
    options: Mapping[str, str], *, streaming: bool | None = None
) -> SourceOptions:
    """Check the options of a query, which Spark has as texts, and give them their types.

    Args:
        options: as Spark hands them over; names in any case.
        streaming: see `source_options`.

    Raises:
        OptionError: an option is unknown, missing, contradictory, or not of its type.
    """
    return source_options(SOURCE.parse(options), streaming=streaming)


def source_options(
    parsed: ParsedOptions,
    *,
    streaming: bool | None = None,
    value: Format | Text | None = None,
    key: Format | None = None,
) -> SourceOptions:
    """Check options against each other, and return them as one value.

    Args:
        parsed: the options by their names, typed.
        streaming: `readStream` (starts at latest by default) or `read` (at earliest, to latest);
            None: not known yet, so an option that only one of them has is let through.
        value: the format of the value, if it is an argument, and no option names its parts.
        key: the same of the key.

    Raises:
        OptionError: options are missing, or contradict each other.
    """
    if not parsed.client.get("bootstrap.servers"):
        raise OptionError(
            "kafka.bootstrap.servers is missing: expected the brokers to start from, "
            'e.g. .option("kafka.bootstrap.servers", "host1:9092,host2:9092")'
        )
    _refuse_misplaced(parsed, streaming)
    if value is None:
        value = format_named(parsed, "value")
    if key is None:
        key_format = format_named(parsed, "key")
        assert not isinstance(key_format, Text), "the option of a key's format has no such word"
        key = key_format
    _check_columns(parsed, value, key)
    return SourceOptions(
        **parsed.fields,
        subscription=_subscription(parsed),
        config=KafkaConfig.from_options(parsed.client),
        start=_start(parsed, streaming),
        stop=_stop(parsed, streaming=bool(streaming)),
        is_bounded=MAX_OFFSETS in parsed,
        policy=_policy(parsed),
        value=value,
        key=key,
    )


def format_named(parsed: ParsedOptions, part: str) -> Format | Text | None:
    """Return the format whose parts the options of the value or the key name; None: it is binary.

    Args:
        parsed: the options.
        part: "value" or "key".

    Raises:
        OptionError: parts are missing, or contradict each other.
    """
    _check_parts(parsed, part, "dest string" if part == "value" else "user string")
    schema, mode = parsed[f"{part}.schema"], parsed["value.mode"]
    registry: dict[str, Any] = {
        "registry": parsed[f"{part}.registry.url"],
        "user_info": parsed[f"{part}.registry.user.info"],
        "ca": parsed[f"{part}.registry.ca"],
    }
    form: Avro | Protobuf | JsonSchema
    match parsed[f"{part}.format"]:
        case "raw":
            return None
        case "string":
            return Text(mode)
        case "json":
            return Json(schema, mode)
        case "avro":
            file, name = parsed[f"{part}.registry.file"], parsed[f"{part}.name.column"]
            form = Avro(schema, schemas=file, mode=mode, name_column=name, **registry)
        case "protobuf":
            form = Protobuf(schema, mode=mode, **registry)
        case "json_schema":
            subject = parsed["value.registry.subject"] if part == "value" else None
            form = JsonSchema(schema, subject=subject, mode=mode, **registry)
        case word:
            raise BrokenInvariantError(f"{part}.format={word} is accepted, and names no class")
    form.check_for_reading()
    return form


def _check_parts(parsed: ParsedOptions, part: str, example: str) -> None:
    form = parsed[f"{part}.format"]
    has_schema = f"{part}.schema" in parsed or (
        "value.registry.subject" in parsed and part == "value"
    )
    if (form in WITH_SCHEMA) != has_schema:
        raise OptionError(
            f"{part}.format=json, avro or protobuf needs {part}.schema, and {part}.schema needs "
            f"{part}.format=json, avro or protobuf: "
            f'give both, e.g. .option("{part}.format", "json").option("{part}.schema", "{example}")'
        )
    registry = [name for name in parsed.given if name.startswith(f"{part}.registry.")]
    if registry and form not in _OF_REGISTRY:
        raise OptionError(
            f"{', '.join(registry)}: {part}.format={form} needs no registry: set it to avro, or "
            f"remove that"
        )
    if f"{part}.name.column" in parsed and form != "avro":
        raise OptionError(
            f"{part}.name.column is for {part}.format=avro, whose records have names: remove it"
        )


def _check_columns(parsed: ParsedOptions, value: Format | Text | None, key: Format | None) -> None:
    """Refuse options of columns that have no effect with the formats of value and key."""
    if value is None and key is None and "value.mode" in parsed:
        raise OptionError("value.mode is for a value.format: raw takes any bytes; remove it")
    if (value is None or isinstance(value, Text)) and parsed["metadata.prefix"]:
        raise OptionError(
            f"metadata.prefix is for values that become several columns, and value.format="
            f"{'raw' if value is None else 'string'} becomes one: remove it"
        )
    if key is None:
        if "key.prefix" in parsed:
            raise OptionError("key.prefix is for a key.format: raw is one column, key; remove it")
    elif "key" not in parsed["metadata.columns"]:
        raise OptionError(
            f"key.format={_NAMES[type(key)]} reads the key, which metadata.columns leaves out: "
            f"name key there, or remove key.format"
        )


def _refuse_misplaced(parsed: ParsedOptions, streaming: bool | None) -> None:
    if streaming is None:
        return
    other, here = ("batch", "spark.readStream") if streaming else ("stream", "spark.read")
    for name in parsed.given:
        if SOURCE[name].only == other:
            raise OptionError(f"{name} means nothing for {here}: remove it (it is for a {other})")


def _subscription(parsed: ParsedOptions) -> Subscription:
    given = [name for name in ("subscribe", "subscribePattern", "assign") if name in parsed]
    if len(given) != 1:
        raise OptionError(
            f"expected exactly one of subscribe, subscribePattern, assign; found "
            f"{', '.join(given) or 'none of them'}"
        )
    subscription: Subscription = parsed[given[0]]
    return subscription


def _start(parsed: ParsedOptions, streaming: bool | None) -> Bound:
    name = _the_one(parsed, "starting")
    strategy, fallback = "startingOffsetsByTimestampStrategy", "committed.fallback"
    if name == "startingOffsets" and strategy in parsed:
        raise OptionError(
            f"{strategy} is for startingTimestamp and startingOffsetsByTimestamp: remove it"
        )
    if fallback in parsed and parsed["startingOffsets"] != COMMITTED:
        raise OptionError("committed.fallback is for startingOffsets=committed: remove it")
    if name != "startingOffsets":
        return _at_time(parsed, "starting", _FALLBACKS[parsed[strategy]])
    if parsed[name] == COMMITTED:
        if not parsed[GROUP_OPTION]:
            raise OptionError(
                f"startingOffsets=committed: whose offsets? Name the group in {GROUP_OPTION}"
            )
        return AtCommitted(parsed[GROUP_OPTION], _FALLBACKS[parsed[fallback]])
    if parsed[name] == "latest" and streaming is False:
        raise OptionError(
            "startingOffsets=latest would read nothing in a batch: name offsets, a time, "
            "or earliest"
        )
    return _at_offsets(parsed, name, "latest" if streaming else "earliest")


def _stop(parsed: ParsedOptions, *, streaming: bool) -> Bound | None:
    name = _the_one(parsed, "ending")
    if name != "endingOffsets":
        return _at_time(parsed, "ending", LATEST)
    if streaming and name not in parsed:
        return None
    stop = _at_offsets(parsed, name, "latest")
    if EARLIEST in (stop.default, *stop.partitions.values()):
        raise OptionError("endingOffsets: -2 or earliest would read nothing: name an offset, or -1")
    return stop


def _the_one(parsed: ParsedOptions, side: str) -> str:
    """Return the name of the option given for a side; by default `startingOffsets` and the like."""
    names = [f"{side}Offsets", f"{side}Timestamp", f"{side}OffsetsByTimestamp"]
    given = [name for name in names if name in parsed]
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} contradict each other: keep one")
    return given[0] if given else names[0]


def _at_time(parsed: ParsedOptions, side: str, fallback: int | None) -> AtTime:
    time, times = parsed[f"{side}Timestamp"], parsed[f"{side}OffsetsByTimestamp"]
    if time is not None:
        return AtTime(time, fallback=fallback)
    return AtTime(None, times, fallback)


def _at_offsets(parsed: ParsedOptions, name: str, default: str) -> AtOffsets:
    value = parsed[name] or default
    if isinstance(value, str):
        return AtOffsets(_MARKERS[value])
    return AtOffsets(_MARKERS[default], value)


def _policy(parsed: ParsedOptions) -> LossPolicy:
    base = LossPolicy() if parsed["failOnDataLoss"] else LENIENT
    given = {way: parsed[name] for way, name in LOSS_OPTIONS.items() if name in parsed}
    return replace(base, **given)
