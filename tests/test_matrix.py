"""The table of versions in docs/deploying.md shows what ran, and names what did not."""

import pytest

from tests import matrix
from tests.matrix import COLUMNS, KAFKA_VERSIONS, PYTHONS, SPARKS

PASSED = dict.fromkeys(COLUMNS, "passed")


def rows() -> list[list[str]]:
    """The cells of each row, without the heading."""
    lines = [line for line in matrix.summary().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line[1:-1].split(" |")] for line in lines[2:]]


def test_each_version_is_in_the_table_or_named_below_it() -> None:
    shown = [version for first, *_ in rows() for version in first.replace(",", "").split()[1:]]
    _, _, below = matrix.summary().partition("Nothing ran yet with ")
    untested = below.partition(".\n")[0]

    assert len(shown) == len(set(shown))
    for version in (*SPARKS, *KAFKA_VERSIONS, *PYTHONS):
        assert (version in shown) != (f" {version}" in f" {untested}"), version


def test_no_row_is_of_what_did_not_run() -> None:
    assert all(any(shown) for _, *shown in rows())
    assert "not run" not in "".join(cell for row in rows() for cell in row)


def test_a_part_that_failed_and_one_that_did_not_run_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = {"/".join(vars(cell).values()): dict(PASSED) for cell in matrix.cells()}
    monkeypatch.setattr(matrix, "kept", lambda: results)
    assert {tuple(shown) for _, *shown in rows()} == {("all", "", "")}
    assert "yet" not in matrix.summary()

    results[f"4.1/{KAFKA_VERSIONS[-1]}/3.11"]["kill"] = "failed: 1: KafkaException"
    del results[f"4.0/{KAFKA_VERSIONS[-1]}/3.11"]
    del results[f"4.3/{KAFKA_VERSIONS[-1]}/3.12"]["demo"]

    by_name = {name: shown for name, *shown in rows()}
    assert by_name["PySpark 4.1"][1:] == ["", "kill"]
    assert by_name["PySpark 4.2, 4.3"] == ["all", "", ""]
    assert "demo" not in by_name["Python 3.12"][0]
    assert "Nothing ran yet with PySpark 4.0." in matrix.summary()
