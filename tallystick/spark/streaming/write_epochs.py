"""The driver's side of `writeStream.format("tallystick")`: before the tasks, and after them.

    plan process      streamWriter ─► pickled for the tasks       `plan`: recover, let tasks begin
    tasks             begin ─► write … ─► prepare ─► message
    commit process    streamWriter ─► commit(messages)            `decide`: decide, then commit
                                   └► abort(messages)             `give_up`

Both are processes that Spark keeps beside its driver, and asks once per micro-batch. They share no
memory, with each other or with the user's program; what one knows the other gets by the tasks.

Invariants:
    * No task of an epoch begins before everything that was decided is committed, and all else is
      aborted: tasks run what is pickled by the plan, and it is pickled after the recovery.
    * The plan takes the log of decisions over. A commit goes on with the plan's hold and does not
      take over again, so a driver that was replaced cannot decide.
    * An epoch that is decided already has no tasks that write.
    * `give_up` aborts only what it proved undecided, and can no longer be decided: Spark calls it
      also when a commit failed, before or after the decision.
"""

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from tallystick.checkpoint.decision_log import (
    DecisionLog,
    Hold,
    claim,
    newest_entry,
    transactional_ids,
)
from tallystick.checkpoint.folder import CheckpointFolder
from tallystick.checkpoint.savepoint_folder import refuse_savepoint
from tallystick.checkpoint.spark_log import replaced
from tallystick.epoch.coordinator import RECOVER_EVERY
from tallystick.epoch.facts import Identity, Request
from tallystick.epoch.manifest import COLLECT_EVERY, LOG
from tallystick.epoch.protocol import ignore
from tallystick.epoch.transactional_ids import default_prefix
from tallystick.epoch.two_phase import (
    Committable,
    Lost,
    Owner,
    TransactionPlan,
    TwoPhaseCommitSink,
    to_abort,
)
from tallystick.errors import (
    DataLossError,
    EpochAbortedError,
    FencedError,
    OptionError,
    TallystickError,
)
from tallystick.ports import EpochResult, Participants
from tallystick.run.driver import Driver, Listener
from tallystick.run.participants import OpenSinks
from tallystick.run.replaced import abort_undecided
from tallystick.state.catalog import StepState
from tallystick.storage.file_storage import DELETES_AT_A_TIME, FileStorage, SystemClock
from tallystick.values import Producer

logger = logging.getLogger(__name__)

SINK_UID = "kafka"
"""A streaming query has one sink."""

OpenSink = Callable[[Owner, str, frozenset[str]], TwoPhaseCommitSink]
"""Opens the sink of an owner, given the prefix of its transactional ids and earlier prefixes."""


@dataclass(frozen=True, slots=True)
class PlannedEpoch:
    """The result of planning an epoch; it goes with the tasks, and comes back with their messages.

    Args:
        checkpoint_id: the epoch.
        hold: the hold under which the epoch may be decided; None: decided and committed already.
        digest: of the epoch's end offsets in Spark's log at the time of the plan.
        lost: the transactions of an earlier decision for this very epoch, all aborted by Kafka, so
            that the epoch runs again.
    """

    checkpoint_id: int
    hold: Hold | None
    digest: str
    lost: tuple[Lost, ...] = ()

    def to_fields(self) -> dict[str, Any]:
        """Return the fields in JSON's own types."""
        return {
            "checkpoint_id": self.checkpoint_id,
            "hold": self.hold,
            "digest": self.digest,
            "lost": [[each.committable.to_fields(), each.what] for each in self.lost],
        }

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Read back what `to_fields` made."""
        hold = fields["hold"]
        lost = (Lost(Committable.from_fields(each), what) for each, what in fields["lost"])
        held = None if hold is None else Hold(*hold)
        return cls(fields["checkpoint_id"], held, fields["digest"], tuple(lost))


@dataclass(frozen=True, slots=True)
class _LastPlan:
    """The newest epoch planned by this process for a checkpoint."""

    checkpoint_id: int
    run: str


_planned: dict[str, _LastPlan] = {}
"""By lineage. Only saves work: Spark may ask another process any time."""


class WriteEpochs:
    """The epochs of a query: planned, decided or given up in a process beside Spark's driver.

    Args:
        storage: the query's checkpoint.
        query_name: None if it has none.
        accepted: the decisions that a person stated.
        id_prefix: of transactional ids; None: the query's id, not its name: another query of the
            same name, on another checkpoint, would abort this one's transactions.
        open_sink: connects a sink, or returns a connected one.
        listener: gets every event of the driver.
    """

    def __init__(
        self,
        storage: FileStorage,
        query_name: str | None,
        accepted: frozenset[str],
        id_prefix: str | None,
        open_sink: OpenSink,
        listener: Listener | None = None,
    ) -> None:
        self._storage = storage
        self._folder = CheckpointFolder(storage)
        lineage = stored_lineage(self._folder)
        self._identity = Identity(query_name or lineage, lineage, storage.location, accepted)
        self._transactional_id = id_prefix or default_prefix(lineage)
        self.owner = Owner(self._identity.pipeline, SINK_UID, lineage)
        self._open_sink = open_sink
        self._listener = listener or ignore

    def plan(self) -> PlannedEpoch:
        """Recover, and settle under which hold the tasks of the next epoch may prepare.

        Raises:
            OptionError: the checkpoint is a savepoint's folder, or Kafka decided in it.
            DataLossError: going on needs a person's decision.
            TallystickError: the recovery failed, nothing has begun.
        """
        checkpoint_id = newest_batch(self._folder)
        self._folder.log.sync(checkpoint_id)
        # Now and then a whole recovery: it aborts what losers of a speculation left.
        following = None if checkpoint_id % RECOVER_EVERY == 0 else self._next(checkpoint_id)
        planned = following or self._recovered(checkpoint_id)
        if planned.hold is not None:
            _planned[self._identity.lineage] = _LastPlan(checkpoint_id, planned.hold.run)
        return planned

    def transaction_plan(self) -> TransactionPlan:
        """Return the plan of the tasks' transactions; call it after `plan`."""
        return self._sink().plan()

    def decide(self, planned: PlannedEpoch, committables: tuple[Committable, ...]) -> None:
        """Decide an epoch with the tasks' committables, then commit the committables.

        Raises:
            FencedError: another run has taken over since the plan.
            TallystickError: deciding or committing failed; Spark then has the epoch given up.
        """
        assert planned.hold is not None, "what is decided has no tasks that write"
        request = self._request(planned.checkpoint_id)
        if digest_of(request.sources) != planned.digest:
            what = "other offsets, when the micro-batch was planned"
            raise TallystickError(
                replaced(self._storage.location, planned.checkpoint_id, request.sources, [what])
            )
        epoch = PreparedEpoch(self._sinks(), committables, planned.lost)
        log = self._log_of(planned.hold)
        self._driver(log, epoch, planned.checkpoint_id).run_epoch(request, epoch)
        if not epoch.has_run:  # found decided, after this run had proved that it was the owner
            raise FencedError(
                f"query {self._identity.pipeline}: epoch {planned.checkpoint_id} was decided by "
                f"another run, which has taken over since this one planned it. Nothing of this "
                f"run's attempt is visible. Two queries write from one checkpoint: stop one."
            )

    def give_up(self, planned: PlannedEpoch, committables: tuple[Committable, ...]) -> None:
        """Prevent a later decision of the epoch; unless decided, abort the tasks' transactions."""
        if planned.hold is None:
            return
        log = self._log_of(planned.hold)
        with suppress(FencedError):  # replaced: so it can decide nothing more either
            # As the owner: it takes the slot that an unanswered decision may be on its way to.
            log.fence(Producer(self._transactional_id, 0, planned.hold.slot))
        abort_undecided(committables, log, self._folder, self._sinks(), self._identity)

    def _next(self, checkpoint_id: int) -> PlannedEpoch | None:
        """Return the plan of an epoch without a recovery, if this process planned the one before.

        Spark plans a micro-batch only once it has logged the commit of the one before: all that was
        decided is settled.
        """
        last = _planned.get(self._identity.lineage)
        if last is None or last.checkpoint_id != checkpoint_id - 1:
            return None
        newest = newest_entry(self._storage)
        if newest is None or newest.run != last.run or newest.token is None:
            return None
        if newest.token.checkpoint_id != checkpoint_id - 1:
            return None
        digest = digest_of(self._request(checkpoint_id).sources)
        return PlannedEpoch(checkpoint_id, Hold(newest.run, newest.slot), digest)

    def _recovered(self, checkpoint_id: int) -> PlannedEpoch:
        refuse_savepoint(self._storage)
        earlier = transactional_ids(self._storage) - {self._transactional_id}
        sinks = _NotedSinks(self._sinks(earlier))
        log = self._taken_over()
        request = self._request(checkpoint_id)
        producer = self._driver(log, sinks, checkpoint_id).recover(request)
        hold = None if producer is None else log.hold_of(producer)
        return PlannedEpoch(checkpoint_id, hold, digest_of(request.sources), tuple(sinks.lost))

    def _taken_over(self) -> DecisionLog:
        """Return the log of decisions, of a new run.

        Raises:
            OptionError: Kafka decides in this checkpoint.
        """
        claim(self._storage, LOG)
        log = self._log_of(None)
        return self._log_of(log.hold_of(log.fence(None)))

    def _log_of(self, hold: Hold | None) -> DecisionLog:
        return DecisionLog(self._storage, SystemClock(), self._transactional_id, hold)

    def _sink(self, earlier_ids: frozenset[str] = frozenset()) -> TwoPhaseCommitSink:
        return self._open_sink(self.owner, self._transactional_id, earlier_ids)

    def _sinks(self, earlier_ids: frozenset[str] = frozenset()) -> OpenSinks:
        return OpenSinks({SINK_UID: self._sink(earlier_ids)}, {SINK_UID: self.owner})

    def _driver(self, log: DecisionLog, sinks: Participants, checkpoint_id: int) -> Driver:
        return Driver(
            self._identity,
            log,
            self._storage,
            SystemClock(),
            participants=sinks,
            listener=self._listener,
            collect_every=COLLECT_EVERY if checkpoint_id % COLLECT_EVERY == 0 else 0,
            deletes_at_a_time=DELETES_AT_A_TIME,
        )

    def _request(self, checkpoint_id: int) -> Request:
        return Request(checkpoint_id, self._folder.log.batch(checkpoint_id).sources, may_skip=False)


class PreparedEpoch:
    """An epoch with prepared tasks: the engine and the sinks of the driver that decides.

    The plan has settled all earlier epochs, so only transactions of these tasks are looked at.

    Args:
        sinks: of the transactions.
        committables: the transactions that tasks prepared.
        lost: transactions that the plan found lost.
    """

    def __init__(
        self, sinks: Participants, committables: tuple[Committable, ...], lost: tuple[Lost, ...]
    ) -> None:
        self._sinks = sinks
        self._committables = committables
        self._lost_before = {each.committable: each for each in lost}
        self._gone = ""
        self.has_run = False

    def run_epoch(
        self, checkpoint_id: int, producer: Producer, state: tuple[StepState, ...]
    ) -> EpochResult:
        """Return the result of the epoch, whose tasks have run; see `ports.Engine.run_epoch`.

        Raises:
            TallystickError: a prepared transaction is lost, and only Spark can run the epoch again.
        """
        self.has_run = True
        if self._gone:
            raise TallystickError(
                f"epoch {checkpoint_id}: transactions of its tasks were aborted before they could "
                f"be committed, by a timeout or by hand: {self._gone}. Nothing of the epoch is "
                f"visible. Start the query again: the epoch is run again, nothing is lost or "
                f"repeated. If it comes back, raise the "
                f"sink's option transaction.timeout.ms."
            )
        # How tasks may be run again, and beside each other, is known to Spark's driver only.
        return EpochResult((), committables=self._committables, has_strays=True)

    def commit(self, committables: tuple[Committable, ...]) -> tuple[Lost, ...]:
        """See `ports.Participants.commit`."""
        own = tuple(each for each in committables if each in self._committables)
        lost = self._sinks.commit(own)
        self._gone = "; ".join(each.what for each in lost)
        before = (self._lost_before.get(each) for each in committables)
        return (*lost, *(each for each in before if each is not None))

    def lingering(self) -> tuple[Committable, ...]:
        """Return the transactions that failed attempts left, without the epoch's committables."""
        return to_abort(self._sinks.lingering(), self._committables)

    def abort(self, committables: tuple[Committable, ...]) -> None:
        """See `ports.Participants.abort`."""
        self._sinks.abort(committables)

    def check_prepared(self, committables: tuple[Committable, ...]) -> None:
        """See `ports.Participants.check_prepared`."""
        try:
            self._sinks.check_prepared(committables)
        except EpochAbortedError as error:
            self._gone = str(error)
            raise

    def check_newest(self, settled: tuple[Committable, ...]) -> None:
        """Do nothing: the plan has checked it."""


class _NotedSinks:
    """Participants that remember the losses of their last commit."""

    def __init__(self, sinks: Participants) -> None:
        self._sinks = sinks
        self.lost: tuple[Lost, ...] = ()

    def commit(self, committables: tuple[Committable, ...]) -> tuple[Lost, ...]:
        self.lost = self._sinks.commit(committables)
        return self.lost

    def lingering(self) -> tuple[Committable, ...]:
        return self._sinks.lingering()

    def abort(self, committables: tuple[Committable, ...]) -> None:
        self._sinks.abort(committables)

    def check_prepared(self, committables: tuple[Committable, ...]) -> None:
        self._sinks.check_prepared(committables)

    def check_newest(self, settled: tuple[Committable, ...]) -> None:
        self._sinks.check_newest(settled)


def digest_of(sources: tuple[str, ...]) -> str:
    """Return a digest of an epoch's end offsets; it travels with every task's message."""
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()


def stored_lineage(folder: CheckpointFolder) -> str:
    """Return the id of a checkpoint's query, which Spark stores before the first micro-batch.

    Raises:
        OptionError: no id is stored: Spark's checkpoint is in another place.
        DataLossError: the stored id is damaged.
    """
    found = folder.lineage()
    if found is None:
        raise OptionError(
            f"checkpointLocation {folder.location}: Spark has put nothing there (expected its "
            f"file metadata). Name the place by a whole URI, such as file:///checkpoints/counts or "
            f"s3a://bucket/checkpoints/counts: without a scheme it is on Spark's default file "
            f"system, which only Spark knows."
        )
    return found


def newest_batch(folder: CheckpointFolder) -> int:
    """Return the newest micro-batch in Spark's log: Spark logs a micro-batch before planning it.

    Raises:
        DataLossError: the log is empty.
    """
    planned = folder.planned_by_spark()
    if not planned:
        raise DataLossError(
            f"checkpoint {folder.location}: offsets/ should hold the micro-batch that Spark is "
            f"about to run, found none. Nothing was changed. Put a whole copy of the checkpoint "
            f"back."
        )
    return planned[-1]
