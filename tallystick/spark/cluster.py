"""A pipeline's access to Spark: the context, the settings, and the engine that runs its tasks.

A session is made of the context only where one is needed: it takes seconds.
"""

import os
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import SparkSession

from tallystick.codec import ddl
from tallystick.errors import NeedsSparkError, OptionError
from tallystick.spark.context import OWN
from tallystick.spark.jvm import quiet_end
from tallystick.state.schema import arrow_schema


class Cluster:
    """The Spark application that runs the tasks of a pipeline.

    Args:
        context: gives the context, and waits until it exists.
        given: the session that the user has; None: no session, or none yet.
        close: called when the pipeline is over.
        is_there: there is, or will be, a context; else nothing can run, and little is known.
    """

    def __init__(
        self,
        context: Callable[[], SparkContext],
        given: SparkSession | None = None,
        close: Callable[[], None] = lambda: None,
        *,
        is_there: bool = True,
    ) -> None:
        self.is_there = is_there
        self._context = context
        self._given = given
        self._close = close
        self._is_closed = False

    @classmethod
    def of(
        cls,
        spark: SparkSession | SparkContext | None,
        name: str = "tallystick",
        *,
        is_light: bool = False,
    ) -> "Cluster":
        """Take what a user gave.

        Args:
            spark: a session, a context, or nothing: then the context of this process, or one that
                is made now, and ends with the last pipeline that uses it.
            name: for Spark to show, if a context is made.
            is_light: no rows will pass through its JVM, if one is made.

        Raises:
            OptionError: it is something else, such as a session of Spark Connect, or was stopped.
        """
        given = getattr(spark, "_sc", spark)  # a session has it; one of Spark Connect has none
        if isinstance(given, SparkContext) and getattr(given, "_jsc", None) is None:
            raise OptionError(
                "spark=…: its SparkContext was stopped, and none can be started again: make a new "
                "session, ts.spark_session(…), or leave spark= out"
            )
        if isinstance(spark, SparkSession):
            return cls(lambda: spark.sparkContext, spark)
        if isinstance(spark, SparkContext):
            return cls(lambda: spark)
        if spark is not None:
            raise OptionError(
                f"spark={spark!r}: expected a classic SparkSession, a SparkContext, or nothing"
            )
        if (active := SparkContext._active_spark_context) is not None and not OWN.is_used:
            return cls(lambda: active)
        return cls(OWN.take(name, is_light=is_light).result, close=OWN.give_back)

    @classmethod
    def at_hand(cls, spark: SparkSession | SparkContext | None) -> "Cluster":
        """Return the cluster of a given session or of the active context; never make a context.

        Raises:
            OptionError: see `of`.
        """
        spark = spark or SparkContext._active_spark_context
        return cls.absent() if spark is None else cls.of(spark)

    @classmethod
    def absent(cls) -> "Cluster":
        """Return a cluster that is not there: whatever needs Spark raises an error."""
        return cls(_no_context, is_there=False)

    @cached_property
    def context(self) -> SparkContext:
        """The context; waits for it."""
        context = self._context()
        run_this_python(context)
        quiet_end(context)
        return context

    @property
    def has_session(self) -> bool:
        """True if the user gave a session."""
        return self._given is not None

    @property
    def time_zone(self) -> str | None:
        """The time zone of the session that the user gave; None: no session was given."""
        return None if self._given is None else self._given.conf.get("spark.sql.session.timeZone")

    @cached_property
    def session(self) -> SparkSession:
        """The session; made of the context if the user gave none."""
        if self._given is not None:
            return self._given
        assert self.context is not None, "a session is made of the context that is there"
        return SparkSession.builder.getOrCreate()

    @cached_property
    def parallelism(self) -> int:
        """The number of tasks that run at a time; 1 without Spark."""
        return self.context.defaultParallelism if self.is_there else 1

    @cached_property
    def conf(self) -> Mapping[str, str]:
        """The settings of the context, without settings of a session only."""
        return dict(self.context.getConf().getAll()) if self.is_there else {}

    def columns(self, text: str, name: str) -> pa.Schema:
        """Read DDL as columns; have Spark read DDL that only Spark understands.

        Args:
            text: the DDL.
            name: of the columns, for errors.

        Raises:
            OptionError: the DDL cannot be read, or Arrow has no such type.
        """
        try:
            columns = ddl.columns(text, name, timestamp=self._timestamp)
        except ddl.DdlError as error:
            columns = ddl.as_columns(self._by_spark(text, error))
        return arrow_schema(columns, name)

    def close(self) -> None:
        """End the context of the finished pipeline, if it is ours and not in use."""
        if not self._is_closed:
            self._is_closed = True
            self._close()

    @property
    def _timestamp(self) -> str:
        if self._given is None:
            return "timestamp"
        kind = self._given.conf.get("spark.sql.timestampType", "TIMESTAMP_LTZ")
        return "timestamp_ntz" if str(kind).upper() == "TIMESTAMP_NTZ" else "timestamp"

    def _by_spark(self, text: str, error: ddl.DdlError) -> Any:
        try:
            return self.context._parse_ddl(text).jsonValue()
        except Exception:
            raise error from None


def _no_context() -> SparkContext:
    raise NeedsSparkError(
        "this needs Spark, whose SQL has to be asked about columns: start "
        "Spark first, or give a session, explain(spark)"
    )


RESIDENT, JOBS = "resident", "jobs"
"""Tasks stay in the same processes, or each epoch is a Spark job."""
SLOTS_TO_SHARE = 4
"""With this many slots or more, resident tasks leave one for other jobs."""


class Execution(NamedTuple):
    """The engine that runs the tasks of a pipeline.

    Args:
        kind: `RESIDENT` or `JOBS`.
        reason: why no resident tasks do; empty: they do.
    """

    kind: str
    reason: str


def execution_of(
    pipeline: str, wanted: str | None, conf: Mapping[str, str], *, has_transform: bool
) -> Execution:
    """Choose between resident tasks and Spark jobs.

    Args:
        pipeline: the name.
        wanted: "resident" or "jobs", as the user wants it; None: resident where possible.
        conf: the settings of Spark.
        has_transform: the pipeline has steps that Spark plans.

    Raises:
        OptionError: the user wants resident tasks, which are not possible here.
    """
    why = "Spark plans the transform steps for each epoch" if has_transform else obstacle(conf)
    if wanted == RESIDENT and why:
        raise OptionError(
            f"pipeline {pipeline!r}: execution='resident' does not work here, as {why}. Leave "
            f"execution out, or set execution='jobs'"
        )
    if wanted == JOBS or why:
        return Execution(JOBS, why or "execution='jobs'")
    return Execution(RESIDENT, "")


def obstacle(conf: Mapping[str, str]) -> str:
    """Return what keeps tasks from staying resident with these settings of Spark; empty: nothing.

    Connections between members are authenticated and not encrypted, and frames that overflow lie
    on disk as they are: where Spark's settings ask for encryption, its own shuffle is used.
    """
    for name, why in (
        ("spark.network.crypto.enabled", "resident tasks do not encrypt what they exchange"),
        ("spark.ssl.rpc.enabled", "resident tasks do not encrypt what they exchange"),
        ("spark.io.encryption.enabled", "resident tasks do not encrypt what overflows to disk"),
        ("spark.dynamicAllocation.enabled", "resident tasks would hold all executors for ever"),
    ):
        if conf.get(name, "false").lower() == "true":
            return f"{name}=true: {why}"
    return ""


def tasks_at_once(cluster: Cluster, execution: Execution) -> int:
    """Return how many tasks of a pipeline run at the same time: its default parallelism."""
    slots = cluster.parallelism
    if not cluster.is_there or execution.kind == JOBS or is_local(cluster.context):
        return slots
    return members_max(slots)


def members_max(slots: int) -> int:
    """Return how many resident tasks fit: each holds a slot, and one is left free."""
    return slots - 1 if slots >= SLOTS_TO_SHARE else slots


def run_this_python(context: SparkContext) -> None:
    """Let the tasks on this machine run the Python of this program, unless the user named another.

    Spark runs `python3` of the PATH, which lacks the packages if a venv is not activated.
    """
    if is_local(context) and context.pythonExec == "python3" and "PYSPARK_PYTHON" not in os.environ:
        context.pythonExec = sys.executable


def is_local(context: SparkContext) -> bool:
    """True if all tasks run on the driver's host, in its own JVM."""
    return (context.master or "").startswith("local")
