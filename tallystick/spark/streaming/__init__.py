"""Structured Streaming queries of the user's own: source, `foreachBatch`, sink."""
