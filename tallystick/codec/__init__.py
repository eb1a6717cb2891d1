"""Bytes and columns: how values and schemas are written down, with nothing of the outside world."""
