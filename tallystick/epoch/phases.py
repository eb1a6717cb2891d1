"""The phases of an epoch: the data of each, and the table of which may follow which.

A phase is an immutable value, which the coordinator replaces by the next one. What holds in some
phases only is a field of those, so that no other phase can read it: the manifest of an epoch from
PREPARED to CONFIRMING, the first error in STOPPING. What outlives phases (the producer, the newest
decision, whether other sinks were looked through) belongs to the coordinator.

Until its epoch is done, each phase carries the goal: what Structured Streaming or our own loop has
asked for. Our loop has three of them one after the other: `UnplannedGoal`, then perhaps
`UnsettledGoal` for the newest epoch, then `PlannedGoal`.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import ClassVar, Self

from tallystick.epoch.facts import Request
from tallystick.epoch.manifest import Manifest
from tallystick.epoch.tokens import Token


class Phase(Enum):
    """The phase of the one epoch in flight."""

    IDLE = auto()  # nothing is known of Kafka yet
    FENCING = auto()  # earlier runs, or an earlier attempt, may still be writing
    RESTORING = auto()  # earlier writers are fenced; Kafka is asked which epoch it committed last
    PLANNING = auto()  # the committed epoch is known; the next one is being planned
    RECOVERING = auto()  # decided output is being committed in other sinks, the rest aborted
    OPENING = auto()  # the lineage is new: its first token is being committed
    RUNNING = auto()  # tasks read and write into the open transaction
    PREPARED = auto()  # all output is flushed, nothing is visible; the manifest is being written
    COMPLETED = auto()  # the manifest is durable; the token is staged, then the output is counted
    COMMITTING = auto()  # Kafka was asked to commit: from here on only Kafka knows
    SETTLING = auto()  # decided; what tasks prepared in other sinks is being committed
    CONFIRMING = auto()  # committed; what follows the reported rows in the log is being looked at
    READY = auto()  # no epoch is in flight, and what Kafka committed last is known
    STOPPING = auto()  # an error is final; the open transaction is being aborted
    STOPPED = auto()  # a person, or a newer run, has to act


_GIVEN_UP = {Phase.FENCING, Phase.STOPPED}
_ABORTED = {Phase.FENCING, Phase.STOPPING}
NEXT_PHASES = {
    Phase.IDLE: {Phase.FENCING},
    Phase.FENCING: {Phase.RESTORING, *_GIVEN_UP},
    Phase.RESTORING: {
        Phase.PLANNING,
        Phase.OPENING,
        Phase.RECOVERING,
        Phase.RUNNING,
        Phase.CONFIRMING,
        Phase.READY,
        *_GIVEN_UP,
    },
    Phase.PLANNING: {
        Phase.OPENING,
        Phase.RECOVERING,
        Phase.RUNNING,
        Phase.READY,
        *_GIVEN_UP,
    },
    Phase.RECOVERING: {Phase.RUNNING, Phase.CONFIRMING, Phase.READY, *_GIVEN_UP},
    Phase.OPENING: {Phase.RESTORING, *_GIVEN_UP},
    Phase.RUNNING: {Phase.PREPARED, *_ABORTED},
    Phase.PREPARED: {Phase.COMPLETED, *_ABORTED},
    Phase.COMPLETED: {Phase.COMMITTING, *_ABORTED},
    Phase.COMMITTING: {Phase.SETTLING, Phase.CONFIRMING, *_GIVEN_UP},
    Phase.SETTLING: {Phase.CONFIRMING, *_GIVEN_UP},
    Phase.CONFIRMING: {Phase.RUNNING, Phase.READY, Phase.STOPPED},
    Phase.READY: {Phase.PLANNING, Phase.RECOVERING, Phase.RUNNING, Phase.FENCING},
    Phase.STOPPING: {Phase.STOPPED},
    Phase.STOPPED: set(),
}
"""Exactly the ways that exist; `tests/epoch/test_coordinator.py` takes each of them."""


# Goals.


@dataclass(frozen=True, slots=True)
class Tries:
    """The count of attempts at a goal.

    Args:
        attempt: the number of the attempt under way, from 1.
        was_refused: a refusal was withheld once, until the run had proved that it is not replaced.
    """

    attempt: int = 1
    was_refused: bool = False

    def again(self) -> Self:
        """Return the tries after an attempt that failed."""
        return replace(self, attempt=self.attempt + 1)

    def refused(self) -> Self:
        """Return the tries after a withheld refusal."""
        return replace(self, was_refused=True)


@dataclass(frozen=True, slots=True)
class RequestedGoal:
    """The caller has named the epoch and its end offsets, the same in each attempt."""

    request: Request
    tries: Tries = Tries()

    def after_fence(self) -> "RequestedGoal":
        """Return the goal itself: the epoch stays the same in each attempt."""
        return self


@dataclass(frozen=True, slots=True)
class UnplannedGoal:
    """Our own loop wants the next epoch, which is planned once the committed epoch is known.

    Args:
        only_recovers: no epoch is planned; the run ends once nothing of an earlier run lingers.
    """

    only_recovers: bool = False
    tries: Tries = Tries()

    def after_fence(self) -> "UnplannedGoal":
        """Return the goal itself."""
        return self


@dataclass(frozen=True, slots=True)
class UnsettledGoal:
    """The newest epoch may not be settled: our own loop looks after it before it plans the next."""

    request: Request
    only_recovers: bool = False
    tries: Tries = Tries()

    def after_fence(self) -> UnplannedGoal:
        """Return the goal of a new attempt: which epoch is the newest may have changed."""
        return UnplannedGoal(self.only_recovers, self.tries)


@dataclass(frozen=True, slots=True)
class PlannedGoal:
    """Our own loop has planned the next epoch."""

    request: Request
    tries: Tries = Tries()

    def after_fence(self) -> UnplannedGoal:
        """Return the goal of a new attempt: a plan that is not decided by now did not happen."""
        return UnplannedGoal(tries=self.tries)


EpochGoal = RequestedGoal | UnsettledGoal | PlannedGoal
"""A goal whose epoch is known."""
Goal = EpochGoal | UnplannedGoal


# Phases with their data.


@dataclass(frozen=True, slots=True)
class IdlePhase:
    """The run has begun, and nothing was asked of it yet."""

    phase: ClassVar[Phase] = Phase.IDLE


@dataclass(frozen=True, slots=True)
class FencingPhase:
    """Earlier producers are being fenced, before or again for a goal."""

    phase: ClassVar[Phase] = Phase.FENCING
    goal: Goal


@dataclass(frozen=True, slots=True)
class RestoringPhase:
    """The newest decision is being read; a plan from before the fence is forgotten."""

    phase: ClassVar[Phase] = Phase.RESTORING
    goal: RequestedGoal | UnplannedGoal


@dataclass(frozen=True, slots=True)
class PlanningPhase:
    """Our own loop is planning the next epoch."""

    phase: ClassVar[Phase] = Phase.PLANNING
    goal: UnplannedGoal


@dataclass(frozen=True, slots=True)
class RecoveringPhase:
    """Other sinks are being recovered; with an unplanned goal, no epoch follows."""

    phase: ClassVar[Phase] = Phase.RECOVERING
    goal: Goal


@dataclass(frozen=True, slots=True)
class OpeningPhase:
    """The token of the epoch before the goal's is being committed, as the first of a lineage."""

    phase: ClassVar[Phase] = Phase.OPENING
    goal: EpochGoal


@dataclass(frozen=True, slots=True)
class RunningPhase:
    """The tasks of an epoch are running.

    Args:
        goal: with the epoch that runs.
        base_path: of the manifest that the epoch goes on from; "": the lineage begins here.
    """

    phase: ClassVar[Phase] = Phase.RUNNING
    goal: EpochGoal
    base_path: str


@dataclass(frozen=True, slots=True)
class PreparedPhase:
    """The manifest of an epoch whose tasks have ended is being written.

    Args:
        goal: with the epoch that ran.
        manifest: of the epoch.
        has_strays: other attempts may have begun transactions in other sinks, and never reported.
    """

    phase: ClassVar[Phase] = Phase.PREPARED
    goal: EpochGoal
    manifest: Manifest
    has_strays: bool


@dataclass(frozen=True, slots=True)
class CompletedPhase:
    """The output of an epoch with a durable manifest is being counted.

    Args:
        goal: with the epoch that ran.
        manifest: of the epoch.
        has_strays: see `PreparedPhase`.
        token: names the manifest; its commit decides the epoch.
    """

    phase: ClassVar[Phase] = Phase.COMPLETED
    goal: EpochGoal
    manifest: Manifest
    has_strays: bool
    token: Token


@dataclass(frozen=True, slots=True)
class CommittingPhase:
    """The decision of an epoch is being committed.

    Args:
        goal: with the epoch that ran.
        manifest: of the epoch.
        has_strays: see `PreparedPhase`.
    """

    phase: ClassVar[Phase] = Phase.COMMITTING
    goal: EpochGoal
    manifest: Manifest
    has_strays: bool


@dataclass(frozen=True, slots=True)
class SettlingPhase:
    """The committables of a decided manifest are being committed."""

    phase: ClassVar[Phase] = Phase.SETTLING
    goal: EpochGoal
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class ConfirmingPhase:
    """The log behind the committed rows of a manifest is being read.

    Args:
        goal: the epoch that was asked for.
        manifest: of that epoch; or of the one before, if a call for that one failed.
    """

    phase: ClassVar[Phase] = Phase.CONFIRMING
    goal: EpochGoal
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class ReadyPhase:
    """No epoch is in flight.

    Args:
        request: of the epoch that was done last; None: our own loop had none to do.
    """

    phase: ClassVar[Phase] = Phase.READY
    request: Request | None


@dataclass(frozen=True, slots=True)
class StoppingPhase:
    """The open transaction is being aborted after an error.

    Args:
        error: the first one; what fails while giving up does not hide it.
    """

    phase: ClassVar[Phase] = Phase.STOPPING
    error: Exception


@dataclass(frozen=True, slots=True)
class StoppedPhase:
    """The run is over."""

    phase: ClassVar[Phase] = Phase.STOPPED


Abortable = RunningPhase | PreparedPhase | CompletedPhase
"""A transaction may be open, and was certainly not asked to commit."""
Repeatable = (
    FencingPhase
    | RestoringPhase
    | PlanningPhase
    | RecoveringPhase
    | OpeningPhase
    | Abortable
    | CommittingPhase
    | SettlingPhase
)
"""The goal is tried again after an error that may pass; later it is reached, or given up."""
AnyPhase = IdlePhase | Repeatable | ConfirmingPhase | ReadyPhase | StoppingPhase | StoppedPhase
