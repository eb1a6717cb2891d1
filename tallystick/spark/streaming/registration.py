"""`register` and `kafka_partition`, which raise a clear error with PySpark before 4.2.

So they stand apart from the source, whose imports such a PySpark lacks.
"""

from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, SparkSession, functions

from tallystick.codec.rows import partition_of
from tallystick.errors import OptionError
from tallystick.spark.streaming import FORMAT, check_pyspark
from tallystick.spark.streaming.offset_reporter import listen


def register(spark: SparkSession) -> None:
    """Make `format("tallystick")` known to a session.

    Raises:
        OptionError: PySpark is older than 4.2.
    """
    check_pyspark('register(spark), for format("tallystick"),')
    from tallystick.spark.streaming.source import TallystickSource

    spark.dataSource.register(TallystickSource)
    listen(spark, FORMAT)


def kafka_partition(key: str | Column, partition_count: int) -> Column:
    """Return the partition that Kafka's partitioner chooses for each row.

    For a batch write by several tasks, each with partitions of its own::

        rows = rows.withColumn("partition", ts.kafka_partition("key", 12))
        rows.repartitionById(12, "partition").write.format("tallystick")

    Args:
        key: the column of the records' keys. What is neither text nor bytes counts as its text, as
            with the option `key.field`. Rows without a key get a partition per Spark task.
        partition_count: the topic's number of partitions.

    Raises:
        OptionError: there are no partitions, or PySpark is older than 4.2.
    """
    check_pyspark("kafka_partition, for df.write,")
    if partition_count < 1:
        raise OptionError(
            f"kafka_partition(…, {partition_count}): expected the topic's number of partitions, "
            f"from 1"
        )

    def partitions(keys: pa.Array) -> pa.Array:
        if not pa.types.is_binary(keys.type):
            keys = keys.cast(pa.string()).cast(pa.binary())
        context = TaskContext.get()
        spread = 0 if context is None else context.partitionId()
        return pa.array(partition_of(keys, partition_count, spread))

    arrow_udf: Any = vars(functions)["arrow_udf"]  # PySpark's stubs lack it
    column: Column = arrow_udf(partitions, "int")(key)
    return column
