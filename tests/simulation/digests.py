"""Digests of 200 worlds' stories: a change that alters what the protocol does alters some of them.

`digests.txt` has a line for each seed. Where that is meant, `python -m tests.simulation.digests`
writes the file again, and the commit says why the stories differ.
"""

import re
from hashlib import sha256
from pathlib import Path

from tallystick.epoch.manifest import CHECKPOINT, KAFKA
from tests.simulation.simulation import Outcome, simulate

FILE = Path(__file__).with_name("digests.txt")
SEEDS = range(200)
_LEFT_OUT = re.compile(r"\b[0-9a-f]{8,}\b|(?<= ends: )([^:]+): .+")
"""Names that attempts draw at random, and the words of the errors that end a driver."""


def live(seed: int) -> Outcome:
    """Return how the world of a seed ends: each fifth has the same kind of pipeline."""
    match seed % 5:
        case 0:
            return simulate(seed)
        case 1:
            return simulate(seed, is_keyed=True)
        case 2:
            return simulate(seed, is_keyed=False, decided_by=KAFKA)
        case 3:
            return simulate(seed, is_keyed=False, decided_by=CHECKPOINT)
        case _:
            return simulate(seed, has_loop=True, has_gang=True)


def digest(outcome: Outcome) -> str:
    """Return a digest of a world's story and of its end."""
    counted = (outcome.faults, outcome.met, outcome.ends)
    counts = [sorted(f"{name} {count}" for name, count in counter.items()) for counter in counted]
    end = [outcome.verdict, str(outcome.epochs), str(outcome.steps), *outcome.violations]
    story = "\n".join([*outcome.trace, *end, *map(str, counts)])
    return sha256(_LEFT_OUT.sub(r"\1…", story).encode()).hexdigest()[:12]


def digests() -> str:
    """Return the content that the file has if nothing has changed."""
    return "".join(f"{seed} {digest(live(seed))}\n" for seed in SEEDS)


if __name__ == "__main__":
    FILE.write_text(digests())
