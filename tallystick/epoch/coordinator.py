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

Structured Streaming gives the epoch's number and its logged end offsets. Our own loop asks for the
next epoch, which is planned after RESTORING or READY (PLANNING): after the fence, and from the
committed epoch. When our loop starts, it settles the newest epoch once more and aborts lingering
transactions, even if there is nothing to read (later too, now and again); a recovery alone ends
there.

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
    * Spark hears that an epoch is done only after SETTLING, so a logged epoch is settled in all
      sinks.
    * So a sink may be taken out of a pipeline once the last epoch with it is logged.
    * A function of foreachBatch that catches a sink's error breaks this; but the failure was noted,
      so the committables of the decided epoch are committed again.
    * A decided epoch runs again only if all of its output is lost, so that nothing is repeated; and
      not if a person stated to go on without it.
    * Before a person is asked to decide, this run proves again that no newer run has replaced it.
    * No epoch follows one whose end offsets in Spark's log differ from its manifest: the log can be
      replaced or lost, the manifest of a committed epoch cannot.
    * An epoch is requested once in a run. A second request is not a replay but a second call, with
      other rows; it is refused, and noted for the next run.
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
from typing import assert_never

from tallystick.epoch import protocol, refusals, verdict
from tallystick.epoch.facts import CommittedEpoch, Identity, Request
from tallystick.epoch.manifest import KAFKA, Manifest
from tallystick.epoch.micro_batches import second_call
from tallystick.epoch.protocol import Action, Event, Phase
from tallystick.epoch.two_phase import Committable, Lost
from tallystick.errors import RetriableError, TallystickError
from tallystick.values import Producer, TopicPartition

RECOVER_EVERY = 10
"""After how many epochs other sinks are looked through, for what task attempts left that lost."""
ATTEMPTS_MAX = 3
"""The times an epoch is run before its last error is raised; each client call retries by itself."""


class Coordinator:
    """Drives one epoch after the other, and every recovery, as a loop or Spark asks for them.

    Args:
        identity: of the pipeline that runs.
        decided_by: where decisions are kept, as manifests name it.
        has_participants: there are other sinks than the one whose transaction decides.
    """

    def __init__(
        self, identity: Identity, decided_by: str = KAFKA, *, has_participants: bool = False
    ) -> None:
        self.phase = Phase.IDLE
        self._identity = identity
        self._decided_by = decided_by
        self._has_participants = has_participants
        self._base_path = ""  # of the manifest that the epoch in flight goes on from
        self._request: Request | None = None
        self._attempt = 0
        self._owner: Producer | None = None  # the newest producer that Kafka gave this run
        self._committed: CommittedEpoch | None = None
        self._manifest: Manifest | None = None  # of the epoch in flight
        self._has_strays = False
        self._error: Exception | None = None
        self._refused_before = False
        self._is_recovered = False  # nothing of an earlier run lingers in other sinks
        self._has_loop = False  # of our own, which has no log: epochs are planned after the fence
        self._is_settling = False  # the newest epoch is looked after, before the next is planned
        self._only_recovers = False  # no epoch is planned after that

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
                # A loop of our own looks back in any case, whether or not a call has failed.
                failed = committed.has_failed and not self._has_loop
                self._committed = replace(committed, decided_by=self._decided_by, has_failed=failed)
                return self._look_back() if self._request is None else self._decide()
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
                assert self._error is not None
                return self._stop(self._error)
            case _:
                assert_never(event)

    def _restore(self, producer: Producer) -> Action:
        self._owner, self._is_recovered = producer, False
        if self._has_loop:
            self._request = None  # what is not decided by now did not happen
        self._become(Phase.RESTORING)
        return protocol.ReadCommitted()

    def _take_up(self, event: protocol.Beginning) -> Action:
        match event:
            case protocol.EpochRequested(request, logged):
                return self._start(request, logged)
            case protocol.EpochWanted() | protocol.RecoveryWanted():
                self._only_recovers = isinstance(event, protocol.RecoveryWanted)
                return self._want()
            case protocol.EpochPlanned():
                return self._planned(event)

    def _start(self, request: Request, logged: tuple[str, ...] | None) -> Action:
        assert self.phase in (Phase.IDLE, Phase.READY), f"epoch requested while {self.phase.name}"
        before, self._request = self._request, request
        self._attempt, self._refused_before = 1, False
        if self.phase is Phase.READY:
            assert before is not None, "a run is ready after its first epoch"
            if before.checkpoint_id == request.checkpoint_id:
                return self._stop(second_call(self._identity.pipeline, request.checkpoint_id))
            # Spark asks for all epochs in order, and this run heard of all that its query ran.
            self._committed = replace(
                self._known, logged=logged, begun=(), is_partial=False, has_failed=False
            )
            return self._decide()
        self._become(Phase.FENCING)
        return protocol.FenceProducer(current=None)

    def _want(self) -> Action:
        """Answer our own loop: find out what is committed first, then plan."""
        assert self.phase in (Phase.IDLE, Phase.READY), f"epoch wanted while {self.phase.name}"
        self._has_loop, self._attempt, self._refused_before = True, 1, False
        if self.phase is Phase.READY:
            return self._plan()
        self._become(Phase.FENCING)
        return protocol.FenceProducer(current=None)

    def _look_back(self) -> Action:
        """Settle the newest epoch, if a run may not have done so; then plan the next."""
        unsettled = verdict.look_back(self._known, self._identity)
        if isinstance(unsettled, verdict.Refusal):
            return self._refuse(unsettled.error)
        self._is_settling, self._request = unsettled is not None, unsettled
        return self._plan() if unsettled is None else self._decide()

    def _plan(self) -> Action:
        if self._only_recovers:
            return self._end_without_epoch()
        self._become(Phase.PLANNING)
        self._request = None
        return protocol.PlanEpoch(*verdict.following(self._known, self._identity))

    def _end_without_epoch(self) -> Action:
        """Abort what no decided manifest names, unless done already; then end without an epoch."""
        if self._has_participants and not self._is_recovered:
            self._become(Phase.RECOVERING)
            return protocol.RecoverParticipants(self._producer, (), self._named)
        if self.phase is not Phase.READY:
            self._become(Phase.READY)
        return protocol.EndEpoch(None)

    def _planned(self, event: protocol.EpochPlanned) -> Action:
        sources, start = event.sources, event.start
        epoch = verdict.following(self._known, self._identity).checkpoint_id
        request = Request(epoch, sources or start, may_skip=False, start=start)
        judged = verdict.judge(request, self._known, self._identity)
        if sources is None and isinstance(judged, verdict.Run):
            self._is_recovered = self._is_recovered and not event.looks_through
            return self._end_without_epoch()
        if sources is None and not isinstance(judged, verdict.Open):
            self._become(Phase.READY)  # what lingers may be another's
            return protocol.EndEpoch(None)
        self._request = request
        return self._decide()

    def _decide(self) -> Action:
        """Run, skip or refuse the requested epoch, in the light of what Kafka committed."""
        known, wanted = self._known, self._wanted
        match judged := verdict.judge(wanted, known, self._identity):
            case verdict.Open(base_path):
                self._become(Phase.OPENING)
                if wanted.start and not base_path:
                    beginning = self._identity.manifest(
                        wanted.checkpoint_id - 1, wanted.start, self._producer, self._decided_by
                    )
                    return protocol.WriteManifest(beginning, is_seed=True)
                # A user's function may have left out epochs after its base.
                bases = {base.path: base.manifest.checkpoint_id for base in known.bases}
                epoch = bases.get(base_path, wanted.checkpoint_id - 1)
                token = self._identity.token(epoch, base_path)
                return protocol.CommitTransaction(self._producer, token, opens=True)
            case verdict.Run() | verdict.AlreadyCommitted():
                is_settled = isinstance(judged, verdict.Run) and not known.has_failed
                decided, settled = ((), self._named) if is_settled else (self._named, ())
                if self._is_to_recover and (decided or self._has_participants):
                    self._become(Phase.RECOVERING)
                    return protocol.RecoverParticipants(self._producer, decided, settled)
                return self._resume_own_epoch(judged)
            case verdict.Refusal(error):
                if self._named and known.has_failed and self.phase is Phase.RESTORING:
                    self._become(Phase.RECOVERING)  # a timeout would not wait for the person
                    return protocol.RecoverParticipants(self._producer, self._named)
                return self._refuse(error)

    @property
    def _is_to_recover(self) -> bool:
        """At the start and after a failure; and now and then, for what failed attempts left."""
        return not self._is_recovered or self._wanted.checkpoint_id % RECOVER_EVERY == 0

    def _resume_own_epoch(self, judged: verdict.Run | verdict.AlreadyCommitted) -> Action:
        match judged:
            case verdict.Run() if self._known.has_failed and self._known.manifest is not None:
                return self._confirm(self._known.manifest)  # its finding may not have been reported
            case verdict.Run():
                return self._run_after_newest()
            case verdict.AlreadyCommitted(manifest):
                return self._confirm(manifest)

    def _confirm(self, manifest: Manifest) -> Action:
        self._manifest = manifest
        self._become(Phase.CONFIRMING)
        return protocol.ConfirmOutput(manifest.producer, manifest.produced)

    def _run_after_newest(self) -> Action:
        token = self._known.token
        return self._run(self._known.manifest, "" if token is None else token.manifest_path)

    def _run(self, base: Manifest | None, base_path: str) -> Action:
        wanted, self._base_path = self._wanted, base_path
        self._become(Phase.RUNNING)
        state, start = ((), wanted.start) if base is None else (base.state, base.sources)
        return protocol.RunEpoch(wanted.checkpoint_id, self._producer, state, start, wanted.sources)

    def _after_participants(self, event: protocol.ParticipantsDone) -> Action:
        match event:
            case protocol.ParticipantsRecovered(lost, producer):
                self._owner, self._is_recovered = producer, True
                return self._after_recovery(lost)
            case protocol.OutputSettled(lost, new_producer):
                self._owner = new_producer or self._owner
                return self._after_settling(lost)

    def _after_recovery(self, lost: tuple[Lost, ...]) -> Action:
        if self._request is None:
            return self._end_without_epoch()
        known = self._known
        judged = verdict.judge(self._wanted, known, self._identity)
        if isinstance(judged, verdict.Refusal):
            return self._refuse(judged.error)
        assert isinstance(judged, verdict.Run | verdict.AlreadyCommitted), "judged so before"
        manifest = known.manifest
        if not lost or (manifest is not None and refusals.is_accepted(self._identity, manifest)):
            return self._resume_own_epoch(judged)
        assert manifest is not None, "only what was decided is lost"
        is_logged = isinstance(judged, verdict.Run)
        if not is_logged and refusals.is_replayable(known, lost):
            return self._run(known.before, manifest.base_path)
        error = refusals.output_lost(self._identity, manifest, lost, is_logged=is_logged)
        return self._refuse(error)

    def _after_settling(self, lost: tuple[Lost, ...]) -> Action:
        manifest = self._in_flight
        if lost and not refusals.is_accepted(self._identity, manifest):
            self._attempt += 1  # a recovery finds it lost again: it runs it again, or refuses to
            return self._fence_again(refusals.lost_repeatedly(self._identity, manifest, lost))
        return self._confirm(manifest)

    def _refuse(self, error: TallystickError) -> Action:
        """Stop for a person to decide; but prove first that this run still owns the pipeline.

        A successor that took over between the fence and the question leaves a token or a manifest
        that this run cannot explain. Nothing is lost then: this run is fenced, and has to say so.
        """
        looked = self.phase in (Phase.RESTORING, Phase.PLANNING, Phase.RECOVERING, Phase.READY)
        if looked and not self._refused_before:
            self._refused_before = True
            self._become(Phase.FENCING)
            return protocol.FenceProducer(self._owner)
        return self._stop(error)

    def _prepare(self, ran: protocol.EpochRan) -> Action:
        self._become(Phase.PREPARED)
        self._has_strays = ran.has_strays
        self._manifest = replace(
            self._identity.manifest(
                self._wanted.checkpoint_id, self._wanted.sources, self._producer, self._decided_by
            ),
            produced=tuple(sorted(ran.produced)),
            state=ran.state,
            committables=tuple(sorted(ran.committables)),
            base_path=self._base_path,
        )
        return protocol.WriteManifest(self._manifest)

    def _complete(self, path: str) -> Action:
        if self.phase is Phase.OPENING:
            token = self._identity.token(self._wanted.checkpoint_id - 1, path)
            return protocol.CommitTransaction(self._producer, token, opens=True)
        self._become(Phase.COMPLETED)
        manifest = self._in_flight
        token = self._identity.token(manifest.checkpoint_id, path)
        self._committed = CommittedEpoch(token, manifest, manifest_exists=True)
        return protocol.CountOutput(
            self._producer, manifest.produced, token, self._wanted.sources, manifest.committables
        )

    def _check_count(self, last_sequences: Mapping[TopicPartition, int] | None) -> Action:
        """Commit only what the reporting tasks wrote: Kafka cannot distinguish their attempts."""
        epoch, token = self._wanted.checkpoint_id, self._known.token
        assert token is not None, "the epoch's own, since its manifest is written"
        reported = {p.topic_partition: p.last_sequence for p in self._in_flight.produced}
        if last_sequences is not None and dict(last_sequences) != reported:
            return self._broken(refusals.miscount(epoch, reported, last_sequences))
        self._become(Phase.COMMITTING)
        return protocol.CommitTransaction(self._producer, token)

    def _after_commit(self, next_producer: Producer) -> Action:
        self._owner = next_producer
        if self.phase is Phase.OPENING:
            self._become(Phase.RESTORING)
            if self._has_loop:
                self._request = None  # only where it begins is settled
            return protocol.ReadCommitted()
        if self.prepared:
            self._become(Phase.SETTLING)
            return protocol.CommitParticipants(self.prepared, next_producer, self._has_strays)
        return self._confirm(self._in_flight)

    def _finish(self, foreign_rows: Mapping[TopicPartition, int]) -> Action:
        epoch = self._in_flight.checkpoint_id
        if foreign_rows and refusals.foreign_rows_word(epoch) not in self._identity.accepted:
            return self._stop(refusals.foreign_rows_found(epoch, foreign_rows))
        if epoch < self._wanted.checkpoint_id:
            return self._run_after_newest()
        self._become(Phase.READY)
        if self._is_settling:
            self._is_settling = False
            return self._plan()
        return protocol.EndEpoch(self._wanted)

    def _broken(self, error: Exception) -> Action:
        """Fence and ask after an error that may pass; abort and raise after any other."""
        again = self._attempt < ATTEMPTS_MAX or self.phase is Phase.COMMITTING
        if isinstance(error, RetriableError) and self.phase not in protocol.FINAL and again:
            self._attempt += 1
            return self._fence_again(error)
        if self.phase in protocol.ABORTABLE:
            self._error = error
            self._become(Phase.STOPPING)
            return protocol.AbortTransaction(self._producer)
        return self._stop(self._error or error)

    def _fence_again(self, error: Exception) -> Action:
        if self._attempt > 2 * ATTEMPTS_MAX:  # commit after commit went unanswered
            return self._stop(error)
        self._become(Phase.FENCING)
        return protocol.FenceProducer(self._owner)

    def _stop(self, error: Exception) -> protocol.Stop:
        self._become(Phase.STOPPED)
        return protocol.Stop(error)

    def manifest_path(self, checkpoint_id: int) -> str:
        """Return the path of an epoch's manifest if the newest known token names it, else ""."""
        token = None if self._committed is None else self._committed.token
        is_its = token is not None and token.checkpoint_id == checkpoint_id
        return token.manifest_path if token is not None and is_its else ""

    @property
    def committed_manifest(self) -> Manifest | None:
        """The manifest of the epoch that Kafka committed last, as far as this run knows."""
        known = self._committed if self.phase is Phase.READY else None
        return None if known is None else known.manifest

    @property
    def prepared(self) -> tuple[Committable, ...]:
        """The committables of the newest epoch whose tasks have ended, decided or not."""
        return () if self._manifest is None else self._manifest.committables

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
    def _in_flight(self) -> Manifest:
        assert self._manifest is not None, "tasks have ended before their output is counted"
        return self._manifest

    @property
    def _named(self) -> tuple[Committable, ...]:
        return () if self._known.manifest is None else self._known.manifest.committables

    @property
    def _wanted(self) -> Request:
        assert self._request is not None, "an epoch runs only when it was asked for"
        return self._request

    def _become(self, phase: protocol.Phase) -> None:
        assert phase in protocol.NEXT_PHASES[self.phase], f"{self.phase.name} -> {phase.name}"
        self.phase = phase
