"""Random numbers in forks: a fork has its parent's generators, and would draw what others draw.

Python's and numba's generators are seeded again in each fork, as is whatever asks the system. That
of numpy is not. Arrow's `random` function cannot be: docs/performance.md says so.
"""

import os
import sys


def draw_anew() -> None:
    """Seed numpy's global generator, in a process that was just forked; cheap where it is absent.

    Source: numpy.random.seed, which takes the system's entropy where no seed is given.
    """
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def seed_forks() -> None:
    """Have each fork of this process draw numbers of its own; those of its forks are theirs."""
    parent = os.getpid()
    os.register_at_fork(
        after_in_child=lambda: draw_anew() if os.getppid() == parent else None,
    )
