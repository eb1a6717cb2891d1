"""What an executor takes with it when it goes costs a Spark job's epoch its work, and no more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Flow

pytestmark = [pytest.mark.broker, pytest.mark.spark]

JOB = Path(__file__).with_name("losing_job.py")


def test_an_epoch_whose_shuffle_files_are_lost_is_aborted_and_runs_again(
    tallystick_kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    """The writing stage has one attempt only, so Spark gives the job up instead of the stage."""
    flow = Flow(tallystick_kafka, None, tmp_path)
    flow.feed(100)
    marker, folder = tmp_path / "lost", tmp_path / "spark"
    spec = json.dumps(flow.spec(marker=str(marker), folder=str(folder)))

    done = subprocess.run(
        [sys.executable, str(JOB), spec], capture_output=True, text=True, timeout=300, check=False
    )

    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    events = json.loads(lines[0].removeprefix("FOUND "))
    errors = [error for name, error in events if name == "ActionFailed"]
    assert marker.exists()
    assert "lost its input" in errors[0]
    assert [name for name, _ in events].count("EpochRan") == 1
    flow.assert_exact()
