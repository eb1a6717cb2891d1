"""The wait for Spark's JVM has an end, which PySpark's own has not."""

import time
from pathlib import Path

import pytest
from pyspark import SparkConf
from pyspark.errors import PySparkRuntimeError

from tallystick.errors import TallystickError
from tallystick.spark import context


@pytest.fixture
def spark_submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the place of Spark's."""
    script = tmp_path / "bin" / "spark-submit"
    script.parent.mkdir()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    return script


def write(script: Path, text: str) -> None:
    script.write_text(f"#!/bin/bash\n{text}\n")
    script.chmod(0o755)


def test_a_jvm_that_never_says_where_it_listens_is_ended(spark_submit: Path) -> None:
    """As one that could not write it, on a full disk: its other threads keep it alive."""
    write(spark_submit, f"exec -a {context.COMMAND} sleep 600")
    others = context._own_jvms().keys()  # that of tests before
    with pytest.raises(TallystickError, match=r"within 2 s where it listens.*full"):
        context.launched(SparkConf(False), 2.0)
    deadline = time.monotonic() + 10
    while context._own_jvms().keys() - others:
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


def test_one_that_ends_as_if_all_were_well_is_not_waited_for_without_end(
    spark_submit: Path,
) -> None:
    write(spark_submit, "exit 0")
    with pytest.raises(TallystickError, match="has not said within 1 s"):
        context.launched(SparkConf(False), 1.0)


def test_one_that_fails_is_told_at_once(spark_submit: Path) -> None:
    write(spark_submit, "exit 3")
    began = time.monotonic()
    with pytest.raises(PySparkRuntimeError):
        context.launched(SparkConf(False), 60.0)
    assert time.monotonic() - began < 30
