"""Other sinks, and the log of decisions, broken on purpose; entered in the table of `mutations`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tallystick.checkpoint import decision_log
from tallystick.checkpoint.decision_log import DecisionLog, Entry
from tallystick.epoch import micro_batches, refusals, verdict
from tallystick.epoch import protocol as c
from tallystick.epoch.coordinator import Coordinator
from tallystick.epoch.manifest import CHECKPOINT, KAFKA
from tallystick.epoch.phases import RecoveringPhase
from tallystick.epoch.two_phase import Outcome, Settlement, to_abort
from tallystick.errors import ManifestError, OptionError, RetriableError
from tallystick.run import driver as driver_module
from tallystick.run import participants
from tallystick.run.driver import Driver
from tallystick.run.participants import OpenSinks
from tests.simulation.faults import Fault
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.other_systems import OtherSystem
from tests.simulation.sink_engine import SinkEngine
from tests.simulation.storage import SimulatedStorage


def mutation(
    sentence: str, where: Any, name: str, *needs: Fault, decided_by: str = ""
) -> Callable[[Any], Any]:
    """Enter the decorated function in the table: once for each decider, or for the one named."""

    def enter(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        for decider in (decided_by,) if decided_by else (KAFKA, CHECKPOINT):
            MUTATIONS[f"{sentence} ({decider} decides)"] = Mutation(
                frozenset(needs), where, name, make, decided_by=decider
            )
        return make

    return enter


@mutation("a start with another decider goes on", driver_module, "claim", Fault.OTHER_DECIDER)
def _(_: Any) -> Any:
    return lambda checkpoint, decider: None


# The order of things.


@mutation("prepared rows are committed before the decision", Driver, "_perform")
def _(original: Any) -> Any:
    def perform(self: Any, action: c.Action, engine: Any) -> c.Event:
        if isinstance(action, c.CommitTransaction) and not action.opens:
            self._participants.commit(self.coordinator.prepared)
        return original(self, action, engine)

    return perform


@mutation(
    "what a caught error left uncommitted counts as settled",
    Driver,
    "_read_committed",
    Fault.CAUGHT,
    Fault.SINK_AWAY,
    decided_by=CHECKPOINT,
)
def _(original: Any) -> Any:
    return lambda self: replace(original(self), has_failed=False)


@mutation(
    "a failure is told of the manifest only that it was noted after",
    micro_batches,
    "failures",
    Fault.CAUGHT,
    Fault.DISK_FULL,
    Fault.CRASH_BEFORE,
    Fault.TASK_KILLED,
    decided_by=CHECKPOINT,
)
def _(original: Any) -> Any:
    def failures(paths: Any, epoch: int) -> list[str]:
        return [path for path in original(paths, epoch) if not path.endswith(f"{epoch:012d}")]

    return failures


@mutation("a recovery aborts nothing", Driver, "_abort_lingering", Fault.CRASH_BEFORE)
def _(_: Any) -> Any:
    return lambda self, producer, decided: producer


@mutation(
    "what lingers is aborted without a proof of ownership",
    Driver,
    "_abort_lingering",
    Fault.TAKEOVER,
)
def _(_: Any) -> Any:
    def abort(self: Any, producer: Any, decided: Any) -> Any:
        self._participants.abort(to_abort(self._participants.lingering(), decided))
        return producer

    return abort


@mutation(
    "ownership is proved before it is asked what lingers",
    Driver,
    "_abort_lingering",
    Fault.TAKEOVER,
)
def _(_: Any) -> Any:
    def abort(self: Any, producer: Any, decided: Any) -> Any:
        producer = self._decider.fence(producer)
        self._participants.abort(to_abort(self._participants.lingering(), decided))
        return producer

    return abort


def abort_all(prepared: Any, decider: Any, folder: Any, sinks: Any, identity: Any) -> None:
    """Abort what a run prepared, also what is decided."""
    sinks.abort(prepared)


@mutation(
    "a replaced run aborts what it prepared, decided or not",
    driver_module,
    "abort_undecided",
    Fault.TAKEOVER,
    Fault.LOST_REPLY,
)
def _(_: Any) -> Any:
    return abort_all


@mutation("a recovery aborts before it commits", Driver, "_settle", Fault.CRASH_AFTER)
def _(original: Any) -> Any:
    def settle(self: Any, action: Any) -> c.Event:
        if isinstance(action, c.RecoverParticipants):
            self._abort_lingering(action.producer, ())
        return original(self, action)

    return settle


@mutation("an epoch runs without a recovery", Coordinator, "_decide", Fault.CRASH_AFTER)
def _(original: Any) -> Any:
    def decide(self: Any, goal: Any) -> c.Action:
        judged = verdict.judge(goal.request, self._known, self._identity)
        if isinstance(judged, verdict.Run | verdict.AlreadyCommitted):
            return self._resume_own_epoch(goal, judged)
        return original(self, goal)

    return decide


# What became of it.


@mutation(
    "an epoch is run again although a part of it is visible",
    refusals,
    "is_invisible",
    Fault.SINK_TIMEOUT,
    decided_by=CHECKPOINT,
)
def _(_: Any) -> Any:
    return lambda manifest, lost: True


@mutation(
    "an epoch that is run again goes on from its own state",
    Coordinator,
    "_run",
    Fault.SINK_TIMEOUT,
    decided_by=CHECKPOINT,
)
def _(original: Any) -> Any:
    def run(self: Any, goal: Any, base: Any, base_path: str) -> c.Action:
        known = self._known
        own = known.manifest is not None and known.manifest.checkpoint_id
        is_own = own == goal.request.checkpoint_id
        return original(self, goal, known.manifest if is_own else base, base_path)

    return run


@mutation(
    "a repeated epoch forgets what it went on from",
    Coordinator,
    "_run",
    Fault.SINK_TIMEOUT,
    decided_by=CHECKPOINT,
)
def _(original: Any) -> Any:
    def run(self: Any, goal: Any, base: Any, base_path: str) -> c.Action:
        is_again = isinstance(self._state, RecoveringPhase) and base is self._known.before
        token = self._known.token
        forgotten = token.manifest_path if is_again and token else base_path
        return original(self, goal, base, forgotten)

    return run


@mutation("lost output is passed over", OpenSinks, "commit", Fault.SINK_TIMEOUT)
def _(original: Any) -> Any:
    def commit(self: Any, committables: Any) -> Any:
        original(self, committables)
        return ()

    return commit


@mutation("lost output is told in part", OpenSinks, "commit", Fault.SINK_TIMEOUT, Fault.CRASH_AFTER)
def _(original: Any) -> Any:
    return lambda self, committables: original(self, committables)[:1]


@mutation("an unanswered commit counts as done", OpenSinks, "_commit_one", Fault.SINK_REFUSED)
def _(original: Any) -> Any:
    def commit_one(self: Any, committable: Any) -> Outcome:
        try:
            return original(self, committable)
        except RetriableError:
            return Outcome.COMMITTED

    return commit_one


@mutation("an unanswered commit counts as lost", OpenSinks, "_commit_one", Fault.SINK_LATE)
def _(original: Any) -> Any:
    def commit_one(self: Any, committable: Any) -> Outcome:
        try:
            return original(self, committable)
        except RetriableError:
            return Outcome.LOST

    return commit_one


@mutation("a repeated commit finds nothing", OtherSystem, "commit", Fault.SINK_LOST_REPLY)
def _(original: Any) -> Any:
    def commit(self: Any, name: str) -> Outcome:
        was = self.transactions[name].fate.name
        outcome = original(self, name)
        return Outcome.LOST if was == "COMMITTED" else outcome

    return commit


@mutation("the first error ends the others", participants, "commit_all", Fault.SINK_AWAY)
def _(_: Any) -> Any:
    def commit_all(committables: Any, commit: Any, _: Any) -> Settlement:
        lost = []
        for committable in committables:
            try:
                if commit(committable) is Outcome.LOST:
                    lost.append(committable)
            except Exception as error:
                return Settlement(tuple(lost), error)
        return Settlement(tuple(lost), None)

    return commit_all


# Whose it is.


@mutation("everything that is prepared is decided", SinkEngine, "run_epoch", Fault.TASK_KILLED)
def _(original: Any) -> Any:
    def run_epoch(self: Any, checkpoint_id: int, producer: Any, state: Any) -> Any:
        result = original(self, checkpoint_id, producer, state)
        prepared = tuple(
            transaction.committable
            for system in self._systems.values()
            for transaction in system.transactions.values()
            if transaction.committable.checkpoint_id == checkpoint_id
            and transaction.fate.name == "PREPARED"
        )
        return replace(result, committables=prepared)

    return run_epoch


@mutation(
    "only what tasks of now may have left is looked for",
    OpenSinks,
    "lingering",
    Fault.RESCALED,
    Fault.CRASH_BEFORE,
)
def _(original: Any) -> Any:
    def lingering(self: Any) -> Any:
        listed = original(self)
        sink = next(iter(self._sinks.values()))
        tasks = sink._wire.sinks.run_of(sink._process)[1]
        return tuple(committable for committable in listed if committable.task < tasks)

    return lingering


@mutation(
    "what a sink that is gone has prepared is passed over",
    OpenSinks,
    "_commit_one",
    Fault.SINK_GONE,
    Fault.CRASH_AFTER,
)
def _(original: Any) -> Any:
    def commit_one(self: Any, committable: Any) -> Outcome:
        try:
            return original(self, committable)
        except OptionError:
            return Outcome.COMMITTED

    return commit_one


@mutation("a sink can never be taken out", Coordinator, "_decide", Fault.SINK_GONE)
def _(original: Any) -> Any:
    def decide(self: Any, goal: Any) -> c.Action:
        action = original(self, goal)
        if isinstance(action, c.RecoverParticipants):
            return replace(action, committables=(*action.committables, *action.settled))
        return action

    return decide


# The log of decisions.


@mutation(
    "a slot is written whoever has it",
    SimulatedStorage,
    "put_new",
    Fault.TAKEOVER,
    decided_by=CHECKPOINT,
)
def _(original: Any) -> Any:
    def put_new(self: Any, path: str, data: bytes) -> bool:
        self._files.pop(path, None)
        original(self, path, data)
        return True

    return put_new


@mutation(
    "a slot that is taken counts as one's own",
    SimulatedStorage,
    "put_new",
    Fault.TAKEOVER,
    decided_by=CHECKPOINT,
)
def _(original: Any) -> Any:
    return lambda self, path, data: original(self, path, data) or True


@mutation(
    "a run that fences itself writes no slot",
    DecisionLog,
    "fence",
    Fault.LATE_PUT,
    decided_by=CHECKPOINT,
)
def _(original: Any) -> Any:
    def fence(self: Any, current: Any) -> Any:
        newest = decision_log.newest_entry(self._storage)
        if current is None or newest is None or newest.run != self._run:
            return original(self, current)
        return self._producer(newest.slot)

    return fence


@mutation(
    "a run that takes over forgets the decision",
    DecisionLog,
    "fence",
    decided_by=CHECKPOINT,
)
def _(original: Any) -> Any:
    def fence(self: Any, current: Any) -> Any:
        def put(entry: Entry) -> bool:
            return type(self)._put(self, entry._replace(token=None))

        with patch.object(self, "_put", put):
            return original(self, current)

    return fence


@mutation(
    "a slot counts although newer ones are there",
    DecisionLog,
    "_put",
    Fault.TAKEOVER,
    Fault.SLOTS_REMOVED,
    decided_by=CHECKPOINT,
)
def _(_: Any) -> Any:
    def put(self: Any, entry: Entry) -> bool:
        return self._storage.put_new(
            decision_log.slot_path(entry.slot), decision_log._encode(entry)
        )

    return put


@mutation(
    "a run takes over by every fence",
    DecisionLog,
    "fence",
    Fault.TAKEOVER,
    decided_by=CHECKPOINT,
)
def _(original: Any) -> Any:
    return lambda self, current: original(self, None)


@mutation(
    "a damaged slot is passed over",
    decision_log,
    "_decode",
    Fault.DECISION_DAMAGED,
    decided_by=CHECKPOINT,
)
def _(original: Any) -> Any:
    def decode(slot: int, data: bytes) -> Entry:
        try:
            return original(slot, data)
        except ManifestError:
            return Entry(slot, "?", None, "")

    return decode
