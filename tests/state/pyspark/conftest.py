"""One Spark session for all tests here, with the state store that transformWithState needs."""

from collections.abc import Iterator

import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from tests.spark import jvm
from tests.state.pyspark import spark_processors

TIMEZONE = "America/New_York"
STATE_STORE = "spark.sql.streaming.stateStore"
SETTINGS = {
    f"{STATE_STORE}.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    f"{STATE_STORE}.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.session.timeZone": TIMEZONE,
}


@pytest.fixture(scope="session")
def tws_session(shared_spark: SparkSession) -> Iterator[SparkSession]:
    """A session of its own, in a time zone that is not UTC."""
    session = jvm.interpreting_session(shared_spark, SETTINGS)
    # Spark's workers cannot import the tests.
    cloudpickle.register_pickle_by_value(spark_processors)
    yield session
    cloudpickle.unregister_pickle_by_value(spark_processors)
