"""A local Spark goes on after a stage has lost its input, which by itself it does not."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tallystick.host.excepthook import TRACEBACKS
from tallystick.host.java import java_home
from tallystick.spark.context import LOCAL_SETTINGS, SETTINGS, log_what_is_missing
from tests.spark.beating_job import NOT_REGISTERED

JOB = Path(__file__).with_name("beating_job.py")


@pytest.mark.spark
@pytest.mark.parametrize(("kind", "lives"), [("ours", True), ("plain", False)])
def test_a_local_spark_outlives_the_loss_of_shuffle_files_with_our_settings(
    kind: str, lives: bool, tmp_path: Path
) -> None:
    """Spark ends its JVM at the sixtieth heartbeat; if it no longer does, ours is needless."""
    log = tmp_path / "log"
    with log.open("w") as errors:
        done = subprocess.run(
            [sys.executable, str(JOB), kind, str(tmp_path), str(log)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, TRACEBACKS: "full"},  # the fault is named by the cause of an error
        )

    lines, log_text = done.stdout.splitlines(), log.read_text()
    assert int(lines[0].removeprefix("lost ")) > 0, log_text[-2000:]
    assert NOT_REGISTERED in log_text, "the fault has hit"
    assert ("ran" in lines) == lives, log_text[-2000:]
    assert ("unable to send heartbeats to driver more than 60 times" in log_text) != lives


SUBMITTED = """
import tallystick as ts
from tallystick.spark.context import LOCAL_SETTINGS, new_context
for start in (ts.spark_session, lambda name: new_context(name)):
    made = start("submitted")
    conf = getattr(made, "sparkContext", made).getConf()
    print("has", all(conf.get(name) == value for name, (value, _) in LOCAL_SETTINGS.items()))
    made.stop()
"""


@pytest.mark.spark
def test_what_is_submitted_to_a_local_master_has_them_too(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(SUBMITTED)
    submit = Path(pyspark.__file__).with_name("bin") / "spark-submit"
    command = [str(submit), "--master", "local[1]", "--conf", "spark.ui.enabled=false", str(job)]
    environment = {**os.environ, "JAVA_HOME": str(java_home()), "PYSPARK_PYTHON": sys.executable}
    environment["PYTHONWARNINGS"] = "ignore::FutureWarning"  # spark-submit prints them to stdout

    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )

    assert done.stdout.splitlines() == ["has True", "has True"], done.stderr[-2000:]


@pytest.mark.parametrize(("master", "is_told"), [("local[2]", True), ("spark://host:7077", False)])
def test_who_brings_a_local_spark_is_told_what_it_lacks(
    master: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    has = {"spark.master": master} | {name: value for name, (value, _) in SETTINGS.items()}

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            log_what_is_missing(has, f"of {master}", has_session=True)

    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == is_told
    assert all(f"{name}=" in messages[0] for name in LOCAL_SETTINGS if is_told)
