"""When an epoch counts: the coordinator, its events and actions, manifest, tokens, verdicts."""
