"""Protobuf values ↔ columns."""
