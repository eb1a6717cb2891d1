"""The way of a record on the architecture page is the one that a running pipeline takes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tallystick.testing import EmbeddedKafka

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODULES_MAX = 48
_WAY = re.compile(r"<!-- way -->(.*?)<!-- end -->", re.DOTALL)
_MODULE = re.compile(r"`tallystick/([\w/]+\.py)`")
WAY = _MODULE.findall(_WAY.findall((ROOT / "docs" / "architecture.md").read_text())[0])
BESIDE = {
    *("epoch/two_phase.py", "pipeline/listeners.py", "pipeline/loop.py", "run/part_times.py"),
    *("source/offsets.py", "source/splits.py", "spark/tasks.py"),
    *("tasks/handed_on.py", "tasks/operator_state.py", "kafka/error_policy.py"),
    "kafka/outages.py",
    *("codec/__init__.py", "errors.py", "values.py", "text.py"),
}
"""Modules that are called on the way, and get neither a record nor what is reported of one.

They measure, hand splits out, or say what follows from an error; so does all of `host/`.
"""
ONCE_COMPILED = {"codec/json/flat_kernels.py", "codec/bytes_kernels.py"}
"""Modules that records pass once the kernels are compiled: until then Arrow parses JSON."""


def test_the_page_names_few_modules_and_each_once() -> None:
    assert len(set(WAY)) == len(WAY) <= MODULES_MAX
    assert not BESIDE & set(WAY)


@pytest.mark.broker
@pytest.mark.spark
def test_a_record_passes_the_modules_on_the_page_and_no_others(
    tallystick_kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    for topic in ("way-in", "way-out"):
        tallystick_kafka.create_topic(topic, 2)
    folder = tmp_path / "traced"
    folder.mkdir()
    job = subprocess.run(
        [
            *(sys.executable, "-m", "tests.spark.way_job"),
            *(tallystick_kafka.bootstrap_servers, folder, tmp_path / "checkpoint"),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE / "traced"), str(ROOT), *sys.path]),
            "TRACED": str(folder),
            "TRACED_PACKAGE": str(ROOT / "tallystick"),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert job.returncode == 0, job.stderr[-3000:]

    traced = {module for path in folder.glob("*.calls") for module in on_the_way(path.read_text())}
    passed = {module for module in traced - BESIDE if not module.startswith("host/")}
    assert passed - set(WAY) == set(), "modules that the page does not name"
    assert set(WAY) - passed - ONCE_COMPILED == set(), "the page names modules that are not called"


def on_the_way(calls: str) -> set[str]:
    """Return the modules that a process called; in the driver from the reports up to `EndTxn`.

    The driver's other threads look after the run, and get no report.
    """
    lines = [line.split(" ", 2) for line in calls.splitlines()]
    loops = {thread for thread, *call in lines if call == ["run/driver.py", "Driver._perform"]}
    if loops:
        (loop,) = loops
        lines = [line for line in lines if line[0] == loop]
        begin = lines.index([loop, "spark/gang/inbox.py", "Replies.take"])
        end = lines.index([loop, "kafka/broker.py", "end_transaction_request"], begin)
        lines = lines[begin : end + 1]
    return {module for _, module, _ in lines}
