"""`df.write.format("tallystick")`: one Kafka transaction for all rows of a DataFrame.

The process that plans the write fences the transactional id; tasks write with its producer; the
process that Spark asks to commit ends the transaction. Kafka numbers the rows of a producer per
partition, so a partition has one writing task, and a task one attempt that writes: what breaks that
is found before the commit, and the transaction is aborted.
"""

import logging
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from tallystick.epoch.transactional_ids import batch_id
from tallystick.errors import EpochAbortedError, OptionError, TallystickError
from tallystick.kafka.batch_transaction import BatchTransaction
from tallystick.kafka.writer import KafkaProduce
from tallystick.options.sink import parse_batch_write_options
from tallystick.tasks.read import EncodePlan, Report, Route, WritePlan, send
from tallystick.values import ProducedRange, TopicPartition

logger = logging.getLogger(__name__)

ONE_TASK_PER_PARTITION = (
    "In one transaction a Kafka partition has one writing task. Let one task write: "
    "df.repartition(1).write…; or give each partition to one task: "
    "df.repartitionById(N, ts.kafka_partition('key', N)).write…, N being the topic's partitions"
)


class ReportMessage(WriterCommitMessage):
    """The message of a task to the driver: its report as JSON, since Spark pickles the message."""

    def __init__(self, text: str) -> None:
        self.text = text


class BatchWriter(DataSourceArrowWriter):
    """The writer of a DataFrame: made once, and pickled for the tasks and for commit or abort.

    Args:
        options: of the write, as Spark hands them over.
        columns: of the rows.
        is_overwrite: Spark was asked to replace the records in the topic.

    Raises:
        OptionError: an option is unknown, missing, contradictory, or not of its type; or
            `is_overwrite`.
    """

    def __init__(
        self, options: Mapping[str, str], columns: pa.Schema, *, is_overwrite: bool = False
    ) -> None:
        if is_overwrite:
            raise OptionError(
                'mode("overwrite"): a topic is a log, and what others have read of it cannot be '
                'replaced. Write with mode("append"); to begin with an empty topic, delete it and '
                "create it again first"
            )
        found = parse_batch_write_options(options)
        name = batch_id(found.id_prefix, secrets.token_hex(8))
        self._transaction = BatchTransaction.begin(found.output, name, columns)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write one task's rows.

        What goes wrong is reported, not raised: Spark would start another attempt, and show its
        error in place of the first one's.

        Raises:
            EpochAbortedError: an earlier attempt of this task may have written.
        """
        context = TaskContext.get()
        assert context is not None, "runs in a Spark task"
        transaction, output = self._transaction, self._transaction.output
        if context.attemptNumber() > 0:
            raise EpochAbortedError(
                f"attempt {context.attemptNumber()} of task {context.partitionId()}: an earlier "
                f"attempt may have written into {transaction.producer.transactional_id!r} already, "
                f"so this one does not. Nothing of the write becomes visible unless the earlier "
                f"one succeeds. Look in Spark's log why it failed, or was speculated, and write "
                f"again"
            )
        route = Route(transaction.rows, output.compression, output.batch_bytes)
        encode = EncodePlan((route,), target_count=1)
        produce = KafkaProduce(output.config, transaction.transaction_version)
        frames = send(encode, iterator, context.partitionId())
        report = WritePlan(produce, transaction.producer).write(frames, attempt_number=0)
        return ReportMessage(report.to_json())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit the transaction, with the rows of all tasks.

        Raises:
            TallystickError: a task reports an error, tasks wrote to the same partition, or the
                transaction cannot be committed; Spark asks to abort then.
        """
        timeout_ms = self._transaction.output.transaction_timeout_ms
        self._transaction.commit(_produced(_reports(messages), timeout_ms))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Abort the transaction."""
        try:
            self._transaction.abort()
        except TallystickError as error:  # what made Spark abort is what the user has to see
            logger.warning(
                "transaction %r could not be aborted (%s): until its timeout of %d ms, readers of "
                "the output wait",
                self._transaction.producer.transactional_id,
                error,
                self._transaction.output.transaction_timeout_ms,
            )


def _reports(messages: Sequence[WriterCommitMessage | None]) -> list[Report]:
    reports: list[Report] = []
    for message in messages:
        assert isinstance(message, ReportMessage), type(message)
        reports.append(Report.from_json(message.text))
    return reports


def _produced(reports: Sequence[Report], timeout_ms: int) -> tuple[ProducedRange, ...]:
    """Return what the tasks of a write wrote, a range per partition.

    Args:
        reports: of all tasks, in their order.
        timeout_ms: of the transaction.

    Raises:
        TallystickError: a task reports it.
        EpochAbortedError: two tasks wrote to one partition.
    """
    tasks: defaultdict[TopicPartition, list[int]] = defaultdict(list)
    for task, report in enumerate(reports):
        if (error := report.to_error()) is not None:
            raise type(error)(
                f"{_explained(error, task, len(reports), timeout_ms)} Nothing of the write is "
                f"visible"
            ) from error
        for each in report.produced:
            tasks[each.topic_partition].append(task)
    for partition, found in sorted(tasks.items()):
        if len(found) > 1:
            raise EpochAbortedError(
                f"{partition} was written by tasks {', '.join(map(str, found))}. "
                f"{ONE_TASK_PER_PARTITION}. Nothing of the write is visible"
            )
    return tuple(each for report in reports for each in report.produced)


def _explained(error: TallystickError, task: int, task_count: int, timeout_ms: int) -> str:
    """Return the error of a task, with its likely cause where Kafka refused the task's rows."""
    text = f"task {task}: {error}"
    if not isinstance(error, EpochAbortedError):
        return f"{text}."
    if task_count > 1:
        text = f"{ONE_TASK_PER_PARTITION}. ({text})"
    return (
        f"{text} If the write took longer than transaction.timeout.ms={timeout_ms}, raise that "
        f"(at most the brokers' transaction.max.timeout.ms)."
    )
