"""Reports: the same facts as text, for programs, and as a page."""

import json
from pathlib import Path

import pytest

from tallystick_tools.chaos.cluster import OutputRecord
from tallystick_tools.chaos.report import as_json, as_text, headline, timeline, write_html
from tallystick_tools.chaos.run import InjectedFault, Job, Run
from tallystick_tools.chaos.schedule import Fault
from tallystick_tools.chaos.verify import Question, drop_unlike_state, judged

JOB = Job(("python", "late.py"), {"in": ()}, ("out",))
FAULTS = tuple(Fault(kind, 0.1, 1.0, 0.5) for kind in ("driver", "worker"))
ASKED = Question(JOB, FAULTS, "--seed 7 --kills 2")


def record(offset, value):
    return OutputRecord("out", 0, offset, b"<key>", value)


def a_run(*values, state=None, problems=()):
    records = [record(*entry) for entry in enumerate(values)]
    return Run(
        records,
        state,
        [
            InjectedFault(FAULTS[0], 2.0, 2.5, "process <7>"),
            InjectedFault(FAULTS[1], 5.0, 5.1, ""),
        ],
        [(1.0, 10), (3.0, 20)],
        {output_record.place: 4.0 for output_record in records},
        starts=2,
        problems=list(problems),
        seconds=8.0,
    )


@pytest.fixture
def exact():
    return judged(ASKED, a_run(b"1", b"2"), a_run(b"1", b"2"))


@pytest.fixture
def broken():
    return judged(ASKED, a_run(b"1"), a_run(b"1", b"<2>"))


def test_an_exact_run_says_what_it_went_through(exact):
    assert exact.is_exact
    assert headline(exact) == (
        "EXACT: 2 records of output are as undisturbed, through 1 faults (1 had nothing to hit) "
        "and 2 starts"
    )
    assert as_text(exact).splitlines()[-1] == "the same schedule again: --seed 7 --kills 2"


def test_a_difference_is_shown_with_the_faults_around_it(broken):
    assert not broken.is_exact
    assert headline(broken).startswith("NOT EXACT: 1 added")
    text = as_text(broken)
    assert "out-0 at offset 1, key <key>: <2>" in text
    assert "at 2.0 s: driver, process <7>" in text
    assert "worker" not in text


def test_the_smallest_schedule_is_named_with_the_file_that_repeats_it(broken):
    broken.smallest, broken.smallest_file = FAULTS[:1], Path("logs/smallest.json")
    text = as_text(broken)
    assert "found to fail: driver\n" in text
    assert text.endswith("the same schedule again: --schedule logs/smallest.json")


def test_the_report_for_programs_has_all_of_it(broken):
    report = json.loads(as_json(broken))
    assert (report["exact"], report["again"]) == (False, "--seed 7 --kills 2")
    assert [(fault["kind"], fault["hit"]) for fault in report["faults"]] == [
        ("driver", "process <7>"),
        ("worker", ""),
    ]
    assert report["progress"] == [[1.0, 10], [3.0, 20]]


def test_the_page_escapes_what_is_not_ours(broken, tmp_path):
    page = tmp_path / "report.html"
    write_html(broken, page)
    text = page.read_text()
    assert "&lt;2&gt;" in text
    assert "&lt;key&gt;" in text
    assert "<2>" not in text
    assert "<key>" not in text


def test_the_timeline_has_a_mark_for_each_fault(broken):
    picture = timeline(broken)
    assert picture.count("<rect") == 2
    assert picture.count("class=missed") == 1


def test_state_is_a_difference_unless_undisturbed_runs_differ_in_it():
    expected, disturbed = a_run(b"1", state={"s": ["a=1"]}), a_run(b"1", state={"s": ["a=2"]})
    assert len(judged(ASKED, expected, disturbed).problems) == 2
    drop_unlike_state(expected, a_run(b"1", state={"s": ["a=1"]}))
    assert not judged(ASKED, expected, disturbed).is_exact
    drop_unlike_state(expected, a_run(b"1", state={"s": ["a=3"]}))
    assert judged(ASKED, expected, disturbed).is_exact
    assert judged(ASKED, expected, disturbed).compared_state is None


def test_a_problem_makes_a_run_not_exact():
    verdict = judged(ASKED, a_run(b"1"), a_run(problems=["nothing has moved for 99 s"]))
    assert headline(verdict) == "NOT EXACT: 1 other problem, through 1 faults"
    assert "nothing has moved for 99 s" in as_text(verdict)
