"""The epoch protocol: which action follows which fact.

    IDLE ─► FENCING ─► RESTORING ─► OPENING (first run of a lineage only)
               ▲           │ ▲          │
               │           ▼ └─ asked ──┘
               │         RUNNING ─► PREPARED ─► COMPLETED ─► COMMITTING ─► CONFIRMING ─► READY
               │           │            │           │            │                         │
               └───────────┴── broken ──┴───────────┴─ unknown ──┘         next epoch ─► RUNNING

One Kafka transaction per epoch carries the rows *and* the path of the manifest that belongs to
them. Whether an epoch happened is therefore one fact, and Kafka keeps it.

Invariants:
    * At most one epoch is in flight, so at most one transaction is open.
    * A transaction is committed only after its manifest is durable and its output was counted.
    * What Kafka committed is asked only after all earlier producers are fenced off.
    * What Kafka has not committed did not happen: no recovery ever finishes an old transaction.
    * Before a person is asked to decide, this run proves again that it is not just replaced.
    * An unanswered commit is never followed by an abort: fence as the current owner, then ask.
    * A lineage begins with a committed token, before its first row. So "Kafka holds no token" is
      always "Kafka forgot", never "first run", once any epoch has left a manifest.
    * That first token names the manifest whose state the lineage goes on from: the seed of a
      restored savepoint, or the checkpoint's own where it takes its name back. So the state that
      an epoch goes on from is always that of the manifest which Kafka's token names.

This module does no IO, reads no clock and draws no random number; the simulator relies on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import assert_never

from tallystick.checkpoint import strays, verdict
from tallystick.checkpoint.manifest import Manifest
from tallystick.checkpoint.verdict import Committed, Identity, Request
from tallystick.errors import RetriableError, TallystickError
from tallystick.sink.transaction import ProducedRange, Producer, Token
from tallystick.state.handles import StepState
from tallystick.topic_partition import TopicPartition

ATTEMPTS_MAX = 3
"""How often an epoch is run before its last error is raised; each client call retries by itself."""


class Phase(Enum):
    """Where the one epoch in flight stands."""

    IDLE = auto()  # nothing is known of Kafka yet
    FENCING = auto()  # earlier runs, or an earlier attempt, may still be writing
    RESTORING = auto()  # they are not; what Kafka committed last is being asked
    OPENING = auto()  # the lineage is new: its first token is being committed
    RUNNING = auto()  # tasks read and write into the open transaction
    PREPARED = auto()  # all output is flushed, nothing is visible; the manifest is being written
    COMPLETED = auto()  # the manifest is durable; the output is being counted
    COMMITTING = auto()  # Kafka was told to commit: from here on only Kafka knows
    CONFIRMING = auto()  # committed; what stands behind the reported rows is being looked at
    READY = auto()  # no epoch is in flight, and what Kafka committed last is known
    STOPPING = auto()  # an error is final; the open transaction is being aborted
    STOPPED = auto()  # a person, or a newer run, has to act


_GIVEN_UP = {Phase.FENCING, Phase.STOPPED}
_ABORTED = {Phase.FENCING, Phase.STOPPING}
NEXT_PHASES = {
    Phase.IDLE: {Phase.FENCING},
    Phase.FENCING: {Phase.RESTORING, *_GIVEN_UP},
    Phase.RESTORING: {Phase.OPENING, Phase.RUNNING, Phase.CONFIRMING, *_GIVEN_UP},
    Phase.OPENING: {Phase.RESTORING, *_GIVEN_UP},
    Phase.RUNNING: {Phase.PREPARED, *_ABORTED},
    Phase.PREPARED: {Phase.COMPLETED, *_ABORTED},
    Phase.COMPLETED: {Phase.COMMITTING, *_ABORTED},
    Phase.COMMITTING: {Phase.CONFIRMING, *_GIVEN_UP},
    Phase.CONFIRMING: {Phase.READY, Phase.STOPPED},
    Phase.READY: {Phase.RUNNING, Phase.CONFIRMING, Phase.STOPPED},
    Phase.STOPPING: {Phase.STOPPED},
    Phase.STOPPED: set(),
}
"""Exactly the ways that exist; `tests/checkpoint/test_coordinator.py` takes each of them."""
ABORTABLE = {Phase.RUNNING, Phase.PREPARED, Phase.COMPLETED}
"""Where a transaction may be open and certainly was not told to commit."""
FINAL = {Phase.CONFIRMING, Phase.READY, Phase.STOPPING}
"""Where running the epoch again would not help: it is committed, or it is being given up."""


# Events: facts, in the past tense.
@dataclass(frozen=True, slots=True)
class EpochRequested:
    """Spark wants this epoch run, and will ask again until it has been told that it is done."""

    request: Request


@dataclass(frozen=True, slots=True)
class ProducerFenced:
    """No earlier producer can write or commit any more."""

    producer: Producer


@dataclass(frozen=True, slots=True)
class CommittedRead:
    """Kafka said what it committed last, and the manifest of that was looked up."""

    committed: Committed


@dataclass(frozen=True, slots=True)
class EpochRan:
    """All tasks flushed their output and will not write again; `state` is what they left.

    `late` is for whoever listens: how many rows steps dropped, by uid.
    """

    produced: tuple[ProducedRange, ...]
    state: tuple[StepState, ...] = ()
    late: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ManifestWritten:
    """The manifest is durable."""

    path: str


@dataclass(frozen=True, slots=True)
class OutputCounted:
    """What Kafka holds of the open transaction; None where the cluster does not tell."""

    last_sequences: Mapping[TopicPartition, int] | None


@dataclass(frozen=True, slots=True)
class TransactionCommitted:
    """The output is visible to read_committed consumers."""

    next_producer: Producer


@dataclass(frozen=True, slots=True)
class OutputConfirmed:
    """The log was read between the reported rows and the commit markers."""

    foreign_rows: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class ActionFailed:
    """What was ordered did not succeed; for a RetriableError, whether it acted is unknown."""

    error: Exception


@dataclass(frozen=True, slots=True)
class TransactionAborted:
    """Nothing is open any more, or it will be aborted by its timeout."""


Event = (
    EpochRequested
    | ProducerFenced
    | CommittedRead
    | EpochRan
    | ManifestWritten
    | OutputCounted
    | TransactionCommitted
    | OutputConfirmed
    | ActionFailed
    | TransactionAborted
)


# Actions: orders, in the imperative.
@dataclass(frozen=True, slots=True)
class FenceProducer:
    """Take the transactional id over (None), or prove that it is still ours (`current`)."""

    current: Producer | None


@dataclass(frozen=True, slots=True)
class ReadCommitted:
    """Ask Kafka which epoch it committed last, and read its manifest."""


@dataclass(frozen=True, slots=True)
class RunEpoch:
    """Read, transform and write everything of the epoch into the transaction of `producer`.

    `state` is the committed state that it goes on from.
    """

    checkpoint_id: int
    producer: Producer
    state: tuple[StepState, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Make the manifest durable, at a path that no other run can write."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class CountOutput:
    """Ask Kafka what the open transaction holds."""

    producer: Producer
    produced: tuple[ProducedRange, ...]


@dataclass(frozen=True, slots=True)
class CommitTransaction:
    """Commit the rows together with the token, and with the sources' offsets if there are any."""

    producer: Producer
    token: Token
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConfirmOutput:
    """Look for rows between the reported ones and the commit markers."""

    producer: Producer
    produced: tuple[ProducedRange, ...]


@dataclass(frozen=True, slots=True)
class AbortTransaction:
    """Make readers of the output wait no longer than needed."""

    producer: Producer


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """Tell Spark that the epoch is done, and the sources' groups how far it read."""

    request: Request


@dataclass(frozen=True, slots=True)
class Stop:
    """Raise the error: this run is over."""

    error: Exception


Action = (
    FenceProducer
    | ReadCommitted
    | RunEpoch
    | WriteManifest
    | CountOutput
    | CommitTransaction
    | ConfirmOutput
    | AbortTransaction
    | EndEpoch
    | Stop
)


class Coordinator:
    """Drives one epoch after the other, and every recovery, as Spark asks for them."""

    def __init__(self, identity: Identity) -> None:
        self.phase = Phase.IDLE
        self._identity = identity
        self._request: Request | None = None
        self._attempt = 0
        self._owner: Producer | None = None  # the newest producer that Kafka gave this run
        self._committed: Committed | None = None
        self._manifest: Manifest | None = None  # of the epoch in flight
        self._error: Exception | None = None
        self._refused_before = False

    def step(self, event: Event) -> Action:
        """Take one fact and return what must be done about it."""
        match event:
            case EpochRequested(request):
                return self._start(request)
            case ProducerFenced(producer):
                self._owner = producer
                self._become(Phase.RESTORING)
                return ReadCommitted()
            case CommittedRead(committed):
                self._committed = committed
                return self._decide()
            case EpochRan(produced, state):
                return self._prepare(produced, state)
            case ManifestWritten(path):
                return self._complete(path)
            case OutputCounted(last_sequences):
                return self._check_count(last_sequences)
            case TransactionCommitted(next_producer):
                return self._after_commit(next_producer)
            case OutputConfirmed(foreign_rows):
                return self._finish(foreign_rows)
            case ActionFailed(error):
                return self._broken(error)
            case TransactionAborted():
                assert self._error is not None
                return self._stop(self._error)
            case _:
                assert_never(event)

    def _start(self, request: Request) -> Action:
        assert self.phase in (Phase.IDLE, Phase.READY), f"epoch requested while {self.phase.name}"
        self._request, self._attempt = request, 1
        if self.phase is Phase.READY:
            return self._decide()
        self._become(Phase.FENCING)
        return FenceProducer(current=None)

    def _decide(self) -> Action:
        """Run, skip or refuse the requested epoch, in the light of what Kafka committed."""
        assert self._committed is not None
        match verdict.judge(self._asked, self._committed, self._identity):
            case verdict.Open(base_path):
                self._become(Phase.OPENING)
                token = self._token(self._asked.checkpoint_id - 1, base_path)
                return CommitTransaction(self._producer, token, ())
            case verdict.Run():
                self._become(Phase.RUNNING)
                manifest = self._committed.manifest
                state = () if manifest is None else manifest.state
                return RunEpoch(self._asked.checkpoint_id, self._producer, state)
            case verdict.Done(manifest):
                self._manifest = manifest
                self._become(Phase.CONFIRMING)
                return ConfirmOutput(manifest.producer, manifest.produced)
            case verdict.Refused(error):
                return self._refuse(error)

    def _refuse(self, error: TallystickError) -> Action:
        """Stop for a person to decide; but prove first that this run still owns the pipeline.

        A successor that took over between the fence and the question leaves a token or a manifest
        that this run cannot explain. Nothing is lost then: this run is fenced, and has to say so.
        """
        if self.phase is Phase.RESTORING and not self._refused_before:
            self._refused_before = True
            self._become(Phase.FENCING)
            return FenceProducer(self._owner)
        return self._stop(error)

    def _prepare(self, produced: tuple[ProducedRange, ...], state: tuple[StepState, ...]) -> Action:
        self._become(Phase.PREPARED)
        self._manifest = Manifest(
            checkpoint_id=self._asked.checkpoint_id,
            pipeline=self._identity.pipeline,
            lineage=self._identity.lineage,
            sources=self._asked.sources,
            produced=tuple(sorted(produced)),
            producer=self._producer,
            state=state,
        )
        return WriteManifest(self._manifest)

    def _complete(self, path: str) -> Action:
        assert self._manifest is not None
        self._become(Phase.COMPLETED)
        token = self._token(self._manifest.checkpoint_id, path)
        self._committed = Committed(token, self._manifest, manifest_exists=True)
        return CountOutput(self._producer, self._manifest.produced)

    def _check_count(self, last_sequences: Mapping[TopicPartition, int] | None) -> Action:
        """Commit only what the reporting tasks wrote: Kafka cannot tell their attempts apart."""
        assert self._manifest is not None
        assert self._committed is not None
        assert self._committed.token is not None
        reported = {p.topic_partition: p.last_sequence for p in self._manifest.produced}
        if last_sequences is not None and dict(last_sequences) != reported:
            return self._broken(
                strays.miscount(self._asked.checkpoint_id, reported, last_sequences)
            )
        self._become(Phase.COMMITTING)
        return CommitTransaction(self._producer, self._committed.token, self._asked.sources)

    def _after_commit(self, next_producer: Producer) -> Action:
        written_by, self._owner = self._producer, next_producer
        if self.phase is Phase.OPENING:
            self._become(Phase.RESTORING)
            return ReadCommitted()
        assert self._manifest is not None
        self._become(Phase.CONFIRMING)
        return ConfirmOutput(written_by, self._manifest.produced)

    def _finish(self, foreign_rows: Mapping[TopicPartition, int]) -> Action:
        word = strays.accepting_word(self._asked.checkpoint_id)
        if foreign_rows and word not in self._identity.accepted:
            return self._stop(strays.foreign_rows_error(self._asked.checkpoint_id, foreign_rows))
        self._become(Phase.READY)
        return EndEpoch(self._asked)

    def _broken(self, error: Exception) -> Action:
        """Fence and ask after what may pass; abort and raise after what will not."""
        again = self._attempt < ATTEMPTS_MAX or self.phase is Phase.COMMITTING
        if isinstance(error, RetriableError) and self.phase not in FINAL and again:
            self._attempt += 1
            return self._fence_again(error)
        if self.phase in ABORTABLE:
            self._error = error
            self._become(Phase.STOPPING)
            return AbortTransaction(self._producer)
        return self._stop(self._error or error)

    def _fence_again(self, error: Exception) -> Action:
        if self._attempt > 2 * ATTEMPTS_MAX:  # commit after commit went unanswered
            return self._stop(error)
        self._become(Phase.FENCING)
        return FenceProducer(self._owner)

    def _stop(self, error: Exception) -> Stop:
        self._become(Phase.STOPPED)
        return Stop(error)

    def _token(self, checkpoint_id: int, manifest_path: str) -> Token:
        return Token(
            checkpoint_id, self._identity.lineage, self._identity.checkpoint, manifest_path
        )

    @property
    def committed_manifest(self) -> Manifest | None:
        """The manifest of the epoch that Kafka committed last, as far as this run knows."""
        known = self._committed if self.phase is Phase.READY else None
        return None if known is None else known.manifest

    @property
    def _producer(self) -> Producer:
        assert self._owner is not None, "recovery fences before the first epoch"
        return self._owner

    @property
    def _asked(self) -> Request:
        assert self._request is not None, "an epoch runs only when it was asked for"
        return self._request

    def _become(self, phase: Phase) -> None:
        assert phase in NEXT_PHASES[self.phase], f"{self.phase.name} -> {phase.name}"
        self.phase = phase
