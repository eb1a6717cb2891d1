"""The readers of the facts on the page: a checkpoint with its Kafka, and a run of this process.

`CheckpointReader` never changes anything, whether a process runs the pipeline or not. Each question
is asked where a command of `tallystick` asks it too. `LiveRun` adds the facts of the events in its
own process.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tallystick.checkpoint.decision_log import decider_of
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.newest import ask_nobody
from tallystick.checkpoint.newest_run import newest_run
from tallystick.epoch import protocol
from tallystick.epoch.manifest import Manifest, epoch_of
from tallystick.epoch.two_phase import Committable
from tallystick.errors import TallystickError, without_values
from tallystick.host.stopwatch import now_ms
from tallystick.kafka import cluster
from tallystick.kafka.client import Client
from tallystick.kafka.config import KafkaConfig
from tallystick.ops.checkpoint_view import CheckpointView, asking_again, look
from tallystick.ops.doctor import diagnose
from tallystick.ops.file_checks import file_findings
from tallystick.ops.inspection import FAILED, UNDECIDED, Report, StepReport, inspect
from tallystick.ops.remedies import remedy_of
from tallystick.ops.transactions import (
    OURS,
    KafkaCluster,
    LingeringTransaction,
    TransactionStatus,
    describe,
    in_order,
    recovery,
)
from tallystick.ops.ui.facts import (
    EpochFact,
    ErrorFact,
    EventTimesFact,
    PageFacts,
    PartitionFact,
    RunFact,
    StepFact,
    TransactionFact,
)
from tallystick.ops.ui.job import measured, tasks_of, unmeasured
from tallystick.pipeline.listeners import PIPELINES, EpochOutcome, EpochOutcomes, source_progress
from tallystick.run.console import LINES
from tallystick.run.driver import Listener
from tallystick.run.part_times import COMMIT, CONFIRM, COUNT, MANIFEST, OTHER_SINKS, PLAN, TASKS
from tallystick.run.query import PROGRESS_COUNT, Query
from tallystick.source.offsets import SourceOffsets, of_input, parse_source
from tallystick.source.splits import plan_splits
from tallystick.source.subscription import LATEST
from tallystick.storage.file_storage import FileStorage
from tallystick.values import CheckFinding, ProducedRange, Severity, TopicPartition

PATIENCE_MS = 5_000
"""The time Kafka has for an answer: a page shows soon what did not answer."""


class CheckpointReader:
    """A reader that looks at a checkpoint, and Kafka, on each request.

    Args:
        checkpoint: its location.
        options: of the connection to the cluster that decides, with Kafka's names; None: Kafka is
            not asked, and the page says so where a fact is not known.
        trigger_interval_ms: of the pipeline; None: not known, or epochs follow each other at once.

    Raises:
        OptionError: the location or an option cannot work.
    """

    def __init__(
        self,
        checkpoint: str,
        options: Mapping[str, str] | None,
        trigger_interval_ms: int | None = None,
    ) -> None:
        self._trigger_interval_ms = trigger_interval_ms
        self._storage = FileStorage(checkpoint)
        self._options = options
        self._config = None
        if options is not None:
            patience = {"delivery.timeout.ms": PATIENCE_MS, "request.timeout.ms": PATIENCE_MS - 1}
            timeouts = {name: str(value) for name, value in patience.items()}
            self._config = KafkaConfig.from_options({**options, **timeouts})

    def read(self) -> PageFacts:
        """Look now; an error becomes a finding."""
        looked_ms = now_ms()  # all that is found was there then, or came later
        findings = self._findings()
        # A Kafka that does not answer is not waited for twice.
        is_there = not any(finding.check == "kafka" for finding in findings)
        kafka = _Kafka(self._config) if self._config is not None and is_there else None
        facts = PageFacts("", self._storage.location, looked_ms, kafka=kafka is not None)
        try:
            facts = self._read(facts, kafka)
        except (TallystickError, OSError) as error:
            known = {finding.found for finding in findings}
            if str(error) not in known:
                findings = (CheckFinding(Severity.ERROR, "page", str(error)), *findings)
        finally:
            if kafka is not None:
                kafka.close()
        return replace(facts, findings=findings)

    def _findings(self) -> tuple[CheckFinding, ...]:
        if self._options is not None:
            place = self._storage.uri
            return diagnose(
                place,
                self._options,
                verify=False,
                patience_ms=PATIENCE_MS,
                trigger_interval_ms=self._trigger_interval_ms,
            ).findings
        try:
            report = inspect(self._storage)
        except TallystickError as error:
            return (CheckFinding(Severity.ERROR, "checkpoint", str(error)),)
        return tuple(file_findings(report))

    def _read(self, facts: PageFacts, kafka: "_Kafka | None") -> PageFacts:
        open_now = () if kafka is None else kafka.cluster.lingering()
        ask = ask_nobody if kafka is None else asking_again(kafka.cluster.ask)
        view = look(self._storage, ask)
        decider = decider_of(self._storage)
        facts = replace(
            facts,
            name=view.pipeline,
            decided_by="" if decider is None else str(decider),
            transactions=_transactions(open_now, view),
            recovery=recovery(view),
        )
        newest = view.decided
        if newest is not None:
            facts = replace(
                facts,
                decided=self._epoch(view.decided_path, newest, None),
                producer=_producer(newest),
                partitions=_partitions(newest, kafka),
            )
        report = inspect(self._storage, ask=None if kafka is None else ask)
        steps = tuple(map(_step, report.steps))
        run = newest_run(self._storage)
        watermarks = {step.uid: step.watermark_ms for step in steps}
        graph = () if run is None else unmeasured(run.graph, facts.partitions, watermarks)
        epochs = self._epochs(report)
        return replace(facts, steps=steps, epochs=epochs, graph=graph, due=report.due)

    def _epochs(self, report: Report) -> tuple[EpochFact, ...]:
        """Return the retained epochs that count, as far as is known."""
        paths = [
            output.manifest_path
            for output in report.outputs
            if output.standing not in (FAILED, UNDECIDED)
        ]
        known = CheckpointFolder(self._storage).manifests(paths)
        befores = [None, *known.values()]
        return tuple(
            self._epoch(path, manifest, before)
            for before, (path, manifest) in zip(befores, known.items(), strict=False)
            if manifest.origin is None
        )

    def _epoch(self, path: str, manifest: Manifest, before: Manifest | None) -> EpochFact:
        return EpochFact(
            number=manifest.checkpoint_id,
            decided_ms=self._storage.written_ms(path),
            offsets=_offsets_between(before, manifest),
            rows=rows_of(manifest),
        )


class _Kafka:
    """The cluster that decides."""

    def __init__(self, config: KafkaConfig) -> None:
        self.client = Client(config)
        self.cluster = KafkaCluster(config)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
        self.cluster.close()


def rows_of(manifest: Manifest) -> int:
    """Return the number of rows that an epoch put out, in all sinks."""
    rows = sum(produced.record_count for produced in manifest.produced)
    return rows + sum(committable.record_count for committable in manifest.committables)


def _sources(manifest: Manifest) -> list[SourceOffsets]:
    """Return the positions of the sources that are ours."""
    parsed = map(parse_source, manifest.sources)
    return [source for source in parsed if source is not None]


def _offsets_between(before: Manifest | None, manifest: Manifest) -> int | None:
    """Return the number of offsets read by an epoch; None if the manifest before is gone."""
    if before is None or before.checkpoint_id != manifest.checkpoint_id - 1:
        return None
    starts = {source.input: source for source in _sources(before)}
    return sum(
        split.offset_count
        for stop in _sources(manifest)
        for start in [starts.get(stop.input, SourceOffsets(stop.cluster_id, stop.group))]
        if not stop.initial
        for split in plan_splits(start, stop)
    )


def _partitions(manifest: Manifest, kafka: _Kafka | None) -> tuple[PartitionFact, ...]:
    """Return the position of each partition, and its end if the partition's cluster is asked."""
    facts = []
    for source in _sources(manifest):
        ends: Mapping[TopicPartition, int] = {}
        if kafka is not None and source.cluster_id == cluster.cluster_id(kafka.client):
            ends = cluster.list_offsets(kafka.client, source.positions, LATEST, absent_after_s=0.0)
        facts += [
            PartitionFact(*of_input(source.input, partition), position, ends.get(partition))
            for partition, position in sorted(source.positions.items())
        ]
    return tuple(facts)


def _step(step: StepReport) -> StepFact:
    return StepFact(
        uid=step.uid,
        watermark_ms=step.watermark_ms,
        size=step.size,
        files=step.snapshots + step.changelogs,
        max_parallelism=step.max_parallelism,
        parts=tuple((part.first, part.last, part.size) for part in step.parts),
        skew=step.skew,
    )


def _transactions(
    lingering: Iterable[LingeringTransaction], view: CheckpointView
) -> tuple[TransactionFact, ...]:
    """Return the transactions that belong to the pipeline."""
    described = [
        (transaction, describe(transaction, view)) for transaction in in_order(lingering, view)
    ]
    return tuple(
        TransactionFact(
            name=transaction.transactional_id,
            state=transaction.state,
            age_ms=max(0, now_ms() - transaction.begun_ms) if transaction.begun_ms else None,
            timeout_ms=transaction.timeout_ms,
            partitions=tuple(map(str, transaction.partitions)),
            says=description.says,
        )
        for transaction, description in described
        if description.standing in OURS or description.standing is TransactionStatus.ENDING
    )


def _producer(manifest: Manifest) -> str:
    """Return the writer of an epoch, in words."""
    producer = manifest.producer
    if not producer.transactional_id:
        return ""
    return (
        f"{producer.transactional_id}, producer {producer.producer_id}, "
        f"epoch {producer.producer_epoch}"
    )


ERRORS_KEPT = 20
EVENT_TIMES_SHOWN = 10
"""The most partitions that are named of a kind."""
BEGINS = CheckFinding(Severity.INFO, "checkpoint", "the first epoch has not ended yet")
THROUGHPUT_EPOCHS = 20
"""The number of newest epochs that tell how much a run could read."""
RATE_S = 10
"""The time over which rates are taken."""
FRESH_MS = 10_000
"""The age up to which a progress tells the ends of logs, and a transaction is the run's at work."""
READ, PROCESS, EXCHANGE, WRITE, WAIT, DECIDE, REST = (
    "read", "process", "exchange", "write", "wait", "decide", "rest",
)  # fmt: skip
PARTS = (PLAN, READ, PROCESS, EXCHANGE, WRITE, WAIT, DECIDE, REST)
"""The parts of an epoch as the page has them."""
_OF_TASKS = {"read": READ, "decode": READ, "functions": PROCESS, "state": PROCESS,
             "exchange": EXCHANGE, "write": WRITE, "wait": WAIT, "other": REST}  # fmt: skip
_OF_DRIVER = {PLAN: PLAN, **dict.fromkeys((MANIFEST, COUNT, COMMIT, OTHER_SINKS, CONFIRM), DECIDE)}


class LiveRun:
    """A listener that keeps a run's facts for the page, and passes every event on.

    Args:
        listener: the user's; None: there is none.
        trigger: when epochs begin, as `start` was given it.
        dead_letter_topic: where malformed records go; "": nowhere.
    """

    def __init__(
        self,
        listener: Listener | None,
        trigger: Mapping[str, Any] | None = None,
        dead_letter_topic: str = "",
    ) -> None:
        self._listener = listener
        self.trigger = trigger
        self._dead_letter_topic = dead_letter_topic
        self._since_ms = now_ms()
        self._query: Query | None = None
        self._open_ms: int | None = None
        self._outcomes = EpochOutcomes()
        self._first_ms: int | None = None
        self._written = -1  # the newest epoch with a manifest of this run
        self._decided: dict[int, tuple[int, Counter[str]]] = {}  # epoch: when, and rows by place
        self._rows: Counter[str] = Counter()
        self._aborted: Counter[str] = Counter()
        self._errors: deque[tuple[int, type[BaseException], str]] = deque(maxlen=ERRORS_KEPT)
        self._has_final = False  # among these is what ended the run

    def show(self, query: Query) -> None:
        """Show a query, once it is started."""
        self._query = query

    def __call__(self, event: protocol.Event) -> None:
        """See `run.driver.Listener`."""
        if isinstance(event, protocol.EpochPlanned):
            self._open_ms = None if event.sources is None else now_ms()
        if isinstance(event, protocol.ManifestWritten):
            self._written = epoch_of(event.path)
        if isinstance(event, protocol.ActionFailed):
            self._errors.append((now_ms(), type(event.error), without_values(event.error)))
        match self._outcomes.of(event):
            case EpochOutcome(number, ran=protocol.EpochRan() as ran):
                self._commit(number, ran)
            case EpochOutcome(error=Exception() as error):
                self._aborted[type(error).__name__] += 1
                self._open_ms = None
        if self._listener is not None:
            self._listener(event)

    def _commit(self, number: int, ran: protocol.EpochRan) -> None:
        outputs: list[ProducedRange | Committable] = [*ran.produced, *ran.committables]
        rows = Counter[str]()
        for output in outputs:
            rows[_place(output)] += output.record_count
        self._rows.update(rows)
        self._decided[number] = now_ms(), rows
        while len(self._decided) > PROGRESS_COUNT:
            del self._decided[next(iter(self._decided))]
        self._first_ms = self._first_ms or now_ms()
        self._open_ms = None

    def add_to(self, facts: PageFacts) -> PageFacts:
        """Return the facts of a checkpoint with those of the run, which are newer."""
        query = self._query
        begins = self._first_ms is None or facts.looked_ms <= self._first_ms
        # No error where a run begins. In the middle of the look its lineage may be opened (that
        # is epoch -1), or its first epoch decided, which Kafka may say before the driver is told.
        decided = -1 if facts.decided is None else facts.decided.number
        its_own = decided in (-1, self._written) or decided in self._decided
        if begins and facts.kafka and its_own:
            facts = replace(facts, findings=(BEGINS,))
        if query is None:
            return facts
        progress = query.recentProgress
        epochs = tuple(map(self._epoch, progress))
        newest = progress[-1] if progress else None
        recent, recent_s = _recent(epochs, now_ms(), self._since_ms)
        steps = self._steps(facts, query)
        watermarks = {step.uid: step.watermark_ms for step in steps}
        counts = PIPELINES[query.name]
        decided_ms = epochs[-1].decided_ms if epochs else None
        is_known = facts.kafka or now_ms() - (decided_ms or 0) <= FRESH_MS
        partitions = () if newest is None else _run_partitions(newest, facts.partitions)
        if not is_known:  # Kafka does not answer, and what the run last saw of it is old
            partitions = tuple(replace(at, end=None) for at in partitions)
        transactions = facts.transactions
        if query.isActive:
            transactions = tuple(it for it in transactions if not self._is_at_work(it))
        return replace(
            facts,
            name=query.name,
            epochs=epochs or facts.epochs,
            decided=epochs[-1] if epochs else facts.decided,
            partitions=partitions or facts.partitions,
            transactions=transactions,
            steps=steps,
            errors=self._all_errors(query, facts.checkpoint),
            run=self._run(query, epochs, recent, recent_s),
            event_times=_event_times(newest),
            graph=measured(
                unmeasured(counts.graph, partitions or facts.partitions, watermarks),
                progress[len(progress) - len(recent) :],
                recent_s,
                self._put_out(recent),
            ),
            tasks=tasks_of(counts.graph, counts.tasks, watermarks),
            log=LINES.newest(),
        )

    def _put_out(self, epochs: Iterable[EpochFact]) -> Counter[str]:
        """Return the rows of epochs, by topic or sink."""
        rows = Counter[str]()
        for epoch in epochs:
            rows.update(self._decided.get(epoch.number, (0, Counter[str]()))[1])
        return rows

    def _is_at_work(self, transaction: TransactionFact) -> bool:
        """True if a transaction is that of an epoch in flight, and is not open for long."""
        age_ms = transaction.age_ms
        return age_ms is not None and age_ms < min(FRESH_MS, now_ms() - self._since_ms)

    def _steps(self, facts: PageFacts, query: Query) -> tuple[StepFact, ...]:
        counts, rebuilt, reused = PIPELINES[query.name], Counter[str](), Counter[str]()
        for progress in query.recentProgress:
            for task in progress["tasks"]:
                rebuilt[task["step"]] += task.get("rebuiltCopies", 0)
                reused[task["step"]] += task.get("reusedCopies", 0)
        watermarks = {step.uid: step.watermark_ms for step in counts.state}
        return tuple(
            replace(
                step,
                late_rows=counts.late_rows[step.uid],
                watermark_ms=watermarks.get(step.uid, step.watermark_ms),
                rebuilt_copies=rebuilt[step.uid],
                reused_copies=reused[step.uid],
            )
            for step in facts.steps
        )

    def _all_errors(self, query: Query, checkpoint: str) -> tuple[ErrorFact, ...]:
        """Return the errors of epochs, and the error that ended the run."""
        final = query.exception()
        if final is not None and not self._has_final:
            self._has_final = True
            shown = type(final), without_values(final)
            if not self._errors or self._errors[-1][1:] != shown:
                self._errors.append((now_ms(), *shown))
        return tuple(
            ErrorFact(
                at_ms=at_ms,
                kind=kind.__name__,
                text=text,
                meaning=remedy_of(kind).meaning,
                action=remedy_of(kind).action,
                command=remedy_of(kind).command_for(checkpoint),
            )
            for at_ms, kind, text in tuple(self._errors)
        )

    def _epoch(self, progress: Mapping[str, Any]) -> EpochFact:
        number, size = progress["batchId"], progress["epochSize"]
        decided_ms, rows = self._decided.get(number, (None, None))
        moved, files = progress.get("bytes"), progress.get("files")
        return EpochFact(
            number=number,
            decided_ms=decided_ms,
            offsets=None if size is None else size["offsets"],
            rows=None if rows is None else rows.total(),
            records=progress["numInputRows"],
            parts_ms=parts_of(progress),
            size_reason="" if size is None else size["because"],
            read_bytes=None if moved is None else moved["read"],
            written_bytes=None
            if moved is None or files is None
            else moved["written"] + files["bytes"],
        )

    def _run(
        self,
        query: Query,
        epochs: tuple[EpochFact, ...],
        recent: Sequence[EpochFact],
        recent_s: float,
    ) -> RunFact:
        newest = epochs[-THROUGHPUT_EPOCHS:]
        took_s = sum(epoch.took_ms for epoch in newest) / 1000
        status = "Failed" if query.exception() is not None else query.status["message"]
        return RunFact(
            status=status,
            since_ms=self._since_ms,
            run_id=query.runId,
            trigger=_trigger_text(self.trigger),
            execution=(query.lastProgress or {}).get("execution", ""),
            starts=PIPELINES[query.name].starts,
            aborted=tuple(sorted(self._aborted.items())),
            rows_by_topic=tuple(sorted(self._rows.items())),
            dead_letter_topic=self._dead_letter_topic,
            records_per_s=sum(epoch.records or 0 for epoch in recent) / recent_s,
            rows_per_s=sum(epoch.rows or 0 for epoch in recent) / recent_s,
            records_per_busy_s=sum(epoch.records or 0 for epoch in newest) / took_s
            if took_s
            else 0.0,
            epoch_open_ms=self._open_ms if query.isActive else None,
        )


def _recent(
    epochs: Sequence[EpochFact], at_ms: int, since_ms: int
) -> tuple[Sequence[EpochFact], float]:
    """Return the epochs decided in the last `RATE_S` seconds, and the seconds in which they were.

    These are fewer where the run is younger, or where its progress does not reach back so far; and
    more where an epoch takes longer.

    Args:
        epochs: those of the progress, oldest first.
        at_ms: now.
        since_ms: when the run began.
    """
    span_ms = max(1000 * RATE_S, round(1.5 * epochs[-1].took_ms) if epochs else 0)
    first_ms = max(since_ms, at_ms - span_ms)
    if len(epochs) == PROGRESS_COUNT:
        oldest, *epochs = epochs
        first_ms = max(first_ms, oldest.decided_ms or 0)
    recent = [epoch for epoch in epochs if (epoch.decided_ms or 0) > first_ms]
    return recent, max(1, at_ms - first_ms) / 1000


def parts_of(progress: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Return the time of an epoch, divided into the parts of the page.

    The time of the tasks is divided in the proportions of the busiest task of each step.

    Args:
        progress: of the epoch, as `Query.recentProgress` has it.
    """
    spent = dict.fromkeys(PARTS, 0.0)
    durations: Mapping[str, int] = progress["durationMs"]
    shares: Counter[str] = Counter()
    for step in progress["tasks"]:
        for part, ms in step["busiestMs"].items():
            shares[_OF_TASKS[part]] += ms
    total = sum(shares.values())
    for name, ms in durations.items():
        if name == TASKS and total:
            for part, share in shares.items():
                spent[part] += ms * share / total
        elif name != "triggerExecution":
            spent[_OF_DRIVER.get(name, REST)] += ms
    return tuple((part, round(ms, 1)) for part, ms in spent.items())


def _run_partitions(
    progress: Mapping[str, Any], looked: Iterable[PartitionFact]
) -> tuple[PartitionFact, ...]:
    """Return the positions of a run; the end of a partition is the later one of two looks.

    The run's own look may be old: a run that hangs no longer looks.
    """
    ends = {(partition.topic, partition.partition): partition.end for partition in looked}
    facts = []
    for source in source_progress(progress):
        for partition, position in sorted(source.positions.items()):
            name = of_input(source.input, partition)
            known = (source.latest.get(partition), ends.get(name))
            end = max((it for it in known if it is not None), default=None)
            facts.append(PartitionFact(*name, position, end))
    return tuple(facts)


def _event_times(progress: Mapping[str, Any] | None) -> EventTimesFact | None:
    """Return the event times of partitions in the newest epoch."""
    event_times = (progress or {}).get("eventTimes")
    if event_times is None:
        return None
    counts = event_times["counts"]
    return EventTimesFact(
        waited_for=counts["waitedFor"],
        slowest=event_times["slowest"] or "",
        idle_count=counts["idle"],
        idle=tuple(event_times["idle"][:EVENT_TIMES_SHOWN]),
        ended_count=counts["ended"],
        held_count=counts["held"],
        held=tuple(event_times["held"][:EVENT_TIMES_SHOWN]),
    )


def _place(output: ProducedRange | Committable) -> str:
    """Return the topic or the sink of an output."""
    if isinstance(output, ProducedRange):
        return output.topic
    return output.sink


def _trigger_text(trigger: Mapping[str, Any] | None) -> str:
    """Name the trigger."""
    if not trigger:
        return "none: as soon as there is something to read"
    return ", ".join(
        name if value is True else f"{name}: {value}" for name, value in trigger.items()
    )
