"""The facts on the page, as values; the page's JSON holds the same.

Times are in ms since 1970. A fact that is not known is None, and the page says so.
"""

from dataclasses import dataclass

from tallystick.ops.due import DueSink
from tallystick.run.console import LogLine
from tallystick.values import CheckFinding


@dataclass(frozen=True, slots=True)
class EpochFact:
    """One epoch.

    Args:
        number: of the epoch.
        decided_ms: when its output became visible; of a checkpoint, when its manifest was written.
        offsets: the number of offsets read, markers of transactions included.
        rows: the number of rows put out, in all sinks.
        records: the number of records read; None: no run reported.
        parts_ms: the time of each part, in order; empty where no run reported.
        size_reason: why the epoch was not larger; "": not known.
        read_bytes: of the record batches read, compressed; None: no run reported.
        written_bytes: of the record batches and files written; None: no run reported.
    """

    number: int
    decided_ms: int | None
    offsets: int | None
    rows: int | None
    records: int | None = None
    parts_ms: tuple[tuple[str, float], ...] = ()
    size_reason: str = ""
    read_bytes: int | None = None
    written_bytes: int | None = None

    @property
    def took_ms(self) -> float:
        """The sum of the epoch's parts."""
        return sum(ms for _, ms in self.parts_ms)

    @property
    def read(self) -> int | None:
        """The records read by the epoch, or the offsets where no run reported."""
        return self.offsets if self.records is None else self.records


@dataclass(frozen=True, slots=True)
class NodeFact:
    """A node of the job's graph, with rates of the last seconds.

    Args:
        kind: `source`, `tasks` or `sink`.
        name: of the input, the step or the sink.
        texts: topics, functions, or keys.
        tasks: the number of tasks; None: it has none, or no epoch has ended.
        in_per_s: rows, or records, that came in per second; None: not known.
        out_per_s: rows handed on per second; None: not known.
        busy: the share of their time in which the tasks worked; None: not known.
        waiting: the share in which they waited for other tasks; None: not known.
        watermark_ms: of the step; None: it has none.
        lag: offsets left to read, of a source; None: not known.
    """

    kind: str
    name: str
    texts: tuple[str, ...]
    tasks: int | None = None
    in_per_s: float | None = None
    out_per_s: float | None = None
    busy: float | None = None
    waiting: float | None = None
    watermark_ms: int | None = None
    lag: int | None = None


@dataclass(frozen=True, slots=True)
class TaskFact:
    """A task in the newest epoch.

    Args:
        step: as the graph names it.
        number: of the task in its step.
        host: of its process.
        rows_in: rows, or records, that it got.
        rows_out: rows that it handed on.
        busy_ms: the time in which it worked.
        wait_ms: the time in which it waited for other tasks.
        watermark_ms: of its step, which all tasks share; None: the step has none.
    """

    step: str
    number: int
    host: str
    rows_in: int
    rows_out: int
    busy_ms: float
    wait_ms: float
    watermark_ms: int | None


@dataclass(frozen=True, slots=True)
class PartitionFact:
    """The progress in reading a partition.

    Args:
        topic: of several inputs, with the id of its input and a slash before it.
        partition: its number.
        position: the next offset to read.
        end: the readable end; None where it is unknown.
    """

    topic: str
    partition: int
    position: int
    end: int | None

    @property
    def lag(self) -> int | None:
        """The number of offsets left to read."""
        return None if self.end is None else max(0, self.end - self.position)


@dataclass(frozen=True, slots=True)
class StepFact:
    """The committed state of a keyed step.

    Args:
        uid: names the step.
        watermark_ms: the watermark of event times; None: the step has none.
        size: the bytes of all files.
        files: the number of files.
        max_parallelism: the number of key groups.
        parts: of each task, the first and the last key group, and their approximate bytes.
        skew: the size of the largest part over the average.
        late_rows: rows dropped since the run began; None: no run reported.
        rebuilt_copies: local copies that its tasks had to rebuild in the newest epochs; None: no
            run reported.
        reused_copies: local copies that its tasks found up to date in the same epochs.
    """

    uid: str
    watermark_ms: int | None
    size: int
    files: int
    max_parallelism: int
    parts: tuple[tuple[int, int, int], ...]
    skew: float
    late_rows: int | None = None
    rebuilt_copies: int | None = None
    reused_copies: int | None = None


@dataclass(frozen=True, slots=True)
class TransactionFact:
    """An open or prepared transaction.

    Args:
        name: the transactional id.
        state: the state, in words.
        age_ms: the time since the start; None: not known.
        timeout_ms: Kafka aborts the transaction after this time; 0: never.
        partitions: the partitions with rows.
        says: the status, in a sentence.
    """

    name: str
    state: str
    age_ms: int | None
    timeout_ms: int
    partitions: tuple[str, ...]
    says: str


@dataclass(frozen=True, slots=True)
class ErrorFact:
    """An error that an epoch ended with.

    Args:
        at_ms: when.
        kind: its class.
        text: its message, without anything of records or state.
        meaning: why such an error is raised.
        action: what to do about it.
        command: what to type; "": nothing.
    """

    at_ms: int
    kind: str
    text: str
    meaning: str
    action: str
    command: str


@dataclass(frozen=True, slots=True)
class RunFact:
    """The facts known only to the process that runs the pipeline.

    Args:
        status: `Running`, `Waiting for data`, `Stopped`, or `Failed`.
        since_ms: when the run began.
        run_id: of the run.
        trigger: the trigger, by its name.
        execution: `resident` or `jobs`.
        starts: how often this process has started the pipeline.
        aborted: the number of aborted epochs, by the class of the error.
        rows_by_topic: rows of committed epochs, by topic, or by sink where it has none.
        dead_letter_topic: the topic with malformed records; "": none.
        records_per_s: records of the epochs decided in the last 10 s, per second.
        rows_per_s: rows put out by these epochs, per second.
        records_per_busy_s: records read in the newest epochs, per second of the epochs' own time:
            about what the run could read without a pause.
        epoch_open_ms: the start of the epoch in flight; None: none is.
    """

    status: str
    since_ms: int
    run_id: str
    trigger: str
    execution: str
    starts: int
    aborted: tuple[tuple[str, int], ...]
    rows_by_topic: tuple[tuple[str, int], ...]
    dead_letter_topic: str
    records_per_s: float
    rows_per_s: float
    records_per_busy_s: float
    epoch_open_ms: int | None

    @property
    def dead_letters(self) -> int:
        """The number of malformed records that were put aside."""
        return dict(self.rows_by_topic).get(self.dead_letter_topic, 0)


@dataclass(frozen=True, slots=True)
class EventTimesFact:
    """The partitions of a run, as the watermark of the first step counts them.

    Args:
        waited_for: the number of partitions that the watermark waits for.
        slowest: the slowest of them, which holds the watermark; "": none does.
        idle_count: the number of partitions not waited for, since they are read to their ends.
        idle: the first of the idle partitions.
        ended_count: the number of partitions at the end of their stream.
        held_count: the number of partitions not read on, too far ahead of the slowest.
        held: the first of the held partitions.
    """

    waited_for: int
    slowest: str
    idle_count: int
    idle: tuple[str, ...]
    ended_count: int
    held_count: int
    held: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PageFacts:
    """The whole page.

    Args:
        name: the pipeline's name; "": not known yet.
        checkpoint: the location of the checkpoint.
        looked_ms: when the checkpoint and Kafka were read.
        decided: the newest decided epoch; None: there is none, or it is not known.
        decided_by: the decider.
        producer: the transactional id, and the producer's id and epoch, of that epoch.
        epochs: the newest ones, the newest last.
        partitions: of all sources.
        steps: with state.
        transactions: those of the pipeline.
        recovery: the command to type if the pipeline's process is dead; "": none.
        findings: of the doctor's checks, the worst first.
        errors: of this run, the newest last.
        run: None: no run in this process.
        kafka: whether Kafka was asked, and answered.
        event_times: of the run; None: no run in this process, or none of its steps has event times.
        graph: the layers of the job; each node hands rows to all of the next layer. Without a run
            in this process: as the newest run has noted it, without rates.
        tasks: those of the run's newest epoch.
        log: the newest lines of the process that runs the pipeline, the newest last.
        due: the sinks in which decided epochs wait to be published.
    """

    name: str
    checkpoint: str
    looked_ms: int
    decided: EpochFact | None = None
    decided_by: str = ""
    producer: str = ""
    epochs: tuple[EpochFact, ...] = ()
    partitions: tuple[PartitionFact, ...] = ()
    steps: tuple[StepFact, ...] = ()
    transactions: tuple[TransactionFact, ...] = ()
    recovery: str = ""
    findings: tuple[CheckFinding, ...] = ()
    errors: tuple[ErrorFact, ...] = ()
    run: RunFact | None = None
    kafka: bool = False
    event_times: EventTimesFact | None = None
    graph: tuple[tuple[NodeFact, ...], ...] = ()
    tasks: tuple[TaskFact, ...] = ()
    log: tuple[LogLine, ...] = ()
    due: tuple[DueSink, ...] = ()

    @property
    def read_name(self) -> str:
        """The name of the count in `EpochFact.read`."""
        is_told = any(epoch.records is not None for epoch in self.epochs)
        return "Records in" if is_told else "Offsets in"

    @property
    def lag(self) -> int | None:
        """The lag of all partitions; None where an end is not known."""
        known = [partition.lag for partition in self.partitions if partition.lag is not None]
        return sum(known) if len(known) == len(self.partitions) and known else None

    @property
    def by_lag(self) -> list[PartitionFact]:
        """The partitions, those with the most lag first."""
        return sorted(self.partitions, key=lambda partition: -(partition.lag or 0))
