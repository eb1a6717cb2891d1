"""Build the wheels and use them where the repository is not: `python -m tests.wheel [folder]`.

Each wheel is built from its sdist, so that this is whole too, by a Python that has what both ask
for and nothing of ours. Tallystick's is installed with its
extras `demo` and `java` into a new virtual environment in a temporary folder, which takes the wheel
of the tools from beside it; there `tallystick --help` and a short demo run, with a path that has
none of our files. Sdists and wheels stay in `dist`, or in the folder that is named. Tests do the
same by pipx and uvx, and in short: the two wheels alone are installed, beside the packages that are
there.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import tallystick
from tallystick.host import kernel_cache
from tests.spark import jvm

ROOT = Path(__file__).parents[1]
PACKAGE = Path(tallystick.__file__).parent
RECORDS = 3_000
STEP_TIMEOUT_S = 900
PIP = ("pip", "install", "--quiet", "--disable-pip-version-check")
EXTRAS = "[demo,java]"
OURS = ("PYTHONPATH", "PYSPARK_PYTHON")
"""Variables that lead to our Python; a test of Spark in this process has set the second one.

Workers of the demo would be ours, then: not of the wheel, and without kernels.
"""

Command = tuple[str | Path, ...]
Way = Callable[[Path, Path], Command]
"""Takes a package's wheel and an empty folder, prepares, and returns how `tallystick` is called."""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside of the repository, and return what it prints."""
    own = {name: value for name, value in os.environ.items() if name not in OURS}
    done = subprocess.run(
        command, cwd=cwd, env=own, stdout=subprocess.PIPE, text=True, timeout=STEP_TIMEOUT_S
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}: exit code {done.returncode}"
    return done.stdout


def build(source: Path, into: Path) -> Path:
    """Build sdists and wheels of the package and its tools; return the path of its wheel."""
    with TemporaryDirectory(prefix="tallystick-build-") as folder:
        python = _new_python(Path(folder))
        files = [project / "pyproject.toml" for project in (source, source / "tools")]
        systems = [tomllib.loads(file.read_text())["build-system"] for file in files]
        asked_for = {requirement for system in systems for requirement in system["requires"]}
        ours = f"build=={version('build')}"
        run(*_pip_of(python), ours, *sorted(asked_for), cwd=Path(folder))
        _build(source / "tools", into, "tallystick_tools", python)
        return _build(source, into, "tallystick", python)


def tools_beside(wheel: Path) -> Path:
    """Return the path of the tools' wheel that was built with a package's."""
    return wheel.with_name(wheel.name.replace("tallystick", "tallystick_tools", 1))


def sdist_beside(wheel: Path) -> Path:
    """Return the path of the sdist that a wheel was built from."""
    return wheel.with_name(wheel.name.replace("-py3-none-any.whl", ".tar.gz"))


def _build(source: Path, into: Path, package: str, python: Path) -> Path:
    """Build the sdist of what git knows in a folder, and from that the wheel; return its path."""
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    beside = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")
    names = run(*listed, package, *beside, cwd=source).splitlines()
    with TemporaryDirectory(prefix="tallystick-source-") as copy:
        for name in names:  # a `build` folder of earlier times would put removed modules back
            if (source / name).exists():
                target = Path(copy, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((source / name).read_bytes())
        run(python, "-m", "build", "--no-isolation", "--outdir", into, ".", cwd=Path(copy))
    wheel = max(into.glob(f"{package}-*.whl"), key=lambda path: path.stat().st_mtime_ns)
    packed = set(ZipFile(wheel).namelist())
    missing = [name for name in names if name.startswith(f"{package}/") and name not in packed]
    missing = [name for name in missing if (source / name).exists()]
    assert not missing, f"not in the wheel; see package-data in pyproject.toml: {missing}"
    return wheel


def by_pip(wheel: Path, folder: Path) -> Command:
    """Install the wheels, and all that they need, into a new virtual environment."""
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    programs = folder / "venv" / "bin"
    run(programs / "python", "-m", *PIP, *links_to(wheel), f"{wheel}{EXTRAS}", cwd=folder)
    return (programs / "tallystick",)


def by_pipx(wheel: Path, folder: Path) -> Command:
    """Let pipx do it, as `pipx run --spec WHEEL tallystick`."""
    pipx = _tool("pipx", folder)
    settings = ("env", f"PIPX_HOME={folder / 'pipx'}", f"PIPX_DEFAULT_PYTHON={sys.executable}")
    options = ("--no-cache", f"--pip-args={' '.join(links_to(wheel))}")
    return (*settings, pipx, "run", *options, "--spec", f"{wheel}{EXTRAS}", "tallystick")


def by_uvx(wheel: Path, folder: Path) -> Command:
    """Let uvx do it, as `uvx --from WHEEL tallystick`."""
    uvx = _tool("uv", folder).with_name("uvx")
    options = ("--no-cache", "--python", sys.executable, *links_to(wheel))
    return (uvx, *options, "--from", f"{wheel}{EXTRAS}", "tallystick")


def links_to(wheel: Path) -> tuple[str, str]:
    """Return the options of pip and uv that find the tools' wheel beside a package's."""
    return "--find-links", str(wheel.parent)


def _tool(name: str, folder: Path) -> Path:
    """Install a program from the package index, and return its path."""
    run(sys.executable, "-m", "venv", folder / "tool", cwd=folder)
    programs = folder / "tool" / "bin"
    run(programs / "python", "-m", *PIP, name, cwd=folder)
    return programs / name


def beside_packages(wheel: Path, folder: Path) -> Command:
    """Install the two wheels alone; packages and compiled kernels are those of this environment."""
    python = _new_python(folder)
    run(*_pip_of(python), "--no-deps", "--no-compile", wheel, tools_beside(wheel), cwd=folder)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    installed = Path(site.strip(), "tallystick")
    installed.with_name("beside.pth").write_text(sysconfig.get_path("purelib"))
    _take_kernels(installed, folder / "kernels")
    # For the JVM that reads the state, a dozen rows: with the archive and no code made for them.
    interpreted = (f"-D{name}={value}" for name, value in jvm.INTERPRETED.items())
    options = " ".join((jvm.options(), *interpreted))
    return ("env", f"SPARK_SUBMIT_OPTS={options}", python.with_name("tallystick"))


def _new_python(folder: Path) -> Path:
    """Return the Python of a new environment, which has nothing, pip neither."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    return folder / "venv" / "bin" / "python"


def _pip_of(python: Path) -> Command:
    """Return how this environment's pip installs into another."""
    return (sys.executable, "-m", "pip", "--python", python, *PIP[1:])


def _take_kernels(installed: Path, into: Path) -> None:
    """Copy this environment's compiled kernels for the same sources elsewhere.

    numba finds them by the sources' folder and time of change. Without them the demo compiles all.
    """
    into.mkdir(mode=0o700, exist_ok=True)
    for source in PACKAGE.rglob("*.py"):
        status = source.stat()
        copy = installed / source.relative_to(PACKAGE)
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    for folder in filter(Path.is_dir, PACKAGE.rglob("*")):
        ours = kernel_cache.directory_in_use() / _numba_name(folder)
        if ours.exists():
            theirs = into / _numba_name(installed / folder.relative_to(PACKAGE))
            shutil.copytree(ours, theirs)


def _numba_name(folder: Path) -> str:
    """Return what numba calls the cache of the modules in a folder."""
    return f"{folder.name}_{hashlib.sha1(str(folder).encode()).hexdigest()}"


def use(wheel: Path, way: Way) -> dict[str, int]:
    """Install a wheel in some way, run its demo, and return the demo's last line."""
    with TemporaryDirectory(prefix="tallystick-wheel-") as name:
        folder = Path(name).resolve()
        kernels = f"NUMBA_CACHE_DIR={folder / 'kernels'}"
        demo = ("demo", "--records", str(RECORDS), "--kills", "1")
        lines = run("env", kernels, *way(wheel, folder), *demo, cwd=folder).splitlines()
        for python in folder.glob("venv/bin/python"):
            for package in ("tallystick", "tallystick_tools"):
                where = f"import {package}; print({package}.__file__)"
                path = run(python, "-c", where, cwd=folder).strip()
                assert Path(path).is_relative_to(folder), f"{path} is not of the wheel"
            assert "savepoint" in run(python.with_name("tallystick"), "--help", cwd=folder)
    verdict: dict[str, int] = json.loads(lines[-1])
    return verdict


def main() -> None:
    """Build, use, and print where the wheels are."""
    into = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve()
    wheel = build(ROOT, into)
    verdict = use(wheel, by_pip)
    print(json.dumps({"wheel": str(wheel), "tools": str(tools_beside(wheel)), **verdict}))


if __name__ == "__main__":
    main()
