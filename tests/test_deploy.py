"""The form of what is in `deploy`; nothing here builds an image or reaches a cluster."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parent.parent / "deploy"
HADOLINT = Path(sysconfig.get_path("scripts"), "hadolint")
RULES = (
    "{extends: default, rules: {line-length: {max: 100}, comments: {min-spaces-from-content: 2}}}"
)


def complaints(*command: object) -> str:
    """Run a linter, and return what it finds; it ends with 0 only if that is nothing."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is (done.stdout + done.stderr == ""), done
    return done.stdout + done.stderr


def test_yamllint_finds_nothing() -> None:
    manifest = DEPLOY / "kubernetes.yaml"

    assert complaints(sys.executable, "-m", "yamllint", "--strict", "-d", RULES, manifest) == ""


def with_mistake(folder: Path, name: str, right: str, wrong: str) -> Path:
    """Return a copy of a file of ours in which one text is another."""
    text = (DEPLOY / name).read_text()
    assert right in text
    broken = folder / name
    broken.write_text(text.replace(right, wrong))
    return broken


def kubernetes_finds(manifest: Path) -> str:
    """Validate against the newest schemas that the validator brings."""
    return complaints(sys.executable, "-m", "kubernetes_validate", "--strict", "--quiet", manifest)


def test_the_manifest_is_what_kubernetes_takes() -> None:
    assert kubernetes_finds(DEPLOY / "kubernetes.yaml") == ""


@pytest.mark.parametrize(
    ("right", "wrong", "finding"),
    [
        ("containerPort: 9400", "containerPort: many", "'many' is not of type 'integer'"),
        ("runAsNonRoot:", "runAsNoRoot:", "runAsNoRoot"),  # no such property
    ],
)
def test_a_mistake_in_the_manifest_is_found(
    tmp_path: Path, right: str, wrong: str, finding: str
) -> None:
    broken = with_mistake(tmp_path, "kubernetes.yaml", right, wrong)

    assert finding in kubernetes_finds(broken)


def test_hadolint_finds_nothing() -> None:
    assert complaints(HADOLINT, DEPLOY / "Dockerfile") == ""


@pytest.mark.parametrize(
    ("right", "wrong", "rule"),
    [
        ("python:3.12-slim-trixie", "python", "DL3006"),  # no tag
        ("WORKDIR /tmp", "WORKDIR tmp", "DL3000"),
        (" \\\n    && rm -rf /var/lib/apt/lists/*", "", "DL3009"),
        ("chown pipeline", 'chown "pipeline', "SC1"),  # what ShellCheck finds
    ],
)
def test_a_mistake_in_the_dockerfile_is_found(
    tmp_path: Path, right: str, wrong: str, rule: str
) -> None:
    broken = with_mistake(tmp_path, "Dockerfile", right, wrong)

    assert rule in complaints(HADOLINT, "--no-color", broken)


def test_manifest_and_image_fit_together() -> None:
    settings, deployment = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    image = (DEPLOY / "Dockerfile").read_text()
    program = (DEPLOY / "late_flights.py").read_text()
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = container["volumeMounts"]
    (port,) = container["ports"]

    assert f"USER {pod['securityContext']['runAsUser']}\n" in image
    assert f"TALLYSTICK_STATE_DIR={mount['mountPath']}/" in image
    assert f"COPY deploy/late_flights.py {container['args'][-1]}\n" in image
    assert f"metrics.serve({port['containerPort']}, " in program
    for name in ("KAFKA_BOOTSTRAP_SERVERS", "CHECKPOINT"):
        assert f'os.environ["{name}"]' in program
        assert settings["data"][name]
    assert deployment["spec"]["strategy"]["type"] == "Recreate"
