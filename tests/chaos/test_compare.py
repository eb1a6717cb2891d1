"""Comparing outputs: what is lost, added, in another order or wrong, and what it comes from."""

import json

import pytest

from tallystick_tools.chaos.cluster import OutputRecord
from tallystick_tools.chaos.compare import differences, explain, state_differences


def output(*rows, topic="out", partition=0):
    return [
        OutputRecord(topic, partition, offset, key.encode(), json.dumps(value).encode())
        for offset, (key, value) in enumerate(rows)
    ]


BASE = output(("a", 1), ("b", 1), ("a", 2), ("b", 2))


@pytest.mark.parametrize("comparison", ["sequence", "rows", "final"])
def test_equal_outputs_have_no_differences(comparison):
    mixed = output(("b", 1), ("a", 1), ("b", 2), ("a", 2))  # other keys may come between
    assert differences(BASE, mixed, comparison) == []


@pytest.mark.parametrize(
    ("outputs", "kinds"),
    [
        (output(("a", 1), ("b", 1), ("a", 2)), {"sequence": ["lost"], "rows": ["lost"],
                                                "final": ["other value"]}),
        (output(("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 1)),
         {"sequence": ["added"], "rows": ["added"], "final": ["other value"]}),
        (output(("a", 2), ("b", 1), ("a", 1), ("b", 2)),
         {"sequence": ["other order"], "rows": [], "final": ["other value"]}),
        (output(("a", 1), ("a", 2)), {"sequence": ["lost", "lost"], "rows": ["lost", "lost"],
                                      "final": ["lost"]}),
        (output(("a", 2), ("b", 2)), {"sequence": ["lost", "lost"], "rows": ["lost", "lost"],
                                      "final": []}),
        (output(("a", 1), ("b", 1), ("a", 2), ("b", 2), ("c", 1)),
         {"sequence": ["added"], "rows": ["added"], "final": ["added"]}),
    ],
)  # fmt: skip
def test_each_comparison_finds_what_it_is_for(outputs, kinds):
    for comparison, expected in kinds.items():
        assert [
            difference.kind for difference in differences(BASE, outputs, comparison)
        ] == expected


def test_the_later_of_two_equal_rows_is_the_one_too_many():
    twice = output(("a", 1), ("b", 1), ("a", 2), ("b", 2), ("b", 1))
    (added,) = differences(BASE, twice, "rows")
    assert (added.topic, added.partition, added.offset, added.actual) == ("out", 0, 4, b"1")
    assert "out-0 at offset 4" in str(added)
    assert "key b" in str(added)


def test_a_row_in_another_topic_is_another_row():
    moved = BASE[:3] + output(("x", 0), ("x", 0), ("x", 0), ("b", 2), topic="other")[3:]
    assert [difference.kind for difference in differences(BASE, moved, "rows")] == ["lost", "added"]


def test_state_is_compared_by_step_and_key():
    assert state_differences({"s": ["a=1", "b=2"]}, {"s": ["b=2", "a=1"]}) == []
    sentences = state_differences({"s": ["a=1"], "t": ["x"]}, {"s": ["a=2"]})
    assert len(sentences) == 3
    assert all("'s'" in sentence or "'t'" in sentence for sentence in sentences)


def rows_of(*values):
    return output(*(("k", value) for value in values))


def test_a_field_that_changes_in_each_run_is_not_deterministic():
    first, again, disturbed = (
        rows_of({"id": 1, "at": at}, {"id": 2, "at": at + 1}) for at in (10, 20, 30)
    )
    text = explain(first, again, disturbed, "sequence")
    assert "not deterministic" in text
    assert "the field at" in text
    assert "id" not in text.split(":")[0]


def test_a_field_that_changes_with_faults_only_is_kept_in_the_process():
    first = rows_of({"id": 1, "n": 1}, {"id": 2, "n": 2})
    text = explain(first, first, rows_of({"id": 1, "n": 1}, {"id": 2, "n": 1}), "sequence")
    assert "global variable" in text
    assert "the field n" in text


def test_rows_too_many_with_faults_only_come_from_beside_the_epoch():
    first = rows_of({"id": 1})
    assert "not part of the epoch" in explain(first, first, first * 2, "sequence")


def test_rows_that_depend_on_epochs_are_compared_by_their_last():
    first, again = rows_of({"n": 2}), rows_of({"n": 1}, {"n": 2})
    text = explain(first, again, rows_of({"n": 2}, {"n": 2}), "sequence")
    assert "--compare final" in text


def test_values_that_are_no_json_are_explained_without_fields():
    first = [OutputRecord("out", 0, 0, None, b"\xff")]
    again = [OutputRecord("out", 0, 0, None, b"\xfe")]
    assert "not deterministic" in explain(first, again, again, "sequence")
