"""An archive of the classes that a start needs, so that a JVM maps them instead of reading jars.

HotSpot's class data sharing: `tallystick warm-up` has a JVM write down which classes it has loaded,
and later ones of the same Java and Spark share them. Whether an archive fits is for the JVM to say,
which compares itself, the class path and each jar; without one that fits it starts as ever. Source:
https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html
"""

import os
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pyspark

from tallystick.cache import cache_directory, one_process_at_a_time

KEPT_COUNT = 3
"""Archives of this many Javas or Sparks stay; each takes 70 MB."""
SILENT = "-Xlog:disable -Xlog:all=error:stderr"
"""An archive that does not fit is no error, and nobody needs to read of it."""


def options(java_home: Path) -> str:
    """Return the JVM options that use the archive; none where there is no archive."""
    try:
        archive = path_of(java_home)
        return f"-XX:SharedArchiveFile={archive} {SILENT}" if _is_usable(archive) else ""
    except (OSError, RuntimeError):  # no home; a cache that cannot be read
        return ""


def make(java_home: Path, run: Callable[[str], None]) -> Path | None:
    """Make the archive, unless it is there, and remove the oldest others.

    Args:
        java_home: of the Java that is to use it.
        run: starts a JVM with the options given to it, lets it load what matters, and ends it.

    Returns:
        Where it is; None: this JVM cannot make one.

    Raises:
        OSError: the cache folder cannot be written.
    """
    archive = path_of(java_home)
    with one_process_at_a_time(archive):
        if not archive.exists():
            with tempfile.TemporaryDirectory(prefix=".classes-", dir=archive.parent) as work:
                recorded = Path(work, archive.name)
                run(f"-XX:ArchiveClassesAtExit={recorded} {SILENT}")
                if not recorded.exists():
                    return None
                os.replace(recorded, archive)
    others = [each for each in archive.parent.glob("spark-classes-*.jsa") if each != archive]
    for old in sorted(others, key=lambda each: each.stat().st_mtime)[: 1 - KEPT_COUNT]:
        old.unlink(missing_ok=True)
        old.with_name(f"{old.name}.lock").unlink(missing_ok=True)
    return archive


def path_of(java_home: Path) -> Path:
    """Where the archive for this Java and this Spark is; another one has another name."""
    spark = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)
    files = [java_home / "lib" / "modules", *sorted((spark / "jars").glob("*.jar"))]
    facts = [(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    return cache_directory() / f"spark-classes-{sha256(repr(facts).encode()).hexdigest()[:12]}.jsa"


def _is_usable(archive: Path) -> bool:
    """Whether it is there, and nobody else can have written it: a JVM runs what is in it."""
    if not archive.exists():
        return False
    status = archive.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022
