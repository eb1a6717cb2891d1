"""A program with other state, on Spark and a real broker: killed at its first epoch, and rescaled.

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
from tests.spark.changed_job import counts, sums
from tests.spark.flow import Facts, Flow, die
from tests.spark.forked_driver import environment_of_a_jvm
from tests.spark.topics import Record, ends, produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]


PREPARED, DECIDED = "OutputCounted", "TransactionCommitted"
"""Events of an epoch: all output is written; Kafka has committed the output."""


def run_and_die(flow: Flow, at: str, pipeline: ts.Pipeline) -> None:
    """Run a program in this process, which gets no further than an event of its first epoch."""
    with pytest.raises(RuntimeError, match=f"died after {at}"):
        flow.run(pipeline, listener=Facts(at, die))


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
    with environment_of_a_jvm(flow.folder) as environment, closing(ProcessGroup()) as group:
        spec = json.dumps(flow.spec(at=PREPARED, program="new", parallelism=3))
        command = [sys.executable, "-m", "tests.spark.changed_job", spec]
        job = group.start(command, env=environment)
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


def test_the_decision_of_the_first_epoch_is_what_shuts_out_the_old_program(flow: Flow) -> None:
    """A column and times to live are added; deaths just before and just after the decision."""
    fed: list[tuple[str, int]] = []
    read: set[Record] = set()

    def feed(count: int) -> None:
        new = [(f"k{number % 7}", number) for number in range(len(fed), len(fed) + count)]
        values = [(key, json.dumps({"k": key, "n": number})) for key, number in new]
        produce(flow.confluent, flow.topic_in, values)
        fed.extend(new)

    def came_out() -> dict[str, tuple[int, int, int | None]]:
        records = set(read_committed(flow.confluent, flow.topic_out))
        new = [json.loads(record.value or "") for record in records - read]
        read.update(records)
        assert len(new) == len({row["k"] for row in new}), "not one epoch"
        return {row["k"]: (row["lasting"], row["brief"], row.get("total")) for row in new}

    def numbers(start: int = 0) -> dict[str, list[int]]:
        return {f"k{k}": [n for key, n in fed[start:] if key == f"k{k}"] for k in range(7)}

    feed(60)
    flow.run(counts(flow.spec(), "old", 2))
    came_out()
    feed(60)
    run_and_die(flow, PREPARED, counts(flow.spec(), "new", 3))
    assert came_out() == {}
    flow.run(counts(flow.spec(), "old", 1))
    assert came_out() == {k: (len(ns), len(ns), None) for k, ns in numbers().items()}

    changed = len(fed)
    feed(60)
    run_and_die(flow, DECIDED, counts(flow.spec(), "new", 3))
    totals = {k: sum(ns) for k, ns in numbers(changed).items()}
    assert came_out() == {k: (len(ns), len(ns), totals[k]) for k, ns in numbers().items()}
    gone = len(fed)
    feed(60)
    refused = r"changed after epoch (\d+): .* savepoint of epoch \1 or before"
    with pytest.raises(ts.OptionError, match=refused):
        flow.run(counts(flow.spec(), "old", 3))
    assert came_out() == {}

    flow.run(counts(flow.spec(), "new", 2))
    totals = {k: sum(ns) for k, ns in numbers(changed).items()}
    brief = {k: len(ns) for k, ns in numbers(gone).items()}
    assert came_out() == {k: (len(ns), brief[k], totals[k]) for k, ns in numbers().items()}


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
