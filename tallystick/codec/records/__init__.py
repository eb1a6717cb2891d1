"""Kafka's record batches ↔ columns."""
