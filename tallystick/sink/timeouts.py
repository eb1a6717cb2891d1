"""How long a request, a call and a transaction may take: the defaults, and what follows from them.

Invariants:
    * request < call < transaction: one hung broker must not use up a call, nor a call that is
      tried until its deadline the transaction that it is for.
    * A call outlasts the failover of a broker wherever its transaction does; else each failover
      fails the call.
"""

from typing import NamedTuple

TRANSACTION_TIMEOUT_MS = 900_000
"""The most that brokers allow by default (transaction.max.timeout.ms): a first epoch may have a
backlog to write, and what waits for its commit must outlive the time that a pipeline is down."""
TRANSACTION_TIMEOUT_MIN_MS = 1_000
"""With less, a pause of a broker or of the driver aborts every epoch."""
CALL_TIMEOUT_MS = 120_000
REQUEST_TIMEOUT_MS = 8_000
SESSION_TIMEOUT_MS = 9_000
"""After how long without a heartbeat a broker counts as dead, by default
(broker.session.timeout.ms)."""
ELECTION_MS = 5_000
"""How long the rest of a failover may take: new leaders and coordinators, and finding them."""


class CallTimeouts(NamedTuple):
    """How long one answer of one broker may take, and how long a call with all its tries."""

    request_ms: int
    call_ms: int


def call_timeouts(
    transaction_ms: int | None, request_ms: int | None, call_ms: int | None
) -> CallTimeouts:
    """Return both, with what the user did not set derived from what he set.

    Contradictions of the user's own stay as they are: whoever takes the values refuses them.

    Args:
        transaction_ms: the timeout of the transactions that the calls are for; None: there is none.
        request_ms: what the user set; None: nothing.
        call_ms: the same.
    """
    if call_ms is None:
        call_ms = max(CALL_TIMEOUT_MS, 2 * (request_ms or 0))
        if transaction_ms is not None:
            call_ms = min(call_ms, _call_within(transaction_ms, request_ms or 0))
    if request_ms is None:
        request_ms = min(REQUEST_TIMEOUT_MS, max(1, call_ms // 2))
    return CallTimeouts(request_ms, call_ms)


def failover_ms(session_timeout_ms: int) -> int:
    """Return how long a broker's death may keep its partitions without a leader."""
    return session_timeout_ms + ELECTION_MS


def _call_within(transaction_ms: int, request_ms: int) -> int:
    """Four fifths of a transaction, or more where a failover or a request needs more."""
    least = max(transaction_ms * 4 // 5, request_ms + 1)
    enough = failover_ms(SESSION_TIMEOUT_MS) + 1
    if least < enough < transaction_ms:
        least = enough
    return min(least, transaction_ms - 1)
