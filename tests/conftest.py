"""What all tests share: one Spark session, and the embedded broker of `tallystick.testing`.

The broker's fixture is not imported here: pytest finds it through the package's entry point, as it
does for users.
"""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.spark import PYSPARK_VERSION, streaming
from tests.spark import jvm

settings.register_profile("untimed", deadline=None)  # speed is shown in benchmarks
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def shared_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one Spark of this process, whichever tests run in it; nobody else may stop it."""
    config = {
        "spark.ui.enabled": "false",
        "spark.driver.extraJavaOptions": jvm.options(),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
        "spark.executorEnv.TALLYSTICK_STATE_DIR": str(tmp_path_factory.mktemp("state")),
    }
    session = ts.spark_session("tests", master="local[2]", config=config)
    session.sparkContext.setLogLevel("ERROR")
    if PYSPARK_VERSION >= streaming.PYSPARK_VERSION_MIN:
        ts.register(session)
    yield session
    session.stop()
