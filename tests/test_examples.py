"""The examples, run as a user would.

Each compares its output with its input by other means than the package. Its last line is compared
with counts of the data, so that a comparison of nothing with nothing does not pass.

Two programs start a process, a broker and a Spark of their own, as a user's do. The others find
both running, which only saves the time of the starts; `make stress` starts them all by themselves.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tallystick import testing
from tallystick.testing import EmbeddedKafka, samples
from tests.spark import jvm
from tests.spark.topics import produce, read_committed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
LINES_MAX = 80
LAST_LINES = {
    "stateless": "985 of 5000 flights were late",
    "keyed_count": "5000 flights to 94 destinations",
    "stateful_processor": "the longest streaks of 15 carriers",
    "foreach_batch": "late flights of 3 airports",
    "postgres_and_files": "5000 flights in table and files",
    "delta_table": "5000 flights in one commit, version 1",
    "deduplication": "5000 of 8000 records are new",
    "sessions": "1358 busy times of 5000 flights",
    "several_sinks": "4969 flights in each of 3 sinks",
}

OWN_SESSION = "foreach_batch"
"""It makes a session, and stops it."""


def run_program(program: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    own = {
        "PYTHONPATH": str(ROOT),
        "TALLYSTICK_STATE_DIR": str(folder / "state"),
        "SPARK_SUBMIT_OPTS": jvm.options(),  # for a session of the program's own
    }
    return subprocess.run(
        [sys.executable, program],
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def kafka(tidied_kafka: EmbeddedKafka) -> EmbeddedKafka:
    """The shared broker, without topics of other examples: each chooses its names."""
    return tidied_kafka


@pytest.mark.parametrize("name", [name for name in LAST_LINES if name != OWN_SESSION])
def test_example_writes_what_it_must(
    name: str,
    kafka: EmbeddedKafka,
    shared_spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(testing, "EmbeddedKafka", lambda: nullcontext(kafka))
    monkeypatch.syspath_prepend(EXAMPLES)

    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    assert capsys.readouterr().out.splitlines()[-1] == f"{LAST_LINES[name]}: as expected"


@pytest.mark.parametrize("name", LAST_LINES)
def test_example_is_a_program_of_its_own(name: str, tmp_path: Path) -> None:
    run = run_program(EXAMPLES / f"{name}.py", tmp_path)

    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == f"{LAST_LINES[name]}: as expected"


def test_the_readme_s_program_with_kafka_runs_as_printed(
    kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    """In an empty folder, with the topics and the flights of `broker start --sample`."""
    readme = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"<!-- with Kafka -->\n```python\n(.*?)```", readme, re.DOTALL)
    assert "127.0.0.1:9092" in program
    values = [json.dumps(flight) for flight in samples.sample("flights")]
    for topic in ("flights", "late"):
        kafka.create_topic(topic, 3)
    produce(kafka.confluent_options(), "flights", [("k", value) for value in values])
    path = tmp_path / "kafka.py"
    program = program.replace("127.0.0.1:9092", kafka.bootstrap_servers)
    path.write_text(program.replace("/tmp/", f"{tmp_path}/"))

    run = run_program(path, tmp_path)

    assert run.returncode == 0, run.stderr
    late = Counter(
        flight["dest"] for flight in map(json.loads, values) if (flight["dep_delay"] or 0) > 15
    )
    shown = {row["dest"]: row["late"] for row in map(json.loads, run.stdout.splitlines())}
    records = read_committed(kafka.confluent_options(), "late")
    written = {row["dest"]: row["late"] for row in (json.loads(r.value or "") for r in records)}
    assert shown == written == late


def test_each_example_is_short_and_listed() -> None:
    texts = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert texts.keys() == {*LAST_LINES, "playground"}
    assert all(text.count("\n") <= LINES_MAX for text in texts.values())
    listed = re.findall(r"^\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(LAST_LINES)
