"""Bytes to columns and back: formats, JSON, Avro, Kafka's record batches, kernels."""

from tallystick.host import kernel_cache

assert kernel_cache  # imported for its effect, before any kernel of this package imports numba
