"""Follow `deploy/Dockerfile` without a container runtime, and run the image: `make image`.

Each instruction is carried out as it stands, in a folder that `debootstrap` fills with the release
of Debian that the base image is made of, with Debian's Python in place of python.org's. What the
entry point starts there has a file system and process numbers of its own, the user, no rights and
the probes of `deploy/kubernetes.yaml`; it writes to a Kafka beside it, is drained by SIGTERM, and
goes on. Needs Linux, root, and Debian's package debootstrap.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from tallystick.testing import EmbeddedKafka
from tests import wheel
from tests.spark.topics import produce, read_committed
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
DEBIAN = "http://deb.debian.org/debian"
PYTHON = "/opt/python"
"""A virtual environment, as python.org's image has `python` and `pip` of its own."""
OF_THE_MACHINE = (
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/pip.conf",
    "/etc/ssl/certs/ca-certificates.crt",
)
"""Files that a container runtime writes, and settings of this machine for registries."""
FILESYSTEMS = "mkdir -p /dev/shm && mount -t tmpfs shm /dev/shm && "
RECORDS = 400
READY_S = 300
"""The startup probe's patience: 60 times 5 s."""


@dataclass
class Image:
    """A folder with a file system, and what the instructions said about its processes."""

    root: Path
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": f"{PYTHON}/bin:/usr/local/bin:/usr/sbin:/usr/bin:/bin"}
    )
    user: str = "0"
    folder: str = "/"
    entry_point: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    def build(self, dockerfile: Path, context: Path) -> None:
        """Carry out all instructions of a Dockerfile.

        Args:
            dockerfile: its path.
            context: the folder that it copies from.
        """
        for keyword, text in instructions(dockerfile.read_text()):
            print(f"{keyword} {shlex.join(text.split())[:90]}", flush=True)
            match keyword:
                case "FROM":
                    self._begin(text)
                case "ENV":
                    self.environment |= dict(pair.split("=", 1) for pair in shlex.split(text))
                case "COPY":
                    *sources, target = shlex.split(text)
                    into = self.root / target.lstrip("/")
                    into.mkdir(parents=True, exist_ok=True)
                    for source in sources:
                        shutil.copy(context / source, into)
                case "USER":
                    self.user = text
                case "WORKDIR":
                    self.folder = text
                case "ENTRYPOINT":
                    self.entry_point = tuple(json.loads(text))
                case "CMD":
                    self.arguments = tuple(json.loads(text))
                case "RUN":
                    shell = ("bash", "-euo", "pipefail", "-c", text)
                    subprocess.run(self.command(*shell), check=True, env=self.environment)
                case _:
                    raise NotImplementedError(f"instruction {keyword} of {dockerfile}")

    def _begin(self, base: str) -> None:
        """Make the base image, as far as there is no registry of images to ask."""
        release = re.fullmatch(r"python:3\.\d+-slim-(\w+)", base)
        assert release, f"no Debian in the name of the base image {base}"
        packages = "--include=ca-certificates,python3,python3-venv"
        command = ("debootstrap", "--variant=minbase", packages, release[1], self.root, DEBIAN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for path in OF_THE_MACHINE:
            if Path(path).exists():
                shutil.copy(path, self.root / path.lstrip("/"))
        make_python = ("python3", "-m", "venv", PYTHON)
        subprocess.run(self.command(*make_python), check=True, env=self.environment)

    def command(self, *command: str) -> list[str]:
        """Return what runs a command in the image, with processes that see nothing outside.

        Only a build begins as root, and only that has a machine's rights.
        """
        rights = () if self.user == "0" else ("--bounding-set=-all", "--no-new-privs")
        groups = (f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups")
        inside = shlex.join(("setpriv", *groups, *rights, *command))
        apart = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        return [
            *("unshare", *apart, f"--root={self.root}", f"--wd={self.folder}"),
            *("sh", "-c", f"{FILESYSTEMS}exec {inside}"),
        ]


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the keyword and the text of each instruction, with continued lines made one."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            keyword, _, rest = line.partition(" ")
            yield keyword, rest.strip()


class Container:
    """A process of an image, as a pod would run it."""

    def __init__(self, image: Image, settings: Mapping[str, str], log: Path) -> None:
        self._image = image
        self._environment = image.environment | settings
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                image.command(*image.entry_point, *image.arguments),
                env=self._environment,
                stdout=output,
                stderr=output,
            )

    def probe(self, command: list[str]) -> str:
        """Return what a probe of the pod says; "": all is well.

        It asks by the network, so it needs none of the container's processes beside it.
        """
        done = subprocess.run(
            self._image.command(*command), env=self._environment, capture_output=True, text=True
        )
        assert (done.returncode == 0) is (done.stderr == ""), done
        return done.stderr

    def wait_until_well(self, probe: list[str]) -> None:
        """Wait for a probe to succeed."""
        wait_until(lambda: not self.probe(probe), self.log, timeout_s=READY_S, poll_s=1.0)

    def terminate(self, grace_s: float) -> int:
        """End it as Kubernetes does, by SIGTERM to its first process; return the exit code."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        (first,) = children.read_text().split()
        os.kill(int(first), signal.SIGTERM)
        return self._process.wait(grace_s)

    def close(self) -> None:
        """Kill what is there still."""
        self._process.kill()
        self._process.wait()

    def log(self) -> str:
        """Return the end of what it wrote."""
        return self._log.read_text(errors="replace")[-3000:]


def flights(first: int) -> list[tuple[str, str]]:
    """Return records of the input, from a number on."""
    rows = [
        {"id": n, "dest": f"D{n % 5}", "dep_delay": float(n % 40)}
        for n in range(first, first + RECORDS)
    ]
    return [(row["dest"], json.dumps(row)) for row in rows]


def late(count: int) -> list[int]:
    """Return the numbers of the flights, of the first ones, that are late."""
    return [n for n in range(count) if n % 40 >= 15]


def is_exact(kafka: EmbeddedKafka, count: int) -> bool:
    """Return True if the output has the late ones of the first flights, and nothing else."""
    records = read_committed(kafka.confluent_options(), "late")
    return sorted(json.loads(record.value or "")["id"] for record in records) == late(count)


def try_image(image: Image, folder: Path) -> None:
    """Run the image as the manifest says, twice, and compare what it wrote with its input."""
    settings, deployment = yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    image.arguments = tuple(container["args"])
    assert image.user == str(pod["securityContext"]["runAsUser"])
    startup, readiness = (container[f"{kind}Probe"]["exec"] for kind in ("startup", "readiness"))
    with EmbeddedKafka() as kafka:
        options = kafka.confluent_options()
        for topic in ("flights", "late"):
            kafka.create_topic(topic, 2)
        variables = settings["data"] | {
            "KAFKA_BOOTSTRAP_SERVERS": options["bootstrap.servers"],
            "CHECKPOINT": "/var/lib/tallystick/checkpoint",  # S3 has its own tests
        }
        del variables["KAFKA_LOGIN"]
        for count in (RECORDS, 2 * RECORDS):
            produce(options, "flights", flights(count - RECORDS))
            with closing(Container(image, variables, folder / f"log-{count}")) as running:
                begun = time.monotonic()
                running.wait_until_well(startup["command"])
                wait_until(partial(is_exact, kafka, count), running.log, timeout_s=READY_S)
                took_s = time.monotonic() - begun
                running.wait_until_well(readiness["command"])
                code = running.terminate(pod["terminationGracePeriodSeconds"])
                assert (code, "Traceback" in running.log()) == (0, False), running.log()
            rows = len(late(count))
            print(f"{rows} rows, exact, {took_s:.1f} s after a start; drained by SIGTERM")


def main() -> None:
    """Build the image in a temporary folder, and try it."""
    if os.getuid() or not shutil.which("debootstrap"):
        sys.exit("make image needs root and debootstrap: apt-get install debootstrap")
    with TemporaryDirectory(prefix="tallystick-image-") as name:
        folder = Path(name)
        context = folder / "context"
        (context / "dist").mkdir(parents=True)
        wheel.build(ROOT, context / "dist")
        shutil.copytree(ROOT / "deploy", context / "deploy")
        image = Image(folder / "root")
        image.build(context / "deploy/Dockerfile", context)
        try_image(image, folder)


if __name__ == "__main__":
    main()
