"""The examples, run as a user would.

Each compares its output with its input by other means than the package. Its last line is compared
with counts of the data, so that a comparison of nothing with nothing does not pass.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.broker, pytest.mark.spark]

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
LINES_MAX = 80
LAST_LINES = {
    "stateless": "985 of 5000 flights were late",
    "keyed_count": "5000 flights to 94 destinations",
    "stateful_processor": "the longest streaks of 15 carriers",
    "foreach_batch": "late flights of 3 airports",
    "postgres_and_files": "5000 flights in table and files",
    "deduplication": "5000 of 8000 records are new",
    "sessions": "1358 busy times of 5000 flights",
    "several_sinks": "4969 flights in each of 3 sinks",
}


def run_program(program: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(ROOT), "TALLYSTICK_STATE_DIR": str(folder / "state")}
    return subprocess.run(
        [sys.executable, program],
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("name", LAST_LINES)
def test_example_writes_what_it_must(name: str, tmp_path: Path) -> None:
    run = run_program(EXAMPLES / f"{name}.py", tmp_path)

    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == f"{LAST_LINES[name]}: as expected"


def test_the_first_program_of_the_readme_runs_as_printed(tmp_path: Path) -> None:
    """In an empty folder, with nothing but the environment of `make setup`."""
    readme = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"<!-- first program -->\n```python\n(.*?)```", readme, re.DOTALL)
    promised = re.findall(r'`(\{"dest":.*?\})`', readme)
    path = tmp_path / "first.py"
    path.write_text(program.replace("/tmp/", f"{tmp_path}/"))

    run = run_program(path, tmp_path)

    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == sorted(promised)


def test_each_example_is_short_and_listed() -> None:
    texts = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert texts.keys() == {*LAST_LINES, "playground"}
    assert all(text.count("\n") <= LINES_MAX for text in texts.values())
    listed = re.findall(r"^\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(LAST_LINES)
