"""Runs that are judged by their input: exact ones pass, and each planted fault is told."""

import json
from datetime import UTC, datetime

import pytest

from tallystick_tools.chaos.cluster import OutputRecord
from tallystick_tools.chaos.run import Run
from tests.campaign.__main__ import PARTITIONS, by_input, question, records
from tests.campaign.jobs import WORKLOADS
from tests.campaign.oracles import UNEVEN_TOPIC


def moment(ms: int) -> str:
    """A time as the JSON writer has it."""
    text = datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def rows_of(name: str) -> list[dict]:
    """What a program without a fault would write."""
    _, posed = question(1, [name])
    rows = [dict(row) for row in WORKLOADS[name].oracle(posed.job.inputs)]
    for number, row in enumerate(rows):
        if "window_start" in row:
            row |= {at: moment(row[at]) for at in ("window_start", "window_end")}
        else:
            row["draw"] = number
    return rows


def verdict_of(name: str, rows: list[dict]):
    _, posed = question(1, [name])
    written = [
        OutputRecord("out", 0, offset, b"key", json.dumps(row).encode())
        for offset, row in enumerate(rows)
    ]
    return by_input(WORKLOADS[name], posed, Run(records=written))


@pytest.mark.parametrize("name", ["answered", "twice-windowed"])
def test_what_the_input_says_is_exact_in_any_order(name):
    rows = rows_of(name)
    assert len(rows) > 10
    assert verdict_of(name, rows[::-1]).is_exact


@pytest.mark.parametrize("name", ["answered", "twice-windowed"])
def test_a_lost_row_and_one_too_many_are_told(name):
    rows = rows_of(name)
    assert [difference.kind for difference in verdict_of(name, rows[1:]).differences] == ["lost"]
    again = [*rows, {**rows[0], **({"draw": -1} if "draw" in rows[0] else {})}]
    assert [difference.kind for difference in verdict_of(name, again).differences] == ["added"]


def test_an_answer_that_is_another_rows_is_told():
    rows = rows_of("answered")
    rows[0]["answer"], rows[1]["answer"] = rows[1]["answer"], rows[0]["answer"]
    different = verdict_of("answered", rows).differences
    assert sorted(difference.kind for difference in different) == ["added", "added", "lost", "lost"]


def test_two_processes_that_draw_the_same_are_told():
    rows = rows_of("answered")
    rows[0]["draw"] = rows[1]["draw"]
    (problem,) = verdict_of("answered", rows).problems
    assert problem == f"1 of {len(rows) - 1} values of 'draw' are in more than one row"


def test_a_thread_that_does_not_live_on_is_told():
    rows = rows_of("answered")
    rows[5]["is_refreshed"] = False
    assert not verdict_of("answered", rows).is_exact


def test_the_partitions_of_the_uneven_input_are_in_order_and_seconds_apart():
    seen: dict[int, int] = {}
    apart = 0
    for record in records(UNEVEN_TOPIC):
        assert record.timestamp_ms > seen.get(record.partition, 0)
        seen[record.partition] = record.timestamp_ms
        if len(seen) == PARTITIONS:
            apart = max(apart, max(seen.values()) - min(seen.values()))
    assert apart > 10_000
