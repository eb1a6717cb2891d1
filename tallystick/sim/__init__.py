"""The ports broken on purpose, and the oracle that knows what must come of it."""
