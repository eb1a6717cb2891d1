"""The other sinks of an epoch, as its tasks get them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tallystick.epoch.two_phase import Committable, Owner, Place
from tallystick.tasks.read import EncodePlan
from tallystick.tasks.write import Branch, FanOut
from tests.simulation.other_systems import Fate, Held, OtherSystem
from tests.simulation.rows import Row

OnLeft = Callable[[OtherSystem, Held], bool]
"""Told of a transaction that its task gives up; true if nobody gets to abort it."""


def is_aborted(system: OtherSystem, transaction: Held) -> bool:
    """Let the task abort what it gives up."""
    return False


@dataclass(frozen=True)
class Branches:
    """The other sinks of an epoch.

    Args:
        systems: by uid.
        run: the driver's process.
        nonce: draws names.
        decides_elsewhere: no transaction of Kafka's spans the epoch.
        on_left: what becomes of what tasks give up.
        may_leave_strays: see `FanOut`.
    """

    systems: Mapping[str, OtherSystem]
    run: str
    nonce: Callable[[], str]
    decides_elsewhere: bool
    on_left: OnLeft = is_aborted
    may_leave_strays: bool = False

    def outlet(self, checkpoint_id: int, lineage: str, encode: EncodePlan) -> FanOut:
        """The sinks to which the last tasks with rows send them."""
        branches = tuple(
            Branch(
                Owner("sim", uid, lineage),
                TaskTransactions(system, lineage, self.run, self.nonce, self.on_left),
            )
            for uid, system in self.systems.items()
        )
        return FanOut(
            branches,
            None if self.decides_elsewhere else encode,
            checkpoint_id,
            may_leave_strays=self.may_leave_strays,
        )


@dataclass(frozen=True)
class TaskTransactions:
    """How a task begins transactions in another system; see `two_phase.TransactionPlan`."""

    system: OtherSystem
    lineage: str
    run: str
    nonce: Callable[[], str]
    on_left: OnLeft

    def begin(self, place: Place) -> "TaskTransaction":
        """See `two_phase.TransactionPlan.begin`."""
        return TaskTransaction(self, place)


class TaskTransaction:
    """See `two_phase.Transaction`."""

    def __init__(self, plan: TaskTransactions, place: Place) -> None:
        self._system = plan.system
        self._on_left = plan.on_left
        uid, epoch, task = plan.system.uid, place.checkpoint_id, place.task
        # Not the place's nonce: no seed decides it.
        name = f"{uid}-{epoch}-{task}-{place.attempt}-{plan.nonce()}"
        self._transaction = Held(Committable(uid, epoch, task, name, 0, 0), plan.lineage, plan.run)
        self._system.begin(self._transaction)

    def write(self, rows: Any) -> None:
        """See `two_phase.Transaction.write`."""
        rows_read = tuple(map(Row.from_value, rows["value"].to_pylist()))
        self._system.write(self._transaction.committable.name, rows_read)

    def prepare(self) -> list[Committable]:
        """See `two_phase.Transaction.prepare`."""
        self._system.prepare(self._transaction.committable.name)
        return [self._transaction.committable]

    def abort(self) -> None:
        """See `two_phase.Transaction.abort`: nobody has been told of it."""
        if self._transaction.fate is Fate.OPEN and not self._on_left(
            self._system, self._transaction
        ):
            self._transaction.fate = Fate.ABORTED
