"""`KafkaSink`, and the choice of the sink that decides an epoch."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from tallystick.api.file_sink import FileSink
from tallystick.arguments import Settings, checked, not_one_of
from tallystick.codec.formats import REGISTERED, WrittenFormat
from tallystick.codec.records.compression import CODEC_IDS
from tallystick.delta.sink import DeltaSink
from tallystick.epoch.transactional_ids import (
    ID_PREFIX,
    check_name,
    checkpoint_prefix,
    text_problem,
)
from tallystick.epoch.two_phase import (
    Guarantee,
    Owner,
    RunFacts,
    Sink,
    TwoPhaseCommitSink,
    guarantee_problem,
)
from tallystick.errors import OptionError
from tallystick.iceberg.sink import IcebergSink
from tallystick.kafka.config import TRANSACTION_TIMEOUT_MIN_MS, TRANSACTION_TIMEOUT_MS
from tallystick.kafka.output import (
    BATCH_BYTES,
    BATCH_BYTES_MIN,
    COMPRESSION,
    TIMEOUT_WARNING_SHARE,
    KafkaOutput,
)
from tallystick.kafka.task_sink import KafkaTaskSink
from tallystick.options.table import (
    TOPIC,
    Kind,
    check_servers,
    client_config,
    one_of,
    whole,
)
from tallystick.pipeline.topology import OutputTopology, SharingSink
from tallystick.source.subscription import INTERNAL_TOPICS, topic_problem
from tallystick.spark.streaming.foreach_batch import RunnerPerRun, foreach_batch_runner, write_batch
from tallystick.tasks.outputs import OF_MAIN, Selection

EPOCH, TASK = "epoch", "task"
UID_LENGTH_MAX = 60
_KINDS: Mapping[str, Kind] = {
    "topic": TOPIC,
    "compression": one_of(*CODEC_IDS),
    "batch_bytes": whole("bytes", BATCH_BYTES_MIN),
    "transaction_timeout_ms": whole("ms", TRANSACTION_TIMEOUT_MIN_MS),
    "max_recovery_ms": whole("ms", 1),
}
"""The types of arguments that `KafkaSink.output` takes as they are."""


@checked
@dataclass(frozen=True)
class KafkaSink:
    """A topic to write to, exactly once.

    The last step of a pipeline, or the function of `writeStream.foreachBatch` of any query; or
    `write` writes a DataFrame. Outside of a pipeline the rows have the columns of Spark's own Kafka
    sink (value, and if present key, topic, partition, headers, timestamp), unless `value` is set.

    The page "Writing exactly once" says which mode and guarantee to choose, and what each risks.

    Args:
        bootstrap_servers: `host:port,host:port`.
        topic: where rows go; None: each row names its topic in column `topic`.
        key: with a `value` format, the column whose text is the record's key; or, with
            `key_format`, the columns of the key.
        key_format: Json(), Avro(...), JsonSchema(...) or Protobuf(...): writes the columns of
            `key`; None: the text of its only column.
        value: Json(): the value is made of all columns, one JSON object per row; Avro(registry=…),
            JsonSchema(registry=…), Protobuf(registry=…): a record of a schema that the registry
            has, in Confluent's wire format; all without `topic`, if that column says where the row
            goes. None: columns `key`, `value`, … are written as they are.
        compression: none, gzip, snappy, lz4 or zstd.
        batch_bytes: the size of a record batch before compression.
        transactions: "epoch": one transaction per epoch over all partitions, which decides it for
            the whole pipeline; several such sinks of a pipeline share it. "task": one per task,
            without an exchange of rows; committed after the decision, so a down time longer than
            the timeout may lose it.
        guarantee: "exactly_once", "at_least_once" (rows are visible at once; an epoch that runs
            again writes them again) or "none" (nothing is waited for; rows may be lost too).
        transaction_timeout_ms: the longest that an epoch may take to write; readers of the output
            wait no longer than this for a pipeline that died. The client's own timeouts follow from
            it unless `options` sets them.
        timeout_warning_share: a commit that comes later than at this share of the timeout, counted
            from the transaction's first row, is warned about.
        max_recovery_ms: with transactions="task": how long the pipeline may be down between the end
            of an epoch's work and the commit without losing output; a start is refused if the
            timeout is too short for it. None: not checked.
        dead_letter_topic: the topic for records that cannot be parsed, inside the same
            transaction; for pipelines whose source has `mode="deadletter"`.
        token_topic: an existing topic under whose name the pipeline's token is kept; None: `topic`.
        transactional_id_prefix: put before the pipeline's name in transactional ids, and in the
            groups of its tokens, for clusters whose ACLs ask for one.
        uid: names the sink in the pipeline, for as long as its transactions may be pending; None:
            `kafka-1` for the first one, and so on; those of a side output begin with its name,
            `alerts-kafka-1`.
        name: for foreachBatch only: the pipeline's name; None: that of the query, or its id.
        accept: for foreachBatch and `write`: decisions to state, as an error message names them.
        options: further client settings under the names of Spark's connector.

    Raises:
        OptionError: a setting is of the wrong type, or contradicts another.
    """

    bootstrap_servers: str
    _: KW_ONLY
    topic: str | None = None
    key: str | Sequence[str] | None = None
    key_format: WrittenFormat | None = None
    value: WrittenFormat | None = None
    compression: str = COMPRESSION
    batch_bytes: int = BATCH_BYTES
    transactions: str = EPOCH
    guarantee: str = Guarantee.EXACTLY_ONCE.value
    transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS
    timeout_warning_share: float = TIMEOUT_WARNING_SHARE
    max_recovery_ms: int | None = None
    dead_letter_topic: str | None = None
    token_topic: str | None = None
    transactional_id_prefix: str = ID_PREFIX
    uid: str | None = None
    name: str | None = None
    accept: Collection[str] = ()
    options: Settings = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_servers("KafkaSink", self.bootstrap_servers)
        if self.topic is None and self.token_topic is None:
            raise OptionError(
                "KafkaSink(): topic= is missing. Where rows name their topic in a column 'topic', "
                "token_topic= has to name an existing one, under which the pipeline's token is kept"
            )
        if (self.key or self.key_format) and self.value is None:
            given = f"key={self.key!r}" if self.key else f"key_format={self.key_format!r}"
            raise OptionError(
                f"{given} names a column for value=Json() or another format; without it, "
                f"the record's key is the column 'key'"
            )
        self._check_key()
        self._check_names()
        for form, part in ((self.value, "value"), (self.key_format, "key")):
            if isinstance(form, REGISTERED):
                form.check_for_writing()
                if self.topic is None and form.subject is None:
                    raise OptionError(
                        f"rows name their topics themselves (topic is None), so "
                        f"{type(form).__name__}(subject=...) "
                        f"must name where the registry has the schema of the {part}"
                    )
        if self.transactions not in (EPOCH, TASK):
            raise not_one_of("transactions", self.transactions, (EPOCH, TASK), of="KafkaSink")
        if problem := guarantee_problem(self.guarantee):
            raise OptionError(problem)
        if not 0 < self.timeout_warning_share <= 1:
            raise OptionError(
                f"timeout_warning_share={self.timeout_warning_share}: expected more than 0, and 1 "
                f"at most"
            )
        if self.max_recovery_ms is not None and self.transactions == EPOCH:
            raise OptionError(
                "max_recovery_ms is for transactions='task': with one transaction per epoch an "
                "epoch that timed out runs again, and nothing is lost however long it takes"
            )
        if self.max_recovery_ms is not None and self.guarantee != Guarantee.EXACTLY_ONCE.value:
            raise OptionError(
                f"max_recovery_ms is for guarantee='exactly_once': with {self.guarantee!r} no "
                f"transaction waits for its commit, and no down time is too long. Leave it out"
            )
        _ = self.output

    def _check_names(self) -> None:
        """Raise `OptionError` for a name that Kafka does not allow, or that cannot be seen."""
        for name in ("topic", "token_topic", "dead_letter_topic"):
            topic = getattr(self, name)
            if topic is None:
                continue
            if problem := topic_problem(topic):
                raise OptionError(f"{name}={topic!r}: {problem}")
            if topic in INTERNAL_TOPICS:
                raise OptionError(
                    f"KafkaSink({name}={topic!r}): this topic is Kafka's own, and takes records of "
                    f"brokers only: name another"
                )
        prefix = self.transactional_id_prefix
        if problem := text_problem(prefix):
            raise OptionError(f"transactional_id_prefix={prefix!r}: {problem}")
        if self.name is not None:
            check_name(self.name)

    def _check_key(self) -> None:
        """Raise `OptionError` unless key and key_format go together."""
        if self.key_format is None:
            if self.key is None or isinstance(self.key, str):
                return
            raise OptionError(
                f"key={self.key!r} names several columns: set key_format=Json(), Avro(...), "
                f"which makes one key of them; or name the one column whose text is the key"
            )
        if not self.key or (not isinstance(self.key, str) and "" in self.key):
            raise OptionError(
                f"key_format={self.key_format!r} writes the columns that key= names, and it is "
                f"{self.key!r}: name them, e.g. key=['user', 'day']"
            )

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Write a micro-batch in one Kafka transaction; for `foreachBatch`.

        A function of your own around it calls one sink once per micro-batch, or not at all, and
        does not catch what it raises.

        Raises:
            SecondCallError: a sink was called in this micro-batch already.
            DataLossError: going on needs a person's decision.
            TallystickError: the epoch was aborted.
        """
        self._runner(rows, batch_id)

    def write(self, rows: DataFrame) -> None:
        """Write a DataFrame in a single Kafka transaction: all rows or none.

        Called twice, it writes the rows twice. A transaction that a killed driver left open ends
        with `transaction_timeout_ms`. `name` and `uid` have no effect.

        Raises:
            OptionError: a setting cannot work; all problems are named.
            TallystickError, or what a function behind the rows raised: nothing is visible.
        """
        if not self.decides:
            raise OptionError(
                f"KafkaSink(transactions={self.transactions!r}, guarantee={self.guarantee!r}).write"
                f"(rows): a batch is one transaction of the guarantee 'exactly_once', since nobody "
                f"would come back to commit the rest of it. Leave both out"
            )
        write_batch(topology_of([self]), rows, frozenset(self.accept))

    @cached_property
    def _runner(self) -> RunnerPerRun:
        new_runner = foreach_batch_runner(
            self, lambda: topology_of([self]), self.name, frozenset(self.accept)
        )
        # cached_property has no lock, and two queries may come here at once: the first one stays.
        runner: RunnerPerRun = self.__dict__.setdefault("_runner", new_runner)
        return runner

    @cached_property
    def output(self) -> KafkaOutput:
        """The settings as a value that is sent to tasks in place of the sink."""
        token_topic = self.token_topic or self.topic
        assert token_topic is not None, "one of them is set"
        given = {name: getattr(self, name) for name in _KINDS}
        checked: dict[str, Any] = {
            name: None if value is None else _KINDS[name].value(name, value)
            for name, value in given.items()
        }
        return KafkaOutput(
            **checked,
            config=client_config(
                self.bootstrap_servers,
                self.options,
                transaction_timeout_ms=self.transaction_timeout_ms,
            ),
            token_topic=token_topic,
            value=self.value,
            key=self.key if self.key is None or isinstance(self.key, str) else tuple(self.key),
            key_format=self.key_format,
            guarantee=Guarantee(self.guarantee),
            timeout_warning_share=self.timeout_warning_share,
            dead_letter_topic=self.dead_letter_topic,
            id_prefix=self.transactional_id_prefix,
        )

    @property
    def decides(self) -> bool:
        """True if the sink's transaction can decide epochs."""
        return self.transactions == EPOCH and self.guarantee == Guarantee.EXACTLY_ONCE.value

    @property
    def kind(self) -> str:
        """See `epoch.two_phase.Sink`."""
        return "kafka"

    def open(self, owner: Owner, facts: RunFacts) -> TwoPhaseCommitSink:
        """See `epoch.two_phase.Sink`; for a sink that does not decide."""
        return KafkaTaskSink(
            self.output,
            owner,
            facts,
            id_prefix=checkpoint_prefix(
                f"{self.transactional_id_prefix}{owner.pipeline}", owner.lineage
            ),
            earlier_prefixes=frozenset(
                checkpoint_prefix(earlier_id, owner.lineage) for earlier_id in facts.earlier_ids
            ),
        )

    def check_columns(self, columns: pa.Schema) -> None:
        """Refuse the columns of the last step if the sink cannot make records of them.

        Raises:
            OptionError: a column is missing or of a type that Kafka cannot store; or a registry
                does not have the schema of the rows.
            RegistryUnavailableError: the registry does not answer.
        """
        try:
            self.output.rows({}, registers=False).check(columns)
        except OptionError as error:
            raise OptionError(f"KafkaSink(topic={self.topic!r}): {error}") from error


def check_for_pipeline(sinks: Sequence[Sink]) -> None:
    """Refuse settings that are for `foreachBatch` only, and have no effect in a pipeline.

    Raises:
        OptionError: a sink has such a setting.
    """
    for sink in sinks:
        if not isinstance(sink, KafkaSink):
            continue
        if sink.name is not None:
            raise OptionError(
                f"KafkaSink(name={sink.name!r}) is for foreachBatch: here the pipeline's name "
                f"counts, Pipeline(name). Leave it out"
            )
        if sink.accept:
            raise OptionError(
                "KafkaSink(accept=...) is for foreachBatch and write: here decisions are stated at "
                "the start, Pipeline.start(accept=...). Move it there"
            )


def check_columns(topology: OutputTopology, columns: Mapping[str, pa.Schema | None]) -> None:
    """Refuse outputs whose rows cannot become records or files of their sink.

    Args:
        topology: the sinks of a pipeline.
        columns: the columns of each output; None: not known before the first rows.

    Raises:
        OptionError: see `KafkaSink.check_columns`.
    """
    for uid, sink in topology.by_uid:
        selection = topology.selection(uid)
        known = None if selection.functions else columns.get(selection.output)
        if isinstance(sink, KafkaSink | FileSink | DeltaSink | IcebergSink) and known is not None:
            sink.check_columns(known)


def topology_of(
    sinks: Sequence[Sink], selections: Sequence[Selection] = (), dropped: tuple[str, ...] = ()
) -> OutputTopology:
    """Return the topology of sinks: the deciding sink, the sinks in its transaction, and the rest.

    Args:
        sinks: of a pipeline, those of the main output first: the first that can decide does.
        selections: the rows of each sink; empty: all rows of the main output.
        dropped: outputs that go to no sink.

    Raises:
        OptionError: two could decide and cannot share a transaction, or two have one uid.
    """
    selections = selections or [OF_MAIN] * len(sinks)
    by_uid = _by_uid(sinks, selections)
    deciders = [
        (uid, sink) for uid, sink in by_uid.items() if isinstance(sink, KafkaSink) and sink.decides
    ]
    uid, decider = deciders[0] if deciders else ("", None)
    for sharing, sink in deciders[1:]:
        assert decider is not None, "it is the first of them"
        _check_shared(uid, decider, sharing, sink)
    kafka = [sink for sink in sinks if isinstance(sink, KafkaSink)]
    letters = [sink.dead_letter_topic for sink in kafka if sink.dead_letter_topic is not None]
    if len(letters) > 1:
        raise OptionError(f"several sinks with a dead_letter_topic ({', '.join(letters)}): one may")
    if letters and deciders and all(sink.dead_letter_topic is None for _, sink in deciders):
        raise OptionError(
            f"dead_letter_topic={letters[0]!r}: malformed records go with the epoch's own "
            f"transaction: name the topic in the KafkaSink that has transactions='epoch'"
        )
    own = dict(deciders)
    return OutputTopology(
        decider=None if decider is None else decider.output,
        sink=decider,
        uid=uid,
        others=tuple((name, sink) for name, sink in by_uid.items() if name not in own),
        dead_letter_topic=letters[0] if letters else None,
        id_prefix=(decider or kafka[0]).transactional_id_prefix if kafka else ID_PREFIX,
        sharing=tuple(SharingSink(name, sink, sink.output) for name, sink in deciders[1:]),
        selections=dict(zip(by_uid, selections, strict=True)),
        dropped=dropped,
    )


_SHARED = (
    "bootstrap_servers",
    "options",
    "transaction_timeout_ms",
    "timeout_warning_share",
    "transactional_id_prefix",
)
"""The settings of the connection and of the transaction, which sinks that share it have alike."""


def _check_shared(uid: str, decider: KafkaSink, sharing: str, sink: KafkaSink) -> None:
    """Refuse a second sink with transactions='epoch' whose settings need another transaction."""
    for name in _SHARED:
        one, other = getattr(decider, name), getattr(sink, name)
        if one != other:
            # A value may be a password.
            values = "" if name == "options" else f" ({one!r} and {other!r})"
            raise OptionError(
                f"KafkaSinks {uid!r} and {sharing!r} both have transactions='epoch', and so share "
                f"the epoch's transaction, but their {name} differ{values}: make them the same. "
                f"For another cluster, or another timeout, set transactions='task' in {sharing!r}"
            )
    token_topic = decider.output.token_topic
    if sink.token_topic not in (None, token_topic):
        raise OptionError(
            f"KafkaSinks {uid!r} and {sharing!r} share the epoch's transaction and its token, "
            f"which is kept under topic {token_topic!r}: set token_topic={token_topic!r} in "
            f"{sharing!r}, or leave it out where topic= is set"
        )


def _by_uid(sinks: Sequence[Sink], selections: Sequence[Selection]) -> dict[str, Sink]:
    count: Counter[str] = Counter()
    by_uid: dict[str, Sink] = {}
    for sink, selection in zip(sinks, selections, strict=True):
        # By the output: a sink that is added to another one renames none of it.
        kind = f"{selection.output}-{sink.kind}" if selection.output else sink.kind
        count[kind] += 1
        uid = sink.uid or f"{kind}-{count[kind]}"
        plain = uid.replace(".", "").replace("_", "").replace("-", "")
        if not (plain.isascii() and plain.isalnum()) or len(uid) > UID_LENGTH_MAX:
            raise OptionError(
                f"uid={uid!r}: expected up to {UID_LENGTH_MAX} letters, digits, '.', '_' and '-'"
            )
        if uid in by_uid:
            raise OptionError(f"two sinks have the uid {uid!r}: give each its own")
        by_uid[uid] = sink
    return by_uid
