"""The sinks of a run, and the outputs that steps declare for them, with all types known.

One cluster's transaction decides, if any; the other sinks commit after its decision.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tallystick.arguments import near
from tallystick.checkpoint.decision_log import DecisionLog, transactional_ids
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.codec.rows import RowLayout
from tallystick.epoch.manifest import Identity, Manifest
from tallystick.epoch.protocol import ignore
from tallystick.epoch.tokens import Token, newest_token
from tallystick.epoch.transactional_ids import BATCH, is_batch_name, parse, token_group
from tallystick.epoch.two_phase import Owner, RunFacts, Sink, TwoPhaseCommitSink
from tallystick.errors import OptionError
from tallystick.expressions.binding import Condition, Projection
from tallystick.kafka.audit import transaction_state
from tallystick.kafka.broker import KafkaBroker
from tallystick.kafka.broker_settings import check_broker_settings
from tallystick.kafka.cluster import BatchLimits, cluster_facts, partition_counts, topics
from tallystick.kafka.group_offsets import fetch
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.preflight import (
    Right,
    check,
    check_all,
    missing_rights,
    refuse,
    rights_to_commit,
    rights_to_write,
)
from tallystick.kafka.transactions import OPEN
from tallystick.kafka.writer import KafkaProduce
from tallystick.pipeline.keyed import columns_of, output_after
from tallystick.pipeline.listeners import PIPELINES, EpochAge
from tallystick.pipeline.topology import OutputTopology
from tallystick.ports import Clock, Storage
from tallystick.run.driver import Driver, Listener
from tallystick.run.participants import KeepsDue, Note, OnLingering, OpenSinks
from tallystick.run.transaction_decider import Target, TransactionDecider
from tallystick.spark.cluster import Cluster
from tallystick.spark.context import log_what_is_missing
from tallystick.spark.engine import DataFrameEngine
from tallystick.spark.gang.messages import dumps
from tallystick.spark.tasks import BroadcastPlans, Unread
from tallystick.storage.file_storage import DELETES_AT_A_TIME, SYSTEM_CLOCK
from tallystick.tasks.epoch_plan import NO_STEPS, PipelinePlan
from tallystick.tasks.hints import name_of
from tallystick.tasks.keyed import KeyedStep
from tallystick.tasks.outputs import (
    OF_DEAD_LETTERS,
    OF_MAIN,
    DeclaredFunction,
    Filter,
    Selection,
    check_output_name,
)
from tallystick.tasks.read import BatchFunction, EncodePlan, Route, WritePlan
from tallystick.tasks.steps import Columns, MapBatches, Process, Step
from tallystick.tasks.write import Branch, CollectPlan, FanOut
from tallystick.values import Producer, TopicPartition

logger = logging.getLogger(__name__)

COUNTED_FOR_S = 1.0
"""The time for which the number of a topic's partitions is not asked for again."""


class SinkCluster:
    """The driver's side of the sinks that share the epoch's transaction: broker, plans for tasks.

    Args:
        output: of the deciding sink.
        written: the outputs with their rows; empty: the main output to the deciding sink.
    """

    def __init__(
        self, output: KafkaOutput, written: tuple[tuple[KafkaOutput, Selection], ...] = ()
    ) -> None:
        self.output = output
        self._written = written or ((output, OF_MAIN),)
        self.broker = KafkaBroker(output.config, output.transaction_timeout_ms)
        self.limits = BatchLimits(self.broker.client)
        self.age: EpochAge | None = None
        self._counts: Mapping[str, int] = {}
        self._counted_s = -COUNTED_FOR_S

    @property
    def outputs(self) -> tuple[KafkaOutput, ...]:
        """The settings of the sinks."""
        return tuple(output for output, _ in self._written)

    @property
    def topics(self) -> frozenset[str]:
        """The output topics that are known before the first row."""
        return frozenset().union(*(output.topics for output in self.outputs))

    def target(self, pipeline: str) -> Target:
        """Return the place in Kafka of a pipeline's decisions."""
        transactional_id = f"{self.output.id_prefix}{pipeline}"
        return Target(
            transactional_id=transactional_id,
            token_group=token_group(transactional_id),
            token_partition=TopicPartition(self.output.token_topic, 0),
            cluster_id=self.broker.cluster_id(),
        )

    def decider(self, identity: Identity) -> TransactionDecider:
        """Return the decider of a pipeline's epochs by Kafka transactions in this cluster."""
        return TransactionDecider(self.broker, self.target(identity.pipeline), identity.lineage)

    def encode_plan(self, task_count: int, functions: tuple[BatchFunction, ...]) -> EncodePlan:
        """Return how this epoch's tasks encode, with the partitions that the topics have now.

        Args:
            task_count: how many may write.
            functions: what the rows pass through before.
        """
        counts = self._partition_counts()
        limits = self.limits.of(counts)
        partition_count = sum(counts.values())
        routes = [
            Route(output.rows(counts, limits), output.compression, output.batch_bytes, selection)
            for output, selection in self._written
        ]
        for output in self.outputs:
            if (topic := output.dead_letter_topic) is not None:
                own = partition_counts(self.broker.client, [topic])
                rows = RowLayout(own, topic, batch_limits=self.limits.of(own))
                compression, batch_bytes = output.compression, output.batch_bytes
                routes.append(Route(rows, compression, batch_bytes, OF_DEAD_LETTERS))
                partition_count += rows.partition_counts[topic]
        return EncodePlan(tuple(routes), min(task_count, partition_count), functions)

    def write_plan(self, producer: Producer) -> WritePlan:
        """Return the plan by which an epoch's tasks write."""
        if self.age is not None:
            self.age.begin(producer)
        produce = KafkaProduce(self.output.config, self.broker.transaction_version)
        return WritePlan(produce, producer)

    def watched(self, pipeline: str, listener: Listener) -> EpochAge:
        """Return a listener that warns of epochs close to their timeout, and passes events on."""
        return EpochAge(pipeline, self.output.timeout, self._begun_ms, listener)

    def _begun_ms(self, transactional_id: str) -> int:
        state = transaction_state(self.broker.client, transactional_id)
        is_open = state is not None and state.transaction_state == OPEN
        return max(0, int(state.transaction_start_time_ms)) if is_open else 0

    def _partition_counts(self) -> Mapping[str, int]:
        named = {output.topic for output in self.outputs if output.topic is not None}
        if len(named) == len({output.topic for output in self.outputs}):
            # What a second ago was true will do: a partition that was added is used a second later.
            if time.monotonic() - self._counted_s > COUNTED_FOR_S:
                self._counts = partition_counts(self.broker.client, named)
                self._counted_s = time.monotonic()
            return self._counts
        # Rows name topics of their own: one that was created just now must be known.
        return partition_counts(self.broker.client, {*topics(self.broker.client), *named})


def preflight(
    cluster: SinkCluster,
    pipeline: str,
    conf: Mapping[str, str],
    facts: RunFacts,
    shown: Iterable[Right] = (),
) -> None:
    """Check cluster, rights, topics and settings before anything starts.

    Args:
        cluster: that decides.
        pipeline: its name.
        conf: the settings of the Spark whose tasks write.
        facts: of the run.
        shown: the rights that showing the sources' positions takes.

    Raises:
        OptionError: something cannot work; all problems are named.
    """
    output, broker = cluster.output, cluster.broker
    wanted = (
        *decider_rights(output, pipeline),
        *rights_to_write(cluster.topics - output.topics),
        *shown,
    )
    missing = missing_rights(broker.client, wanted)
    if not missing:
        partition_counts(broker.client, cluster.topics | {output.token_topic})
    reported = cluster_facts(broker.client, () if missing else cluster.topics)
    findings = [
        check(
            reported,
            sink_output,
            trigger_interval_ms=facts.trigger_interval_ms,
            speculation=is_speculative(conf),
            accepted=facts.accepted,
        )
        for sink_output in cluster.outputs
    ]
    notices = (
        notice for notice in check_broker_settings(broker.client, reported) if notice.is_logged
    )
    warnings = dict.fromkeys(warning for finding in findings for warning in finding.warnings)
    for warning in (*warnings, *notices):
        logger.warning("%s", warning)
    problems = dict.fromkeys(problem for finding in findings for problem in finding.problems)
    refuse(problems, missing, output.config.sasl_username)


def decider_rights(output: KafkaOutput, pipeline: str) -> tuple[Right, ...]:
    """Return the rights needed to write output and to decide epochs by Kafka transactions."""
    transactional_id = f"{output.id_prefix}{pipeline}"
    # Each batch write has an id of its own: the right that covers them all is to be granted.
    prefix = f"{output.id_prefix}{BATCH}" if is_batch_name(pipeline) else ""
    group = token_group(transactional_id)
    wanted = rights_to_commit(transactional_id, group, output.token_topic, prefix=prefix)
    return (*wanted, *rights_to_write(output.topics))


STRAYS_LIVE_S = 2.5
"""The time a losing attempt may live: `spark.python.task.killTimeout`, 2 s, and its message."""


def is_speculative(conf: Mapping[str, str]) -> bool:
    """Return whether Spark may run attempts of a task side by side."""
    return conf.get("spark.speculation", "false").lower() == "true"


def may_leave_strays(conf: Mapping[str, str]) -> bool:
    """Return whether attempts of a task may end without a word to be known by their number.

    Attempts that lose a speculation do; so do tasks in an earlier attempt of a stage, since Spark
    counts a task's attempts from 0 in each stage attempt.
    """
    return is_speculative(conf) or conf.get("spark.stage.maxConsecutiveAttempts", "4") != "1"


class Sinks:
    """The sinks of one run of a pipeline, on the driver.

    Args:
        topology: what they are.
        pipeline: its name.
        cluster: whose tasks write.
        trigger_interval_ms: how long Spark waits between two epochs; None: it does not.
        tasks: how many write, if they are more than Spark runs at a time.
    """

    def __init__(
        self,
        topology: OutputTopology,
        pipeline: str,
        cluster: Cluster,
        trigger_interval_ms: int | None,
        tasks: int = 0,
    ) -> None:
        self._topology = topology
        self._pipeline = pipeline
        self._spark = cluster
        tasks = max(tasks, cluster.parallelism)
        self._facts = RunFacts(trigger_interval_ms, tasks)
        self._are_checked = False
        self._planned_id = -1
        self._open: dict[str, TwoPhaseCommitSink] = {}
        self._owners: dict[str, Owner] = {}
        self._to_close: list[Callable[[], None]] = []
        self.cluster: SinkCluster | None = None
        if topology.decider is not None:
            self.cluster = SinkCluster(topology.decider, topology.written)
            self._to_close.append(self.cluster.broker.close)

    def check(
        self,
        shown: Iterable[Right] = (),
        *,
        accepted: frozenset[str] = frozenset(),
        is_dry: bool = False,
    ) -> None:
        """Check clusters, rights, topics, tables and settings before anything starts.

        Args:
            shown: the rights that showing the sources' positions takes, in the deciding cluster.
            accepted: decisions that the user stated.
            is_dry: leave sinks out that are tried out by writing.

        Raises:
            OptionError: something cannot work; all problems of all sinks are named.
        """
        facts = replace(self._facts, accepted=accepted)

        def try_out(uid: str, sink: Sink) -> None:
            sink.open(Owner(self._pipeline, uid, ""), facts).close()

        others = () if is_dry else self._topology.others
        checks = [partial(try_out, uid, sink) for uid, sink in others]
        if self.cluster is not None:
            decides = partial(
                preflight, self.cluster, self._pipeline, self._spark.conf, facts, shown
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
        self,
        identity: Identity,
        storage: Storage,
        *,
        listener: Listener | None = None,
        note: Note = lambda *_: None,
        on_lingering: OnLingering = lambda _: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Driver:
        """Return the driver of one query run, with the real ports.

        Args:
            identity: of the pipeline that runs.
            storage: the checkpoint.
            listener: called with every event.
            note: see `OpenSinks`.
            on_lingering: see `OpenSinks`.
            clock: for names, and the pauses before another try.
        """
        transactional_id = self._transactional_id
        newest = CheckpointFolder(storage).newest_manifests(2)
        ids = transactional_ids(storage) | {
            manifest.producer.transactional_id for manifest in newest
        }
        earlier_ids = ids - {transactional_id}
        facts = replace(
            self._facts,
            earlier_ids=earlier_ids,
            are_checked=self._are_checked,
            accepted=identity.accepted,
        )
        for uid, sink in self._topology.others:
            self._owners[uid] = Owner(identity.pipeline, uid, identity.lineage)
            self._open[uid] = sink.open(self._owners[uid], _of_sink(facts, uid, newest))
            self._to_close.append(self._open[uid].close)
        settling = {**self._open, **self._of_another_mode(identity, facts, newest)}
        PIPELINES[self._pipeline].due_outputs = {
            uid: sink.due_output for uid, sink in settling.items() if isinstance(sink, KeepsDue)
        }
        owners = {uid: Owner(identity.pipeline, uid, identity.lineage) for uid in settling}
        self._warn_of_removed(_named(newest) - settling.keys())
        make = partial(Driver, deletes_at_a_time=DELETES_AT_A_TIME)
        if self.cluster is not None:
            self.cluster.age = self.cluster.watched(self._pipeline, listener or ignore)
            listener = self.cluster.age
        if listener is not None:
            make = partial(make, listener=listener)
        return make(
            identity,
            DecisionLog(storage, clock, transactional_id)
            if self.cluster is None
            else self.cluster.decider(identity),
            storage,
            clock,
            participants=OpenSinks(settling, owners, note=note, on_lingering=on_lingering)
            if settling
            else None,
        )

    def newest_token(self, lineage: str) -> Token | None:
        """Return the newest decision in Kafka without a fence; one under way is not waited for.

        Args:
            lineage: of the checkpoint that asks.
        """
        if self.cluster is None:
            return None
        target = self.cluster.target(self._pipeline)
        tokens = fetch(self.cluster.broker.client, target.token_group, None, stable=False)
        return newest_token(tokens, target.token_partition, lineage)

    def last(self, functions: tuple[BatchFunction, ...], checkpoint_id: int) -> EncodePlan | FanOut:
        """Return where the rows of an epoch go, and what they pass through before."""
        if self.cluster is not None and checkpoint_id == self._planned_id:  # it runs again
            self.cluster.limits.forget()
        self._planned_id = checkpoint_id
        if not self._open:
            assert self.cluster is not None, "something is written to"
            return self.cluster.encode_plan(self._spark.parallelism, functions)
        encode = (
            None if self.cluster is None else self.cluster.encode_plan(self._spark.parallelism, ())
        )
        letters = {
            uid
            for uid, sink in self._topology.others
            if encode is None and getattr(sink, "dead_letter_topic", None) is not None
        }
        branches = [
            Branch(self._owners[uid], sink.plan(), uid in letters, self._topology.selection(uid))
            for uid, sink in self._open.items()
        ]
        return FanOut(tuple(branches), encode, checkpoint_id, functions, self._may_leave_strays)

    @cached_property
    def _may_leave_strays(self) -> bool:
        return may_leave_strays(self._spark.conf)

    def write_plan(self, producer: Producer) -> WritePlan | CollectPlan:
        """Return how an epoch's last tasks write, or report what was written."""
        return CollectPlan() if self.cluster is None else self.cluster.write_plan(producer)

    def close(self) -> None:
        """Close connections at the end of the run, and leave everything else as it is."""
        for close in self._to_close:
            try:
                close()
            except Exception as error:
                logger.warning("pipeline %s: a connection is not closed: %s", self._pipeline, error)
        self._to_close.clear()

    def _of_another_mode(
        self,
        identity: Identity,
        facts: RunFacts,
        newest: list[Manifest],
    ) -> dict[str, TwoPhaseCommitSink]:
        """Return deciding sinks with their tasks' transactions, if the newest manifests name them.

        Another sink may have decided then, with transactions of the same id.
        """
        opened: dict[str, TwoPhaseCommitSink] = {}
        for uid, sink in self._topology.deciding:
            if uid in _named(newest):
                owner = Owner(identity.pipeline, uid, identity.lineage)
                opened[uid] = sink.open(owner, _of_sink(facts, uid, newest))
                self._to_close.append(opened[uid].close)
        return opened

    def _warn_of_removed(self, uids: Collection[str]) -> None:
        """Warn of removed sinks: nothing ends their undecided transactions.

        A recovery refuses to go on without the sink of a decided transaction.
        """
        if uids:
            logger.warning(
                "pipeline %r: the newest epochs wrote to sinks that it no longer has: %s. "
                "What an epoch that was not decided has left open there is not given up: in Kafka "
                "it holds up readers until it times out, in PostgreSQL it keeps its locks. Decided "
                "epochs may wait there for their commit of a Delta or Iceberg table. If they did "
                "not end in order, add them again, with these uids, for one start or "
                "`tallystick recover`; `tallystick transactions list` shows what is open",
                self._pipeline,
                ", ".join(sorted(uids)),
            )

    @property
    def _transactional_id(self) -> str:
        deciding = self._topology.decider
        prefix = self._topology.id_prefix if deciding is None else deciding.id_prefix
        return f"{prefix}{self._pipeline}"


def _of_sink(facts: RunFacts, uid: str, newest: list[Manifest]) -> RunFacts:
    """Add the prefixes of the sink's own transactions: each KafkaSink may have had one."""
    parsed = [
        (
            parse(committable.name.rsplit(":", 2)[0]),
            manifest.lineage,
        )  # see Producer.transaction_name
        for manifest in newest
        for committable in manifest.committables
        if committable.sink == uid
    ]
    own = {pooled.prefix.removesuffix(f"/{lineage}") for pooled, lineage in parsed if pooled}
    return replace(facts, earlier_ids=facts.earlier_ids | own)


def _named(newest: Iterable[Manifest]) -> set[str]:
    """Return the uids of the sinks with transactions in any of them."""
    return {committable.sink for manifest in newest for committable in manifest.committables}


def engine_of(
    sinks: Sinks,
    spark: SparkSession,
    rows: Callable[[BroadcastPlans], DataFrame],
    functions: tuple[BatchFunction, ...] = (),
    dead_letters: Unread | None = None,
    keyed: PipelinePlan = NO_STEPS,
    timestamp_ms: int = 0,
    is_over: bool = False,
) -> DataFrameEngine:
    """Return the engine of an epoch over a DataFrame, and the malformed records left out of it."""
    return DataFrameEngine(
        spark,
        rows,
        lambda checkpoint_id: sinks.last(functions, checkpoint_id),
        sinks.write_plan,
        dead_letters,
        keyed,
        timestamp_ms,
        is_over,
    )


def with_columns(cluster: Cluster, steps: Iterable[Step], source: Columns) -> tuple[Step, ...]:
    """Return the steps, with the columns of functions of `map_batches`, declared or computed.

    Args:
        cluster: whose Spark may have to read columns.
        steps: of an input or a pipeline.
        source: the columns of the rows before.

    Raises:
        OptionError: columns cannot be read, or an expression does not fit them.
    """
    known: pa.Schema | None = columns_of(cluster, source)
    result: list[Step] = []
    for step in steps:
        if isinstance(step, MapBatches):
            step, known = _with_columns_of(cluster, step, known)
        elif isinstance(step, Process):
            known = output_after(cluster, step, known)
        else:
            known = None
        result.append(step)
    return tuple(result)


def _with_columns_of(
    cluster: Cluster, step: MapBatches, known: pa.Schema | None
) -> tuple[MapBatches, pa.Schema | None]:
    """Return a step with the columns of its function, and the columns behind the step."""
    match step.function:
        case Filter(predicate):
            if isinstance(predicate, Condition) and known is not None:
                predicate.check(known)
            return step, known
        case Projection() as projection:
            columns = None if known is None else projection.output(known)
            return replace(step, schema=columns), columns
    declared = replace(step, function=_declared_function(cluster, step))
    columns = None if step.schema is None else columns_of(cluster, step.schema)
    return declared, columns


def _declared_function(cluster: Cluster, step: MapBatches) -> BatchFunction:
    function = step.function
    if step.schema is None and not step.outputs:
        return function
    what = f"map_batches {name_of(function)}"
    outputs = {
        name: columns_of(cluster, columns, f"{what}, output {name!r}")
        for name, columns in step.outputs.items()
    }
    columns = None if step.schema is None else columns_of(cluster, step.schema, f"{what}, schema=")
    return DeclaredFunction(function, outputs, columns)


def side_outputs(
    steps: Iterable[Step], keyed: Iterable[KeyedStep], topology: OutputTopology
) -> dict[str, pa.Schema]:
    """Return the columns of each side output of a pipeline, checked against its sinks.

    Several steps may put out rows for one output, if it has the same columns in each.

    Args:
        steps: as `with_columns` returns them.
        keyed: the keyed ones.
        topology: the sinks.

    Raises:
        OptionError: a name cannot be one, two steps mean different columns, no sink writes an
            output, or the output of a sink is not there.
    """
    functions = [step.function for step in steps if isinstance(step, MapBatches)]
    declared: list[tuple[str, Mapping[str, pa.Schema]]] = [
        (f"map_batches {function.__name__}", function.outputs)
        for function in functions
        if isinstance(function, DeclaredFunction)
    ]
    declared += [(f"step {step.uid}", step.outputs) for step in keyed]
    columns_by_name: dict[str, pa.Schema] = {}
    whose: dict[str, str] = {}
    for what, outputs in declared:
        for name, columns in outputs.items():
            check_output_name(name, what)
            if not columns_by_name.setdefault(name, columns).equals(columns):
                raise OptionError(
                    f"{whose[name]} and {what} both have an output {name!r}, with different "
                    f"columns, {columns_by_name[name].names} and {columns.names}: its sinks get "
                    f"one kind of rows. Rename one, or declare the same columns and types in both"
                )
            whose.setdefault(name, what)
    _check_written(columns_by_name, topology)
    return columns_by_name


def _check_written(outputs: Mapping[str, pa.Schema], topology: OutputTopology) -> None:
    written = {selection.output for selection in topology.selections.values() if selection.output}
    for name in sorted({*written, *topology.dropped} - outputs.keys()):
        known = f"the pipeline's are {', '.join(outputs)}" if outputs else "the pipeline has none"
        raise OptionError(
            f"write({name}=...): no step has an output {name!r}: {known}.{near(name, outputs)} "
            f"Declare it where its rows come from: map_batches(..., outputs=...) or "
            f"vectorised(..., outputs={{{name!r}: 'user string, why string'}})"
        )
    for name in outputs:
        if name not in written and name not in topology.dropped:
            raise OptionError(
                f"no sink gets the output {name!r}, and its rows would be lost: name one, "
                f"write(..., {name}=sink), or say that they are not wanted: write(..., {name}=[])"
            )
    for what, function in topology.functions:
        try:
            dumps(function)
        except Exception as error:
            raise OptionError(
                f"{what} {name_of(function)} cannot be sent to the tasks that call it: {error}. "
                f"It must not use locks, clients, sessions and the like"
            ) from error
