"""A Log4j configuration for the JVMs launched here: warnings, without those of every start.

Left out are warnings that come at every start and name nothing to be done, and of each message what
comes after its first line; the environment variable `TALLYSTICK_TRACEBACKS=full` gives all back.
A configuration of the user's own is used instead.
"""

import os
import shlex
from pathlib import Path

from tallystick.host.excepthook import shows_full_tracebacks

CONFIGURATION = Path(__file__).with_name("log4j2.properties")


def options(spark_options: str, *, is_local: bool) -> str:
    """Return the JVM options of our configuration; "" where the user has one, or wants all lines.

    Args:
        spark_options: the options of Spark that are written outside of the program.
        is_local: True if the JVM runs the tasks itself.
    """
    home = os.environ.get("SPARK_HOME")
    folder = os.environ.get("SPARK_CONF_DIR") or (home and Path(home, "conf"))
    has_own = folder and any(Path(folder).glob("log4j2.*"))
    if has_own or "log4j" in spark_options or shows_full_tracebacks():
        return ""
    tasks = " -Dtallystick.tasks=off" * is_local
    return f"-Dlog4j2.configurationFile={shlex.quote(str(CONFIGURATION))}{tasks}"
