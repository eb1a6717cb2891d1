"""Declare an option once: its name, type, default and doc.

Parsing, the messages of errors and the options pages of the docs follow from the declaration. Spark
hands options over as texts, and so do users in `KafkaSource(options=…)`; arguments of `KafkaSource`
and `KafkaSink` are values, and only checked. The table of the source stands in `options.source`.
Names are those of Spark's own Kafka connector where it has the option, else Flink's, so that a
query needs one word changed. Settings of the Kafka client, with `kafka.` before their names, pass
through.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from numbers import Integral
from typing import Any, Self

from tallystick.arguments import near
from tallystick.epoch.transactional_ids import text_problem
from tallystick.errors import OptionError
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.java_settings import say_passed_over
from tallystick.source.subscription import topic_problem

KAFKA_PREFIX = "kafka."
GROUP_OPTION = "kafka.group.id"


@dataclass(frozen=True, slots=True)
class Kind:
    """The type of an option."""

    words: str
    """The type and its unit, for the docs."""
    read: Callable[[str], Any]
    """Return the value of a text; a ValueError says what was expected."""
    accept: Callable[[Any], Any] | None = None
    """Return a value that is no text, as the option has it; a ValueError says what was expected.

    None: the option's values are texts.
    """

    def value(self, name: str, setting: object) -> Any:
        """Return the value of the setting `name`, given as a text or as a value.

        Raises:
            OptionError: the text or the value is not of this type.
        """
        try:
            if self.accept is None or isinstance(setting, str):
                return self.read(str(setting))
            return self.accept(setting)
        except ValueError as error:
            raise OptionError(f"{name}={setting!r}: {error}") from None


def whole(words: str, least: int | None = None, unit: str = "") -> Kind:
    """Return the type of an option that takes a whole number."""
    bound = "" if least is None else f" from {least}"
    expected = f"expected a whole number{bound}{unit and f' ({unit})'}"

    def accept(number: object) -> int:
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise ValueError(expected)
        if least is not None and int(number) < least:
            raise ValueError(expected)
        return int(number)

    def read(text: str) -> int:
        text = text.strip()
        if not re.fullmatch(r"-?[0-9]+", text):
            raise ValueError(expected)
        return accept(int(text))

    return Kind(words, read, accept)


def one_of(*names: str) -> Kind:
    """Return the type of an option that takes one of a few words, in any case."""

    def read(text: str) -> str:
        word = text.strip().lower()
        if word not in names:
            raise ValueError(f"expected one of {', '.join(names)}.{near(word, names)}")
        return word

    return Kind(choices(*names), read)


def choices(*names: str) -> str:
    """Return a few words as the docs show them."""
    return " \\| ".join(f"`{name}`" for name in names)


def text_of(words: str) -> Kind:
    """Return the type of an option that takes any text."""
    return Kind(words, str)


def _checked(words: str, problem_of: Callable[[str], str]) -> Kind:
    def read(text: str) -> str:
        if problem := problem_of(text):
            raise ValueError(problem)
        return text

    return Kind(words, read)


TOPIC = _checked("topic name", topic_problem)
GROUP = _checked("text", lambda text: text and text_problem(text))
"""A consumer group; an empty one is none."""


def _read_flag(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise ValueError("expected true or false")
    return word == "true"


def _accept_flag(flag: object) -> bool:
    if not isinstance(flag, bool):
        raise ValueError("expected true or false")
    return flag


FLAG = Kind(choices("true", "false"), _read_flag, _accept_flag)
COUNT = whole("whole number from 1", 1)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the data source."""

    name: str
    """The name that users write; case does not matter."""
    kind: Kind
    default: Any
    """The value where nothing is set."""
    meaning: str
    """Its effect, in a sentence or two."""
    example: str
    section: str
    """The heading of the option in the docs."""
    shown_default: str = ""
    """The default in words; "": the value says it."""
    field: str = ""
    """The field of the parsed options that takes the value as it is; "": it takes part in one."""
    only: str | None = None
    """"stream" or "batch" where the other refuses it."""

    def read(self, text: str) -> Any:
        """Return the option's value, given as text.

        Raises:
            OptionError: the text has not the option's type.
        """
        return self.kind.value(self.name, text)

    @property
    def row(self) -> str:
        """Its row in the docs."""
        default = self.shown_default or str(self.default)
        only = f" Only for a {self.only}." if self.only else ""
        what = f"**`{self.name}`** {self.meaning}{only}"
        return f"| {what} | {self.kind.words} | {default} | `{self.example}` |"


@dataclass(frozen=True, slots=True)
class ParsedOptions:
    """The settings of a source with their types, by the names of options; `in` says which are set.

    Some come from texts, others from arguments of `KafkaSource`.
    """

    table: "OptionTable"
    given: Mapping[str, Any] = field(repr=False)
    client: Mapping[str, str] = field(repr=False)  # may hold secrets
    """The settings of the Kafka client, without their prefix."""

    def __getitem__(self, name: str) -> Any:
        return self.given[name] if name in self.given else self.table[name].default

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def with_arguments(self, arguments: Mapping[str, Any], bootstrap_servers: str) -> Self:
        """Return the settings with those that are arguments, typed, and with the brokers."""
        client = {**self.client, "bootstrap.servers": bootstrap_servers}
        return replace(self, given={**self.given, **arguments}, client=client)

    @property
    def fields(self) -> dict[str, Any]:
        """The values of options that become fields unchanged."""
        return {option.field: self[option.name] for option in self.table.options if option.field}


@dataclass(frozen=True, slots=True)
class OptionTable:
    """The options of the source, beside the client's settings with `kafka.`."""

    options: tuple[Option, ...]
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Options of Spark's connector that no row depends on, and why they have no effect."""

    def __getitem__(self, name: str) -> Option:
        return next(option for option in self.options if option.name == name)

    def parse(self, options: Mapping[str, str]) -> ParsedOptions:
        """Convert texts to their types.

        Args:
            options: as Spark hands them over; names in any case.

        Raises:
            OptionError: an option is unknown or not of its type.
        """
        by_name = {option.name.lower(): option for option in self.options}
        without_effect = {name.lower(): name for name in self.passed_over}
        given: dict[str, Any] = {}
        client: dict[str, str] = {}
        for key, value in options.items():
            name = key.lower()
            if name in by_name:
                given[by_name[name].name] = by_name[name].read(str(value))
            elif name.startswith(KAFKA_PREFIX):
                client[name.removeprefix(KAFKA_PREFIX)] = str(value)
            elif name in without_effect:
                say_passed_over(without_effect[name], self.passed_over[without_effect[name]])
            else:
                raise OptionError(f"unknown option {name!r} of the tallystick {self._hint(name)}")
        return ParsedOptions(self, given, client)

    def _hint(self, name: str) -> str:
        known = {option.name.lower(): option.name for option in self.options}
        if hint := near(name, known.values()):
            return f"source.{hint}"
        return (
            f"source: a setting of the Kafka client is {KAFKA_PREFIX + name!r} here. Known: "
            f"{', '.join([*known.values(), 'kafka.*'])}"
        )

    def page(self) -> str:
        """Return the part of the docs that lists the options, a table per section."""
        head = "| option | type, unit | default | example |\n| --- | --- | --- | --- |"
        return "\n\n".join(
            "\n".join([f"### {section}", "", head, *(option.row for option in options)])
            for section, options in groupby(self.options, key=lambda option: option.section)
        )


def check_servers(what: str, servers: str) -> None:
    """Refuse a text that is no list of brokers.

    Raises:
        OptionError: it is empty, or a broker has no port.
    """
    named = [server for server in servers.split(",") if server.strip()]
    if not named or not all(re.search(r"\S:[0-9]+\s*$", server) for server in named):
        raise OptionError(
            f"{what}(bootstrap_servers={servers!r}): expected brokers, 'host:9092,host:9092'. If "
            f"it comes from a variable of the environment, is that set?"
        )


def client_config(
    bootstrap_servers: str,
    options: Mapping[str, str],
    *,
    transaction_timeout_ms: int | None = None,
) -> KafkaConfig:
    """Return the configuration of a cluster, from settings named as in Spark's connector.

    Args:
        bootstrap_servers: the brokers to begin with.
        options: the settings, with `kafka.` before their names.
        transaction_timeout_ms: of transactions written in the cluster; None: no transactions.

    Raises:
        OptionError: a setting is not known, or contradicts another.
    """
    return KafkaConfig.from_options(
        plain_client_options(bootstrap_servers, options),
        transaction_timeout_ms=transaction_timeout_ms,
    )


def plain_client_options(bootstrap_servers: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of `client_config` under Kafka's own names, the servers among them.

    Raises:
        OptionError: a name does not begin with `kafka.`.
    """
    return {
        name.removeprefix(KAFKA_PREFIX): value
        for name, value in _client_options(bootstrap_servers, options).items()
    }


def _client_options(bootstrap_servers: str, options: Mapping[str, str]) -> dict[str, str]:
    for name in options:
        if not name.startswith(KAFKA_PREFIX):
            raise OptionError(
                f"options: {name!r}: expected names that begin with {KAFKA_PREFIX!r}, as Spark's "
                f"connector has them; everything else is an argument"
            )
    return {"kafka.bootstrap.servers": bootstrap_servers, **options}
