"""The options of `format("tallystick")` as a sink: their table, and the values they make.

To those of a stream Spark adds two of its own: where the checkpoint is, and the name of the query.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tallystick.codec.formats import Json
from tallystick.codec.records.compression import CODEC_IDS
from tallystick.epoch.two_phase import Guarantee
from tallystick.errors import OptionError
from tallystick.kafka.config import (
    TRANSACTION_TIMEOUT_MIN_MS,
    TRANSACTION_TIMEOUT_MS,
    KafkaConfig,
)
from tallystick.kafka.output import (
    BATCH_BYTES,
    BATCH_BYTES_MIN,
    COMPRESSION,
    KafkaOutput,
    SettingNames,
)
from tallystick.options.table import (
    GROUP_OPTION,
    ID,
    TOPIC,
    Kind,
    Option,
    OptionTable,
    ParsedOptions,
    one_of,
    text_of,
    whole,
)

CHECKPOINT = "checkpointLocation"
NAMES = SettingNames("transaction.timeout.ms", "batch.bytes", "max.recovery.time.ms")
_ROWS = "What is written"
_COMMIT = "When it becomes visible"


def _read_words(text: str) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(",")) - {""}


SINK = OptionTable("sink", "write to", (
    Option("topic", TOPIC, None, "Where all rows go. Without it each row names its topic in a column `topic`.",
           "counts", _ROWS, "none: column `topic`", "topic"),
    Option("value.format", one_of("raw", "json"), "raw",
           "`raw`: the columns of Spark's own Kafka sink: `value`, and if present `key`, `topic`, `partition`, `headers`, `timestamp`; `json`: the value is made of all columns, one JSON object per row; without `topic`, if that column says where it goes.", "json", _ROWS),
    Option("key.field", text_of("column name"), None, "For `value.format=json`: the column whose text is the record's key.", "dest", _ROWS, "none"),
    Option("compression", one_of(*CODEC_IDS), COMPRESSION, "How record batches are compressed.", "zstd", _ROWS, field="compression"),
    Option("batch.bytes", whole(f"bytes, from {BATCH_BYTES_MIN}", BATCH_BYTES_MIN), BATCH_BYTES, "How large a record batch becomes before compression.", "100000", _ROWS, field="batch_bytes"),
    Option("guarantee", one_of(*(guarantee.value for guarantee in Guarantee)), Guarantee.EXACTLY_ONCE.value, "What may happen after a fault; see \"Writing exactly once\".", "at_least_once", _COMMIT, only="stream"),
    Option("transaction.timeout.ms", whole(f"ms, from {TRANSACTION_TIMEOUT_MIN_MS}", TRANSACTION_TIMEOUT_MIN_MS), TRANSACTION_TIMEOUT_MS,
           "When Kafka aborts a transaction that nobody has committed: longer than the longest time that the query may be down, or that a batch takes to write, and no longer than the brokers' `transaction.max.timeout.ms`. `kafka.delivery.timeout.ms` and `kafka.request.timeout.ms` follow from it unless they are set.", "600000", _COMMIT, field="transaction_timeout_ms"),
    Option("max.recovery.time.ms", whole("ms", 1), None, "How long the query may be down without losing what was decided and not yet committed: refused at the start where the transaction timeout does not allow it.", "300000", _COMMIT, "not set", "max_recovery_ms", "stream"),
    Option("transactional.id.prefix", ID, None, "What the transactional ids of tasks begin with. No other query may have it, on whatever checkpoint: the two would abort each other's transactions. A batch has the one id `<prefix>-batch`, and aborts what an earlier write of that id left open; without a prefix each write has an id of its own.", "billing-counts", _COMMIT, "`tallystick-<id of the query>`; a batch: `tallystick-batch-<random>`"),
    Option("token.topic", TOPIC, None, "An existing topic under whose name the proofs of commits are kept; needed where rows name their topics themselves.", "counts", _COMMIT, "`topic`", only="stream"),
    Option("accept", Kind("words, by comma", _read_words), frozenset(), "Decisions to state for one start, as an error message names them.", "lost-output-of-epoch-7", _COMMIT, "none", only="stream"),
    Option(CHECKPOINT, text_of("URI"), "", "Spark's own.", "/c", "", only="stream"),
    Option("queryName", text_of("text"), None, "Spark's own.", "q", "", only="stream"),
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options of a `writeStream`, typed."""

    output: KafkaOutput
    """The settings of the sink."""
    checkpoint: str = field(repr=False)  # a URI may hold a key
    """The checkpoint's location, as Spark was given it."""
    query_name: str | None
    """The name of the query; None: it has none."""
    id_prefix: str | None
    """The beginning of all transactional ids of the query; None: one with the query's id."""
    accepted: frozenset[str]
    """Decisions that a person stated for this start."""


def parse_write_options(options: Mapping[str, str]) -> WriteOptions:
    """Check the options of a query and give them their types.

    Args:
        options: as Spark hands them over; names in any case.

    Raises:
        OptionError: an option is unknown, missing, contradictory, or not of its type.
    """
    parsed = SINK.parse(options)
    _check_rows(parsed)
    _check_stream(parsed)
    return WriteOptions(
        output=_output(parsed, parsed["token.topic"] or parsed["topic"]),
        checkpoint=parsed[CHECKPOINT],
        query_name=parsed["queryName"],
        id_prefix=parsed["transactional.id.prefix"],
        accepted=parsed["accept"],
    )


@dataclass(frozen=True, slots=True)
class BatchWriteOptions:
    """The options of a `df.write`, typed."""

    output: KafkaOutput
    """The settings of the sink."""
    id_prefix: str | None
    """The beginning of the transactional id; None: the write has one of its own."""


def parse_batch_write_options(options: Mapping[str, str]) -> BatchWriteOptions:
    """Check the options of a `df.write` and give them their types.

    Args:
        options: as Spark hands them over; names in any case.

    Raises:
        OptionError: an option is unknown, missing, for a stream, or not of its type.
    """
    parsed = SINK.parse(options)
    for name in parsed.given:
        if SINK[name].only == "stream":
            raise OptionError(f"{name} means nothing for df.write: remove it (it is for a stream)")
    _check_rows(parsed)
    return BatchWriteOptions(_output(parsed, ""), parsed["transactional.id.prefix"])


def _output(parsed: ParsedOptions, token_topic: str) -> KafkaOutput:
    return KafkaOutput(
        **parsed.fields,
        config=KafkaConfig.from_options(
            parsed.client, transaction_timeout_ms=parsed["transaction.timeout.ms"]
        ),
        token_topic=token_topic,
        key=parsed["key.field"],
        value=Json() if parsed["value.format"] == "json" else None,
        guarantee=Guarantee(parsed["guarantee"]),
        names=NAMES,
    )


def _check_rows(parsed: ParsedOptions) -> None:
    if "group.id" in parsed.client:
        raise OptionError(f"{GROUP_OPTION} is for reading: a query that writes has none; remove it")
    if "key.field" in parsed and parsed["value.format"] != "json":
        raise OptionError(
            f"key.field={parsed['key.field']!r} names a column for value.format=json; without it, "
            f"the record's key is the column 'key'"
        )


def _check_stream(parsed: ParsedOptions) -> None:
    if not parsed[CHECKPOINT]:  # Spark passes it on only where the query itself names it
        raise OptionError(
            "checkpointLocation is missing: what is committed is decided in the checkpoint, and "
            "Spark does not pass on spark.sql.streaming.checkpointLocation. Name it on the query: "
            '.option("checkpointLocation", "s3a://bucket/counts")'
        )
    if "topic" not in parsed and "token.topic" not in parsed:
        raise OptionError(
            "rows name their topics themselves (there is no option topic), so token.topic has to "
            "name an existing topic under which the proofs of commits are kept"
        )
    guarantee = parsed["guarantee"]
    if "max.recovery.time.ms" in parsed and guarantee != Guarantee.EXACTLY_ONCE.value:
        raise OptionError(
            f"max.recovery.time.ms is for guarantee=exactly_once: with {guarantee} no transaction "
            f"waits for its commit, and no down time is too long. Leave it out"
        )
