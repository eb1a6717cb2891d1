"""What makes a start quick is used where it is there, and missed by nobody where it is not."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from pyspark import cloudpickle

import tallystick as ts
from tallystick.host import kernel_cache
from tallystick.host.java import java_home
from tallystick.spark import class_archive, early_daemon
from tallystick.spark.cluster import Cluster
from tests.spark.mischief import wait_until_gone

pytestmark = pytest.mark.spark

JOB = Path(__file__).with_name("quick_job.py")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that held nothing before `tallystick warm-up` ran there; options divide at spaces."""
    home = tmp_path_factory.mktemp("somebody's home")
    command = [sys.executable, "-m", "tallystick", "warm-up"]
    done = subprocess.run(
        command, env=environment(home), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels, archive = done.stdout.splitlines()
    assert re.fullmatch(r"kernels are compiled in .+ \(\d+\.\d CPU s\)", kernels)
    assert str(archive_in(home)) in archive
    spent = re.search(r"\((\d+\.\d) CPU s\)$", archive)
    assert spent is not None
    assert float(spent[1]) > 1, "that of the JVM is counted, which is another process"
    return home


def environment(home: Path) -> dict[str, str]:
    """That of a process with this home; kernels are those of this machine."""
    dropped = ("TALLYSTICK_CACHE", "XDG_CACHE_HOME", "PYSPARK_SUBMIT_ARGS", "MASTER")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "HOME": str(home), "NUMBA_CACHE_DIR": str(kernel_cache.directory_in_use())}


def test_a_spark_behind_a_link_has_the_archive_of_the_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path(pyspark.__file__).parent.resolve()
    (tmp_path / "link").symlink_to(real)
    names = set()
    for path in (real, tmp_path / "link"):
        monkeypatch.setenv("SPARK_HOME", str(path))
        names.add(class_archive.fingerprint(java_home()))
    assert len(names) == 1


def archive_in(home: Path) -> Path:
    (archive,) = (home / ".cache" / "tallystick").glob("spark-classes-*.jsa")
    return archive


@contextlib.contextmanager
def job(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run `quick_job.py`; it is gone afterwards."""
    command = [sys.executable, str(JOB), *arguments]
    with subprocess.Popen(
        command, env=environment(home), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def facts_from(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("FOUND "))
    facts: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return facts


def run(home: Path, *arguments: str) -> dict[str, Any]:
    """What the job found; it has ended by itself, and so has its daemon."""
    with job(home, *arguments) as process:
        facts = facts_from(process)
        assert facts_from(process)["is_over"]
        assert process.wait(60) == 0
    assert_it_has_gone(facts)
    return facts


def assert_it_has_gone(facts: dict[str, Any]) -> None:
    """The early daemon, with its workers and its folder."""
    wait_until_gone([facts["daemon"], *(pid for pid, _, _ in facts.get("workers", ()))])
    assert not Path(facts["address"]).parent.exists()


def test_a_start_maps_the_archive_and_forks_a_warm_daemon_which_ends_with_its_driver(
    home: Path,
) -> None:
    """Workers load nothing: they are forks of the early daemon, and so it ends while it serves."""
    with job(home, "--stay", "serving") as process:
        facts = facts_from(process)
        assert facts["archives"] == [str(archive_in(home))], "that of `tallystick warm-up`"
        ((_, parent, is_warm),) = facts["workers"]
        assert parent == facts["daemon"]
        assert is_warm
        process.send_signal(signal.SIGKILL)
    assert_it_has_gone(facts)


def test_an_archive_is_made_once(home: Path) -> None:
    archive_stat = archive_in(home).stat()
    command = [sys.executable, "-m", "tallystick", "warm-up"]
    done = subprocess.run(
        command, env=environment(home), check=True, capture_output=True, text=True, timeout=300
    )
    assert archive_in(home).stat() == archive_stat
    assert "kernels are compiled in" in done.stdout
    assert "about 25 s" not in done.stdout + done.stderr, "that is for a terminal"


@pytest.mark.parametrize(
    "fault", ["missing", "cut short", "empty", "of another Java", "damaged", "shared"]
)
def test_a_start_without_an_archive_that_fits_is_as_ever(
    home: Path, tmp_path: Path, fault: str
) -> None:
    archive = tmp_path / ".cache" / "tallystick" / archive_in(home).name
    archive.parent.mkdir(parents=True)
    shutil.copy(archive_in(home), archive)
    archive.chmod(0o600)
    match fault:
        case "missing":
            archive.unlink()
        case "cut short":
            os.truncate(archive, archive.stat().st_size // 2)
        case "empty":
            os.truncate(archive, 0)
        case "of another Java":
            with archive.open("r+b") as file:
                header = file.read(4096)
                assert b"17.0" in header or b"OpenJDK" in header, "the version of its JVM"
                file.seek(0)
                file.write(header.replace(b"OpenJDK", b"OtherVM"))
        case "damaged":
            with archive.open("r+b") as file:
                file.seek(archive.stat().st_size // 2)
                file.write(os.urandom(1 << 16))
        case "shared":
            archive.chmod(0o620)
    facts = run(tmp_path)
    assert facts["archives"] == []
    assert facts["workers"]


def record(options: str) -> None:
    (recorded,) = (
        option.partition("=")[2]
        for option in shlex.split(options)
        if option.startswith("-XX:ArchiveClassesAtExit=")
    )
    Path(recorded).write_text("classes")


def test_another_release_of_spark_has_another_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TALLYSTICK_CACHE", str(tmp_path))
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    (tmp_path / "jars").mkdir()
    archives = set()
    for release in ("4.2", "4.3", "4.3, in its place"):
        (tmp_path / "jars" / f"spark-{release[:3]}.jar").write_text(release)
        assert class_archive.options(java_home()) == ""
        archives.add(class_archive.make(java_home(), record))
    assert len(archives) == 3


def test_an_archive_that_others_may_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A JVM would run their classes."""
    monkeypatch.setenv("TALLYSTICK_CACHE", str(tmp_path))
    archive = class_archive.make(java_home(), record)
    assert archive is not None
    assert str(archive) in class_archive.options(java_home())
    archive.chmod(0o620)
    assert class_archive.options(java_home()) == ""


def test_old_archives_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALLYSTICK_CACHE", str(tmp_path))
    others = [tmp_path / f"spark-classes-{number}.jsa" for number in range(4)]
    for age, other in enumerate(others):
        other.touch()
        os.utime(other, (1000 - age, 1000 - age))
    archive = class_archive.make(java_home(), record)
    assert archive is not None
    assert {*tmp_path.glob("*.jsa")} == {archive, *others[:2]}


def test_a_jvm_that_makes_no_archive_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TALLYSTICK_CACHE", str(tmp_path))
    assert class_archive.make(java_home(), lambda _: None) is None
    assert class_archive.options(java_home()) == ""


def test_without_the_early_daemon_spark_has_its_own(home: Path) -> None:
    facts = run(home, "--kill", "ahead")
    ((_, parent, is_warm),) = facts["workers"]
    assert parent != facts["daemon"]
    assert not is_warm


def test_an_early_daemon_that_dies_is_replaced_by_sparks_own(home: Path) -> None:
    facts = run(home, "--kill", "serving")
    (_, first, _), (_, second, _) = facts["workers"]
    assert first == facts["daemon"] != second


def test_a_daemon_that_nobody_has_asked_for_ends_with_its_driver(home: Path) -> None:
    with job(home, "--stay", "ahead") as process:
        facts = facts_from(process)
        process.send_signal(signal.SIGKILL)
    assert_it_has_gone(facts)


@pytest.mark.parametrize(("asked_in", "loaded"), [("first", 2), ("third", 3), (None, 4)])
def test_kernels_are_loaded_until_the_jvm_asks(
    asked_in: str | None, loaded: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of every pipeline in any case; a machine without a cache would compile all before."""
    names = ("first", "second", "third", "fourth")
    monkeypatch.setattr(kernel_cache, "are_compiled", lambda: False)
    monkeypatch.setattr(kernel_cache, "EVERY_PIPELINE", names[:2])
    monkeypatch.setattr(kernel_cache, "KEYED_PIPELINES", names[2:3])
    monkeypatch.setattr(kernel_cache, "OTHERS", names[3:])
    warmed: list[str] = []
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as jvm:
        listener.bind(str(tmp_path / "socket"))
        listener.listen(1)

        def warm_up(name: str) -> None:
            warmed.append(name)
            if name == asked_in:
                jvm.connect(str(tmp_path / "socket"))

        for name in names:
            module = SimpleNamespace(warm_up=partial(warm_up, name))
            monkeypatch.setitem(sys.modules, name, module)
        early_daemon._load_kernels(listener, os.getppid())

    assert warmed == list(names[:loaded])


def test_it_takes_no_place_of_another_python() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(theirs, [early_daemon.TAKEN], [0, 1, 2])
        theirs.sendall(json.dumps({"version": "2.7"}).encode())
        theirs.shutdown(socket.SHUT_WR)
        assert not early_daemon.take_place(ours)


def test_what_the_early_daemon_imports_is_all_that_members_unpickle(tmp_path: Path) -> None:
    """Else each of them would import it, one beside the other."""
    source = ts.KafkaSource("localhost:9092", topics=["in"], value=ts.Json("user string"))
    sink = ts.KafkaSink("localhost:9092", topic="out", value=ts.Json())
    stateless: Any = ts.Pipeline("counts").read(source)
    keyed = stateless.key_by("user").process(ts.aggregate({"n": ts.count()}))
    paths = []
    for name, pipeline in {"stateless": stateless, "keyed": keyed}.items():
        known = pipeline.write(sink)._run(Cluster.at_hand(None), None)._known()
        paths.append(tmp_path / name)
        paths[-1].write_bytes(cloudpickle.dumps(known))
    script = """
import importlib, pickle, sys
from tallystick.host.kernel_cache import EVERY_PIPELINE, KEYED_PIPELINES
from tallystick.spark.early_daemon import PACKAGES
for package in (*PACKAGES, *EVERY_PIPELINE, *KEYED_PIPELINES):
    importlib.import_module(package)
before = set(sys.modules)
for path in sys.argv[1:]:
    pickle.load(open(path, "rb"))
print(*(name for name in sys.modules if name.startswith("tallystick") and name not in before))
"""
    command = [sys.executable, "-c", script, *map(str, paths)]
    modules = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert modules == []


def test_in_the_place_of_a_jvm_that_is_older_than_the_kernels_it_keeps_their_folder(
    tmp_path: Path,
) -> None:
    """The environment is the JVM's; but numba has read that variable, and workers look for it."""
    script = """
import json, os, socket, sys
from tallystick.spark import early_daemon
import tallystick.host.kernel_cache as kernel_cache
ours, theirs = socket.socketpair()
socket.send_fds(theirs, [early_daemon.TAKEN], [0, 1, 2])
place = {"version": sys.version, "environment": {"OF_THE_JVM": "1"}, "folder": os.getcwd()}
theirs.sendall(json.dumps(place | {"path": sys.path, "arguments": []}).encode())
theirs.shutdown(socket.SHUT_WR)
before = kernel_cache.directory_in_use()
assert early_daemon.take_place(ours)
assert kernel_cache.directory_in_use() == before
assert os.environ["OF_THE_JVM"] == "1" and "HOME" not in os.environ
"""
    subprocess.run([sys.executable, "-c", script], env=environment(tmp_path), check=True)


@pytest.mark.parametrize("is_too_long", [False, True])
def test_where_its_socket_has_no_room_there_is_none(
    monkeypatch: pytest.MonkeyPatch, *, is_too_long: bool
) -> None:
    """A child that fails would tell the user so."""
    ours = len("/tallystick-daemon-12345678/socket")
    folder = tempfile.mkdtemp(dir="/tmp")
    rest = early_daemon.ADDRESS_BYTES_MAX - ours - len(folder) - 1
    long = Path(folder, "x" * (rest + is_too_long))
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    try:
        if is_too_long:
            with pytest.raises(OSError, match="too long"):
                early_daemon.EarlyDaemon(sys.executable)
        else:
            daemon = early_daemon.EarlyDaemon(sys.executable)
            while not Path(daemon.address).exists():
                assert daemon._process.poll() is None
            daemon.end()
        assert list(long.iterdir()) == []
    finally:
        shutil.rmtree(folder)
