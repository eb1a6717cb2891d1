"""From samples taken while a job ran to the figures that are compared. Pure.

The curve that counts is the *committed* end of the output topic: what a read_committed consumer can
have. A system that commits a million records at a time is measured from commit to commit, so a
burst of written records that is not visible yet is worth nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

WARM_FROM = 0.35
"""The share of the output after which a job counts as warm."""
WARM_TO = 0.95
"""Where the warm stretch ends: the wait for the last commit is no throughput."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen at one moment; the CPU seconds are running totals.

    `written` and `committed` are in output offsets, or in input records after them.
    """

    at_s: float
    written: int
    committed: int
    job_cpu_s: float
    broker_cpu_s: float
    harness_cpu_s: float
    machine_cpu_s: float
    committed_each: tuple[int, ...] = ()
    """The committed end of each output partition."""

    def other_cpu_s(self) -> float:
        """CPU seconds of everything that is neither job nor broker nor this harness."""
        return self.machine_cpu_s - self.job_cpu_s - self.broker_cpu_s - self.harness_cpu_s


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run cost. Rates are in input records; None: too short a run to tell."""

    wall_s: float
    first_commit_s: float
    records_per_s: float
    warm_records_per_s: float | None
    job_cpu_s: float
    job_cpu_s_per_million: float
    warm_job_cpu_s_per_million: float | None
    broker_cpu_s_per_million: float
    other_cpu_s: float
    commits_seen: int


def figures(
    samples: Sequence[Sample], *, started_s: float, first_s: float, records: int
) -> Figures:
    """The figures of one complete run.

    Args:
        samples: in order of time; the last one shows the complete output, all of it committed.
        started_s: when the job's process was started.
        first_s: when the job began its work: its first record, or the start of its query.
        records: how many input records the output covers.
    """
    assert samples, "a run without samples"
    assert samples[-1].committed > 0, "a run without output"
    steps = committed_steps(samples)
    begin, end = _at(samples, first_s), steps[-1]
    assert end.at_s > first_s, "the last commit cannot come before the first record"
    millions = records / 1e6
    warm_rate, warm_cpu = _warm(steps, records)
    return Figures(
        wall_s=end.at_s - first_s,
        first_commit_s=steps[0].at_s - started_s,
        records_per_s=records / (end.at_s - first_s),
        warm_records_per_s=warm_rate,
        job_cpu_s=samples[-1].job_cpu_s,
        job_cpu_s_per_million=(end.job_cpu_s - begin.job_cpu_s) / millions,
        warm_job_cpu_s_per_million=warm_cpu,
        broker_cpu_s_per_million=(end.broker_cpu_s - begin.broker_cpu_s) / millions,
        other_cpu_s=end.other_cpu_s() - begin.other_cpu_s(),
        commits_seen=len(steps),
    )


def first_output_s(samples: Sequence[Sample]) -> float:
    """When output began, for a job that does not say when its work does: the last time of none.

    It leaves out whatever the job did before its first record came out.
    """
    none_yet = [sample.at_s for sample in samples if sample.written == 0]
    return none_yet[-1] if none_yet else samples[0].at_s


def committed_steps(samples: Sequence[Sample]) -> list[Sample]:
    """The samples at which the committed end was seen to have moved."""
    steps: list[Sample] = []
    for sample in samples:
        if sample.committed > (steps[-1].committed if steps else 0):
            steps.append(sample)
    return steps


def _warm(steps: Sequence[Sample], records: int) -> tuple[float | None, float | None]:
    """Records per second, and CPU seconds per million records, between two middle commits."""
    total = steps[-1].committed
    middle = [step for step in steps if WARM_FROM * total <= step.committed <= WARM_TO * total]
    if len(middle) < 2:
        return None, None
    first, last = middle[0], middle[-1]
    # By shares, not by offsets: commit markers take offsets too.
    done = records * (last.committed - first.committed) / total
    return (
        done / (last.at_s - first.at_s),
        (last.job_cpu_s - first.job_cpu_s) / (done / 1e6),
    )


def _at(samples: Sequence[Sample], at_s: float) -> Sample:
    """The last sample taken by `at_s`."""
    earlier = [sample for sample in samples if sample.at_s <= at_s]
    return earlier[-1] if earlier else samples[0]
