"""The benchmark's judge of the keyed job finds what is wrong, and knows how far an output is."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from harness.count_check import EPOCH, RECORD, Check, Inputs, Outputs, Truth

INPUTS = Inputs(
    users=np.array([0, 2, 0, 2, 0]),
    cents=np.array([100, 20, 300, 5, 1]),
    times_ms=np.array([1, 2, 3, 4, 5]),
)
UPDATES = [
    # partition, offset, user, count, cents, time
    (0, 0, 0, 1, 100, 1),
    (0, 1, 0, 2, 400, 3),
    (0, 3, 0, 3, 401, 5),
    (1, 7, 2, 1, 20, 2),
    (1, 9, 2, 2, 25, 4),
]
"""An exact output of mode `record`; commit markers take offsets, too."""


def check(rows: list[tuple[int, ...]], mode: str = RECORD, **how: bool) -> Check:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    return Check(Truth(INPUTS), Outputs(*columns), mode, **how)


def test_each_update_once_is_exact():
    findings = check(UPDATES).findings

    assert findings.exact
    assert findings.done_records == 5


def test_one_row_per_key_and_commit_is_exact_where_that_was_asked_for():
    rows = [UPDATES[1], UPDATES[2], UPDATES[4]]

    assert check(rows, EPOCH).findings.exact
    assert not check(rows, RECORD).findings.right_so_far


def test_what_is_missing_at_the_end_is_not_wrong_so_far():
    findings = check(UPDATES[:4]).findings

    assert findings.right_so_far
    assert not findings.exact
    assert (findings.unfinished_users, findings.done_records) == (1, 4)


@pytest.mark.parametrize("mode", [RECORD, EPOCH])
def test_a_duplicate_is_found(mode):
    assert check([*UPDATES, (1, 10, 2, 2, 25, 4)], mode).findings.wrong_steps == 1


@pytest.mark.parametrize("mode", [RECORD, EPOCH])
def test_another_order_is_found(mode):
    rows = [(0, 0, *UPDATES[1][2:]), (0, 1, *UPDATES[0][2:]), *UPDATES[2:]]

    assert check(rows, mode).findings.wrong_steps > 0


def test_rows_without_keys_may_come_in_any_order_but_each_once():
    rows = [(0, 0, *UPDATES[1][2:]), (0, 1, *UPDATES[0][2:]), *UPDATES[2:]]

    assert check(rows, in_order=False).findings.exact
    assert check([*rows, (1, 10, 2, 2, 25, 4)], in_order=False).findings.wrong_steps == 1


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ((1, 9, 2, 2, 26, 4), "wrong_sums"),
        ((1, 9, 2, 2, 25, 5), "wrong_times"),
        ((1, 9, 2, 3, 25, 4), "strange_rows"),
        ((1, 9, 1, 1, 25, 4), "strange_rows"),
        ((1, 9, 77, 1, 25, 4), "strange_rows"),
        ((1, 9, -1, -1, -1, -1), "strange_rows"),
    ],
)
def test_each_row_is_judged_by_itself(row, fault):
    findings = check([*UPDATES[:4], row]).findings

    assert getattr(findings, fault) == 1
    assert not findings.right_so_far


@pytest.mark.parametrize("mode", [RECORD, EPOCH])
def test_progress_is_the_inputs_behind_what_is_committed(mode):
    checked = check(UPDATES, mode)

    assert [checked.done(ends) for ends in [(0, 0), (1, 0), (2, 8), (4, 10)]] == [0, 1, 3, 5]


def test_one_row_may_cover_many_inputs():
    checked = check([UPDATES[2], UPDATES[4]], EPOCH)

    assert checked.done((4, 0)) == 3
    assert checked.done((4, 10)) == 5


def test_an_empty_output_covers_nothing():
    checked = check([])

    assert checked.findings.unfinished_users == 2
    assert checked.done((0, 0)) == 0
