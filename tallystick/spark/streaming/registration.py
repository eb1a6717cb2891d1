"""`register`, which raises a clear error with PySpark before 4.2.

So it stands apart from the source, whose imports such a PySpark lacks.
"""

from pyspark.sql import SparkSession

from tallystick.arguments import checked
from tallystick.spark.streaming import FORMAT, check_pyspark
from tallystick.spark.streaming.offset_reporter import listen


@checked
def register(spark: SparkSession) -> None:
    """Make `format("tallystick")` known to a session.

    Raises:
        OptionError: PySpark is older than 4.2.
    """
    check_pyspark('register(spark), for format("tallystick"),')
    from tallystick.spark.streaming.source import TallystickSource

    spark.dataSource.register(TallystickSource)
    listen(spark, FORMAT)
