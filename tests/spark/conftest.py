"""One Spark session and one broker for all tests here; drivers that die are processes of their own.

Each start of a query costs Spark seconds, so a test puts what belongs together into one.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tallystick.testing import EmbeddedKafka
from tests.ops.browser import Browser
from tests.spark.driver_process import Drivers
from tests.spark.flow import Flow


@pytest.fixture(scope="session")
def spark(shared_spark: SparkSession) -> SparkSession:
    """The session that most tests share."""
    return shared_spark


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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium of a file of tests."""
    browser = Browser()
    yield browser
    browser.close()
