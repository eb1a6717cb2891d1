"""Listeners of a driver: late rows for metrics, warnings before a transaction times out."""

import logging
import time
from collections import Counter
from collections.abc import Callable

from tallystick.epoch import protocol
from tallystick.epoch.two_phase import Timeout
from tallystick.errors import RetriableError, TallystickError
from tallystick.run.driver import Listener
from tallystick.values import Producer

LATE_ROWS: Counter[tuple[str, str]] = Counter()
"""By the pipeline's name and the step's uid, since this process began."""


class LateRows:
    """A listener that counts them, and passes every event on.

    An epoch counts once, when it is committed, as its output does; where the answer to the commit
    is lost, it is left out.

    Args:
        pipeline: its name.
        listener: the user's; None: there is none.
    """

    def __init__(self, pipeline: str, listener: Listener | None) -> None:
        self._pipeline = pipeline
        self._listener = listener
        self._ran: tuple[tuple[str, int], ...] = ()

    def __call__(self, event: protocol.Event) -> None:
        """See `run.driver.Listener`."""
        match event:
            case (
                protocol.EpochRequested() | protocol.ProducerFenced()
            ):  # what ran before is not committed next
                self._ran = ()
            case protocol.EpochRan():
                self._ran = event.late
            case protocol.TransactionCommitted():
                for step, count in self._ran:
                    LATE_ROWS[self._pipeline, step] += count
                self._ran = ()
        if self._listener is not None:
            self._listener(event)


logger = logging.getLogger(__name__)


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
