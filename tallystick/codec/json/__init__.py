"""JSON values ↔ columns."""
