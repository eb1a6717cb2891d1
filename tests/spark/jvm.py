"""The JVM options of every Spark that tests start: light, and its classes mapped from an archive.

Most of a test's JVM is over before it has been quick once, so what counts is its start. HotSpot's
class data sharing halves that: `record_classes.py` lets one JVM run a query of Spark's
and a pipeline of ours, and write down which classes it has loaded. The archive that
`tallystick warm-up` makes for users knows nothing of Spark SQL.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from pyspark.sql import SparkSession

from tallystick.host.java import java_home
from tallystick.host.user_cache import cache_directory, one_process_at_a_time
from tallystick.spark.class_archive import SILENT, fingerprint
from tallystick.spark.context import LAUNCHER_OPTIONS, LIGHT_JVM

LIGHT = f"-Xss16m {LIGHT_JVM}"
INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}
"""Settings of sessions whose queries see a handful of rows: not worth compiling code for."""
RECORDER = Path(__file__).with_name("record_classes.py")
RECORD_MAX_S = 300
KEPT_COUNT = 3
"""Archives of this many Javas or Sparks stay; each takes 190 MB."""


@cache
def options() -> str:
    """The options; the archive is made by the first process of this user that asks.

    With TEST_CLASS_ARCHIVE=none there is none: `make matrix` has more Sparks than are kept.
    A JVM that cannot make one leaves an empty file, so that it is asked only once.
    """
    os.environ.setdefault(LAUNCHER_OPTIONS, LIGHT_JVM)
    if os.environ.get("TEST_CLASS_ARCHIVE") == "none":
        return LIGHT
    name = f"test-classes-{fingerprint(java_home())}.jsa"
    archive = cache_directory() / name
    with one_process_at_a_time(archive):
        if not archive.exists():
            _record(archive)
    if archive.stat().st_size == 0:
        return LIGHT
    return f"{LIGHT} -XX:SharedArchiveFile={shlex.quote(str(archive))} {SILENT}"


def interpreting_session(
    shared_spark: SparkSession, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Return a session beside the shared one, for queries of a handful of rows in one partition."""
    session = shared_spark.newSession()
    own = {**INTERPRETED, "spark.sql.shuffle.partitions": "1", **(settings or {})}
    for name, value in own.items():
        session.conf.set(name, value)
    return session


@contextmanager
def interpreting(shared_spark: SparkSession) -> Iterator[SparkSession]:
    """Have the shared session itself do so for a while: it is the one that knows our format."""
    before = {name: str(shared_spark.conf.get(name)) for name in INTERPRETED}
    for name, value in INTERPRETED.items():
        shared_spark.conf.set(name, value)
    try:
        yield shared_spark
    finally:
        for name, value in before.items():
            shared_spark.conf.set(name, value)


def _record(archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".classes-", dir=archive.parent) as work:
        recorded = Path(work, archive.name)
        command = [sys.executable, RECORDER.name, str(recorded), work]
        completed = subprocess.run(
            command, cwd=RECORDER.parent, capture_output=True, text=True, timeout=RECORD_MAX_S
        )
        assert completed.returncode == 0, completed.stderr[-4000:]
        recorded.touch()
        os.replace(recorded, archive)
    archives = archive.parent.glob("test-classes-*.jsa")
    for old in sorted(archives, key=lambda path: path.stat().st_mtime)[:-KEPT_COUNT]:
        old.unlink(missing_ok=True)


if __name__ == "__main__":
    options()
