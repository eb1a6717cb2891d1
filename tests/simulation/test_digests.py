"""The protocol does in each world of `digests.txt` what it did when that digest was committed.

Nothing is lost in any of them, nothing twice, nothing out of order.
"""

import os

from tests.simulation.digests import FILE, SEEDS, digest, live

RENEW = "python -m tests.simulation.digests"
LIVED = SEEDS[: int(os.environ.get("WORLDS", "100"))]
"""Half of the worlds; `make stress` takes all."""


def test_the_worlds_live_as_they_did() -> None:
    """A change that is meant renews the file; one that is not has changed the protocol."""
    lines = FILE.read_text().splitlines()
    committed = {int(seed): known_digest for seed, known_digest in map(str.split, lines)}
    changed: list[int] = []
    broken: dict[int, tuple[str, ...]] = {}
    for seed in LIVED:
        outcome = live(seed)
        if digest(outcome) != committed[seed]:
            changed.append(seed)
        if outcome.violations:
            broken[seed] = outcome.violations

    assert not broken, broken
    assert not changed, f"these seeds live otherwise: {changed}; if that is meant: {RENEW}"
