"""Spark for real: context, resident tasks and jobs, sources and sinks of its queries."""

import pyspark

from tallystick.errors import OptionError

PYSPARK_VERSION_MIN = (4, 2)
"""4.1 has no admission control for sources in Python (`pyspark.sql.streaming.datasource`)."""

if tuple(map(int, pyspark.__version__.split(".")[:2])) < PYSPARK_VERSION_MIN:
    raise OptionError(
        f"PySpark {pyspark.__version__} is installed, and Tallystick needs 4.2 or later: "
        f"run `pip install 'pyspark>=4.2,<5'`"
    )
