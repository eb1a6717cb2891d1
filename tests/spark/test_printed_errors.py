"""What a program prints of a mistake: the reason first, in ten lines, without frames of ours."""

import os
import re
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from confluent_kafka import Producer

from tallystick.testing import EmbeddedKafka
from tests.spark import jvm

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]

LINES_MAX = 10
OWN = ("misspelt", "own", "malformed", "keyed", "when")
MISTAKES = {
    "resident": (
        *OWN,
        *("ends", "exits", "scalar", "module", "no_update", "column", "frame"),
        "jvm",
    ),
    "jobs": (*OWN, *("transform", "short", "cast", "ends", "column"), "jvm"),
}
FIRST_LINES = {
    "misspelt": r"map_batches misspells, printed-.*-in-0 offsets 0 to 2: KeyError: .*nmae.* "
    r"\(mistaken.py:\d+\); columns: id, name",
    "own": r"map_batches raises_own, printed-.*-in-0 offsets 0 to 2: OwnError: no such airline: ZZ "
    r"\(mistaken.py:\d+\)",
    "malformed": r"RecordError: topic printed-.*-in, partition 0, offset 0",
    "keyed": r"process 'process-1': ZeroDivisionError: division by zero \(mistaken.py:\d+\)",
    "when": r"when\(\) <lambda>, printed-.*-in-0 offsets 0 to 2: KeyError",
    "transform": r"transform <lambda>: .*UNRESOLVED_COLUMN.*mistaken.py:\d+\); columns: id, name",
    "ends": r"map_batches ends, printed-.*-in-0 offsets 0 to 2: EndsError: enough",
    "exits": r"map_batches <lambda>.*SystemExit\('enough'\) ends a process of tasks",
    "scalar": r"map_batches one_value.*an Arrow scalar: rows\['delay'\]\[0\].as_py\(\)",
    "module": r"map_batches imports_nothing.*does not have it: install it there",
    "no_update": r"OptionError: process 'process-1': <lambda> returned a RecordBatch: expected "
    r"ts.Update\(",
    "column": r"OptionError: process 'process-1': .*no column 'nmae'. Did you mean 'name'",
    "frame": r"OptionError: when\(\): the predicate returned a RecordBatch: expected a boolean",
    "short": r"\w+: PySparkRuntimeError: \[RESULT_ROWS_MISMATCH\]",
    "cast": r"\w+: .*CAST_INVALID_INPUT",
    "jvm": r"TallystickError: Spark's JVM \(pid \d+\) has ended \(killed by signal 9\)",
}


@pytest.mark.parametrize("execution", MISTAKES)
def test_what_is_printed_of_a_mistake_begins_with_the_reason(
    tallystick_kafka: EmbeddedKafka, tmp_path: Path, execution: str
) -> None:
    kafka, names = tallystick_kafka, MISTAKES[execution]
    # Each run, also the second of a test that failed, has topics and pipelines of its own.
    output = f"printed-{uuid4().hex[:8]}"
    topic = f"{output}-in"
    kafka.create_topic(topic, 1)
    kafka.create_topic(output, 1)
    producer = Producer(kafka.confluent_options())
    for number in range(3):
        producer.produce(topic, f'{{"id": {number}, "name": "n"}}')
    producer.flush()
    words = (kafka.bootstrap_servers, topic, output, str(tmp_path), execution, *names)
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.mistaken", *words],
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        env={**os.environ, "TALLYSTICK_TRACEBACKS": "", "SPARK_SUBMIT_OPTS": jvm.options()},
    )
    _, *parts = re.split(r"^=== ", done.stderr, flags=re.MULTILINE)
    printed = {part.split("\n", 1)[0]: part.split("\n", 1)[1].splitlines() for part in parts}
    assert [*printed] == [*names, "end"], done.stderr
    for name in names:
        # Warnings of a slow machine; Spark's bar.
        others = re.compile(r".*waits since|.*an epoch is under way for|\s*(?:.*\[Stage .*)?$")
        lines = [line for line in printed[name] if not others.match(line)]
        assert re.match(FIRST_LINES[name], "\n".join(lines)), (name, lines)
        assert len(lines) <= LINES_MAX, (name, lines)
        text = "\n".join(lines)
        assert "\tat " not in text, (name, lines)
        assert text.count(f"{os.sep}tallystick{os.sep}") <= 3, (name, lines)
        assert text.count(lines[0]) == 1, (name, lines)
