"""1. Topics become splits: what an epoch reads is settled before it is read."""
