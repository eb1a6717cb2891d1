"""Resident tasks: processes of their own, that outlive what their driver thinks of them.

What a member does with an order, which frames it takes, and what the driver makes of the answers is
the real code (`gang`). Played here: processes, connections, and who listens where.

What may go on besides a gang: members of one that was given up, or whose driver is gone. Awake, a
member notices that its connection ended a moment later; one that hung goes on when it wakes up.
What it says by then may reach the gang that listens now, which asks whether it is one of its own.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from tallystick.errors import EpochAbortedError, RetriableError
from tallystick.spark.gang.inbox import (
    CANCELLED,
    CUT,
    DONE,
    FAILED,
    READY,
    EpochCancelledError,
    FramesOf,
    Inbox,
    Replies,
    Share,
    WriteStep,
)
from tallystick.state.catalog import StepState
from tallystick.tasks.frames import Frame
from tallystick.tasks.keyed import ProcessPlan
from tallystick.tasks.read import Report
from tests.simulation.faults import Fault, FaultPlan
from tests.simulation.scheduler import Crash, Process

LOST = "lost"
HELD_BYTES_MAX = 1 << 20
SLOT_COUNT = 3
"""How many members there are room for."""
NOTICE_RATIO = 0.02
"""How soon an orphan notices that its driver is gone, at each step."""


class GangLostError(EpochAbortedError):
    """As `spark.gang.gang.GangLostError`."""


class CutError(RetriableError):
    """As `spark.gang.link.LinkBrokenError`."""


class Around(Protocol):
    """What gangs need of the world."""

    dice: random.Random
    plan: FaultPlan
    step: int
    met: Counter[str]
    network: "Network"
    listening: "SimulatedGang | None"

    def advance(self, process: Process) -> None:
        """Let time pass; the process may be paused."""
        ...

    def pass_by(self, process: Process) -> None:
        """Let time pass; the process may be paused, or die, here."""
        ...

    def pauses_ms(self, process: Process, state: tuple[StepState, ...]) -> int:
        """The time by which a driver measures pauses."""
        ...

    def start(self, process: Process) -> None:
        """Let a process run."""
        ...

    def end(self, process: Process) -> None:
        """End a process that is not the one that runs."""
        ...

    def later(self, do: Callable[[], object]) -> None:
        """Let something arrive later."""
        ...

    def tell(self, what: str) -> None:
        """Add a line to the story of this world."""
        ...

    def nonce(self) -> str:
        """A name that no other run will draw."""
        ...


@dataclass(frozen=True)
class Order:
    """One run of an epoch's tasks; each member binds them to where it runs.

    Args:
        run: counts the runs of a pipeline's run.
        read: what its readers send, in a member.
        reader_count: how many there are.
        plans: of the keyed steps, in a member.
        writer_count: see `Share.run`.
        write: what the last tasks do, in a member.
        attempt_number: see `spark.gang.messages.Order`.
    """

    run: int
    read: Callable[["Member"], FramesOf]
    reader_count: int
    plans: Callable[["Member"], Sequence[ProcessPlan]]
    writer_count: int
    write: Callable[["Member"], WriteStep]
    attempt_number: int


class Member:
    """One resident task, in a process of its own."""

    def __init__(self, world: Around, gang: "SimulatedGang", index: int, count: int) -> None:
        self.index = index
        self.inbox = Inbox(HELD_BYTES_MAX, _Baton(self))
        self.orders: deque[Order | None] = deque()
        self.is_cut = False  # its driver does not listen any more
        self.is_hung = False
        self._world = world
        self._gang = gang
        peers = [number for number in range(count) if number != index]
        # It writes when all of its own is sent: a process here does one thing at a time.
        self._share = Share(
            index,
            count,
            self.inbox,
            peers,
            self._begin_sending,
            on_task=lambda _: None,
            beside=lambda work: work,
        )
        self.process = Process(f"member {index} of gang {gang.name}", self._serve, resident=self)

    def befall(self) -> None:
        """See `scheduler.Resident`."""
        world, plan = self._world, self._world.plan
        if self.is_cut:
            if world.dice.random() < NOTICE_RATIO:
                raise Crash
            return
        if plan.strikes(Fault.MEMBER_LOST):
            raise Crash
        if plan.strikes(Fault.MEMBER_HUNG):
            self._hang()
        peers = [member for member in self._gang.members if member is not self]
        if peers and plan.strikes(Fault.MEMBERS_CUT):
            for member in (self, world.dice.choice(peers)):
                member.inbox.fail(CutError("the other side is gone"))
                self._gang.hear(CUT, member.index, 0, None)

    def ended(self) -> None:
        """See `scheduler.Resident`."""
        self._gang.lost(self)

    def _hang(self) -> None:
        self._world.tell(f"{self.process.name} hangs")
        self.is_hung = True
        self.process.asleep_until = self._world.step + self._world.dice.choice((5, 30, 100))
        self.process.give_back()
        self.is_hung, self.process.asleep_until = False, 0
        if self.is_cut:
            self._world.met["a member woke up after the end of its gang"] += 1

    def _serve(self, process: Process) -> None:
        self._gang.hear(READY, self.index, 0, None)
        while (order := self._next_order()) is not None:
            self._world.advance(process)
            kind, reply = self._answer(order)
            self._gang.take_from(self, kind, order.run, reply)

    def _next_order(self) -> Order | None:
        while not self.orders and not self.is_cut:
            self.process.block()
        return None if self.is_cut else self.orders.popleft()

    def _answer(self, order: Order) -> tuple[str, Any]:
        try:
            return DONE, self._share.run(
                order.run,
                order.read(self),
                order.reader_count,
                order.plans(self),
                order.writer_count,
                order.write(self),
                order.attempt_number,
            )
        except EpochCancelledError:
            return CANCELLED, None
        except CutError:
            return CUT, None
        except Exception as error:
            return FAILED, error

    def _begin_sending(self, peer: int) -> "_Sending":
        return _Sending(self._world, self, self._gang.members[peer])


class _Baton:
    """Where a member waits for frames; see `gang.inbox.Changed`."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def __enter__(self) -> None:
        """Only one process runs: there is nothing to lock."""

    def __exit__(self, *raised: object) -> None:
        """See `__enter__`."""

    def wait(self) -> None:
        """Give the baton back until a frame has come; its end comes where none will."""
        if self._member.is_cut:
            raise Crash
        self._member.process.block()

    def notify_all(self) -> None:
        """A frame has come."""
        self._member.process.wake()


class _Sending:
    """See `gang.inbox.PeerStream`."""

    def __init__(self, world: Around, sender: Member, receiver: Member) -> None:
        self._world = world
        self._sender = sender
        self._receiver = receiver

    def add(self, run: int, stage: int, frame: Frame) -> None:
        """Send a frame."""
        self._world.advance(self._sender.process)
        put = partial(self._receiver.inbox.put, run, stage, frame)
        self._world.network.send(self._sender, self._receiver, run, put)

    def end(self, run: int, stage: int, source: int) -> None:
        """Say that a source has no more."""
        end = partial(self._receiver.inbox.end, run, stage, source)
        self._world.network.send(self._sender, self._receiver, run, end)

    def flush(self) -> None:
        """Nothing waits here."""


class Network:
    """What members have sent each other, and what has not arrived yet: in order, per connection."""

    def __init__(self, world: Around) -> None:
        self._world = world
        self._sent: dict[tuple[str, str], deque[tuple[Member, int, Callable[[], None]]]] = {}
        self._newest: dict[str, int] = {}  # the newest run that was sent to a member

    def send(self, sender: Member, receiver: Member, run: int, arrive: Callable[[], None]) -> None:
        """Let something arrive: mostly at once."""
        key = (sender.process.name, receiver.process.name)
        is_slow = key in self._sent or self._world.plan.strikes(Fault.FRAMES_LATE)
        self._sent.setdefault(key, deque()).append((receiver, run, arrive))
        if not is_slow:
            self._deliver(key)

    @property
    def has_any(self) -> bool:
        """Whether anything has not arrived."""
        return bool(self._sent)

    def deliver_one(self) -> bool:
        """Let the first of one connection arrive; whether there was any."""
        if not self._sent:
            return False
        self._deliver(self._world.dice.choice(list(self._sent)))
        return True

    def _deliver(self, key: tuple[str, str]) -> None:
        receiver, run, arrive = self._sent[key].popleft()
        if not self._sent[key]:
            del self._sent[key]
        if not receiver.process.alive:
            return
        name = receiver.process.name
        if run < self._newest.get(name, 0):
            self._world.met["a frame of an earlier run arrived"] += 1
        self._newest[name] = max(run, self._newest.get(name, 0))
        arrive()


class SimulatedGang:
    """A gang on the driver's side; see `spark.gang.gang.Gang`.

    Args:
        world: what surrounds it.
        driver: the process that waits for it.
        member_count: how many there are.
        has_limit: an epoch may not take for ever.

    Raises:
        GangLostError: its members did not all come up.
    """

    def __init__(
        self, world: Around, driver: Process, member_count: int, *, has_limit: bool
    ) -> None:
        self._has_limit = has_limit
        self.name = world.nonce()
        self.is_lost = False
        self.secret = self.name
        self._world = world
        self._driver = driver
        self._heard: deque[tuple[str, int, int, Any]] = deque()
        self.members: list[Member] = []
        self.members += [Member(world, self, at, member_count) for at in range(member_count)]
        for member in self.members:
            world.start(member.process)
        world.tell(f"{driver.name} has gang {self.name} of {member_count}")
        for _ in self.members:
            kind, *_ = self._next()
            if kind in (LOST, CUT):
                self.give_up()
                raise GangLostError(f"gang {self.name} did not come up")
        world.listening = self

    def run(self, order: Order) -> list[Report]:
        """See `spark.gang.gang.Gang.run`."""
        for member in self.members:
            self._tell(member, order)
        replies = Replies(order.run, range(len(self.members)), list, lambda error: error)
        while replies.is_waiting:
            self._world.pass_by(self._driver)
            kind, index, run, reply = self._next()
            if kind in (LOST, CUT):
                self.give_up()
                raise replies.failure or GangLostError(f"gang {self.name} is lost")
            if replies.take(kind, index, run, reply):
                for member in self.members:
                    member.inbox.cancel(order.run)
        if replies.failure is not None:
            raise replies.failure
        return replies.reports

    def leave(self) -> None:
        """See `spark.gang.gang.Gang.leave`: it may be interrupted anywhere."""
        for member in self.members:
            self._world.pass_by(self._driver)
            self._tell(member, None)
        while any(member.process.alive for member in self.members):
            if not self._driver.block(has_patience=False):
                break
        self.give_up()

    def give_up(self) -> None:
        """End its members; some go on for a while."""
        self.is_lost = True
        for member in self.members:
            if not member.process.alive or member.is_cut:
                continue
            member.is_cut = True
            may_live = not member.process.is_blocked and member.process is not self._driver
            if may_live and (member.is_hung or self._world.plan.strikes(Fault.ORPHANED)):
                self._world.tell(f"{member.process.name} lives on")
                continue
            self._world.end(member.process)

    def lost(self, member: Member) -> None:
        """A member's connection has ended."""
        if not self.is_lost and not (member.orders and member.orders[0] is None):
            self.is_lost = True
            self.hear(LOST, member.index, 0, None)
        self._driver.wake()

    def take_from(self, member: Member, kind: str, run: int, reply: Any) -> None:
        """Take what a member says; an orphan's own driver does not listen."""
        if not member.is_cut:
            self.hear(kind, member.index, run, reply)
        elif self._world.plan.strikes(Fault.REPORT_LATE):
            self._world.later(lambda: self._call_again(member.index, kind, run, reply))

    def _call_again(self, index: int, kind: str, run: int, reply: Any) -> None:
        """Reach who listens now: at the same address, there is another gang by then."""
        if self._world.listening is not None:
            self._world.listening.answer(self.secret, kind, index, run, reply)

    def answer(self, secret: str, kind: str, index: int, run: int, reply: Any) -> None:
        """Take what somebody says who proves to be of this gang; see `spark.gang.link`."""
        if self.is_of(secret):
            self.hear(kind, index, run, reply)
        else:
            self._world.met["what an orphan said was refused"] += 1

    def is_of(self, secret: str) -> bool:
        """Whether who says it is of this gang."""
        return secret == self.secret

    def hear(self, kind: str, index: int, run: int, reply: Any) -> None:
        """Take a message."""
        self._heard.append((kind, index, run, reply))
        self._driver.wake()

    def _tell(self, member: Member, order: Order | None) -> None:
        member.orders.append(order)
        member.process.wake()

    def _next(self) -> tuple[str, int, int, Any]:
        while not self._heard:
            if not self._driver.block(has_patience=not self._has_limit) and not self._heard:
                assert any(member.is_hung for member in self.members), "it waits for nothing"
                return CUT, -1, 0, None
        return self._heard.popleft()
