"""The settings of a Kafka sink, as one value: made once from what the user gave, held by plans."""

from collections.abc import Mapping
from dataclasses import dataclass

from tallystick.codec.formats import Format
from tallystick.codec.rows import RowLayout
from tallystick.codec.values import ValueWriter
from tallystick.epoch.transactional_ids import ID_PREFIX
from tallystick.epoch.two_phase import Guarantee, Timeout
from tallystick.kafka.config import TRANSACTION_TIMEOUT_MS, KafkaConfig
from tallystick.kafka.registry import value_writer
from tallystick.values import TopicLimit

BATCH_BYTES = 900_000
"""Below the 1,048,588 that brokers take by default (message.max.bytes)."""
BATCH_BYTES_MIN = 1024
COMPRESSION = "lz4"
TIMEOUT_WARNING_SHARE: float = Timeout._field_defaults["warn_share"]


@dataclass(frozen=True, slots=True)
class KafkaOutput:
    """The topic that rows go to, how they become records, and their guarantee; picklable."""

    config: KafkaConfig
    """The configuration of the client of the cluster."""
    topic: str | None
    """The topic of all rows; None: each row names its topic in column `topic`."""
    token_topic: str
    """The existing topic under whose partition 0 the tokens are kept."""
    value: Format | None = None
    """The format of a value made of all columns; None: the value is a column."""
    key: str | tuple[str, ...] | None = None
    """With `value`: the column, or the columns, of the record's key."""
    key_format: Format | None = None
    """The format of a key that is made of columns."""
    compression: str = COMPRESSION
    """One of `CODEC_IDS`."""
    batch_bytes: int = BATCH_BYTES
    """The size of a record batch before compression; smaller where the topic takes less."""
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE
    """The guarantee for rows after a fault."""
    transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS
    """The time after which Kafka aborts a transaction that is still open."""
    timeout_warning_share: float = TIMEOUT_WARNING_SHARE
    """The share of the timeout from which on a late commit is logged as a warning."""
    max_recovery_ms: int | None = None
    """The time a pipeline may be down without losing prepared rows; None: not checked."""
    dead_letter_topic: str | None = None
    """The topic for records that cannot be parsed; None: there may be none."""
    id_prefix: str = ID_PREFIX
    """Put before the pipeline's name in transactional ids."""

    @property
    def timeout(self) -> Timeout:
        """The timeout of the sink's transactions, with the share from which on to warn."""
        return Timeout(self.transaction_timeout_ms, self.timeout_warning_share)

    @property
    def topics(self) -> frozenset[str]:
        """The topics that are known before the first row: of output and of dead letters."""
        return frozenset(filter(None, (self.topic, self.dead_letter_topic)))

    def rows(
        self,
        partition_counts: Mapping[str, int],
        batch_limits: Mapping[str, TopicLimit] | None = None,
        *,
        registers: bool = True,
    ) -> RowLayout:
        """Return how rows become records.

        In the driver: a schema is looked up in its registry, once per process.

        Args:
            partition_counts: the number of partitions of each topic.
            batch_limits: the record batches that a topic takes, where it is known; None: of no
                topic.
            registers: False: only to check columns, so no schema is registered.

        Raises:
            OptionError: the registry does not have the schema that is to be written.
            RegistryUnavailableError: it does not answer.
        """
        value = self._writer(self.value, "value", registers)
        key = self._writer(self.key_format, "key", registers)
        limits = batch_limits or {}
        return RowLayout(partition_counts, self.topic, value, self.key, key, limits)

    def _writer(self, form: Format | None, part: str, registers: bool) -> ValueWriter | None:
        if form is None:
            return None
        return value_writer(form, f"{self.topic}-{part}", registers=registers)
