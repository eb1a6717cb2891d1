"""The pauses of a retry loop, and its end."""

import random
import time

from tallystick.kafka.error_policy import unavailable

BACKOFF_MIN_S = 0.02
BACKOFF_MAX_S = 1.0
TRY_MIN_S = 0.1
"""A try with less time than this left is not worth it."""


class Attempts:
    """How long and how often: the pauses of one retry loop, and its end.

    Args:
        deadline: `time.monotonic` when to give up.
        doing: the API that is asked, for the error.
        subject: what it is asked about, for the error.
        first_s: the longest that the first pause may be; each further one may be twice as long.
    """

    def __init__(
        self, deadline: float, doing: str, subject: str, first_s: float = BACKOFF_MIN_S
    ) -> None:
        self.deadline = deadline
        self._longest_s = first_s
        self._doing = doing
        self._subject = subject
        self._started = time.monotonic()
        self._reason = ""

    def pause(self, reason: str) -> None:
        """Wait before the next try; raises as `delay`."""
        time.sleep(self.delay(reason))

    def delay(self, reason: str) -> float:
        """How many seconds the next try should wait.

        Raises:
            BrokerUnavailableError: the deadline has come.
        """
        longest_s, self._longest_s = self._longest_s, min(BACKOFF_MAX_S, 2 * self._longest_s)
        # The last try is given some time too: one that is cut short only hides what is in the way.
        left = self.deadline - time.monotonic() - TRY_MIN_S
        if left <= 0:
            if reason.startswith(TimeoutError.__name__):
                reason = self._reason or reason
            spent = time.monotonic() - self._started
            raise unavailable(self._doing, self._subject, reason, spent)
        self._reason = reason
        return min(left, longest_s * random.uniform(0.5, 1.0))
