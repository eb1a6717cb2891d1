"""Two-phase commit with any system that can hold rows back: the protocol that all sinks share.

    task     begin ─► write … ─► prepare ─► committable ─┐        nothing is visible yet
    driver                                               └─► manifest ─► decision ─► commit

A *committable* is what a task hands over: rows that are durable somewhere and not yet visible, with
all that another process needs to make them visible, after any crash. The decision (see
`checkpoint`) is taken once for the whole epoch, in one place. Every committable of the epoch is
committed after the decision, with as many tries as it takes; none is committed before.

Invariants:
    * Committables are committed only if a decided manifest names them, and aborted only if none
      does. A recovery settles both before the next epoch begins.
    * `commit` and `abort` are idempotent: a caller in doubt calls again.
    * The outcome of a committable is proved (by a token inside the transaction) or the job stops.
    * Each attempt of each task has transactions of its own; which attempt counts is decided by the
      manifest alone. Two attempts never share one.

Source: the behaviours of Flink's TwoPhaseCommitSinkFunction and of its Committer (FLIP-143).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, Self

import pyarrow as pa

from tallystick.arguments import not_one_of


class Guarantee(Enum):
    """A sink's promise; see "Writing exactly once" for what may happen after which fault."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"
    NONE = "none"


def guarantee_problem(guarantee: str) -> str | None:
    """Return the problem with a guarantee as a user names it; None: there is none."""
    known = [member.value for member in Guarantee]
    if guarantee in known:
        return None
    return str(not_one_of("guarantee", guarantee, known))


class Outcome(Enum):
    """The proven end of a committable."""

    COMMITTED = auto()
    LOST = auto()
    """It was aborted, by a timeout or by hand, and can no longer be committed."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of transactions: a sink of a pipeline.

    Args:
        pipeline: its name.
        sink: the sink's uid, of letters, digits, `.`, `_` and `-`; unique in the pipeline.
        lineage: of the checkpoint that the pipeline goes on from; "": see `Sink.open`.
    """

    pipeline: str
    sink: str
    lineage: str


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a transaction in a pipeline's work.

    Args:
        owner: the sink.
        checkpoint_id: the epoch.
        task: the task's index among those that write.
        attempt: Spark's number of the task's attempt, from 0.
        nonce: drawn for this attempt: no other one, of any run, has it. Hexadecimal.
    """

    owner: Owner
    checkpoint_id: int
    task: int
    attempt: int
    nonce: str


@dataclass(frozen=True, slots=True, order=True)
class Committable:
    """The output that a task attempt prepared in a sink.

    Args:
        sink: the uid of its sink.
        checkpoint_id: the epoch.
        task: the index of its task.
        name: the other system's name for it; no other committable of the sink has the same.
        record_count: how many rows it holds; 0 if that is not known (what a recovery finds).
        begun_ms: when it was begun, in ms since 1970; 0 if that is not known.
        details: what else its sink needs to commit it: text that only the sink reads, without
            secrets.
    """

    sink: str
    checkpoint_id: int
    task: int
    name: str
    record_count: int
    begun_ms: int
    details: str = ""

    def to_fields(self) -> dict[str, Any]:
        """Return the fields, of JSON's own types."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Read back what `to_fields` made.

        Raises:
            TypeError: a field is missing, unknown or of another type.
        """
        committable = cls(**fields)
        for name, kind in cls.__annotations__.items():
            if type(getattr(committable, name)) is not kind:
                raise TypeError(f"{name} of a committable: expected {kind}")
        return committable


class Transaction(Protocol):
    """The open transaction of a task attempt; it never leaves the task."""

    def write(self, rows: pa.RecordBatch) -> None:
        """Write a batch of at least one row, in order. It may be kept: nobody changes the batch.

        Raises:
            RecordError: a row cannot be written as asked; the error says which.
            RetriableError: the system cannot take it now; the epoch is aborted and runs again.
        """
        ...

    def prepare(self) -> Sequence[Committable]:
        """Make all written rows durable, but not visible; called once, as the last thing."""
        ...

    def abort(self) -> None:
        """Clean up after a failed attempt. Never raises; a recovery finds whatever stays."""
        ...


class TransactionPlan(Protocol):
    """The settings with which tasks begin their transactions in an epoch; pickled for the tasks."""

    def begin(self, place: Place) -> Transaction:
        """Begin a transaction; called when a task has its first rows.

        This aborts whatever an earlier attempt left under the same name.
        """
        ...


class LossyTransaction:
    """A transaction with `guarantee="none"`: rows that cannot be written are left out, and counted.

    Args:
        begin: begins a transaction whose rows are visible once it is prepared.
        place: whose rows they are.
        passed_over: the errors after which it goes on.
        warn: takes the one warning, at the end.
        by_batch: each batch is a transaction; else all rows of the task are, and share one fate.
    """

    def __init__(
        self,
        begin: Callable[[], Transaction],
        place: Place,
        passed_over: tuple[type[Exception], ...],
        warn: Callable[[str], None],
        *,
        by_batch: bool,
    ) -> None:
        self._begin, self._place, self._by_batch = begin, place, by_batch
        self._passed_over, self._warn = passed_over, warn
        self._open: Transaction | None = None
        self._open_count = self._lost_count = 0
        self._error: Exception | None = None

    def write(self, rows: pa.RecordBatch) -> None:
        """See `Transaction.write`."""
        self._open_count += rows.num_rows
        if self._error is None or self._by_batch:
            self._try(lambda: self._write(rows))

    def prepare(self) -> Sequence[Committable]:
        """See `Transaction.prepare`; there is nothing to commit."""
        self._try(self._end)
        lost_count = self._lost_count + self._open_count
        if lost_count:
            place = self._place
            self._warn(
                f"sink {place.owner.sink}: {lost_count} rows of epoch {place.checkpoint_id}, task "
                f"{place.task} are lost, and guarantee='none' goes on without them; the first "
                f"error: {self._error}"
            )
        return ()

    def abort(self) -> None:
        """See `Transaction.abort`."""
        if self._open is not None:
            self._open.abort()
            self._open = None

    def _write(self, rows: pa.RecordBatch) -> None:
        self._open = self._open or self._begin()
        self._open.write(rows)
        if self._by_batch:
            self._end()

    def _end(self) -> None:
        if self._open is not None:
            self._open.prepare()
            self._open, self._open_count = None, 0

    def _try(self, do: Callable[[], None]) -> None:
        try:
            do()
        except self._passed_over as error:
            self._error = self._error or error
            self._lost_count, self._open_count = self._lost_count + self._open_count, 0
            self.abort()


class Timeout(NamedTuple):
    """The time after which a system aborts a prepared transaction by itself.

    Args:
        timeout_ms: counted from the begin of the transaction.
        warn_share: the share of the timeout after which a commit, or a recovery, is warned about.
    """

    timeout_ms: int
    warn_share: float = 0.8

    @property
    def warn_ms(self) -> float:
        """The age from which on a transaction is warned about."""
        return self.warn_share * self.timeout_ms

    def warning(self, transaction: str, age_ms: int, setting: str = "timeout") -> str | None:
        """Return a warning where a transaction is committed nearly too late; None: it is not."""
        if age_ms < self.warn_ms:
            return None
        return (
            f"{transaction} is committed {age_ms} ms after it was begun, which is "
            f"{100 * age_ms // self.timeout_ms} % of its timeout of {self.timeout_ms} ms: what is "
            f"open longer is aborted. Use a longer {setting}, or shorter epochs"
        )


class TwoPhaseCommitSink(Protocol):
    """The driver's side of a sink, for one run of a pipeline; yours for a system of your own."""

    @property
    def timeout(self) -> Timeout | None:
        """The timeout of transactions; None: there is none."""
        ...

    def plan(self) -> TransactionPlan:
        """Return the plan of the next epoch. Called after everything earlier was settled."""
        ...

    def commit(self, committable: Committable) -> Outcome:
        """Make a committable visible, find it visible already, or prove it lost. Idempotent.

        Raises:
            RetriableError: the outcome is unknown for now: `commit` is called again later.
            DataLossError: the outcome can never be known.
        """
        ...

    def abort(self, committable: Committable) -> None:
        """Abort a committable; do nothing if it is gone. Never undoes a commit. Idempotent."""
        ...

    def lingering(self, owner: Owner) -> Iterable[Committable]:
        """Return everything of this owner that is open or prepared, of any run, task or attempt.

        This includes tasks that are gone, and runs that never completed a checkpoint.
        """
        ...

    def describe(self, committable: Committable) -> str:
        """Describe a committable to a person: the system's name for it, the rows, their place."""
        ...

    def close(self) -> None:
        """Close connections at the end of the run."""
        ...


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts that a sink's settings are checked against. Times in ms; None: not known.

    Args:
        trigger_interval_ms: how long Spark waits between two epochs.
        tasks: how many tasks Spark runs at a time, or a keyed step has; a DataFrame may have more.
        earlier_ids: transactional ids of the pipeline that the checkpoint's newest manifests name,
            besides the present one: its prefix was changed.
        are_checked: the sink was opened with these settings before, and gave its warnings.
        accepted: decisions that the user stated.
    """

    trigger_interval_ms: int | None = None
    tasks: int = 1
    earlier_ids: frozenset[str] = frozenset()
    are_checked: bool = False
    accepted: frozenset[str] = frozenset()


class Sink(Protocol):
    """An output as a user gives it to `Pipeline.write`: frozen, picklable, connected to nothing.

    `kind` is a word such as `"postgres"`; `uid` names the sink in the pipeline, for as long as its
    transactions may be pending (None: its kind and its place among those of that kind).
    """

    @property
    def kind(self) -> str:
        """One word."""
        ...

    @property
    def uid(self) -> str | None:
        """Chosen by the user."""
        ...

    def open(self, owner: Owner, facts: RunFacts) -> TwoPhaseCommitSink:
        """Connect, and check all that can be checked; on the driver.

        At the start only settings are checked, before any checkpoint is known: the owner's lineage
        is "" then, and nothing is left but what every run needs, such as a table. The run
        opens the sink again, with its lineage. Warnings go to the log, unless the facts say that
        they did before.

        Raises:
            OptionError: something cannot work; all problems are named.
        """
        ...


@dataclass(frozen=True, slots=True)
class DueOutput:
    """Decided output of a sink that waits to be published.

    Args:
        epochs: the number of epochs.
        rows: of all their files.
        files: the number of files.
        size: in bytes.
        since_ms: when the first of them became due, in ms since 1970; 0: none is.
        every_ms: how long they are meant to wait.
    """

    epochs: int = 0
    rows: int = 0
    files: int = 0
    size: int = 0
    since_ms: int = 0
    every_ms: int = 0


class Lost(NamedTuple):
    """A decided committable that can no longer be committed.

    Args:
        committable: the lost one.
        what: its sink's description for a person.
    """

    committable: Committable
    what: str


class Settlement(NamedTuple):
    """The result of commits: the lost committables, and the first error, if any."""

    lost: tuple[Committable, ...]
    error: Exception | None


PATIENCE_S = 120.0
"""The time in one sink for all commits of an epoch, or all aborts; as for Kafka by default."""
LAST_TRY_S = 3.0
"""The time for a commit whose turn comes when the time for all of them is over."""


def try_ends_at(all_end_at: float, now: float) -> float:
    """Return the end of a try: the deadline of all tries, but at least `LAST_TRY_S` from now."""
    return max(all_end_at, now + LAST_TRY_S)


Answer = Outcome | Exception
"""The outcome of one commit; an exception: it is open."""


def _in_order(
    attempt: Callable[[Committable], Answer], committables: Sequence[Committable]
) -> Iterable[Answer]:
    return map(attempt, committables)


def commit_all(
    committables: Iterable[Committable],
    commit: Callable[[Committable], Outcome],
    run: Callable[
        [Callable[[Committable], Answer], Sequence[Committable]], Iterable[Answer]
    ] = _in_order,
) -> Settlement:
    """Try to commit every committable; an error ends no other commit, the first in order is kept.

    Args:
        committables: decided ones.
        commit: commits one, or raises.
        run: calls a function, which never raises an `Exception`, with each committable, and returns
            the results in the same order; one after the other by default.
    """
    waiting = tuple(committables)
    lost: list[Committable] = []
    first: Exception | None = None

    def attempt(committable: Committable) -> Answer:
        try:
            return commit(committable)
        except Exception as error:
            return error

    for committable, answer in zip(waiting, run(attempt, waiting), strict=True):
        if isinstance(answer, Exception):
            first = first or answer
        elif answer is Outcome.LOST:
            lost.append(committable)
    return Settlement(tuple(lost), first)


def to_abort(
    lingering: Iterable[Committable], decided: Iterable[Committable]
) -> tuple[Committable, ...]:
    """Return the lingering committables that no decided manifest names: a recovery aborts them.

    Called after the decided ones were tried: a decided committable that could not be committed yet
    still lingers, and must stay.
    """
    named = {(committable.sink, committable.name) for committable in decided}
    return tuple(
        committable
        for committable in lingering
        if (committable.sink, committable.name) not in named
    )
