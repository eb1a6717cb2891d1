"""A call between a publisher's look at a table and its commit, whatever library commits."""

from collections.abc import Callable
from typing import Any

import pytest


def before_the_commit(
    monkeypatch: pytest.MonkeyPatch,
    whose: type,
    method: str,
    refusal: type[Exception],
    first: Callable[[], None],
) -> list[str]:
    """Call a function once between a publisher's look at the table and its commit.

    Args:
        monkeypatch: of the test.
        whose: the class of the library whose method commits.
        method: the method.
        refusal: raised by the method where another commit was first.
        first: the function.

    Returns:
        The reasons of commits that are refused from then on.
    """
    commit, refused = getattr(whose, method), list[str]()

    def committed(*args: Any, **rest: Any) -> Any:
        monkeypatch.setattr(whose, method, commit)
        first()
        try:
            return commit(*args, **rest)
        except refusal as error:
            refused.append(str(error))
            raise

    monkeypatch.setattr(whose, method, committed)
    return refused
