"""The same ports, breaking on purpose."""
