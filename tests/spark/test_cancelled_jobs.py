"""Spark's log of a JVM that is launched here, when a run without jobs is cancelled."""

import os
import subprocess
import sys

import pytest

from tests.spark import jvm

pytestmark = [pytest.mark.spark, pytest.mark.timeout(120)]

PROGRAM = """
import sys
import tallystick as ts
context = ts.spark_session(master="local[1]").sparkContext
context.cancelJobGroup("no such group")
context.parallelize([1], 1).count()  # the scheduler has come to it by then
logger = context._jvm.org.apache.logging.log4j.LogManager.getLogger
logger("org.apache.spark.scheduler.DAGScheduler").warn("another warning")
context.stop()
"""


def test_a_cancelled_group_without_jobs_is_not_in_front_of_the_user() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "SPARK_SUBMIT_OPTS": jvm.options()},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "Failed to cancel" not in done.stderr
    assert "WARN DAGScheduler: another warning" in done.stderr
