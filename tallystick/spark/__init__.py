"""Engines: Spark's context and cluster, resident tasks and jobs."""

import pyspark

from tallystick.errors import OptionError

PYSPARK_VERSION = tuple(map(int, pyspark.__version__.split(".")[:2]))
PYSPARK_VERSION_MIN = (3, 5)
"""The oldest that benchmarks/MATRIX.md shows at work; what needs a later one refuses by itself."""

if PYSPARK_VERSION < PYSPARK_VERSION_MIN:
    raise OptionError(
        f"PySpark {pyspark.__version__} is installed, and Tallystick needs 3.5 or later: "
        f"run `pip install 'pyspark>=3.5,<5'`"
    )
