"""One Spark session and one broker for all tests here; drivers that die are processes of their own.

Each start of a query costs Spark seconds, so a test puts what belongs together into one.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.testing import EmbeddedKafka
from tests.spark.driver_process import Drivers
from tests.spark.flow import Flow

SMALL = {
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session that most tests share."""
    config = {
        **SMALL,
        "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
        "spark.executorEnv.TALLYSTICK_STATE_DIR": str(tmp_path_factory.mktemp("state")),
    }
    session = ts.spark_session("tests", master="local[2]", config=config)
    session.sparkContext.setLogLevel("ERROR")
    ts.register(session)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def kafka(tallystick_kafka: EmbeddedKafka) -> EmbeddedKafka:
    """The broker that most tests share; nobody may harm it."""
    return tallystick_kafka


@pytest.fixture
def flow(kafka: EmbeddedKafka, spark: SparkSession, tmp_path: Path) -> Flow:
    """A fresh flow on the shared broker and session."""
    return Flow(kafka, spark, tmp_path)


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    """Driver processes."""
    pool = Drivers(tmp_path_factory.mktemp("drivers"))
    yield pool
    pool.close()
