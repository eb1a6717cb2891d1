"""The moments of an epoch at which something may happen to it."""

from collections.abc import Callable
from enum import Enum

from tallystick.epoch import protocol as c
from tallystick.kafka.broker import KafkaBroker
from tests.failover.wire import Wire


class Step(Enum):
    """Named after what has just been achieved."""

    FENCED = "the new driver has its producer, and has not asked what is committed"
    WROTE_HALF = "some rows are written, others are not"
    RAN = "all rows are written, there is no manifest"
    COMPLETED = "the manifest is durable, the token is not staged"
    STAGED = "the token is staged, nothing is counted"
    COUNTED = "the output is counted, EndTxn is not sent"
    ENDING = "EndTxn is sent, its answer is not read"
    COMMITTED = "the transaction is committed, nothing is confirmed"
    CONFIRMED = "the output is confirmed, Spark has not logged the epoch"


EVENTS: dict[type, Step] = {
    c.ProducerFenced: Step.FENCED,
    c.EpochRan: Step.RAN,
    c.ManifestWritten: Step.COMPLETED,
    c.OutputCounted: Step.COUNTED,
    c.TransactionCommitted: Step.COMMITTED,
    c.OutputConfirmed: Step.CONFIRMED,
}


class Trap:
    """Calls `act` once, when an armed epoch has reached a step. Give its parts to a `Job`."""

    def __init__(self, step: Step, act: Callable[[], None]) -> None:
        self.sprung = False
        self._step = step
        self._act = act
        self._armed = False
        self._wire: Wire | None = None

    def arm(self) -> None:
        """From now on."""
        self._armed = True
        assert self._wire is not None, "a run has begun"
        if self._step is Step.STAGED:
            self._wire.before("DescribeTransactions", self._spring)
        if self._step is Step.ENDING:
            self._wire.after("EndTxn", self._spring)

    def on_start(self, broker: KafkaBroker) -> None:
        self._wire = Wire(broker.client)

    def on_event(self, event: c.Event) -> None:
        if EVENTS.get(type(event)) is self._step:
            self._spring()

    def midway(self) -> None:
        if self._step is Step.WROTE_HALF:
            self._spring()

    def _spring(self) -> None:
        if self._armed and not self.sprung:
            self.sprung = True
            self._act()
