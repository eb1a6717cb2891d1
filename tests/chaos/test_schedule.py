"""Schedules of faults: the same from the same seed, and only of what can happen."""

from collections import Counter

import pytest

from tallystick.errors import OptionError
from tallystick_tools.chaos.schedule import KINDS, Fault, as_json, kinds_for, plan, read_schedule
from tallystick_tools.chaos.verify import SHRINK_RUNS_MAX, question_of, shrink


def test_a_seed_repeats_its_schedule_and_another_does_not():
    kinds = kinds_for(3, (), uses_parallelism=True)
    assert plan(20, 7, kinds) == plan(20, 7, kinds) != plan(20, 8, kinds)


def test_each_kind_comes_about_as_often_as_any_other():
    kinds = kinds_for(3, (), uses_parallelism=True)
    counts = Counter(fault.kind for fault in plan(5 * len(kinds) + 3, 1, kinds))
    assert counts.keys() == set(kinds)
    assert {*counts.values()} <= {5, 6}


def test_the_first_fault_waits_for_the_program():
    assert not any(plan(1, seed, ("driver",))[0].at_once for seed in range(50))
    assert any(fault.at_once for fault in plan(50, 1, ("driver",)))


@pytest.mark.parametrize(
    ("brokers", "named_kinds", "uses_parallelism", "named"),
    [
        (1, ["dirver"], False, "'dirver'"),
        (1, ["broker"], False, "--brokers 3"),
        (3, ["parallelism"], False, "{parallelism}"),
        (3, ["clock"], False, "apt-get install gcc"),
    ],
)
def test_what_cannot_happen_is_refused_by_name(brokers, named_kinds, uses_parallelism, named):
    with pytest.raises(OptionError, match="fault") as refused:
        kinds_for(brokers, named_kinds, uses_parallelism)
    assert named in str(refused.value)


def test_one_broker_is_never_killed_and_executors_only_on_request():
    unlikely = {"broker", "clock", "executor", "object-store", "parallelism"}
    assert set(KINDS) - set(kinds_for(1, (), False)) == unlikely
    assert set(KINDS) - set(kinds_for(3, (), True)) == {"clock", "executor", "object-store"}
    assert set(KINDS) - set(kinds_for(3, (), True, True)) == {"clock", "executor"}
    assert set(KINDS) - set(kinds_for(3, (), True, True, True)) == {"executor"}
    assert kinds_for(1, ["executor", "driver"], False) == ("driver", "executor")


def test_a_schedule_is_written_down_and_read_back(tmp_path):
    planned = plan(9, 3, tuple(KINDS))
    path = tmp_path / "schedule.json"
    path.write_text(as_json(planned))
    assert read_schedule(path) == planned


@pytest.mark.parametrize(
    "text",
    [
        '[{"kind": "flood", "delay_s": 0, "length_s": 0, "pick": 0}]',
        '[{"kind": "driver", "delay_s": "soon", "length_s": 0, "pick": 0}]',
        '{"exact": true}',
        "[]",
        None,
    ],
)
def test_a_file_that_is_no_schedule_is_refused_by_name(text, tmp_path):
    path = tmp_path / "schedule.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match=r"schedule.json is no schedule"):
        read_schedule(path)


def test_a_question_is_asked_with_a_schedule_of_a_file(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(as_json(faults_called(["driver", "broker"])))
    posed = question_of(["late"], inputs={}, outputs=["out"], schedule=path, brokers=3)
    assert posed.faults == faults_called(["driver", "broker"])
    assert posed.again == f"--schedule {path}"
    with pytest.raises(OptionError, match="--brokers 3"):
        question_of(["late"], inputs={}, outputs=["out"], schedule=path)


def faults_called(kinds):
    return tuple(Fault(kind, 0.0, 1.0, 0.5) for kind in kinds)


def test_a_schedule_is_shortened_to_the_faults_that_matter():
    names = []

    def fails(faults, name):
        names.append(name)
        kinds = [fault.kind for fault in faults]
        return "driver" in kinds and "zombie" in kinds

    smallest = shrink(faults_called(["pause", "driver", "slow", "worker", "zombie", "disk"]), fails)
    assert [fault.kind for fault in smallest] == ["driver", "zombie"]
    assert len(names) == len({*names}) <= SHRINK_RUNS_MAX


def test_shortening_ends_where_nothing_smaller_fails():
    runs = []
    whole = faults_called(["pause"] * 8)
    assert shrink(whole, lambda faults, name: runs.append(name)) == whole
    assert len(runs) <= SHRINK_RUNS_MAX
