"""`KafkaSource`: the topics that a pipeline reads, as a value."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from tallystick.arguments import Settings, checked
from tallystick.codec.formats import Format, ReadFormat, ReadKeyFormat, Text
from tallystick.epoch.transactional_ids import default_prefix, token_owner
from tallystick.errors import OptionError
from tallystick.options.source import (
    KEY_PREFIX,
    LOSS_OPTIONS,
    SOURCE,
    SourceOptions,
    source_options,
)
from tallystick.options.table import GROUP_OPTION, ParsedOptions, check_servers
from tallystick.source.subscription import LossPolicy, topic_problem

FALLBACK_OPTION = "startingOffsetsByTimestampStrategy"
LOGIN_OPTIONS = {"registry.user.info": "user_info", "registry.ca": "ca"}
"""Options that may complete a format, beside the kafka.* settings of the same kind; its fields."""
_WHAT_TO_READ = {"subscribe", "subscribepattern", "assign"}
Form = TypeVar("Form", bound=Format | Text)
Offsets = str | Mapping[str, Mapping[int, int]]
"""`"earliest"`, `"latest"`, `"committed"`, or offsets per topic and partition."""
Moment: TypeAlias = Annotated[datetime, lambda given: _moment_of(given)]
Times: TypeAlias = Moment | Mapping[str, Mapping[int, Moment]]
"""A time for all partitions, or one per topic and partition."""


@checked
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
        value: how values are parsed; columns alone, as DDL, are those of JSON. None: they stay
            binary, in column `value`.
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
    value: ReadFormat | None = None
    key: ReadKeyFormat | None = None
    key_prefix: str = KEY_PREFIX
    metadata_prefix: str = ""
    headers: bool = False
    losses: LossPolicy = field(default_factory=LossPolicy)
    group_id: str | None = None
    options: Settings = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for topic in () if isinstance(self.topics, re.Pattern) else self.topics or ():
            if problem := topic_problem(topic):
                raise OptionError(f"topics: {topic!r}: {problem}")
        check_servers("KafkaSource", self.bootstrap_servers)
        if self.metadata_prefix and self.value is None:
            raise OptionError(
                f"KafkaSource(metadata_prefix={self.metadata_prefix!r}): it is for a value= that "
                f"becomes several columns, and without one it becomes one: leave it out"
            )
        named = [name for name in ("topics", "assignment") if getattr(self, name) is not None]
        in_options = {name.lower() for name in self.options} & _WHAT_TO_READ
        if len(named) == 2 or not (named or in_options):
            raise OptionError(
                f"KafkaSource(): expected topics=['flights'], topics=re.compile('…') or "
                f"assignment={{'flights': [0, 1]}}; {' and '.join(named) or 'none'} of them is set"
            )
        _check_formats(self.value, self.key)
        self.read_options("check")

    @property
    def says_no_start(self) -> bool:
        """True if no argument says where reading begins."""
        starts = (self.assignment, self.starting_offsets, self.starting_time)
        return starts == (None, None, None)

    def read_options(self, pipeline: str) -> SourceOptions:
        """Return the options of the source, checked.

        Args:
            pipeline: the name of the pipeline, by default in the name of the consumer group.

        Raises:
            OptionError: a setting is of the wrong type, or contradicts another.
        """
        try:
            texts = SOURCE.parse(self.options)
        except OptionError as error:
            raise OptionError(f"KafkaSource(options=…): {error}") from None
        arguments = {
            option: SOURCE[option].kind.value(argument, setting)
            for option, (argument, setting) in self._arguments(pipeline, texts).items()
            if setting is not None
        }
        if owner := token_owner(arguments[GROUP_OPTION]):
            raise OptionError(
                f"group {arguments[GROUP_OPTION]!r} is that in which pipeline {owner!r} keeps its "
                f"token: positions in it would stop that one for good. Give this KafkaSource "
                f"another group_id= ('' for none), or rename the pipeline"
            )
        self._refuse_twice(arguments)
        return source_options(
            texts.with_arguments(arguments, self.bootstrap_servers),
            streaming=True,
            value=None if self.value is None else _completed("value", self.value, texts),
            key=None if self.key is None else _completed("key", self.key, texts),
        )

    def _arguments(self, pipeline: str, texts: ParsedOptions) -> dict[str, tuple[str, Any]]:
        """Return the argument that each option stands for, and its setting; None: it is not set."""
        is_pattern = isinstance(self.topics, re.Pattern)
        time_ms, times_ms = _start_times(self.starting_time)
        has_fallback = self.starting_time is not None and FALLBACK_OPTION not in texts
        group = default_prefix(pipeline) if self.group_id is None else self.group_id
        form = self.value or self.key
        return {
            "subscribe": ("topics", None if is_pattern else self.topics),
            "subscribePattern": ("topics", _pattern_text(self.topics)),
            "assign": ("assignment", self.assignment),
            "startingOffsets": ("starting_offsets", self.starting_offsets),
            "startingTimestamp": ("starting_time", time_ms),
            "startingOffsetsByTimestamp": ("starting_time", times_ms),
            FALLBACK_OPTION: (
                "starting_time_fallback",
                self.starting_time_fallback if has_fallback else None,
            ),
            "endingOffsets": ("ending_offsets", self.ending_offsets),
            **{
                option: ("losses", getattr(self.losses, name))
                for name, option in LOSS_OPTIONS.items()
                if getattr(self.losses, name) != getattr(LossPolicy(), name)
            },
            GROUP_OPTION: ("group_id", group),
            "includeHeaders": ("headers", None if "includeHeaders" in texts else self.headers),
            "maxOffsetsPerTrigger": ("max_offsets_per_trigger", self.max_offsets_per_trigger),
            "maxBytesPerTask": ("max_bytes_per_task", self.max_bytes_per_task),
            "minPartitions": ("min_partitions", self.min_partitions),
            "metadata.prefix": ("metadata_prefix", self.metadata_prefix or None),
            "value.mode": ("mode", None if form is None else form.mode),
            "key.prefix": ("key_prefix", None if self.key is None else self.key_prefix),
        }

    def _refuse_twice(self, arguments: Collection[str]) -> None:
        names = {name.lower() for name in (*arguments, "kafka.bootstrap.servers")}
        for name in self.options:
            if name.lower() in names:
                raise OptionError(f"options: {name!r} is set by an argument already: say it once")


def _pattern_text(pattern: object) -> str | None:
    """Return the text of a pattern with the flags inside; None: topics are named otherwise."""
    if not isinstance(pattern, re.Pattern):
        return None
    if not isinstance(pattern.pattern, str):
        raise OptionError(f"topics={pattern!r}: expected a pattern of text, re.compile('…')")
    letters = {re.I: "i", re.M: "m", re.S: "s", re.X: "x", re.A: "a"}
    flags = "".join(letter for flag, letter in letters.items() if pattern.flags & flag)
    return f"(?{flags}){pattern.pattern}" if flags else pattern.pattern


def _start_times(start: Times | None) -> tuple[int | None, dict[str, dict[int, int]] | None]:
    """Return a start's time of all partitions, and its times by topic and partition, in ms."""
    match start:
        case None:
            return None, None
        case datetime():
            return _ms(start), None
        case by_topic:
            return None, {
                topic: {partition: _ms(at) for partition, at in times.items()}
                for topic, times in by_topic.items()
            }


def _moment_of(given: Any) -> Any:
    """Return a time that is given as text; anything else as it is."""
    if not isinstance(given, str):
        return given
    try:
        return datetime.fromisoformat(given)
    except ValueError:
        raise ValueError("a datetime, or a text such as '2026-11-27T09:00:00Z'") from None


def _ms(at: datetime) -> int:
    if at.tzinfo is None:
        raise OptionError(
            f"starting_time={at!r} has no time zone: give it one, e.g. datetime(…, tzinfo=UTC)"
        )
    return round(at.timestamp() * 1000)


def _check_formats(value: Format | Text | None, key: Format | None) -> None:
    """Refuse formats that cannot be read, or not together.

    Raises:
        OptionError: a format lacks its schema, or has options for writing; or the modes differ.
    """
    if value is not None:
        value.check_for_reading()
    if key is None:
        return
    if key.schema is None:
        raise OptionError(
            f"key={type(key).__name__}(): reading keys needs the schema=, e.g. 'user string'"
        )
    if value is not None and key.mode != value.mode:
        raise OptionError(
            f"key={type(key).__name__}(mode={key.mode!r}), and the value has mode {value.mode!r}: "
            f"a record has one mode. Give both the same"
        )
    key.check_for_reading()


def _completed(part: str, form: Form, texts: ParsedOptions) -> Form:
    """Return the format of a value or key with the login at its registry that `options` name.

    Raises:
        OptionError: `options` name another part, or one that the format has.
    """
    named = [name for name in texts.given if name.startswith(f"{part}.")]
    for name in named:
        login = LOGIN_OPTIONS.get(name.removeprefix(f"{part}."), "")
        if getattr(form, login, "") is not None:
            raise OptionError(
                f"options: {name!r}: the format of the {part} is set by an argument already, "
                f"{part}={type(form).__name__}(…): say it there"
            )
        form = replace(form, **{login: texts[name]})
    return form
