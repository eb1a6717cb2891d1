"""The per-user folder for downloaded and generated files, kept between runs."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_directory() -> Path:
    """Return the per-user cache folder, created when missing.

    `TALLYSTICK_CACHE` if set, else `tallystick` under `XDG_CACHE_HOME`, else `~/.cache/tallystick`.
    """
    own = os.environ.get("TALLYSTICK_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(own) if own else Path(shared) / "tallystick"
    directory.mkdir(parents=True, exist_ok=True)
    return directory.resolve()


@contextmanager
def one_process_at_a_time(path: Path) -> Iterator[None]:
    """Lock an entry of the cache, for a single process to make it and later processes to find it.

    The lock, a file beside the entry, ends with its process in any case.
    """
    with open(path.with_name(f"{path.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
