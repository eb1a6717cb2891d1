"""The two ends of a pipeline as values: what is read, and what is written to."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property

from pyspark.sql import DataFrame

from tallystick.errors import OptionError
from tallystick.json_format import Json
from tallystick.kafka.compression import CODEC_IDS
from tallystick.kafka.config import KafkaConfig
from tallystick.options import GROUP_OPTION, KAFKA_PREFIX, parse_source_options
from tallystick.spark.epochs import SinkSettings, foreach_batch_runner
from tallystick.spark.query import EpochRunner

Offsets = str | Mapping[str, Mapping[int, int]]
"""`"earliest"`, `"latest"`, or offsets per topic and partition."""


@dataclass(frozen=True)
class KafkaSource:
    """Topics to read, as a pipeline's first step.

    Args:
        bootstrap_servers: `host:port,host:port`.
        topics: a list of names, or a compiled pattern that a whole name must match.
        assignment: exactly these partitions per topic, instead of `topics`.
        starting_offsets: where a new pipeline starts; a restarted one goes on where it was.
        max_offsets_per_trigger: the most that one epoch spans; None: all there is.
        value: how values are parsed; None: they stay binary, in column `value`.
        metadata_prefix: put before the names of Kafka's own columns when `value` is parsed.
        headers: whether to read headers, into column `headers`.
        fail_on_data_loss: stop when records expired before they were read; False: go on with what
            is left.
        group_id: the consumer group under which Kafka's tools see the progress; None: the
            pipeline's name with `tallystick-` before it; "": nowhere.
        options: further client settings under the names of Spark's connector:
            `kafka.security.protocol`, `kafka.sasl.jaas.config`, ….

    Raises:
        OptionError: a setting is of the wrong type, or contradicts another.
    """

    bootstrap_servers: str
    _: KW_ONLY
    topics: Sequence[str] | re.Pattern[str] | None = None
    assignment: Mapping[str, Collection[int]] | None = None
    starting_offsets: Offsets = "latest"
    max_offsets_per_trigger: int | None = None
    value: Json | None = None
    metadata_prefix: str = ""
    headers: bool = False
    fail_on_data_loss: bool = True
    group_id: str | None = None
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.topics, str):
            raise OptionError(
                f"topics={self.topics!r}: expected a list, [{self.topics!r}], or a compiled "
                f"pattern, re.compile({self.topics!r})"
            )
        parse_source_options(self.to_options("check"), streaming=True)
        _ = self.config

    def to_options(self, pipeline: str) -> dict[str, str]:
        """The options of `readStream.format("tallystick")` that mean the same."""
        group = f"tallystick-{pipeline}" if self.group_id is None else self.group_id
        options = {
            **_client_options(self.bootstrap_servers, self.options),
            GROUP_OPTION: group,
            "startingOffsets": _offsets_text(self.starting_offsets),
            "includeHeaders": str(self.headers),
            "failOnDataLoss": str(self.fail_on_data_loss),
        }
        if isinstance(self.topics, re.Pattern):
            options["subscribePattern"] = self.topics.pattern
        elif self.topics is not None:
            options["subscribe"] = ",".join(self.topics)
        if self.assignment is not None:
            options["assign"] = json.dumps({t: list(ps) for t, ps in self.assignment.items()})
        if self.max_offsets_per_trigger is not None:
            options["maxOffsetsPerTrigger"] = str(self.max_offsets_per_trigger)
        if self.value is not None:
            options |= _json_options(self.value, self.metadata_prefix)
        return options

    @property
    def config(self) -> KafkaConfig:
        """How to reach the cluster."""
        return _config(self.bootstrap_servers, self.options)


@dataclass(frozen=True)
class KafkaSink:
    """A topic to write to, exactly once: one Kafka transaction per epoch, over all partitions.

    The last step of a pipeline, or the function of `writeStream.foreachBatch` of any query; there
    the rows have the columns of Spark's own Kafka sink (value, and if present key, topic,
    partition, headers, timestamp).

    Args:
        bootstrap_servers: `host:port,host:port`.
        topic: where rows go; None: each row names its topic in column `topic`.
        key: with `value=Json()`, the column whose text is the record's key.
        value: Json(): the value is made of all columns, one JSON object per row; None: columns
            `key`, `value`, … are written as they are.
        compression: none, gzip, snappy, lz4 or zstd.
        batch_bytes: how large a record batch becomes before compression.
        transaction_timeout_ms: the longest that an epoch may take to write; readers of the output
            wait no longer than this for a pipeline that died.
        token_topic: an existing topic under whose name the pipeline's token is kept; None: `topic`.
        name: for foreachBatch only: the pipeline's name; None: that of the query, or its id.
        accept: for foreachBatch only: decisions to state, as an error message names them.
        options: further client settings under the names of Spark's connector.

    Raises:
        OptionError: a setting is of the wrong type, or contradicts another.
    """

    bootstrap_servers: str
    _: KW_ONLY
    topic: str | None = None
    key: str | None = None
    value: Json | None = None
    compression: str = "lz4"
    batch_bytes: int = 900_000
    transaction_timeout_ms: int = 300_000
    token_topic: str | None = None
    name: str | None = None
    accept: Collection[str] = ()
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.compression not in CODEC_IDS:
            raise OptionError(
                f"compression={self.compression!r}: expected one of {', '.join(CODEC_IDS)}"
            )
        if self.topic is None and self.token_topic is None:
            raise OptionError(
                "rows name their topics themselves (topic is None), so token_topic= must name an "
                "existing topic under which the pipeline's token is kept"
            )
        if self.key is not None and self.value is None:
            raise OptionError(
                f"key={self.key!r} names a column for value=Json(); without it, the record's key "
                f"is the column 'key'"
            )
        if self.batch_bytes < 1024:
            raise OptionError(f"batch_bytes={self.batch_bytes}: expected at least 1024")
        _ = self.config

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Write one micro-batch in one transaction; for `foreachBatch`."""
        self._runner(rows, batch_id)

    @cached_property
    def _runner(self) -> EpochRunner:
        return foreach_batch_runner(self.settings, self.name, frozenset(self.accept))

    @property
    def config(self) -> KafkaConfig:
        """How to reach the cluster."""
        return _config(self.bootstrap_servers, self.options)

    @property
    def settings(self) -> SinkSettings:
        """What the shell needs of the sink."""
        token_topic = self.token_topic or self.topic
        assert token_topic is not None, "one of them is set"
        return SinkSettings(
            config=self.config,
            topic=self.topic,
            token_topic=token_topic,
            json=self.value is not None,
            key=self.key,
            compression=self.compression,
            batch_bytes=self.batch_bytes,
            transaction_timeout_ms=self.transaction_timeout_ms,
        )


def _client_options(bootstrap_servers: str, options: Mapping[str, str]) -> dict[str, str]:
    for name in options:
        if not name.startswith(KAFKA_PREFIX):
            raise OptionError(
                f"options: {name!r}: expected names that begin with {KAFKA_PREFIX!r}, as Spark's "
                f"connector has them; everything else is an argument"
            )
    return {"kafka.bootstrap.servers": bootstrap_servers, **options}


def _config(bootstrap_servers: str, options: Mapping[str, str]) -> KafkaConfig:
    return KafkaConfig.from_options(
        {
            name.removeprefix(KAFKA_PREFIX): value
            for name, value in _client_options(bootstrap_servers, options).items()
        }
    )


def _offsets_text(offsets: Offsets) -> str:
    return offsets if isinstance(offsets, str) else json.dumps(offsets)


def _json_options(value: Json, prefix: str) -> dict[str, str]:
    if value.schema is None:
        raise OptionError(
            'value=Json(): reading needs a schema, e.g. Json("dest string, n bigint")'
        )
    return {
        "value.format": "json",
        "value.schema": value.schema,
        "value.mode": value.mode,
        "metadata.prefix": prefix,
    }
