"""The table of versions in docs/deploying.md shows what ran, and names what did not."""

import pytest

from tests import matrix
from tests.matrix import COLUMNS, KAFKA_VERSIONS, PACKAGES, PYTHONS, SPARKS

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
    for version in (*SPARKS, *KAFKA_VERSIONS, *PYTHONS, *PACKAGES):
        assert (version in shown) != (f" {version}" in f" {untested}"), version


def test_no_row_is_of_what_did_not_run() -> None:
    assert all(any(shown) for _, *shown in rows())
    assert "not run" not in "".join(cell for row in rows() for cell in row)


def test_a_part_that_failed_and_one_that_did_not_run_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = {cell.key: dict(PASSED) for cell in matrix.cells()}
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


def test_only_what_is_asked_for_is_held_at_its_lowest_version() -> None:
    solved = "anyio==4.16.0\nprometheus-client==0.21.0\nstarlette==0.46.0\n"

    pins = matrix.direct_pins(solved, ["starlette", "Prometheus_Client"])
    assert pins == "prometheus-client==0.21.0\nstarlette==0.46.0\n"


def test_results_of_before_are_those_of_the_packages_that_pip_resolves() -> None:
    assert matrix.DEFAULT.key in matrix.kept()
    assert {cell.packages for cell in matrix.cells()} == {"", *PACKAGES}
