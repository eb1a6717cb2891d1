"""Two-phase commit with any system that can hold rows back: the protocol that all sinks share.

    task     begin ─► write … ─► prepare ─► committable ─┐        nothing is visible yet
    driver                                               └─► manifest ─► decision ─► commit

A *committable* is what a task hands over: rows that are durable somewhere and not visible, with all
that is needed to make them so, from another process, after any crash. The decision (see
`checkpoint`) is taken once for all of an epoch, in one place. After it every committable of the
epoch is committed, as often as it takes; before it none is.

Invariants:
    * Committables are committed only if a decided manifest names them, and aborted only if none
      does. A recovery settles both before the next epoch begins.
    * `commit` and `abort` are idempotent: whoever is in doubt calls again.
    * What became of a committable is proved (by a token inside the transaction) or the job stops.
    * Each attempt of each task has transactions of its own; which attempt counts is decided by the
      manifest alone. Two attempts never share one.

Source: the behaviours of Flink's TwoPhaseCommitSinkFunction and of its Committer (FLIP-143).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, Self

import pyarrow as pa


class Guarantee(Enum):
    """A sink's promise; see "Writing exactly once" for what may happen after which fault."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"
    NONE = "none"


def guarantee_problem(guarantee: str) -> str | None:
    """Return what is wrong with a guarantee as a user names it; None: nothing."""
    known = [each.value for each in Guarantee]
    if guarantee in known:
        return None
    return f"guarantee={guarantee!r}: expected one of {', '.join(map(repr, known))}"


class Outcome(Enum):
    """The proven end of a committable."""

    COMMITTED = auto()
    LOST = auto()
    """It was aborted, by a timeout or by hand, and can never be committed any more."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of transactions: one sink of one pipeline.

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
        nonce: drawn for this attempt: no other one, of whatever run, has it. Hexadecimal.
    """

    owner: Owner
    checkpoint_id: int
    task: int
    attempt: int
    nonce: str


@dataclass(frozen=True, slots=True, order=True)
class Committable:
    """Something that one attempt of a task prepared.

    Args:
        sink: the uid of its sink.
        checkpoint_id: the epoch.
        task: the index of its task.
        name: under which the other system knows it; no other committable of the sink has it.
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
        """Read back what `to_fields` made."""
        return cls(**fields)


class Transaction(Protocol):
    """A transaction that one attempt of a task writes into; lives in that task only."""

    def write(self, rows: pa.RecordBatch) -> None:
        """Take rows, in order; there is at least one.

        Raises:
            RecordError: a row cannot be written as asked; it says which.
            RetriableError: the system is in the way; the epoch is aborted and runs again.
        """
        ...

    def prepare(self) -> Sequence[Committable]:
        """Make all that was written durable, and not visible; called once, as the last thing."""
        ...

    def abort(self) -> None:
        """The attempt failed: let go of everything. Never raises; what stays is found later."""
        ...


class TransactionPlan(Protocol):
    """How tasks begin transactions in one epoch; it is pickled on its way to them."""

    def begin(self, place: Place) -> Transaction:
        """Begin a transaction; called when a task has its first rows.

        Whatever an earlier attempt left under the same name is aborted by it.
        """
        ...


class Timeout(NamedTuple):
    """When a system aborts a prepared transaction by itself.

    Args:
        timeout_ms: counted from its begin.
        warn_share: from which share of it on a commit, or a recovery, is warned about.
    """

    timeout_ms: int
    warn_share: float = 0.8


class TwoPhaseCommitSink(Protocol):
    """The driver's side of a sink, for one run of a pipeline; yours for a system of your own."""

    @property
    def timeout(self) -> Timeout | None:
        """When transactions time out; None: never."""
        ...

    def plan(self) -> TransactionPlan:
        """Asked before each epoch, after everything earlier was settled."""
        ...

    def commit(self, committable: Committable) -> Outcome:
        """Make it visible, or find that it is, or prove that it is lost. Idempotent.

        Raises:
            RetriableError: the outcome is unknown for now: asked again later.
            DataLossError: the outcome can never be known.
        """
        ...

    def abort(self, committable: Committable) -> None:
        """Give it up; nothing happens if it is gone already. Never undoes a commit. Idempotent."""
        ...

    def lingering(self, owner: Owner) -> Iterable[Committable]:
        """Everything of this owner that is open or prepared, of whatever run, task or attempt.

        Also of tasks that do not exist any more, and of runs that never completed a checkpoint.
        """
        ...

    def describe(self, committable: Committable) -> str:
        """Return what a person needs to find it: the system's name for it, rows, where they are."""
        ...

    def close(self) -> None:
        """The run is over: close connections."""
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
    """

    trigger_interval_ms: int | None = None
    tasks: int = 1
    earlier_ids: frozenset[str] = frozenset()
    are_checked: bool = False


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


class Committer:
    """The committables that wait for a decision, by checkpoint, in durable order.

    Completing checkpoint n is the word for all up to n: a notification may be skipped, late, or
    repeated.

    Source: Flink's CommittableCollector and TwoPhaseCommitSinkFunction.pendingCommitTransactions.
    """

    def __init__(self) -> None:
        self._pending: dict[int, tuple[Committable, ...]] = {}

    def prepared(self, checkpoint_id: int, committables: Iterable[Committable]) -> None:
        """Take what tasks prepared for a checkpoint, in place of what an earlier attempt did."""
        self._pending[checkpoint_id] = tuple(sorted(committables))

    def forget(self, checkpoint_id: int) -> None:
        """The checkpoint failed: nothing names its committables, a recovery aborts them."""
        self._pending.pop(checkpoint_id, None)

    def completed(self, checkpoint_id: int) -> tuple[Committable, ...]:
        """Return what to commit now that a checkpoint is complete: all up to it, oldest first."""
        due = sorted(known for known in self._pending if known <= checkpoint_id)
        return tuple(each for known in due for each in self._pending[known])

    def settled(self, committable: Committable) -> None:
        """The outcome is known: it is pending no more."""
        left = self._pending.get(committable.checkpoint_id, ())
        kept = tuple(each for each in left if each != committable)
        if kept:
            self._pending[committable.checkpoint_id] = kept
        else:
            self._pending.pop(committable.checkpoint_id, None)

    @property
    def pending(self) -> tuple[Committable, ...]:
        """Everything that waits, oldest checkpoint first."""
        return tuple(each for known in sorted(self._pending) for each in self._pending[known])


class Lost(NamedTuple):
    """A decided committable that can never be committed any more.

    Args:
        committable: what it was.
        what: as its sink describes it to a person.
    """

    committable: Committable
    what: str


class Settlement(NamedTuple):
    """How commits ended: what is lost, and the first error, which left its outcome open."""

    lost: tuple[Committable, ...]
    error: Exception | None


PATIENCE_S = 120.0
"""How long all commits of an epoch, or aborts, may take in one sink, as for Kafka by default."""
LAST_TRY_S = 3.0
"""The time for a commit whose turn comes when the time for all of them is over."""


def try_ends_at(all_end_at: float, now: float) -> float:
    """Return when one try must end, so that all share one deadline and each is tried."""
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
    settled: Callable[[Committable], None] = lambda _: None,
    run: Callable[
        [Callable[[Committable], Answer], Sequence[Committable]], Iterable[Answer]
    ] = _in_order,
) -> Settlement:
    """Try every one; an error ends none of the others, and the first in order is the one raised.

    Args:
        committables: decided ones.
        commit: commits one, or raises.
        settled: told each whose outcome is known, in order.
        run: calls a function, which never raises an `Exception`, with each, and returns what it
            returned in their order; one after the other unless told.
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
            continue
        if answer is Outcome.LOST:
            lost.append(committable)
        settled(committable)
    return Settlement(tuple(lost), first)


def to_abort(
    lingering: Iterable[Committable], decided: Iterable[Committable]
) -> tuple[Committable, ...]:
    """Return what a recovery has to abort: what lingers, and no decided manifest names.

    Asked after the decided ones were tried: one of those that could not be committed yet still
    lingers, and must stay.
    """
    named = {(each.sink, each.name) for each in decided}
    return tuple(each for each in lingering if (each.sink, each.name) not in named)
