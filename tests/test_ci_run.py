"""The script of CI: nothing is skipped there for want of a program."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
NEEDED = {"promtool", "prometheus", "chromedriver", "cc"}


def ci(
    folder: Path, *programs: str, apt_get: str, make: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the script where there are only these programs, which note their names."""
    for name in ("bash", "dirname"):
        (folder / name).symlink_to(shutil.which(name) or name)
    does_by_name = {**dict.fromkeys(programs, ""), "make": make, "apt-get": apt_get}
    for name, does in does_by_name.items():
        program = folder / name
        program.write_text(f'#!{folder}/bash\necho {name} "$@"\n{does}\n')
        program.chmod(0o755)
    return subprocess.run(
        [folder / "bash", SCRIPT],
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("is_missing", [NEEDED, {"prometheus"}, {"chromedriver", "cc"}], ids=sorted)
@pytest.mark.parametrize("apt_get", ["exit 100", "exit 0"])
def test_it_fails_and_says_why_where_a_program_cannot_be_had(tmp_path, is_missing, apt_get):
    done = ci(tmp_path, *(NEEDED - is_missing), apt_get=apt_get)

    assert done.returncode == 1
    assert "make" not in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("FAILED: not found: ")
    assert set(last.partition(" - ")[0].split()[3:]) == is_missing


def test_it_installs_what_is_missing_and_goes_on(tmp_path):
    wanted = " ".join(str(tmp_path / name) for name in NEEDED)
    script = f"[ $1 = update ] || for each in {wanted}; do ln -s {tmp_path}/make $each; done"
    (tmp_path / "ln").symlink_to(shutil.which("ln") or "ln")

    done = ci(tmp_path, apt_get=script)

    assert done.returncode == 0, done.stderr
    targets = [line for line in done.stdout.splitlines() if line.startswith("make ")]
    assert targets[0] == "make setup"
    beside = ("audit", "check", "classes", "sbom", "sim SEEDS=100")
    assert sorted(targets[1:-1]) == [f"make {target}" for target in beside]
    assert targets[-1] == "make test ARGS=--reruns 1 -raR"


def test_it_installs_nothing_where_all_is_there(tmp_path):
    done = ci(tmp_path, *NEEDED, apt_get="exit 100")

    assert done.returncode == 0, done.stderr
    assert "apt-get" not in done.stdout


@pytest.mark.parametrize("target", ["setup", "check", "classes", "audit", "sbom", "sim", "test"])
def test_it_fails_with_any_of_its_parts(tmp_path: Path, target: str) -> None:
    """Also where that runs beside another one; the tests do not begin then."""
    make = f'if [ "$1" = {target} ]; then exit 2; fi'
    done = ci(tmp_path, *NEEDED, apt_get="", make=make)

    assert done.returncode != 0
    assert ("make test" in done.stdout) == (target == "test")
    assert (f"make {target}" in done.stderr) == (target not in ("setup", "test"))
