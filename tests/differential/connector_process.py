"""Spark's own connector in a process of its own: its jars stay out of all other sessions.

`python -m tests.differential.connector_process FOLDER` starts Spark, then reads one line of JSON
from stdin, {name: case}, and leaves one file per case in the folder.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import tallystick as ts
from benchmarks.harness.spark_connector import FORMAT, connector_jars
from tallystick.testing.process import ProcessGroup
from tests.differential.reading import SESSION, Case, Outcome, load, read_all

ROOT = Path(__file__).parents[2]
WAIT_S = 300.0
OPTIONS = {
    "kafka.isolation.level": "read_committed",  # what ours always does
    "kafka.fetch.max.wait.ms": "20",  # it asks again at the end of each range
    "fetchOffset.numRetries": "1",
    "fetchOffset.retryIntervalMs": "1",
}
"""What a case does not say, because ours does not know it; all but the first for speed."""


class ConnectorProcess:
    """The test's side: started early, so that Spark is up when the topics are.

    Args:
        folder: for its results and its log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = (folder / "log").open("wb")
        self._group = ProcessGroup()  # its JVM is in it too
        self._process = self._group.start(
            [sys.executable, "-m", "tests.differential.connector_process", str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def begin(self, cases: Mapping[str, Case]) -> None:
        """Have all cases read; returns at once."""
        cases_asked = {name: asdict(case) for name, case in cases.items()}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(cases_asked).encode() + b"\n")
        self._process.stdin.close()

    def outcomes(self, cases: Mapping[str, Case]) -> dict[str, Outcome]:
        """Wait for the end; what came of each case."""
        code = self._process.wait(WAIT_S)
        log = (self._folder / "log").read_text(errors="replace")
        assert code == 0, f"Spark's connector ended with {code}:\n{log[-4000:]}"
        return {name: load(self._folder / f"{name}.arrow") for name in cases}

    def stop(self) -> None:
        """End it, whatever it is doing."""
        self._group.close()
        self._process.wait()
        self._log.close()


def main() -> None:
    """The process's side."""
    folder = Path(sys.argv[1])
    jars = ",".join(map(str, connector_jars()))
    config = {**SESSION, "spark.jars": jars, "spark.local.dir": str(folder / "spark")}
    spark = ts.spark_session("connector", master="local[2]", config=config)
    spark.sparkContext.setLogLevel("ERROR")
    cases = {
        name: Case(**{**fields, "options": {**fields["options"], **OPTIONS}})
        for name, fields in json.loads(sys.stdin.readline()).items()
    }
    for name, outcome in read_all(spark, FORMAT, cases, folder).items():
        outcome.save(folder / f"{name}.arrow")
    spark.stop()


if __name__ == "__main__":
    main()
