"""The benchmark's figures follow from its samples: what is not committed is worth nothing."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from harness.timeline import Sample, committed_steps, figures

RECORDS = 1_000_000


def sample(at_s: float, written: int, committed: int) -> Sample:
    return Sample(
        at_s=at_s,
        written=written,
        committed=committed,
        job_cpu_s=1.5 * at_s,
        broker_cpu_s=0.2 * at_s,
        harness_cpu_s=0.1 * at_s,
        machine_cpu_s=1.9 * at_s,
    )


EPOCHS = [
    sample(0.0, 0, 0),
    sample(9.0, 100, 0),
    sample(10.0, 100, 100),
    sample(11.0, 200, 100),
    sample(12.0, 200, 200),
    sample(14.0, 300, 300),
    sample(15.0, 400, 300),
    sample(16.0, 400, 400),
    sample(20.0, 500, 500),
    sample(22.0, 500, 500),
]
"""Five epochs of a fifth each; the first waits for the start, the last for its commit."""


def test_a_run_counts_from_its_first_record_to_its_last_commit():
    result = figures(EPOCHS, started_s=-1.0, first_s=4.0, records=RECORDS)

    assert result.wall_s == 16.0
    assert result.records_per_s == RECORDS / 16
    assert result.first_commit_s == 11.0
    assert result.commits_seen == 5


def test_the_warm_rate_leaves_out_the_start_and_the_last_wait():
    result = figures(EPOCHS, started_s=0.0, first_s=4.0, records=RECORDS)

    assert result.warm_records_per_s == pytest.approx(0.4 * RECORDS / 4)
    assert result.warm_job_cpu_s_per_million == pytest.approx(1.5 * 4 / 0.4)


def test_a_single_commit_gives_no_warm_rate():
    result = figures([sample(0, 0, 0), sample(5, 9, 9)], started_s=0, first_s=1, records=9)

    assert result.warm_records_per_s is None
    assert result.warm_job_cpu_s_per_million is None


def test_cpu_is_booked_to_job_broker_and_others_without_the_start():
    result = figures(EPOCHS, started_s=0.0, first_s=9.0, records=RECORDS)

    assert result.job_cpu_s_per_million == pytest.approx(1.5 * 11)
    assert result.broker_cpu_s_per_million == pytest.approx(0.2 * 11)
    assert result.other_cpu_s == pytest.approx(0.1 * 11)
    assert result.job_cpu_s == pytest.approx(1.5 * 22)


def test_a_step_is_a_move_of_the_committed_end_only():
    assert [step.at_s for step in committed_steps(EPOCHS)] == [10.0, 12.0, 14.0, 16.0, 20.0]
