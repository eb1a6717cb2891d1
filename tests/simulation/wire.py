"""A request on its way: what it does when it arrives, and what its sender hears if it does not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tallystick.errors import RetriableError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """One request to a port; `unavailable` is raised where its outcome stays unknown."""

    name: str
    effect: Callable[[], Result]
    unavailable: type[RetriableError]
