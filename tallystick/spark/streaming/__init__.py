"""Structured Streaming queries of the user's own: source, `foreachBatch`, batches."""

import pyspark

from tallystick.errors import OptionError
from tallystick.spark import PYSPARK_VERSION

FORMAT = "tallystick"
PYSPARK_VERSION_MIN = (4, 2)
"""4.1 has no admission control for sources in Python (`pyspark.sql.streaming.datasource`)."""


def check_pyspark(what: str) -> None:
    """Raise if this PySpark is too old for a query of the user's own.

    Args:
        what: the call that needs it, for the error.

    Raises:
        OptionError: PySpark is older than 4.2.
    """
    if PYSPARK_VERSION < PYSPARK_VERSION_MIN:
        raise OptionError(
            f"{what} is for queries of your own, and these need PySpark 4.2 or later; "
            f"{pyspark.__version__} is installed. Run `pip install 'pyspark>=4.2,<5'`, or write "
            f"the query as a Pipeline, which needs 3.5 or later"
        )
