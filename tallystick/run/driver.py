"""The driver's shell: feed events to the coordinator, perform its actions through the ports.

Between epochs it clears up what no retained manifest needs. Only what is certainly of the past is
removed: nothing of epochs after the one that Kafka committed, which another run may be writing.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import assert_never

from tallystick.checkpoint.collection import Collection
from tallystick.checkpoint.decision_log import claim
from tallystick.checkpoint.folder import CheckpointFolder, Integrity
from tallystick.epoch import micro_batches, refusals, verdict
from tallystick.epoch.coordinator import Coordinator
from tallystick.epoch.facts import Base, CommittedEpoch, Request
from tallystick.epoch.manifest import (
    COLLECT_EVERY,
    Identity,
    Manifest,
    epoch_of,
    is_seed,
    manifests,
)
from tallystick.epoch.protocol import (
    AbortTransaction,
    Action,
    ActionFailed,
    CommitParticipants,
    CommittedRead,
    CommitTransaction,
    ConfirmOutput,
    CountOutput,
    EndEpoch,
    EpochPlanned,
    EpochRequested,
    EpochWanted,
    Event,
    FenceProducer,
    ManifestWritten,
    OutputConfirmed,
    OutputCounted,
    OutputSettled,
    ParticipantsRecovered,
    PlanEpoch,
    ProducerFenced,
    ReadCommitted,
    RecoverParticipants,
    RecoveryWanted,
    RunEpoch,
    Stop,
    TransactionAborted,
    TransactionCommitted,
    WriteManifest,
)
from tallystick.epoch.tokens import Token
from tallystick.epoch.two_phase import Committable, to_abort
from tallystick.errors import (
    FencedError,
    RetriableError,
    StateFileError,
    StorageError,
)
from tallystick.ports import Clock, Decider, Engine, EpochSource, Participants, Storage
from tallystick.source.offsets import with_groups
from tallystick.values import Producer

logger = logging.getLogger(__name__)

Worker = EpochSource | Engine
"""Runs a requested epoch, or plans the next epoch and runs it."""
Listener = Callable[[Event], None]
"""A callback for each fact as it occurs; for metrics, and for tests that kill at a given point."""
EndsOf = Callable[[int], tuple[str, ...] | None]
"""Returns the end offsets that a caller has of an epoch; None: it has none, or none any more."""


LAST_EPOCH = 10**12 - 1
"""The names of manifests have twelve digits."""
RETRY_PAUSE_S = 0.5
"""Each call has its own deadline already; this only keeps a quick failure from spinning."""


def no_ends(_: int) -> None:
    """Return None: the caller has no log of its own with which a manifest could be compared."""


class Driver:
    """The shell of one run: performs the coordinator's actions, one epoch at a time.

    Args:
        identity: the pipeline and its checkpoint.
        decider: decides the epochs of the checkpoint.
        storage: the checkpoint location.
        clock: for names and pauses.
        participants: the other sinks; None: no other sinks.
        listener: called with every event.
        collect_every: epochs between two removals of files that nothing needs; 0: remove none.
        deletes_at_a_time: threads that a collection has; 1: none.
    """

    def __init__(
        self,
        identity: Identity,
        decider: Decider,
        storage: Storage,
        clock: Clock,
        *,
        participants: Participants | None = None,
        listener: Listener = lambda _: None,
        collect_every: int = COLLECT_EVERY,
        deletes_at_a_time: int = 1,
    ) -> None:
        self.coordinator = Coordinator(
            identity, decider.name.decided_by, has_participants=participants is not None
        )
        self._participants = participants
        self._identity = identity
        self._decider = decider
        self._folder = CheckpointFolder(storage)
        self._clock = clock
        self._listener = listener
        self._requested_epoch, self._may_skip = 0, False
        self._ends_of: EndsOf = no_ends
        self.collection = Collection(self._folder, collect_every, deletes_at_a_time)
        self._seen_through = ""  # the manifest of the newest epoch that came to its end
        self._warned_of = ""  # the newest error after which something was tried again
        self._failures: list[str] = []  # notes of earlier runs about the epoch that was asked for
        self.runs_epoch = False
        """True from the start of an epoch's tasks to the end of the epoch that a source planned."""

    @property
    def pipeline(self) -> str:
        """The pipeline's name."""
        return self._identity.pipeline

    @property
    def cluster_id(self) -> str:
        """The id of the cluster whose transactions commit epochs and positions of sources."""
        return self._decider.name.cluster_id

    def check_owner(self) -> None:
        """See `ports.Decider.check_owner`."""
        self._decider.check_owner(self.coordinator.producer)

    def check_name(self, newest: Token | None) -> None:
        """Refuse a checkpoint that the name does not go on from, before anything is fenced.

        The first look after the fence does so too; but a run that is at work has ended by then.

        Args:
            newest: the newest decision that is known without a fence; None: there is none.

        Raises:
            DataLossError: the decision is another checkpoint's.
        """
        if newest is None or self._identity.own(newest) is not None:
            return
        self._requested_epoch, self._may_skip = LAST_EPOCH + 1, True
        judged = verdict.look_back(replace(self._read_bases(), token=newest), self._identity)
        if isinstance(judged, verdict.Refusal):
            raise judged.error

    def prove_owner(self) -> None:
        """Fence with the run's producer, which fails if another run has taken over.

        Raises:
            FencedError: another run owns the pipeline.
        """
        self._decider.fence(self.coordinator.producer)

    def run_epoch(self, request: Request, engine: Engine, ends_of: EndsOf = no_ends) -> None:
        """Run the requested epoch to its end, unless an earlier run has committed it.

        Args:
            request: the epoch, which this run was not asked for before.
            engine: runs the tasks.
            ends_of: for a comparison with the manifest of the newest committed epoch.

        Raises:
            FencedError: another run owns the pipeline.
            OtherOffsetsError: the caller has other end offsets of the newest committed epoch.
            DataLossError: going on needs a person's decision.
            TallystickError, or what the user's function raised: the epoch was aborted.
        """
        self._requested_epoch, self._may_skip = request.checkpoint_id, request.may_skip
        self._ends_of = ends_of
        logged = self._logged(self.coordinator.committed_manifest)
        self._follow(EpochRequested(request, logged), engine)

    def run_next(self, source: EpochSource) -> bool:
        """Plan the epoch after the newest committed epoch, and run it to its end.

        Args:
            source: plans the epoch, and runs its tasks.

        Returns:
            True if the source planned an epoch; if not, the newest epoch is settled all the same.

        Raises:
            TallystickError: as `run_epoch`.
        """
        self._requested_epoch, self._may_skip = LAST_EPOCH + 1, True
        try:
            return self._follow(EpochWanted(), source) is not None
        finally:
            self.runs_epoch = False

    def recover_newest(self) -> int | None:
        """Commit and abort what earlier runs of a loop left, as its start does; plan no epoch.

        Returns:
            The epoch that has to run again, since all that it wrote is lost; None: none has to.

        Raises:
            TallystickError: as `run_epoch`.
        """
        self._requested_epoch, self._may_skip = LAST_EPOCH + 1, True
        ended = self._follow(RecoveryWanted(), None)
        self.end()
        return ended.checkpoint_id if isinstance(ended, RunEpoch) else None

    def end(self) -> None:
        """Note in the checkpoint that nothing is left to do for the newest finished epoch."""
        if self._seen_through:
            self._folder.note(micro_batches.settled_path(self._seen_through))

    def abort_strays(self) -> None:
        """Abort what attempts that do not count began to write after the newest epoch's decision.

        For the end of a run, since the next epoch does the same. Where it fails, a warning says so.
        """
        newest = self.coordinator.committed_manifest
        try:
            decided = () if newest is None else newest.committables
            self._abort_lingering(self.coordinator.producer, decided)
        except FencedError:
            return  # a newer run has done so
        except Exception as error:
            logger.warning(
                "pipeline %s: attempts of tasks that do not count may have left transactions open, "
                "which readers wait for until the pipeline runs again, or `tallystick recover` is "
                "typed: %s",
                self._identity.pipeline,
                error,
            )

    def _follow(self, event: Event, by: Worker | None) -> RunEpoch | Request | None:
        """Follow the coordinator to the end of an epoch; with no worker, to where it would run."""
        while True:
            self._listener(event)
            action = self.coordinator.step(event)
            if isinstance(event, OutputCounted) and isinstance(action, FenceProducer):
                logger.warning(
                    "epoch %d: Kafka holds %s, which is not what the tasks reported: another "
                    "attempt wrote too. The epoch is aborted and runs again",
                    self._requested_epoch,
                    dict(event.last_sequences or {}),
                )
            match action:
                case EndEpoch(request):
                    if (newest := self.coordinator.committed_manifest) is not None:
                        self._seen_through = self.coordinator.manifest_path(newest.checkpoint_id)
                    if request is not None:
                        self._clear_up(request.checkpoint_id)
                    return request
                case Stop(error):
                    self._before_stop(error)
                    raise error
                case RunEpoch() if by is None:
                    return action
            event = self._attempt(action, by)
            if isinstance(event, ActionFailed) and isinstance(event.error, RetriableError):
                self.collection.expect_strays()
                self._clock.sleep(RETRY_PAUSE_S)

    def _before_stop(self, error: Exception) -> None:
        """Abort what a replaced run prepared: its successor may have no reason to look for it."""
        if isinstance(error, FencedError) and (sinks := self._participants) is not None:
            prepared, decider = self.coordinator.prepared, self._decider
            try:
                abort_undecided(prepared, decider, self._folder, sinks, self._identity)
            except Exception as failure:  # the caller has to see that it was replaced
                logger.warning("what its tasks prepared is the newer run's: %s", failure)

    def _attempt(self, action: Action, by: Worker | None) -> Event:
        try:
            return self._perform(action, by)
        except Exception as error:
            # Another error ends the run, which says so.
            if isinstance(error, RetriableError) and str(error) != self._warned_of:
                self._warned_of = str(error)
                logger.warning("%s (%s is tried again)", error, type(action).__name__)
            is_state = isinstance(error, StateFileError)
            return ActionFailed(self._with_remedy(str(error)) if is_state else error)

    def _with_remedy(self, message: str) -> StateFileError:
        """Return the error for a missing or damaged file of state, with the epoch to go back to."""
        files = Integrity(self._folder.storage, known_bad=message)
        try:
            epoch = files.newest_whole(self._requested_epoch - 1)
        except StorageError:
            return StateFileError(message)
        remedy = (
            "None of the retained epochs has all its files."
            if epoch is None
            else f"The newest epoch that has all its files is {epoch}: save it with `tallystick "
            f"savepoint create --epoch {epoch}`, and restore that into a new checkpoint."
        )
        return StateFileError(f"{message} {remedy}")

    def _perform(self, action: Action, by: Worker | None) -> Event:
        """Perform an action through the ports and return the resulting event."""
        match action:
            case FenceProducer(current):
                return ProducerFenced(self._fence(current))
            case ReadCommitted():
                return CommittedRead(self._read_committed())
            case PlanEpoch() | RunEpoch():
                return self._work(action, by)
            case WriteManifest(manifest, is_seed):
                nonce = self._clock.nonce()
                path = self._folder.put_manifest(manifest, nonce, is_seed=is_seed)
                return ManifestWritten(path)
            case CountOutput(producer, produced, token, sources, committables):
                if self._participants is not None:
                    self._participants.check_prepared(committables)
                self._decider.stage(producer, token, with_groups(sources))
                partitions = [written.topic_partition for written in produced]
                return OutputCounted(self._decider.last_sequences(producer, partitions))
            case CommitTransaction():
                return self._commit(action)
            case ConfirmOutput(producer, produced):
                return OutputConfirmed(self._decider.foreign_rows(producer, produced))
            case RecoverParticipants() | CommitParticipants():
                return self._settle(action)
            case AbortTransaction(producer):
                self._decider.abort(producer)
                self._abort_lingering(producer, ())
                return TransactionAborted()
            case EndEpoch() | Stop():
                raise AssertionError(f"{action} ends the loop")
            case _:
                assert_never(action)

    def _fence(self, current: Producer | None) -> Producer:
        if current is None:  # a start: nothing else may decide here
            claim(self._folder.storage, self._decider.name)
        return self._decider.fence(current)

    def _work(self, action: PlanEpoch | RunEpoch, by: Worker | None) -> Event:
        match action:
            case PlanEpoch(checkpoint_id, start, state):
                assert isinstance(by, EpochSource), "who wants the next epoch plans it"
                self._requested_epoch = checkpoint_id
                planned = by.plan(checkpoint_id, start, state)
                return EpochPlanned(planned.sources, planned.start, planned.looks_through)
            case RunEpoch(checkpoint_id, producer, state, start, sources):
                assert by is not None, "a recovery ends before the epoch runs"
                self.runs_epoch = True
                if isinstance(by, EpochSource):
                    by = by.engine(checkpoint_id, start, sources)
                return by.run_epoch(checkpoint_id, producer, state)

    def _settle(self, action: RecoverParticipants | CommitParticipants) -> Event:
        """Commit decided transactions in the other sinks; abort lingering ones in a recovery.

        An epoch whose attempts may have left strays aborts lingering transactions too.
        """
        if self._participants is None:
            raise refusals.no_sinks(self._identity, action.committables)
        match action:
            case CommitParticipants(committables, producer, has_strays):
                lost = self._participants.commit(committables)
                if not has_strays:
                    return OutputSettled(lost)
                return OutputSettled(lost, self._abort_lingering(producer, committables))
            case RecoverParticipants(producer, decided, settled):
                self._participants.check_newest(settled)
                lost = self._participants.commit(decided)
                return ParticipantsRecovered(
                    lost, self._abort_lingering(producer, (*decided, *settled))
                )

    def _abort_lingering(self, producer: Producer, decided: tuple[Committable, ...]) -> Producer:
        """Abort lingering transactions in the other sinks, and return the producer.

        The fence before it proves that no newer run has replaced this one.
        """
        if self._participants is None:
            return producer
        lingering = to_abort(self._participants.lingering(), decided)
        if lingering:
            producer = self._decider.fence(producer)
            self._participants.abort(lingering)
        return producer

    def _clear_up(self, epoch: int) -> None:
        """Remove past notes, manifests and files of state; no epoch fails because of it."""
        while self._failures:  # the epoch is settled: they have left nothing undone
            with suppress(StorageError):  # the next epoch that is committed proves the same
                self._folder.storage.delete(self._failures.pop())
        committed = self.coordinator.committed_manifest
        if committed is not None and committed.checkpoint_id == epoch:
            self.collection.go_on(committed)

    def _commit(self, action: CommitTransaction) -> Event:
        if action.opens:
            self._decider.stage(action.producer, action.token, ())
        return TransactionCommitted(self._decider.decide(action.producer, action.token))

    def _read_committed(self) -> CommittedEpoch:
        decided = self._decider.last_decision()
        token = self._identity.own(decided)
        if token is None:
            return replace(self._read_bases(), token=decided)
        listed, epoch = self._names(), token.checkpoint_id
        manifest = self._folder.manifest(token.manifest_path)
        base = manifest.base_path if manifest is not None and manifest.committables else ""
        before = self._folder.manifest(base)
        committed = CommittedEpoch(token, manifest, manifest is not None, before=before)
        return replace(
            committed,
            logged=self._logged(manifest),
            begun=micro_batches.traces_between(listed, epoch + 1, self._requested_epoch),
            is_partial=micro_batches.partial_path(token.manifest_path) in listed,
            has_failed=bool(micro_batches.failures(listed, epoch)),
            is_set_back=micro_batches.newest_settled(listed) > epoch,
            is_settled=micro_batches.settled_path(token.manifest_path) in listed,
        )

    def _names(self) -> list[str]:
        """Return all manifests and notes; the notes about the epoch asked for are kept."""
        names = self._folder.files()
        self._failures = micro_batches.failures(names, self._requested_epoch)
        return names

    def _base_of(self, path: str) -> str:
        return "" if (manifest := self._folder.manifest(path)) is None else manifest.base_path

    def _logged(self, manifest: Manifest | None) -> tuple[str, ...] | None:
        return None if manifest is None else self._ends_of(manifest.checkpoint_id)

    def _read_bases(self) -> CommittedEpoch:
        """Read the bases from the checkpoint: no decision names what this lineage goes on from."""
        listed = self._names()
        paths = manifests(listed)
        known = [path for path in paths if not micro_batches.doubts(listed, path, self._base_of)]
        epoch = self._base_epoch(known)
        by_path = self._folder.manifests(path for path in known if epoch_of(path) == epoch)
        bases = [Base(path, manifest) for path, manifest in by_path.items()]
        return CommittedEpoch(
            token=None,
            manifest=None,
            manifest_exists=not all(is_seed(path) for path in paths),
            is_seeded=any(is_seed(path) for path in paths),
            bases=tuple(bases),
            has_state=not paths and bool(Integrity(self._folder.storage).paths()),
            begun=micro_batches.traces_between(listed, epoch + 1, self._requested_epoch),
            is_settled=all(micro_batches.settled_path(base.path) in listed for base in bases),
        )

    def _base_epoch(self, paths: list[str]) -> int:
        """Return the epoch before; or the newest before that, if a user's function left it out."""
        epoch = self._requested_epoch - 1
        if not self._may_skip:
            return epoch
        return max(
            (candidate for candidate in map(epoch_of, paths) if candidate <= epoch), default=-1
        )


def abort_undecided(
    prepared: tuple[Committable, ...],
    decider: Decider,
    folder: CheckpointFolder,
    sinks: Participants,
    identity: Identity,
) -> None:
    """Abort the transactions that tasks of an epoch prepared, unless the epoch is decided.

    The successor of a replaced run looks through its sinks when it starts, and later with its
    epochs or now and again. A query of Structured Streaming with nothing to read has no such
    moment, and readers would wait.

    A later epoch's decision names none of them, but follows only once all transactions of earlier
    decisions are committed: an abort then does nothing. Where it is not certain that the newest
    decision is known (another lineage's, an older one, a missing manifest), nothing is aborted.

    Args:
        prepared: the transactions of a run that can decide nothing more: replaced, or self-fenced.
        decider: of the checkpoint.
        folder: the checkpoint's.
        sinks: of the transactions.
        identity: of the run.

    Raises:
        TallystickError: an abort failed; the next recovery finds the transactions left.
    """
    decided = identity.own(decider.last_decision()) if prepared else None
    if decided is None or decided.checkpoint_id < prepared[0].checkpoint_id - 1:
        return
    if not decided.manifest_path:  # the token before the first epoch
        sinks.abort(prepared)
    elif (manifest := folder.manifest(decided.manifest_path)) is not None:
        sinks.abort(to_abort(prepared, manifest.committables))
