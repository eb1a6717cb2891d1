"""The dependencies of both wheels, all extras included, as installed: `audit` or list as `sbom`.

`python -m tests.dependencies audit` asks the database of OSV which of these versions has a known
vulnerability. Exit code 1: some have; 2: the database cannot be reached, which in CI is only said.
`python -m tests.dependencies sbom` writes `dist/tallystick-VERSION.cdx.json`, as CycloneDX has it.

Packages for tests, checks and pages are in neither: no user gets them.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECTS: list[dict[str, Any]] = [
    tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    for folder in (ROOT, ROOT / "tools")
]
PROJECT = PROJECTS[0]
ONLY_FOR_US = {"test", "check", "docs"}
TIMEOUT_S = 300
NOT_REACHED = ("ConnectionError", "ConnectTimeout", "ReadTimeout")
"""The names of errors at the end of what pip-audit says when the network is the reason."""
VULNERABLE, UNKNOWN = 1, 2


def wanted() -> Iterator[Requirement]:
    """Yield what both pyproject.toml ask for on behalf of users, but for each other."""
    own = {project["name"] for project in PROJECTS}
    for project in PROJECTS:
        extras = project["optional-dependencies"]
        lists = [project["dependencies"], *(extras[name] for name in extras.keys() - ONLY_FOR_US)]
        for requirement in (Requirement(text) for texts in lists for text in texts):
            if requirement.name not in own:
                yield requirement


def installed(requirements: Iterable[Requirement]) -> tuple[dict[str, str], list[str]]:
    """Return name and version of all that these need, and the names that are not installed."""
    waiting, seen = list(requirements), set[tuple[str, str]]()
    versions: dict[str, str] = {}
    missing = set[str]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        try:
            package = distribution(name)
        except PackageNotFoundError:
            missing.add(name)
            continue
        versions[name] = package.version
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                needs = map(Requirement, package.requires or ())
                waiting += [
                    need
                    for need in needs
                    if need.marker is None or need.marker.evaluate({"extra": extra})
                ]
    return dict(sorted(versions.items())), sorted(missing)


def audit(command: Sequence[str] = (sys.executable, "-m", "pip_audit")) -> int:
    """Ask the database, print its answer, and return the exit code."""
    versions, missing = installed(wanted())
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.writelines(f"{name}=={version}\n" for name, version in versions.items())
        listed.flush()
        done = subprocess.run(
            [
                *command,
                *("--requirement", listed.name, "--no-deps", "--disable-pip"),
                *("--vulnerability-service", "osv", "--progress-spinner", "off"),
                *("--format", "json"),
            ],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    about = f"{len(versions)} packages" + (f", without {', '.join(missing)}" if missing else "")
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode and any(word in last.partition(":")[0] for word in NOT_REACHED):
        print(f"NOT AUDITED: the database of vulnerabilities cannot be reached: {last}")
        return 0 if os.environ.get("CI") == "true" else UNKNOWN
    try:
        answers = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(f"pip-audit failed with {done.returncode}:\n{done.stderr}")
        return UNKNOWN
    vulnerable = {answer["name"]: answer["vulns"] for answer in answers if answer.get("vulns")}
    for name, problem in ((name, problem) for name, some in vulnerable.items() for problem in some):
        fixed = ", ".join(problem["fix_versions"]) or "no version"
        print(f"{name} {versions[canonicalize_name(name)]}: {problem['id']}, fixed in {fixed}")
    print(f"audited {about}: {len(vulnerable)} with a known vulnerability")
    return VULNERABLE if vulnerable else 0


def sbom(folder: Path) -> Path:
    """Write the list, and return its path."""
    versions, missing = installed(wanted())
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cyclonedx_py", "environment", sys.executable),
            *("--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library"),
            "--output-reproducible",
        ],
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=True,
    )
    document: dict[str, Any] = json.loads(done.stdout)
    own = document["metadata"]["component"]["bom-ref"]
    document["components"] = [
        component
        for component in document["components"]
        if versions.get(canonicalize_name(component["name"])) == component["version"]
    ]
    kept = {own, *(component["bom-ref"] for component in document["components"])}
    document["dependencies"] = [
        dependency | {"dependsOn": [to for to in dependency.get("dependsOn", ()) if to in kept]}
        for dependency in document["dependencies"]
        if dependency["ref"] in kept
    ]
    folder.mkdir(exist_ok=True)
    path = folder / f"{PROJECT['name']}-{PROJECT['version']}.cdx.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    without = f", without {', '.join(missing)}" if missing else ""
    print(f"{path}: {len(document['components'])} packages{without}")
    return path


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["audit"]:
            sys.exit(audit())
        case ["sbom"]:
            sbom(ROOT / "dist")
        case _:
            sys.exit(__doc__)
