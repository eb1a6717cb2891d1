"""Every option of the data source, once: name, type, default, meaning, example.

Parsing, error messages and the page "Reading from Kafka" are made from this table. The names are
those of Spark's own Kafka connector where it has the option, else Flink's, so that a query needs
one word changed.
"""

from dataclasses import dataclass

from tallystick.formats import MODES
from tallystick.sink.timeouts import TRANSACTION_TIMEOUT_MIN_MS, TRANSACTION_TIMEOUT_MS
from tallystick.source import losses

KAFKA_PREFIX = "kafka."
GROUP_OPTION = "kafka.group.id"
VALUE_FORMATS = ("raw", "string", "json", "avro")


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Args:
        name: as users write it; case does not matter.
        kind: its type and unit, in words.
        default: in words.
        meaning: what it does, in a sentence or two.
        example: a value.
        section: the heading that it stands under.
        only: "stream" or "batch" where the other refuses it.
    """

    name: str
    kind: str
    default: str
    meaning: str
    example: str
    section: str
    only: str | None = None


def choices(*names: str) -> str:
    """The type of an option that takes one of a few words."""
    return " \\| ".join(f"`{name}`" for name in names)


_COUNT = "whole number from 1"
_FLAG = choices("true", "false")
_MS = "ms since 1970"
_PER_PARTITION = "JSON: topic → partition → "
_WHAT = "What to read"
_START = "Where to start and stop"
_RATE = "How much at a time"
_VALUES = "What a record becomes"
_WORLD = "When the topics change"
_GROUP = "The consumer group"
_OFFSETS = choices("earliest", "latest", "committed") + f", or {_PER_PARTITION}offset"

OPTIONS = (
    Option("subscribe", "topic names, by comma", "one of three",
           "Read these topics, all partitions. One of `subscribe`, `subscribePattern` and `assign` has to be given.",
           "flights,orders", _WHAT),
    Option("subscribePattern", "regular expression (Python's)", "one of three",
           "Read every topic whose whole name matches, also those that are created later. Kafka's internal topics never match.",
           "flights-.*", _WHAT),
    Option("assign", "JSON: topic → partitions", "one of three", "Read exactly these partitions.",
           '{"flights": [0, 1]}', _WHAT),
    Option("partition.discovery.interval.ms", "ms", "300000",
           "How often to look for new partitions and topics; 0 or less: only when a query starts. What is found later is read from its first offset.",
           "10000", _WHAT, "stream"),
    Option("startingOffsets", _OFFSETS, "latest for a stream, earliest for a batch",
           "Where a new query starts; a restarted one goes on where it was. In JSON -2 means earliest and -1 latest; partitions that it leaves out start at the default. `committed`: where `kafka.group.id` stands.",
           '{"flights": {"0": 23, "1": -2}}', _START),
    Option("committed.fallback", choices("fail", "earliest", "latest"), "fail",
           "For `startingOffsets=committed`: where a partition starts in which the group has committed nothing.", "earliest", _START),
    Option("startingTimestamp", _MS, "not set", "Start at the first record at or after this time, in every partition.",
           "1700000000000", _START),
    Option("startingOffsetsByTimestamp", f"{_PER_PARTITION}{_MS}", "not set",
           "Start at the first record at or after a time of each partition.", '{"flights": {"0": 1700000000000}}', _START),
    Option("startingOffsetsByTimestampStrategy", choices("error", "latest"), "error",
           "What to do where no record is as late as the starting time.", "latest", _START),
    Option("endingOffsets", choices("latest") + f", or {_PER_PARTITION}offset", "latest for a batch, never for a stream",
           "Where reading ends, this offset not included. A stream remembers it in its checkpoint and, under the trigger `availableNow`, ends there; partitions found later are not read.",
           '{"flights": {"0": 50, "1": -1}}', _START),
    Option("endingTimestamp", _MS, "not set", "End before the first record at or after this time, in every partition; at the end of the log where there is none.",
           "1700000000000", _START),
    Option("endingOffsetsByTimestamp", f"{_PER_PARTITION}{_MS}", "not set", "The same, with a time of each partition.",
           '{"flights": {"0": 1700000000000}}', _START),
    Option("maxOffsetsPerTrigger", f"{_COUNT}, or `all`", "1000000; in a pipeline what fits into a second, or into the trigger's interval",
           "The most that one micro-batch spans; a backlog becomes several. Each partition gets its share in proportion to what it has waiting, and at least one offset. `all`: no limit, as in Spark's connector by default.", "100000", _RATE, "stream"),
    Option("maxBytesPerTask", _COUNT, "67108864 (64 MiB)",
           "Rows that a keyed task of a pipeline holds in memory at a time. What is more goes to a file on its host, and is processed some key groups at a time; the rows of one key group stay together. Epochs are made so small that this is rare.", "16777216", _RATE, "stream"),
    Option("minOffsetsPerTrigger", _COUNT, "1", "Wait until so many offsets are there, or `maxTriggerDelay` has passed. Not with the trigger `availableNow`.",
           "10000", _RATE, "stream"),
    Option("maxTriggerDelay", "duration: `500ms`, `30s`, `15m`, `1h`", "15m", "The longest that `minOffsetsPerTrigger` may hold a micro-batch back.", "1m", _RATE, "stream"),
    Option("minPartitions", _COUNT, "one task per partition", "Cut large partitions into ranges until there are about so many. A DataFrame's rows are then no longer in order within a partition, nor is what a query writes of them. In a pipeline they are: it cuts only where an exchange puts the pieces in order again, that of a keyed step or of `KafkaSink(transactions=\"epoch\")` as the only sink.",
           "16", _RATE),
    Option("value.format", choices(*VALUE_FORMATS), "raw",
           "`raw`: the value stays binary; `string`: UTF-8 text; `json`, `avro`: the fields of `value.schema` become columns (Avro in Confluent's wire format).", "json", _VALUES),
    Option("value.schema", "Spark DDL", "none", "The fields to read; `json` and `avro` need it. What a record has beyond them is ignored, what it lacks is null.",
           "dest string, dep_delay double", _VALUES),
    Option("value.mode", choices(*MODES), "failfast",
           "What a malformed value does. `failfast`: stop, and name the record; `permissive`: a row of nulls with the bytes in `_corrupt_record`; `dropmalformed`: leave it out, counted in the log; `deadletter`: write it to the sink's dead-letter topic in the same transaction (pipelines only).",
           "permissive", _VALUES),
    Option("value.registry.url", "URL", "not set", "For `avro`: a schema registry with Confluent's interface; user and password may stand in the URL.", "http://registry:8081", _VALUES),
    Option("value.registry.user.info", "`user:password`", "not set", "Credentials for the registry, if they do not stand in its URL.", "reader:secret", _VALUES),
    Option("value.registry.ca", "path", "the system's", "PEM certificates that the registry's is signed with.", "/etc/ssl/registry.pem", _VALUES),
    Option("value.registry.file", "path", "not set", "For `avro`: instead of a registry, a JSON file `{\"1\": <schema>, …}` of schemas by id, or a folder of files `1.avsc`, …. Every worker reads it.", "schemas.json", _VALUES),
    Option("includeHeaders", _FLAG, "false", "Add the column `headers`.", "true", _VALUES),
    Option("metadata.columns", "names, by comma, or `none`", "all", "Which of Kafka's columns there are beside the value: `key`, `topic`, `partition`, `offset`, `timestamp`, `timestampType`. Spark cannot leave out what a query does not use, so naming what you need makes reading cheaper.",
           "key,offset", _VALUES),
    Option("metadata.prefix", "text", "empty", "Put before the names of Kafka's own columns when a value has fields of the same name.", "kafka_", _VALUES),
    Option("when.expired", choices(*losses.ON_EXPIRED), "fail",
           "Records were deleted before they were read. `skip`: go on at the first that is left; the log, `skipped` in the offsets and the metrics say from where to where.", "skip", _WORLD),
    Option("when.removed", choices(*losses.ON_REMOVED), "fail",
           "A topic is gone. `drop`: go on without it; `keep`: hold its position between epochs for `when.removed.keep.ms` in case it comes back, then drop it; an epoch that was planned before fails.", "drop", _WORLD),
    Option("when.removed.keep.ms", "ms", str(losses.KEEP_MS), "See `when.removed`.", "60000", _WORLD),
    Option("when.recreated", choices(*losses.ON_RECREATED), "fail",
           "A topic was deleted and created again (its id differs, KIP-516). `restart`: read the new one from its beginning.", "restart", _WORLD),
    Option("when.truncated", choices(*losses.ON_TRUNCATED), "fail",
           "A log ends before the next offset to read (unclean leader election). `resume`: go on at its new end.", "resume", _WORLD),
    Option("failOnDataLoss", _FLAG, "true", "`false` is short for `skip`, `drop`, `restart` and `resume` in the options above.", "false", _WORLD),
    Option(GROUP_OPTION, "text", "none; in a pipeline `tallystick-<name>`",
           "The consumer group under which Kafka's own tools see positions and lag. Nobody joins it.", "billing", _GROUP),
    Option("commit.offsets.on.checkpoint", _FLAG, "true",
           "Commit the positions to the group: inside the epoch's transaction where the sink is `KafkaSink` on the same cluster, else right after the micro-batch was committed.", "false", _GROUP, "stream"),
)  # fmt: skip

BY_NAME = {option.name.lower(): option for option in OPTIONS}

GUARANTEES = ("exactly_once", "at_least_once", "none")
WRITTEN_FORMATS = ("raw", "json")
_ROWS = "What is written"
_COMMIT = "When it becomes visible"

WRITE_OPTIONS = (
    Option("topic", "topic name", "none: column `topic`", "Where all rows go. Without it each row names its topic in a column `topic`.", "counts", _ROWS),
    Option("value.format", choices(*WRITTEN_FORMATS), "raw",
           "`raw`: the columns of Spark's own Kafka sink: `value`, and if present `key`, `topic`, `partition`, `headers`, `timestamp`; `json`: the value is made of all columns, one JSON object per row.", "json", _ROWS),
    Option("key.field", "column name", "none", "For `value.format=json`: the column whose text is the record's key.", "dest", _ROWS),
    Option("compression", choices("none", "gzip", "snappy", "lz4", "zstd"), "lz4", "How record batches are compressed.", "zstd", _ROWS),
    Option("batch.bytes", "bytes, from 1024", "900000", "How large a record batch becomes before compression.", "100000", _ROWS),
    Option("guarantee", choices(*GUARANTEES), "exactly_once", "What may happen after a fault; see \"Writing exactly once\".", "at_least_once", _COMMIT),
    Option("transaction.timeout.ms", f"ms, from {TRANSACTION_TIMEOUT_MIN_MS}", str(TRANSACTION_TIMEOUT_MS),
           "When Kafka aborts a transaction that nobody has committed: longer than the longest time that the query may be down, and no longer than the brokers' `transaction.max.timeout.ms`. `kafka.delivery.timeout.ms` and `kafka.request.timeout.ms` follow from it unless they are set.", "600000", _COMMIT),
    Option("max.recovery.time.ms", "ms", "not set", "How long the query may be down without losing what was decided and not yet committed: refused at the start where the transaction timeout does not allow it.", "300000", _COMMIT),
    Option("transactional.id.prefix", "text", "`tallystick-<id of the query>`", "What the transactional ids of tasks begin with. No other query may have it, on whatever checkpoint: the two would abort each other's transactions.", "billing-counts", _COMMIT),
    Option("token.topic", "topic name", "`topic`", "An existing topic under whose name the proofs of commits are kept; needed where rows name their topics themselves.", "counts", _COMMIT),
    Option("accept", "words, by comma", "none", "Decisions to state for one start, as an error message names them.", "lost-output-of-epoch-7", _COMMIT),
)  # fmt: skip
"""Those of `writeStream.format("tallystick")`, beside the client settings with `kafka.`."""
WRITE_BY_NAME = {option.name.lower(): option for option in WRITE_OPTIONS}
