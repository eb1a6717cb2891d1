"""Resident tasks broken on purpose; entered in the table of `mutations`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tallystick.epoch import protocol as c
from tallystick.epoch.coordinator import Coordinator
from tallystick.epoch.phases import RestoringPhase, RunningPhase
from tallystick.errors import EpochAbortedError
from tallystick.spark.gang.inbox import CANCELLED, CUT, FAILED, Inbox, Replies
from tallystick.tasks.epoch_plan import PipelinePlan
from tallystick.tasks.read import WritePlan
from tests.simulation.faults import Fault
from tests.simulation.gang import GangLostError, Member, SimulatedGang
from tests.simulation.mutations import MUTATIONS, Mutation, writes_on
from tests.simulation.mutations import mutation as entered


def mutation(
    sentence: str,
    where: Any,
    name: str,
    *needs: Fault,
    is_keyed: bool = False,
    decided_by: str = "",
) -> Callable[[Any], Any]:
    """Enter the decorated function in the table."""
    pipeline = {"is_keyed": is_keyed, "decided_by": decided_by, "has_loop": True, "has_gang": True}
    return entered(f"{sentence} (resident tasks)", where, name, *needs, **pipeline)


# Who is listened to.


@mutation(
    "what an orphan says counts for the gang after its own",
    SimulatedGang,
    "is_of",
    Fault.MEMBER_HUNG,
    Fault.ORPHANED,
    Fault.REPORT_LATE,
    Fault.CRASH_BEFORE,
    Fault.COUNT_HIDDEN,
)
def _(_: Any) -> Any:
    return lambda self, secret: True


@mutation(
    "a lost member counts as one that had nothing to do",
    SimulatedGang,
    "lost",
    Fault.MEMBER_LOST,
    Fault.COUNT_HIDDEN,
)
def _(original: Any) -> Any:
    def lost(self: Any, member: Any) -> None:
        if self.is_lost or (member.orders and member.orders[0] is None):
            original(self, member)
            return
        for run in range(100):  # whichever it is
            self.hear(CANCELLED, member.index, run, None)

    return lost


@mutation(
    "a failure of one task does not stop the epoch",
    Replies,
    "take",
    Fault.READ_FAILED,
    Fault.COUNT_HIDDEN,
)
def _(original: Any) -> Any:
    def take(self: Any, kind: str, index: int, run: int, reply: Any) -> Any:
        return original(self, CANCELLED if kind == FAILED else kind, index, run, reply)

    return take


@mutation(
    "a member that was cut off counts as one that had nothing to do",
    SimulatedGang,
    "hear",
    Fault.MEMBERS_CUT,
    Fault.COUNT_HIDDEN,
)
def _(original: Any) -> Any:
    def hear(self: Any, kind: str, index: int, run: int, reply: Any) -> None:
        for number in range(100) if kind == CUT else (run,):  # whichever it is
            original(self, CANCELLED if kind == CUT else kind, index, number, reply)

    return hear


# What is written when.


MUTATIONS["a writer writes on after its report (resident tasks)"] = Mutation(
    frozenset(), WritePlan, "write", writes_on, has_loop=True, has_gang=True
)


def _not_fenced(is_its: Callable[[Exception], bool]) -> Callable[[Any], Any]:
    """The epoch is planned anew in the transaction that is open."""

    def make(original: Any) -> Any:
        def broken(self: Any, error: Exception) -> c.Action:
            state = self._state
            if isinstance(state, RunningPhase) and is_its(error) and state.goal.tries.attempt < 3:
                goal = replace(state.goal, tries=state.goal.tries.again())
                self._state = RestoringPhase(goal.after_fence())
                return c.ReadCommitted()
            return original(self, error)

        return broken

    return make


for sentence, is_its, needed in (
    (
        "earlier members are not fenced before a new gang's epoch",
        lambda error: isinstance(error, GangLostError),
        Fault.MEMBER_LOST,
    ),
    (
        "an epoch runs again in the same gang and the same transaction",
        lambda error: not isinstance(error, EpochAbortedError),
        Fault.READ_FAILED,
    ),
):
    mutation(sentence, Coordinator, "_broken", needed, Fault.COUNT_HIDDEN)(_not_fenced(is_its))


# Frames.


@mutation(
    "the end of what an earlier run sent counts for this one",
    Inbox,
    "end",
    Fault.FRAMES_LATE,
    Fault.READ_FAILED,
)
def _(original: Any) -> Any:
    """As if frames were told apart by the number of the epoch only."""
    return lambda self, run, stage, source: original(self, max(run, self._run), stage, source)


@mutation("a task does not wait for the end of what is sent to it", Inbox, "_next")
def _(original: Any) -> Any:
    def next_(self: Any, run: int, stage: int, target: int, source: int) -> Any:
        if not self._channels.get((run, stage, target, source)):
            return None
        return original(self, run, stage, target, source)

    return next_


# Rescales.


@mutation(
    "a rescale plans the state of as many tasks as before",
    PipelinePlan,
    "epoch",
    Fault.RESCALED_LIVE,
    is_keyed=True,
)
def _(original: Any) -> Any:
    def epoch(self: Any, number: int, now_ms: int, token: str, state: Any, *where: Any) -> Any:
        planned = original(self, number, now_ms, token, state, *where)
        counts = {step.uid: step.parallelism for step in state}
        bases = [
            replace(plan.base, parallelism=counts.get(plan.base.uid, plan.base.parallelism))
            for plan in planned.plans
        ]
        plans = [replace(plan, base=base) for plan, base in zip(planned.plans, bases, strict=True)]
        return replace(planned, plans=tuple(plans))

    return epoch


@mutation(
    "a gang that came up smaller divides tasks as the larger one",
    Member,
    "__init__",
    Fault.GANG_LATE,
    is_keyed=True,
)
def _(original: Any) -> Any:
    largest: dict[int, int] = {}  # by world

    def init(self: Any, world: Any, gang: Any, index: int, count: int) -> None:
        largest[id(world)] = max(count, largest.get(id(world), 0))
        original(self, world, gang, index, largest[id(world)])

    return init
