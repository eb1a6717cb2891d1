"""The epoch protocol: a state machine that answers each fact with an action.

    IDLE ─► FENCING ─► RESTORING ─► OPENING (first run of a lineage only)
               ▲           │ ▲          │
               │           │ └─ asked ──┘
               │           ▼
               │      RECOVERING (with other sinks only)
               │           ▼
               │         RUNNING ─► PREPARED ─► COMPLETED ─► COMMITTING ─► CONFIRMING ─► READY
               │           │            │           │            │    └─ SETTLING ─┘       │
               └───────────┴── broken ──┴───────────┴─ unknown ──┘         next epoch ─► RUNNING

A caller with a plan of its own requests an epoch by its number and end offsets. Our own loop asks
for the next epoch, which is planned after RESTORING or READY (PLANNING): after the fence, and from
the committed epoch. When our loop starts, it settles the newest epoch once more and aborts
lingering transactions, even if there is nothing to read (later too, now and again); a recovery
alone ends there.

One Kafka transaction per epoch carries the rows *and* the path of their manifest. So whether an
epoch happened is a single fact, which Kafka keeps; without such a transaction, the checkpoint's log
of decisions keeps it, behind the same port.

Other sinks are participants: the manifest names the committables of their tasks, which are
committed after the decision (SETTLING), by this run or by the recovery of the next (RECOVERING).

Invariants:
    * At most one epoch is in flight, so at most one transaction is open.
    * A transaction is committed after its manifest is durable, and right after its output's count.
    * Kafka is asked which epoch it committed last only after all earlier producers are fenced off.
    * An undecided epoch did not happen: no recovery ever commits a transaction that no decided
      manifest names.
    * No epoch runs before everything that a decided manifest names is committed, and every other
      lingering transaction is aborted. Lingering transactions are aborted only if this run, after
      listing them, has proved that no newer run replaced it: else they could be a successor's.
    * A caller hears that an epoch is done only after SETTLING, so an epoch before the requested one
      is settled in all sinks.
    * So a sink may be taken out of a pipeline once the epoch after the last one with it is
      requested.
    * A caller that goes on after an error breaks this; but the failure was noted, so the
      committables of the decided epoch are committed again.
    * A decided epoch runs again only if all of its output is lost, so that nothing is repeated; and
      not if a person stated to go on without it.
    * Before a person is asked to decide, this run proves again that no newer run has replaced it.
    * No epoch follows one of which the caller has other end offsets than its manifest: the log of a
      caller can be replaced or lost, the manifest of a committed epoch cannot.
    * An epoch is requested once in a run: a second request would not be a replay, but a call with
      other rows. The caller refuses it, and notes it for the next run.
    * An unanswered commit is never followed by an abort: fence as the current owner, then ask.
    * A lineage begins with a committed token, before its first row. So if an epoch has left a
      manifest and Kafka holds no token, Kafka forgot the token: this is never a first run.
    * The first token names the manifest whose state the lineage goes on from: the seed of a
      restored savepoint, or the checkpoint's own manifest where it takes its name back. So an epoch
      always goes on from the state of the manifest that Kafka's token names.

This module does no IO, reads no clock and draws no random number; the simulator relies on it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar, assert_never

from tallystick.epoch import protocol, refusals, verdict
from tallystick.epoch.facts import CommittedEpoch, Request
from tallystick.epoch.manifest import KAFKA, Identity, Manifest
from tallystick.epoch.phases import (
    NEXT_PHASES,
    Abortable,
    AnyPhase,
    CommittingPhase,
    CompletedPhase,
    ConfirmingPhase,
    EpochGoal,
    FencingPhase,
    Goal,
    IdlePhase,
    OpeningPhase,
    Phase,
    PlannedGoal,
    PlanningPhase,
    PreparedPhase,
    ReadyPhase,
    RecoveringPhase,
    Repeatable,
    RequestedGoal,
    RestoringPhase,
    RunningPhase,
    SettlingPhase,
    StoppedPhase,
    StoppingPhase,
    UnplannedGoal,
    UnsettledGoal,
)
from tallystick.epoch.protocol import Action, Event
from tallystick.epoch.two_phase import Committable, Lost
from tallystick.errors import RetriableError, TallystickError
from tallystick.values import Producer, TopicPartition

RECOVER_EVERY = 10
"""After how many epochs other sinks are looked through, for what task attempts left that lost."""
ATTEMPTS_MAX = 3
"""The times an epoch is run before its last error is raised; each client call retries by itself."""

InPhase = TypeVar("InPhase", bound=AnyPhase)


class Coordinator:
    """Drives the epochs in order, and every recovery, when the caller asks.

    Args:
        identity: of the pipeline that runs.
        decided_by: where decisions are kept, as manifests name it.
        has_participants: there are other sinks than the one whose transaction decides.
    """

    def __init__(
        self, identity: Identity, decided_by: str = KAFKA, *, has_participants: bool = False
    ) -> None:
        self._identity = identity
        self._decided_by = decided_by
        self._has_participants = has_participants
        self._state: AnyPhase = IdlePhase()
        self._owner: Producer | None = None  # the newest producer that Kafka gave this run
        self._committed: CommittedEpoch | None = None
        self._prepared: tuple[Committable, ...] = ()
        self._is_recovered = False  # nothing of an earlier run lingers in other sinks

    def step(self, event: Event) -> Action:
        """Take a fact about the epoch and return the next action."""
        if isinstance(event, protocol.Beginning):
            return self._take_up(event)
        if isinstance(event, protocol.ParticipantsDone):
            return self._after_participants(event)
        match event:
            case protocol.ProducerFenced(producer):
                return self._restore(producer)
            case protocol.CommittedRead(committed):
                return self._restored(committed)
            case protocol.EpochRan():
                return self._prepare(event)
            case protocol.ManifestWritten(path):
                return self._complete(path)
            case protocol.OutputCounted(last_sequences):
                return self._check_count(last_sequences)
            case protocol.TransactionCommitted(next_producer):
                return self._after_commit(next_producer)
            case protocol.OutputConfirmed(foreign_rows):
                return self._finish(foreign_rows)
            case protocol.ActionFailed(error):
                return self._broken(error)
            case protocol.TransactionAborted():
                return self._stop(self._in(StoppingPhase).error)
            case _:
                assert_never(event)

    # --- until an epoch is to run -----------------------------------------------------------

    def _take_up(self, event: protocol.Beginning) -> Action:
        match event:
            case protocol.EpochRequested(request, logged):
                return self._start(request, logged)
            case protocol.EpochWanted():
                return self._want(UnplannedGoal())
            case protocol.RecoveryWanted():
                return self._want(UnplannedGoal(only_recovers=True))
            case protocol.EpochPlanned():
                return self._planned(event)

    def _start(self, request: Request, logged: tuple[str, ...] | None) -> Action:
        goal = RequestedGoal(request)
        if isinstance(self._state, IdlePhase):
            return self._fence(goal)
        before = self._in(ReadyPhase).request
        assert before is not None, "a run is ready after its first epoch"
        assert before.checkpoint_id != request.checkpoint_id, "an epoch is requested once in a run"
        # Epochs are requested in order, and this run heard of all that were requested.
        self._committed = replace(
            self._known, logged=logged, begun=(), is_partial=False, has_failed=False
        )
        return self._decide(goal)

    def _want(self, goal: UnplannedGoal) -> Action:
        """Answer our own loop: find out what is committed first, then plan."""
        if isinstance(self._state, IdlePhase):
            return self._fence(goal)
        self._in(ReadyPhase)
        return self._plan(goal)

    def _fence(self, goal: Goal) -> Action:
        """Take the pipeline over, or prove that this run still owns the pipeline."""
        self._become(FencingPhase(goal))
        return protocol.FenceProducer(self._owner)

    def _restore(self, producer: Producer) -> Action:
        goal = self._in(FencingPhase).goal
        self._owner, self._is_recovered = producer, False
        self._become(RestoringPhase(goal.after_fence()))
        return protocol.ReadCommitted()

    def _restored(self, committed: CommittedEpoch) -> Action:
        goal = self._in(RestoringPhase).goal
        # A loop of our own looks back in any case, whether or not a call has failed.
        failed = committed.has_failed and isinstance(goal, RequestedGoal)
        self._committed = replace(committed, decided_by=self._decided_by, has_failed=failed)
        return self._look_back(goal) if isinstance(goal, UnplannedGoal) else self._decide(goal)

    def _look_back(self, goal: UnplannedGoal) -> Action:
        """Settle the newest epoch, if a run may not have done so; then plan the next."""
        match verdict.look_back(self._known, self._identity):
            case verdict.Refusal(error):
                return self._refuse(goal, error)
            case None:
                return self._plan(goal)
            case Request() as newest:
                return self._decide(UnsettledGoal(newest, goal.only_recovers, goal.tries))

    def _plan(self, goal: UnplannedGoal) -> Action:
        if goal.only_recovers:
            return self._end_without_epoch(goal)
        self._become(PlanningPhase(goal))
        return protocol.PlanEpoch(*verdict.following(self._known, self._identity))

    def _end_without_epoch(self, goal: UnplannedGoal) -> Action:
        """Abort what no decided manifest names, unless done already; then end without an epoch."""
        if self._has_participants and not self._is_recovered:
            self._become(RecoveringPhase(goal))
            return protocol.RecoverParticipants(self._producer, (), self._named)
        if not isinstance(self._state, ReadyPhase):
            self._become(ReadyPhase(None))
        return protocol.EndEpoch(None)

    def _planned(self, event: protocol.EpochPlanned) -> Action:
        goal, sources, start = self._in(PlanningPhase).goal, event.sources, event.start
        epoch = verdict.following(self._known, self._identity).checkpoint_id
        request = Request(epoch, sources or start, may_skip=False, start=start)
        judged = verdict.judge(request, self._known, self._identity)
        if sources is None and isinstance(judged, verdict.Run):
            self._is_recovered = self._is_recovered and not event.looks_through
            return self._end_without_epoch(goal)
        if sources is None and not isinstance(judged, verdict.Open):
            self._become(ReadyPhase(None))  # what lingers may be another's
            return protocol.EndEpoch(None)
        return self._decide(PlannedGoal(request, goal.tries))

    def _decide(self, goal: EpochGoal) -> Action:
        """Run, skip or refuse the goal's epoch, in the light of what Kafka committed."""
        known = self._known
        match judged := verdict.judge(goal.request, known, self._identity):
            case verdict.Open(base_path):
                return self._open(goal, base_path)
            case verdict.Run() | verdict.AlreadyCommitted():
                is_settled = isinstance(judged, verdict.Run) and not known.has_failed
                decided, settled = ((), self._named) if is_settled else (self._named, ())
                if self._is_to_recover(goal) and (decided or self._has_participants):
                    self._become(RecoveringPhase(goal))
                    return protocol.RecoverParticipants(self._producer, decided, settled)
                return self._resume_own_epoch(goal, judged)
            case verdict.Refusal(error):
                if self._named and known.has_failed and isinstance(self._state, RestoringPhase):
                    self._become(RecoveringPhase(goal))  # a timeout would not wait for the person
                    return protocol.RecoverParticipants(self._producer, self._named)
                return self._refuse(goal, error)

    def _open(self, goal: EpochGoal, base_path: str) -> Action:
        """Begin a lineage: after a base, or with a manifest of where its first epoch reads from."""
        self._become(OpeningPhase(goal))
        before = goal.request.checkpoint_id - 1
        if goal.request.start and not base_path:
            beginning = self._identity.manifest(
                before, goal.request.start, self._producer, self._decided_by
            )
            return protocol.WriteManifest(beginning, is_seed=True)
        # A user's function may have left out epochs after its base.
        epochs = {base.path: base.manifest.checkpoint_id for base in self._known.bases}
        token = self._identity.token(epochs.get(base_path, before), base_path)
        return protocol.CommitTransaction(self._producer, token, opens=True)

    def _is_to_recover(self, goal: EpochGoal) -> bool:
        """At the start and after a failure; and now and then, for what failed attempts left."""
        return not self._is_recovered or goal.request.checkpoint_id % RECOVER_EVERY == 0

    def _resume_own_epoch(
        self, goal: EpochGoal, judged: verdict.Run | verdict.AlreadyCommitted
    ) -> Action:
        match judged:
            case verdict.Run() if self._known.has_failed and self._known.manifest is not None:
                # Its finding may not have been reported.
                return self._confirm(goal, self._known.manifest)
            case verdict.Run():
                return self._run_after_newest(goal)
            case verdict.AlreadyCommitted(manifest):
                return self._confirm(goal, manifest)

    def _after_participants(self, event: protocol.ParticipantsDone) -> Action:
        match event:
            case protocol.ParticipantsRecovered(lost, producer):
                self._owner, self._is_recovered = producer, True
                return self._after_recovery(lost)
            case protocol.OutputSettled(lost, new_producer):
                self._owner = new_producer or self._owner
                return self._after_settling(lost)

    def _after_recovery(self, lost: tuple[Lost, ...]) -> Action:
        goal, known = self._in(RecoveringPhase).goal, self._known
        if isinstance(goal, UnplannedGoal):
            return self._end_without_epoch(goal)
        judged = verdict.judge(goal.request, known, self._identity)
        if isinstance(judged, verdict.Refusal):
            return self._refuse(goal, judged.error)
        assert isinstance(judged, verdict.Run | verdict.AlreadyCommitted), "judged so before"
        manifest = known.manifest
        if not lost or (manifest is not None and refusals.is_accepted(self._identity, manifest)):
            return self._resume_own_epoch(goal, judged)
        assert manifest is not None, "only what was decided is lost"
        is_logged = isinstance(judged, verdict.Run)
        if not is_logged and refusals.is_replayable(known, lost):
            return self._run(goal, known.before, manifest.base_path)
        error = refusals.output_lost(self._identity, manifest, lost, is_logged=is_logged)
        return self._refuse(goal, error)

    # --- an epoch ---------------------------------------------------------------------------

    def _run_after_newest(self, goal: EpochGoal) -> Action:
        token = self._known.token
        return self._run(goal, self._known.manifest, "" if token is None else token.manifest_path)

    def _run(self, goal: EpochGoal, base: Manifest | None, base_path: str) -> Action:
        self._become(RunningPhase(goal, base_path))
        epoch, sources = goal.request.checkpoint_id, goal.request.sources
        state, start = ((), goal.request.start) if base is None else (base.state, base.sources)
        return protocol.RunEpoch(epoch, self._producer, state, start, sources)

    def _prepare(self, ran: protocol.EpochRan) -> Action:
        running = self._in(RunningPhase)
        epoch, sources = running.goal.request.checkpoint_id, running.goal.request.sources
        manifest = replace(
            self._identity.manifest(epoch, sources, self._producer, self._decided_by),
            produced=tuple(sorted(ran.produced)),
            state=ran.state,
            committables=tuple(sorted(ran.committables)),
            base_path=running.base_path,
        )
        self._prepared = manifest.committables
        self._become(PreparedPhase(running.goal, manifest, ran.has_strays))
        return protocol.WriteManifest(manifest)

    def _complete(self, path: str) -> Action:
        if isinstance(self._state, OpeningPhase):
            token = self._identity.token(self._state.goal.request.checkpoint_id - 1, path)
            return protocol.CommitTransaction(self._producer, token, opens=True)
        prepared = self._in(PreparedPhase)
        manifest = prepared.manifest
        token = self._identity.token(manifest.checkpoint_id, path)
        self._committed = CommittedEpoch(token, manifest, manifest_exists=True)
        self._become(CompletedPhase(prepared.goal, manifest, prepared.has_strays, token))
        return protocol.CountOutput(
            self._producer, manifest.produced, token, manifest.sources, manifest.committables
        )

    def _check_count(self, last_sequences: Mapping[TopicPartition, int] | None) -> Action:
        """Commit only what the reporting tasks wrote: Kafka cannot distinguish their attempts."""
        completed = self._in(CompletedPhase)
        manifest = completed.manifest
        reported = {p.topic_partition: p.last_sequence for p in manifest.produced}
        if last_sequences is not None and dict(last_sequences) != reported:
            error = refusals.miscount(manifest.checkpoint_id, reported, last_sequences)
            return self._broken(error)
        self._become(CommittingPhase(completed.goal, manifest, completed.has_strays))
        return protocol.CommitTransaction(self._producer, completed.token)

    def _after_commit(self, next_producer: Producer) -> Action:
        self._owner = next_producer
        if isinstance(self._state, OpeningPhase):
            self._become(RestoringPhase(self._state.goal.after_fence()))
            return protocol.ReadCommitted()
        decided = self._in(CommittingPhase)
        committables = decided.manifest.committables
        if committables:
            self._become(SettlingPhase(decided.goal, decided.manifest))
            return protocol.CommitParticipants(committables, next_producer, decided.has_strays)
        return self._confirm(decided.goal, decided.manifest)

    def _after_settling(self, lost: tuple[Lost, ...]) -> Action:
        settling = self._in(SettlingPhase)
        goal, manifest = settling.goal, settling.manifest
        if lost and not refusals.is_accepted(self._identity, manifest):
            # A recovery finds it lost again: it runs it again, or refuses to.
            error = refusals.lost_repeatedly(self._identity, manifest, lost)
            return self._fence_again(goal, error)
        return self._confirm(goal, manifest)

    def _confirm(self, goal: EpochGoal, manifest: Manifest) -> Action:
        self._prepared = manifest.committables
        self._become(ConfirmingPhase(goal, manifest))
        return protocol.ConfirmOutput(manifest.producer, manifest.produced)

    def _finish(self, foreign_rows: Mapping[TopicPartition, int]) -> Action:
        confirming = self._in(ConfirmingPhase)
        goal, epoch = confirming.goal, confirming.manifest.checkpoint_id
        if foreign_rows and refusals.foreign_rows_word(epoch) not in self._identity.accepted:
            return self._stop(refusals.foreign_rows_found(epoch, foreign_rows))
        if epoch < goal.request.checkpoint_id:
            return self._run_after_newest(goal)
        self._become(ReadyPhase(goal.request))
        if isinstance(goal, UnsettledGoal):
            return self._plan(UnplannedGoal(goal.only_recovers, goal.tries))
        return protocol.EndEpoch(goal.request)

    # --- an end without a commit --------------------------------------------------------------

    def _refuse(self, goal: Goal, error: TallystickError) -> Action:
        """Stop for a person to decide; but prove first that this run still owns the pipeline.

        A successor that took over between the fence and the question leaves a token or a manifest
        that this run cannot explain. Nothing is lost then: this run is fenced, and has to say so.
        """
        if goal.tries.was_refused:
            return self._stop(error)
        return self._fence(replace(goal, tries=goal.tries.refused()))

    def _broken(self, error: Exception) -> Action:
        """Fence and ask after an error that may pass; abort and raise after any other."""
        state = self._state
        may_pass = isinstance(error, RetriableError)
        if may_pass and isinstance(state, Repeatable) and self._may_try_again(state):
            return self._fence_again(state.goal, error)
        if isinstance(state, Abortable):
            self._become(StoppingPhase(error))
            return protocol.AbortTransaction(self._producer)
        return self._stop(state.error if isinstance(state, StoppingPhase) else error)

    def _may_try_again(self, state: Repeatable) -> bool:
        # What became of an unanswered commit only Kafka knows, so it is asked in any case.
        return isinstance(state, CommittingPhase) or state.goal.tries.attempt < ATTEMPTS_MAX

    def _fence_again(self, goal: Goal, error: Exception) -> Action:
        tries = goal.tries.again()
        if tries.attempt > 2 * ATTEMPTS_MAX:  # commit after commit went unanswered
            return self._stop(error)
        return self._fence(replace(goal, tries=tries))

    def _stop(self, error: Exception) -> protocol.Stop:
        self._become(StoppedPhase())
        return protocol.Stop(error)

    # --- what is known ------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The phase of the epoch in flight."""
        return self._state.phase

    def manifest_path(self, checkpoint_id: int) -> str:
        """Return the path of an epoch's manifest if the newest known token names it, else ""."""
        token = None if self._committed is None else self._committed.token
        is_its = token is not None and token.checkpoint_id == checkpoint_id
        return token.manifest_path if token is not None and is_its else ""

    @property
    def committed_manifest(self) -> Manifest | None:
        """The manifest of the epoch that Kafka committed last, as far as this run knows."""
        known = self._committed if isinstance(self._state, ReadyPhase) else None
        return None if known is None else known.manifest

    @property
    def prepared(self) -> tuple[Committable, ...]:
        """The committables of the newest epoch whose tasks have ended, decided or not."""
        return self._prepared

    @property
    def producer(self) -> Producer:
        """The run's newest producer: a fence with it fails if another run has taken over."""
        return self._producer

    @property
    def _producer(self) -> Producer:
        assert self._owner is not None, "recovery fences before the first epoch"
        return self._owner

    @property
    def _known(self) -> CommittedEpoch:
        assert self._committed is not None, "what is committed is asked before anything is decided"
        return self._committed

    @property
    def _named(self) -> tuple[Committable, ...]:
        return () if self._known.manifest is None else self._known.manifest.committables

    def _in(self, phase: type[InPhase]) -> InPhase:
        """Return the state, which is of the phase that an event belongs to."""
        state = self._state
        assert isinstance(state, phase), f"{self.phase.name}: expected {phase.phase.name}"
        return state

    def _become(self, state: AnyPhase) -> None:
        """Take the one way from a phase to the next: all transitions come through here."""
        before, after = self.phase, state.phase
        assert after in NEXT_PHASES[before], f"{before.name} -> {after.name}"
        self._state = state
