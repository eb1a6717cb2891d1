"""How many examples of a property are drawn: a third of them in `make test`, all in `make stress`.

Each run draws others, so that runs that follow each other try what one leaves out.
"""

import os
from typing import Any

from hypothesis import settings

SHARE = 1 if os.environ.get("EXAMPLES") == "all" else 3
FEW = 20
"""So many are always drawn."""


def share_of(count: int) -> int:
    """Return how many of so many examples this run draws."""
    return max(count // SHARE, min(count, FEW))


def drawn(count: int, **further: Any) -> settings:
    """Draw a share of so many examples; of a property, whatever time one takes."""
    return settings(max_examples=share_of(count), deadline=None, **further)
