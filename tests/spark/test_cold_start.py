"""A start on a machine where nothing is compiled yet: the first epochs wait for what they use."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tallystick.testing import EmbeddedKafka
from tests.spark import jvm
from tests.spark.flow import Flow
from tests.spark.topics import flights, produce, read_committed, wait_until_nothing_is_pending

pytestmark = [pytest.mark.broker, pytest.mark.spark]

JOB = Path(__file__).with_name("cold_job.py")
RECORDS = 100
COMPILER_MAX_S = 400.0
"""The compiler is nice to all others, and a machine may be busy for long."""


@pytest.fixture
def flow(tallystick_kafka: EmbeddedKafka, tmp_path: Path) -> Flow:
    return Flow(tallystick_kafka, None, tmp_path)


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """The folder of kernels in an empty cache."""
    folder = tmp_path / "cache" / "numba"
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    return folder


def run_all(flow: Flow, kind: str, kernels: Path) -> None:
    """Have the job read what is there, in a process of its own; its output is exact."""
    records = flights(RECORDS)
    produce(flow.confluent, flow.topic_in, records)
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, str(JOB), json.dumps(flow.spec(kind=kind))],
        env={
            **kept,
            "TALLYSTICK_CACHE": str(kernels.parent),
            "SPARK_SUBMIT_OPTS": jvm.options(),  # what is cold here are kernels
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wanted: dict[str | None, list[dict[str, int]]] = {}
    for key, value in records:
        mine = wanted.setdefault(key, [])
        nth = {"nth": len(mine) + 1} if kind == "keyed" else {}
        mine.append({"n": json.loads(value)["n"], **nth})
    rows_by_key: dict[str | None, list[dict[str, int]]] = {}
    for record in read_committed(flow.confluent, flow.topic_out):
        row = json.loads(record.value or "")
        assert row.pop("k") == record.key
        rows_by_key.setdefault(record.key, []).append(row)
    assert rows_by_key == wanted
    wait_until_nothing_is_pending(flow.confluent, flow.topic_out)


def compiled(kernels: Path) -> set[str]:
    """The names of the kernels that are in the cache."""
    return {path.name.split("-")[0].split(".")[-1] for path in kernels.rglob("*.nbi")}


def all_are_compiled(kernels: Path) -> bool:
    return any(kernels.glob("all-*"))


@pytest.mark.parametrize("kind", ["stateless", "keyed"])
def test_epochs_are_committed_though_the_whole_set_never_is_compiled(
    flow: Flow, kernels: Path, kind: str
) -> None:
    """Whoever holds this lock says that it compiles; here it never gets to it."""
    with open(kernels / "compiling", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_all(flow, kind, kernels)
    assert not all_are_compiled(kernels)
    needed = {"scan_records", "encode_records", "write_column"}
    assert needed | ({"running_count"} if kind == "keyed" else set()) <= compiled(kernels)


def test_another_process_compiles_the_rest_and_outlives_the_job(flow: Flow, kernels: Path) -> None:
    run_all(flow, "stateless", kernels)
    deadline = time.monotonic() + COMPILER_MAX_S
    while not all_are_compiled(kernels):
        assert time.monotonic() < deadline, sorted(compiled(kernels))
        time.sleep(0.5)
    assert {"parse_records", "decode_records", "running_count"} <= compiled(kernels)
