"""PostgreSQL as a sink: rows by binary COPY, held back until the epoch is decided."""

from tallystick.host import kernel_cache

assert kernel_cache  # imported for its effect, before any kernel of this package imports numba
