"""What the protocol does in 200 worlds is what it did when their digests were committed."""

from tests.simulation.digests import FILE, SEEDS, digest, live

RENEW = "python -m tests.simulation.digests"


def test_the_worlds_live_as_they_did() -> None:
    """A change that is meant renews the file; one that is not has changed the protocol."""
    lines = FILE.read_text().splitlines()
    committed = {int(seed): known_digest for seed, known_digest in map(str.split, lines)}
    changed = [seed for seed in SEEDS if digest(live(seed)) != committed[seed]]

    assert not changed, f"these seeds live otherwise: {changed}; if that is meant: {RENEW}"
