"""Rows of files as output: what readers see, and nothing while a commit is under way."""

import json

import pytest

from tallystick.errors import OptionError
from tallystick_tools.chaos.cluster import NO_OFFSET, OutputRecord
from tallystick_tools.chaos.compare import differences
from tallystick_tools.chaos.files import ParquetFiles
from tallystick_tools.chaos.verify import question_of
from tests.files.file_sinks import opened, place, prepared, rows


def values(records):
    return [(record.topic, json.loads(record.value)["n"]) for record in records]


def test_rows_are_read_once_their_commit_is_over(tmp_path):
    assert ParquetFiles(tmp_path / "files").look() == []
    sink = opened(tmp_path / "files")
    first = prepared(sink, place(1), rows(0, 3))
    second = prepared(sink, place(2), rows(3, 5))
    assert ParquetFiles(tmp_path / "files").look() is None
    for file in first:
        sink.commit(file)
    with pytest.raises(TimeoutError, match="drafts"):
        ParquetFiles(tmp_path / "files").rows()
    for file in second:
        sink.commit(file)
    assert values(ParquetFiles(tmp_path / "files").rows()) == [("files", n) for n in range(5)]


def test_folders_of_partitions_are_part_of_a_row(tmp_path):
    sink = opened(tmp_path, partition_by=["dest"])
    for file in prepared(sink, place(), rows(0, 2)):
        sink.commit(file)
    output = ParquetFiles(tmp_path).rows()
    assert sorted(values(output)) == [("files/dest=ORD", 0), ("files/dest=a%2Fb", 1)]


def row(value):
    return OutputRecord("files", -1, NO_OFFSET, None, value)


@pytest.mark.parametrize("comparison", ["sequence", "rows", "final"])
def test_rows_of_files_are_compared_in_any_order(comparison):
    in_topic = OutputRecord("out", 0, 0, b"k", b"1")
    expected = [in_topic, row(b"1"), row(b"2")]
    assert differences(expected, [in_topic, row(b"2"), row(b"1")], comparison) == []
    (lost,) = differences(expected, [in_topic, row(b"2")], comparison)
    assert str(lost) == "files, key (none): lost 1"
    (added,) = differences(expected, [*expected, row(b"2")], comparison)
    assert (added.kind, added.topic) == ("added", "files")


def test_a_program_without_output_cannot_be_judged():
    with pytest.raises(OptionError, match="output"):
        question_of(["late"], inputs={})
    assert question_of(["late"], inputs={}, writes_files=True).job.outputs == ()
