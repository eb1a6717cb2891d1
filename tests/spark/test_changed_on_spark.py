"""A program with other state, on Spark and a real broker: killed in its first epoch, and rescaled.

Every other change is tested without a broker, in `tests/testing/test_changed_programs.py`.
"""

import json
import logging
import signal
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import IsolationLevel

import tallystick as ts
from tallystick.state.compatibility import Succession
from tallystick.testing.process import ProcessGroup
from tests.spark.changed_job import sums
from tests.spark.flow import Flow
from tests.spark.topics import ends, produce

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]


def state_by_key(flow: Flow) -> dict[str, dict[str, Any]]:
    assert flow.spark is not None
    rows = ts.read_state(flow.spark, str(flow.checkpoint)).drop("key_group", "timers").collect()
    return {row["k"]: {k: v for k, v in row.asDict().items() if k != "k"} for row in rows}


def test_both_programs_go_on_after_a_kill_in_the_first_epoch_of_the_new_one(flow: Flow) -> None:
    fed: list[tuple[str, int]] = []

    def feed(count: int) -> None:
        new = [(f"k{number % 7}", number) for number in range(len(fed), len(fed) + count)]
        values = [(key, json.dumps({"k": key, "n": number})) for key, number in new]
        produce(flow.confluent, flow.topic_in, values)
        fed.extend(new)

    def run(program: str, parallelism: int) -> None:
        flow.run(sums(flow.spec(), program, parallelism))

    feed(60)
    run("old", 2)
    feed(60)
    with closing(ProcessGroup()) as group:
        spec = json.dumps(flow.spec(program="new", parallelism=3))
        job = group.start([sys.executable, "-m", "tests.spark.changed_job", spec])
        assert job.wait(150) == -signal.SIGKILL

    run("old", 1)  # nothing of the new program counts
    by_key = {key: [n for one, n in fed if one == key] for key, _ in fed}
    assert state_by_key(flow) == {key: {"n": len(ns), "least": ns[0]} for key, ns in by_key.items()}

    before = len(fed)
    feed(70)
    explained = sums(flow.spec(), "new", 3).explain(checkpoint=str(flow.checkpoint))
    for text in ("'n' is now called 'rows'", "'total' (bigint) is added", "from int to bigint"):
        assert text in explained
    run("new", 3)
    by_key = {key: [n for one, n in fed if one == key] for key, _ in fed}
    later = {key: sum(n for one, n in fed[before:] if one == key) for key in by_key}
    assert state_by_key(flow) == {
        key: {"total": later[key], "least": ns[0], "rows": len(ns)} for key, ns in by_key.items()
    }

    feed(1)
    refused = r"changed after epoch (\d+): .* savepoint of epoch \1 or before"
    with pytest.raises(ts.OptionError, match=refused):
        run("old", 2)


def test_a_dry_run_checks_all_and_the_run_at_work_goes_on(
    flow: Flow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what changes, refuses what a start refuses, and neither writes nor fences."""

    def feed(*numbers: int) -> None:
        values = [("k", json.dumps({"k": "k", "n": number})) for number in numbers]
        produce(flow.confluent, flow.topic_in, values)

    def dry(pipeline: ts.Pipeline, checkpoint: Path = flow.checkpoint) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, "tallystick"):
            query = pipeline.start(flow.spark, checkpoint=str(checkpoint), dry_run=True)
            query.awaitTermination(60)
        assert not query.isActive
        assert query.exception() is None
        return caplog.text

    running = sums(flow.spec(), "old", 2).start(flow.spark, checkpoint=str(flow.checkpoint))
    feed(3, 4)
    running.processAllAvailable()
    said = dry(sums(flow.spec(), "new", 3))
    for text in ("from epoch", "'n' is now called 'rows'", "from int to bigint", "was written"):
        assert text in said
    feed(5)
    running.processAllAvailable()
    running.stop(drain=True)
    assert state_by_key(flow) == {"k": {"n": 3, "least": 3}}, "the run was fenced"

    before = left_by(flow)
    assert "'total' (bigint) is added" in dry(sums(flow.spec(), "new", 1))
    assert "nothing changes" in dry(sums(flow.spec(), "old", 1))
    unfit = sums(flow.spec(), "new", 1)
    with pytest.raises(ts.OptionError, match="dropped-column-sums-n"):
        dry(replace(unfit, steps=tuple(replace(it, succession=Succession()) for it in unfit.steps)))
    missing = sums({**flow.spec(), "topic_out": "nowhere"}, "old", 1)
    with pytest.raises(ts.OptionError, match="nowhere"):
        dry(missing)
    assert left_by(flow) == before
    assert "from the first epoch" in dry(sums(flow.spec(), "new", 1), tmp_path / "new")
    assert not [*(tmp_path / "new").glob("*")]
    flow.run(sums(flow.spec(), "new", 2))


def left_by(flow: Flow) -> Any:
    """Return the files of the checkpoint, and the ends of the output: markers count as well."""
    files = {path: path.stat().st_mtime_ns for path in flow.checkpoint.rglob("*")}
    return files, ends(flow.confluent, flow.topic_out, IsolationLevel.READ_UNCOMMITTED)
