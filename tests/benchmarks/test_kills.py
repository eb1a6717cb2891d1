"""The judge of the runs under kills finds what is planted, and every system has one schedule."""

import struct

import pytest

from benchmarks.kills.audit import Audit, Event, Update, audit
from benchmarks.kills.course import python_workers
from benchmarks.kills.schedule import GAPS_S, KINDS, plan
from benchmarks.kills.systems import newest_checkpoint
from tallystick.host.processes import Process
from tallystick_tools.chaos.proxy import commits

EVENTS = [Event("a", 5, 1), Event("b", 7, 2), Event("a", 1, 3), Event("a", 2, 4)]
EXACT = [Update("a", 1, 5, 1), Update("b", 1, 7, 2), Update("a", 2, 6, 3), Update("a", 3, 8, 4)]


def judged(updates: list[Update]) -> Audit:
    return audit(EVENTS, updates)


def test_each_update_once_and_in_order_is_exact():
    assert judged(EXACT) == Audit(4, 4, 0, 0, 0, 0)
    assert judged(EXACT).is_exact


def test_users_may_be_in_any_order_among_each_other():
    assert judged([EXACT[1], EXACT[0], EXACT[2], EXACT[3]]).is_exact


@pytest.mark.parametrize("index", range(4))
def test_a_lost_update_is_found(index):
    verdict = judged(EXACT[:index] + EXACT[index + 1 :])

    assert verdict == Audit(4, 3, 1, 0, 0, 0)
    assert not verdict.is_exact


@pytest.mark.parametrize("index", range(4))
def test_a_duplicate_is_found_right_after_it_and_at_the_end(index):
    for place in (index + 1, 4):
        verdict = judged([*EXACT[:place], EXACT[index], *EXACT[place:]])

        assert verdict == Audit(4, 5, 0, 1, 0, 0)
        assert not verdict.is_exact


def test_disorder_is_found():
    verdict = judged([EXACT[0], EXACT[2], EXACT[1], EXACT[3]])
    assert verdict.is_exact, "b's update may be anywhere"

    verdict = judged([EXACT[2], EXACT[1], EXACT[0], EXACT[3]])
    assert verdict == Audit(4, 4, 0, 0, 1, 0)
    assert not verdict.is_exact


def test_state_that_was_set_back_is_found():
    """An event was counted, its update is lost with the state: the next has its number."""
    verdict = judged([EXACT[0], EXACT[1], Update("a", 2, 7, 4)])

    assert (verdict.lost, verdict.wrong) == (1, 1)


def test_state_that_was_counted_twice_is_found():
    verdict = judged([*EXACT, Update("a", 4, 10, 4)])

    assert verdict == Audit(4, 5, 0, 0, 0, 1)


def test_a_schedule_depends_on_its_seed_alone():
    assert plan(1, 6) == plan(1, 6)
    assert plan(1, 6) != plan(2, 6)


@pytest.mark.parametrize("seed", range(20))
def test_each_kind_comes_once_before_any_comes_twice(seed):
    faults = plan(seed, 12)
    assert sorted(fault.kind for fault in faults[:6]) == sorted(KINDS)
    assert sorted(fault.kind for fault in faults[6:]) == sorted(KINDS)
    assert all(GAPS_S[0] <= fault.gap_s <= GAPS_S[1] for fault in faults)


def end_txn(version: int, committed: bool) -> bytes:
    """A request as a client sends it, from its key on."""
    head = struct.pack(">hhih", 26, version, 1, 1) + b"c"
    if version >= 3:
        return head + b"\0" + b"\2t" + struct.pack(">qh?", 1, 1, committed) + b"\0"
    return head + struct.pack(">h", 1) + b"t" + struct.pack(">qh?", 1, 1, committed)


@pytest.mark.parametrize("version", range(6))
def test_a_commit_is_known_from_an_abort_in_every_version(version):
    assert commits(end_txn(version, True))
    assert not commits(end_txn(version, False))


def test_a_flink_job_starts_from_its_newest_whole_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    for number, text in ((9, "whole"), (10, "whole"), (11, "")):
        folder = tmp_path / "job" / f"chk-{number}"
        folder.mkdir(parents=True)
        (folder / "_metadata").write_text(text)
    (tmp_path / "job" / "chk-12").mkdir()

    assert newest_checkpoint(tmp_path) == tmp_path / "job" / "chk-10"


def test_a_worker_is_a_process_that_runs_steps_and_not_the_daemon_before_it():
    early = "python -m tallystick.spark.early_daemon"
    tree = [
        Process(10, 1, "python -m count_job"),
        Process(11, 10, f"{early} /tmp/socket 10"),
        Process(12, 10, "java pyspark-shell"),
        Process(13, 12, f"{early} pyspark.worker"),
        Process(14, 11, f"{early} /tmp/socket 10"),
    ]
    assert python_workers(tree) == []

    workers = [Process(pid, 14, f"{early} /tmp/socket 10") for pid in (15, 16)]
    assert python_workers([*tree, *workers]) == workers

    of_spark = [Process(17, 13, f"{early} pyspark.worker")]
    assert python_workers([*tree, *of_spark]) == of_spark
