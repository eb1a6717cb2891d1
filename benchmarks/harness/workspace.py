"""Where peers are built, and how: jars by Maven, classes by javac, one venv; each once.

Everything is built into one git-ignored folder from sources that are read only. A build is repeated
when what it is made from has changed.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .spark_connector import LOCK_FILE, connector_jars

SPARK_REQUIREMENT = "pyspark==4.2.0"
"""The newest Spark whose Kafka connector can be had; 4.3's is not published."""
OUTPUT_SHOWN_CHARS = 3000


class SetupError(Exception):
    """A peer cannot be built here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """The benchmark's folders.

    Args:
        directory: what is built and written while measuring; made when it is not there.
        peers: the folder with the sources of the peers' jobs; never written to.
        benchmarks: the folder with our own job and Maven file.
    """

    directory: Path
    peers: Path
    benchmarks: Path

    @property
    def client_jars(self) -> Path:
        """Kafka's own Java client, for the loader and the verifier."""
        return self.directory / "jars" / "clients"

    @property
    def tools_classes(self) -> Path:
        """The loader and the verifier."""
        return self.directory / "classes" / "tools"

    def tools_classpath(self) -> str:
        """The class path that `peers.Tools` runs on."""
        return f"{self.tools_classes}:{self.client_jars}/*"

    def jars(self, name: str) -> Path:
        """The jars of one Java peer."""
        return self.directory / "jars" / name

    def classes(self, name: str) -> Path:
        """The compiled job of one Java peer."""
        return self.directory / "classes" / name

    @property
    def spark_home(self) -> Path:
        """The folder around Spark's job: it looks for its jars, and leaves its files, beside it."""
        return self.directory / "spark"

    @property
    def spark_python(self) -> Path:
        """The interpreter of the venv that holds Spark's peer."""
        return self.directory / "venv-spark" / "bin" / "python"


def build_tools(workspace: Workspace) -> None:
    """Build the loader and the verifier."""
    _fetch_jars(workspace.benchmarks / "clients-pom.xml", workspace.client_jars)
    source = workspace.peers / "tools" / "src" / "peers" / "Tools.java"
    _compile([source], workspace.client_jars, workspace.tools_classes)


def build_java_peer(workspace: Workspace, name: str, source: str) -> None:
    """Build one Java peer: its jars and its job.

    Args:
        workspace: where.
        name: the peer's folder below `peers`.
        source: the job's source file, below that folder.
    """
    folder = workspace.peers / name
    _fetch_jars(folder / "pom.xml", workspace.jars(name))
    _compile([folder / source], workspace.jars(name), workspace.classes(name))


def build_spark_peer(workspace: Workspace) -> None:
    """Build Spark's peer: the connector's jars, a venv of its own, and its job in its place."""
    jars = workspace.spark_home / "sparklib"
    _once(jars, LOCK_FILE.read_bytes(), lambda: _copy(connector_jars(), jars))
    venv = workspace.spark_python.parent.parent
    _once(venv, SPARK_REQUIREMENT.encode(), lambda: _make_venv(venv))
    script = workspace.spark_home / "scripts" / "spark_job.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(workspace.peers / "scripts" / "spark_job.py", script)
    (workspace.spark_home / "ckpt" / "sparklocal").mkdir(parents=True, exist_ok=True)


def _copy(files: Sequence[Path], target: Path) -> None:
    for file in files:
        shutil.copyfile(file, target / file.name)


def _fetch_jars(pom: Path, target: Path) -> None:
    command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"]
    command += [f"-DoutputDirectory={target}", "-DincludeScope=runtime"]
    _once(target, _content([pom]), lambda: _execute(command))


def _compile(sources: Sequence[Path], jars: Path, target: Path) -> None:
    command = ["javac", "-nowarn", "-cp", f"{jars}/*", "-d", str(target), *map(str, sources)]
    _once(target, _content(sources), lambda: _execute(command))


def _make_venv(target: Path) -> None:
    _execute([sys.executable, "-m", "venv", str(target)])
    _execute([str(target / "bin" / "python"), "-m", "pip", "install", "-q", SPARK_REQUIREMENT])


def _content(paths: Sequence[Path]) -> bytes:
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise SetupError(
            f"no such file: {', '.join(missing)}. The peers' sources are not part of this "
            f"repository: name their folder with --peers."
        )
    return b"\0".join(path.read_bytes() for path in paths)


def _once(target: Path, made_from: bytes, build: Callable[[], None]) -> None:
    """Build `target`, unless it was built from the very same before."""
    stamp = target / ".made-from"
    digest = hashlib.sha256(made_from).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        return
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    build()
    stamp.write_text(digest)


def _execute(command: Sequence[str]) -> None:
    if shutil.which(command[0]) is None:
        raise SetupError(
            f"{command[0]} is not on the PATH. The loader, the verifier and the peers are Java: "
            f"the benchmark needs a JDK (17 or newer) and Maven."
        )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shown = (done.stdout + done.stderr)[-OUTPUT_SHOWN_CHARS:]
        raise SetupError(f"{' '.join(command)} failed ({done.returncode}):\n{shown}")
