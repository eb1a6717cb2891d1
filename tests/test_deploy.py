"""The form of what is in `deploy`; nothing here builds an image or reaches a cluster."""

import subprocess
import sys
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parent.parent / "deploy"
RULES = (
    "{extends: default, rules: {line-length: {max: 100}, comments: {min-spaces-from-content: 2}}}"
)


def test_yamllint_finds_nothing() -> None:
    lint = [sys.executable, "-m", "yamllint", "--strict", "-d", RULES, DEPLOY / "kubernetes.yaml"]
    found = subprocess.run(lint, capture_output=True, text=True)

    assert found.returncode == 0, found.stdout + found.stderr


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
