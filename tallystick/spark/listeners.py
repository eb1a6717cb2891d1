"""Listeners of a driver: counts for metrics, warnings before a transaction times out."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from tallystick.epoch import protocol
from tallystick.epoch.two_phase import Timeout
from tallystick.errors import RetriableError, TallystickError
from tallystick.run.driver import Listener
from tallystick.state.catalog import StepState
from tallystick.values import Producer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PipelineCounts:
    """The counts of one pipeline, since this process began."""

    starts: int = 0
    """How often it was started."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failures in epochs, by the class of the error; most are tried again."""
    rows_written: int = 0
    """The rows of committed epochs, in all sinks."""
    late_rows: Counter[str] = field(default_factory=Counter)
    """The rows that a keyed step dropped as late, by its uid."""
    state: tuple[StepState, ...] = ()
    """The committed state."""
    committed_ms: int = 0
    """When this process committed an epoch last, in ms since 1970; 0: it has not."""
    open_since_ms: int = 0
    """When the epoch in flight was planned, in ms since 1970; 0: none is in flight."""
    timeout_ms: int | None = None
    """The timeout of the transactions that decide, in ms; None: none does."""


PIPELINES: defaultdict[str, PipelineCounts] = defaultdict(PipelineCounts)
"""By the pipeline's name."""


class EpochCounts:
    """A listener that counts what epochs do, and passes every event on.

    An epoch counts once, when it is committed, as its output does; where the answer to the commit
    is lost, it is left out.

    Args:
        pipeline: its name.
        listener: the user's; None: there is none.
        timeout_ms: of the transactions that decide; None: none does.
    """

    def __init__(
        self, pipeline: str, listener: Listener | None, timeout_ms: int | None = None
    ) -> None:
        self._counts = PIPELINES[pipeline]
        self._counts.starts += 1
        self._counts.timeout_ms = timeout_ms
        self._listener = listener
        self._ran: protocol.EpochRan | None = None

    def __call__(self, event: protocol.Event) -> None:
        """See `run.driver.Listener`."""
        counts = self._counts
        match event:
            case protocol.ProducerFenced():  # what ran before is not committed next
                self._ran, counts.open_since_ms = None, 0
            case protocol.EpochRequested():
                self._ran, counts.open_since_ms = None, _now_ms()
            case protocol.EpochPlanned(sources):
                counts.open_since_ms = 0 if sources is None else _now_ms()
            case protocol.EpochRan():
                self._ran = event
            case protocol.TransactionCommitted():
                self._commit()
            case protocol.ActionFailed(error):
                counts.failures[type(error).__name__] += 1
            case protocol.TransactionAborted():
                counts.open_since_ms = 0
        if self._listener is not None:
            self._listener(event)

    def _commit(self) -> None:
        counts, ran = self._counts, self._ran
        counts.open_since_ms = 0
        if ran is None:
            return
        self._ran = None
        counts.committed_ms, counts.state = _now_ms(), ran.state
        counts.rows_written += sum(each.record_count for each in ran.produced)
        counts.rows_written += sum(each.record_count for each in ran.committables)
        for step, count in ran.late:
            counts.late_rows[step] += count


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class EpochAge:
    """A listener that warns of epochs that take nearly as long as their transaction may be open.

    The driver's own clock only raises the suspicion, since a transaction begins with its first row,
    perhaps long after its epoch: then Kafka is asked for how long it has been open.

    Source: the behaviour of Flink's enableTransactionTimeoutWarnings.

    Args:
        pipeline: its name.
        timeout: of the epochs' transactions.
        begun_ms: when Kafka says that the open transaction of an id was begun, in ms since 1970;
            0: none is open.
        listener: gets every event too.
    """

    def __init__(
        self,
        pipeline: str,
        timeout: Timeout,
        begun_ms: Callable[[str], int],
        listener: Callable[[protocol.Event], None],
    ) -> None:
        self._pipeline = pipeline
        self._timeout = timeout
        self._begun_ms = begun_ms
        self._listener = listener
        self._producer: Producer | None = None
        self._since = 0.0

    def begin(self, producer: Producer) -> None:
        """Note that the tasks of an epoch may write from now on."""
        self._producer, self._since = producer, time.monotonic()

    def __call__(self, event: protocol.Event) -> None:
        """Look at the clock where an epoch has been written, or could not be."""
        match event:
            case protocol.OutputCounted():
                self._look()
            case protocol.ActionFailed(error) if isinstance(error, RetriableError):
                self._explain()
        self._listener(event)

    def _look(self) -> None:
        timeout_ms = self._timeout.timeout_ms
        limit_ms = self._timeout.warn_share * timeout_ms
        if self._producer is None or self._passed_ms < limit_ms:
            return
        try:
            begun_ms = self._begun_ms(self._producer.transactional_id)
        except (OSError, TallystickError):
            return  # the commit will say what is in the way
        if not begun_ms:
            return self._explain()
        age_ms = time.time_ns() // 1_000_000 - begun_ms
        if age_ms >= limit_ms:
            logger.warning(
                "pipeline %s: the epoch's transaction is committed %d ms after it was begun, which "
                "is %d %% of its timeout of %d ms: what is open longer is aborted, and the epoch "
                "runs again. Use a longer transaction_timeout_ms, or shorter epochs",
                self._pipeline,
                age_ms,
                100 * age_ms // timeout_ms,
                timeout_ms,
            )

    def _explain(self) -> None:
        if self._producer is not None and self._passed_ms >= self._timeout.timeout_ms:
            logger.warning(
                "pipeline %s: the epoch cannot be committed after %d ms, and its transaction may "
                "be open for %d ms: if Kafka has aborted it for that, it will do so again. Use a "
                "longer transaction_timeout_ms, or shorter epochs",
                self._pipeline,
                self._passed_ms,
                self._timeout.timeout_ms,
            )
        self._producer = None

    @property
    def _passed_ms(self) -> int:
        return int(1000 * (time.monotonic() - self._since))
