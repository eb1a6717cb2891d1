"""Where downloaded and generated things are kept between runs: one folder per user."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """The per-user cache folder, created when missing.

    `TALLYSTICK_CACHE` if set, else `tallystick` under `XDG_CACHE_HOME`, else `~/.cache/tallystick`.
    """
    own = os.environ.get("TALLYSTICK_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(own) if own else Path(shared) / "tallystick"
    directory.mkdir(parents=True, exist_ok=True)
    return directory.resolve()
