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

SPARK_REQUIREMENTS = ("pyspark==4.2.0",)
"""The newest Spark whose Kafka connector can be had; 4.3's is not published."""
FLINK_BUILD_REQUIREMENTS = ("setuptools<80", "wheel")
"""PyFlink comes as source; with newer ones it does not build."""
FLINK_REQUIREMENTS = ("apache-flink==2.2.1", "orjson")
USERS_FIXED = "static final int USERS=100_000;"
USERS_CHOSEN = 'static final int USERS=Integer.getInteger("users",100_000);'
"""The loader and the verifier, for any number of users."""
BY_KEY = "new ProducerRecord<>(t,u.getBytes(StandardCharsets.UTF_8),"
BY_KEY_OR_NUMBER = (
    'new ProducerRecord<>(t,Boolean.getBoolean("spread")?(Integer)(Integer.parseInt(u.substring(1))'
    "%8):null,u.getBytes(StandardCharsets.UTF_8),"
)
"""The loader, for partitions that are not those of the keys; a user has one all the same."""
VALUE_END = '.append("\\"}"); }'
VALUE_END_PADDED = '.append("\\"").append(PAD).append("}"); }'
PAD = (
    'static final String PAD=Integer.getInteger("pad",0)==0?"":'
    '",\\"pad\\":\\""+"x".repeat(Integer.getInteger("pad",0))+"\\"";'
)
"""The loader, for values that are longer by a field that no job reads."""
TOOLS_CHANGES = (
    (USERS_FIXED, f"{USERS_CHOSEN} {PAD}"),
    (BY_KEY, BY_KEY_OR_NUMBER),
    (VALUE_END, VALUE_END_PADDED),
)
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
    def flink_python(self) -> Path:
        """The interpreter of the venv that holds PyFlink, and the jars of Flink SQL."""
        return self.directory / "venv-flink" / "bin" / "python"

    @property
    def flink_python_packages(self) -> Path:
        """Where that venv's packages are."""
        lib = self.flink_python.parent.parent / "lib"
        return lib / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    @property
    def flink_python_jars(self) -> Path:
        """The jars that PyFlink brings."""
        return self.flink_python_packages / "pyflink" / "lib"

    @property
    def pyflink_script(self) -> Path:
        """PyFlink's job: it looks for its interpreter and its connector around itself."""
        return self.directory / "pyflink" / "scripts" / "pyflink_job.py"

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
    text = _content([workspace.peers / "tools" / "src" / "peers" / "Tools.java"]).decode()
    for original, chosen in TOOLS_CHANGES:
        if text.count(original) != 1:
            raise SetupError(f"Tools.java of the peers: expected one line with {original!r}")
        text = text.replace(original, chosen)
    source = workspace.directory / "sources" / "Tools.java"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(text)
    _compile([source], f"{workspace.client_jars}/*", workspace.tools_classes)


def build_java_peer(workspace: Workspace, name: str, source: str) -> None:
    """Build one Java peer: its jars and its job.

    Args:
        workspace: where.
        name: the peer's folder below `peers`.
        source: the job's source file, below that folder.
    """
    folder = workspace.peers / name
    _fetch_jars(folder / "pom.xml", workspace.jars(name))
    _compile([folder / source], f"{workspace.jars(name)}/*", workspace.classes(name))


def build_flink_sql_peer(workspace: Workspace) -> None:
    """Build the peer in Flink SQL: PyFlink brings its jars, Flink's peer the connector."""
    build_java_peer(workspace, "flink", "src/main/java/peers/FlinkJob.java")
    _make_flink_venv(workspace)
    source = workspace.peers / "flinksql" / "src" / "peers" / "FlinkSqlJob.java"
    _compile([source], f"{workspace.flink_python_jars}/*", workspace.classes("flinksql"))


def build_nexmark_peer(workspace: Workspace) -> None:
    """Build Flink's side of Nexmark, whose sources are ours."""
    folder = workspace.benchmarks / "nexmark_flink"
    _fetch_jars(folder / "pom.xml", workspace.jars("nexmark-flink"))
    jars = f"{workspace.jars('nexmark-flink')}/*"
    _compile([folder / "NexmarkFlink.java"], jars, workspace.classes("nexmark-flink"))


def build_kills_peer(workspace: Workspace, name: str, source: str) -> None:
    """Build a peer of `kills/`, whose sources are ours: its folder there, and its one file."""
    folder = workspace.benchmarks / "kills" / name
    _fetch_jars(folder / "pom.xml", workspace.jars(f"kills-{name}"))
    jars = f"{workspace.jars(f'kills-{name}')}/*"
    _compile([folder / source], jars, workspace.classes(f"kills-{name}"))


def build_pyflink_peer(workspace: Workspace) -> None:
    """Build PyFlink's peer: its venv, and around its job what it looks for."""
    build_java_peer(workspace, "flink", "src/main/java/peers/FlinkJob.java")
    _make_flink_venv(workspace)
    home = workspace.pyflink_script.parent.parent
    shutil.rmtree(home, ignore_errors=True)
    for folder in ("scripts", "flink", "venvs"):
        (home / folder).mkdir(parents=True)
    (home / "flink" / "lib").symlink_to(workspace.jars("flink"))
    (home / "venvs" / "flink").symlink_to(workspace.flink_python.parent.parent)
    script = _content([workspace.peers / "scripts" / "pyflink_job.py"]).decode()
    # It uses `os` and forgets to import it.
    workspace.pyflink_script.write_text(f"import os\n{script}")


def build_spark_peer(workspace: Workspace) -> None:
    """Build Spark's peer: the connector's jars, a venv of its own, and its job in its place."""
    jars = workspace.spark_home / "sparklib"
    _once(jars, LOCK_FILE.read_bytes(), lambda: _copy(connector_jars(), jars))
    _make_venv(workspace.spark_python, SPARK_REQUIREMENTS)
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


def _compile(sources: Sequence[Path], classpath: str, target: Path) -> None:
    command = ["javac", "-nowarn", "-cp", classpath, "-d", str(target), *map(str, sources)]
    _once(target, _content(sources), lambda: _execute(command))


def _make_flink_venv(workspace: Workspace) -> None:
    _make_venv(workspace.flink_python, FLINK_BUILD_REQUIREMENTS, FLINK_REQUIREMENTS)


def _make_venv(python: Path, *requirements: Sequence[str]) -> None:
    """A venv around this interpreter, with one round of installing after the other."""
    target = python.parent.parent

    def make() -> None:
        _execute([sys.executable, "-m", "venv", str(target)])
        for requirement in requirements:
            _execute([str(python), "-m", "pip", "install", "-q", *requirement])

    _once(target, "\n".join(" ".join(requirement) for requirement in requirements).encode(), make)


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
