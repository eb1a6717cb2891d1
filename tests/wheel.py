"""Build the wheel and use it where the repository is not: `python -m tests.wheel [folder]`.

The wheel is installed with its extras `demo` and `java` into a new virtual environment in a
temporary folder; there `tallystick --help` and a short demo run, with a path that has none of our
files. The wheel stays in `dist`, or in the folder that is named.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
RECORDS = 3_000
STEP_TIMEOUT_S = 900


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside of the repository, and return what it prints."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=own, stdout=subprocess.PIPE, text=True, timeout=STEP_TIMEOUT_S
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}: exit code {done.returncode}"
    return done.stdout


def build(source: Path, into: Path) -> Path:
    """Build the wheel of what git knows in a folder, and return its path."""
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    names = run(*listed, "tallystick", "pyproject.toml", "README.md", cwd=source).splitlines()
    with TemporaryDirectory(prefix="tallystick-source-") as copy:
        for name in names:  # a `build` folder of earlier times would put removed modules back
            if (source / name).exists():
                target = Path(copy, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((source / name).read_bytes())
        run(sys.executable, "-m", "build", "--wheel", "--outdir", into, ".", cwd=Path(copy))
    wheel = max(into.glob("tallystick-*.whl"), key=lambda path: path.stat().st_mtime_ns)
    packed = set(ZipFile(wheel).namelist())
    missing = [name for name in names if name.startswith("tallystick/") and name not in packed]
    missing = [name for name in missing if (source / name).exists()]
    assert not missing, f"not in the wheel; see package-data in pyproject.toml: {missing}"
    return wheel


def use(wheel: Path) -> dict[str, int]:
    """Install a wheel by itself, run its demo, and return the demo's last line."""
    with TemporaryDirectory(prefix="tallystick-wheel-") as name:
        folder = Path(name)
        run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
        programs = folder / "venv" / "bin"
        quiet = ("install", "--quiet", "--disable-pip-version-check")
        run(programs / "python", "-m", "pip", *quiet, f"{wheel}[demo,java]", cwd=folder)
        where = "import tallystick; print(tallystick.__file__)"
        found = run(programs / "python", "-c", where, cwd=folder).strip()
        assert Path(found).is_relative_to(folder), f"{found} is not of the wheel"
        assert "savepoint" in run(programs / "tallystick", "--help", cwd=folder)
        demo = ("demo", "--records", str(RECORDS), "--kills", "1")
        lines = run(programs / "tallystick", *demo, cwd=folder).splitlines()
    verdict: dict[str, int] = json.loads(lines[-1])
    return verdict


def main() -> None:
    """Build, use, and say where the wheel is."""
    into = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve()
    wheel = build(ROOT, into)
    verdict = use(wheel)
    print(json.dumps({"wheel": str(wheel), **verdict}))


if __name__ == "__main__":
    main()
