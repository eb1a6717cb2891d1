"""An archive of the classes that a start needs, so that a JVM maps them instead of reading jars.

HotSpot's class data sharing: `tallystick warm-up` has a JVM write down which classes it has loaded,
and later ones of the same Java and Spark share them. The JVM checks by itself that an archive fits
(Java, class path, each jar, checksums), and starts as ever without a fitting archive. The length of
the file we check: Java 17 crashes where an archive is cut short. Source:
https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html
"""

import os
import shlex
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pyspark

from tallystick.host.user_cache import cache_directory, one_process_at_a_time

KEPT_COUNT = 3
"""Archives of this many Javas or Sparks stay; each takes 70 MB."""
CHECKED = "-XX:+VerifySharedSpaces"
SILENT = "-Xlog:disable -Xlog:all=error:stderr"
"""An archive that does not fit is no error, and needs no report."""


def options(java_home: Path) -> str:
    """Return the JVM options that use the archive; none where there is no archive."""
    try:
        archive = find(java_home)
    except (OSError, RuntimeError):  # no home; a cache that cannot be read
        archive = None
    if archive is None:
        return ""
    return f"-XX:SharedArchiveFile={shlex.quote(str(archive))} {CHECKED} {SILENT}"


def make(java_home: Path, run: Callable[[str], None]) -> Path | None:
    """Make the archive of a Java if missing, and remove the oldest other archives.

    Args:
        java_home: of the Java that is to use the archive.
        run: starts a JVM with the given options, has it load the classes of a start, and ends it.

    Returns:
        The path of the archive; None: this JVM cannot make archives.

    Raises:
        OSError: the cache folder cannot be written.
    """
    folder = cache_directory()
    with one_process_at_a_time(folder / "spark-classes"):
        if (archive := find(java_home)) is None:
            with tempfile.TemporaryDirectory(prefix=".classes-", dir=folder) as work:
                recorded = Path(work, "recorded.jsa")
                run(f"-XX:ArchiveClassesAtExit={shlex.quote(str(recorded))} {SILENT}")
                if not recorded.exists():
                    return None
                size = recorded.stat().st_size
                archive = folder / f"spark-classes-{fingerprint(java_home)}-{size}.jsa"
                os.replace(recorded, archive)
        others = [path for path in folder.glob("spark-classes-*.jsa") if path != archive]
        for old in sorted(others, key=lambda path: path.stat().st_mtime)[: 1 - KEPT_COUNT]:
            old.unlink()
    return archive


def find(java_home: Path) -> Path | None:
    """Return the whole class archive for a Java and the installed Spark, or None.

    A JVM runs the classes of an archive: no other user may be able to write the file.
    """
    for archive in cache_directory().glob(f"spark-classes-{fingerprint(java_home)}-*.jsa"):
        status = archive.stat()
        is_whole = archive.stem.endswith(f"-{status.st_size}")
        if is_whole and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return archive
    return None


def fingerprint(java_home: Path) -> str:
    """Return a digest of a Java and the installed Spark, for the archive's file name."""
    spark = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent).resolve()
    files = [java_home / "lib" / "modules", *sorted((spark / "jars").glob("*.jar"))]
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return sha256(repr(facts).encode()).hexdigest()[:12]
