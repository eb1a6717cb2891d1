"""What epochs are written to: the cluster whose transaction decides, if any, and other sinks."""

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from tallystick.checkpoint import manifest as m
from tallystick.checkpoint.facts import Identity
from tallystick.checkpoint.manifest import CHECKPOINT, KAFKA, Manifest
from tallystick.checkpoint.protocol import Event
from tallystick.decision_log import KafkaPlace, newest_entry, transactional_ids
from tallystick.fan_out import Branch, CollectPlan, FanOut
from tallystick.handover import Handover, Surroundings
from tallystick.job import Driver, Listener, Target
from tallystick.kafka import rights
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.lingering import OPEN
from tallystick.kafka.written import transaction_state
from tallystick.participants import OpenSinks
from tallystick.ports import Broker
from tallystick.sink.preflight import Settings, check, check_all, refuse
from tallystick.sink.rights import Right, committing, writing
from tallystick.sink.rows import RowLayout
from tallystick.sink.transaction import Producer
from tallystick.sink.transactional_ids import ID_PREFIX, parse, token_group
from tallystick.sink.two_phase import Owner, RunFacts, Sink, Timeout, TwoPhaseCommitSink
from tallystick.spark.cluster import Cluster
from tallystick.spark.deciding_clusters import Closed, Clusters
from tallystick.spark.epoch_age import EpochAge
from tallystick.spark.session import log_what_is_missing
from tallystick.storage import DELETES_AT_A_TIME, FileStorage, SystemClock
from tallystick.task import BatchFunction, EncodePlan, WritePlan
from tallystick.topic_partition import TopicPartition

logger = logging.getLogger(__name__)

COUNTED_FOR_S = 1.0
"""How long the number of a topic's partitions is taken for what it was."""


@dataclass(frozen=True)
class SinkSettings:
    """What the shell needs of a sink; see `KafkaSink` for the meaning of each."""

    config: KafkaConfig
    topic: str | None
    token_topic: str
    json: bool
    key: str | None
    compression: str
    batch_bytes: int
    transaction_timeout_ms: int
    dead_letter_topic: str | None = None
    id_prefix: str = ID_PREFIX
    warn_share: float = 0.8


@dataclass(frozen=True)
class Written:
    """What a pipeline writes to.

    Args:
        decider: the sink whose Kafka transaction decides; None: the checkpoint decides.
        sink: the same, as another run may have had it: with transactions of its tasks.
        uid: of that.
        others: the other sinks, by uid.
        dead_letter_topic: where one of them takes malformed records; None: nowhere.
        kafka: how to reach the cluster that decided before, if the checkpoint decides now.
        id_prefix: what transactional ids of the pipeline begin with, before its name.
    """

    decider: SinkSettings | None
    sink: Sink | None = None
    uid: str = ""
    others: tuple[tuple[str, Sink], ...] = ()
    dead_letter_topic: str | None = None
    kafka: KafkaConfig | None = None
    id_prefix: str = ID_PREFIX


class SinkCluster:
    """The driver's side of a sink: its broker, and the plans that it gives to tasks."""

    def __init__(self, settings: SinkSettings) -> None:
        self.settings = settings
        self.broker = KafkaBroker(settings.config, settings.transaction_timeout_ms)
        self.age: EpochAge | None = None
        self._counts: Mapping[str, int] = {}
        self._counted_s = -COUNTED_FOR_S

    def target(self, pipeline: str) -> Target:
        """Where the pipeline of this name keeps its decision."""
        transactional_id = f"{self.settings.id_prefix}{pipeline}"
        return Target(
            transactional_id=transactional_id,
            token_group=token_group(transactional_id),
            token_partition=TopicPartition(self.settings.token_topic, 0),
            cluster_id=self.broker.cluster_id(),
        )

    def encode_plan(self, task_count: int, functions: tuple[BatchFunction, ...]) -> EncodePlan:
        """How this epoch's tasks encode, with the partitions that the topics have now.

        Args:
            task_count: how many may write.
            functions: what the rows pass through before.
        """
        counts = self._partition_counts()
        partition_count, dead_letters = sum(counts.values()), None
        topic = self.settings.dead_letter_topic
        if topic is not None:
            dead_letters = RowLayout(self.broker.partition_counts([topic]), topic)
            partition_count += dead_letters.partition_counts[topic]
        return EncodePlan(
            rows=RowLayout(counts, self.settings.topic, self.settings.json, self.settings.key),
            target_count=min(task_count, partition_count),
            compression=self.settings.compression,
            batch_bytes=self.settings.batch_bytes,
            functions=functions,
            dead_letters=dead_letters,
        )

    def write_plan(self, producer: Producer) -> WritePlan:
        """How this epoch's tasks write."""
        if self.age is not None:
            self.age.begin(producer)
        return WritePlan(self.settings.config, producer, self.broker.transaction_version)

    def watched(self, pipeline: str, listener: Listener) -> EpochAge:
        """Tells of epochs that take nearly too long, and passes events on."""
        timeout = Timeout(self.settings.transaction_timeout_ms, self.settings.warn_share)
        return EpochAge(pipeline, timeout, self._begun_ms, listener)

    def _begun_ms(self, transactional_id: str) -> int:
        state = transaction_state(self.broker.client, transactional_id)
        is_open = state is not None and state.transaction_state == OPEN
        return max(0, int(state.transaction_start_time_ms)) if is_open else 0

    def _partition_counts(self) -> Mapping[str, int]:
        if self.settings.topic is not None:
            # What a second ago was true will do: a partition that was added is used a second later.
            if time.monotonic() - self._counted_s > COUNTED_FOR_S:
                self._counts = self.broker.partition_counts([self.settings.topic])
                self._counted_s = time.monotonic()
            return self._counts
        # Rows name topics of their own: one that was created just now must be known.
        return self.broker.partition_counts(self.broker.topics())


def preflight(
    cluster: SinkCluster,
    pipeline: str,
    conf: Mapping[str, str],
    trigger_interval_ms: int | None,
    shown: Iterable[Right] = (),
) -> None:
    """Check cluster, rights, topics and settings before anything starts.

    Args:
        cluster: that decides.
        pipeline: its name.
        conf: the settings of the Spark whose tasks write.
        trigger_interval_ms: how long Spark waits between two epochs; None: it does not.
        shown: the rights that showing the sources' positions takes.

    Raises:
        OptionError: something cannot work; all problems are named.
    """
    settings, broker = cluster.settings, cluster.broker
    topics = {each for each in (settings.topic, settings.dead_letter_topic) if each is not None}
    target = cluster.target(pipeline)
    own = committing(target.transactional_id, target.token_group, settings.token_topic)
    missing = rights.missing(broker.client, (*own, *writing(topics), *shown))
    if not missing:
        broker.partition_counts(topics | {settings.token_topic})
    findings = check(
        broker.cluster_facts(),
        Settings(
            transaction_timeout_ms=settings.transaction_timeout_ms,
            delivery_timeout_ms=settings.config.delivery_timeout_ms,
            batch_bytes=settings.batch_bytes,
            trigger_interval_ms=trigger_interval_ms,
            speculation=is_speculative(conf),
        ),
    )
    for warning in findings.warnings:
        logger.warning("%s", warning)
    refuse(findings.problems, missing, settings.config.sasl_username)


def is_speculative(conf: Mapping[str, str]) -> bool:
    """Whether Spark may run attempts of a task beside each other."""
    return conf.get("spark.speculation", "false").lower() == "true"


def may_leave_strays(conf: Mapping[str, str]) -> bool:
    """Return whether attempts of a task may end without a word to be known by their number.

    Those that lose a speculation; and those of an earlier attempt of their stage, since Spark
    counts a task's attempts from 0 in each.
    """
    return is_speculative(conf) or conf.get("spark.stage.maxConsecutiveAttempts", "4") != "1"


class Sinks:
    """All sinks of one run of a pipeline, on the driver.

    Args:
        written: what they are.
        pipeline: its name.
        cluster: whose tasks write.
        trigger_interval_ms: how long Spark waits between two epochs; None: it does not.
        tasks: how many write, if they are more than Spark runs at a time.
    """

    def __init__(
        self,
        written: Written,
        pipeline: str,
        cluster: Cluster,
        trigger_interval_ms: int | None,
        tasks: int = 0,
    ) -> None:
        self._written = written
        self._pipeline = pipeline
        self._spark = cluster
        tasks = max(tasks, cluster.parallelism)
        self._facts = RunFacts(trigger_interval_ms, tasks)
        self._are_checked = False
        self._open: dict[str, TwoPhaseCommitSink] = {}
        self._owners: dict[str, Owner] = {}
        self._to_close: list[Closed] = []
        self.cluster = None if written.decider is None else SinkCluster(written.decider)
        if self.cluster is not None:
            self._to_close.append(self.cluster.broker)

    def check(self, shown: Iterable[Right] = ()) -> None:
        """Check clusters, rights, topics, tables and settings before anything starts.

        Args:
            shown: the rights that showing the sources' positions takes, in the deciding cluster.

        Raises:
            OptionError: something cannot work; all problems of all sinks are named.
        """

        def try_out(uid: str, sink: Sink) -> None:
            sink.open(Owner(self._pipeline, uid, ""), self._facts).close()

        checks = [partial(try_out, uid, sink) for uid, sink in self._written.others]
        if self.cluster is not None:
            interval_ms = self._facts.trigger_interval_ms
            decides = partial(
                preflight, self.cluster, self._pipeline, self._spark.conf, interval_ms, shown
            )
            checks.insert(0, decides)
        check_all(checks)
        log_what_is_missing(
            self._spark.conf,
            self._spark.context.applicationId,
            has_session=self._spark.has_session,
        )
        self._are_checked = True

    def make_driver(
        self, identity: Identity, storage: FileStorage, *, listener: Listener | None = None
    ) -> Driver:
        """The driver of one query run, with the real ports."""
        target = self._target()
        newest = _newest_manifests(storage)
        ids = transactional_ids(storage) | {each.producer.transactional_id for each in newest}
        earlier_ids = ids - {target.transactional_id}
        facts = replace(self._facts, earlier_ids=earlier_ids, are_checked=self._are_checked)
        for uid, sink in self._written.others:
            self._owners[uid] = Owner(identity.pipeline, uid, identity.lineage)
            self._open[uid] = sink.open(self._owners[uid], _of_sink(facts, uid, newest))
            self._to_close.append(self._open[uid])
        settling = {**self._open, **self._of_another_mode(identity, facts, newest, storage)}
        owners = {uid: Owner(identity.pipeline, uid, identity.lineage) for uid in settling}
        self._tell_of_gone(_named(newest) - settling.keys())
        make = partial(Driver, deletes_at_a_time=DELETES_AT_A_TIME)
        if self.cluster is not None:
            self.cluster.age = self.cluster.watched(self._pipeline, listener or _ignore)
            listener = self.cluster.age
        if listener is not None:
            make = partial(make, listener=listener)
        return make(
            identity,
            target,
            self._decider(target, identity, storage),
            storage,
            SystemClock(),
            participants=OpenSinks(settling, owners) if settling else None,
            decided_by=CHECKPOINT if self.cluster is None else KAFKA,
        )

    def last(self, functions: tuple[BatchFunction, ...], checkpoint_id: int) -> EncodePlan | FanOut:
        """Where the rows of an epoch go, and what they pass through before."""
        if not self._open:
            assert self.cluster is not None, "something is written to"
            return self.cluster.encode_plan(self._spark.parallelism, functions)
        encode = (
            None if self.cluster is None else self.cluster.encode_plan(self._spark.parallelism, ())
        )
        letters = {
            uid
            for uid, sink in self._written.others
            if encode is None and getattr(sink, "dead_letter_topic", None) is not None
        }
        branches = [
            Branch(self._owners[uid], sink.plan(), uid in letters)
            for uid, sink in self._open.items()
        ]
        return FanOut(tuple(branches), encode, checkpoint_id, functions, self._may_leave_strays)

    @cached_property
    def _may_leave_strays(self) -> bool:
        return may_leave_strays(self._spark.conf)

    def write_plan(self, producer: Producer) -> WritePlan | CollectPlan:
        """How an epoch's last tasks write, or tell what was written."""
        return CollectPlan() if self.cluster is None else self.cluster.write_plan(producer)

    def close(self) -> None:
        """The run is over: close connections, and leave everything else as it is."""
        for each in self._to_close:
            try:
                each.close()
            except Exception as error:
                logger.warning("pipeline %s: a connection is not closed: %s", self._pipeline, error)
        self._to_close.clear()

    def _of_another_mode(
        self,
        identity: Identity,
        facts: RunFacts,
        newest: list[Manifest],
        storage: FileStorage,
    ) -> dict[str, TwoPhaseCommitSink]:
        """The deciding sink as its tasks' own transactions need it, if there may be some.

        Also of a run that died before its first manifest: it began with the log of decisions.
        """
        sink, uid = self._written.sink, self._written.uid
        logged = newest_entry(storage) is not None
        if sink is None or not (uid in _named(newest) or logged):
            return {}
        owner = Owner(identity.pipeline, uid, identity.lineage)
        opened = sink.open(owner, _of_sink(facts, uid, newest))
        self._to_close.append(opened)
        return {uid: opened}

    def _tell_of_gone(self, uids: Collection[str]) -> None:
        """What they have decided is refused by the recovery; nobody looks for anything else."""
        if uids:
            logger.warning(
                "pipeline %r: the newest epochs wrote to sinks that it does not have any more: %s. "
                "What an epoch that was not decided has left open there is not given up: in Kafka "
                "it holds up readers until it times out, in PostgreSQL it keeps its locks. If they "
                "did not end in order, add them again, with these uids, for one start; or see "
                "`tallystick transactions list`",
                self._pipeline,
                ", ".join(sorted(uids)),
            )

    def _target(self) -> Target:
        if self.cluster is not None:
            return self.cluster.target(self._pipeline)
        transactional_id = f"{self._written.id_prefix}{self._pipeline}"
        group = token_group(transactional_id)
        return Target(transactional_id, group, TopicPartition(group, 0), cluster_id="")

    def _decider(self, target: Target, identity: Identity, storage: FileStorage) -> Broker:
        """Kafka or the log; with whatever decided before, as long as it may know more."""
        clusters = Clusters(
            None if self.cluster is None else self.cluster.broker,
            [sink for _, sink in self._written.others],
            identity,
            self._to_close,
        )
        around = Surroundings(
            storage,
            SystemClock(),
            manifests=lambda: _newest_manifests(storage),
            reach=clusters.reach,
            assumed=clusters.assumed,
        )
        kafka = None
        if self.cluster is not None:
            place = KafkaPlace(target.transactional_id, target.cluster_id)
            kafka = (place, self.cluster.broker)
        return Handover(kafka, target.token_partition, identity, around)


def _ignore(_: Event) -> None:
    return


def _of_sink(facts: RunFacts, uid: str, newest: list[Manifest]) -> RunFacts:
    """With the prefixes of the sink's own transactions: each KafkaSink may have had one."""
    parsed = [
        (parse(committable.name.rsplit(":", 2)[0]), each.lineage)  # see Producer.transaction_name
        for each in newest
        for committable in each.committables
        if committable.sink == uid
    ]
    own = {found.prefix.removesuffix(f"/{lineage}") for found, lineage in parsed if found}
    return replace(facts, earlier_ids=facts.earlier_ids | own)


def _named(manifests: Iterable[Manifest]) -> set[str]:
    """The uids of the sinks with transactions in any of them."""
    return {each.sink for manifest in manifests for each in manifest.committables}


def _newest_manifests(storage: FileStorage) -> list[Manifest]:
    """Those of the two newest epochs that have any, of all attempts."""
    paths = m.manifests(storage.names(m.FOLDER))
    epochs = sorted({m.epoch_of(path) for path in paths})[-2:]
    found = [(path, storage.get(path)) for path in paths if m.epoch_of(path) in epochs]
    return [m.decode(data, path) for path, data in found if data is not None]
