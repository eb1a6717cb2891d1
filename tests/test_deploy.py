"""What is in `deploy`: its form, and the probe; no image is built, and no cluster reached."""

import importlib.util
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from tallystick.kafka.config import KafkaConfig
from tallystick.ops.cli_savepoint import options_in
from tallystick.ops.metrics import TABLE
from tallystick.run.query import ABORT_S, DRAIN_S

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


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings and the spec of the pod."""
    settings, deployment = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert deployment["spec"]["strategy"]["type"] == "Recreate"
    return settings["data"], deployment["spec"]["template"]["spec"]


def test_manifest_and_image_fit_together() -> None:
    settings, pod = documents()
    image = (DEPLOY / "Dockerfile").read_text()
    program = (DEPLOY / "late_flights.py").read_text()
    (container,) = pod["containers"]
    folders = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (port,) = container["ports"]
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]

    assert f"USER {pod['securityContext']['runAsUser']}\n" in image
    assert f"TALLYSTICK_STATE_DIR={folders['state']}/" in image
    assert "COPY deploy/late_flights.py deploy/probe.py /app/\n" in image
    assert 'ENTRYPOINT ["tini", "--", "python"]\n' in image
    assert container["args"] == ["/app/late_flights.py"]
    assert {tuple(probe["exec"]["command"][:2]) for probe in probes} == {
        ("python", "/app/probe.py")
    }
    assert f"metrics.serve({port['containerPort']}, " in program
    assert f":{port['containerPort']}/" in (DEPLOY / "probe.py").read_text()
    for name in ("KAFKA_BOOTSTRAP_SERVERS", "CHECKPOINT", "KAFKA_LOGIN", "UI_PORT"):
        assert f'os.environ["{name}"]' in program or f'os.environ.get("{name}")' in program
        assert settings[name]
    assert settings["KAFKA_LOGIN"].startswith(f"{folders['kafka']}/")
    assert {volume["name"] for volume in pod["volumes"]} == set(folders)


def test_the_pod_has_time_to_drain() -> None:
    _, pod = documents()

    assert pod["terminationGracePeriodSeconds"] > DRAIN_S + ABORT_S


def not_restricted(pod: dict[str, Any]) -> Iterator[str]:
    """What the Pod Security Standard "restricted" refuses; of a pod without init containers."""
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield name
    for volume in pod["volumes"]:
        if not {"configMap", "emptyDir", "projected", "secret"} & set(volume):
            yield f"volume {volume['name']}"
    for container in pod["containers"]:
        context = pod.get("securityContext", {}) | container.get("securityContext", {})
        if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
            yield "runAsNonRoot"
        if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield "seccompProfile"
        if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
            yield "allowPrivilegeEscalation"
        capabilities = context.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []) or capabilities.get("add"):
            yield "capabilities"
        if any("hostPort" in port for port in container["ports"]):
            yield "hostPort"


def test_the_pod_security_standard_restricted_takes_the_pod() -> None:
    _, pod = documents()

    assert list(not_restricted(pod)) == []
    del pod["securityContext"], pod["containers"][0]["securityContext"]
    assert list(not_restricted(pod)) == [
        "runAsNonRoot",
        "seccompProfile",
        "allowPrivilegeEscalation",
        "capabilities",
    ]


def program(name: str) -> ModuleType:
    """Import a program of the image."""
    spec = importlib.util.spec_from_file_location(name, DEPLOY / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def samples(running: int, commit_s: int, *lags: int, started_s: int = 1000) -> str:
    """The metrics of a pipeline that the probe looks at."""
    lines = [
        f'tallystick_running{{query="p"}} {running}',
        f'tallystick_started_timestamp_seconds{{query="p"}} {started_s}',
        f'tallystick_last_commit_timestamp_seconds{{query="p"}} {commit_s}',
    ]
    for partition, lag in enumerate(lags):
        labels = f'query="p",source="s",topic="t",partition="{partition}"'
        lines.append(f"tallystick_source_lag_offsets{{{labels}}} {lag}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("metrics", "wrong"),
    [
        ("", "no run of the pipeline is in the process"),
        (samples(0, 1990, 0), "no run of the pipeline is in the process"),
        (samples(1, 1990, 5, 7), ""),
        (samples(1, 1100, 0, 0), ""),  # has read all
        (samples(1, 1100), ""),  # Kafka does not answer
        (samples(1, 1100, 5, 7), "p: 12 records wait, and 900 s without a commit"),
        (samples(1, 0, 5), "p: 5 records wait, and 1000 s without a commit"),  # never one
        (samples(1, 0, 5, started_s=1950), ""),
    ],
)
def test_the_probe_goes_by_the_last_commit(metrics: str, wrong: str) -> None:
    complaint = program("probe").complaint

    assert complaint(metrics, 2000.0, 60.0) == wrong
    assert complaint(metrics, 2000.0) == ("" if " wait" in wrong else wrong)


def test_the_probe_asks_for_metrics_that_there_are() -> None:
    names = set(re.findall(r'"(tallystick_\w+)"', (DEPLOY / "probe.py").read_text()))

    assert len(names) == 4
    assert names <= {metric.name for metric in TABLE if not metric.new_name}


def test_the_probe_ends_with_a_code(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    running = Gauge("tallystick_running", "", ["query"], registry=registry).labels("p")
    server, thread = start_http_server(0, "127.0.0.1", registry)
    probe = with_mistake(tmp_path, "probe.py", ":9400/", f":{server.server_port}/")

    def ask() -> tuple[int, str]:
        command = (sys.executable, probe, "60")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    assert ask() == (1, "no run of the pipeline is in the process\n")
    running.set(1)
    assert ask() == (0, "")
    server.shutdown()
    server.server_close()
    thread.join()
    code, message = ask()
    assert code == 1
    assert "Connection refused" in message


def test_the_login_of_the_secret_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    login = program("late_flights").login
    monkeypatch.delenv("KAFKA_LOGIN", raising=False)
    assert login() == {}
    page = (DEPLOY.parent / "docs" / "deploying.md").read_text()
    (text,) = re.findall(r"```\n(security\.protocol=.*?)```", page, re.DOTALL)
    file = tmp_path / "login.properties"
    file.write_text(f"# Kafka's\n\n{text}".replace("/etc/tallystick/kafka/ca.pem", str(file)))
    monkeypatch.setenv("KAFKA_LOGIN", str(file))
    options = login()

    assert options["kafka.security.protocol"] == "SASL_SSL"
    assert options["kafka.sasl.jaas.config"].endswith('password="…";')
    plain = {name.removeprefix("kafka."): value for name, value in options.items()}
    assert plain == options_in(file)  # the commands read the same
    config = KafkaConfig.from_options({**plain, "bootstrap.servers": "kafka:9092"})
    assert config.sasl_mechanism == "SCRAM-SHA-512"
