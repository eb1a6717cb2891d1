"""Rules about many files, each in one test: an item of pytest's per file would cost more."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

Content = TypeVar("Content")


def of_each(
    paths: Iterable[Path], name: Callable[[Path], str], content: Callable[[Path], Content]
) -> Callable[[Callable[[Content], None]], Callable[[], None]]:
    """Make one test of a rule about one file's content; a failure names all files that break it."""

    def test_of(rule: Callable[[Content], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for path in paths:
                try:
                    rule(content(path))
                except AssertionError as error:
                    broken.append(f"{name(path)}: {error}")
            assert not broken, "\n".join(broken)

        test.__name__, test.__doc__ = rule.__name__, rule.__doc__
        return test

    return test_of
