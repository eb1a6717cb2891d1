"""The options of `writeStream.format("tallystick")`, checked and typed.

`option_table` says what there is. Spark adds two of its own: where the checkpoint is, and the name
of the query.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from tallystick.errors import OptionError
from tallystick.option_table import (
    GROUP_OPTION,
    GUARANTEES,
    KAFKA_PREFIX,
    WRITE_BY_NAME,
    WRITE_OPTIONS,
    WRITTEN_FORMATS,
)
from tallystick.sink.timeouts import TRANSACTION_TIMEOUT_MIN_MS, TRANSACTION_TIMEOUT_MS

CHECKPOINT = "checkpointlocation"
QUERY_NAME = "queryname"
_OF_SPARK = (CHECKPOINT, QUERY_NAME)
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
BATCH_BYTES = 900_000
BATCH_BYTES_MIN = 1024


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What the options of a `writeStream` say; each is explained in `option_table`.

    `query_name` is None where the query has none.
    """

    client: Mapping[str, str] = field(repr=False)  # may hold secrets
    checkpoint: str = field(repr=False)  # a URI may hold a key
    token_topic: str
    query_name: str | None = None
    topic: str | None = None
    json: bool = False
    key: str | None = None
    compression: str = "lz4"
    batch_bytes: int = BATCH_BYTES
    transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS
    guarantee: str = "exactly_once"
    recovery_ms_max: int | None = None
    id_prefix: str | None = None
    accepted: frozenset[str] = frozenset()


def parse_write_options(options: Mapping[str, str]) -> WriteOptions:
    """Check the options of a query and give them their types.

    Args:
        options: as Spark hands them over; names in any case.

    Raises:
        OptionError: an option is unknown, missing, contradictory, or not of its type.
    """
    given = {name.lower(): str(value) for name, value in options.items()}
    plain = {name: value for name, value in given.items() if not name.startswith(KAFKA_PREFIX)}
    _refuse_unknown(plain)
    is_json = _choice(plain, "value.format", WRITTEN_FORMATS, "raw") == "json"
    if "key.field" in plain and not is_json:
        raise OptionError(
            f"key.field={plain['key.field']!r} names a column for value.format=json; without it, "
            f"the record's key is the column 'key'"
        )
    topic = _name(plain, "topic")
    return WriteOptions(
        client=_client(given),
        checkpoint=_checkpoint(plain),
        token_topic=_token_topic(plain, topic),
        query_name=plain.get(QUERY_NAME),
        topic=topic,
        json=is_json,
        key=plain.get("key.field"),
        compression=_choice(plain, "compression", COMPRESSIONS, "lz4"),
        batch_bytes=_whole(plain, "batch.bytes", BATCH_BYTES, BATCH_BYTES_MIN),
        transaction_timeout_ms=_whole(
            plain, "transaction.timeout.ms", TRANSACTION_TIMEOUT_MS, TRANSACTION_TIMEOUT_MIN_MS
        ),
        guarantee=_choice(plain, "guarantee", GUARANTEES, "exactly_once"),
        recovery_ms_max=_recovery_ms(plain),
        id_prefix=_name(plain, "transactional.id.prefix"),
        accepted=_words(plain, "accept"),
    )


def _client(given: Mapping[str, str]) -> dict[str, str]:
    if GROUP_OPTION in given:
        raise OptionError(f"{GROUP_OPTION} is for reading: a query that writes has none; remove it")
    client = {
        name.removeprefix(KAFKA_PREFIX): value
        for name, value in given.items()
        if name.startswith(KAFKA_PREFIX)
    }
    if not client.get("bootstrap.servers"):
        raise OptionError(
            "kafka.bootstrap.servers is missing: expected the brokers to write to, "
            'e.g. .option("kafka.bootstrap.servers", "host1:9092,host2:9092")'
        )
    return client


def _refuse_unknown(plain: Mapping[str, str]) -> None:
    for name in plain:
        if name in WRITE_BY_NAME or name in _OF_SPARK:
            continue
        near = difflib.get_close_matches(name, WRITE_BY_NAME, n=1)
        known = ", ".join([*(option.name for option in WRITE_OPTIONS), "kafka.*"])
        hint = f"did you mean {WRITE_BY_NAME[near[0]].name!r}?" if near else f"known: {known}"
        raise OptionError(f"unknown option {name!r} of the tallystick sink: {hint}")


def _checkpoint(plain: Mapping[str, str]) -> str:
    """Spark passes it on only where the query itself names it."""
    location = plain.get(CHECKPOINT)
    if not location:
        raise OptionError(
            "checkpointLocation is missing: what is committed is decided in the checkpoint, and "
            "Spark does not pass on spark.sql.streaming.checkpointLocation. Name it on the query: "
            '.option("checkpointLocation", "s3a://bucket/counts")'
        )
    return location


def _token_topic(plain: Mapping[str, str], topic: str | None) -> str:
    token_topic = _name(plain, "token.topic") or topic
    if token_topic is None:
        raise OptionError(
            "rows name their topics themselves (there is no option topic), so token.topic has to "
            "name an existing topic under which the proofs of commits are kept"
        )
    return token_topic


def _recovery_ms(plain: Mapping[str, str]) -> int | None:
    name = "max.recovery.time.ms"
    if name not in plain:
        return None
    if _choice(plain, "guarantee", GUARANTEES, "exactly_once") != "exactly_once":
        raise OptionError(
            f"{name} is for guarantee=exactly_once: with another one no transaction waits for its "
            f"commit, and no down time is too long. Leave it out"
        )
    return _whole(plain, name, 0, 1)


def _name(plain: Mapping[str, str], option: str) -> str | None:
    name = plain.get(option)
    if name is not None and not name.strip():
        raise OptionError(f"{option} is empty: give a name, or leave it out")
    return name


def _words(plain: Mapping[str, str], option: str) -> frozenset[str]:
    words = (word.strip() for word in plain.get(option, "").split(","))
    return frozenset(word for word in words if word)


def _choice(plain: Mapping[str, str], name: str, choices: tuple[str, ...], default: str) -> str:
    text = plain.get(name, default).strip().lower()
    if text not in choices:
        raise OptionError(f"{name}={text!r}: expected one of {', '.join(choices)}")
    return text


def _whole(plain: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = plain.get(name, str(default)).strip()
    if not text.isdecimal() or int(text) < least:
        raise OptionError(f"{name}={text!r}: expected a whole number from {least}")
    return int(text)
