"""The records that all systems read, and the check of what they wrote, for each job.

`peers.Tools` writes the records, and checks the output of the job `stateless`; that of `count` is
checked by `judges.py`.
"""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .workspace import Workspace

SEED = 42
HEAP = "-Xmx1g"
LOAD_TIMEOUT_S = 600
VERIFY_TIMEOUT_S = 600


class DatasetError(Exception):
    """The loader or the verifier failed; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a read_committed consumer found in an output topic, against the input.

    Args:
        input_records: in the topic that the job read.
        output_records: in the topic that it wrote.
        expected_records: that it had to write; -1 where the job chooses.
        exact: all that is there is right: nothing is missing but what a job that was cut off had
            not come to.
        faults: what is wrong, in numbers of rows.
    """

    input_records: int
    output_records: int
    expected_records: int
    exact: bool
    faults: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict, and the input records that are after the partitions' ends, where rows tell."""

    verdict: Verdict
    done: Callable[[Sequence[int]], int] | None = None


class Dataset:
    """Loads and verifies topics of one broker.

    Args:
        workspace: holds the built tools.
        bootstrap: `host:port` of the broker.
        keys: how many users there are in the records.
        is_spread: their partitions are by other numbers than Kafka's partitioner gives them.
        pad_bytes: how much longer the values are, by a field that no job reads.
    """

    def __init__(
        self,
        workspace: Workspace,
        bootstrap: str,
        keys: int,
        *,
        is_spread: bool = False,
        pad_bytes: int = 0,
    ) -> None:
        flags = [
            HEAP,
            f"-Dusers={keys}",
            f"-Dspread={str(is_spread).lower()}",
            f"-Dpad={pad_bytes}",
            "-cp",
            workspace.tools_classpath(),
        ]
        self._java = ["java", *flags, "peers.Tools"]
        self._bootstrap = bootstrap

    def load(self, topic: str, records: int) -> None:
        """Write `records` events to a topic: the same ones every time."""
        output = self._run("load", topic, str(records), str(SEED), timeout_s=LOAD_TIMEOUT_S)
        if f"loaded {records} " not in output:
            raise DatasetError(f"the loader did not load {records} records: {output}")

    def verify_stateless(self, input_topic: str, output_topic: str) -> Judged:
        """Compare a stateless job's output with what its input asks for."""
        output = self._run(
            "verify", input_topic, output_topic, "stateless", "record", timeout_s=VERIFY_TIMEOUT_S
        )
        verdicts = [line for line in output.splitlines() if line.startswith("{")]
        if not verdicts:
            raise DatasetError(f"the verifier gave no verdict: {output}")
        fields = json.loads(verdicts[0])
        faults = {name: fields[name] for name in ("users_wrong_count", "out_of_order")}
        return Judged(
            Verdict(
                input_records=fields["in"],
                output_records=fields["out"],
                expected_records=fields["expected_out"],
                exact=not any(faults.values()),
                faults=faults,
            )
        )

    def _run(self, command: str, *arguments: str, timeout_s: float) -> str:
        done = subprocess.run(
            [*self._java, command, self._bootstrap, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise DatasetError(f"peers.Tools {command} failed ({done.returncode}): {done.stderr}")
        return done.stdout
