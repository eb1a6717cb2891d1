"""Progress of pipelines and queries, and listeners of a driver.

Spark logs and reports our offsets as JSON text that only we can read well: here it becomes numbers,
and observers get each epoch. Listeners count for metrics, and warn before a transaction times out.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery

from tallystick.arguments import checked
from tallystick.epoch import protocol
from tallystick.epoch.manifest import epoch_of
from tallystick.epoch.protocol import Event
from tallystick.epoch.two_phase import Committable, DueOutput, Timeout
from tallystick.errors import FencedError, OptionError, RetriableError, TallystickError
from tallystick.host.stopwatch import TaskTimes, now_ms
from tallystick.host.user_code import calling_user
from tallystick.pipeline.topology import OutputTopology
from tallystick.run.driver import Listener
from tallystick.run.participants import Result
from tallystick.run.query import Query
from tallystick.source.offsets import ONLY_INPUT, SourceOffsets, parse_source
from tallystick.state.catalog import StepState
from tallystick.tasks.hints import name_of
from tallystick.values import JobGraph, Producer, TopicPartition

logger = logging.getLogger(__name__)

Observer = Callable[[str, Mapping[str, Any] | None], None]
"""A callback for a query's name, or id, and each progress, Spark's or ours; None at the end."""
OBSERVERS: list[Observer] = []


def observe(query: str, progress: Mapping[str, Any] | None) -> None:
    """Call all observers with the progress of a query; see `Observer`."""
    for observer in OBSERVERS:
        try:
            observer(query, progress)
        except Exception:
            logger.exception("query %s: an observer of its progress failed", query)


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """One source after an epoch.

    Args:
        index: of the source in the query, counted over all kinds of sources.
        cluster_id: the cluster that the source reads.
        group: the consumer group that shows the positions; "": no group.
        positions: the next offset to read of each partition.
        latest: the end of each partition, as far as Spark knows; may be empty.
        skipped: ranges (from, to) that were lost unread, and that this epoch passed over.
        input: the id of the pipeline's input.
    """

    index: int
    cluster_id: str
    group: str
    positions: Mapping[TopicPartition, int]
    latest: Mapping[TopicPartition, int] = field(default_factory=dict)
    skipped: Mapping[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    input: str = ONLY_INPUT

    @property
    def lag(self) -> dict[TopicPartition, int]:
        """The number of offsets of each partition left to read; absent where the end is unknown."""
        return {
            partition: max(0, end - self.positions[partition])
            for partition, end in self.latest.items()
            if partition in self.positions
        }

    @property
    def lag_total(self) -> int | None:
        """The sum of `lag`; None where no end is known."""
        return sum(self.lag.values()) if self.latest else None

    @property
    def skipped_total(self) -> int:
        """The number of offsets this epoch passed over."""
        return sum(stop - start for start, stop in self.skipped.values())


@checked
def source_progress(query: StreamingQuery | Query | Mapping[str, Any]) -> list[SourceProgress]:
    """Return positions, lag and losses of each Tallystick source of a query.

    Args:
        query: a query, for its last epoch; or an entry of the `recentProgress` of a query.

    Returns:
        One value per Tallystick source; empty before the first epoch.
    """
    progress = query if isinstance(query, Mapping) else query.lastProgress
    if progress is None:
        return []
    if "sources" not in progress:
        raise OptionError(
            "source_progress(query=…): this is no entry of recentProgress, which has sources"
        )
    entries = (
        _source_progress_of(index, source) for index, source in enumerate(progress["sources"])
    )
    return [entry for entry in entries if entry is not None]


def sources_of(progress: Mapping[str, Any]) -> Iterator[SourceOffsets]:
    """Return the end offsets of the sources that are ours, as they were logged."""
    for source in progress["sources"]:
        if offsets := parse_source(source["endOffset"] or ""):
            yield offsets


def _source_progress_of(index: int, source: Mapping[str, Any]) -> SourceProgress | None:
    end = parse_source(source["endOffset"] or "")
    if end is None:
        return None
    latest = parse_source(source["latestOffset"] or "")
    progress = SourceProgress(
        index=index,
        cluster_id=end.cluster_id,
        group=end.group,
        positions=end.positions,
        latest={} if latest is None else latest.positions,
        input=end.input,
    )
    # An epoch that read nothing from this source repeats the offsets of the one before, and its
    # losses with them.
    again = source["startOffset"] == source["endOffset"]
    return progress if again else replace(progress, skipped=end.skipped)


class OpenTransactions:
    """The transactions in sinks without an end yet: prepared by tasks, or left over.

    A task's transaction is known once the task has reported; one that an earlier run or a failed
    attempt left, once a recovery has looked. Threads of the driver write, that of metrics reads.
    """

    def __init__(self) -> None:
        self._begun_ms: dict[tuple[str, str], int] = {}

    def prepared(self, committables: Iterable[Committable]) -> None:
        """Add transactions that tasks reported."""
        self._begun_ms |= {
            (committable.sink, committable.name): committable.begun_ms
            for committable in committables
        }

    def replace_all(self, committables: Iterable[Committable]) -> None:
        """Replace all entries by what a look through all sinks found."""
        self._begun_ms = {
            (committable.sink, committable.name): committable.begun_ms
            for committable in committables
        }

    def note(self, committable: Committable, result: Result) -> None:
        """Take in the result of one commit or abort; see `run.participants.Note`."""
        if not isinstance(result, Exception):
            self._begun_ms.pop((committable.sink, committable.name), None)

    def begun_ms(self) -> dict[str, list[int]]:
        """Return the begin times of each sink's transactions, in ms since 1970; 0: not known."""
        by_sink = defaultdict[str, list[int]](list)
        for (sink, _), begun_ms in list(self._begun_ms.items()):
            by_sink[sink].append(begun_ms)
        return by_sink


@dataclass(slots=True)
class PipelineCounts:
    """The counts of a pipeline since the process began."""

    starts: int = 0
    """The number of its starts."""
    started_ms: int = 0
    """The time of its last start, in ms since 1970."""
    runs: int = 0
    """The number of its runs in this process that have not ended: one, as a rule, or none."""
    watched: tuple[SourceProgress, ...] = ()
    """The inputs as `lag_watch` saw them while no epoch ends; empty: the newest progress counts."""
    epochs_started: int = 0
    """The number of epochs that were planned, with any outcome."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failures in epochs, by the class of the error; most are tried again."""
    aborted: Counter[str] = field(default_factory=Counter)
    """Epochs that were planned and did not come about, by the class of the error."""
    rows_written: int = 0
    """The rows of committed epochs, in all sinks, without dead letters."""
    dead_letters: int = 0
    """The malformed records that committed epochs wrote to the dead-letter topic."""
    written_files: int = 0
    """The files of state that committed epochs wrote."""
    written_bytes: int = 0
    """Their bytes."""
    late_rows: Counter[str] = field(default_factory=Counter)
    """The rows that a keyed step dropped as late, by its uid."""
    state: tuple[StepState, ...] = ()
    """The committed state."""
    committed_ms: int = 0
    """The time of this process's last commit of an epoch, in ms since 1970; 0: none yet."""
    open_since_ms: int = 0
    """The time at which the epoch in flight was planned, in ms since 1970; 0: none is in flight."""
    timeout_ms: int | None = None
    """The timeout of the transactions that decide, in ms; None: none does."""
    deciding_sink: str = ""
    """The uid of the sink whose transaction decides; "": none does."""
    sinks: tuple[str, ...] = ()
    """The uids of all sinks."""
    graph: JobGraph = ()
    """The job, as its newest start has compiled it."""
    tasks: tuple[TaskTimes, ...] = ()
    """The tasks of the newest epoch."""
    transactions: OpenTransactions = field(default_factory=OpenTransactions)
    """The transactions in sinks that wait for the decision."""

    due_outputs: dict[str, Callable[[], DueOutput]] = field(default_factory=dict)
    """By sink, the output that is decided and waits; of sinks that publish later."""

    def open_since(self) -> dict[str, list[int]]:
        """Return when the open transactions of each sink were begun, in ms since 1970.

        The deciding transaction is as old as its epoch, or younger; for others 0 means not known.
        """
        none: dict[str, list[int]] = {sink: [] for sink in self.sinks}
        by_sink = none | self.transactions.begun_ms()
        if self.deciding_sink and (since_ms := self.open_since_ms):
            by_sink[self.deciding_sink] = [*by_sink[self.deciding_sink], since_ms]
        return by_sink


PIPELINES: defaultdict[str, PipelineCounts] = defaultdict(PipelineCounts)
"""By the pipeline's name."""


@dataclass(frozen=True, slots=True)
class EpochOutcome:
    """The end of an epoch.

    Args:
        number: of the epoch; -1: aborted before a manifest was written.
        ran: the output and the state; None: aborted.
        error: the reason of the abort; None: committed.
    """

    number: int
    ran: protocol.EpochRan | None = None
    error: Exception | None = None


class EpochOutcomes:
    """Finds out from the events of a driver which epochs were committed, and which were aborted.

    Where the answer to a commit is lost, the outcome is known once Kafka was asked.
    """

    def __init__(self) -> None:
        self._is_planned = False
        self._ran: protocol.EpochRan | None = None
        self._manifest_path = ""
        self._doubt: Exception | None = None

    @property
    def is_open(self) -> bool:
        """True from the plan of an epoch until its outcome is known."""
        return self._is_planned or self._ran is not None

    def of(self, event: protocol.Event) -> EpochOutcome | None:
        """Return the outcome that an event reports; None: none. Call it for every event."""
        match event:
            case protocol.EpochRequested():
                self._forget()
            case protocol.EpochPlanned(sources):
                self._forget()
                self._is_planned = sources is not None
            case protocol.EpochRan():
                self._ran, self._manifest_path = event, ""
            case protocol.ManifestWritten(path):
                self._manifest_path = path
            case protocol.TransactionCommitted() if self._ran and self._doubt is None:
                return self._committed()
            case protocol.ActionFailed(error) if self._ran and self._manifest_path:
                self._doubt = self._doubt or error
            case protocol.ActionFailed(error):
                return self._aborted(error)
            case protocol.CommittedRead(committed) if self._doubt is not None:
                token = committed.token
                if token is not None and token.manifest_path == self._manifest_path:
                    return self._committed()
                return self._aborted(self._doubt)
        return None

    def _committed(self) -> EpochOutcome:
        number = epoch_of(self._manifest_path) if self._manifest_path else -1
        outcome = EpochOutcome(number, ran=self._ran)
        self._forget()
        return outcome

    def _aborted(self, error: Exception) -> EpochOutcome | None:
        number = epoch_of(self._manifest_path) if self._manifest_path else -1
        outcome = EpochOutcome(number, error=error) if self.is_open else None
        self._forget()
        return outcome

    def _forget(self) -> None:
        self._is_planned, self._ran, self._manifest_path = False, None, ""
        self._doubt = None


class EpochCounts:
    """A listener that counts the results of epochs, and passes every event on.

    An epoch counts once, when it is committed, as its output does.

    Args:
        pipeline: its name.
        listener: the user's; None: no listener.
        timeout_ms: of the deciding transactions; None: the checkpoint decides.
        dead_letter_topic: the topic of malformed records in these transactions; None: no topic.
        deciding_sink: the uid of the deciding sink; "": the checkpoint decides.
        sinks: the uids of all sinks.
    """

    def __init__(
        self,
        pipeline: str,
        listener: Listener | None,
        timeout_ms: int | None = None,
        dead_letter_topic: str | None = None,
        deciding_sink: str = "",
        sinks: Sequence[str] = (),
    ) -> None:
        self._counts = PIPELINES[pipeline]
        self._counts.timeout_ms = timeout_ms
        self._counts.deciding_sink, self._counts.sinks = deciding_sink, tuple(sinks)
        self._listener = listener
        self._dead_letter_topic = dead_letter_topic
        self._outcomes = EpochOutcomes()
        self._has_begun = False

    def __call__(self, event: protocol.Event) -> None:
        """See `run.driver.Listener`."""
        counts, was_open = self._counts, self._outcomes.is_open
        if not self._has_begun:  # what is compiled need not start: `explain` does not
            self._has_begun = True
            counts.starts += 1
            counts.started_ms = now_ms()
        outcome = self._outcomes.of(event)
        counts.epochs_started += self._outcomes.is_open and not was_open
        match outcome:
            case EpochOutcome(ran=protocol.EpochRan() as ran):
                self._commit(ran)
            case EpochOutcome(error=Exception() as error):
                counts.aborted[type(error).__name__] += 1
        match event:
            case (
                protocol.ProducerFenced()
                | protocol.TransactionCommitted()
                | protocol.TransactionAborted()
                | protocol.EpochPlanned(None)
            ):
                counts.open_since_ms = 0
            case protocol.EpochRequested() | protocol.EpochPlanned():
                counts.open_since_ms = now_ms()
            case protocol.CommittedRead(committed) if committed.manifest is not None:
                counts.state = committed.manifest.state
            case protocol.EpochRan(committables=prepared):
                counts.transactions.prepared(prepared)
            case protocol.ActionFailed(error):
                counts.failures[type(error).__name__] += 1
                if isinstance(error, FencedError):  # they are the newer run's to end
                    counts.transactions.replace_all(())
        if self._listener is not None:
            self._listener(event)

    def _commit(self, ran: protocol.EpochRan) -> None:
        counts = self._counts
        known = {file.path for step in counts.state for file in step.files}
        written = [file for step in ran.state for file in step.files if file.path not in known]
        counts.written_files += len(written)
        counts.written_bytes += sum(file.size for file in written)
        counts.committed_ms, counts.state = now_ms(), ran.state
        for rows in ran.produced:
            if rows.topic == self._dead_letter_topic:
                counts.dead_letters += rows.record_count
            else:
                counts.rows_written += rows.record_count
        counts.rows_written += sum(committable.record_count for committable in ran.committables)
        for step, count in ran.late:
            counts.late_rows[step] += count


class EpochAge:
    """A listener that warns of epochs that take nearly as long as their transaction may be open.

    The driver's own clock only raises the suspicion, since a transaction begins with its first row,
    perhaps long after its epoch: then Kafka is asked for how long it has been open.

    Source: the behaviour of Flink's enableTransactionTimeoutWarnings.

    Args:
        pipeline: its name.
        timeout: of the epochs' transactions.
        begun_ms: when Kafka says that the open transaction of an id was begun, in ms since 1970;
            0: none is open.
        listener: gets every event too.
    """

    def __init__(
        self,
        pipeline: str,
        timeout: Timeout,
        begun_ms: Callable[[str], int],
        listener: Callable[[protocol.Event], None],
    ) -> None:
        self._pipeline = pipeline
        self._timeout = timeout
        self._begun_ms = begun_ms
        self._listener = listener
        self._producer: Producer | None = None
        self._since = 0.0

    def begin(self, producer: Producer) -> None:
        """Note that the tasks of an epoch may write from now on."""
        self._producer, self._since = producer, time.monotonic()

    def __call__(self, event: protocol.Event) -> None:
        """Check the clock when an epoch has been written, or could not be."""
        match event:
            case protocol.OutputCounted():
                self._look()
            case protocol.ActionFailed(error) if isinstance(error, RetriableError):
                self._explain()
        self._listener(event)

    def _look(self) -> None:
        if self._producer is None or self._passed_ms < self._timeout.warn_ms:
            return
        try:
            begun_ms = self._begun_ms(self._producer.transactional_id)
        except (OSError, TallystickError):
            return  # the commit will say what is in the way
        if not begun_ms:
            return self._explain()
        name, age_ms = f"pipeline {self._pipeline}: the epoch's transaction", now_ms() - begun_ms
        if warning := self._timeout.warning(name, age_ms, "transaction_timeout_ms"):
            logger.warning(warning)

    def _explain(self) -> None:
        if self._producer is not None and self._passed_ms >= self._timeout.timeout_ms:
            logger.warning(
                "pipeline %s: the epoch cannot be committed after %d ms, and its transaction may "
                "be open for %d ms: if Kafka has aborted it for that, it will do so again. Use a "
                "longer transaction_timeout_ms, or shorter epochs",
                self._pipeline,
                self._passed_ms,
                self._timeout.timeout_ms,
            )
        self._producer = None

    @property
    def _passed_ms(self) -> int:
        return int(1000 * (time.monotonic() - self._since))


def counts_of(name: str, topology: OutputTopology, listener: Listener | None) -> EpochCounts:
    """Return a listener that counts a pipeline's epochs, for the sinks of a topology."""
    decider, uids = topology.decider, [uid for uid, _ in topology.by_uid]
    if decider is None:
        return EpochCounts(name, listener, sinks=uids)
    return EpochCounts(
        name,
        listener,
        timeout_ms=decider.transaction_timeout_ms,
        dead_letter_topic=topology.dead_letter_topic,
        deciding_sink=topology.uid,
        sinks=uids,
    )


def of_user(listener: Listener) -> Listener:
    """Return a listener that names itself in the errors of the user's listener."""

    def called(event: Event) -> None:
        with calling_user(f"listener {name_of(listener)}"):
            listener(event)

    return called
