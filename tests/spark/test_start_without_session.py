"""`Pipeline.start` with a context alone, and with nothing: each in a process of its own."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from tallystick.errors import OptionError
from tallystick.testing import EmbeddedKafka
from tests.spark.flow import Flow
from tests.spark.topics import read_committed, wait_until_nothing_is_pending

pytestmark = [pytest.mark.broker, pytest.mark.spark]

JOB = Path(__file__).with_name("start_job.py")
UP = {"context": True, "session": False}
DOWN = {"context": False, "session": False}


@pytest.fixture
def flow(tallystick_kafka: EmbeddedKafka, tmp_path: Path) -> Flow:
    return Flow(tallystick_kafka, None, tmp_path)


def run(flow: Flow, **spec: Any) -> list[dict[str, Any]]:
    """Start the job in a process of its own; what it has found."""
    spec_text = json.dumps(flow.spec(**{"spark": "nothing", "execution": "jobs", **spec}))
    done = subprocess.run(
        [sys.executable, str(JOB), spec_text],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0, done.stderr[-3000:]
    assert lines, done.stderr[-3000:]
    if spec.get("spark", "nothing") == "nothing":
        assert spec.get("runs") == 0 or "INFO" in done.stderr, "else py4j would say nothing anyway"
        for noise in ("Closing down clientserver", "FutureWarning"):
            assert noise not in done.stderr
    findings: list[dict[str, Any]] = json.loads(lines[0].removeprefix("FOUND "))
    return findings


def spark_is(facts: dict[str, Any]) -> dict[str, bool]:
    return {name: facts[name] for name in ("context", "session")}


@pytest.mark.parametrize("execution", ["jobs", "resident"])
@pytest.mark.parametrize("spark", ["nothing", "context"])
def test_a_stateless_pipeline_needs_no_session(flow: Flow, spark: str, execution: str) -> None:
    for count in (100, 30):
        flow.feed(count)
        (finding,) = run(flow, spark=spark, kind="stateless", execution=execution)
        wait_until_nothing_is_pending(flow.confluent, flow.topic_out)
        flow.assert_exact()
        assert spark_is(finding["after"]) == (DOWN if spark == "nothing" else UP)
        assert finding["after"]["epochs"] >= count // 40


@pytest.mark.parametrize("spark", ["nothing", "context"])
def test_a_keyed_pipeline_goes_on_from_its_state_without_a_session(flow: Flow, spark: str) -> None:
    for count in (100, 60):
        flow.feed(count)
        (finding,) = run(flow, spark=spark, kind="keyed")
        assert not finding["after"]["session"]
    records = read_committed(flow.confluent, flow.topic_out)
    counts = {record.key: json.loads(record.value or "")["value"] for record in records}
    assert counts == Counter(key for key, _ in flow.input), "the newest of each key"


def test_a_transform_has_a_session_made_and_ended(flow: Flow) -> None:
    flow.feed(100)
    (finding,) = run(flow, kind="transform")
    flow.assert_exact()
    assert not finding["after"]["context"]


def test_a_process_may_start_again_when_its_context_has_ended(flow: Flow) -> None:
    """Behind a start that was refused, which leaves no context either, and behind a run."""
    flow.feed(50)
    refused, *runs = run(flow, kind="stateless", execution="resident", refused_first=True, runs=2)
    flow.assert_exact()
    assert "nowhere" in refused["error"]
    assert [spark_is(finding["after"]) for finding in (refused, *runs)] == [DOWN, DOWN, DOWN]


def test_what_is_refused_leaves_no_context_behind(flow: Flow) -> None:
    (finding,) = run(flow, kind="stateless", refused_first=True, runs=0)
    assert "nowhere" in finding["error"]
    assert spark_is(finding["after"]) == DOWN


def test_a_context_that_is_there_is_used_and_stays(flow: Flow, spark: SparkSession) -> None:
    for given in (None, spark.sparkContext, spark):
        flow.feed(40)
        query = flow.pipeline().start(
            given,
            checkpoint=str(flow.checkpoint),
            trigger={"availableNow": True},
            execution="jobs",
        )
        assert query.awaitTermination(120)
        flow.assert_exact()
        assert SparkContext._active_spark_context is spark.sparkContext
        assert spark.sparkContext._jsc is not None, "it is not stopped"


def test_anything_else_is_refused(flow: Flow) -> None:
    with pytest.raises(OptionError, match=r"spark='local'.: expected a SparkSession or a Spark"):
        flow.pipeline().start("local", checkpoint=str(flow.checkpoint), execution="jobs")  # type: ignore[arg-type]
