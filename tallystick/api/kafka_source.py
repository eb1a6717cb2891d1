"""`KafkaSource`: the topics that a pipeline reads, as a value."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Literal

from tallystick.codec.formats import Avro, Format, Json, JsonSchema, Protobuf, Text
from tallystick.epoch.transactional_ids import default_prefix, token_owner
from tallystick.errors import OptionError
from tallystick.kafka.config import KafkaConfig
from tallystick.options.source import KEY_PREFIX, parse_source_options
from tallystick.options.table import GROUP_OPTION, KAFKA_PREFIX, client_config
from tallystick.source.subscription import LossPolicy, topic_problem

FALLBACK_OPTION = "startingOffsetsByTimestampStrategy"
Offsets = str | Mapping[str, Mapping[int, int]]
"""`"earliest"`, `"latest"`, `"committed"`, or offsets per topic and partition."""
Times = datetime | Mapping[str, Mapping[int, datetime]]
"""A time for all partitions, or one per topic and partition."""


@dataclass(frozen=True)
class KafkaSource:
    """Topics to read, as a pipeline's first step.

    Every argument stands for options of `readStream.format("tallystick")`, which the page "Reading
    from Kafka" explains; an option without an argument goes into `options` under its name there.

    Args:
        bootstrap_servers: `host:port,host:port`.
        topics: a list of names, or a compiled pattern that a whole name must match.
        assignment: exactly these partitions per topic, instead of `topics`.
        starting_offsets: where a new pipeline starts; a restarted one resumes at its positions.
        starting_time: start at the first record at or after a time, instead of `starting_offsets`.
        starting_time_fallback: where a partition starts that has no record so late: "latest", at
            the end that it has when the pipeline is new; or "error", which refuses the start.
        ending_offsets: where reading ends for good; None: never.
        max_offsets_per_trigger: the most that one epoch spans, or "all" there is; None: what fits
            into a second, or into the trigger's interval if that is longer.
        max_bytes_per_task: rows that a keyed task holds in memory at a time; None: 64 MiB. The rows
            of one key group stay together.
        min_partitions: cut large partitions for at least this many readers. Order per partition is
            kept, so there is no cut where the readers write by themselves: no keyed step, and any
            sink but KafkaSink(transactions="epoch").
        value: how values are parsed; None: they stay binary, in column `value`.
        key: how keys are parsed, as columns in the place of `key`, in the mode that the value has;
            None: they stay binary.
        key_prefix: put before the names of the columns that a key becomes.
        metadata_prefix: put before the names of Kafka's own columns when `value` is parsed.
        headers: whether to read headers, into column `headers`.
        losses: what to do when Kafka no longer has what was still to be read; by default, stop.
        group_id: the consumer group under which Kafka's tools see the progress; None: the
            pipeline's name with `tallystick-` before it; "": nowhere. Not one that keeps the token
            of a pipeline: `tallystick-<name>-token`.
        options: further options: those of the data source, and settings of the Kafka client with
            `kafka.` before them, such as `kafka.security.protocol`.

    Raises:
        OptionError: a setting is of the wrong type, or contradicts another.
    """

    bootstrap_servers: str
    _: KW_ONLY
    topics: Sequence[str] | re.Pattern[str] | None = None
    assignment: Mapping[str, Collection[int]] | None = None
    starting_offsets: Offsets | None = None
    starting_time: Times | None = None
    starting_time_fallback: Literal["latest", "error"] = "latest"
    ending_offsets: Offsets | None = None
    max_offsets_per_trigger: int | Literal["all"] | None = None
    max_bytes_per_task: int | None = None
    min_partitions: int | None = None
    value: Format | Text | None = None
    key: Format | None = None
    key_prefix: str = KEY_PREFIX
    metadata_prefix: str = ""
    headers: bool = False
    losses: LossPolicy = field(default_factory=LossPolicy)
    group_id: str | None = None
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.topics, str):
            raise OptionError(
                f"topics={self.topics!r}: expected a list, [{self.topics!r}], or a compiled "
                f"pattern, re.compile({self.topics!r})"
            )
        for topic in () if isinstance(self.topics, re.Pattern) else self.topics or ():
            if problem := topic_problem(topic):
                raise OptionError(f"topics: {topic!r}: {problem}")
        parse_source_options(self.to_options("check"), streaming=True)
        _ = self.config

    def to_options(self, pipeline: str) -> dict[str, str]:
        """Return the source as options of `readStream.format("tallystick")`."""
        given = {
            "kafka.bootstrap.servers": self.bootstrap_servers,
            **self._what(),
            **self._where(),
            **_loss_options(self.losses),
            GROUP_OPTION: default_prefix(pipeline) if self.group_id is None else self.group_id,
            "includeHeaders": str(self.headers),
            "maxOffsetsPerTrigger": self.max_offsets_per_trigger,
            "maxBytesPerTask": self.max_bytes_per_task,
            "minPartitions": self.min_partitions,
            **_value_options(self.value, self.metadata_prefix),
            **_key_options(self.key, self.key_prefix, self.value),
        }
        own = {name: str(value) for name, value in given.items() if value is not None}
        if owner := token_owner(own[GROUP_OPTION]):
            raise OptionError(
                f"group {own[GROUP_OPTION]!r} is that in which pipeline {owner!r} keeps its token: "
                f"positions in it would stop that one for good. Give this KafkaSource another "
                f"group_id= ('' for none), or rename the pipeline"
            )
        _refuse_twice(own, self.options)
        return {**own, **self.options}

    def _what(self) -> dict[str, str | None]:
        if isinstance(self.topics, re.Pattern):
            topics = {"subscribePattern": _pattern_text(self.topics)}
        else:
            topics = {} if self.topics is None else {"subscribe": ",".join(self.topics)}
        if self.assignment is None:
            return dict(topics)
        return {
            **topics,
            "assign": json.dumps({t: list(ps) for t, ps in self.assignment.items()}),
        }

    def _where(self) -> dict[str, str | None]:
        where = {
            "startingOffsets": _offsets_text(self.starting_offsets),
            "endingOffsets": _offsets_text(self.ending_offsets),
        }
        if self.starting_time is None:
            return where
        if not any(name.lower() == FALLBACK_OPTION.lower() for name in self.options):
            where[FALLBACK_OPTION] = self.starting_time_fallback
        match self.starting_time:
            case datetime():
                return {**where, "startingTimestamp": str(_ms(self.starting_time))}
            case times:
                by_topic = {t: {p: _ms(at) for p, at in ps.items()} for t, ps in times.items()}
                return {**where, "startingOffsetsByTimestamp": json.dumps(by_topic)}

    @property
    def config(self) -> KafkaConfig:
        """The configuration of the cluster's client."""
        client = {name: v for name, v in self.options.items() if name.startswith(KAFKA_PREFIX)}
        return client_config(self.bootstrap_servers, client)


def _pattern_text(pattern: re.Pattern[str]) -> str:
    """Return the text of a pattern with the flags inside: the option is a text alone."""
    if not isinstance(pattern.pattern, str):
        raise OptionError(f"topics={pattern!r}: expected a pattern of text, re.compile('…')")
    letters = {re.I: "i", re.M: "m", re.S: "s", re.X: "x", re.A: "a"}
    flags = "".join(letter for flag, letter in letters.items() if pattern.flags & flag)
    return f"(?{flags}){pattern.pattern}" if flags else pattern.pattern


def _offsets_text(offsets: Offsets | None) -> str | None:
    return offsets if offsets is None or isinstance(offsets, str) else json.dumps(offsets)


def _ms(at: datetime) -> int:
    if at.tzinfo is None:
        raise OptionError(
            f"starting_time={at!r} has no time zone: give it one, e.g. datetime(…, tzinfo=UTC)"
        )
    return round(at.timestamp() * 1000)


def _loss_options(losses: LossPolicy) -> dict[str, str | None]:
    """Return the options that differ from the default, so that `options` may set the others."""
    names = {
        "when.expired": "expired",
        "when.removed": "removed",
        "when.removed.keep.ms": "keep_ms",
        "when.recreated": "recreated",
        "when.truncated": "truncated",
        "when.unreadable": "unreadable",
    }
    return {
        name: str(getattr(losses, field_name))
        for name, field_name in names.items()
        if getattr(losses, field_name) != getattr(LossPolicy(), field_name)
    }


def _key_options(
    key: Format | None, prefix: str, value: Format | Text | None
) -> dict[str, str | None]:
    if key is None:
        return {}
    if not isinstance(key, Format):
        raise OptionError(
            f"key={key!r}: expected Json(...), Avro(...), JsonSchema(...) or Protobuf(...); "
            f"without one it is bytes, in column key"
        )
    if key.schema is None:
        raise OptionError(
            f"key={type(key).__name__}(): reading keys needs the schema=, e.g. 'user string'"
        )
    if value is not None and key.mode != value.mode:
        raise OptionError(
            f"key={type(key).__name__}(mode={key.mode!r}), and the value has mode {value.mode!r}: "
            f"a record has one mode. Give both the same"
        )
    read = {
        name.replace("value.", "key.", 1): text for name, text in _value_options(key, "").items()
    }
    mode = read.pop("key.mode")
    return {**read, "value.mode": mode, "key.prefix": prefix}


def _value_options(value: Format | Text | None, prefix: str) -> dict[str, str | None]:
    form: dict[str, str | None]
    prefixed = {"metadata.prefix": prefix or None}
    match value:
        case None:
            return prefixed
        case Text(mode):
            return {"value.format": "string", "value.mode": mode, **prefixed}
        case Json(None):
            raise OptionError(
                'value=Json(): reading needs a schema, e.g. Json("dest string, n bigint")'
            )
        case Json(schema, mode):
            form = {"value.format": "json"}
        case JsonSchema(schema, registry, subject, _, mode, user_info, ca):
            value.check_for_reading()
            form = {
                "value.format": "json_schema",
                "value.registry.url": registry,
                "value.registry.subject": subject,
                "value.registry.user.info": user_info,
                "value.registry.ca": ca,
            }
        case Protobuf(schema, registry, _, _, mode, user_info, ca):
            value.check_for_reading()
            form = {
                "value.format": "protobuf",
                "value.registry.url": registry,
                "value.registry.user.info": user_info,
                "value.registry.ca": ca,
            }
        case Avro(schema, registry, schemas, mode, user_info, ca):
            value.check_for_reading()
            form = {
                "value.format": "avro",
                "value.registry.url": registry,
                "value.registry.file": schemas,
                "value.registry.user.info": user_info,
                "value.registry.ca": ca,
            }
    return {**form, "value.schema": schema, "value.mode": mode, **prefixed}


def _refuse_twice(own: Mapping[str, str], options: Mapping[str, str]) -> None:
    arguments = {name.lower(): name for name in own}
    for name in options:
        if name.lower() in arguments and name.lower() != "includeheaders":
            raise OptionError(f"options: {name!r} is set by an argument already: say it once")
