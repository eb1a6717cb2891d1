"""The one way in which tests wait for something: a failure says what was waited for."""

import time
from collections.abc import Callable

WAIT_S = 60.0
"""Longer than anything healthy takes on a busy machine; then the test fails."""
POLL_S = 0.05


def wait_until(
    holds: Callable[[], object],
    what: str | Callable[[], str],
    *,
    timeout_s: float = WAIT_S,
    poll_s: float = POLL_S,
) -> None:
    """Wait until a condition holds; fail with what was expected and what was found.

    Args:
        holds: The condition; an assertion in it fails at once.
        what: What is waited for and what there is instead; called when the time is over.
        timeout_s: How long at most.
        poll_s: The time between two looks.

    Raises:
        AssertionError: It did not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() >= deadline:
            raise AssertionError(f"after {timeout_s:g} s: {what() if callable(what) else what}")
        time.sleep(poll_s)


def wait_for(
    ask: Callable[[], object],
    expected: object,
    what: str,
    *,
    timeout_s: float = WAIT_S,
    poll_s: float = POLL_S,
) -> None:
    """Wait until the answer to a question is the expected one; fail with the last answer.

    Args:
        ask: The question; an assertion in it fails at once.
        expected: The answer that is waited for.
        what: What is asked for, such as "the number of rows".
        timeout_s: How long at most.
        poll_s: The time between two questions.

    Raises:
        AssertionError: It was never answered so.
    """
    answers: list[object] = [None]

    def is_answered() -> bool:
        answers[0] = ask()
        return answers[0] == expected

    wait_until(
        is_answered,
        lambda: f"{what}: expected {expected}, found {answers[0]}",
        timeout_s=timeout_s,
        poll_s=poll_s,
    )
