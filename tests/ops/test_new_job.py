"""`tallystick new`: what it makes passes its own test, and is what the examples are made of."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tallystick.__main__ import app
from tallystick.ops.new_job import FILES


def made(folder: Path) -> str:
    ran = CliRunner().invoke(app, ["new", str(folder)])
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_a_new_job_passes_its_test(tmp_path: Path) -> None:
    words = made(tmp_path / "my-job")
    pytest_words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(
        [sys.executable, *pytest_words], cwd=tmp_path / "my-job", capture_output=True, text=True
    )

    assert ran.returncode == 0, ran.stdout
    assert "1 passed" in ran.stdout
    assert {path.name for path in (tmp_path / "my-job").iterdir()} >= {*FILES}
    assert 'ts.Pipeline("my-job")' in (tmp_path / "my-job" / "pipeline.py").read_text()
    assert "python -m pytest" in words


def test_linters_find_nothing_in_a_new_job(tmp_path: Path) -> None:
    made(tmp_path / "my-job")
    scripts = Path(sysconfig.get_path("scripts"))
    for linter in (
        [scripts / "ruff", "check", "--isolated", "--select", "E,F,I,UP,B", "--line-length", "100"],
        [scripts / "ruff", "format", "--isolated", "--check", "--line-length", "100"],
    ):
        # In the folder, as its owner calls them: what is ours there is told by the place.
        ran = subprocess.run(linter, cwd=tmp_path / "my-job", capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout
    dockerfile = tmp_path / "my-job" / "Dockerfile"
    ran = subprocess.run([scripts / "hadolint", dockerfile], capture_output=True, text=True)
    assert ran.stdout + ran.stderr == ""


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    ran = CliRunner().invoke(app, ["new", str(tmp_path)])

    assert ran.exit_code == 1
    assert "README.md exists already: nothing was written" in ran.output
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize("name", ["my job", "-job", "job!"])
def test_the_name_is_one_that_a_pipeline_can_have(tmp_path: Path, name: str) -> None:
    ran = CliRunner().invoke(app, ["new", str(tmp_path / name)])

    assert ran.exit_code == 1
    assert "cannot be a pipeline's name" in ran.output
