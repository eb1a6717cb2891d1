"""`writeStream.format("tallystick")`: one transaction per task, on Spark's own commit protocol.

The modes: append writes the rows of a micro-batch, complete the whole result each time, as Spark's
own Kafka sink does. Update is refused by Spark, for every data source in Python: there,
`foreachBatch(KafkaSink(...))` writes.

Each attempt of each task prepares a transaction of its own and hands it over; which attempts count
is decided in `write_epochs`.
"""

import json
import logging
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import eq
from typing import NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from tallystick.epoch.two_phase import (
    Committable,
    Owner,
    Place,
    RunFacts,
    Transaction,
    TransactionPlan,
    TwoPhaseCommitSink,
)
from tallystick.errors import BrokenInvariantError
from tallystick.host.worker_cache import WorkerCache
from tallystick.kafka.output import KafkaOutput
from tallystick.kafka.task_sink import KafkaTaskSink
from tallystick.options.sink import WriteOptions, parse_write_options
from tallystick.run.driver import Listener
from tallystick.spark.streaming.write_epochs import PlannedEpoch, WriteEpochs
from tallystick.storage.file_storage import FileStorage, as_spark_took_it

logger = logging.getLogger(__name__)

BATCH_ID, QUERY_ID = "streaming.sql.batchId", "sql.streaming.queryId"
"""Properties that Spark gives to the tasks of a micro-batch."""


class _ConnectedSink(NamedTuple):
    """A connected sink, with the owner and the settings of the connection."""

    owner: Owner
    kind: tuple[KafkaOutput, str, frozenset[str]]
    sink: KafkaTaskSink


_sinks: WorkerCache[Owner, _ConnectedSink] = WorkerCache(lambda connected: connected.sink.close())
"""Connected by this process; Spark's helper processes serve many micro-batches.

An owner has the newest only: a query that was started with other settings has one run at a time.
"""
SINKS_MAX = 8
"""The number of queries that find their connections again in a process."""


class PreparedMessage(WriterCommitMessage):
    """The message of a task to the driver: JSON, since Spark pickles the message."""

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def of(cls, planned: PlannedEpoch, committables: Sequence[Committable]) -> "PreparedMessage":
        """Make a task's message."""
        held = [each.to_fields() for each in committables]
        return cls(json.dumps({"planned": planned.to_fields(), "committables": held}))


class StreamWriter(DataSourceStreamArrowWriter):
    """The driver's side of the sink, made twice per micro-batch: to plan, and to commit or abort.

    Args:
        options: of the query, as Spark hands them over.
        listener: gets every event of the driver.

    Raises:
        OptionError: an option is unknown, missing, contradictory, or not of its type.
    """

    def __init__(self, options: Mapping[str, str], listener: Listener | None = None) -> None:
        self._options = parse_write_options(options)
        self._listener = listener
        self._for_tasks: tuple[PlannedEpoch, Owner, TransactionPlan | None] | None = None

    def __reduce__(self) -> tuple[type, tuple[PlannedEpoch, Owner, TransactionPlan | None]]:
        """Return the `TaskWriter` that tasks get; only pickling tells a plan from a commit.

        Spark pickles a writer twice, and both times gets the same plan.
        """
        if self._for_tasks is None:
            epochs = self._epochs()
            planned = epochs.plan()
            plan = None if planned.hold is None else epochs.transaction_plan()
            self._for_tasks = (planned, epochs.owner, plan)
        return TaskWriter, self._for_tasks

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Raise: tasks have a `TaskWriter` instead."""
        raise BrokenInvariantError("the driver's side of a sink was asked to write")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Decide and commit the epoch of a micro-batch."""
        planned, committables = read_messages(messages)
        assert planned is not None, "a micro-batch has at least one task"
        _check_epoch(planned, batchId)
        if planned.hold is not None:
            self._epochs().decide(planned, committables)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Abort the tasks' transactions; the next run's recovery ends any left over."""
        try:
            planned, committables = read_messages(messages)
            if planned is not None:
                _check_epoch(planned, batchId)
                self._epochs().give_up(planned, committables)
        except Exception as error:  # what made Spark abort is what the user has to see
            logger.warning(
                "micro-batch %d: its transactions could not be aborted (%s). The next start aborts "
                "them; until then, or their timeout, readers of the output wait",
                batchId,
                error,
            )

    def _epochs(self) -> WriteEpochs:
        options = self._options
        return WriteEpochs(
            FileStorage(as_spark_took_it(options.checkpoint)),
            options.query_name,
            options.accepted,
            options.id_prefix,
            partial(open_sink, options),
            self._listener,
        )


class TaskWriter(DataSourceStreamArrowWriter):
    """The side of the tasks.

    Args:
        planned: the epoch, recovered up to here.
        owner: of the transactions.
        plan: how to begin a transaction; None: the epoch is committed, nothing is to be written.
    """

    def __init__(self, planned: PlannedEpoch, owner: Owner, plan: TransactionPlan | None) -> None:
        self._planned = planned
        self._owner = owner
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write a task's rows into transactions, and prepare the transactions."""
        context = TaskContext.get()
        assert context is not None, "runs in a Spark task"
        self._check(context)
        if self._plan is None:
            deque(iterator, maxlen=0)  # Spark's own state of the micro-batch comes about by it
            return PreparedMessage.of(self._planned, ())
        place = Place(
            owner=self._owner,
            checkpoint_id=self._planned.checkpoint_id,
            task=context.partitionId(),
            attempt=context.attemptNumber(),
            nonce=secrets.token_hex(8),
        )
        return PreparedMessage.of(self._planned, _written(self._plan, place, iterator))

    def _check(self, context: TaskContext) -> None:
        """Check that the plan was made for the task's micro-batch and query."""
        found = (context.getLocalProperty(BATCH_ID), context.getLocalProperty(QUERY_ID))
        expected = (str(self._planned.checkpoint_id), self._owner.lineage)
        if found != expected:
            raise BrokenInvariantError(
                f"planned was epoch {expected[0]} of query {expected[1]}, and the task is of "
                f"micro-batch {found[0]} of query {found[1]}: nothing was written. Was the "
                f"checkpoint replaced under a running query? Start it again."
            )


def _written(
    plan: TransactionPlan, place: Place, batches: Iterator[pa.RecordBatch]
) -> Sequence[Committable]:
    """Write a task's rows and prepare them; without rows, open no transaction."""
    transaction: Transaction | None = None
    try:
        for rows in batches:
            if rows.num_rows == 0:
                continue
            if transaction is None:
                transaction = plan.begin(place)
            transaction.write(rows)
        return () if transaction is None else transaction.prepare()
    except BaseException:
        if transaction is not None:
            transaction.abort()
        raise


def read_messages(
    messages: Sequence[WriterCommitMessage | None],
) -> tuple[PlannedEpoch | None, tuple[Committable, ...]]:
    """Return the tasks' common plan, None if no task has reported, and all committables."""
    planned: PlannedEpoch | None = None
    committables: list[Committable] = []
    for message in messages:
        if message is None:
            continue
        assert isinstance(message, PreparedMessage), type(message)
        said = json.loads(message.text)
        theirs = PlannedEpoch.from_fields(said["planned"])
        assert planned is None or planned == theirs, "the tasks of an epoch have one plan"
        planned = theirs
        committables += map(Committable.from_fields, said["committables"])
    return planned, tuple(committables)


def _check_epoch(planned: PlannedEpoch, batch_id: int) -> None:
    if planned.checkpoint_id != batch_id:
        raise BrokenInvariantError(
            f"micro-batch {batch_id} is to be committed, and its tasks wrote for epoch "
            f"{planned.checkpoint_id}: nothing was decided. Start the query again."
        )


def open_sink(
    options: WriteOptions, owner: Owner, id_prefix: str, earlier_ids: frozenset[str]
) -> TwoPhaseCommitSink:
    """Return the sink that the options ask for, connected.

    Args:
        options: of the query.
        owner: whose transactions.
        id_prefix: of the transactional ids.
        earlier_ids: prefixes under which something may be open besides.

    Raises:
        OptionError: something cannot work; all problems are named.
    """
    output = options.output
    kind = (output, id_prefix, earlier_ids)
    before = _sinks.take(owner)
    if before is not None and before.kind == kind:
        _sinks.give_back(owner, before)
        return before.sink
    if before is not None:
        before.sink.close()
    while len(kept := _sinks.values()) >= SINKS_MAX:
        _sinks.close(partial(eq, kept[0].owner))
    facts = RunFacts(are_checked=before is not None)
    made = KafkaTaskSink(output, owner, facts, id_prefix=id_prefix, earlier_prefixes=earlier_ids)
    _sinks.give_back(owner, _ConnectedSink(owner, kind, made))
    return made
