"""Random numbers in forks: a fork has its parent's generators, and would draw the same numbers.

Python's and numba's generators are seeded again in each fork, as is whatever asks the system.
numpy's is not. Arrow's `random` function cannot be: docs/performance.md says so.
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
    """Seed numpy anew in each direct fork of this process; forks of forks are left alone."""
    parent = os.getpid()
    os.register_at_fork(
        after_in_child=lambda: draw_anew() if os.getppid() == parent else None,
    )
