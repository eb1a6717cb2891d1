"""The records that all systems read, and the check of what they wrote; `peers.Tools` does both."""

import json
import subprocess
from dataclasses import dataclass

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

    `exact` means that the output holds each expected record once: their number, and the sum of a
    hash over their sessions, agree.
    """

    input_records: int
    output_records: int
    expected_records: int
    exact: bool


class Dataset:
    """Loads and verifies topics of one broker.

    Args:
        workspace: holds the built tools.
        bootstrap: `host:port` of the broker.
    """

    def __init__(self, workspace: Workspace, bootstrap: str) -> None:
        self._java = ["java", HEAP, "-cp", workspace.tools_classpath(), "peers.Tools"]
        self._bootstrap = bootstrap

    def load(self, topic: str, records: int) -> None:
        """Write `records` events to a topic: the same ones every time."""
        said = self._run("load", topic, str(records), str(SEED), timeout_s=LOAD_TIMEOUT_S)
        if f"loaded {records} " not in said:
            raise DatasetError(f"the loader did not load {records} records: {said}")

    def verify(self, input_topic: str, output_topic: str) -> Verdict:
        """Compare a stateless job's output with what its input asks for."""
        said = self._run(
            "verify", input_topic, output_topic, "stateless", "record", timeout_s=VERIFY_TIMEOUT_S
        )
        found = [line for line in said.splitlines() if line.startswith("{")]
        if not found:
            raise DatasetError(f"the verifier gave no verdict: {said}")
        fields = json.loads(found[0])
        return Verdict(
            input_records=fields["in"],
            output_records=fields["out"],
            expected_records=fields["expected_out"],
            exact=fields["users_wrong_count"] == 0 and fields["out_of_order"] == 0,
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
