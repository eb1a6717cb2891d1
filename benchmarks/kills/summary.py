"""The runs of `proof/peers.ndjson` as tables."""

from pathlib import Path

RUNS = Path(__file__).parents[2] / "proof" / "peers.ndjson"
