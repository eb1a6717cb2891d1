"""Facts that the page shows, as values; its JSON holds the same.

Times are in ms since 1970. What is not known is None, and the page says so.
"""

from dataclasses import dataclass

from tallystick.epoch.findings import CheckFinding


@dataclass(frozen=True, slots=True)
class EpochFact:
    """One epoch.

    Args:
        number: of the epoch.
        decided_ms: when its output became visible; of a checkpoint, when its manifest was written.
        offsets: how many it read, markers of transactions included.
        rows: how many it put out, in all sinks.
        records: how many it read; None: no run reported.
        parts_ms: how long its parts took, in their order; empty where no run reported.
        size_reason: why it was not larger; "": not known.
    """

    number: int
    decided_ms: int | None
    offsets: int | None
    rows: int | None
    records: int | None = None
    parts_ms: tuple[tuple[str, float], ...] = ()
    size_reason: str = ""

    @property
    def took_ms(self) -> float:
        """The sum of the epoch's parts."""
        return sum(ms for _, ms in self.parts_ms)

    @property
    def read(self) -> int | None:
        """The records read by the epoch, or the offsets where no run reported."""
        return self.offsets if self.records is None else self.records


@dataclass(frozen=True, slots=True)
class PartitionFact:
    """The progress of reading one partition.

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
        watermark_ms: of event times; None: it has none.
        size: bytes of its files.
        files: how many.
        max_parallelism: how many key groups there are.
        parts: of each task, its first and last key group, and about how many bytes they have.
        skew: the largest part over the average.
        late_rows: dropped since this run began; None: no run reported.
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
    """A transaction that is open or prepared.

    Args:
        name: its transactional id.
        state: in words.
        age_ms: since it was begun; None: not known.
        timeout_ms: after which Kafka aborts it; 0: never.
        partitions: those with rows.
        says: whose it is, and what settles it.
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
    """The facts that only the process which runs the pipeline knows.

    Args:
        status: `Running`, `Waiting for data`, `Stopped`, or `Failed`.
        since_ms: when the run began.
        run_id: of the run.
        trigger: when epochs begin, by its name.
        execution: `resident` or `jobs`.
        starts: how often this process has started the pipeline.
        aborted: epochs that did not come about, by the class of the error.
        rows_by_topic: rows of committed epochs, by topic, or by sink where it has none.
        dead_letter_topic: the one of these with malformed records; "": none.
        records_per_s: read in the newest epochs, per second of their time.
        rows_per_s: put out in the same.
        epoch_open_ms: since when an epoch is in flight; None: none is.
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
    epoch_open_ms: int | None

    @property
    def dead_letters(self) -> int:
        """The number of malformed records that were put aside."""
        return dict(self.rows_by_topic).get(self.dead_letter_topic, 0)


@dataclass(frozen=True, slots=True)
class EventTimesFact:
    """The partitions of a run, by what the watermark of its first step makes of them.

    Args:
        waited_for: how many the watermark waits for.
        slowest: of these, the one that holds it; "": none does.
        idle_count: how many are not waited for: they are read to their ends.
        idle: the first of them.
        ended_count: how many are at the end of their stream.
        held_count: how many are not read on, since they are too far ahead of the slowest.
        held: the first of them.
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
        name: the pipeline's; "": not known yet.
        checkpoint: its location.
        looked_ms: when the checkpoint and Kafka were read.
        decided: the newest decided epoch; None: there is none, or it is not known.
        decided_by: the decider.
        producer: the transactional id, and the producer's id and epoch, of that epoch.
        epochs: the newest ones, the newest last.
        partitions: of all sources.
        steps: with state.
        transactions: those of the pipeline.
        recovery: what to type where the pipeline's process is dead; "": nothing.
        findings: of the doctor's checks, the worst first.
        errors: of this run, the newest last.
        run: None: no run in this process.
        kafka: whether Kafka was asked, and answered.
        event_times: of the run; None: no run in this process, or none of its steps has event times.
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

    @property
    def read_name(self) -> str:
        """The name of what `EpochFact.read` counts."""
        is_told = any(each.records is not None for each in self.epochs)
        return "Records in" if is_told else "Offsets in"

    @property
    def lag(self) -> int | None:
        """The lag of all partitions; None where an end is not known."""
        known = [each.lag for each in self.partitions if each.lag is not None]
        return sum(known) if len(known) == len(self.partitions) and known else None

    @property
    def by_lag(self) -> list[PartitionFact]:
        """The partitions, those with the most lag first."""
        return sorted(self.partitions, key=lambda each: -(each.lag or 0))
