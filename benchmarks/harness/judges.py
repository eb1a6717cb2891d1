"""Who judges the output of which job; the same judge for all systems."""

import math
from dataclasses import asdict

from .count_check import RECORD, Check, Truth
from .count_topics import read_inputs, read_outputs
from .dataset import Dataset, Judged, Verdict
from .systems import COUNT, STATELESS, System

STATELESS_SHARE_MIN = 0.86
"""The stateless job keeps 7 of 8 records; with less than this, standing still is no end."""
KEYS_SHARE_MIN = 0.98
"""Of the users that so many random records have on average."""
UNKNOWN = -1
DONE = "done_records"
"""Among the findings, and no fault."""


class Judges:
    """Judges the outputs of one broker.

    Args:
        dataset: verifies the job `stateless`.
        bootstrap: `host:port` of the broker.
        keys: how many users the records may have.
    """

    def __init__(self, dataset: Dataset, bootstrap: str, keys: int) -> None:
        self._dataset = dataset
        self._bootstrap = bootstrap
        self._keys = keys
        self._truths: dict[str, Truth] = {}

    def rows_min(self, system: System, records: int) -> float:
        """With fewer rows than this, the output of so many records is not complete."""
        if system.job == STATELESS:
            return STATELESS_SHARE_MIN * records
        if system.mode == RECORD:
            return records
        return KEYS_SHARE_MIN * self._keys * -math.expm1(-records / self._keys)

    def judge(
        self, system: System, input_topic: str, output_topic: str, *, cut_off: bool
    ) -> Judged:
        """Hold an output against its input.

        Args:
            system: whose output it is.
            input_topic: what it read.
            output_topic: what it wrote.
            cut_off: whether it was ended early, so that rows may be missing at the end.
        """
        if system.job == STATELESS:
            assert not cut_off, "part of a stateless output cannot be judged"
            return self._dataset.verify_stateless(input_topic, output_topic)
        assert system.job == COUNT, system
        if input_topic not in self._truths:
            self._truths[input_topic] = Truth(read_inputs(self._bootstrap, input_topic))
        truth = self._truths[input_topic]
        outputs = read_outputs(self._bootstrap, output_topic)
        check = Check(truth, outputs, system.mode, in_order=system.keyed_output)
        verdict = Verdict(
            input_records=truth.records,
            output_records=len(outputs.users),
            expected_records=truth.records if system.mode == RECORD else UNKNOWN,
            exact=check.findings.right_so_far if cut_off else check.findings.exact,
            faults={name: rows for name, rows in asdict(check.findings).items() if name != DONE},
        )
        return Judged(verdict, check.done)
