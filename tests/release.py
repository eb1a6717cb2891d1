"""Makes what would be published, and says what a release lacks: `python -m tests.release`.

Sdists and wheels of both distributions are built into an empty `dist`, judged by twine, and used in
bare environments: the wheels as `tests.wheel` does, the sdists with no extra. Exit code 1: there is
something to be done before they are published; it is printed.

`python -m tests.release version 0.2.0` writes a version to all places that have it.
"""

import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.wheel import PIP, ROOT, build, by_pip, run, sdist_beside, tools_beside, use

WITH_VERSION = (
    "pyproject.toml",
    "tools/pyproject.toml",
    "docs/install.md",
    "docs/deploying.md",
    "deploy/Dockerfile",
)
HEADING = re.compile(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", re.MULTILINE)
"""A version in CHANGELOG.md, and its day; `Unreleased` has none."""


def version_of(root: Path) -> str:
    """Return the version that pyproject.toml states."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version


def set_version(root: Path, version: str) -> None:
    """Write a version to both pyproject.toml, and to names of wheels elsewhere."""
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version), f"no version: {version!r}"
    old = re.escape(version_of(root))
    places = re.compile(rf'(?<=^version = "){old}|(?<===){old}|(?<=tallystick-){old}', re.MULTILINE)
    for name in WITH_VERSION:
        text = (root / name).read_text()
        (root / name).write_text(places.sub(version, text))


def lacking(root: Path) -> Iterator[str]:
    """Yield what has to be done before this version is published."""
    version = version_of(root)
    if (version, True) not in [(name, bool(day)) for name, day in headings(root)]:
        yield f"CHANGELOG.md has no heading `## [{version}] - YYYY-MM-DD`: give [Unreleased] one"
    if changed := run("git", "status", "--short", cwd=root):
        yield f"not committed:\n{changed}"


def headings(root: Path) -> list[tuple[str, str]]:
    """Return version and day of each section of the changelog."""
    return HEADING.findall((root / "CHANGELOG.md").read_text())


def install_sdists(wheel: Path) -> str:
    """Install both sdists in a bare environment, and return what `tallystick --version` prints."""
    with TemporaryDirectory(prefix="tallystick-sdist-") as name:
        folder = Path(name)
        run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
        python = folder / "venv" / "bin" / "python"
        sdists = [sdist_beside(path) for path in (wheel, tools_beside(wheel))]
        run(python, "-m", *PIP, *sdists, cwd=folder)
        return run(python.with_name("tallystick"), "--version", cwd=folder)


def main() -> None:
    """Build, judge, use; end with an error if something is lacking."""
    match sys.argv[1:]:
        case ["version", version]:
            set_version(ROOT, version)
        case []:
            into = ROOT / "dist"
            shutil.rmtree(into, ignore_errors=True)
            wheel = build(ROOT, into)
            files = sorted(into.iterdir())
            run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=ROOT)
            assert install_sdists(wheel) == f"tallystick {version_of(ROOT)}\n"
            use(wheel, by_pip)
            print(*(f"ready: {path}" for path in files), sep="\n")
            if steps := [*lacking(ROOT)]:
                sys.exit("\n".join(["before it is published:", *steps]))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
