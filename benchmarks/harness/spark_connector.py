"""The jars of Spark's own Kafka connector: fetched once, checked against a lock, never shipped.

They come as those of the embedded broker do (`tallystick.testing.jars`): through the Ivy that
PySpark carries, from the mirror that `TALLYSTICK_MAVEN_URL` names, into the user's cache. The
connector of 4.2.0 runs in Spark 4.3; its token provider is older than it, because none of 4.2.0
can be had.
"""

import os
import subprocess
import tempfile
from hashlib import file_digest
from pathlib import Path
from xml.sax.saxutils import quoteattr

from tallystick.errors import OptionError
from tallystick.host.java import java_home
from tallystick.host.user_cache import cache_directory, one_process_at_a_time
from tallystick.testing import jars
from tallystick.testing.jars import Jar

CONNECTOR_VERSION = "4.2.0"
LOCK_FILE = Path(__file__).with_name(f"spark-connector-{CONNECTOR_VERSION}.sha256.txt")
FORMAT = "kafka"


def connector_jars() -> list[Path]:
    """The jars that a session needs in `spark.jars` for `format("kafka")`; fetched if need be.

    Raises:
        OptionError: they are not in the cache (or damaged there) and cannot be fetched.
    """
    directory = cache_directory() / f"spark-connector-{CONNECTOR_VERSION}"
    wanted = _locked()
    with one_process_at_a_time(directory):
        if not all(_is_intact(directory, jar) for jar in wanted):
            _fetch(wanted, directory)
    return [directory / jar.name for jar in wanted]


def _locked() -> list[Jar]:
    lines = (line.split() for line in LOCK_FILE.read_text().splitlines())
    return [Jar(digest, *coordinates.split(":")) for digest, coordinates in lines]


def _is_intact(directory: Path, jar: Jar) -> bool:
    try:
        with open(directory / jar.name, "rb") as file:
            return file_digest(file, "sha256").hexdigest() == jar.digest
    except FileNotFoundError:
        return False


def _fetch(wanted: list[Jar], directory: Path) -> None:
    """Fetch into a folder beside, check, and move jar by jar: each appears whole or not at all."""
    directory.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory.parent) as work:
        fetched = Path(work, "jars")
        output = _retrieve(wanted, Path(work), fetched)
        wrong = [jar.name for jar in wanted if not _is_intact(fetched, jar)]
        if wrong:
            raise OptionError(
                f"Spark's Kafka connector is needed for this comparison, and {', '.join(wrong)} "
                f"could not be fetched as locked. Connect to the network once (HTTPS_PROXY, "
                f"SSL_CERT_FILE and TALLYSTICK_MAVEN_URL for a mirror are honoured), or copy "
                f"{directory} from a machine that has it. Ivy said:\n{output}"
            )
        for jar in wanted:
            os.replace(fetched / jar.name, directory / jar.name)


def _retrieve(wanted: list[Jar], work: Path, target: Path) -> str:
    """Let Ivy fetch; return the end of what it says."""
    settings, modules = work / "ivysettings.xml", work / "ivy.xml"
    mirror = os.environ.get("TALLYSTICK_MAVEN_URL")
    root = f" root={quoteattr(mirror)}" if mirror else ""
    settings.write_text(jars.SETTINGS.format(cache=quoteattr(str(work / "cache")), root=root))
    dependencies = "".join(
        f'<dependency org="{jar.group}" name="{jar.artifact}" rev="{jar.version}" '
        f'transitive="false"/>'
        for jar in wanted
    )
    modules.write_text(
        '<ivy-module version="2.0"><info organisation="tallystick" module="spark-connector"/>'
        f"<dependencies>{dependencies}</dependencies></ivy-module>"
    )
    command = [str(java_home() / "bin" / "java"), "-Xmx256m", *jars._network_options(work)]
    command += ["-cp", str(jars._ivy_jar()), "org.apache.ivy.Main"]
    command += ["-settings", str(settings), "-ivy", str(modules)]
    command += ["-retrieve", f"{target}/[artifact]-[revision].[ext]"]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=jars.FETCH_TIMEOUT_S, check=False
    )
    return (ran.stdout + ran.stderr)[-2000:]
