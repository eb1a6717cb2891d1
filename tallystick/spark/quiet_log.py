"""A Log4j configuration for the JVMs launched here, and the levels of py4j and PySpark beside it.

Warnings are logged, without those that come at every start and name nothing to be done, and of each
message only the first line; the environment variable `TALLYSTICK_TRACEBACKS=full` gives all back.
A configuration of the user's own is used instead.
"""

import logging
import os
import shlex
import warnings
from pathlib import Path

from tallystick.host.excepthook import shows_full_tracebacks

PANDAS = "PySpark does not yet fully support pandas"
"""PySpark warns so at the first call of its JVM, whether pandas is used or not."""
CONFIGURATION = Path(__file__).with_name("log4j2.properties")


def set_up(spark_options: str, *, is_local: bool) -> str:
    """Quiet py4j and PySpark in this process, and return the JVM options of our configuration.

    Where the user has a configuration, or wants all lines, nothing is done, and "" returned.

    Args:
        spark_options: the options of Spark that are written outside of the program.
        is_local: True if the JVM runs the tasks itself.
    """
    home = os.environ.get("SPARK_HOME")
    folder = os.environ.get("SPARK_CONF_DIR") or (home and Path(home, "conf"))
    has_own = folder and any(Path(folder).glob("log4j2.*"))
    if has_own or "log4j" in spark_options or shows_full_tracebacks():
        return ""
    _quiet_driver()
    tasks = " -Dtallystick.tasks=off" * is_local
    return f"-Dlog4j2.configurationFile={shlex.quote(str(CONFIGURATION))}{tasks}"


def _quiet_driver() -> None:
    """Silence py4j about closed connections, and PySpark about pandas 3."""
    logger = logging.getLogger("py4j")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", PANDAS, FutureWarning)
