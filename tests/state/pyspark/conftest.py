"""One Spark session for all tests here, with the state store that transformWithState needs."""

from collections.abc import Iterator

import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from tests.spark import jvm
from tests.state.pyspark import spark_processors

TIMEZONE = "America/New_York"
QUICK = {
    **jvm.INTERPRETED,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}


@pytest.fixture(scope="session")
def tws_session(shared_spark: SparkSession) -> Iterator[SparkSession]:
    """A session of its own, in a time zone that is not UTC."""
    session = shared_spark.newSession()
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    session.conf.set("spark.sql.streaming.stateStore.providerClass", provider)
    session.conf.set("spark.sql.shuffle.partitions", "1")
    session.conf.set("spark.sql.session.timeZone", TIMEZONE)
    for name, value in QUICK.items():
        session.conf.set(name, value)
    # Spark's workers cannot import the tests.
    cloudpickle.register_pickle_by_value(spark_processors)
    yield session
    cloudpickle.unregister_pickle_by_value(spark_processors)
