"""Compile every kernel into the cache."""

import os

from tallystick.kernel_cache import warm_up

warm_up()
print(f"kernels are compiled in {os.environ['NUMBA_CACHE_DIR']}")
