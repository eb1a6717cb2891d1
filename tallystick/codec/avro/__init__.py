"""Avro values ↔ columns."""
