"""Other systems than Kafka that hold rows back until they are told to show them.

The facts, as systems with prepared transactions have them:
    * A transaction belongs to the task that began it until it is prepared. Then it is found,
      committed and aborted by its name, from anywhere, and outlives whoever prepared it.
    * Some abort what was begun too long ago, prepared or not (Kafka does); some never do
      (PostgreSQL).
    * What became of a transaction can be asked for ever: a token inside it tells.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

from tallystick.epoch.two_phase import Committable, Outcome, Owner, Timeout, TransactionPlan
from tallystick.errors import EpochAbortedError, RetriableError
from tests.simulation.broker import Wire
from tests.simulation.rows import Row
from tests.simulation.scheduler import Process
from tests.simulation.wire import Call

Result = TypeVar("Result")

TIMEOUT_MS = 60_000


class Fate(Enum):
    """Where a transaction stands."""

    OPEN = auto()
    PREPARED = auto()
    COMMITTED = auto()
    ABORTED = auto()


PENDING = (Fate.OPEN, Fate.PREPARED)


@dataclass(slots=True)
class Held:
    """One transaction; `run` is the driver's process whose task began it."""

    committable: Committable
    lineage: str
    run: str
    rows: tuple[Row, ...] = ()
    fate: Fate = Fate.OPEN
    timed_out: bool = False


class OtherSystem:
    """The state that outlives every driver.

    Args:
        uid: of the sink that writes here.
        times_out: whether it aborts by itself what was begun too long ago.
        tells: whether it can be asked if a transaction waits still.
    """

    def __init__(self, uid: str, *, times_out: bool, tells: bool = False) -> None:
        self.uid = uid
        self.times_out = times_out
        self.tells = tells
        self.transactions: dict[str, Held] = {}
        self.on_commit: Callable[[Held], None] = lambda _: None
        self.on_abort: Callable[[Held], None] = lambda _: None

    # For tasks
    def begin(self, transaction: Held) -> None:
        """Begin a transaction."""
        assert transaction.committable.name not in self.transactions, transaction
        self.transactions[transaction.committable.name] = transaction

    def write(self, name: str, rows: Sequence[Row]) -> None:
        """Put rows into it."""
        transaction = self._open(name)
        transaction.rows += tuple(rows)

    def prepare(self, name: str) -> None:
        """Make it durable, and not visible."""
        self._open(name).fate = Fate.PREPARED

    def _open(self, name: str) -> Held:
        transaction = self.transactions[name]
        if transaction.fate is not Fate.OPEN:
            raise EpochAbortedError(f"{self.uid}: transaction {name} is {transaction.fate.name}")
        return transaction

    # For drivers
    def commit(self, name: str) -> Outcome:
        """Make it visible; repeated, it tells what became of it."""
        transaction = self.transactions[name]
        assert transaction.fate is not Fate.OPEN, "nobody names what is not prepared"
        if transaction.fate is Fate.PREPARED:
            self.on_commit(transaction)
            transaction.fate = Fate.COMMITTED
        return Outcome.COMMITTED if transaction.fate is Fate.COMMITTED else Outcome.LOST

    def check_prepared(self, name: str) -> None:
        """It waits still, or the epoch has to run again."""
        transaction = self.transactions[name]
        if transaction.fate is not Fate.PREPARED:
            raise EpochAbortedError(f"{self.uid}: transaction {name} is {transaction.fate.name}")

    def abort(self, name: str) -> None:
        """Give it up; never undoes a commit."""
        transaction = self.transactions[name]
        if transaction.fate in PENDING:
            self.on_abort(transaction)
            transaction.fate = Fate.ABORTED

    def pending(self, lineage: str) -> list[Held]:
        """What is open or prepared, whoever began it."""
        return [
            transaction
            for transaction in self.transactions.values()
            if transaction.lineage == lineage and transaction.fate in PENDING
        ]

    # For the world
    def time_out(self, dice: random.Random) -> bool:
        """Abort one of those that wait for too long; whether there was any."""
        waiting = [pending for pending in self.transactions.values() if pending.fate in PENDING]
        if not self.times_out or not waiting:
            return False
        transaction = dice.choice(waiting)
        transaction.fate, transaction.timed_out = Fate.ABORTED, True
        return True

    def visible(self) -> list[Row]:
        """What a reader gets."""
        return [
            row
            for transaction in self.transactions.values()
            if transaction.fate is Fate.COMMITTED
            for row in transaction.rows
        ]


class SimulatedSink:
    """One driver's way to a system; see `sink.two_phase.TwoPhaseCommitSink`.

    Args:
        wire: what requests go through.
        process: the driver's.
        system: where they arrive.
        on_request: told the name of each transaction whose commit is asked for.
    """

    def __init__(
        self, wire: Wire, process: Process, system: OtherSystem, on_request: Callable[[str], None]
    ) -> None:
        self._wire = wire
        self._process = process
        self._system = system
        self._on_request = on_request

    @property
    def timeout(self) -> Timeout | None:
        """See `TwoPhaseCommitSink.timeout`."""
        return Timeout(TIMEOUT_MS) if self._system.times_out else None

    def plan(self) -> TransactionPlan:
        """Tasks of this world are `sink_engine`'s, and need none."""
        raise NotImplementedError

    def commit(self, committable: Committable) -> Outcome:
        """See `TwoPhaseCommitSink.commit`."""
        name = committable.name
        self._on_request(name)
        return self._wire.send(
            self._process, self._call("commit", lambda: self._system.commit(name))
        )

    def abort(self, committable: Committable) -> None:
        """See `TwoPhaseCommitSink.abort`."""
        name = committable.name
        self._wire.send(self._process, self._call("abort", lambda: self._system.abort(name)))

    def lingering(self, owner: Owner) -> Iterable[Committable]:
        """See `TwoPhaseCommitSink.lingering`."""

        def effect() -> list[Committable]:
            return [transaction.committable for transaction in self._system.pending(owner.lineage)]

        return self._wire.send(self._process, self._call("lingering", effect))

    def describe(self, committable: Committable) -> str:
        """See `TwoPhaseCommitSink.describe`."""
        return f"{self._system.uid}: {committable.name} of {committable.record_count} rows"

    def close(self) -> None:
        """See `TwoPhaseCommitSink.close`."""

    def _call(self, what: str, effect: Callable[[], Result]) -> Call[Result]:
        return Call(f"{self._system.uid} {what}", effect, RetriableError)


class TellingSink(SimulatedSink):
    """The same to a system that tells whether a transaction waits still."""

    def check_prepared(self, committable: Committable) -> None:
        """See `participants.KnowsPrepared`."""
        name = committable.name
        self._wire.send(
            self._process, self._call("check", lambda: self._system.check_prepared(name))
        )
