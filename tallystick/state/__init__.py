"""Keys to key groups to state: entries, schemas, state files, functions over keyed rows."""

from tallystick.host import kernel_cache

assert kernel_cache  # imported for its effect, before any kernel of this package imports numba
