"""The jars of the embedded Kafka: fetched once, verified on every start, never part of the package.

Invariants:
    A version's lock file names every jar and its SHA-256; nothing else reaches the class path.
    A folder of jars appears whole or not at all, and one process at a time fetches.

The jars come through Ivy, which PySpark ships, and not through Python's own HTTP: Maven's
conventions hold, and nothing but Java is needed. The whole list is in the lock, so no POM is read,
which takes a quarter of the time of a resolution.
"""

import hashlib
import importlib.util
import os
import re
import ssl
import struct
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from urllib.parse import urlsplit
from xml.sax.saxutils import quoteattr

from tallystick.errors import OptionError
from tallystick.host.java import java_home
from tallystick.host.user_cache import cache_directory, one_process_at_a_time

OnJar = Callable[[int, int], None]
PASSWORD = "changeit"  # Java's own default: the store holds public certificates only
CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def java_truststore(bundle: Path, target: Path) -> list[str]:
    """Write the certificates of a PEM bundle as a JKS file; return Java's options to use it."""
    certificates = CERTIFICATE.findall(bundle.read_text(errors="replace"))
    data = struct.pack(">III", 0xFEEDFEED, 2, len(certificates))  # magic, version, entries
    for number, certificate in enumerate(certificates):
        der = ssl.PEM_cert_to_DER_cert(certificate)
        alias = b"%d" % number
        data += struct.pack(">IH", 2, len(alias)) + alias  # 2: a trusted certificate
        data += struct.pack(">QH", 0, 5) + b"X.509" + struct.pack(">I", len(der)) + der
    salt = PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite"  # the format asks for it
    target.write_bytes(data + hashlib.sha1(salt + data).digest())
    return [
        f"-Djavax.net.ssl.trustStore={target}",
        "-Djavax.net.ssl.trustStoreType=JKS",
        f"-Djavax.net.ssl.trustStorePassword={PASSWORD}",
    ]


KAFKA_VERSIONS = ("3.7.2", "3.9.1", "4.0.0", "4.3.0")
"""The versions with a lock file, the oldest first; the last is the default."""
VERSION_VARIABLE = "TALLYSTICK_KAFKA_VERSION"
FETCH_TIMEOUT_S = 900.0
LOOK_S = 0.2
"""The interval at which the jars that have come are counted."""
REPORT_LINES = 12
"""The lines of Ivy's own report in an error: its summary of problems stands at the end."""

SETTINGS = """\
<ivysettings>
  <settings defaultResolver="maven"/>
  <caches defaultCacheDir={cache}/>
  <resolvers><ibiblio name="maven" m2compatible="true" usepoms="false"
    useMavenMetadata="false"{root}/></resolvers>
</ivysettings>
"""


@dataclass(frozen=True, slots=True)
class Jar:
    """One line of the lock file."""

    digest: str
    group: str
    artifact: str
    version: str

    @property
    def name(self) -> str:
        """The name of the jar file, as in Maven."""
        return f"{self.artifact}-{self.version}.jar"


def _ignore(*_: int) -> None:
    return


def chosen_version(requested: str | None) -> str:
    """Return Kafka's version: the given one, else TALLYSTICK_KAFKA_VERSION, else the newest.

    Raises:
        OptionError: There is no lock file for that version.
    """
    version = requested or os.environ.get(VERSION_VARIABLE) or KAFKA_VERSIONS[-1]
    if version not in KAFKA_VERSIONS:
        where = (
            f"EmbeddedKafka(version={requested!r})"
            if requested
            else f"{VERSION_VARIABLE}={version}"
        )
        raise OptionError(f"{where}: expected one of {', '.join(KAFKA_VERSIONS)}.")
    return version


def lock_file(version: str) -> Path:
    """Return the path of a version's lock file."""
    return Path(__file__).with_name(f"kafka-{version}.sha256.txt")


def locked_jars(version: str) -> tuple[Jar, ...]:
    """Return the jars that make up a broker, in the order of the class path."""
    lines = (line.split() for line in lock_file(version).read_text().splitlines())
    return tuple(Jar(digest, *coordinates.split(":")) for digest, coordinates in lines)


def kafka_classpath(version: str, on_jar: OnJar = _ignore) -> str:
    """Return the class path of a broker, every jar of it verified; fetched first if need be.

    Args:
        version: Kafka's.
        on_jar: called during the fetch with the number of jars so far, and of all.

    Raises:
        OptionError: The jars are not in the cache (or damaged there) and cannot be fetched.
    """
    directory = jar_folder(version)
    if damaged_jars(directory, version):
        with one_process_at_a_time(directory):
            if problems := damaged_jars(directory, version):  # they were not fetched meanwhile
                _install(directory, version, problems, on_jar)
    return os.pathsep.join(str(directory / jar.name) for jar in locked_jars(version))


def fetch_kafka(progress: Callable[[str], AbstractContextManager[OnJar]]) -> None:
    """Download the chosen Kafka's jars unless their folder exists; a broker's start verifies jars.

    Args:
        progress: shows a text and a count until the end of the block.
    """
    version = chosen_version(None)
    if not jar_folder(version).exists():
        with progress(f"downloading Apache Kafka {version}") as on_jar:
            kafka_classpath(version, on_jar)


def jar_folder(version: str) -> Path:
    """Return the folder of a version's jars, whether it exists or not."""
    identity = sha256(lock_file(version).read_bytes()).hexdigest()[:12]
    return cache_directory() / f"kafka-{version}-{identity}"


def damaged_jars(directory: Path, version: str) -> list[str]:
    """Return a line for each jar that is missing, or differs from the lock file."""
    problems = []
    for jar in locked_jars(version):
        try:
            with open(directory / jar.name, "rb") as file:
                digest = file_digest(file, "sha256").hexdigest()
        except OSError as error:
            problems.append(f"{jar.name}: {error.strerror}")
            continue
        if digest != jar.digest:
            problems.append(f"{jar.name}: SHA-256 is {digest}, expected {jar.digest}")
    return problems


def _install(directory: Path, version: str, problems: list[str], on_jar: OnJar) -> None:
    """Fetch the jars into a folder beside, verify them, and swap the folder in by renames."""
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory.parent) as work:
        fetched = Path(work, "jars")
        report = _fetch(Path(work), fetched, version, on_jar)
        if still := damaged_jars(fetched, version):
            raise OptionError(
                f"Kafka {version} is needed for the embedded broker. "
                f"{directory} was tried first: {_first(problems)}. Then Maven: {_first(still)}. "
                f"Connect to the network once (HTTPS_PROXY, SSL_CERT_FILE and TALLYSTICK_MAVEN_URL "
                f"for a mirror are honoured), or copy that folder from a machine that has it. "
                f"Ivy said:\n{report}"
            )
        if directory.exists():
            os.rename(directory, Path(work, "damaged"))
        os.rename(fetched, directory)


def _first(problems: list[str]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0] + more


def _fetch(work: Path, target: Path, version: str, on_jar: OnJar) -> str:
    """Run Ivy; return the end of its report. The files show whether Ivy succeeded."""
    target.mkdir()
    settings, modules = work / "ivysettings.xml", work / "ivy.xml"
    mirror = os.environ.get("TALLYSTICK_MAVEN_URL")
    root = f" root={quoteattr(mirror)}" if mirror else ""
    settings.write_text(SETTINGS.format(cache=quoteattr(str(work / "cache")), root=root))
    modules.write_text(_module_list(version))
    command = [str(java_home() / "bin" / "java"), "-Xmx256m", *_network_options(work)]
    command += ["-cp", str(_ivy_jar()), "org.apache.ivy.Main"]
    command += ["-settings", str(settings), "-ivy", str(modules)]
    command += ["-retrieve", f"{target}/[artifact]-[revision].[ext]"]
    report, total, deadline_s = work / "report", len(locked_jars(version)), time.monotonic()
    deadline_s += FETCH_TIMEOUT_S
    with report.open("wb") as out:
        ivy = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            while ivy.poll() is None:
                on_jar(sum(1 for _ in (work / "cache").rglob("*.jar")), total)
                if time.monotonic() > deadline_s:
                    return f"nothing for {FETCH_TIMEOUT_S:.0f} s; it was stopped."
                with suppress(subprocess.TimeoutExpired):
                    ivy.wait(LOOK_S)
        finally:
            ivy.kill()
            ivy.wait()
    return "\n".join(report.read_text(errors="replace").splitlines()[-REPORT_LINES:])


def _module_list(version: str) -> str:
    dependencies = "".join(
        f'<dependency org="{jar.group}" name="{jar.artifact}" rev="{jar.version}" '
        f'transitive="false"/>\n'
        for jar in locked_jars(version)
    )
    return (
        '<ivy-module version="2.0"><info organisation="tallystick" module="embedded-kafka"/>\n'
        f"<dependencies>\n{dependencies}</dependencies></ivy-module>\n"
    )


def _ivy_jar() -> Path:
    spec = importlib.util.find_spec("pyspark")  # not imported: the jar is all we want of it
    jars = [
        jar
        for folder in (spec and spec.submodule_search_locations) or []
        for jar in sorted(Path(folder, "jars").glob("ivy-*.jar"))
    ]
    if not jars:
        raise OptionError(
            "The Kafka jars are fetched through Ivy, which PySpark ships as jars/ivy-*.jar, and "
            "there is none in this environment: install the full package, `pip install pyspark`."
        )
    return jars[-1]


def _network_options(work: Path) -> list[str]:
    """Return Java's options for the proxy and the CAs in the environment."""
    options = []
    if proxy := urllib.request.getproxies().get("https"):
        at = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        options += [f"-Dhttps.proxyHost={at.hostname}", f"-Dhttps.proxyPort={at.port or 443}"]
    certificates = os.environ.get("SSL_CERT_FILE")
    if certificates and os.path.isfile(certificates):
        options += java_truststore(Path(certificates), work / "truststore.jks")
    return options
