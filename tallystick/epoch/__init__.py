"""Rules for when an epoch counts: coordinator, events, actions, manifest, tokens, verdicts."""
